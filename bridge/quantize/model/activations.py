"""Activations that are not needed now: in memory as far as a limit goes, the others in files of a temporary folder."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

from bridge.errors import BridgeError, parameter
from bridge.system.cpu.memory import free_memory


class StoredActivation:
    """A tensor that is not needed now: in the host's memory, or in a file; in the store's dtype."""

    def __init__(self, x: torch.Tensor, store: "ActivationStore | None" = None) -> None:
        self._device, self._dtype, self._store = x.device, x.dtype, store
        stored = x.to("cpu", x.dtype if store is None or store.dtype is None else store.dtype)
        self._size = stored.nbytes
        self._file = None if store is None else store.file_for(self._size)
        self._x: torch.Tensor | None = stored
        if self._file is not None:
            _save(stored, self._file)
            self._x = None

    def value(self) -> torch.Tensor:
        """The tensor, in the dtype that it came in."""
        x = self._x
        if x is None:
            assert self._file is not None
            x = torch.load(self._file, weights_only=True)
        return x.to(self._device, self._dtype)

    def drop(self) -> None:
        """Free the memory, or remove the file."""
        if self._x is not None and self._store is not None:
            self._store.free(self._size)
        self._x = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class ActivationStore:
    """A place for activations. Use as a context manager: the files are removed at its end.

    inside  a folder that exists, in which a temporary one is made once it is needed; None: everything stays in memory
    memory  bytes that activations may take there; None: any number, or, with a folder, none
    dtype   that they are kept in; None: their own
    """

    def __init__(self, inside: str | Path | None, memory: int | None = None, dtype: torch.dtype | None = None) -> None:
        self._inside, self.dtype = inside, dtype
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = self._used = 0
        self._memory = (0 if inside is not None else float("inf")) if memory is None else memory
        self._spare = (free_memory() or float("inf")) / 2 if memory is None else memory

    def file_for(self, size: int) -> Path | None:
        """A file for an activation of so many bytes; None: it stays in memory."""
        if self._inside is None or self._used + size <= self._memory:
            self._used += size
            return None
        if self._folder is None:
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="activations-", dir=self._inside)
            except OSError as problem:
                raise BridgeError(
                    f"{self._inside}: cannot create a folder for activations there ({problem.strerror})"
                ) from None
        self._files += 1
        return Path(self._folder.name) / f"{self._files}.pt"

    def free(self, size: int) -> None:
        """So many bytes are no longer taken."""
        self._used -= size

    def has_room(self, size: int) -> bool:
        """Whether to keep so many bytes that can be computed again: in a folder, or within the limit.

        Without either, within half of the memory that was free at first.
        """
        return self._inside is not None or self._used + size <= self._spare

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder:
            with suppress(OSError):
                self._folder.cleanup()


def _save(x: torch.Tensor, file: Path) -> None:
    """Write activations to a file; BridgeError where that fails."""
    try:
        torch.save(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x, file)
    except (OSError, RuntimeError) as problem:  # torch's writer raises the latter where a disk is full
        raise BridgeError(
            f"{file.parent}: activations cannot be written ({str(problem).splitlines()[0]}); "
            f"free disk space, or choose another folder: {parameter('offload')}"
        ) from None

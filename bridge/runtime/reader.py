"""A GGUF whose tensors multiply: `bridge.open_gguf`. The files are opened by `bridge.gguf_file.reader`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from bridge.errors import BridgeError
from bridge.gguf_file.header import Metadata
from bridge.gguf_file.reader import read_gguf
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.options import checked
from bridge.system.text import meant


class MissingTensor(BridgeError, KeyError):
    """The GGUF has no tensor of that name. It is a KeyError too, for `Mapping.get` and whoever else expects one."""

    __str__ = BridgeError.__str__  # KeyError's would quote the message


class GGUFFile(Mapping[str, QuantTensor]):
    """An open GGUF with all its shards: a mapping from tensor names, in the file's order, to `QuantTensor`s.

    path      as it was given
    metadata  a mapping of the metadata keys to their values
    tensors   the tensors as a dict

    `file[name]` raises MissingTensor, a BridgeError, for an unknown name. A closed file has no tensors.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, QuantTensor]

    def __init__(self, path: str | Path, load: str = "mmap"):
        self.path = Path(path)
        stored = read_gguf(self.path, load)
        self.metadata = stored.metadata
        self.tensors = {}
        for name, t in stored.tensors.items():
            self.tensors[name] = QuantTensor(name, t.type, t.shape, t.raw)
            self.tensors[name].factors = stored.scales_of(t)

    @property
    def arch(self) -> str:
        """general.architecture, for instance "llama"."""
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise BridgeError(f"{self.path}: general.architecture is missing; this is not a model")
        return arch

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.values())

    def __getitem__(self, name: str) -> QuantTensor:
        try:
            return self.tensors[name]
        except KeyError:
            near = meant(name, self.tensors) if isinstance(name, str) else ""
            others = f"; it has {len(self.tensors)} others" if self.tensors else "; it has none, or was closed"
            raise MissingTensor(f"{self.path}: no tensor {name}{near or others}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def close(self) -> None:
        """Forget the tensors; the file stays mapped until the last of them is gone."""
        self.metadata.load()
        self.tensors = {}

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing changes it, so copies of what holds it share it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.nbytes / 1e6:.1f} MB)"


@checked
def open_gguf(path: str | Path, load: str = "mmap") -> GGUFFile:
    """Open a GGUF, with all its shards.

    path  the file, or any of its shards
    load  "mmap" maps the files: pages are read when they are used, and the process ends with SIGBUS if a file is
          truncated meanwhile. "memory" reads the whole files now

    Returns a `bridge.runtime.reader.GGUFFile`. Raises BridgeError if a file is missing, truncated, damaged or of an
    unknown version.
    """
    return GGUFFile(path, load)

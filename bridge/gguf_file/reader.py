"""Opens a GGUF: maps all its files, checks their headers, and returns the tensors as views of the mapping.

Opening costs a few milliseconds plus a walk over the vocabulary (40 ms for 150,000 tokens); weights are read from disk
when they are first used. A mapping lives as long as any tensor or undecoded metadata that refers to it.

A file that is truncated while it is mapped ends the process with SIGBUS when a page that is gone is used, in the middle
of a kernel: no check can prevent it, and no error can be raised there. `load="memory"` reads the files instead.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks import MATRIX_SCALED
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.header import Metadata, check_basis, read_header
from bridge.system.storage.files import HEAD, kind_of_contents, missing, shards_of

LOADS = ("mmap", "memory")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file has it.

    type   as gguf.GGMLQuantizationType spells it
    shape  slowest dimension first, [out, in]: the reverse of the file's order
    raw    uint8, all its bytes
    file   that it is in, from byte `start` on
    """

    name: str
    type: str
    shape: tuple[int, ...]
    raw: np.ndarray
    file: Path
    start: int

    def read(self, first: int, stop: int) -> np.ndarray:
        """uint8: bytes first..stop, read into a new array. Pages of `raw` that were used count as resident memory.

        Raises BridgeError if the file was truncated since it was opened.
        """
        try:
            data = np.fromfile(self.file, np.uint8, stop - first, offset=self.start + first)
        except OSError as problem:
            raise BridgeError(f"{self.file}: cannot be read ({problem.strerror}); check the disk") from problem
        if len(data) < stop - first:
            raise BridgeError(f"{self.file}: ends within {self.name}; download the file again")
        return data


@dataclass(frozen=True, eq=False)
class StoredModel:
    """The content of a GGUF: the metadata of its first file, which has it all, and the tensors of all files by name."""

    files: list[Path]
    metadata: Metadata
    tensors: dict[str, StoredTensor]

    def scales_of(self, tensor: StoredTensor) -> np.ndarray | None:
        """What multiplies a tensor of MATRIX_SCALED: float32, one number or one a matrix; None: no scale.

        Raises BridgeError if the tensor of that name cannot be the scale.
        """
        scale = self.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        if tensor.type not in MATRIX_SCALED or scale is None or scale is tensor:
            return None
        matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if scale.type != "F32" or scale.raw.size not in (4, 4 * matrices):
            raise BridgeError(
                f"{self.files[0]}: {scale.name} is {scale.type} {list(scale.shape)}, not a scale of {tensor.name}; "
                "convert or download it again"
            )
        return scale.raw.view(np.float32)


def read_gguf(path: str | Path, load: str = "mmap", rotated: bool = False) -> StoredModel:
    """Open a GGUF file, or all shards of one, any of which may be named.

    load     "mmap" maps the files; "memory" reads them, for files that others may truncate or overwrite meanwhile
    rotated  whether its weights may be in a rotated basis: for a caller that only lists them

    Raises BridgeError if a file is missing, truncated, damaged or of an unknown version.
    """
    if load not in LOADS:
        raise BridgeError(f"unknown load {load!r}: choose {' or '.join(LOADS)}")
    files = shards(Path(path))
    headers = [_read(file, load) for file in files]
    metadata = headers[0][0]
    if not rotated:
        for file, (shard_metadata, _) in zip(files, headers, strict=True):
            check_basis(shard_metadata, file)
    if len(files) == 1 and (metadata.get("split.count") or 1) != 1:
        raise BridgeError(f"{path}: one of {metadata['split.count']} shards, but its name does not say which")
    tensors: dict[str, StoredTensor] = {}
    for file, (_, stored) in zip(files, headers, strict=True):
        for tensor in stored:
            if tensor.name in tensors:
                raise BridgeError(f"{file}: {tensor.name} is also in another shard; download the files again")
            tensors[tensor.name] = tensor
    return StoredModel(files, metadata, tensors)


def expect_model(metadata: Mapping[str, Any], path: Path) -> None:
    """BridgeError where a GGUF is something else than a language model: an adapter, an importance matrix, a tower."""
    kind, arch = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind == "adapter":
        what = "is an adapter (LoRA), not a model; give its model, and the adapter to `gguf-bridge run --lora`"
    elif kind == "imatrix":
        what = f"is an importance matrix, not a model; {parameter('imatrix')} takes it"
    elif kind == "mmproj" or arch == "clip":
        what = "is a tower for images or sound (mmproj), not a language model; give the GGUF that it belongs to"
    elif not isinstance(arch, str):
        what = "general.architecture is missing; this is not a model"
    else:
        return
    raise BridgeError(f"{path}: {what}")


def shards(path: Path) -> list[Path]:
    """The files of a GGUF, in order; `path` is the only one or any shard. BridgeError if one is missing."""
    files = [path.with_name(name) for name in shards_of(path.name, r"\.gguf")]
    if not files:
        return [path]
    lost = next((file for file in files if not file.is_file()), None)
    if lost:
        raise BridgeError(f"{lost}: this shard is missing; all {len(files)} must be in one folder")
    return files


def _read(path: Path, load: str) -> tuple[Metadata, list[StoredTensor]]:
    data = _open(path, load)
    metadata, entries = read_header(data, path)
    return metadata, [
        StoredTensor(e.name, e.type, e.shape, np.frombuffer(data, np.uint8, e.nbytes, e.start), path, e.start)
        for e in entries
    ]


def _open(path: Path, load: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                head = file.read(HEAD)
                known = kind_of_contents(head) if head[:4] != b"GGUF" else None
                raise BridgeError(f"{path}: {known or 'not a GGUF file (shorter than a header)'}")
            if load == "memory":
                return file.read()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise missing(path) from None
    except MemoryError:
        fact, instead = f"reading {size / 1e9:.1f} GB takes more memory than there is", parameter("load", LOADS[0])
        raise BridgeError(f"{path}: {fact}; use {instead}") from None
    except (OSError, ValueError) as problem:
        if os.path.isdir(path):  # Windows says that permission is denied
            raise BridgeError(f"{path}: is a folder, not a GGUF file; `gguf-bridge convert` makes one") from None
        raise BridgeError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from problem

"""Opening a GGUF: the file is mapped, its header read, its tensors are views over the mapping.

Opening costs a few milliseconds plus a walk over the vocabulary (40 ms for 150,000 tokens); weights are
read from disk when they are first used. The mapping lives as long as the file object or any tensor of it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.header import Metadata, TensorInfo, read_header
from bridge.gguf_file.shards import shards
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.files import missing


class GGUFFile:
    """An open GGUF, all shards of it. Indexing by name gives a QuantTensor."""

    path: Path
    metadata: Metadata  # of the first shard, which has it all
    tensors: dict[str, QuantTensor]

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tensors = {}
        files = shards(self.path)
        for number, file in enumerate(files):
            data = _map(file)
            metadata, tensors = read_header(data, file)
            if number == 0:
                self.metadata = metadata
                if len(files) == 1 and (metadata.get("split.count") or 1) != 1:
                    raise BridgeError(
                        f"{file}: one of {metadata['split.count']} shards, but its name does not say which"
                    )
            for info in tensors:
                if info.name in self.tensors:
                    raise BridgeError(f"{file}: {info.name} is also in another shard; download the files again")
                self.tensors[info.name] = _tensor(data, info)
        for tensor in self.tensors.values():
            if tensor.type == "NVFP4":
                tensor.factors = self._factors(tensor)

    def _factors(self, tensor: QuantTensor) -> np.ndarray | None:
        """What multiplies a tensor of NVFP4: the F32 tensor beside it, one number or one for each of its matrices."""
        found = self.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        if found is None or found is tensor:
            return None
        wanted = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if found.type != "F32" or found.raw.size not in (4, 4 * wanted):
            raise BridgeError(
                f"{self.path}: {found.name} is {found.type} {list(found.shape)}, no scale of {tensor.name}; "
                "convert or download it again"
            )
        return found.raw.view(np.float32)

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
        return sum(t.nbytes for t in self.tensors.values())

    def __getitem__(self, name: str) -> QuantTensor:
        try:
            return self.tensors[name]
        except KeyError:
            what = f"it has {len(self.tensors)} others" if self.tensors else "it has none, or was closed"
            raise BridgeError(f"{self.path}: no tensor {name}; {what}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def close(self) -> None:
        """Forget the tensors; the mapping goes when the last of them does."""
        self.metadata.load()
        self.tensors = {}

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.nbytes / 1e6:.1f} MB)"


def open_gguf(path: str | Path) -> GGUFFile:
    """Map a GGUF file, or all shards of one (any of them may be named).

    Raises BridgeError where the file is missing, truncated, damaged or of an unknown version.
    """
    return GGUFFile(path)


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise BridgeError(f"{path}: not a GGUF file (shorter than a header)")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise missing(path) from None
    except IsADirectoryError:
        raise BridgeError(
            f"{path}: is a folder, not a GGUF file; `gguf-bridge convert` makes one from a checkpoint"
        ) from None
    except (OSError, ValueError) as problem:
        raise BridgeError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from problem


def _tensor(data: mmap.mmap, info: TensorInfo) -> QuantTensor:
    raw = np.frombuffer(data, np.uint8, info.nbytes, info.start)
    return QuantTensor(info.name, info.type, info.shape, raw)

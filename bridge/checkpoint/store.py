"""Where tensors lie in a checkpoint's files, and their bytes.

safetensors: 8 bytes n (little-endian), n bytes of JSON {name: {dtype, shape, data_offsets: [a, b]}},
then the data that the offsets count in. The header is parsed here because the library has no bf16
without torch, and because every offset is checked against the file before anything is read. Reads go
into buffers of our own: a memory map would count towards the peak of resident memory.

.bin and .pt files are read by `torch_store`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from bridge.checkpoint.dtypes import NUMPY, OTHER_BITS, as_float32
from bridge.errors import BridgeError
from bridge.files import MAX_SMALL, read_json, refuse_pointer


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its dtype as safetensors names it (F16, BF16, I32, ...), shape and place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int = 0  # of the first byte in the file; meaningless for .bin

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class Store:
    """The tensors of one or several safetensors files; `notes`: what an index says wrongly."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.notes: list[str] = []
        self.files = list(files)
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            self._add(read_header(file))

    def _add(self, tensors: dict[str, TensorInfo]) -> None:
        for name, info in tensors.items():
            if name in self.tensors:
                raise BridgeError(
                    f"{name} is both in {self.tensors[name].file.name} and in {info.file.name}; "
                    "remove the file that is not part of the checkpoint, or give the one file that is"
                )
            self.tensors[name] = info

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The stored elements, or those of rows start..stop alone; bf16 and 8-bit floats as their bits. Thread-safe.

        Raises BridgeError for a dtype that is not read, or a file cut short since it was opened.
        """
        info = self.tensors[name]
        dtype = NUMPY.get(info.dtype)
        if dtype is None:
            raise BridgeError(
                f"{info.file}: {name} has dtype {info.dtype}, which is not supported; save it as F16, BF16 or F32"
            )
        shape = info.shape
        first, stop = rows or (0, shape[0] if shape else 1)
        if rows is not None:
            if not 0 <= first <= stop <= shape[0]:
                raise ValueError(f"rows {rows} of {name} {list(shape)}")
            shape = (stop - first, *shape[1:])
        return self._fetch(info, dtype, shape, first, stop)

    def _fetch(self, info: TensorInfo, dtype: np.dtype, shape: tuple[int, ...], first: int, stop: int) -> np.ndarray:
        out = np.empty(shape, dtype)
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        start = info.offset + first * math.prod(info.shape[1:]) * dtype.itemsize
        try:
            with open(info.file, "rb", buffering=0) as file:
                file.seek(start)
                done = 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise BridgeError(f"{info.file}: ends within {info.name}; download the file again")
                    done += count
        except OSError as problem:
            raise BridgeError(f"{info.file}: cannot be read ({problem.strerror}); check the disk") from problem
        return out

    def view(self, name: str) -> np.ndarray:
        """The stored elements as the file has them, mapped: for reading a few. Raises BridgeError as `read` does."""
        info = self.tensors[name]
        if info.dtype not in NUMPY or not info.nbytes or info.offset + info.nbytes > info.file.stat().st_size:
            return self.read(name)
        return np.memmap(info.file, NUMPY[info.dtype], "r", info.offset, info.shape)

    def read_float(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """float32 of a floating-point tensor, exact but for F64. Thread-safe."""
        info = self.tensors[name]
        if not info.floating:
            raise BridgeError(f"{info.file}: {name} has dtype {info.dtype} where floats are expected")
        return as_float32(self.read(name, rows), info.dtype)

    def close(self) -> None:
        """Let go of whatever is held open."""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; BridgeError unless each lies within it and fits its shape."""

    def damaged(why: str) -> BridgeError:
        return BridgeError(f"{file}: {why}; the file is damaged, download it again")

    try:
        size = file.stat().st_size
        refuse_pointer(file)
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_SMALL, size - 8):
                raise damaged("not a complete safetensors file (its header does not fit)")
            text = stream.read(length)
    except OSError as problem:
        raise BridgeError(f"{file}: cannot be read ({problem.strerror}); is the download complete?") from problem
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged("its header is not JSON") from None
    if not isinstance(header, dict):
        raise damaged("its header is not a table of tensors")
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise damaged(f"the entry of {name} is malformed")
        if not start <= stop <= size - 8 - length:
            raise damaged(f"{name} ends at byte {8 + length + stop} of {size}")
        bits = NUMPY[dtype].itemsize * 8 if dtype in NUMPY else OTHER_BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits != (stop - start) * 8:
            raise damaged(f"{name} has {stop - start} bytes, which do not make {dtype} {list(shape)}")
        tensors[name] = TensorInfo(name, dtype, shape, stop - start, file, 8 + length + start)
    return tensors


def open_store(path: Path, stem: str | None = None) -> Store:
    """The weights of a checkpoint folder: safetensors before .bin before .pt, an index before single files.

    `path` may also be the one file that holds them all. `stem` is the file's name without its ending where
    the config gives one (AutoGPTQ's model_file_base_name). Raises BridgeError where files are missing,
    damaged or lie elsewhere.
    """
    if path.is_file():
        shard = _RUN.fullmatch(path.name)
        if shard and int(shard[3]) > 1:
            raise BridgeError(f"{path}: is one file of several; give the folder that it is in")
        return _open([path])
    for name, ending in (("model", "safetensors"), ("pytorch_model", "bin"), ("model", "pt")):
        stems = [s for s in (stem, name) if s]
        indexes = [path / f"{s}.{ending}.index.json" for s in stems]
        found = [f for f in indexes if f.exists()] or sorted(path.glob(f"*.{ending}.index.json"))
        files = [f for s in stems if (f := path / f"{s}.{ending}").exists()][:1]
        if not files:
            files = [f for f in sorted(path.glob(f"*.{ending}")) if f.name not in NOT_WEIGHTS]
        # consolidated.* is Mistral's own copy of the same weights
        files = [f for f in files if not f.name.startswith("consolidated")] or files
        if found:
            return _indexed(path, found[0], files)
        if files:
            _check_run(files)
            return _open(files)
    already = next(path.glob("*.gguf"), None)
    hint = "is the download complete?" if already is None else f"but {already.name}, which is a GGUF already"
    raise BridgeError(f"{path}: holds neither *.safetensors nor pytorch_model.bin nor *.pt; {hint}")


WEIGHTS = (".safetensors", ".bin", ".pt")  # endings of files with weights
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin", "sentencepiece.bpe.bin", "optimizer.pt",
                "scheduler.pt", "adapter_model.safetensors", "adapter_model.bin"}  # fmt: skip
_RUN = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")  # the name of one of several files


def _open(files: Iterable[Path]) -> Store:
    files = list(files)
    if files[0].suffix == ".safetensors":
        return Store(files)
    from bridge.checkpoint.torch_store import TorchStore

    return TorchStore(files)


def _indexed(folder: Path, index: Path, files: list[Path]) -> Store:
    """The shards that an index names, each within the folder, each with what the index says it holds.

    files  what would be opened without an index: where it is one file and no shard is there, the index came along
           with the unquantized model's config
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise BridgeError(f"{index}: has no weight_map; download it again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        path, windows = PurePosixPath(shard), PureWindowsPath(shard)
        if windows.anchor or path.is_absolute() or ".." in windows.parts or not shard:
            raise BridgeError(f"{index}: names the shard {shard!r} outside its folder; do not trust this checkpoint")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing == shards and len(files) == 1:
        _check_run(files)
        return _open(files)
    if missing:
        raise BridgeError(f"{folder / missing[0]}: named by {index.name} but missing; is the download complete?")
    store = _open(folder / shard for shard in shards)
    for name, shard in weight_map.items():
        if name in store.tensors:
            continue
        if name.rpartition(".")[0].endswith("lm_head"):  # of tied embeddings; where it is needed, it will be missed
            store.notes.append(f"{name} is in {index.name} and in no file")
        else:
            raise BridgeError(f"{folder / shard}: lacks {name}, which {index.name} says it holds; download it again")
    return store


def _check_run(files: list[Path]) -> None:
    """Shards without an index must at least be all there: name-00002-of-00003."""
    for file in files:
        match = _RUN.fullmatch(file.name)
        if match:
            for i in range(1, min(int(match[3]), 100_000) + 1):
                shard = file.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}")
                if not os.path.exists(shard):
                    raise BridgeError(f"{shard}: missing beside {file.name}; is the download complete?")

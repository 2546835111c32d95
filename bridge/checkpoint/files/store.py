"""Locates and reads the tensors of a checkpoint's files.

safetensors: 8 bytes n (little-endian), n bytes of JSON {name: {dtype, shape, data_offsets: [a, b]}},
then the data; offsets count from its start. The header is parsed here because the library has no bf16
without torch, and because every offset is checked against the file before anything is read. Data is
read into new buffers: a memory map would count towards the peak of resident memory.

.bin and .pt files are read by `torch_store`.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bridge.checkpoint.files.dtypes import NUMPY, OTHER_BITS, as_float32
from bridge.errors import BridgeError
from bridge.system.fields import table
from bridge.system.storage.files import MAX_SMALL, first_bytes, is_safetensors, kind_of_contents, refuse_pointer

# what training tools put around a module, and into its tensors' names: torch.compile, FSDP, PEFT
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")
_PREFIXES = ("module.", "base_model.model.")  # of all names: DataParallel's, PEFT's
_ADAPTER = re.compile(r"\.(?:lora_(?:[AB]|embedding_[AB]|magnitude_vector)|modules_to_save)(?:\.|$)")


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its dtype as safetensors names it (F16, BF16, I32, ...), shape and location."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int = 0  # of the first byte in the file; meaningless for .bin

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions and at least one element."""
        return len(self.shape) == 2 and 0 not in self.shape


class Store:
    """The tensors of one or several safetensors files; `notes` lists errors of their index."""

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
                    f"{name} is in both {self.tensors[name].file.name} and {info.file.name}; "
                    "remove the file that is not part of the checkpoint, or give the one file that is"
                )
            self.tensors[name] = info

    def add_below(self, file: Path) -> None:
        """Add the tensors of a further file, with its folder's name before theirs."""
        self.files.append(file)
        before = file.parent.name
        self._add({f"{before}.{name}": replace(i, name=f"{before}.{name}") for name, i in read_header(file).items()})

    def unwrap(self) -> None:
        """Give tensors the names of the model's own modules, with a note, where a training tool's wrappers are in them.

        Raises BridgeError where an adapter's weights lie beside those that they change.
        """
        names = {name: WRAPPERS.sub("", name) for name in self.tensors}
        while shared := _shared_prefix(names.values()):
            names = {stored: name.removeprefix(shared) for stored, name in names.items()}
        changed = [(stored, name) for stored, name in names.items() if stored != name]
        if not changed:
            return
        if adapter := next((name for name in self.tensors if _ADAPTER.search(name)), None):
            raise BridgeError(
                f"{self.tensors[adapter].file}: {adapter} belongs to an adapter that is not merged into the weights "
                "beside it; save the model after PEFT's merge_and_unload()"
            )
        self.rename(names)
        stored, name = changed[0]
        self.notes.append(
            f"{len(changed)} names of tensors have a training tool's prefixes: {stored} is read as {name}"
        )

    def rename(self, names: Mapping[str, str]) -> None:
        """Give the tensors other names: stored -> new. Raises BridgeError where two get the same."""
        renamed: dict[str, TensorInfo] = {}
        for stored, name in names.items():
            if name in renamed:
                raise BridgeError(
                    f"{self.tensors[stored].file}: holds both {stored} and {renamed[name].name}; "
                    f"remove the one that is not {name}"
                )
            renamed[name] = self.tensors[stored]
        self.tensors = {name: replace(info, name=name) for name, info in renamed.items()}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The stored elements, or only rows start..stop; bf16 and 8-bit floats as their bits. Thread-safe.

        Raises BridgeError for an unsupported dtype, or a file truncated since it was opened.
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

    def read_bytes(self, name: str, first: int, stop: int) -> np.ndarray:
        """uint8: bytes first..stop of a tensor as it is stored. Raises BridgeError as `read` does."""
        info = self.tensors[name]
        return self._fetch(replace(info, offset=info.offset + first), np.dtype(np.uint8), (stop - first,), 0, 0)

    def view(self, name: str) -> np.ndarray:
        """The stored elements, memory-mapped, for reading a few. Raises BridgeError as `read` does."""
        info = self.tensors[name]
        if info.dtype not in NUMPY or not info.nbytes or info.offset + info.nbytes > info.file.stat().st_size:
            return self.read(name)
        return np.memmap(info.file, NUMPY[info.dtype], "r", info.offset, info.shape)

    def read_float(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A floating-point tensor as float32; exact except for F64. Thread-safe."""
        info = self.tensors[name]
        if not info.floating:
            raise BridgeError(f"{info.file}: {name} has dtype {info.dtype}, but floats are expected")
        return as_float32(self.read(name, rows), info.dtype)

    def close(self) -> None:
        """Release open resources."""


def _shared_prefix(names: Collection[str]) -> str | None:
    """What all names start with and no model has; None where there is nothing of that kind."""
    for prefix in _PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            return prefix
    # a trainer's own attribute: model.model.layers..., model.lm_head.weight
    inner = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    if len(inner) == len(names) and any(name.startswith("model.layers.") for name in inner):
        return "model."
    return None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises BridgeError unless each lies within it and fits its shape."""

    def damaged(why: str) -> BridgeError:
        return BridgeError(f"{file}: {why}; the file is damaged, download it again")

    try:
        size = file.stat().st_size
        refuse_pointer(file)
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_SMALL, size - 8):
                head = first_bytes(file)
                if not is_safetensors(head) and (other := kind_of_contents(head)) is not None:
                    raise BridgeError(f"{file}: is not safetensors: it {other}")
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
            well_formed = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (TypeError, KeyError, ValueError):
            well_formed = False
        if not well_formed:
            raise damaged(f"the entry of {name} is malformed")
        if not start <= stop <= size - 8 - length:
            raise damaged(f"{name} ends at byte {8 + length + stop} of {size}")
        bits = NUMPY[dtype].itemsize * 8 if dtype in NUMPY else OTHER_BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits != (stop - start) * 8:
            raise damaged(f"{name} has {stop - start} bytes, which do not fit {dtype} {list(shape)}")
        tensors[name] = TensorInfo(name, dtype, shape, stop - start, file, 8 + length + start)
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The texts in the header of a safetensors file that `read_header` accepts."""
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return table(header.get("__metadata__"))


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file's header for tensors (dtype, shape, nbytes) in this order, and the offset of each.

    The header is padded to 8 bytes; tensors are aligned if none follows one of a narrower dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        starts[name] = offset
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}

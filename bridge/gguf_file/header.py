"""The header of a GGUF file. The file is not trusted: every count and length is checked against its size.

    "GGUF"  version u32  tensors u64  pairs u64
    pairs   times  (key, value type u32, value)
    tensors times  (name, dimensions u32, each u64, type u32, offset u64 from the start of the data)
    padding to general.alignment (32), then the data

A string is a u64 length and UTF-8; an array is the type u32 of its items, a u64 count, and the items.

`gguf.GGUFReader` is not used: it trusts what it reads (a hostile count makes it run out of memory) and
builds two numpy arrays per string, which takes two seconds for a vocabulary of 150,000. Here a value is
skipped at first and decoded when it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridge.blocks.tensor_types import type_numbered
from bridge.errors import BridgeError
from bridge.system.storage.files import HEAD, kind_of_contents
from bridge.system.text import few_of

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LEAST_PAIR = 8 + 4 + 1  # bytes: an empty key, a type, a bool
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_WINDOW = 1 << 16  # bytes that are searched at once, for arrays that stay in the processor's cache
_FF_TO_ZERO = bytes([*range(255), 0])
_MAX_WEIGHTS = 1 << 60  # of one tensor, so that its size in bytes stays far from overflowing


class TensorEntry(NamedTuple):
    """The place of a tensor in its file."""

    name: str
    type: str  # as gguf.GGMLQuantizationType spells it
    shape: tuple[int, ...]  # slowest first, [out, in]: the reverse of the file's order
    start: int  # byte in the file
    nbytes: int


class _ValueStart(NamedTuple):
    start: int
    kind: int


class Metadata(Mapping[str, Any]):
    """The key-value pairs as Python values (numbers, str, bool, lists of them), decoded on first use.

    data_start  the byte of the file at which the tensors' data begins
    """

    def __init__(self, header: _Cursor, starts: dict[str, _ValueStart]):
        self.data_start = 0
        self._cursor = header
        self._starts = starts
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            entry = self._starts[key]
            self._values[key] = self._cursor.value(entry.start, entry.kind)
        return self._values[key]

    def kind(self, key: str) -> tuple[int, int | None]:
        """The GGUF value type of a key, and that of its items if it is an array."""
        entry = self._starts[key]
        return entry.kind, self._cursor.scalar(entry.start, "I") if entry.kind == _ARRAY else None

    def raw(self, key: str) -> bytes:
        """A value's bytes in the file, after its type."""
        start, kind = self._starts[key]
        return self._cursor.data[start : self._cursor.end_of_value(start, kind)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, key: object) -> bool:  # Mapping's own would decode
        return key in self._starts

    def __repr__(self) -> str:
        return f"Metadata({', '.join(self._starts)})"

    def load(self) -> None:
        """Decode all remaining values, so that the file may be closed."""
        for key in self:
            self[key]


class _Cursor:
    """Bounds-checked reads from a mapped file."""

    def __init__(self, data: mmap.mmap | bytes, path: Path):
        self.data = data
        self.size = len(data)
        self.path = path
        self._lengths: dict[int, np.ndarray] = {}  # of the strings of arrays that are not decoded yet, by their place

    def error(self, fact: str) -> BridgeError:
        fact = fact.replace("\n", "\\n")  # names are the file's
        return BridgeError(f"{self.path}: {fact}; convert or download it again")

    def check_room(self, offset: int, count: int) -> None:
        if count > self.size - offset:
            raise self.error(f"damaged or truncated: {count} bytes expected at {offset}, the file has {self.size}")

    def scalar(self, offset: int, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.check_room(offset, size)
        return struct.unpack_from("<" + code, self.data, offset)[0]

    def string(self, offset: int) -> tuple[str, int]:
        """The string at a byte and where it ends."""
        length = self.scalar(offset, "Q")
        self.check_room(offset + 8, length)
        raw = self.data[offset + 8 : offset + 8 + length]
        try:
            return raw.decode("utf-8"), offset + 8 + length
        except UnicodeDecodeError:
            raise self.error(f"damaged: the string at byte {offset} is not UTF-8") from None

    def end_of_value(self, offset: int, kind: int, depth: int = 0) -> int:
        """Where the value at a byte ends."""
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            self.check_room(offset, size)
            return offset + size
        if kind == _STRING:
            length = self.scalar(offset, "Q")
            self.check_room(offset + 8, length)
            return offset + 8 + length
        if kind != _ARRAY or depth > _MAX_NESTING:
            raise self.error(f"damaged: unknown value type {kind} at byte {offset}")
        item, count = self.scalar(offset, "I"), self.scalar(offset + 4, "Q")
        offset += 12
        if item in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[item]) * count
            self.check_room(offset, size)
            return offset + size
        self.check_room(offset, 8 * count)
        if item == _STRING:
            lengths = self._string_lengths(offset, count)
            if not depth:
                self._lengths[offset] = lengths
            return offset + 8 * count + int(lengths.sum())
        for _ in range(count):
            offset = self.end_of_value(offset, item, depth + 1)
        return offset

    def _string_lengths(self, offset: int, count: int) -> np.ndarray:
        """int64 [count]: the bytes of each string of an array, the first of which is at `offset`."""
        if (by_zeros := self._lengths_by_zeros(offset, count)) is not None:
            return by_zeros
        length_at, data, size = struct.Struct("<Q").unpack_from, self.data, self.size
        lengths = []
        try:
            for _ in range(count):
                (length,) = length_at(data, offset)
                lengths.append(length)
                offset += 8 + length
        except (struct.error, OverflowError):
            offset = size + 1
        if offset > size:
            raise self.error("damaged or truncated: an array of strings does not end in the file")
        return np.array(lengths, np.int64)

    def _lengths_by_zeros(self, offset: int, count: int) -> np.ndarray | None:
        """`_string_lengths` without a step for each: a length below 65,536 ends with six zeros, and text has none.

        None where it is not so: a string is empty, longer, or has zeros, or the array does not end in the file.
        """
        windows: list[np.ndarray] = []
        start, missing, expected = offset, count, offset + 8  # where the next string begins, after its length
        while missing and start + 8 < self.size:
            data = np.frombuffer(self.data, np.uint8, min(_WINDOW, self.size - start), start)
            zero = data == 0
            two = zero[1:] & zero[:-1]
            six = two[4:] & two[2:-2] & two[:-4]
            starts = np.flatnonzero(six[2:-1] > zero[8:])[:missing]  # of lengths, in this window
            lengths = data[starts] + 256 * data[starts + 1].astype(np.int64)
            begins = np.append(expected, starts + lengths + (start + 16))
            if (begins[:-1] != starts + (start + 8)).any():
                return None
            windows.append(lengths)
            start, missing, expected = start + len(data) - 8, missing - len(starts), int(begins[-1])
            if missing and expected < start:  # nothing was found there
                return None
        return None if missing or expected - 8 > self.size or not count else np.concatenate(windows)

    def _strings(self, offset: int, count: int) -> list[str]:
        """An array of strings, decoded all at once: a zero in the place of each length separates them."""
        lengths = self._lengths.pop(offset, None)
        if lengths is None:
            lengths = self._string_lengths(offset, count)
        ends = np.cumsum(lengths + 8)
        raw = bytearray(self.data[offset : offset + int(ends[-1])])
        data, starts = np.frombuffer(raw, np.uint8), ends - lengths - 8
        for byte in range(1, 8 if lengths.max() > 0xFFFF else 2):
            data[starts + byte] = 0
        data[starts] = 0xFF  # no byte of UTF-8
        with suppress(UnicodeDecodeError):  # `string` names the place
            texts = raw.translate(_FF_TO_ZERO, b"\0").decode("utf-8").split("\0")
            if np.count_nonzero(data) == len(data) - 7 * count and len(texts) == count + 1:
                return texts[1:]
        texts = []
        for _ in range(count):  # a string has a zero itself, or is not UTF-8
            text, offset = self.string(offset)
            texts.append(text)
        return texts

    def value(self, offset: int, kind: int) -> Any:
        """The value at a byte; its extent was checked by `end_of_value`."""
        if kind in _SCALARS:
            return self.scalar(offset, _SCALARS[kind])
        if kind == _STRING:
            return self.string(offset)[0]
        item, count = self.scalar(offset, "I"), self.scalar(offset + 4, "Q")
        offset += 12
        if item in _SCALARS:
            code = np.dtype(_SCALARS[item]).newbyteorder("<")
            return np.frombuffer(self.data, code, count, offset).tolist()
        if item == _STRING:
            return self._strings(offset, count) if count else []
        values = []
        for _ in range(count):
            values.append(self.value(offset, item))
            offset = self.end_of_value(offset, item)
        return values


def not_a_gguf(head: bytes, path: Path) -> BridgeError:
    """The refusal of a file whose first bytes are no GGUF's."""
    if (known := kind_of_contents(head)) is not None:
        return BridgeError(f"{path}: {known}")
    return BridgeError(f"{path}: not a GGUF file (it starts with the bytes {head[:4].hex(' ')})")


def rotation_keys(metadata: Metadata) -> list[str]:
    """The keys that declare weights in a rotated basis, for instance prism.hadamard.block_size.

    What such weights multiply has to be transformed first, by a blockwise Walsh-Hadamard matrix (PrismML's fork of
    llama.cpp; pull request 121 there describes the keys). Without it they give nothing of use.
    """
    return [key for key in metadata if "hadamard" in key.lower()]


def check_basis(metadata: Metadata, path: Path) -> None:
    """BridgeError where metadata declares weights in a rotated basis."""
    if keys := rotation_keys(metadata):
        raise BridgeError(
            f"{path}: its metadata has {few_of(keys, 1)}: such keys declare weights in a rotated basis, whose products "
            "need a Hadamard transform that is not implemented here; take a GGUF without such keys, or run this one "
            "with a runtime that knows them, such as PrismML's fork of llama.cpp"
        )


def read_header(data: mmap.mmap | bytes, path: Path) -> tuple[Metadata, list[TensorEntry]]:
    """The metadata and the tensors of a mapped GGUF file. Raises BridgeError for anything inconsistent."""
    cursor = _Cursor(data, path)
    if data[:4] != b"GGUF":
        raise not_a_gguf(bytes(data[:HEAD]), path)
    cursor.check_room(0, 24)
    version, n_tensors, n_pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        fact = "big-endian" if swapped else f"version {version}"
        raise BridgeError(f"{path}: this GGUF is {fact}; only little-endian versions 2 and 3 can be read")
    offset = 24
    if n_tensors * _LEAST_TENSOR + n_pairs * _LEAST_PAIR > cursor.size - offset:
        raise cursor.error(
            f"damaged or truncated: {n_tensors} tensors and {n_pairs} keys do not fit in {cursor.size} bytes"
        )
    starts: dict[str, _ValueStart] = {}
    for _ in range(n_pairs):
        key, offset = cursor.string(offset)
        kind = cursor.scalar(offset, "I")
        if key in starts:
            raise cursor.error(f"damaged: key {key!r} occurs twice")
        starts[key] = _ValueStart(offset + 4, kind)
        offset = cursor.end_of_value(offset + 4, kind)
    metadata = Metadata(cursor, starts)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment}, not a power of two")
    metadata.data_start, tensors = _tensors(cursor, offset, n_tensors, alignment)
    return metadata, tensors


def _tensors(cursor: _Cursor, position: int, count: int, alignment: int) -> tuple[int, list[TensorEntry]]:
    """The byte at which the data starts, and all tensors, from their entries in the header."""
    raw = []
    for _ in range(count):
        name, position = cursor.string(position)
        dimensions = cursor.scalar(position, "I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise cursor.error(f"{name}: {dimensions} dimensions; must be 1 to {_MAX_DIMENSIONS}")
        cursor.check_room(position + 4, 8 * dimensions)
        shape = struct.unpack_from(f"<{dimensions}Q", cursor.data, position + 4)
        position += 4 + 8 * dimensions
        kind, offset = cursor.scalar(position, "I"), cursor.scalar(position + 4, "Q")
        position += 12
        raw.append((name, shape[::-1], kind, offset))
    data_start = -(-position // alignment) * alignment
    tensors = [_tensor(cursor, data_start, alignment, *entry) for entry in raw]
    if len({t.name for t in tensors}) < count:
        raise cursor.error("damaged: two tensors have the same name")
    ordered = sorted(tensors, key=lambda t: t.start)
    for first, second in pairwise(ordered):
        if first.start + first.nbytes > second.start:
            raise cursor.error(
                f"damaged: {first.name} ({first.type} {list(first.shape)}) needs {first.nbytes} bytes, "
                f"but {second.name} starts after {second.start - first.start}"
            )
    return data_start, tensors


def _tensor(
    cursor: _Cursor, data_start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorEntry:
    if (tensor_type := type_numbered(kind)) is None:
        raise BridgeError(f"{cursor.path}: {name} has the unknown type {kind}; a newer gguf package may know it")
    type_, _, size, nbytes, *_ = tensor_type
    if 0 in shape or math.prod(shape) > _MAX_WEIGHTS:
        raise cursor.error(f"{name}: impossible shape {list(shape)}")
    if shape[-1] % size:
        raise cursor.error(f"{name}: rows of {shape[-1]} weights are not whole {type_} blocks of {size}")
    nbytes *= math.prod(shape) // size
    start = data_start + offset
    if offset % alignment:
        raise cursor.error(f"{name}: offset {offset} is not a multiple of {alignment}")
    if start + nbytes > cursor.size:
        raise cursor.error(
            f"damaged or truncated: {name} ({type_} {list(shape)}) ends at byte {start + nbytes}, "
            f"the file at {cursor.size}"
        )
    return TensorEntry(name, type_, shape, start, nbytes)

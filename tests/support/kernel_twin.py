"""Kernels of repacked weights as plain Python over numpy: how those of a target are tested where it cannot run."""

import ctypes
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu.engines import interleaved, unpacked
from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import words_together
from bridge.runtime.cpu.machine.operands import Places, nibble
from bridge.runtime.cpu.machine.vectors import Body
from bridge.system.cpu import targets


def kernel(name: str, target: str, width: int) -> Callable[..., None]:
    """`interleaved.kernel` of a type for int8 values: it runs, slowly, where the target does not."""
    if unpacked.unpacks(targets.isa(target), READ[name], width):
        return _unpacking_kernel(name, target, width)
    sizes, made_of = interleaved._scope(name, target, width, True)
    return FunctionType(interleaved._rows.__code__, {**vars(interleaved), **sizes, **_functions(*made_of)})


def _unpacking_kernel(name: str, target: str, width: int) -> Callable[..., None]:
    sizes, isa, multiply, unpack = unpacked._scope(name, target, width)
    memory = {part: np.zeros(nbytes, np.uint8) for part, nbytes in unpacked._memory(sizes).items()}
    scope: dict[str, Any] = {part: partial(int, array.ctypes.data) for part, array in memory.items()}
    scope |= {"unpack": partial(unpack, Twin(isa)), "memory": memory}
    scope |= _functions(isa, sizes["groups"] * width, multiply)
    scope |= unpacked._of_a_group(_functions(isa, width, multiply))
    return FunctionType(unpacked._rows.__code__, {**vars(unpacked), **sizes, **scope}, f"twin_{name}")


def _functions(target: InstructionSet, columns: int, body: Body, paired: bool = False) -> dict[str, Any]:
    """`vectors.intrinsics` in numpy."""

    def zeros():
        return np.zeros((columns, target.lanes), np.float32)

    def load(y, stride):
        return np.array([Twin(target).read(y + c * stride, np.float32, target.lanes) for c in range(columns)])

    def accumulate(totals, weights, halves, x):
        return np.array(body(Twin(target, paired), list(totals), weights, halves, x), np.float32)

    def store(totals, y, stride):
        if paired:
            totals = [row for c in range(0, columns, 2) for row in totals[c : c + 2].reshape(-1, 2).T]
        for c in range(columns):
            ctypes.memmove(y + c * stride, totals[c].tobytes(), 4 * target.lanes)

    return {"zeros": zeros, "load": load, "accumulate": accumulate, "store": store}


class Twin:
    """The Emitter's methods on numpy arrays, bit for bit except for the FMA, which rounds twice here."""

    def __init__(self, target: InstructionSet, paired: bool = False):
        self.target = target
        self.paired = paired
        self.lanes: int = target.lanes
        self.signed_dots: bool = target.signed_dots
        self.index_bits: int = target.index_bits
        self.fuses_scales: bool = target.fuses_scales
        self.float_scales: bool = target.float_scales
        self.multiplies_pairs: bool = target.emit_pairs is not None

    def read(self, address: int, dtype: Any, count: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(address, np.dtype(dtype).itemsize * count), dtype)

    def load(self, base: int, offset: int) -> np.ndarray:
        return self.read(base + offset, np.int32, self.lanes)

    def broadcast(self, base: int, offset: int) -> np.ndarray:
        return np.repeat(self.read(base + offset, np.int32, 1), self.lanes)

    def broadcast_float(self, base: int, offset: int) -> np.ndarray:
        return np.repeat(self.read(base + offset, np.float32, 1), self.lanes)

    def load_half(self, base: int, offset: int) -> np.ndarray:
        return self.read(base + offset, np.float16, self.lanes).astype(np.float32)

    def load_e8m0(self, base: int, offset: int) -> np.ndarray:
        exponent = self.read(base + offset, np.uint8, self.lanes).astype(np.int32)
        return np.where(exponent > 1, (exponent - 1) << 23, 0).astype(np.int32).view(np.float32)

    def load_ue4m3(self, base: int, offset: int) -> np.ndarray:
        bits = self.read(base + offset, np.uint8, self.lanes).astype(np.uint16) << np.uint16(7)
        return bits.view(np.float16).astype(np.float32) * np.float32(128)

    def look_up(self, word: np.ndarray, table: tuple[int, ...]) -> np.ndarray:
        return np.array(table, np.uint8)[np.ascontiguousarray(word).view(np.uint8)].view(np.int32)

    def permute(self, indices: np.ndarray, table: tuple[int, ...]) -> np.ndarray:
        return self.look_up(indices & self.splat(0x01010101 * (len(table) - 1)), table)

    def blend(self, a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
        mask = self.splat(0x01010101 * bits)
        return a & mask | b & ~mask

    def barrier(self) -> None:
        pass

    def zero(self) -> np.ndarray:
        return np.zeros(self.lanes, np.int32)

    def splat(self, value: int) -> np.ndarray:
        return np.full(self.lanes, value, np.int64).astype(np.int32)

    def and_(self, value: np.ndarray, bits: int) -> np.ndarray:
        return value & self.splat(bits)

    def field(self, value: np.ndarray, start: int, low: int, width: int) -> np.ndarray:
        fields = value.view(np.uint8) >> np.uint8(start) & np.uint8((1 << width) - 1)
        return (fields << np.uint8(low)).view(np.int32)

    def shl(self, value: np.ndarray, left: int) -> np.ndarray:
        return value << np.int32(left)

    def shr(self, value: np.ndarray, right: int) -> np.ndarray:
        return (value.view(np.uint32) >> np.uint32(right)).view(np.int32)

    def ashr(self, value: np.ndarray, right: int) -> np.ndarray:
        return value >> np.int32(right)

    def or_(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a | b

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b

    def sub_bytes(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.view(np.uint8) - b.view(np.uint8)).view(np.int32)

    def mul_bytes(self, word: np.ndarray, factor: np.ndarray) -> np.ndarray:
        products = np.ascontiguousarray(word).view(np.uint8).reshape(-1, 4) * factor.astype(np.uint8)[:, None]
        return products.view(np.int32).reshape(-1)

    def mul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def dots(self, parts: list, words: list, x: Any, places: list[list[int]], bits: int) -> list:
        quads = [[self.read(x + offset, np.int8, 4) for offset in row] for row in places]
        codes = [np.ascontiguousarray(word()).view(np.uint8).reshape(-1, 4) for word in words]
        if self.paired:
            sums = [_dots_of(self.target)(self.zero(), codes, row, bits) for row in quads]
            return [part + added for part, added in zip(parts, self.crossed(sums), strict=True)]
        return [_dots_of(self.target)(part, codes, row, bits) for part, row in zip(parts, quads, strict=True)]

    def crossed(self, columns: list) -> list:
        """Vectors of rows, one a column, as vectors of pairs, or back; see Emitter."""
        pairs = [np.stack(columns[c : c + 2], 1).reshape(2, -1) for c in range(0, len(columns), 2)]
        return [half for pair in pairs for half in pair]

    def tile_dots(
        self,
        parts: list,
        words: list,
        x: int | None,
        places: list[list[int]],
        bits: int,
        scales: list | None,
        magnitude: int = 0,
        starts: list[list] | None = None,
    ) -> list:
        if starts and x is not None:
            sums = [self._started_dots(row, x, places, begins) for row, begins in zip(words, starts, strict=True)]
        elif magnitude:
            sums = [self._signed_dots(row, x, places, bits, magnitude) for row in words]
        else:
            sums = [self.dots([self.zero() for _ in places], row, x, places, bits) for row in words]
        if scales:
            sums = [[total * scale[::2] for total in row] for row, scale in zip(sums, scales, strict=True)]
        pairs = zip(parts, sums, strict=True)
        return [[part + total for part, total in zip(*row, strict=True)] for row in pairs]

    def _started_dots(self, words: list, x: int, places: list[list[int]], starts: list) -> list:
        digits = [np.ascontiguousarray(word()).view(np.int8).reshape(-1, 4) for word in words]
        quads = [[self.read(x + offset, np.uint8, 4) for offset in row] for row in places]
        begins = [start() for start in starts]
        return [_digit_dots(self.zero(), digits, row, len(digits) // len(begins), begins) for row in quads]

    def start_of(self, words: list) -> np.ndarray:
        pairs = sum(word().view(np.int8).reshape(-1, 2).sum(1, dtype=np.int16) for word in words)
        return pairs * np.int16(-128)

    def _signed_dots(self, words: list, x: int | None, places: list[list[int]], bits: int, magnitude: int) -> list:
        sums = [self.zero() for _ in places]
        for right in (0, 4) if bits == 8 else (0,):
            codes = [nibble(self, word, right) if bits == 8 else word() for word in words]
            digits = [np.ascontiguousarray(digit).view(np.int8).reshape(-1, 4) for digit in codes]
            for c, row in enumerate(places):
                if x is None:
                    sums[c] += sum(digit.sum(1, dtype=np.int32) for digit in digits) << right
                else:
                    quads = [self.read(x + offset, np.uint8, 4) for offset in row]
                    if self.fuses_scales:
                        sums[c] += _digit_dots(self.zero(), digits, quads, words_together(8, magnitude)) << right
                    else:
                        sums[c] = _unsigned_dots(sums[c], digits, quads, bits)
        return sums

    def doubled_short(self, value: np.ndarray) -> np.ndarray:
        return np.repeat(value.astype(np.int16), 2)

    def load_shorts(self, base: int, offset: int) -> np.ndarray:
        return self.read(base + offset, np.int16, 2 * self.lanes)

    def store_vector(self, value: np.ndarray, base: int, offset: int) -> None:
        ctypes.memmove(base + offset, value.tobytes(), value.nbytes)

    def in_order(self, value: np.ndarray) -> np.ndarray:
        return value

    def byte(self, word: np.ndarray, i: int) -> np.ndarray:
        return self.and_(self.shr(word, 8 * i), 255)

    def of_column(self, base: int, places: Places, c: int) -> np.ndarray:
        return self._both(base, places, c, np.int32)

    def of_column_float(self, base: int, places: Places, c: int) -> np.ndarray:
        return self._both(base, places, c, np.float32)

    def _both(self, base: int, places: Places, c: int, dtype: Any) -> np.ndarray:
        offsets = places.offsets[c & ~1 : (c & ~1) + 2] if self.paired else [places.offsets[c]]
        return np.tile(np.concatenate([self.read(base + i, dtype, 1) for i in offsets]), self.lanes // len(offsets))

    def short_of_byte(self, word: np.ndarray, i: int) -> np.ndarray:
        return self.doubled_short(self.byte(word, i))

    def two_bytes(self, word: np.ndarray, i: int) -> np.ndarray:
        return np.stack([self.byte(word, i), self.byte(word, i + 1)], 1).astype(np.int16).reshape(-1)

    def sum_of_products(self, a: np.ndarray, b: np.ndarray, factors: np.ndarray) -> np.ndarray:
        pairs = np.stack([a, b], 1).astype(np.int16).astype(np.int32)
        return (pairs * factors.reshape(-1, 2)).sum(1, dtype=np.int32)

    def column_groups(self, count: int) -> list[list[int]]:
        step = 2 if self.paired else 1
        return [list(range(c, c + step)) for c in range(0, count, step)]

    def of_rows(self, value: np.ndarray, c: int) -> np.ndarray:
        return np.repeat(value, 2).reshape(2, -1)[c & 1] if self.paired else value

    def load_floats(self, base: int, offset: int) -> np.ndarray:
        return self.read(base + offset, np.float32, self.lanes)

    def zero_float(self) -> np.ndarray:
        return np.zeros(self.lanes, np.float32)

    def splat_float(self, value: float) -> np.ndarray:
        return np.full(self.lanes, value, np.float32)

    def to_float(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.float32)

    def fmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def fneg(self, a: np.ndarray) -> np.ndarray:
        return -a

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)


def _dots_of(target: InstructionSet) -> Callable[..., np.ndarray]:
    """(part, codes, quads, bits): part + the sum of codes [lanes, 4] times int8 [4] of each word, as a target does."""
    if target.lanes == 4:
        return _signed_dots
    return _saturating_dots if target.fuses_scales else _unsigned_dots


def _unsigned_dots(part, codes, quads, bits):
    """With VNNI."""
    total = part.astype(np.int64)
    for code, quad in zip(codes, quads, strict=True):
        total += code.astype(np.int64) @ quad.astype(np.int64)
    return total.astype(np.int32)


def _signed_dots(part, codes, quads, bits):
    """On Arm."""
    return _unsigned_dots(part, [code.view(np.int8) for code in codes], quads, bits)


def _saturating_dots(part, codes, quads, bits):
    """With pmaddubsw, which saturates: codes of 8 bits are multiplied nibble by nibble."""
    if bits == 8:
        high = _saturating_dots(part * 0, [code >> 4 for code in codes], quads, 4)
        return _saturating_dots(part, [code & 15 for code in codes], quads, 4) + (high << 4)
    return _digit_dots(part, codes, quads, words_together(bits))


def _digit_dots(part, digits, quads, together, starts=None):
    """part + the products of digits [lanes, 4] and values [4] of each word; pairs of `together` words are added in
    int16, from `starts` int16 [2 * lanes] of each group of words, or 0."""
    total = part.astype(np.int32)
    for start in range(0, len(digits), together):
        pairs = starts[start // together].reshape(-1, 2).copy() if starts else np.zeros((len(part), 2), np.int16)
        for digit, quad in list(zip(digits, quads, strict=True))[start : start + together]:
            products = (digit.astype(np.int32) * quad).reshape(len(part), 2, 2).sum(2)
            pairs += np.clip(products, -32768, 32767).astype(np.int16)
        total += pairs.astype(np.int32).sum(1)
    return total

"""Arithmetic on numbers and bits.

Floats round as IEEE 754 says. Approximations (ex2) are rounded exactly here: up to two units in the last place
better than a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.gpu.operands import TYPES, Context, Step

# --- arithmetic ---


def plain(function: Callable[..., Any], count: int, *allowed: str) -> Callable[[Context], Step]:
    """An instruction whose sources and result are of one type."""

    def make(c: Context) -> Step:
        c.take(*allowed)
        kind = c.kind()
        return c.computed([kind] * count, function, kind)

    return make


def add(c: Context) -> Step:
    if not c.take("rz"):
        return plain(np.add, 2, "rn")(c)
    if (kind := c.kind()) != "f32":
        raise NotImplementedError("rounding")
    return c.computed([kind, kind], _add_towards_zero, kind)


def _add_towards_zero(a: Any, b: Any) -> Any:
    total, rest = _two_sum(np.asarray(a, np.float64), np.asarray(b, np.float64))
    near = total.astype(np.float32)
    beyond = (np.abs(near) > np.abs(total)) | ((near == total) & (rest * near < 0))
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def subtract(c: Context) -> Step:
    if c.modifiers == ["rn", "f16x2"]:
        return c.computed(["b32", "b32"], lambda a, b: (_pairs(a) - _pairs(b)).reshape(-1).view(np.uint32), "b32")
    return plain(np.subtract, 2, "rn")(c)


def _pairs(words: Any) -> Any:
    """Words as two halves each, [lanes or 1, 2]."""
    return np.atleast_1d(words).view(np.float16).reshape(-1, 2)


def shifted(left: bool) -> Callable[[Context], Step]:
    def make(c: Context) -> Step:
        kind = c.kind()
        width = 8 * np.dtype(TYPES[kind]).itemsize

        def shift(a: Any, by: Any) -> Any:
            if left:
                return _left(a, by)
            inside = np.minimum(by, width - 1).astype(a.dtype)
            return a >> inside if kind[0] == "s" else np.where(by < width, a >> inside, a.dtype.type(0))

        return c.computed([kind, "u32"], shift, kind)

    return make


def multiply(c: Context, add: bool = False) -> Step:
    kinds_of = c.take("rn", "lo")
    wide, high = c.take("wide"), c.take("hi")
    kind = c.kind()
    if kind[0] == "f" or not (wide or high):
        if kind[0] != "f" and not kinds_of:
            raise NotImplementedError("a part of the product")
        function = (lambda a, b, d: a * b + d) if add else np.multiply
        return c.computed([kind] * (2 + add), function, kind)
    if wide:
        double = kind[0] + str(2 * int(kind[1:]))
        type = TYPES[double]
        if add:
            return c.computed([kind, kind, double], lambda a, b, d: a.astype(type) * b.astype(type) + d, double)
        return c.computed([kind, kind], lambda a, b: a.astype(type) * b.astype(type), double)
    if add:
        raise NotImplementedError("mad.hi")
    return c.computed([kind, kind], _high, kind)


def _high(a: Any, b: Any) -> Any:
    """The upper half of a product of 32 or 64 bits."""
    if a.dtype.itemsize == 4:
        double = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(double) * b.astype(double) >> double(32)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    middle = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
    other = (x & low) * (y >> half) + (middle & low)
    result = (x >> half) * (y >> half) + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # a negative number reads as 2^64 too many
        result = result - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return result.view(a.dtype)


def divide(remainder: bool) -> Callable[[Context], Step]:
    def make(c: Context) -> Step:
        c.take("rn")
        kind = c.kind()
        if kind[0] == "f":
            return c.computed([kind, kind], np.divide, kind)

        def divide(a: Any, b: Any) -> Any:
            """Towards zero; by zero anything, here all ones."""
            quotient = a // b
            if kind[0] == "s":
                quotient = quotient + ((a - quotient * b != 0) & ((a < 0) != (b < 0)))
            quotient = np.where(b == 0, np.array(-1).astype(TYPES[kind]), quotient)
            return a - quotient * b if remainder else quotient

        return c.computed([kind, kind], divide, kind)

    return make


def smaller(least: bool) -> Callable[[Context], Step]:
    def make(c: Context) -> Step:
        kind = c.kind()
        if kind[0] != "f":
            return c.computed([kind, kind], np.minimum if least else np.maximum, kind)

        def choose(a: Any, b: Any) -> Any:
            """Of NaN and a number the number; -0 is less than 0."""
            result = (np.fmin if least else np.fmax)(a, b)
            negative = np.signbit(a) | np.signbit(b) if least else np.signbit(a) & np.signbit(b)
            return np.where((a == 0) & (b == 0), np.where(negative, -0.0, 0.0), result)

        return c.computed([kind, kind], choose, kind)

    return make


def fma(c: Context) -> Step:
    down, _ = c.take("rm"), c.take("rn")
    kind = c.kind()
    if kind == "f32":
        return c.computed([kind] * 3, lambda a, b, d: _fma32(a, b, d, down), kind)
    if down or kind != "f64":
        raise NotImplementedError("fma of that kind")
    return c.computed([kind] * 3, _fma64, kind)


def _fma32(a: Any, b: Any, c: Any, down: bool) -> Any:
    """a * b + c rounded once: the sum in float64 is made odd where it was rounded, so that rounding it is safe."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact
    total, rest = _two_sum(product, np.asarray(c, np.float64))
    if not down:
        words = np.asarray(total).view(np.int64)
        outward = np.where((rest > 0) == (total > 0), 1, -1)
        inexact = (rest != 0) & np.isfinite(total) & (words & 1 == 0)
        return np.where(inexact, words + outward, words).view(np.float64).astype(np.float32)
    near = total.astype(np.float32)
    above = (near > total) | ((near == total) & (rest < 0))
    return np.where(above, np.nextafter(near, np.float32(-np.inf)), near)


def _fma64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c: the product in two parts (Dekker), all parts summed: within a unit of the last place."""
    product = a * b
    high_a, low_a = _halves(a)
    high_b, low_b = _halves(b)
    rest = low_a * low_b - (((product - high_a * high_b) - low_a * high_b) - high_a * low_b)
    total, left = _two_sum(product, c)
    exact = total + (left + rest)
    return np.where(np.isfinite(exact), exact, product + c)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum and what rounding left out (Knuth)."""
    total = a + b
    other = total - a
    rest = (a - (total - other)) + (b - other)
    return total, np.where(np.isfinite(rest), rest, 0.0)


def _halves(a: Any) -> tuple[Any, Any]:
    big = a * 134217729.0
    high = big - (big - a)
    return high, a - high


def exp2(c: Context) -> Step:
    if not c.take("approx"):
        raise NotImplementedError("ex2 is approximate")
    flush = c.take("ftz")
    kind = c.kind()

    def power(a: Any) -> Any:
        result = np.exp2(a.astype(np.float64)).astype(np.float32)
        return np.where(np.abs(result) < np.float32(2.0**-126), np.float32(0), result) if flush else result

    return c.computed([kind], power, kind)


# --- bits ---


def byte_dot(c: Context) -> Step:
    low = c.take("lo")
    if c.modifiers != ["s32", "s32"]:
        raise NotImplementedError("signs")
    if c.instruction.opcode.startswith("dp4a"):
        return c.computed(["b32"] * 2 + ["s32"], lambda a, b, d: d + _dot(a, b, np.int8, 4), "s32")
    if not low:
        raise NotImplementedError("the upper bytes")
    return c.computed(["b32"] * 2 + ["s32"], lambda a, b, d: d + _dot(a, b, np.int16, 2), "s32")


def _dot(a: Any, b: Any, type: Any, count: int) -> Any:
    """The sum of `count` products: parts of a, of that type, times the lowest bytes of b."""
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    parts = np.ascontiguousarray(a)[:, None].view(type).astype(np.int32)
    return (parts * np.ascontiguousarray(b)[:, None].view(np.int8)[:, :count].astype(np.int32)).sum(1, dtype=np.int32)


def _left(a: Any, by: Any) -> Any:
    """a * 2^by, where shifting by all bits leaves none."""
    width = 8 * a.dtype.itemsize
    return np.where(by < width, a << np.minimum(by, width - 1).astype(a.dtype), a.dtype.type(0))


def insert(c: Context) -> Step:
    kind = c.kind()
    width = int(kind[1:])

    def insert(a: Any, b: Any, at: Any, count: Any) -> Any:
        """The lowest `count` bits of a, put into b from bit `at` on."""
        at, count = np.minimum(at & np.uint32(255), width), np.minimum(count & np.uint32(255), width)
        ones = _left(b.dtype.type(1), count) - b.dtype.type(1)
        mask = _left(ones, at)
        return (b & ~mask) | (_left(a, at) & mask)

    return c.computed([kind, kind, "u32", "u32"], insert, kind)


def extract(c: Context) -> Step:
    kind = c.kind()
    width = int(kind[1:])

    def extract(a: Any, at: Any, count: Any) -> Any:
        at, count = at & np.uint32(255), np.minimum(count & np.uint32(255), width)
        value = np.where(at < width, a >> np.minimum(at, width - 1).astype(a.dtype), a >> a.dtype.type(width - 1))
        if kind[0] == "u":
            value = np.where(at < width, value, 0).astype(a.dtype)
        free = np.asarray(width - count).astype(a.dtype)
        moved = value << np.minimum(free, a.dtype.type(width - 1)) >> np.minimum(free, a.dtype.type(width - 1))
        return np.where(count == 0, 0, moved)

    return c.computed([kind, "u32", "u32"], extract, kind)


def permute(c: Context) -> Step:
    kind = c.kind()

    def permute(a: Any, b: Any, selector: Any) -> Any:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.uint32(0)
        for i in range(4):
            choice = selector >> np.uint32(4 * i) & np.uint32(15)
            byte = (both >> (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            byte = np.where(choice & np.uint32(8), np.where(byte & np.uint32(128), 255, 0), byte).astype(np.uint32)
            result = result | byte << np.uint32(8 * i)
        return result

    return c.computed([kind] * 3, permute, kind)


def funnel(c: Context) -> Step:
    right = c.take("r")
    if not right and not c.take("l"):
        raise NotImplementedError("a direction")
    wrap = c.take("wrap")
    if not wrap and not c.take("clamp"):
        raise NotImplementedError("what becomes of large shifts")

    def shift(low: Any, high: Any, by: Any) -> Any:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        by = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
        return (both >> by if right else both << by >> np.uint64(32)).astype(np.uint32)

    return c.computed([c.kind(), "b32", "u32"], shift, "b32")


def logic(function: Any, count: int) -> Callable[[Context], Step]:
    def make(c: Context) -> Step:
        kind = c.kind()
        return c.computed([kind] * count, function, kind)

    return make

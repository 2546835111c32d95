"""What tensor cores compute, and the asynchronous copies into shared memory.

The fragments of mma.sync are those of the PTX ISA for m16n8k16 and 16-bit floats: with g = lane / 4 and t = lane % 4

    A [16, 16]  words (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8): rows and columns of the first of two halves
    B [16, 8]   words (2t, g), (2t + 8, g); the second half is the next row
    C, D        (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

and for bytes, four in a word, those of m16n8k16 and, in the order of the words, of m16n8k32:

    A [16, 32]  (g, 4t), (g + 8, 4t), (g, 4t + 16), (g + 8, 4t + 16)
    B [32, 8]   (4t, g), (4t + 16, g)

Sums of floats are rounded once here. A GPU may round or cut off after some of the products.

A copy of cp.async arrives where its thread waits for it, and not before: until then its target reads as
never stored. It stores when it begins, too, as far as races are concerned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gpu.moves import address
from tests.support.gpu.operands import Context, Operand, Step

if TYPE_CHECKING:
    from tests.support.gpu.machine import Lanes

_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4
_A = [(_G, 2 * _T), (_G + 8, 2 * _T), (_G, 2 * _T + 8), (_G + 8, 2 * _T + 8)]
_B = [(2 * _T, _G), (2 * _T + 8, _G)]
_C = [(_G, 2 * _T), (_G, 2 * _T + 1), (_G + 8, 2 * _T), (_G + 8, 2 * _T + 1)]


def multiply(c: Context) -> Step:
    kind = c.modifiers[-2]
    if kind == "s8":
        return _multiply_bytes(c)
    if c.modifiers != ["sync", "aligned", "m16n8k16", "row", "col", "f32", kind, kind, "f32"]:
        raise NotImplementedError("a shape, or types")
    if kind not in ("f16", "bf16"):
        raise NotImplementedError(kind)
    results, *given = c.operands
    assert all(isinstance(names, tuple) for names in c.operands)
    words = [[Operand(name, c.kernel, "b32") for name in names] for names in given[:2]]
    sums = [Operand(name, c.kernel, "f32") for name in given[2]]
    if [len(results), *map(len, (*words, sums))] != [4, 4, 2, 4]:
        raise NotImplementedError("operands")

    def step(lanes: Lanes, mask: Any) -> None:
        warps = lanes.count // 32

        def read(operand: Operand) -> np.ndarray:
            return np.broadcast_to(operand.read(lanes), lanes.count).reshape(warps, 32)

        a, b, total = np.empty((warps, 16, 16)), np.empty((warps, 16, 8)), np.empty((warps, 16, 8))
        for operand, (row, column) in zip(words[0], _A, strict=True):
            a[:, row, column], a[:, row, column + 1] = _pair(read(operand), kind)
        for operand, (row, column) in zip(words[1], _B, strict=True):
            b[:, row, column], b[:, row + 1, column] = _pair(read(operand), kind)
        for operand, (row, column) in zip(sums, _C, strict=True):
            total[:, row, column] = read(operand)
        total = (total + a @ b).astype(np.float32)
        for name, (row, column) in zip(results, _C, strict=True):
            lanes.set(name, np.ascontiguousarray(total[:, row, column]).reshape(-1), mask)

    return step


def _multiply_bytes(c: Context) -> Step:
    shape = c.modifiers[2]
    if shape not in ("m16n8k16", "m16n8k32"):
        raise NotImplementedError(shape)
    if c.modifiers != ["sync", "aligned", shape, "row", "col", "s32", "s8", "s8", "s32"]:
        raise NotImplementedError("types")
    k = int(shape[-2:])
    assert all(isinstance(names, tuple) for names in c.operands)
    results, a_words, b_words, sums = ([*names] for names in c.operands)
    if [len(results), len(a_words), len(b_words), len(sums)] != [4, k // 8, k // 16, 4]:
        raise NotImplementedError("operands")

    def step(lanes: Lanes, mask: Any) -> None:
        warps = lanes.count // 32

        def read(name: str, kind: str) -> np.ndarray:
            found = np.broadcast_to(Operand(name, c.kernel, kind).read(lanes), lanes.count)
            return np.ascontiguousarray(found).reshape(warps, 32)

        a, b = np.empty((warps, 16, k), np.int64), np.empty((warps, k, 8), np.int64)
        total = np.empty((warps, 16, 8), np.int64)
        for i in range(4):
            for number, name in enumerate(a_words):
                values = read(name, "b32").view(np.int8).reshape(warps, 32, 4)
                a[:, _G + number % 2 * 8, 4 * _T + number // 2 * 16 + i] = values[:, :, i]
            for number, name in enumerate(b_words):
                values = read(name, "b32").view(np.int8).reshape(warps, 32, 4)
                b[:, 4 * _T + number * 16 + i, _G] = values[:, :, i]
        for name, (row, column) in zip(sums, _C, strict=True):
            total[:, row, column] = read(name, "s32")
        total = (total + a @ b).astype(np.uint32)
        for name, (row, column) in zip(results, _C, strict=True):
            lanes.set(name, np.ascontiguousarray(total[:, row, column]).reshape(-1), mask)

    return step


def _pair(words: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper half of each word."""
    low, high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    if kind == "bf16":
        return tuple((half << np.uint32(16)).view(np.float32) for half in (low, high))  # type: ignore[return-value]
    return tuple(half.astype(np.uint16).view(np.float16) for half in (low, high))  # type: ignore[return-value]


class Copies:
    """Those of all lanes that are on their way."""

    def __init__(self, count: int):
        self.closed = np.zeros(count, np.int64)  # groups of each lane
        self.pending: list[tuple[Any, ...]] = []  # lanes, their open groups, target, source, bytes of each

    def arrived(self, mask: np.ndarray, left: int) -> list[tuple[Any, ...]]:
        """Takes off what lanes of the mask wait for: (lanes, target, source, bytes of each)."""
        found, rest = [], []
        for lanes, group, target, source, nbytes in self.pending:
            done = mask[lanes] & (group < self.closed[lanes] - left)
            if done.any():
                found.append((lanes[done], target[done], source[done], nbytes))
            if not done.all():
                rest.append((lanes[~done], group[~done], target[~done], source[~done], nbytes))
        self.pending = rest
        return found


def _lanes(lanes: Lanes, mask: Any) -> np.ndarray:
    return np.ones(lanes.count, bool) if mask is None else mask


def copy(c: Context) -> Step:
    if not c.take("async"):
        raise NotImplementedError("copies that are not asynchronous")
    if c.take("commit_group"):

        def close(lanes: Lanes, mask: Any) -> None:
            lanes.copies.closed[_lanes(lanes, mask)] += 1

        return close
    if c.take("wait_group"):
        left = int(c.operands[0])  # type: ignore[arg-type]

        def wait(lanes: Lanes, mask: Any) -> None:
            for chosen, target, source, nbytes in lanes.copies.arrived(_lanes(lanes, mask), left):
                who = lanes.access(chosen, c.instruction)
                values = lanes.memory.load("global", source, nbytes, who, False)
                lanes.memory.store("shared", target, values, who)

        return wait
    if c.modifiers != ["cg", "shared", "global"] or int(c.operands[2]) != 16:  # type: ignore[arg-type]
        raise NotImplementedError("copies of that kind")
    places = [address(c, operand) for operand in c.operands[:2]]

    def begin(lanes: Lanes, mask: Any) -> None:
        chosen = np.flatnonzero(_lanes(lanes, mask))
        target, source = (place(lanes)[chosen] for place in places)
        who = lanes.access(chosen, c.instruction)
        who.check_time()
        lanes.memory.awaited(target, 16, who)
        lanes.copies.pending.append((chosen, lanes.copies.closed[chosen], target, source, 16))

    return begin

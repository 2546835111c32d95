"""Comparisons, conversions and moves, and what goes through memory or between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gpu.operands import TYPES, Context, Operand, Step, raw_type

if TYPE_CHECKING:
    from tests.support.gpu.machine import Lanes

# --- comparison, conversion, moves ---

_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARE |= {"ge": np.greater_equal}


def compare(c: Context) -> Step:
    name, kind = c.modifiers.pop(0), c.kind()
    unordered = len(name) == 3 and name[2] == "u" and name[:2] in _COMPARE
    if unordered and kind[0] != "f":
        raise NotImplementedError(name)
    function = _COMPARE[name[:2] if unordered else name]
    if kind[0] != "f":
        return c.computed([kind, kind], function, "pred")

    def compare(a: Any, b: Any) -> Any:
        nan = np.isnan(a) | np.isnan(b)
        return function(a, b) | nan if unordered else function(a, b) & ~nan

    return c.computed([kind, kind], compare, "pred")


def select(c: Context) -> Step:
    kind = c.kind()
    return c.computed([kind, kind, "pred"], lambda a, b, p: np.where(p, a, b), kind)


def _both(c: Context) -> Step:
    """Two float32 as 16-bit floats in one word; the first is the upper half."""
    if c.modifiers not in (["rn", "f16x2", "f32"], ["rn", "bf16x2", "f32"]):
        raise NotImplementedError("rounding")
    bits = to_bf16 if c.modifiers[1] == "bf16x2" else lambda a: a.astype(np.float16).view(np.uint16)
    return c.computed(["f32", "f32"], lambda a, b: bits(a).astype(np.uint32) << 16 | bits(b), "b32")


def to_bf16(a: np.ndarray) -> np.ndarray:
    """The upper halves, uint16, of float32 rounded to nearest even."""
    words = np.asarray(a, np.float32).view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(a), 0x7FFF, words + 0x7FFF + (words >> 16 & 1) >> 16).astype(np.uint16)


def convert(c: Context) -> Step:
    if len(c.operands) == 3:
        return _both(c)
    exact, even, saturate = c.take("rn"), c.take("rni"), c.take("sat")
    down, up, zero = c.take("rmi"), c.take("rpi"), c.take("rzi")
    if len(c.modifiers) != 2:
        raise NotImplementedError(f"modifiers {c.modifiers}")
    to, source = c.modifiers
    narrows = to[0] == "f" and (source[0] != "f" or int(to[1:]) < int(source[1:]))
    if exact != narrows or (saturate and (to, source) != ("f32", "f32")):
        raise NotImplementedError("rounding")
    if source[0] == "f" and to[0] != "f" and even + down + up + zero != 1:
        raise NotImplementedError("rounding")

    def convert(a: Any) -> Any:
        if saturate:
            return np.where(np.isnan(a), 0, np.clip(a, 0, 1))
        if source[0] == "f" and to[0] != "f":
            limits = np.iinfo(TYPES[to])
            whole = (np.rint if even else np.floor if down else np.ceil if up else np.trunc)(np.asarray(a, np.float64))
            inside = np.clip(np.where(np.isnan(whole), 0, whole), limits.min, limits.max)
            return np.where(whole >= limits.max, limits.max, inside.astype(TYPES[to]))
        return np.asarray(a).astype(TYPES[to])

    # a narrow result in a wide register is extended as its type says
    destination = c.operands[0]
    assert isinstance(destination, str)
    width = np.dtype(raw_type(c.kernel.registers[destination])).itemsize
    result = to
    if to[0] != "f" and np.dtype(TYPES[to]).itemsize < width:
        result = f"{'s' if to[0] == 's' else 'u'}{8 * width}"
    return c.computed([source], convert, result)


def move(c: Context) -> Step:
    kind = c.kind()
    destination, source = c.operands
    if isinstance(destination, tuple):
        part = f"b{int(kind[1:]) // len(destination)}"
        operand = Operand(source, c.kernel, kind)  # type: ignore[arg-type]

        def split(lanes: Lanes, mask: Any) -> None:
            value = np.ascontiguousarray(np.broadcast_to(operand.read(lanes), lanes.count))
            parts = value[:, None].view(TYPES[part])
            for i, name in enumerate(destination):
                lanes.set(name, parts[:, i].copy(), mask)

        return split
    if isinstance(source, tuple):
        operands = [Operand(s, c.kernel, f"b{int(kind[1:]) // len(source)}") for s in source]

        def joined(lanes: Lanes, mask: Any) -> None:
            parts = [np.broadcast_to(o.read(lanes), lanes.count) for o in operands]
            lanes.set(destination, np.ascontiguousarray(np.stack(parts, 1)).view(TYPES[kind])[:, 0], mask)

        return joined
    return c.computed([kind], lambda a: a, kind)


# --- memory ---


def address(c: Context, text: Any) -> Callable[[Lanes], np.ndarray]:
    """[register], [register+n], [array] or [array+n] -> uint64 [lanes]."""
    place, _, offset = text.strip("[]").partition("+")  # an offset below 0 is written +-8
    operand, more = Operand(place.strip(), c.kernel, "u64"), np.uint64(int(offset or 0) % (1 << 64))
    return lambda lanes: np.broadcast_to(np.asarray(operand.read(lanes) + more), lanes.count)


def _extended(value: np.ndarray, kind: str, register: np.ndarray) -> np.ndarray:
    """What was loaded, as wide as the register: with its sign, or zeros."""
    if register.itemsize == value.itemsize:
        return value
    return value.astype(f"{'i' if kind[0] == 's' else 'u'}{register.itemsize}")


def load(c: Context) -> Step:
    space = c.modifiers.pop(0)
    if space == "param":
        kind, destination = c.kind(), c.operands[0]
        name, _, offset = c.operands[1].strip("[]").partition("+")  # type: ignore[union-attr]
        first, size = int(offset or 0), np.dtype(TYPES[kind]).itemsize
        assert isinstance(destination, str)

        def parameter(lanes: Lanes, mask: Any) -> None:
            found = lanes.parameters[name][first : first + size].view(TYPES[kind])  # part of it, perhaps
            lanes.set(destination, np.repeat(_extended(found, kind, lanes.registers[destination]), lanes.count), mask)

        return parameter
    frozen = c.take("nc")
    kept = "L1::no_allocate" not in c.modifiers
    hints = [m for m in c.modifiers if m.startswith(("L1::", "L2::"))]
    c.take(*hints)
    count = 4 if c.take("v4") else 2 if c.take("v2") else 1
    kind = c.kind()
    names = c.operands[0] if count > 1 else (c.operands[0],)
    place, size = address(c, c.operands[1]), np.dtype(TYPES[kind]).itemsize
    if space not in ("global", "shared") or len(names) != count:
        raise NotImplementedError(space)

    def step(lanes: Lanes, mask: Any) -> None:
        at = place(lanes)
        at, who = at if mask is None else at[mask], lanes.access(mask, c.instruction)
        found = lanes.memory.load(space, at, size * count, who, frozen, kept)
        for i, name in enumerate(names):
            part = np.ascontiguousarray(found[:, size * i : size * i + size]).view(TYPES[kind])[:, 0]
            part = _extended(part, kind, lanes.registers[name])
            if mask is None:
                lanes.set(name, part, None)
            else:
                whole = np.zeros(lanes.count, part.dtype)
                whole[mask] = part
                lanes.set(name, whole, mask)

    return step


def prefetch(c: Context) -> Step:
    if c.modifiers != ["global", "L2"]:
        raise NotImplementedError(f"modifiers {c.modifiers}")
    place = address(c, c.operands[0])

    def step(lanes: Lanes, mask: Any) -> None:
        at = place(lanes)
        lanes.memory.reach(at if mask is None else at[mask], 1, lanes.access(mask, c.instruction))

    return step


def store(c: Context) -> Step:
    space = c.modifiers.pop(0)
    count = 4 if c.take("v4") else 2 if c.take("v2") else 1
    kind = c.kind()
    if space not in ("global", "shared"):
        raise NotImplementedError(space)
    place = address(c, c.operands[0])
    sources = c.operands[1] if count > 1 else (c.operands[1],)
    operands = [Operand(s, c.kernel, kind) for s in sources]  # type: ignore[arg-type]

    def step(lanes: Lanes, mask: Any) -> None:
        parts = [np.broadcast_to(o.read(lanes), lanes.count) for o in operands]
        values = np.ascontiguousarray(np.stack(parts, 1)).view(np.uint8)
        at = place(lanes)
        if mask is not None:
            at, values = at[mask], values[mask]
        lanes.memory.store(space, at, values, lanes.access(mask, c.instruction))

    return step


def atomic(c: Context) -> Step:
    releases = c.take("release") + c.take("gpu") == 2
    space, operation = c.modifiers.pop(0), c.modifiers.pop(0)
    kind = c.kind()
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda a, b: b}[operation]
    place, source = address(c, c.operands[1]), c.sources(kind)[0]
    destination = c.operands[0]
    assert isinstance(destination, str)

    def step(lanes: Lanes, mask: Any) -> None:
        chosen = np.ones(lanes.count, bool) if mask is None else mask
        operands = np.broadcast_to(source.read(lanes), lanes.count)[chosen]
        who = lanes.access(mask, c.instruction)
        if releases:
            lanes.memory.order.release(who)
        whole = np.zeros(lanes.count, TYPES[kind])
        whole[chosen] = lanes.memory.atomic(space, place(lanes)[chosen], operands, combine, who)
        lanes.set(destination, whole, chosen)

    return step


def fence(c: Context) -> Step:
    if c.modifiers != ["acq_rel", "gpu"]:
        raise NotImplementedError(f"modifiers {c.modifiers}")
    return lambda lanes, mask: lanes.memory.order.acquire(lanes.access(mask, c.instruction))


# --- warps ---


def shuffle(c: Context) -> Step:
    if not c.take("sync") or c.kernel.registers[c.operands[0][0]] not in ("b32", "u32", "s32", "f32"):
        raise NotImplementedError("shuffles without sync")
    mode = c.modifiers.pop(0)
    c.kind()
    result, valid = c.operands[0] if isinstance(c.operands[0], tuple) else (c.operands[0], None)
    source, by, limits, _ = c.sources("b32", "u32", "u32", "u32")

    def step(lanes: Lanes, mask: Any) -> None:
        own = np.arange(lanes.count, dtype=np.int64) % 32
        b = np.broadcast_to(by.read(lanes), lanes.count).astype(np.int64) & 31
        limit = np.broadcast_to(limits.read(lanes), lanes.count).astype(np.int64)
        segment, clamp = limit >> 8 & 31, limit & 31
        last = (own & segment) | (clamp & ~segment)
        first = own & segment
        other = {"bfly": own ^ b, "down": own + b, "up": own - b, "idx": first | (b & ~segment)}[mode]
        inside = other >= last if mode == "up" else other <= last
        chosen = np.where(inside, other, own) - own + np.arange(lanes.count)
        value = np.broadcast_to(source.read(lanes), lanes.count)
        lanes.set(result, value[chosen], mask)
        if valid is not None:
            lanes.set(valid, inside, mask)

    return step


def vote(c: Context) -> Step:
    if not c.take("sync"):
        raise NotImplementedError("votes without sync")
    mode, kind = c.modifiers.pop(0), c.kind()
    source = Operand(c.operands[1], c.kernel, "pred")  # type: ignore[arg-type]
    destination = c.operands[0]
    assert isinstance(destination, str)

    def step(lanes: Lanes, mask: Any) -> None:
        votes = np.broadcast_to(source.read(lanes), lanes.count).reshape(-1, 32)
        if mode == "ballot":
            result = (votes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            result = {"any": votes.any, "all": votes.all}[mode](1)
        lanes.set(destination, np.repeat(result, 32).astype(raw_type(kind)), mask)

    return step

"""Operands of instructions, and what every instruction does with them.

A register is an array of unsigned integers of its width, one entry a lane; instructions see it as their type. A
function computes for all lanes and keeps the results of those that take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gpu.parse import Instruction, Kernel

if TYPE_CHECKING:
    from tests.support.gpu.machine import Lanes

Step = Callable[["Lanes", Any], None]  # (lanes, mask bool [lanes], or None for all)

TYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def raw_type(kind: str) -> Any:
    """How a register of a type is kept."""
    return np.bool_ if kind == "pred" else RAW[np.dtype(TYPES[kind]).itemsize]


class Operand:
    """A register, number, special register or shared array, read as a type."""

    def __init__(self, text: str, kernel: Kernel, kind: str):
        self.type, self.size = TYPES[kind], np.dtype(TYPES[kind]).itemsize
        self.symbol = self.name = None
        self.value: Any = None
        if text in {name for name, _, _ in kernel.shared}:
            self.symbol = text
        elif text.startswith(("%tid", "%ctaid", "%ntid", "%nctaid")):
            self.name = text
        elif text[0].isalpha() or text[0] == "%":
            declared = raw_type(kernel.registers[text])
            wanted = raw_type(kind)
            if np.dtype(declared).itemsize < np.dtype(wanted).itemsize or (declared is np.bool_) != (kind == "pred"):
                raise NotImplementedError(f"{text} as {kind}")
            self.name = text
        else:
            self.value = _number(text, self.type)

    def read(self, lanes: Lanes) -> Any:
        if self.value is not None:
            return self.value
        if self.symbol is not None:
            return self.type(lanes.memory.symbols[self.symbol])
        found = lanes.registers[self.name]
        if found.dtype.itemsize != self.size:  # the lower bits of a wider one
            found = found.astype(RAW[self.size])
        return found.view(self.type)


def _number(text: str, type: Any) -> Any:
    if text[:2] in ("0f", "0F"):
        return np.uint32(int(text[2:], 16)).view(np.float32)
    if text[:2] in ("0d", "0D"):
        return np.uint64(int(text[2:], 16)).view(np.float64)
    value = int(text.rstrip("U"), 0)
    if type is np.bool_:
        return np.bool_(value)
    size = np.dtype(type).itemsize
    return RAW[size](value & (1 << 8 * size) - 1).view(type)


class Context:
    """An instruction while its function is made; modifiers are taken off as they are understood."""

    def __init__(self, instruction: Instruction, kernel: Kernel, modifiers: list[str]):
        self.instruction, self.kernel, self.modifiers = instruction, kernel, modifiers
        self.operands = instruction.operands

    def take(self, *known: str) -> bool:
        """Whether one of these is among the modifiers."""
        found = [m for m in self.modifiers if m in known]
        for m in found:
            self.modifiers.remove(m)
        return bool(found)

    def kind(self) -> str:
        """The type, which is the last; nothing else may be left."""
        if len(self.modifiers) != 1:
            raise NotImplementedError(f"modifiers {self.modifiers}")
        return self.modifiers.pop()

    def sources(self, *kinds: str) -> list[Operand]:
        own = self.operands[-len(kinds) :]
        assert all(isinstance(o, str) for o in own)
        return [Operand(o, self.kernel, k) for o, k in zip(own, kinds, strict=True)]  # type: ignore[arg-type]

    def computed(self, kinds: list[str], function: Callable[..., Any], result: str) -> Step:
        """destination = function(sources)."""
        if len(self.operands) != len(kinds) + 1:
            raise NotImplementedError("operands")
        sources, destination, type = self.sources(*kinds), self.operands[0], TYPES[result]
        assert isinstance(destination, str)
        width = np.dtype(raw_type(self.kernel.registers[destination])).itemsize
        if np.dtype(type).itemsize != width:
            raise NotImplementedError(f"{result} into {destination}")

        def step(lanes: Lanes, mask: Any) -> None:
            lanes.set(destination, np.asarray(function(*(s.read(lanes) for s in sources)), type), mask)

        return step

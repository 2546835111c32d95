"""Opcodes and what makes a function of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gpu import arithmetic as a
from tests.support.gpu import moves as m
from tests.support.gpu import tensor_cores as t
from tests.support.gpu.operands import Context, Step
from tests.support.gpu.parse import Instruction, Kernel

if TYPE_CHECKING:
    from tests.support.gpu.machine import Lanes


def build(instruction: Instruction, kernel: Kernel) -> Step:
    """What the instruction does. Raises NotImplementedError, with its text, where it is not known."""
    base, *modifiers = instruction.opcode.split(".")
    try:
        step = _BUILDERS[base](Context(instruction, kernel, modifiers))
    except (KeyError, IndexError, NotImplementedError) as problem:
        raise NotImplementedError(f"{instruction.text!r}: {problem}") from problem
    if instruction.guard is None or base == "bra":
        return step
    wanted, predicate = instruction.guard

    def guarded(lanes: Lanes, mask: Any) -> None:
        taken = lanes.registers[predicate] == wanted
        taken = taken if mask is None else taken & mask
        if taken.any():
            step(lanes, taken)

    return guarded


def _nothing(c: Context) -> Step:
    return lambda lanes, mask: None


def _jump(c: Context) -> Step:
    target = c.kernel.labels[c.operands[0]]  # type: ignore[index]
    guard = c.instruction.guard

    def step(lanes: Lanes, mask: Any) -> None:
        if guard is not None:
            taken = lanes.registers[guard[1]] == guard[0]
            mask = taken if mask is None else taken & mask
        lanes.jump(target, mask)

    return step


def _wait(c: Context) -> Step:
    """For the launches before; that the next ones may come changes nothing in this one."""
    if c.modifiers not in (["wait"], ["launch_dependents"]):
        raise NotImplementedError(f"modifiers {c.modifiers}")

    def step(lanes: Lanes, mask: Any) -> None:
        lanes.early[slice(None) if mask is None else mask] = False

    return step if c.modifiers == ["wait"] else lambda lanes, mask: None


_BUILDERS: dict[str, Callable[[Context], Step]] = {
    "add": a.add,
    "sub": a.subtract,
    "mul": a.multiply,
    "mad": lambda c: a.multiply(c, True),
    "fma": a.fma,
    "div": a.divide(False),
    "rem": a.divide(True),
    "min": a.smaller(True),
    "max": a.smaller(False),
    "abs": a.plain(np.abs, 1),
    "neg": a.plain(np.negative, 1),
    "sqrt": a.plain(np.sqrt, 1, "rn"),
    "rcp": a.plain(lambda x: x.dtype.type(1) / x, 1, "rn"),
    "ex2": a.exp2,
    "and": a.logic(lambda a, b: a & b, 2),
    "or": a.logic(lambda a, b: a | b, 2),
    "xor": a.logic(lambda a, b: a ^ b, 2),
    "not": a.logic(lambda a: ~a, 1),
    "shl": a.shifted(True),
    "shr": a.shifted(False),
    "shf": a.funnel,
    "bfi": a.insert,
    "bfe": a.extract,
    "prmt": a.permute,
    "dp4a": a.byte_dot,
    "dp2a": a.byte_dot,
    "setp": m.compare,
    "selp": m.select,
    "cvt": m.convert,
    "mov": m.move,
    "cvta": lambda c: c.computed(["u64"], lambda a: a, "u64"),
    "ld": m.load,
    "st": m.store,
    "atom": m.atomic,
    "prefetch": m.prefetch,
    "cp": t.copy,
    "mma": t.multiply,
    "shfl": m.shuffle,
    "vote": m.vote,
    "bar": _nothing,
    "fence": m.fence,
    "griddepcontrol": _wait,
    "bra": _jump,
    "ret": lambda c: lambda lanes, mask: lanes.leave(mask),
}

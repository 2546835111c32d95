"""A tensor of the GGUF whose rows come from several modules, one after another: a layer's experts as one 3-D
tensor, or a fused matrix. It has one type, which is chosen for all of them together.

Modules are read one at a time: what is held is the finished tensor and one expert. A type that turns out not
to do costs another pass over them, so some rows of a few experts are looked at first. Modules that are not
quantized among ones that are (a tool may leave single experts out) take the others' type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bridge.blocks import BLOCKS, BlockType
from bridge.mapping import choose
from bridge.mapping.carry import CannotCarryError, Fidelity, Mapped, carry
from bridge.mapping.floats import quantize_rows
from bridge.mapping.pack import row_bytes
from bridge.models import TensorSpec
from bridge.recipe import block_type
from bridge.report import CARRIED, ROUNDED, TensorReport
from bridge.source import source_name
from bridge.tensors import Conversion, Result, as_float, float_value

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor

_SAMPLED = 3  # modules that are looked at before a type is tried on all


def make_stack(work: Conversion, tensor: TensorSpec) -> Result:
    """Read and map a tensor of several parts, some or all of which are codes."""
    stack = _Stack(work, tensor)
    act_order = not all(work.source.carries(module) for module in stack.modules if module)
    wanted = work.recipe.wanted(work.place(tensor), as_codes=True, act_order=act_order)
    if not tensor.quantizable or (wanted.mode == "forced" and block_type(str(wanted.type)) is None):
        return stack.as_floats("F32" if not tensor.quantizable else str(wanted.type))
    made: _Made | None = None
    if wanted.mode == "forced":
        made = stack.forced(BLOCKS[str(wanted.type)])
    elif wanted.mode == "exact":
        made = stack.first(stack.carriers(exact=True), 0.0)
        if made is None:
            stack.notes.append(f"{tensor.name}: no type holds it bit for bit; the type is auto's")
    if made is None:
        made = stack.automatic()
        limit = block_type(str(wanted.type)) if wanted.mode == "at_most" else None
        if limit and made.block.bpw > limit.bpw:
            made = stack.forced(limit)
    return stack.result(made)


@dataclass
class _Made:
    """A whole stack in one type; `floats` counts the parts that came as such, whose error is apart."""

    block: BlockType
    data: np.ndarray
    fidelity: Fidelity
    exact: set[str]  # the types that would hold every part bit for bit
    floats: int = 0
    float_error: float = 0.0
    float_signal: float = 0.0


@dataclass
class _Stack:
    work: Conversion
    tensor: TensorSpec
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leaves = self.tensor.leaves
        self.modules = [self.work.source.module_of(leaf) for leaf in self.leaves]
        coded = [i for i, module in enumerate(self.modules) if module]
        chosen = sorted({coded[0], coded[len(coded) // 2], coded[-1]})[:_SAMPLED]
        self._samples = {}
        for i in chosen:
            t = self._read(i)
            step = max(1, t.shape[0] // choose.SAMPLE_ROWS)
            self._samples[i] = t.take_rows(np.arange(0, t.shape[0], step))

    def _read(self, i: int) -> GroupedTensor:
        return self.work.source.grouped(self.leaves[i], str(self.modules[i]))

    def carriers(self, exact: bool = False) -> Iterable[BlockType]:
        return BLOCKS.values() if exact else choose.carriers(list(self._samples.values()))

    def automatic(self) -> _Made:
        """`--type auto` over the whole stack."""
        made = self.first(self.carriers(), choose.CARRIED_LIMIT)
        if made is None:
            *smaller, last = choose.rounders(self.tensor.shape[-1])
            made = self.first(smaller, choose.ROUNDED_LIMIT, rounding=True) or self.forced(last)
        return made

    def first(self, blocks: Iterable[BlockType], limit: float, rounding: bool = False) -> _Made | None:
        """The first of some types that adds at most `limit` of the noise over all parts; None where none does."""
        for block in blocks:
            seen = self._mapped(self._samples, block, rounding)
            if seen is None or seen.share > choose.CLEARLY_ABOVE * limit:
                continue
            made = self._all(block, carried=not rounding, rounded=rounding)
            if made is not None and made.fidelity.share <= limit:
                return made
        return None

    def forced(self, block: BlockType) -> _Made:
        """A given type: each part's codes carried where it can hold them, else rounded anew."""
        made = self._all(block, carried=True, rounded=True)
        assert made is not None
        return made

    def _mapped(self, samples: dict[int, GroupedTensor], block: BlockType, rounding: bool) -> Fidelity | None:
        total = None
        for i, t in samples.items():
            part = self._part(i, t, block, not rounding, rounding)
            if part is None:
                return None
            total = part.fidelity if total is None else total + part.fidelity
        return total

    def _part(self, i: int, t: GroupedTensor, block: BlockType, carried: bool, rounded: bool) -> Mapped | None:
        """One part in a type; `carried`, `rounded`: what may be done with its codes. None where neither can be."""
        if carried:
            try:
                return carry(t, block)
            except CannotCarryError:
                pass
        return choose.round_anew(t, block, self.work.column_importance(self.tensor, i)) if rounded else None

    def _all(self, block: BlockType, carried: bool, rounded: bool) -> _Made | None:
        columns = self.tensor.shape[-1]
        data = np.empty((math.prod(self.tensor.shape[:-1]), row_bytes(block, columns)), np.uint8)
        made = _Made(block, data, Fidelity(0, 0.0, 0.0, 0.0, 0), set(BLOCKS))
        notes: list[str] = []
        at = 0
        for i, module in enumerate(self.modules):
            if module is None:
                made.floats += 1
                for x in self.work.source.floats(self.leaves[i]):
                    rows = quantize_rows(x, block, self.work.column_importance(self.tensor, i))
                    data[at : at + len(x)] = rows.data
                    at += len(x)
                    made.float_error += rows.error
                    made.float_signal += rows.signal
                continue
            t = self._read(i)
            part = self._part(i, t, block, carried, rounded)
            if part is None:
                return None
            data[at : at + len(part.data)] = part.data
            at += len(part.data)
            made.fidelity += part.fidelity
            free = choose.exact_type(t) if made.exact else None
            made.exact &= {free.name} if free else set()
            notes += t.notes
        self.notes += notes
        return made

    def result(self, made: _Made) -> Result:
        tensor, block = self.tensor, made.block
        how = CARRIED if made.fidelity.kept else ROUNDED
        free = next(iter(made.exact), None) if made.fidelity.error else None
        if free and BLOCKS[free].bpw > block.bpw:
            free = None
        if made.floats:
            nmse = made.float_error / made.float_signal if made.float_signal else 0.0
            self.notes.append(
                f"{tensor.name}: {made.floats} of its {len(self.leaves)} parts came as floats and are {block.name} "
                f"like the others (NMSE {nmse:.1e})"
            )
        report = TensorReport(
            tensor.name, source_name(tensor), tensor.kind, block.name, tensor.shape, made.data.nbytes, how,
            made.fidelity, free, self.notes,
        )  # fmt: skip
        return Result(made.data, report)

    def as_floats(self, name: str) -> Result:
        """All parts dequantized and stored as floats."""
        tensor = self.tensor
        chunks: list[np.ndarray] = []
        total = Fidelity(0, 0.0, 0.0, 0.0, 0)
        for i, module in enumerate(self.modules):
            if module is None:
                chunks += [as_float(x, name, tensor.name) for x in self.work.source.floats(self.leaves[i])]
                continue
            t = self._read(i)
            exact = t.dequantize()
            chunks.append(as_float(exact, name, tensor.name))
            error = float(np.square(float_value(chunks[-1], name) - exact, dtype=np.float64).sum())
            signal = float(np.square(exact, dtype=np.float64).sum())
            total += Fidelity(exact.size, error, signal, t.noise(), 0)
            self.notes += t.notes
        data = np.concatenate(chunks)
        report = TensorReport(
            tensor.name, source_name(tensor), tensor.kind, name, tensor.shape, data.nbytes, ROUNDED, total, None,
            self.notes,
        )  # fmt: skip
        return Result(data, report)

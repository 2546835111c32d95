"""The block type of a tensor of codes, which has one part or several (a layer's experts).

    auto     the smallest K-quant (Q8_0 for 7 and 8 bits) that carries the codes and adds less than 1% of the
             checkpoint's own noise; if none does, the smallest type of any kind that does. If no type carries them so
             closely, or at all (act-order), the smallest type that adds under 15%: each part's codes are carried or
             its exact weights requantized, whichever is closer
    exact    the smallest type whose weights are the checkpoint's, bit for bit; auto's if there is none
    forced   a given type: codes are carried if it can hold them, else requantized
    at_most  auto's type, or a given one if that is smaller

Types for some checkpoints or some builds of llama.cpp only (ternary weights, 4-bit floats, Q2_0) are tried if they are
named, before all others.

A type is judged by sampled rows, and by all rows if those are too close to a limit. So is whether a part's codes are
carried to a given type (`carries`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bridge.blocks import BLOCKS, FP4, NEWER, BlockType
from bridge.blocks.integers.q8_0 import Q8_0
from bridge.blocks.read import WRITTEN
from bridge.blocks.small.tq2_0 import TQ2_0
from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.encode.carrying.carry import (
    CannotCarryError,
    Fidelity,
    Mapped,
    carry,
    fractional,
    mirrored_to_fit,
    obstacle,
)
from bridge.encode.limits import CARRIED_LIMIT, REQUANTIZED_LIMIT
from bridge.encode.rounding.round_rows import actorder_importance, quantize_rows
from bridge.system.cpu.row_threads import chunks

# a sample's share within this factor of the limit decides nothing
_UNDECIDED_CARRIED = 1.5  # few rows may cost most
_UNDECIDED_REQUANTIZED = 1.1  # rows are alike

# read_parts(sampled): a tensor's parts, whole or sampled rows of some, each with the importance of its columns or None
Parts = Iterable[tuple[CodedTensor, np.ndarray | None]]
ReadParts = Callable[[bool], Parts]


@dataclass(frozen=True)
class Choice:
    """A type, the reason, and the share of the checkpoint's noise that it may add (None: any)."""

    type: str
    reason: str
    limit: float | None = None


def choose(
    mode: str, asked: BlockType | None, read_parts: ReadParts, columns: int, extra_types: Sequence[BlockType] = ()
) -> Choice:
    """The type of a tensor of codes.

    mode         auto, exact, forced or at_most; the last two with the type `asked`
    read_parts   read_parts(sampled) yields the tensor's parts
    columns      of the tensor
    extra_types  types beyond BLOCKS that may be used
    """
    if mode == "forced":
        assert asked is not None
        return Choice(asked.name, "asked for")
    samples = list(read_parts(True))
    if mode == "exact":
        exact = _first_within([*extra_types, *BLOCKS.values()], 0.0, samples, read_parts, carry_part)
        if exact is not None:
            return Choice(exact.name, "bit-exact", 0.0)
    auto = _auto(samples, read_parts, columns, extra_types)
    if mode == "exact":
        return Choice(auto.type, f"no type holds it bit for bit; {auto.reason}", auto.limit)
    if asked is not None and WRITTEN[auto.type].bpw > asked.bpw:
        return Choice(asked.name, "asked for")
    return auto


def _auto(samples: Parts, read_parts: ReadParts, columns: int, extra_types: Sequence[BlockType]) -> Choice:
    tensors = [t for t, _ in samples]
    block = _first_within(carriers(tensors, extra_types), CARRIED_LIMIT, samples, read_parts, carry_part)
    if block is not None:
        ternary = next((t for t in tensors if isinstance(t, GroupedTensor) and t.ternary), None)
        lost = ternary and obstacle(ternary, TQ2_0)
        return Choice(block.name, f"codes carried; {lost}" if lost else "codes carried", CARRIED_LIMIT)
    why = f"no type carries its codes within {CARRIED_LIMIT:.0%}" if all(t.sequential for t in tensors) else "act-order"
    if decoded := next((t for t in tensors if isinstance(t, DecodedTensor)), None):
        why = decoded.obstacle
    bits = max(t.bits for t in tensors)
    # a type of a quarter of the levels would add 16 times the noise: no need to compile its kernels
    smaller = [b for b in requantizers(columns)[:-1] if 4 * b.levels > 2**bits]
    block = _first_within(smaller, REQUANTIZED_LIMIT, samples, read_parts, map_to)
    if block is not None:
        why += f": the smallest type that adds under {REQUANTIZED_LIMIT:.0%} of the checkpoint's noise"
        return Choice(block.name, why, REQUANTIZED_LIMIT)
    return Choice(Q8_0.name, f"{why}, nor does a smaller type add under {REQUANTIZED_LIMIT:.0%}")


def _first_within(
    blocks: Iterable[BlockType],
    limit: float,
    samples: Parts,
    read_parts: ReadParts,
    mapped: Callable[[CodedTensor, BlockType, np.ndarray | None], Mapped],
) -> BlockType | None:
    """The first of some types in which all parts together add at most `limit` of their noise; None where none does."""
    within = _UNDECIDED_CARRIED if mapped is carry_part else _UNDECIDED_REQUANTIZED
    for block in blocks:
        try:
            share = _share(samples, block, mapped)
            near = limit / within < share <= within * limit
            fits = block.clips or mapped is not carry_part or all(_fits_any(t, block) for t, _ in samples)
            if near or (share <= limit and not fits):
                share = _share(read_parts(False), block, mapped)
        except CannotCarryError:
            continue
        if share <= limit:
            return block
    return None


def _share(
    parts: Parts, block: BlockType, mapped: Callable[[CodedTensor, BlockType, np.ndarray | None], Mapped]
) -> float:
    total = Fidelity(0, 0.0, 0.0, 0.0, 0)
    for t, importance in parts:
        total += mapped(t, block, importance).fidelity
    return total.share


def carry_part(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
    """`carry`, as one of the ways to map a part."""
    return carry(t, block)


def carriers(tensors: Sequence[CodedTensor], extra_types: Sequence[BlockType] = ()) -> Iterator[BlockType]:
    """The types that `auto` tries for codes, in its order: those that can hold all of these, judged by shapes."""
    wide = any(t.bits >= 7 for t in tensors)
    tried: set[tuple[int, ...]] = set()
    usual = sorted(BLOCKS.values(), key=lambda b: not b.last_resort if wide else not b.is_k)
    for block in (*extra_types, *usual):
        grid = (block.sub, block.zero, block.scale_hi, block.min_hi, block.dmin_at)
        if (block.is_k and grid in tried) or any(obstacle(t, block) for t in tensors):
            continue  # the same grid of scales with wider codes gains nothing
        tried.add(grid)
        yield block


def requantizers(columns: int) -> list[BlockType]:
    """The types that weights are requantized to, the smallest first, Q8_0 last."""
    k_quants = columns % 256 == 0
    fitting = [b for b in BLOCKS.values() if not b.last_resort and columns % b.size == 0 and b.is_k == k_quants]
    return [*fitting, Q8_0]


def _fits_any(t: CodedTensor, block: BlockType) -> bool:
    """Whether a type holds all codes that are possible with these zero points."""
    if not isinstance(t, GroupedTensor):
        return True
    t = mirrored_to_fit(t, block)
    return not block.zero or bool(
        block.zero >= t.zeros.max() and block.zero + t.levels - 1 - t.zeros.min() < block.levels
    )


def has_exact_fp16_scales(t: CodedTensor) -> bool:
    """Whether plain types hold the scales and zero points exactly: halves and integers."""
    return (
        isinstance(t, GroupedTensor)
        and np.array_equal(t.scales, t.scales.astype(np.float16))
        and not fractional(t.zeros)
    )


def exact_type(t: CodedTensor) -> BlockType | None:
    """The smallest plain type that holds the tensor bit for bit, judged from its scales and zero points alone."""
    if isinstance(t, Fp4Tensor):
        return FP4[t.kind] if obstacle(t, FP4[t.kind]) is None else None
    if not has_exact_fp16_scales(t):
        return None
    for block in (NEWER | BLOCKS).values():
        if not block.is_k and not block.has_min and obstacle(t, block) is None and _fits_any(t, block):
            return block
    return None


def requantize(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
    """Quantize the tensor's dequantized weights to a type; the checkpoint's codes are lost.

    importance  float32 [in]: the weight of an error in each column; None: 1, or `actorder_importance` with act-order
    """
    if importance is None and not t.sequential:
        importance = actorder_importance(t.groups())
    out, columns = t.shape
    parts = []
    error = signal = 0.0
    for rows in chunks(out, columns):
        part = quantize_rows(t.dequantize(rows), block, importance)
        parts.append(part.data)
        error += part.error
        signal += part.signal
    return Mapped(block, np.concatenate(parts), Fidelity(out * columns, error, signal, t.noise(), 0))


def map_to(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
    """A part in a given type, as `carries` would have it for all its rows."""
    return _carried_if_closer(t, block, importance)[0]


def _carried_if_closer(t: CodedTensor, block: BlockType, importance: np.ndarray | None) -> tuple[Mapped, bool]:
    """A part in a given type, and whether its codes are carried."""
    try:
        carried = carry(t, block)
    except CannotCarryError:
        return requantize(t, block, importance), False
    if carried.fidelity.share <= CARRIED_LIMIT:
        return carried, True
    other = requantize(t, block, importance)
    return (carried, True) if carried.fidelity.error <= other.fidelity.error else (other, False)


def carries(read: Callable[[bool], CodedTensor], block: BlockType, importance: np.ndarray | None = None) -> bool:
    """Whether a part's codes are carried to a type: if they fit and add under CARRIED_LIMIT, or requantizing adds more.

    read  read(sampled) returns some of the part's rows, or all of them
    """
    t = read(True)
    try:
        share = carry(t, block).fidelity.share
        if not CARRIED_LIMIT / _UNDECIDED_CARRIED < share <= _UNDECIDED_CARRIED * CARRIED_LIMIT:
            if share <= CARRIED_LIMIT:
                return True
            other = requantize(t, block, importance).fidelity.share
            if not other / _UNDECIDED_CARRIED < share < _UNDECIDED_CARRIED * other:
                return share <= other
        return _carried_if_closer(read(False), block, importance)[1]
    except CannotCarryError:
        return False


def carry_or_requantize(
    t: CodedTensor, block: BlockType, importance: np.ndarray | None = None, carried: bool = True
) -> tuple[Mapped, str]:
    """A part as planned, and why codes were lost, if some were. Codes that cannot be carried are requantized."""
    reason = ""
    if carried:
        try:
            mapped = carry(t, block)
            return mapped, mapped.reason
        except CannotCarryError as cannot:
            reason = cannot.reason
    return requantize(t, block, importance), reason or _why_requantized(t, block)


def _why_requantized(t: CodedTensor, block: BlockType) -> str:
    reason = obstacle(t, block)
    if reason is not None:
        return reason
    if block.zero and isinstance(t, GroupedTensor) and fractional(t.zeros):
        return f"{block.name} has no place for fractional zero points"
    if not (block.clips or _fits_any(t, block)):
        return f"codes less their zero points do not fit in {block.name}'s {block.levels} codes"
    return f"{block.name} comes closer to the weights with other codes"


def must_carry(limit: float | None) -> bool:
    """Whether a type of this limit was chosen because it carries every code."""
    return limit is not None and limit <= CARRIED_LIMIT

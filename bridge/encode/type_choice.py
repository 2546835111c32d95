"""Which block type a tensor of codes becomes, of one part or several (a layer's experts): a matrix is a stack of one.

    auto     the smallest K-quant (Q8_0 for 7 and 8 bits) that carries the codes and adds less than 1% of the
             checkpoint's own noise; where none does, the smallest type of any kind that does. Where no type
             carries them so closely, or at all (act-order), the smallest type that adds under 15%: in it each
             part's codes are carried or its exact weights requantized, whichever is closer
    exact    the smallest type whose weights are the checkpoint's, bit for bit; auto's where there is none
    forced   a given type: codes carried where it can hold them, else requantized
    at_most  auto's type, or a given one where that is smaller

Types that only some checkpoints or some builds of llama.cpp have a use for (4-bit floats, Q2_0) are tried where they
are named, before all others.

A type is judged by sampled rows. Where they leave it open (near the limit, or whether shifted codes fit), all rows are
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks import BLOCKS, FP4, NEWER, Q8_0, TYPES, BlockType
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor
from bridge.checkpoint.trellis_floats import DecodedTensor
from bridge.encode.carry import CannotCarryError, Fidelity, Mapped, carry, fractional, mirrored_to_fit, obstacle
from bridge.encode.round_rows import actorder_importance, quantize_rows

CARRIED_LIMIT = 0.01  # of the checkpoint's noise: what auto lets carried tensors add
REQUANTIZED_LIMIT = 0.15  # and tensors that must be requantized
# a sample's share this near to the limit, either way, says nothing
_OPEN_CARRIED = 1.5  # few rows may cost most
_OPEN_REQUANTIZED = 1.1  # rows are alike
_CHUNK_WEIGHTS = 1 << 22  # rows dequantized at a time

# a tensor's parts, whole or sampled rows of some, each with the importance of its columns or None
Look = Callable[[bool], Iterable[tuple[CodedTensor, np.ndarray | None]]]


@dataclass(frozen=True)
class Choice:
    """A type, why, and the most of the checkpoint's noise that it may add (None: whatever it adds)."""

    type: str
    reason: str
    limit: float | None = None


def choose(mode: str, asked: BlockType | None, look: Look, columns: int, special: Sequence[BlockType] = ()) -> Choice:
    """The type of a tensor of codes.

    mode     auto, exact, forced or at_most; the last two with the type `asked`
    look     look(sampled) yields the tensor's parts
    columns  of the tensor
    special  types beyond BLOCKS that may be used
    """
    if mode == "forced":
        assert asked is not None
        return Choice(asked.name, "asked for")
    samples = list(look(True))
    exact = _first_within([*special, *BLOCKS.values()], 0.0, samples, look, carry_part) if mode == "exact" else None
    if exact is not None:
        return Choice(exact.name, "bit-exact", 0.0)
    auto = _auto(samples, look, columns, special)
    if mode == "exact":
        return Choice(auto.type, f"no type holds it bit for bit; {auto.reason}", auto.limit)
    if asked is not None and TYPES[auto.type].bpw > asked.bpw:
        return Choice(asked.name, "asked for")
    return auto


def _auto(
    samples: Sequence[tuple[CodedTensor, np.ndarray | None]], look: Look, columns: int, special: Sequence[BlockType]
) -> Choice:
    tensors = [t for t, _ in samples]
    block = _first_within(carriers(tensors, special), CARRIED_LIMIT, samples, look, carry_part)
    if block is not None:
        return Choice(block.name, "codes carried", CARRIED_LIMIT)
    why = "act-order" if not all(t.sequential for t in tensors) else "no type carries its codes within 1%"
    if any(isinstance(t, DecodedTensor) for t in tensors):
        why = DecodedTensor.obstacle
    bits = max(t.bits for t in tensors)
    # a type of a quarter of the levels would add 16 times the noise: no need to compile its kernels
    smaller = [b for b in requantizers(columns)[:-1] if 4 * b.levels > 2**bits]
    block = _first_within(smaller, REQUANTIZED_LIMIT, samples, look, map_to)
    if block is not None:
        return Choice(block.name, f"{why}: the smallest type that adds under 15% of its noise", REQUANTIZED_LIMIT)
    return Choice(Q8_0.name, f"{why}, nor does a smaller type add under 15%")


def _first_within(
    blocks: Iterable[BlockType],
    limit: float,
    samples: Sequence[tuple[CodedTensor, np.ndarray | None]],
    look: Look,
    mapped: Callable[[CodedTensor, BlockType, np.ndarray | None], Mapped],
) -> BlockType | None:
    """The first of some types in which all parts together add at most `limit` of their noise; None where none does."""
    near_by = _OPEN_CARRIED if mapped is carry_part else _OPEN_REQUANTIZED
    for block in blocks:
        try:
            share = _share(samples, block, mapped)
            near = limit / near_by < share <= near_by * limit
            # Q8_0 clips what leaves it
            fits = block is Q8_0 or mapped is not carry_part or all(_fits_any(t, block) for t, _ in samples)
            if near or (share <= limit and not fits):
                share = _share(look(False), block, mapped)
        except CannotCarryError:
            continue
        if share <= limit:
            return block
    return None


def _share(
    parts: Iterable[tuple[CodedTensor, np.ndarray | None]],
    block: BlockType,
    mapped: Callable[[CodedTensor, BlockType, np.ndarray | None], Mapped],
) -> float:
    total = Fidelity(0, 0.0, 0.0, 0.0, 0)
    for t, importance in parts:
        total += mapped(t, block, importance).fidelity
    return total.share


def carry_part(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
    """`carry`, as one of the ways to map a part."""
    return carry(t, block)


def carriers(tensors: Sequence[CodedTensor], special: Sequence[BlockType] = ()) -> Iterator[BlockType]:
    """The types that `auto` tries for codes, in its order, as far as shapes tell that they can hold all of these."""
    wide = any(t.bits >= 7 for t in tensors)
    tried: set[tuple[int, ...]] = set()
    usual = sorted(BLOCKS.values(), key=lambda b: b is not Q8_0 if wide else not b.is_k)
    for block in (*special, *usual):
        grid = (block.sub, block.zero, block.scale_hi, block.min_hi, block.dmin_at)
        if (block.is_k and grid in tried) or any(obstacle(t, block) for t in tensors):
            continue  # the same grid of scales with wider codes gains nothing
        tried.add(grid)
        yield block


def requantizers(columns: int) -> list[BlockType]:
    """The types that weights are requantized to, the smallest first, Q8_0 last."""
    k_quants = columns % 256 == 0
    fitting = [b for b in BLOCKS.values() if b is not Q8_0 and columns % b.size == 0 and b.is_k == k_quants]
    return [*fitting, Q8_0]


def _fits_any(t: CodedTensor, block: BlockType) -> bool:
    """Whether a type holds whatever codes there may be about these zero points."""
    if not isinstance(t, GroupedTensor):
        return True
    t = mirrored_to_fit(t, block)
    return not block.zero or bool(
        block.zero >= t.zeros.max() and block.zero + 2**t.bits - 1 - t.zeros.min() < block.levels
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
    """Quantize the tensor's dequantized weights to a type; the codes are not the checkpoint's any more.

    importance  float32 [in] or None: what an error in a column weighs; for act-order tensors None means
                the order itself (`actorder_importance`).
    """
    if importance is None and not t.sequential:
        importance = actorder_importance(t.groups())
    out, columns = t.shape
    parts = []
    error = signal = 0.0
    step = max(1, _CHUNK_WEIGHTS // columns)
    for start in range(0, out, step):
        part = quantize_rows(t.dequantize(slice(start, start + step)), block, importance)
        parts.append(part.data)
        error += part.error
        signal += part.signal
    return Mapped(block, np.concatenate(parts), Fidelity(out * columns, error, signal, t.noise(), 0))


def map_to(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None, keep: bool = False) -> Mapped:
    """A part in a given type: codes carried where it can hold them; but without `keep` requantized where carrying adds
    more than `CARRIED_LIMIT` and requantizing comes closer."""
    mapped, why = _carried_or_why(t, block, importance, keep)
    if not why and mapped is not None:
        return mapped
    return replace(requantize(t, block, importance) if mapped is None else mapped, reason=why)


def keeps_codes(t: CodedTensor, block: BlockType, importance: np.ndarray | None = None, keep: bool = False) -> bool:
    """Whether `map_to` carries the codes."""
    return not _carried_or_why(t, block, importance, keep)[1]


def must_keep(limit: float | None) -> bool:
    """Whether a type of this limit was chosen because it carries every code."""
    return limit is not None and limit <= CARRIED_LIMIT


def _carried_or_why(
    t: CodedTensor, block: BlockType, importance: np.ndarray | None, keep: bool
) -> tuple[Mapped | None, str]:
    """The codes carried and no reason; or why not, with what requantizing gave where that decided."""
    try:
        carried = carry(t, block)
    except CannotCarryError as cannot:
        return None, cannot.reason
    if keep or carried.fidelity.share <= CARRIED_LIMIT:
        return carried, ""
    other = requantize(t, block, importance)
    if carried.fidelity.error <= other.fidelity.error:
        return carried, ""
    shifted = block.zero and isinstance(t, GroupedTensor) and fractional(t.zeros)
    why = "has no place for fractional zero points" if shifted else "comes closer to the weights with other codes"
    return other, f"{block.name} {why}"

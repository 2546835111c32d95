"""Which block type a grouped tensor becomes.

    auto     the smallest K-quant (Q8_0 for 7 and 8 bits) that carries the codes and adds less than 1% of the
             checkpoint's own noise; where none does, the smallest type of any kind that does
    exact    the smallest type whose weights are the checkpoint's, bit for bit
    forced   a given type: codes carried where it can hold them, else its weights are rounded anew

Tensors whose codes no type can carry (act-order) are rounded anew from their exact dequantized values to
the smallest type that adds under 15% of the checkpoint's noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bridge.blocks import BLOCKS, Q8_0, BlockType
from bridge.checkpoint.grouped import GroupedTensor
from bridge.mapping.carry import CannotCarryError, Fidelity, Mapped, carry, fractional, why_not
from bridge.mapping.floats import actorder_importance, quantize_rows

CARRIED_LIMIT = 0.01  # of the checkpoint's noise: what auto lets carried tensors add
ROUNDED_LIMIT = 0.15  # and tensors that must be rounded anew
SAMPLE_ROWS = 64
CLEARLY_ABOVE = 1.5  # a sample this far above the limit rules a type out
_CHUNK_WEIGHTS = 1 << 22  # rows dequantized at a time


def carry_auto(t: GroupedTensor) -> Mapped | None:
    """The smallest type that carries the codes within `CARRIED_LIMIT`, or None."""
    for block in carriers([t]):
        mapped = _within(t, block, CARRIED_LIMIT)
        if mapped:
            return mapped
    return None


def carriers(tensors: Sequence[GroupedTensor]) -> Iterator[BlockType]:
    """The types that `auto` tries for codes, in its order, as far as shapes tell that they can hold all of these."""
    wide = any(t.bits >= 7 for t in tensors)
    preferred = [b for b in BLOCKS.values() if b is Q8_0 or (b.is_k and not wide)]
    if not wide:
        preferred.remove(Q8_0)
    others = [b for b in BLOCKS.values() if b not in preferred]
    tried: set[tuple[int, ...]] = set()
    for block in preferred + others:
        grid = (block.sub, block.zero, block.scale_hi, block.min_hi, block.dmin_at)
        if (block.is_k and grid in tried) or any(why_not(t, block) for t in tensors):
            continue  # the same grid of scales with wider codes gains nothing
        tried.add(grid)
        yield block


def rounders(columns: int) -> list[BlockType]:
    """The types that weights are rounded anew to, the smallest first, Q8_0 last."""
    k_quants = columns % 256 == 0
    fitting = [b for b in BLOCKS.values() if b is not Q8_0 and columns % b.size == 0 and b.is_k == k_quants]
    return [*fitting, Q8_0]


def _within(t: GroupedTensor, block: BlockType, limit: float) -> Mapped | None:
    """The carried tensor if it adds at most `limit` of the noise, else None; a sample of rows is looked at first."""
    try:
        step = t.shape[0] // SAMPLE_ROWS
        if step > 1 and carry(t, block, slice(None, None, step)).fidelity.share > CLEARLY_ABOVE * limit:
            return None
        mapped = carry(t, block)
    except CannotCarryError:
        return None
    return mapped if mapped.fidelity.share <= limit else None


def carry_exact(t: GroupedTensor) -> Mapped | None:
    """The smallest type that holds the tensor bit for bit, or None where none does."""
    for block in BLOCKS.values():
        if why_not(t, block) is None:
            mapped = _within(t, block, 0.0)
            if mapped:
                return mapped
    return None


def exact_type(t: GroupedTensor) -> BlockType | None:
    """The smallest plain type that holds the tensor bit for bit, judged from its scales and zero points alone."""
    if not np.array_equal(t.scales, t.scales.astype(np.float16)) or fractional(t.zeros):
        return None
    low, high = t.zeros.min(), t.zeros.max()
    for block in BLOCKS.values():
        fits = block.zero >= high and block.zero + 2**t.bits - 1 - low < block.levels
        if not block.is_k and not block.has_min and fits and why_not(t, block) is None:
            return block
    return None


def round_anew(t: GroupedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
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


def round_auto(t: GroupedTensor, importance: np.ndarray | None = None) -> Mapped:
    """The smallest K-quant (or Q8_0) that adds at most `ROUNDED_LIMIT` of the checkpoint's noise; at worst Q8_0."""
    step = max(1, t.shape[0] // SAMPLE_ROWS)
    sample = t.take_rows(np.arange(0, t.shape[0], step))
    for block in rounders(t.shape[1])[:-1]:
        if 4 * block.levels <= 2**t.bits:  # it would add 16 times the noise: no need to compile its kernels
            continue
        if step > 1 and round_anew(sample, block, importance).fidelity.share > ROUNDED_LIMIT:
            continue
        mapped = round_anew(t, block, importance)
        if mapped.fidelity.share <= ROUNDED_LIMIT:
            return mapped
    return map_to(t, Q8_0, importance)


def map_auto(t: GroupedTensor, importance: np.ndarray | None = None) -> Mapped:
    """`--type auto`: codes carried where any type can, else rounded anew."""
    return carry_auto(t) or round_auto(t, importance)


def map_to(t: GroupedTensor, block: BlockType, importance: np.ndarray | None = None) -> Mapped:
    """A given type: codes carried where it can hold them, else rounded anew.

    Codes that are shifted by fractional zero points are carried where that is closer.
    """
    if why_not(t, block) is None:
        try:
            mapped = carry(t, block)
        except CannotCarryError:
            pass
        else:
            if not block.zero or not fractional(t.zeros):
                return mapped
            anew = round_anew(t, block, importance)
            return mapped if mapped.fidelity.error <= anew.fidelity.error else anew
    return round_anew(t, block, importance)

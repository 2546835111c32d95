"""Blocks back to codes in groups: what a GPTQ or AWQ checkpoint holds of a GGUF's tensor.

    Q4_0, Q8_0            the codes, groups of 32, zero points of 8 and 128; the scales are halves: bit for bit
    Q3_K, Q6_K, Q5_0      the codes less their zero, in 3, 4 or 8 bits
    Q2_K, Q4_K, Q5_K      the codes, if all zero points min / scale are near whole numbers: `convert` makes such files
                          of integer checkpoints. Native K-quants have zero points anywhere
    everything else       rounded to 8 bits in groups of 32

Neighbouring sub-blocks with the same scale and zero point were one group: the largest size for which that holds in all
rows is taken. Nothing depends on metadata.
"""

import numpy as np

from bridge.blocks import TYPES, BlockType
from bridge.checkpoint.grouped import GroupedTensor
from bridge.encode.block_bytes import unpack_fields

_WHOLE = 0.2  # zero points of a carried tensor are nearer to whole numbers
_SIZES = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)


def codes_of(name: str, type: str, raw: np.ndarray, bits: tuple[int, ...]) -> GroupedTensor | None:
    """The codes of blocks uint8 [out, row bytes], with as few of these bits as hold them; None where there are none.

    Scales are rounded to halves: one rounding of d * sc.
    """
    block = TYPES.get(type)
    if block is None or block.values or (block.has_min and not block.is_k):
        return None
    q, sc, mn = unpack_fields(block, raw)
    scales = np.repeat(_halves(block, raw, block.d_at), block.subs, 1)
    if block.is_k:
        scales = scales * sc
    if block.has_min:
        found = _affine(block, q, scales, np.repeat(_halves(block, raw, block.dmin_at), block.subs, 1) * mn)
    else:
        found = _scaled(block, q, scales, bits)
    if found is None:
        return None
    codes, zeros, width = found
    width = next((n for n in bits if n >= width), 0)
    if not width:
        return None
    negative = _by_column(scales < 0, block.sub) if block.has_min else None
    if negative is not None:  # the mirrored codes of a block with a negative d
        codes = np.where(negative, block.levels - 1 - codes, codes)
        scales = np.abs(scales)
    scales = scales.astype(np.float16).astype(np.float32)
    size = _group_size(scales, zeros, block.sub, q.shape[1])
    step = size // block.sub
    return GroupedTensor(
        name, width, codes.astype(np.uint8), np.ascontiguousarray(scales[:, ::step]),
        np.ascontiguousarray(zeros[:, ::step]), size,
    )  # fmt: skip


def rounded(name: str, weights: np.ndarray, size: int = 32) -> GroupedTensor:
    """Weights float32 [out, in] rounded to 8 bits, symmetric, in groups of `size` columns, which divides them."""
    groups = weights.reshape(len(weights), -1, size)
    scales = (np.abs(groups).max(-1) / 127).astype(np.float16).astype(np.float32)
    steps = np.rint(groups / np.where(scales == 0, 1, scales)[..., None]).clip(-128, 127)
    codes = (steps + 128).astype(np.uint8).reshape(weights.shape)
    return GroupedTensor(name, 8, codes, scales, np.full_like(scales, 128), size)


def _halves(block: BlockType, raw: np.ndarray, at: int) -> np.ndarray:
    """float32 [rows, blocks]: the halves at a byte of every block."""
    bytes_ = raw.reshape(len(raw), -1, block.nbytes)[:, :, at : at + 2]
    return np.ascontiguousarray(bytes_).view("<f2")[..., 0].astype(np.float32)


def _by_column(values: np.ndarray, sub: int) -> np.ndarray | None:
    """A flag of every sub-block for all its columns; None where none is set."""
    return np.repeat(values, sub, 1) if values.any() else None


def _affine(
    block: BlockType, q: np.ndarray, scales: np.ndarray, mins: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Codes, whole zero points of all sub-blocks and the bits of the codes; None where zero points are not whole."""
    top = block.levels - 1
    empty = scales == 0
    if (mins[empty] != 0).any():
        return None
    zeros = np.divide(mins, scales, out=np.zeros_like(mins), where=~empty)
    zeros = np.where(scales < 0, top - zeros, zeros)
    whole = np.rint(zeros)
    if np.abs(zeros - whole).max(initial=0) > _WHOLE or whole.min(initial=0) < 0 or whole.max(initial=0) > top:
        return None
    return q, whole, top.bit_length()


def _scaled(
    block: BlockType, q: np.ndarray, scales: np.ndarray, bits: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Codes around the middle of as few bits as hold them, that middle as zero points, and the bits."""
    steps = q.astype(np.int16) - block.zero
    least, greatest = int(steps.min(initial=0)), int(steps.max(initial=0))
    width = next((n for n in bits if least >= -(1 << (n - 1)) and greatest < 1 << (n - 1)), None)
    if width is None:
        return None
    return steps + (1 << (width - 1)), np.full_like(scales, 1 << (width - 1)), width


def _group_size(scales: np.ndarray, zeros: np.ndarray, sub: int, columns: int) -> int:
    """The largest group size that all rows have."""
    for size in (columns, *_SIZES):
        step = size // sub
        if size % sub == 0 and columns % size == 0 and all(_equal(x, step) for x in (scales, zeros)):
            return size
    return sub


def _equal(values: np.ndarray, step: int) -> bool:
    runs = values.reshape(len(values), -1, step)
    return bool((runs == runs[:, :, :1]).all())

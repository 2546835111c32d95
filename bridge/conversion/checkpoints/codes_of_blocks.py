"""Blocks back to codes in groups: what a checkpoint of integer codes holds of a GGUF's tensor.

    Q4_0, Q8_0            the codes, groups of 32, zero points of 8 and 128; the scales are halves: bit for bit
    Q3_K, Q6_K, Q5_0      the codes less their zero, in 3, 4 or 8 bits; of TQ1_0 and TQ2_0 in 2
    IQ types, Q1_0        the values of codes, which are whole numbers of 5 bits in IQ1 and IQ3_S, 7 in IQ2 and IQ3_XXS,
                          and 8 in IQ4
    Q2_K, Q4_K, Q5_K,     the codes, if all zero points min / scale are near whole numbers: `convert` makes such files
    Q4_1, Q5_1            of integer checkpoints. A zero point outside the codes' range is brought into it, and its
                          group's codes with it, where they leave room. Native files have zero points anywhere
    Q4_1, Q5_1, Q4_K, ... the codes, with any offset, in formats that have one per group (MLX)
    MXFP4, NVFP4          4-bit floats with their scales, in formats that have them: bit for bit; else their values,
                          doubled, of 5 bits
    everything else       rounded to as few bits as add little to the type's own noise, in groups of 32

Neighbouring sub-blocks with the same scale and zero point were one group: the largest size for which that holds in all
rows is taken. Nothing depends on metadata.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import DTypeLike

from bridge.blocks import TYPES, BlockType
from bridge.blocks.read import READ
from bridge.checkpoint.formats.fp4 import GROUPS
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import ReusedArrays, gather_halves, halves_at, pack_words
from bridge.encode.block_bytes import unpack_fields, unpack_halves, unpack_scales

_WHOLE = 0.2  # zero points of a carried tensor are nearer to whole numbers
_NO_SIGN, _INFINITE = np.uint16(0x7FFF), 0x7C00  # of the bits of a half
_GREATEST = 0x5FFF  # 65504 / 128
_Codes = tuple[np.ndarray, np.ndarray, int]  # codes, zero points, and the bits of both
_SIZES = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)


def codes_of(
    name: str, type: str, raw: np.ndarray, bits: tuple[int, ...], offsets: bool = False, scale: float = 1.0
) -> GroupedTensor | None:
    """The codes of blocks uint8 [out, row bytes], with as few of these bits as hold them; None where there are none.

    offsets  zero points need not be whole numbers: scale * zero point is a half
    scale    of the whole tensor

    Scales are rounded to halves: one rounding of d * sc, and with `offsets` one of dmin * mn.
    """
    block = READ.get(type)
    if block is None:
        return None
    q, sc, mn = unpack_fields(block, raw)
    with np.errstate(invalid="ignore"):  # what is not finite is no code
        scales = unpack_scales(block, raw, sc) * np.float32(scale)
        mins = np.zeros_like(scales)
        if block.has_min:
            mins = np.repeat(unpack_halves(block, raw, block.dmin_at), block.subs, 1)
            mins *= mn if block.is_k else np.float32(-1)
    if not (np.isfinite(scales).all() and np.isfinite(mins).all()):
        return None
    if block.has_min:
        if offsets:
            return _with_offsets(name, block, q, scales, mins, bits)
        coded = _affine(block, q, scales, mins)
    else:
        coded = _scaled(block, q, scales, bits)
    if coded is None:
        return None
    codes, zeros, width = coded
    width = next((n for n in bits if n >= width), 0)
    if not width:
        return None
    if block.has_min:
        scales = np.abs(scales)
    with np.errstate(over="ignore"):
        scales = scales.astype(np.float16).astype(np.float32)
    return _grouped(name, width, codes, scales, zeros, block.sub)


def fp4_scales(type: str, raw: np.ndarray) -> np.ndarray:
    """The scales of MXFP4's or NVFP4's blocks uint8 [out, row bytes], as the bits of 8-bit floats: uint8 [out, G].

    The sign of NVFP4's is ignored, and its NaN is read as 0, as llama.cpp reads them.
    """
    block = TYPES[type]
    count = block.size // block.sub  # of a block, which begins with them
    heads = raw.view(f"u{count}").reshape(len(raw), -1, block.nbytes // count)[:, :, 0]
    heads = np.ascontiguousarray(heads).view(np.uint8)
    if type == "MXFP4":
        return heads
    heads = heads & 127
    return np.where(heads == 127, np.uint8(0), heads)


def has_nan_scale(type: str, raw: np.ndarray) -> bool:
    """Whether a scale of such blocks stands for NaN."""
    return type == "MXFP4" and bool((fp4_scales(type, raw) == 255).any())


def is_plain(type: str, raw: np.ndarray) -> bool:
    """Whether all scales and offsets of blocks uint8 [out, row bytes] are finite halves that are the type's only ones,
    128 times a scale is a half too, and no block has an offset alone: `codes_of` takes such rows whatever their codes
    are, and as they are."""
    block = TYPES.get(type)
    if block is None or block.is_k or block.values:
        return False
    scales = halves_at(block, raw, block.d_at) & _NO_SIGN
    if scales.max(initial=0) > _GREATEST:
        return False
    if not block.has_min:
        return True
    offsets = halves_at(block, raw, block.dmin_at) & _NO_SIGN
    return bool(offsets.max(initial=0) < _INFINITE and ((scales != 0) | (offsets == 0)).all())


def packed_of(
    name: str,
    type: str,
    pieces: Iterable[np.ndarray],
    shape: tuple[int, int],
    scale: float,
    transposed: bool,
    arrays: ReusedArrays,
) -> PackedTensor:
    """Blocks of TYPES_IN_WORDS, `is_plain` or without `has_nan_scale`, as words: without a byte per code.

    pieces      uint8 [rows, row bytes]: runs of rows that are `shape`, [out, in], together
    scale       of the whole tensor
    transposed  as GPTQ stores it
    arrays      for words, scales and biases
    """
    block, (out, columns) = TYPES[type], shape
    bits, groups = (block.levels - 1).bit_length(), columns // block.sub
    fp4, row = type in GROUPS, 0

    def empty(part: str, width: int, dtype: DTypeLike) -> np.ndarray:
        """[out, width], a view of its transpose if that is wanted."""
        return arrays.empty(part, (width, out), dtype).T if transposed else arrays.empty(part, (out, width), dtype)

    words = empty("words", columns * bits // 32, np.uint32)
    scales = empty("scales", groups, np.uint8 if fp4 else np.float16)
    biases = empty("biases", groups, np.float16) if block.has_min else None
    for raw in pieces:
        rows = slice(row, row := row + len(raw))
        pack_words(block, raw, words[rows])
        if fp4:
            scales[rows] = fp4_scales(type, raw)
            continue
        gather_halves(block, raw, block.d_at, scales[rows])
        if biases is not None:
            gather_halves(block, raw, block.dmin_at, biases[rows])
    kind, zero = (type, 0) if fp4 else ("int", block.zero)
    return PackedTensor(name, bits, words, scales, block.sub, zero, biases, kind, scale)


def regrouped(tensor: GroupedTensor, sizes: tuple[int, ...]) -> GroupedTensor | None:
    """The tensor in groups of the largest of these sizes that divides its own; None where there is none."""
    size = next((n for n in sorted(sizes, reverse=True) if tensor.group_size % n == 0), 0)
    if not size:
        return None
    step = tensor.group_size // size
    scales, zeros = (np.repeat(x, step, 1) for x in (tensor.scales, tensor.zeros))
    return replace(tensor, scales=scales, zeros=zeros, group_size=size)


def own_noise(type: str, raw: np.ndarray) -> float | None:
    """The quantization noise that a type has by itself, s^2 / 12 a weight, summed over blocks uint8 [out, row bytes];
    None for types whose values are not evenly spaced."""
    block = READ.get(type)
    if block is None or block.values:
        return None
    sc = unpack_fields(block, raw)[1] if block.is_k else np.empty(0, np.int8)
    scales = unpack_scales(block, raw, sc)
    return float(np.square(scales, dtype=np.float64).sum()) * block.sub / 12


def _by_column(values: np.ndarray, sub: int) -> np.ndarray | None:
    """A flag of every sub-block for all its columns; None where none is set."""
    return np.repeat(values, sub, 1) if values.any() else None


def _with_offsets(
    name: str, block: BlockType, q: np.ndarray, scales: np.ndarray, mins: np.ndarray, bits: tuple[int, ...]
) -> GroupedTensor | None:
    """The codes with scales and offsets that are halves; None where no width holds them.

    The zero point min / scale, times the scale, rounds to the same half again. A sub-block without a scale has one
    value: its codes become 1 and the value its scale.
    """
    width = next((n for n in bits if n >= (block.levels - 1).bit_length()), 0)
    if not width:
        return None
    scales, mins = (x.astype(np.float16).astype(np.float32) for x in (scales, mins))
    constant = (scales == 0) & (mins != 0)
    codes = q
    if (flat := _by_column(constant, block.sub)) is not None:
        codes, scales = np.where(flat, np.uint8(1), q), np.where(constant, -mins, scales)
    zeros = np.divide(mins, scales, out=np.zeros_like(mins), where=(scales != 0) & ~constant)
    return _grouped(name, width, codes, scales, zeros, block.sub)


def _grouped(name: str, bits: int, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, sub: int) -> GroupedTensor:
    """Codes with the scales and zero points of sub-blocks, in the largest groups."""
    size = _group_size(scales, zeros, sub, codes.shape[1])
    scales, zeros = (np.ascontiguousarray(x[:, :: size // sub]) for x in (scales, zeros))
    return GroupedTensor(name, bits, codes, scales, zeros, size)


def _affine(block: BlockType, q: np.ndarray, scales: np.ndarray, mins: np.ndarray) -> _Codes | None:
    """Codes for positive scales, whole zero points of all sub-blocks and the bits of both; None where zero points are
    not whole, or where codes leave no room to bring them into these bits: code - zero stays the same."""
    top = block.levels - 1
    empty = scales == 0
    if (mins[empty] != 0).any():
        return None
    zeros = np.divide(mins, scales, out=np.zeros_like(mins), where=~empty)
    zeros = np.where(scales < 0, top - zeros, zeros)
    rounded = np.rint(zeros)
    if np.abs(zeros - rounded).max(initial=0) > _WHOLE:
        return None
    codes = q
    if (negative := _by_column(scales < 0, block.sub)) is not None:  # the mirrored codes of a block with a negative d
        codes = np.where(negative, top - q, q)
    inside = np.clip(rounded, 0, top)
    if (shifts := inside - rounded).any():
        if np.abs(shifts).max() > top:
            return None
        shifted = codes + np.repeat(shifts.astype(np.int16), block.sub, 1)
        if shifted.min() < 0 or shifted.max() > top:
            return None
        codes = shifted.astype(np.uint8)
    return codes, inside, top.bit_length()


def _scaled(block: BlockType, q: np.ndarray, scales: np.ndarray, bits: tuple[int, ...]) -> _Codes | None:
    """Codes around the middle of as few bits as hold them, that middle as zero points, and the bits."""
    values = np.asarray(block.values, np.int8)[q] if block.values else q
    zero = 0 if block.values else block.zero
    least, greatest = int(values.min(initial=zero)) - zero, int(values.max(initial=zero)) - zero
    width = next((n for n in bits if least >= -(1 << (n - 1)) and greatest < 1 << (n - 1)), None)
    if width is None:
        return None
    middle = 1 << (width - 1)
    codes = q if middle == zero else values.view(np.uint8) + np.uint8((middle - zero) % 256)  # which wraps
    return codes, np.full_like(scales, middle), width


def _group_size(scales: np.ndarray, zeros: np.ndarray, sub: int, columns: int) -> int:
    """The largest group size that all rows have."""
    for size in (columns, *_SIZES):
        step = size // sub
        if size % sub == 0 and columns % size == 0 and all(_equal(x, step) for x in (scales, zeros)):
            return size
    return sub


def _equal(values: np.ndarray, step: int) -> bool:
    """Whether all runs of `step` values are of one value; the first row tells mostly."""
    return all(bool((r == r[:, :, :1]).all()) for r in (x.reshape(len(x), -1, step) for x in (values[:1], values)))

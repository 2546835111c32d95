"""Packs a GroupedTensor, or a PackedTensor, into a checkpoint's tensors: the inverse of the readers of these formats.

    gptq, gptq_v2   2, 3, 4 and 8 bits; `in` and `out` codes fill whole 32-bit words; any groups, also act-order
                    qweight int32 [in*b/32, out], qzeros int32 [G, out*b/32] (z - 1, or z), scales fp16 [G, out],
                    g_idx int32 [in]
    gptq_p          GPTQModel's planar packing: 2 to 8 bits, z, else like gptq_v2
    awq             4 bits, `out` a multiple of 8, groups that divide `in`, no act-order (version gemm)
                    qweight int32 [in, out/8], qzeros int32 [G, out/8], scales fp16 [G, out]
    compressed-tensors   pack-quantized: 4 and 8 bits, groups that divide `in`, no act-order
                    weight_packed int32 [out, in*b/32], weight_scale fp16 [out, G], weight_shape int64 [2],
                    weight_zero_point int32 [out*b/32, G], which symmetric modules lack
    hqq             axis 1: 1, 2, 3, 4, 5, 6 and 8 bits, groups that divide `in`, any zero points (halves), no act-order
                    W_q uint8 or int32, the codes of [G * out, group size], packed down the rows; scale, zero fp16
                    [G * out, 1]; shape int64 [2], and settings
    mlx             affine: 2, 3, 4, 5, 6 and 8 bits, groups of 32, 64 or 128, any zero points, no act-order
                    weight uint32 [out, in*b/32], scales and biases (-scale * zero point) fp16 [out, G]

v1 has no zero point of 0: see `zeros`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from bridge.checkpoint.formats.zeros import Dialect, recode
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.errors import BridgeError, parameter

Parts = dict[str, np.ndarray]  # by the last part of the name
Shapes = dict[str, tuple[str, tuple[int, int] | tuple[int]]]  # dtype as safetensors names it, shape

GPTQ_BITS = (2, 3, 4, 8)
PLANAR_BITS = (2, 3, 4, 5, 6, 7, 8)
MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_SIZES = (32, 64, 128)
HQQ_BITS = (1, 2, 3, 4, 5, 6, 8)
HQQ_SIZES = (16, 32, 64, 128, 256)
# bits -> codes of a word and the name of that packing; those of 3 bits in tenths of an int32
_HQQ_PACKINGS = {1: (8, "1bit_u8"), 2: (4, "2bit_u8"), 3: (10, "3bit_32"), 4: (2, "4bit_u8")}


@dataclass(frozen=True)
class PackedLayout:
    """How one format stores a module.

    refusal  (bits, group size, (out, in)) -> why the format cannot hold such a module, None if it can
    shapes   (bits, group size, (out, in)) -> its tensors' dtypes and shapes
    pack     module -> its tensors
    zeros    the tensor that a symmetric module lacks, if there is one
    shaped   the tensor that holds a module's shape, if there is one
    lanes    bits -> into how many parts of rows a word looks: with 2, it has codes of a row of each half
    """

    name: str
    refusal: Callable[[int, int, tuple[int, int]], str | None]
    shapes: Callable[[int, int, tuple[int, int]], Shapes]
    pack: Callable[[Any], Parts]
    zeros: str = ""
    shaped: str = ""
    lanes: Callable[[int], int] = lambda _bits: 1


def check(tensor: GroupedTensor, layout: PackedLayout) -> np.ndarray:
    """The scales as halves. Raises BridgeError unless the layout holds the tensor exactly, except zero points of 0."""
    scales = tensor.scales.astype(np.float16)
    top = 2**tensor.bits - 1
    why = layout.refusal(tensor.bits, tensor.group_size, tensor.shape)
    if tensor.group_of_column is not None and not layout.name.startswith("gptq"):
        why = f"{layout.name} has no act-order; quantize with groups of consecutive columns"
    elif tensor.codes.max(initial=0) > top:
        why = f"the code {tensor.codes.max()} is beyond {tensor.bits} bits"
    elif (
        layout.name not in ("mlx", "hqq")
        and not ((tensor.zeros == np.rint(tensor.zeros)) & (tensor.zeros >= 0) & (tensor.zeros <= top)).all()
    ):
        why = f"{layout.name} can only hold zero points that are integers from 0 to {top}; write a GGUF instead"
    elif not (scales == tensor.scales).all() or not np.isfinite(scales).all():
        why = "its scales are not half-precision floats; round them before choosing codes"
    if why:
        raise BridgeError(f"{tensor.name}: {why}")
    return scales


def zeros_of_0(tensor: GroupedTensor) -> int:
    """How many groups have a zero point of 0, which v1 cannot hold."""
    return int(np.count_nonzero(tensor.zeros == 0))


def raised(tensor: GroupedTensor) -> tuple[GroupedTensor, int]:
    """The tensor with zero points of 0 changed to 1 and those groups' codes raised by 1: the same weights, except
    at the greatest code, where they lose a step. Also the number of such weights."""
    by = (tensor.zeros == 0)[:, tensor.groups()]
    lost = by & (tensor.codes == 2**tensor.bits - 1)
    codes = tensor.codes + (by & ~lost).astype(np.uint8)
    return replace(tensor, codes=codes, zeros=np.maximum(tensor.zeros, 1)), int(lost.sum())


def _group_count(size: int, columns: int) -> int:
    return -(-columns // size) if size > 0 else 1


def _gptq_refusal(known: tuple[int, ...], bits: int, size: int, shape: tuple[int, int]) -> str | None:
    if bits not in known:
        return f"GPTQ v1 and v2 cannot hold {bits} bits; choose 2, 3, 4 or 8"
    for count, what in ((shape[1], "columns"), (shape[0], "rows")):
        if count * bits % 32 or (known == PLANAR_BITS and count % 32):
            return f"{count} {what} of {bits} bits do not fill whole 32-bit words, as GPTQ needs; leave it in floats"
    return None


def _gptq_shapes(bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    groups = _group_count(size, columns)
    return {
        "qweight": ("I32", (columns * bits // 32, out)),
        "qzeros": ("I32", (groups, out * bits // 32)),
        "scales": ("F16", (groups, out)),
        "g_idx": ("I32", (columns,)),
    }


def _gptq(layout: str, tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_columns, pack_rows

    if isinstance(tensor, PackedTensor):
        return _gptq_of_words(layout, tensor)
    scales = check(tensor, LAYOUTS[layout])
    if layout == "gptq" and (count := zeros_of_0(tensor)):
        raise BridgeError(
            f"{tensor.name}: {count} groups have a zero point of 0, which GPTQ v1 cannot hold; "
            f"{parameter('clamp', True)} makes them 1, gptq_v2 keeps them"
        )
    bits, planar = tensor.bits, layout == "gptq_p"
    zeros = pack_rows(np.ascontiguousarray(tensor.zeros.T.astype(np.uint8)), bits, planar).view(np.int32)
    return {
        "qweight": pack_columns(tensor.codes, bits, planar),
        "qzeros": recode(zeros, bits, Dialect(), Dialect(bits)) if layout == "gptq" else zeros,
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": tensor.groups().astype(np.int32),
    }


def _gptq_of_words(layout: str, tensor: PackedTensor) -> Parts:
    """GPTQ's tensors of words; all groups have one zero point."""
    from bridge.checkpoint.formats.packing import pack_rows

    (out, columns), bits = tensor.shape, tensor.bits
    zeros = pack_rows(np.full((1, out), tensor.zero, np.uint8), bits, layout == "gptq_p").view(np.int32)
    if layout == "gptq":
        zeros = recode(zeros, bits, Dialect(), Dialect(bits))
    return {
        "qweight": tensor.words.T.view(np.int32),
        "qzeros": np.broadcast_to(zeros, (tensor.scales.shape[1], zeros.shape[1])),
        "scales": tensor.scales.T,
        "g_idx": np.arange(columns, dtype=np.int32) // np.int32(tensor.group_size),
    }


def _awq_refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    out, columns = shape
    if bits != 4:
        return f"AWQ cannot hold {bits} bits; choose 4, or GPTQ for 2, 3 and 8"
    if size > 0 and columns % size:
        return f"groups of {size} do not divide {columns} columns, as AWQ needs; leave it in floats"
    return f"{out} rows do not fill whole words of 8, as AWQ needs; leave it in floats" if out % 8 else None


def _awq_shapes(bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    groups = _group_count(size, columns)
    return {
        "qweight": ("I32", (columns, out // 8)),
        "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)),
    }


def _awq(tensor: GroupedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_gemm

    scales = check(tensor, LAYOUTS["awq"])
    return {
        "qweight": pack_gemm(tensor.codes),
        "qzeros": pack_gemm(tensor.zeros.astype(np.uint8)),
        "scales": np.ascontiguousarray(scales.T),
    }


def _compressed_refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    if bits not in (4, 8):
        return f"compressed-tensors cannot hold {bits} bits in a form that is widely read; choose 4 or 8"
    if size > 0 and shape[1] % size:
        return f"groups of {size} do not divide {shape[1]} columns, as compressed-tensors needs; leave it in floats"
    return None


def _compressed_shapes(bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    groups = _group_count(size, columns)
    return {
        "weight_packed": ("I32", (out, -(-columns * bits // 32))),
        "weight_scale": ("F16", (out, groups)),
        "weight_shape": ("I64", (2,)),
        "weight_zero_point": ("I32", (-(-out * bits // 32), groups)),
    }


def _compressed(tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_columns, pack_rows

    if isinstance(tensor, PackedTensor):
        shape = np.array(tensor.shape, np.int64)
        return {"weight_packed": tensor.words.view(np.int32), "weight_scale": tensor.scales, "weight_shape": shape}
    scales = check(tensor, LAYOUTS["compressed-tensors"])
    return {
        "weight_packed": pack_rows(tensor.codes, tensor.bits).view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(tensor.shape, np.int64),
        "weight_zero_point": pack_columns(np.ascontiguousarray(tensor.zeros.astype(np.uint8).T), tensor.bits),
    }


def _mlx_refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    if bits not in MLX_BITS:
        return f"MLX cannot hold {bits} bits; choose 2, 3, 4, 5, 6 or 8"
    if size not in MLX_SIZES:
        return f"MLX has no groups of {size}; choose 32, 64 or 128"
    return f"groups of {size} do not divide {shape[1]} columns; leave it in floats" if shape[1] % size else None


def _mlx_shapes(bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    groups = columns // size
    return {
        "weight": ("U32", (out, columns * bits // 32)),
        "scales": ("F16", (out, groups)),
        "biases": ("F16", (out, groups)),
    }


def _mlx(tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_rows

    if isinstance(tensor, PackedTensor):
        halves, factor = (tensor.scales, -tensor.zero) if tensor.biases is None else (tensor.biases, 1)
        biases = _products(factor).take(halves.view(np.uint16))
        return {"weight": tensor.words, "scales": tensor.scales, "biases": biases}
    scales = check(tensor, LAYOUTS["mlx"])
    return {
        "weight": pack_rows(tensor.codes, tensor.bits),
        "scales": scales,
        "biases": mlx_biases(tensor),
    }


@cache
def _products(factor: int) -> np.ndarray:
    """All halves times a factor, as halves, by their bits: NumPy is slow at their arithmetic. -0 is 0."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        return (halves.astype(np.float32) * np.float32(factor)).astype(np.float16) + np.float16(0)


def mlx_biases(tensor: GroupedTensor) -> np.ndarray:
    """float16 [out, G]: what MLX adds to a group's scaled codes. Infinite where a half cannot hold it."""
    with np.errstate(over="ignore"):
        return np.asarray(-tensor.zeros * tensor.scales, np.float16) + np.float16(0)  # no -0


def _hqq_packing(bits: int) -> tuple[int, str]:
    return _HQQ_PACKINGS.get(bits, (1, "8bit_u8"))


def _hqq_refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    if bits not in HQQ_BITS:
        return f"HQQ cannot hold {bits} bits; choose one of {', '.join(map(str, HQQ_BITS))}"
    if size <= 0 or shape[1] % size:
        return f"groups of {size} do not divide {shape[1]} columns; leave it in floats"
    lanes = _hqq_packing(bits)[0]
    rows = math.prod(shape) // size
    return f"{rows} groups do not fill words of {lanes}; leave it in floats" if rows % lanes and lanes != 10 else None


def _hqq_shapes(bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    rows, (lanes, packing) = math.prod(shape) // size, _hqq_packing(bits)
    return {
        "W_q": ("I32" if lanes == 10 else "U8", (-(-rows // lanes), size)),
        "scale": ("F16", (rows, 1)),
        "zero": ("F16", (rows, 1)),
        "shape": ("I64", (2,)),
        **{name: ("I64", (1,)) for name in ("nbits", "group_size", "axis")},
        "packing": ("U8", (len(packing),)),
    }


def _hqq(tensor: GroupedTensor) -> Parts:
    scales = check(tensor, LAYOUTS["hqq"])
    lanes, packing = _hqq_packing(tensor.bits)
    rows = tensor.codes.reshape(-1, tensor.group_size)
    words = -(-len(rows) // lanes)
    packed = np.zeros((words, tensor.group_size), np.uint32 if lanes == 10 else np.uint8)
    for lane in range(lanes):  # the first is the highest
        own = rows[lane * words : (lane + 1) * words]
        packed <<= packed.dtype.type(tensor.bits if lane else 0)
        packed[: len(own)] |= own
    numbers = {"nbits": tensor.bits, "group_size": tensor.group_size, "axis": 1}
    return {
        "W_q": packed.view(np.int32) if lanes == 10 else packed,
        "scale": scales.reshape(-1, 1),
        "zero": tensor.zeros.astype(np.float16).reshape(-1, 1),
        "shape": np.array(tensor.shape, np.int64),
        **{name: np.array([number], np.int64) for name, number in numbers.items()},
        "packing": np.frombuffer(packing.encode(), np.uint8),
    }


LAYOUTS = {
    **{
        name: PackedLayout(name, partial(_gptq_refusal, bits), _gptq_shapes, partial(_gptq, name))
        for name, bits in (("gptq", GPTQ_BITS), ("gptq_v2", GPTQ_BITS), ("gptq_p", PLANAR_BITS))
    },
    "awq": PackedLayout("awq", _awq_refusal, _awq_shapes, _awq),
    "compressed-tensors": PackedLayout(
        "compressed-tensors", _compressed_refusal, _compressed_shapes, _compressed, "weight_zero_point", "weight_shape"
    ),
    "hqq": PackedLayout(
        "hqq", _hqq_refusal, _hqq_shapes, _hqq, shaped="shape", lanes=lambda bits: _hqq_packing(bits)[0]
    ),
    "mlx": PackedLayout("mlx", _mlx_refusal, _mlx_shapes, _mlx),
}

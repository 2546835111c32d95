"""Packs a GroupedTensor into a checkpoint's tensors: the inverse of the readers `gptq`, `awq`, `compressed` and `mlx`.

    gptq, gptq_v2   2, 3, 4 and 8 bits; `in` and `out` codes fill whole 32-bit words; any groups, also act-order
                    qweight int32 [in*b/32, out], qzeros int32 [G, out*b/32] (z - 1, or z), scales fp16 [G, out],
                    g_idx int32 [in]
    awq             4 bits, `out` a multiple of 8, groups that divide `in`, no act-order (version gemm)
                    qweight int32 [in, out/8], qzeros int32 [G, out/8], scales fp16 [G, out]
    compressed-tensors   pack-quantized: 4 and 8 bits, groups that divide `in`, no act-order
                    weight_packed int32 [out, in*b/32], weight_scale fp16 [out, G], weight_shape int64 [2],
                    weight_zero_point int32 [out*b/32, G], which symmetric modules lack
    mlx             affine: 2, 3, 4, 5, 6 and 8 bits, groups of 32, 64 or 128, any zero points, no act-order
                    weight uint32 [out, in*b/32], scales and biases (-scale * zero point) fp16 [out, G]

v1 has no zero point of 0: see `zeros`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bridge.checkpoint.formats.zeros import Dialect, recode
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError, parameter

Parts = dict[str, np.ndarray]  # by the last part of the name
Shapes = dict[str, tuple[str, tuple[int, int] | tuple[int]]]  # dtype as safetensors names it, shape

GPTQ_BITS = (2, 3, 4, 8)
MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_SIZES = (32, 64, 128)
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output feature order[i] of its eight


@dataclass(frozen=True)
class PackedLayout:
    """How one format stores a module.

    refusal  (bits, group size, (out, in)) -> why the format cannot hold such a module, None if it can
    shapes   (bits, group size, (out, in)) -> its tensors' dtypes and shapes
    pack     module -> its tensors
    zeros    the tensor that a symmetric module lacks, if there is one
    """

    name: str
    refusal: Callable[[int, int, tuple[int, int]], str | None]
    shapes: Callable[[int, int, tuple[int, int]], Shapes]
    pack: Callable[[GroupedTensor], Parts]
    zeros: str = ""


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
        layout.name != "mlx"
        and not ((tensor.zeros == np.rint(tensor.zeros)) & (tensor.zeros >= 0) & (tensor.zeros <= top)).all()
    ):
        why = f"{layout.name} can only hold zero points that are integers from 0 to {top}; write a GGUF instead"
    elif not (scales == tensor.scales).all() or not np.isfinite(scales).all():
        why = "its scales are not half-precision floats; round them before choosing codes"
    if why:
        raise BridgeError(f"{tensor.name}: {why}")
    return scales


def _whole(zeros: np.ndarray, top: int) -> bool:
    return bool(((zeros == np.rint(zeros)) & (zeros >= 0) & (zeros <= top)).all())


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


def pack_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [out, n] as a stream of `bits` bits down the columns: int32 [ceil(n * bits / 32), out]."""
    out, n = codes.shape
    blocks = np.zeros((-(-n // 32), 32, out), np.uint8)
    blocks.reshape(-1, out)[:n] = codes.T
    words = np.zeros((len(blocks), bits, out), np.uint32)
    for i in range(32):
        code = blocks[:, i].astype(np.uint32)
        word, at = divmod(i * bits, 32)
        words[:, word] |= code << np.uint32(at)
        if at + bits > 32:
            words[:, word + 1] |= code >> np.uint32(32 - at)
    return words.reshape(-1, out)[: -(-n * bits // 32)].view(np.int32)


def pack_gemm(codes: np.ndarray) -> np.ndarray:
    """4-bit codes uint8 [out, in] in AWQ's order: int32 [in, out/8]."""
    words = np.zeros((codes.shape[1], codes.shape[0] // 8), np.uint32)
    for i, row in enumerate(_GEMM_ORDER):
        words |= codes[row::8].T.astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def _group_count(size: int, columns: int) -> int:
    return -(-columns // size) if size > 0 else 1


def _gptq_refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    if bits not in GPTQ_BITS:
        return f"GPTQ v1 and v2 cannot hold {bits} bits; choose 2, 3, 4 or 8"
    for count, what in ((shape[1], "columns"), (shape[0], "rows")):
        if count * bits % 32:
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


def _gptq(tensor: GroupedTensor, layout: str) -> Parts:
    scales = check(tensor, LAYOUTS[layout])
    if layout == "gptq" and (count := zeros_of_0(tensor)):
        raise BridgeError(
            f"{tensor.name}: {count} groups have a zero point of 0, which GPTQ v1 cannot hold; "
            f"{parameter('clamp', True)} makes them 1, gptq_v2 keeps them"
        )
    zeros = np.ascontiguousarray(pack_columns(tensor.zeros.astype(np.uint8).T, tensor.bits).T)
    return {
        "qweight": pack_columns(tensor.codes, tensor.bits),
        "qzeros": zeros if layout == "gptq_v2" else recode(zeros, tensor.bits, Dialect(), Dialect(tensor.bits)),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": tensor.groups().astype(np.int32),
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


def _compressed(tensor: GroupedTensor) -> Parts:
    scales = check(tensor, LAYOUTS["compressed-tensors"])
    return {
        "weight_packed": np.ascontiguousarray(pack_columns(tensor.codes, tensor.bits).T),
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


def _mlx(tensor: GroupedTensor) -> Parts:
    scales = check(tensor, LAYOUTS["mlx"])
    return {
        "weight": np.ascontiguousarray(pack_columns(tensor.codes, tensor.bits).T).view(np.uint32),
        "scales": scales,
        "biases": mlx_biases(tensor),
    }


def mlx_biases(tensor: GroupedTensor) -> np.ndarray:
    """float16 [out, G]: what MLX adds to a group's scaled codes. Infinite where a half cannot hold it."""
    with np.errstate(over="ignore"):
        return np.asarray(-tensor.zeros * tensor.scales, np.float16) + np.float16(0)  # no -0


LAYOUTS = {
    "gptq": PackedLayout("gptq", _gptq_refusal, _gptq_shapes, lambda tensor: _gptq(tensor, "gptq")),
    "gptq_v2": PackedLayout("gptq_v2", _gptq_refusal, _gptq_shapes, lambda tensor: _gptq(tensor, "gptq_v2")),
    "awq": PackedLayout("awq", _awq_refusal, _awq_shapes, _awq),
    "compressed-tensors": PackedLayout(
        "compressed-tensors", _compressed_refusal, _compressed_shapes, _compressed, zeros="weight_zero_point"
    ),
    "mlx": PackedLayout("mlx", _mlx_refusal, _mlx_shapes, _mlx),
}

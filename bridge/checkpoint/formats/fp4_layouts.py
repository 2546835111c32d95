"""Packs an Fp4Tensor into a checkpoint's tensors: the inverse of `fp4` and of the readers that use it.

                                codes, two a byte                 scales                  of the tensor
    compressed-tensors  NVFP4   weight_packed uint8 [out, in/2]   weight_scale F8_E4M3    weight_global_scale, divides
                        MXFP4   the same                          weight_scale uint8      -
    modelopt            NVFP4   weight uint8 [out, in/2]          weight_scale F8_E4M3    weight_scale_2, multiplies
    mlx                 both    weight uint32 [out, in/8]         scales uint8            -

Scales are [out, in/16] of NVFP4 and [out, in/32] of MXFP4. MLX has no scale of the whole tensor.
"""

from functools import partial

import numpy as np

from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.layouts import PackedLayout, Parts, Shapes
from bridge.checkpoint.grouped import PackedTensor

_KINDS = {"compressed-tensors": ("NVFP4", "MXFP4"), "modelopt": ("NVFP4",), "mlx": ("NVFP4", "MXFP4")}


def fp4_obstacle(format: str, tensor: Fp4Tensor) -> str | None:
    """Why a format cannot hold a tensor, None if it can."""
    if tensor.kind not in _KINDS.get(format, ()):
        return f"{format} has no {tensor.kind}"
    return "MLX has no scale for a whole tensor" if format == "mlx" and tensor.tensor_scale != 1 else None


def _refusal(bits: int, size: int, shape: tuple[int, int]) -> str | None:
    return f"groups of {size} do not divide {shape[1]} columns" if shape[1] % size else None


def _shapes(format: str, kind: str, bits: int, size: int, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    scales = (out, columns // size)
    if format == "mlx":
        return {"weight": ("U32", (out, columns // 8)), "scales": ("U8", scales)}
    codes = "weight" if format == "modelopt" else "weight_packed"
    found: Shapes = {codes: ("U8", (out, columns // 2))}
    found["weight_scale"] = ("F8_E4M3" if kind == "NVFP4" else "U8", scales)
    if kind == "NVFP4":
        found["weight_scale_2" if format == "modelopt" else "weight_global_scale"] = ("F32", (1,))
    return found


def _pack(format: str, tensor: Fp4Tensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_rows

    packed = (tensor.words if isinstance(tensor, PackedTensor) else pack_rows(tensor.codes, 4)).view(np.uint8)
    whole = np.array([tensor.tensor_scale], np.float32)
    if format == "mlx":
        return {"weight": packed.view(np.uint32), "scales": tensor.scales}
    if format == "modelopt":
        return {"weight": packed, "weight_scale": tensor.scales, "weight_scale_2": whole}
    return {"weight_packed": packed, "weight_scale": tensor.scales, "weight_global_scale": 1 / whole}


FP4_LAYOUTS = {
    (format, kind): PackedLayout(format, _refusal, partial(_shapes, format, kind), partial(_pack, format))
    for format, kinds in _KINDS.items()
    for kind in kinds
}

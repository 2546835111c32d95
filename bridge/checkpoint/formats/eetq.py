"""EETQ: rows of 8-bit integers, with their bytes in the order of one family of GPUs.

    weight          int8 [in, out]  by its shape only: the bytes of the matrix [out, in], rearranged
    weight_scales   half [out]
    bias            half [out]      optional

    W[o, k] = weight_scales[o] * (byte - 128)

Compute capability 7.5 and later: two rows take turns, 64 columns each, and within 16 columns stored byte t is

    t       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    column  0  8  1  9  2 10  3 11  4 12  5 13  6 14  7 15

(rows of pairs 0 1 8 9 2 3 10 11 .., then the second and third byte of every four change places). Before 7.5 (Volta) the
matrix is [in, out], and only these two bytes of every four change places, along `out`.

No label says which: a row's largest magnitude always becomes 127 or -128, and only in the right order does each row
have one. Learned from EETQ's cutlass_preprocessors.cc and mixed_gemm_B_layout.h (Apache-2.0), and transformers'
integrations/eetq.py.
"""

from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError

_COLUMNS = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])
_TILE = 64  # columns of one row, before the other's


class EetqReader(Reader):
    """Reads EETQ's int8."""

    parts: ClassVar = ("weight", "weight_scales", "bias")
    required: ClassVar = ("weight_scales", "weight")
    claim: ClassVar = {"title": "EETQ", "bits": 8, "group_size": -1, "sym": True}

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        weight = tensors.get("weight")
        return {"weight", "bias"}.issuperset(tensors) and (weight is None or weight.floating)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales = tensors["weight"], tensors["weight_scales"]
        check_shapes(weight.dtype == "I8" and weight.is_matrix and scales.floating, name, tensors)
        columns, out = weight.shape
        check_shapes(scales.shape in ((out,), (1, out)) and columns % 4 == out % 4 == 0, name, tensors)
        return module_info(name, tensors, 8, columns, (out, columns))

    def read_all_rows(self, name: str) -> GroupedTensor:
        info = self.modules[name]
        out, _ = info.shape
        scales = self.scales(name, "weight_scales").reshape(out, 1)
        stored, used = self.part(name, "weight").view(np.uint8), scales[:, 0] != 0
        for unpack in (_since_turing, _volta):
            codes = unpack(stored)
            if codes is not None and ((codes[used] == 0) | (codes[used] == 255)).any(1).all():
                zeros = np.full_like(scales, 128)
                return GroupedTensor(name, 8, codes, scales, zeros, codes.shape[1], bias=self.bias(name))
        raise BridgeError(
            f"{info.file}: {name}.weight is in no known order of EETQ: in each, some rows lack their largest code; "
            "convert the unquantized model instead"
        )


def _since_turing(stored: np.ndarray) -> np.ndarray | None:
    """uint8 [in, out] as stored -> codes uint8 [out, in]; None for shapes that these GPUs' kernels do not take."""
    columns, out = stored.shape
    if columns % _TILE or out % 2:
        return None
    pairs = np.ascontiguousarray(stored).reshape(out // 2, columns // _TILE, 2, _TILE // 16, 16)
    codes = np.empty_like(pairs)
    codes[..., _COLUMNS] = pairs
    return np.ascontiguousarray(codes.swapaxes(1, 2)).reshape(out, columns)


def _volta(stored: np.ndarray) -> np.ndarray:
    """uint8 [in, out] as stored -> codes uint8 [out, in]."""
    columns, out = stored.shape
    fours = stored.reshape(columns, out // 4, 4)[:, :, [0, 2, 1, 3]]
    return np.ascontiguousarray(fours.reshape(columns, out).T)

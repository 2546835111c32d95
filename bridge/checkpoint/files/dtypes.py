"""The dtypes of safetensors: their equivalents in numpy and torch, and conversion to and from float32.

BF16      the upper half of a float32
F8_E4M3   seeeemmm, bias 7; no infinities, s1111111 is NaN (torch's float8_e4m3fn)
F8_E5M2   seeeeemm, bias 15, with infinities and NaN as in IEEE 754
F8_E4M3FNUZ, F8_E5M2FNUZ  the same with bias 8 and 16; no infinities, 10000000 is NaN, not minus zero
F8_E8M0   eeeeeeee, a power of two: 2**(e - 127), 255 is NaN; scales only
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.errors import BridgeError

if TYPE_CHECKING:
    import torch

# bf16 is read as its bits, 8-bit floats as their byte
_CODES = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1",
    "F8_E5M2FNUZ": "u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4",
    "F64": "<f8",
}  # fmt: skip
NUMPY = {name: np.dtype(code) for name, code in _CODES.items()}
_LARGEST = {"F16": "65504", "BF16": "3.39e38"}
OTHER_BITS = {"C64": 64}  # sized, never read
TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's name for a safetensors dtype; KeyError if TORCH does not have it."""
    import torch

    return getattr(torch, TORCH[dtype])


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of stored elements; exact except for F64."""
    if dtype.startswith("F8"):
        return _float8(dtype)[raw]
    if dtype != "BF16":
        return raw.astype(np.float32, copy=False)
    out = np.zeros(raw.shape, np.float32)
    out.reshape(-1).view(np.uint16)[1::2] = raw.reshape(-1)
    return out


def from_float32(values: np.ndarray, dtype: str, tensor: str | None = None) -> np.ndarray:
    """float32 values as F16, BF16 (as bits) or F32 stores them, rounded to the nearest even.

    Raises BridgeError if the name of a tensor, whose values are finite, is given and one of them becomes infinite.
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        data = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):  # becomes infinite
            data = values.astype(NUMPY[dtype])
    if tensor is not None and dtype in _LARGEST and not is_finite(data, dtype):
        most, instead = _LARGEST[dtype], "BF16 or F32" if dtype == "F16" else "F32"
        raise BridgeError(f"{tensor}: has values above {most}, the largest of {dtype}; choose {instead} for it")
    return data


def is_finite(raw: np.ndarray, dtype: str) -> bool:
    """Whether all stored elements of a dtype, BF16 as bits, are finite."""
    return bool((raw & 0x7F80 != 0x7F80).all() if dtype == "BF16" else np.isfinite(raw).all())


def not_finite(file: Path, tensor: str) -> BridgeError:
    """The error for a tensor of a file that holds NaN or infinite values."""
    return BridgeError(f"{file}: {tensor} holds NaN or infinite values; the file is damaged, download it again")


@cache
def _float8(dtype: str) -> np.ndarray:
    """float32 [256]: the value of each byte."""
    byte = np.arange(256)
    if dtype == "F8_E8M0":
        return np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127)).astype(np.float32)
    bits, bias = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16)}[dtype]
    exponent, mantissa = byte >> bits & (127 >> bits), byte & (1 << bits) - 1
    normal = np.ldexp(1 + mantissa / (1 << bits), exponent - bias)
    value = np.where(exponent == 0, np.ldexp(mantissa / (1 << bits), 1 - bias), normal)
    if dtype.endswith("FNUZ"):
        value[128] = np.nan
    elif dtype == "F8_E4M3":
        value[byte & 127 == 127] = np.nan
    else:
        value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(byte < 128, value, -value).astype(np.float32)

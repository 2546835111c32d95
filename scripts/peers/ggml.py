"""ggml's own quantizer and dequantizer, through the shared library inside the xllamacpp wheel: the peer that our
quantizers must beat."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.ggml import GGMLQuantizationType


class _InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _TypeTraits(ctypes.Structure):
    """The beginning of struct ggml_type_traits"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@cache
def library() -> Any:
    """The loaded library with the signatures used here; its half-precision tables are filled."""
    import xllamacpp

    lib = ctypes.CDLL(str(Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so"))
    lib.ggml_init.argtypes = [_InitParams]
    lib.ggml_init.restype = ctypes.c_void_p
    lib.ggml_free.argtypes = [ctypes.c_void_p]
    lib.ggml_quantize_init.argtypes = [ctypes.c_int]
    lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.ggml_row_size.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    lib.ggml_free(lib.ggml_init(_InitParams(1 << 16, None, False)))
    return lib


def quantize(x: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, in] -> uint8 [rows, row_bytes] as ggml quantizes it; `importance` float32 [in] or None."""
    lib = library()
    kind = int(GGMLQuantizationType[name])
    lib.ggml_quantize_init(kind)
    rows, columns = x.shape
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((rows, lib.ggml_row_size(kind, columns)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    pointer = None if weights is None else weights.ctypes.data
    written = lib.ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, rows, columns, pointer)
    assert written == out.nbytes
    return out


def type_size(kind: int) -> tuple[str, int, int]:
    """(name, weights, bytes) of a type's blocks."""
    traits = library().ggml_get_type_traits(kind).contents
    return traits.name.decode(), traits.size, traits.nbytes


def dequantize(raw: np.ndarray, kind: int) -> np.ndarray:
    """uint8 [rows, row bytes] of a type -> float32 [rows, in], as ggml reads it."""
    traits = library().ggml_get_type_traits(kind).contents
    raw = np.ascontiguousarray(raw)
    out = np.empty((raw.shape[0], raw.shape[1] // traits.nbytes * traits.size), np.float32)
    traits.to_float(raw.ctypes.data, out.ctypes.data, out.size)
    return out

"""ggml's own quantizer and dequantizer, through the shared library inside the xllamacpp wheel: the peer that our
quantizers must beat."""

import ctypes
import platform
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.ggml import GGMLQuantizationType


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class TypeTraits(ctypes.Structure):
    """The beginning of struct ggml_type_traits"""

    _fields_ = (
        ("name", c_char_p), ("size", c_int64), ("interleave", c_int64), ("nbytes", c_size_t), ("quantized", c_bool),
        ("to_float", CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    )  # fmt: skip


# names -> result, arguments
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_quantize_init": (None, [c_int]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, *[c_void_p] * 2, *[c_int64] * 3, c_void_p]),
    "ggml_get_type_traits": (POINTER(TypeTraits), [c_int]),
    "ggml_version": (c_char_p, []),
}


def declare(lib: Any, signatures: dict[str, tuple[Any, list[Any]]]) -> None:
    """Give a library's functions, several of one type by names with spaces between, their types."""
    for names, (result, arguments) in signatures.items():
        for function in (getattr(lib, name) for name in names.split()):
            function.restype, function.argtypes = result, arguments


def wheel() -> Path:
    """The shared library inside the xllamacpp wheel."""
    import xllamacpp

    return Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so"


@cache
def library() -> Any:
    """The loaded library with the signatures used here; its half-precision tables are filled."""
    lib = ctypes.CDLL(str(wheel()))
    declare(lib, _SIGNATURES)
    lib.ggml_free(lib.ggml_init(InitParams(1 << 16, None, False)))
    return lib


def build() -> str:
    """Which ggml this is: "ggml 0.26.0 of xllamacpp 2026.10.11549, AVX2"."""
    instructions = ", AVX2" if platform.machine() in ("x86_64", "AMD64") else ""
    return f"ggml {library().ggml_version().decode()} of xllamacpp {version('xllamacpp')}{instructions}"


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

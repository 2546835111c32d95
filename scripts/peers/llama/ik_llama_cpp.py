"""The quantizers of ik_llama.cpp, for types of its own that llama.cpp does not read, through its shared library.

cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target ggml
"""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from scripts.peers.llama.ggml import InitParams, TypeTraits, declare

_KINDS = range(128, 200)  # numbers of types of its own; those that interleave rows come later
_NAMES = ("_k", "_ks", "_kss", "_kl", "_kt")


class _TypeTraits(TypeTraits):
    """ggml_type_traits_t, which is returned by value"""

    _fields_ = (  # type: ignore[assignment]  # those of ggml come before
        ("functions", c_void_p * 4), ("dot_type", c_int), ("nrows", c_int64), ("ncols", c_int64),
        ("more", c_void_p * 2), ("row_bytes", c_int64),
    )  # fmt: skip


class IkLlamaCpp:
    """The library at a path.

    types  name -> its number
    """

    def __init__(self, path: Path):
        self._lib = ctypes.CDLL(str(path))
        declare(self._lib, {
            "ggml_init": (c_void_p, [InitParams]),
            "ggml_free": (None, [c_void_p]),
            "ggml_row_size": (c_size_t, [c_int, c_int64]),
            "ggml_quantize_chunk": (c_size_t, [c_int, *[c_void_p] * 2, *[c_int64] * 3, *[c_void_p] * 2]),
            "ggml_internal_get_type_traits": (_TypeTraits, [c_int]),
        })  # fmt: skip
        self._lib.ggml_free(self._lib.ggml_init(InitParams(1 << 16, None, False)))
        self.types = dict(self._own_types())

    def _own_types(self) -> Iterator[tuple[str, int]]:
        for kind in _KINDS:
            name = (self._lib.ggml_internal_get_type_traits(kind).name or b"").decode()
            if name.startswith("iq") and name.endswith(_NAMES):
                yield name.upper(), kind

    def rounded(self, x: np.ndarray, name: str, importance: np.ndarray) -> tuple[np.ndarray, int]:
        """float32 [rows, in] with an importance float32 [in] -> what it reads back, and the blocks' bytes."""
        kind, (rows, columns) = self.types[name], x.shape
        x, weights = (np.ascontiguousarray(values, np.float32) for values in (x, importance))
        data = np.empty((rows, self._lib.ggml_row_size(kind, columns)), np.uint8)
        sizes = 0, rows, columns
        self._lib.ggml_quantize_chunk(kind, x.ctypes.data, data.ctypes.data, *sizes, weights.ctypes.data, None)
        out = np.empty_like(x)
        to_float = self._lib.ggml_internal_get_type_traits(kind).to_float
        for row, values in zip(data, out, strict=True):
            to_float(row.ctypes.data, values.ctypes.data, columns)
        return out, data.nbytes

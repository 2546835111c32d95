"""ggml multiplying: one mul_mat node on its own threads, through any shared library that exports ggml's C API.

Used by tests (the xllamacpp wheel) and by scripts/bench_matvec.py (llama-cpp-python, built natively).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.ggml import _InitParams


class _Plan(ctypes.Structure):
    """struct ggml_cplan, with room for fields that a later version may add"""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("later", ctypes.c_uint64 * 8),
    )


class Library:
    """ggml's functions, looked up in one or several shared libraries."""

    def __init__(self, *paths: Path):
        self._libraries = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths]
        declare = (
            ("ggml_init", ctypes.c_void_p, [_InitParams]),
            ("ggml_free", None, [ctypes.c_void_p]),
            ("ggml_new_tensor_2d", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
            ("ggml_get_data", ctypes.c_void_p, [ctypes.c_void_p]),
            ("ggml_mul_mat", ctypes.c_void_p, [ctypes.c_void_p] * 3),
            ("ggml_new_graph", ctypes.c_void_p, [ctypes.c_void_p]),
            ("ggml_build_forward_expand", None, [ctypes.c_void_p] * 2),
            ("ggml_graph_plan", _Plan, [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]),
            ("ggml_graph_compute", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
            ("ggml_threadpool_params_init", None, [ctypes.c_void_p, ctypes.c_int]),
            ("ggml_threadpool_new", ctypes.c_void_p, [ctypes.c_void_p]),
            ("ggml_threadpool_pause", None, [ctypes.c_void_p]),
            ("ggml_threadpool_resume", None, [ctypes.c_void_p]),
            ("ggml_threadpool_free", None, [ctypes.c_void_p]),
        )
        for name, result, arguments in declare:
            function = self._find(name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Matrix:
    """A weight matrix in ggml's hands: `matmul(x)` with x float32 [tokens, in]."""

    def __init__(self, library: Library, type: str, raw: np.ndarray, columns: int, tokens: int = 1, threads: int = 1):
        rows = raw.shape[0]
        self.lib: Any = library
        room = raw.nbytes + 4 * tokens * (columns + rows) + (1 << 20)
        self.context = self.lib.init(_InitParams(room, None, False))
        weights = self.lib.new_tensor_2d(self.context, int(gguf.GGMLQuantizationType[type]), columns, rows)
        x = self.lib.new_tensor_2d(self.context, int(gguf.GGMLQuantizationType.F32), columns, tokens)
        y = self.lib.mul_mat(self.context, weights, x)
        ctypes.memmove(self.lib.get_data(weights), raw.ctypes.data, raw.nbytes)
        self.x = self._floats(x, (tokens, columns))
        self.y = self._floats(y, (tokens, rows))
        self.graph = self.lib.new_graph(self.context)
        self.lib.build_forward_expand(self.graph, y)
        parameters = ctypes.create_string_buffer(4096)
        self.lib.threadpool_params_init(parameters, threads)
        self.pool = self.lib.threadpool_new(parameters)
        self.plan = self.lib.graph_plan(self.graph, threads, self.pool)
        self.resting = False
        self.work = ctypes.create_string_buffer(max(64, self.plan.work_size))
        self.plan.work_data = ctypes.addressof(self.work)

    def _floats(self, tensor: int, shape: tuple[int, int]) -> np.ndarray:
        buffer = (ctypes.c_float * (shape[0] * shape[1])).from_address(self.lib.get_data(tensor))
        return np.frombuffer(buffer, np.float32).reshape(shape)

    def run(self) -> None:
        """y = W x for the x that was put into `self.x`."""
        if self.resting:
            self.lib.threadpool_resume(self.pool)
            self.resting = False
        status = self.lib.graph_compute(self.graph, ctypes.byref(self.plan))
        assert status == 0

    def rest(self) -> None:
        """Let ggml's own threads sleep until the next run: they spin for a tenth of a second, on others' cores.

        Those of a build with OpenMP do not heed it; they spin for some 5 ms.
        """
        self.lib.threadpool_pause(self.pool)
        self.resting = True

    def matmul(self, x: np.ndarray) -> np.ndarray:
        self.x[:] = x
        self.run()
        return self.y.copy()

    def close(self) -> None:
        if self.resting:
            self.lib.threadpool_resume(self.pool)
        self.lib.threadpool_free(self.pool)
        self.lib.free(self.context)


@cache
def wheel() -> Library:
    """ggml inside the xllamacpp wheel."""
    import xllamacpp

    return Library(Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so")


def native(folder: Path) -> Library:
    """ggml beside llama-cpp-python: its three shared libraries."""
    return Library(*(folder / f"lib{name}.so" for name in ("ggml-base", "ggml-cpu", "ggml")))

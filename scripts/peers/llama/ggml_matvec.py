"""Products by ggml: one mul_mat node on its own threads, through any shared library that exports ggml's C API.

The weights are laid out as in the file, or repacked as in llama.cpp, where ggml has a repacked kernel for the type and
the number of rows on this processor. Used by tests (the xllamacpp wheel) and by scripts/speed/bench_matvec.py
(`tuned.py`).
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from scripts.peers.llama import ggml, tuned
from scripts.peers.llama.ggml import InitParams


class _Plan(ctypes.Structure):
    """struct ggml_cplan, with room for fields that a later version may add"""

    _fields_ = (
        ("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("later", c_uint64 * 8),
    )  # fmt: skip


_Log = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_silent = _Log(lambda level, text, data: None)
_ListBufferTypes = CFUNCTYPE(POINTER(c_void_p), c_void_p)

# result, arguments, and the functions that have them
_SIGNATURES: tuple[tuple[Any, list[Any], str], ...] = (
    (None, [c_void_p], "ggml_free ggml_threadpool_pause ggml_threadpool_resume ggml_threadpool_free"),
    (None, [c_void_p], "ggml_backend_buffer_free"),
    (None, [c_void_p] * 2, "ggml_build_forward_expand"),
    (None, [c_void_p, c_int], "ggml_threadpool_params_init"),
    (None, [_Log, c_void_p], "ggml_log_set"),
    (None, [c_void_p] * 2 + [c_size_t] * 2, "ggml_backend_tensor_set"),
    (c_void_p, [], "ggml_backend_cpu_reg ggml_backend_cpu_buffer_type"),
    (c_void_p, [InitParams], "ggml_init"),
    (c_void_p, [c_void_p], "ggml_get_data ggml_new_graph ggml_threadpool_new ggml_backend_buffer_get_base"),
    (c_void_p, [c_void_p] * 2, "ggml_backend_alloc_ctx_tensors_from_buft"),
    (c_void_p, [c_void_p] * 3, "ggml_mul_mat"),
    (c_void_p, [c_void_p, c_int, c_int64, c_int64], "ggml_new_tensor_2d"),
    (c_void_p, [c_void_p, c_size_t], "ggml_backend_reg_dev_get ggml_backend_buft_alloc_buffer"),
    (c_void_p, [c_void_p, c_char_p], "ggml_backend_reg_get_proc_address"),
    (c_char_p, [c_void_p], "ggml_backend_buft_name"),
    (c_size_t, [c_void_p] * 2, "ggml_backend_buft_get_alloc_size"),
    (c_bool, [c_void_p] * 2, "ggml_backend_dev_supports_op"),
    (c_int, [c_void_p] * 2, "ggml_graph_compute"),
    (c_int, [c_void_p] * 3, "ggml_backend_tensor_alloc"),
    (_Plan, [c_void_p, c_int, c_void_p], "ggml_graph_plan"),
)


class Library:
    """ggml's functions, looked up in one or several shared libraries."""

    def __init__(self, *libraries: ctypes.CDLL):
        self._libraries = libraries
        for result, arguments, names in _SIGNATURES:
            for name in names.split():
                function = self._find(name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
        self.device = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)

    def buffer_types(self) -> list[int]:
        """The buffers for weights, in llama.cpp's order: repacked layouts for this processor, then as in the file."""
        address = self.backend_reg_get_proc_address(self.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
        repacked = takewhile(bool, _ListBufferTypes(address)(self.device)) if address else ()  # null-terminated
        return [*repacked, self.backend_cpu_buffer_type()]

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Matrix:
    """A weight matrix in ggml: `matmul(x)` with x float32 [tokens, in].

    repack  repack the weights as llama.cpp does when it loads a model
    layout  ggml's name of the layout: CPU as in the file, CPU_REPACK and others repacked
    """

    def __init__(
        self, library: Library, type: str, raw: np.ndarray, columns: int, tokens: int = 1, threads: int = 1,
        repack: bool = False,
    ):  # fmt: skip
        self.lib: Any = library
        kind = int(gguf.GGMLQuantizationType[type])
        for buffer_type in library.buffer_types() if repack else library.buffer_types()[-1:]:
            x, y = self._lay_out(buffer_type, kind, raw, columns, tokens)
            if self.lib.backend_dev_supports_op(library.device, y):
                break
            self._release()
        self.layout = self.lib.backend_buft_name(buffer_type).decode()
        self.lib.backend_tensor_set(self.weights, raw.ctypes.data, 0, raw.nbytes)
        self.x = self._floats(x, (tokens, columns))
        self.y = self._floats(y, (tokens, raw.shape[0]))
        self.graph = self.lib.new_graph(self.context)
        self.lib.build_forward_expand(self.graph, y)
        parameters = ctypes.create_string_buffer(4096)
        self.lib.threadpool_params_init(parameters, threads)
        self.pool = self.lib.threadpool_new(parameters)
        self.plan = self.lib.graph_plan(self.graph, threads, self.pool)
        self.resting = False
        self.work = ctypes.create_string_buffer(max(64, self.plan.work_size))
        self.plan.work_data = ctypes.addressof(self.work)

    def _lay_out(self, buffer_type: int, kind: int, raw: np.ndarray, columns: int, tokens: int) -> tuple[int, int]:
        """x and y = W x, with W in a buffer of a type; W is not filled yet."""
        self.context = self.lib.init(InitParams(1 << 20, None, True))  # holds the tensors, not their data
        self.weights = self.lib.new_tensor_2d(self.context, kind, columns, raw.shape[0])
        x = self.lib.new_tensor_2d(self.context, int(gguf.GGMLQuantizationType.F32), columns, tokens)
        y = self.lib.mul_mat(self.context, self.weights, x)
        weights = self.lib.backend_buft_alloc_buffer(
            buffer_type, self.lib.backend_buft_get_alloc_size(buffer_type, self.weights)
        )
        self.lib.backend_tensor_alloc(weights, self.weights, self.lib.backend_buffer_get_base(weights))
        ordinary = self.lib.backend_cpu_buffer_type()
        self.buffers = [weights, self.lib.backend_alloc_ctx_tensors_from_buft(self.context, ordinary)]  # x and y
        return x, y

    def _release(self) -> None:
        for buffer in self.buffers:
            self.lib.backend_buffer_free(buffer)
        self.lib.free(self.context)

    def _floats(self, tensor: int, shape: tuple[int, int]) -> np.ndarray:
        buffer = (ctypes.c_float * (shape[0] * shape[1])).from_address(self.lib.get_data(tensor))
        return np.ctypeslib.as_array(buffer).reshape(shape)

    def run(self) -> None:
        """y = W x, with x taken from `self.x`."""
        if self.resting:
            self.lib.threadpool_resume(self.pool)
            self.resting = False
        status = self.lib.graph_compute(self.graph, ctypes.byref(self.plan))
        assert status == 0

    def rest(self) -> None:
        """Let ggml's threads sleep until the next run; otherwise they spin for a tenth of a second on others' cores.

        An OpenMP build ignores this; its threads spin for about 5 ms.
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
        self._release()


@cache
def wheel() -> Library:
    """ggml inside the xllamacpp wheel."""
    return Library(ctypes.CDLL(str(ggml.wheel()), mode=ctypes.RTLD_GLOBAL))


def tuned_library(folder: Path) -> Library:
    """ggml as it is built for this processor, with its log silenced; see `tuned.download`."""
    library: Any = Library(*tuned.load(folder)[:3])
    library.log_set(_silent, None)
    return library

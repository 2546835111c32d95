"""A tensor of a GGUF: bytes in the mapped file, and what can be done with them without unpacking it all.

Before `prepare()` a product reads the file's own blocks, or repacks them on the way, tile by tile; after it, there is a
repacked copy of the same size for this machine's fastest kernel. Nothing else is copied.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from bridge.blocks.tensor_types import type_named
from bridge.errors import BridgeError
from bridge.system.devices import cuda
from bridge.system.operands import (
    Array,
    Product,
    check_indices,
    check_input,
    check_matrix,
    check_out,
    check_precision,
    is_torch,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike

    from bridge.runtime.cpu.engines.portable import Engine
    from bridge.system.kernels.jit import CFunction

_TILE = 1 << 22  # weights dequantized at a time


class QuantTensor(Product):
    """A tensor of a GGUF, which multiplies without being dequantized.

    name     in the file
    type     as gguf spells it: "Q4_K"
    shape    slowest dimension first: [out, in], or [experts, out, in]
    raw      uint8 [bytes], mapped from the file
    factors  float32 [1] or [experts], which multiply the whole tensor or each matrix (NVFP4); or None
    change   of an adapter (LoRA), added to the matrix as b a: float32 a [r, in] and b [out, r]; or None

    W @ x and x @ W.T are products too. Raises BridgeError where `raw` does not fit `type` and `shape`.
    """

    def __init__(self, name: str, type: str, shape: tuple[int, ...], raw: np.ndarray):
        if (tensor_type := type_named(type)) is None:
            from bridge.blocks.ggml import GGMLQuantizationType

            known = ", ".join(GGMLQuantizationType.__members__)
            raise BridgeError(f"{name}: unknown type {type!r}: choose one of {known}")
        if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8:
            raise BridgeError(f"{name}: raw must be a numpy array of uint8")
        size, nbytes = tensor_type.size, tensor_type.nbytes
        if not shape or min(shape) < 1 or shape[-1] % size or raw.size != math.prod(shape) // size * nbytes:
            raise BridgeError(f"{name}: {raw.size} bytes are not {type} of shape {list(shape)}")
        self.name, self.type, self.shape = name, type, tuple(shape)
        self.raw = raw.reshape(-1)
        self.factors: np.ndarray | None = None
        self.change: tuple[np.ndarray, np.ndarray] | None = None
        self._engine: Engine | None = None
        self._prepared = False
        self._matrices: WeakValueDictionary[int, QuantTensor] = WeakValueDictionary()

    @property
    def factor(self) -> float:
        """The factor of a matrix; 1 if it has none."""
        return 1.0 if self.factors is None else float(self.factors[0])

    @property
    def bpw(self) -> float:
        """Bits per weight in the file."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.raw.size

    @property
    def kernel(self) -> str:
        """The name of the kernel that the next product runs: "avx512/q4_k, 16 rows interleaved"."""
        return self._get_engine().name

    @property
    def prepared(self) -> bool:
        """Whether products run on the repacked copy."""
        return self._prepared

    def __repr__(self) -> str:
        return f"QuantTensor({self.name!r}, {self.type}, {list(self.shape)}{', prepared' * self._prepared})"

    def __deepcopy__(self, memo: Any) -> QuantTensor:
        return self  # nothing changes the weights, so copies share them

    def __getstate__(self) -> dict[str, Any]:
        """Without what `prepare` made, which is for this machine."""
        return {**self.__dict__, "_engine": None, "_matrices": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _prepared=False, _matrices=WeakValueDictionary())
        if state["_prepared"]:
            self.prepare()

    def __getitem__(self, index: int) -> QuantTensor:
        """One matrix of a 3-D tensor (the experts of a layer), not copied; the same object as long as it is used."""
        if len(self.shape) < 3 or not 0 <= index < self.shape[0]:
            raise BridgeError(f"{self.name}: no matrix {index} in shape {list(self.shape)}")
        matrix = self._matrices.get(index)
        if matrix is None:
            part = self.raw.reshape(self.shape[0], -1)[index]
            matrix = QuantTensor(f"{self.name}[{index}]", self.type, self.shape[1:], part)
            if self.factors is not None:
                matrix.factors = self.factors[index : index + 1] if len(self.factors) > 1 else self.factors
            if self.change is not None:
                matrix.change = self.change[0][index], self.change[1][index]
            self._matrices[index] = matrix
        return matrix

    def slice_rows(self, first: int, stop: int) -> QuantTensor:
        """Rows `first` to `stop` - 1 of a matrix as a tensor [stop - first, in] that shares the bytes."""
        raw = self.raw.reshape(self.shape[0], -1)[first:stop].reshape(-1)
        part = QuantTensor(f"{self.name}[{first}:{stop}]", self.type, (stop - first, self.shape[1]), raw)
        part.factors = self.factors
        if self.change is not None:
            part.change = self.change[0], self.change[1][first:stop]
        return part

    # products

    def matvec(self, x: Array, out: Array | None = None, precision: str = "int8") -> Array:
        """y = W x.

        x          float32 [in], numpy or torch on the CPU; other floats are converted
        out        a contiguous float32 [out] of x's kind to write y to; None: a new one
        precision  "int8" rounds x to 8 bits in blocks of 32 or 256, as ggml does; "f32" does not

        Returns float32 [out] of x's kind. Raises BridgeError where x or `out` does not fit, or a scale is not finite.
        """
        return self._product(x, out, precision, 1)

    def matmul(self, x: Array, out: Array | None = None, precision: str = "int8") -> Array:
        """Y = X W^T.

        x          float32 [tokens, in], or without `out` also [batch, tokens, in]
        out        a contiguous float32 [tokens, out] to write Y to; None: a new one
        precision  as in `matvec`

        Returns float32 [tokens, out] of x's kind. Raises BridgeError as `matvec` does.
        """
        if out is None and getattr(x, "ndim", 2) > 2 and x.shape[-1] == self.shape[-1]:
            return self._product(x.reshape(-1, x.shape[-1]), None, precision, 2).reshape(*x.shape[:-1], self.shape[0])
        return self._product(x, out, precision, 2)

    def _product(self, x: Any, out: Any, precision: str, dimensions: int) -> Any:
        check_matrix(self)
        check_precision(precision)
        if isinstance(x, np.memmap):
            x = np.asarray(x)
        values = self._input(x, dimensions)
        rows = self.shape[0]
        shape = (rows,) if dimensions == 1 else (values.shape[0], rows)
        engine = self._engine or self._get_engine()
        if type(x) is np.ndarray:
            y = np.empty(shape, np.float32) if out is None else self._checked_out(out, shape, x)
            self._run(engine, values, y, precision)
            return y
        import torch

        result = torch.empty(shape, dtype=torch.float32) if out is None else out
        y = self._checked_out(out, shape, x) if out is not None else result.numpy()
        self._run(engine, values, y, precision)
        return result

    def multiply(self, x: np.ndarray, y: np.ndarray, precision: str) -> None:
        """y = x W^T for contiguous float32 x [n, in] and y [n, out], which nobody checks, as `matmul` does."""
        self._run(self._engine or self._get_engine(), x, y, precision)

    def _run(self, engine: Engine, x: np.ndarray, y: np.ndarray, precision: str) -> None:
        x, y = x.reshape(-1, self.shape[1]), y.reshape(-1, self.shape[0])
        engine.run(x, y, precision == "int8")
        if self.factors is not None:
            y *= self.factors[0]
        if self.change is not None:
            self.add_change(x, y)

    def add_change(self, x: np.ndarray, y: np.ndarray) -> None:
        """y += what an adapter adds to the product of x [n, in]; there is one."""
        assert self.change is not None
        a, b = self.change
        y += (x @ a.T) @ b.T

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        """The C functions that a product of so many tokens calls, by each of the matrices where there are several."""
        matrix = self if len(self.shape) == 2 else self[0]
        return matrix._get_engine().functions(tokens, integer)

    def _input(self, x: Any, dimensions: int) -> np.ndarray:
        """x as a contiguous float32 array of the right shape."""
        if type(x) is np.ndarray:
            values = x
            if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
                raise BridgeError(f"{self.name}: x has dtype {x.dtype}; must be float32")
        elif is_torch(x):
            if x.device.type != "cpu":
                raise BridgeError(f"{self.name}: x is on {x.device}, the tensor on the CPU")
            if not x.dtype.is_floating_point or str(x.layout) != "torch.strided":
                raise BridgeError(f"{self.name}: x is {x.dtype}, {x.layout}; must be a dense tensor of float32")
            values = x.float().numpy(force=True)
        else:
            raise BridgeError(f"{self.name}: x is a {type(x).__name__}; must be a numpy array or a torch tensor")
        check_input(self, values, dimensions)
        if values.dtype != np.float32 or not values.flags.c_contiguous:
            values = np.ascontiguousarray(values, np.float32)
        return values

    def _checked_out(self, out: Any, shape: tuple[int, ...], x: Any) -> np.ndarray:
        if type(out) is not type(x) and not isinstance(out, type(x)):
            raise BridgeError(f"{self.name}: out is a {type(out).__name__}, x a {type(x).__name__}")
        try:
            array = out if isinstance(out, np.ndarray) else out.detach().numpy()
        except (RuntimeError, TypeError):
            raise BridgeError(
                f"{self.name}: out is {out.dtype} on {out.device}; must be contiguous float32 {list(shape)} on the CPU"
            ) from None
        flags = array.flags
        check_out(self, array, shape, array.dtype == np.float32 and flags.c_contiguous and flags.writeable)
        return array

    # weights

    def dequantize(self, dtype: DTypeLike | None = None) -> np.ndarray:
        """The weights as floats in the tensor's shape; `dtype`: numpy's, float32 if None."""
        from bridge.runtime.cpu.engines import dequantize

        out = np.empty(self.shape, dtype or np.float32)
        flat = out.reshape(-1, self.shape[-1])
        raw = self.raw.reshape(flat.shape[0], -1)
        step = max(1, _TILE // self.shape[-1])
        for start in range(0, flat.shape[0], step):
            flat[start : start + step] = dequantize.rows(self.type, raw[start : start + step])
        if self.factors is not None:
            out *= self.factors.reshape(-1, *[1] * (len(self.shape) - 1)).astype(out.dtype)
        if self.change is not None:
            a, b = self.change
            out += (b @ a).astype(out.dtype)
        return out

    def rows(self, indices: ArrayLike) -> np.ndarray:
        """Rows of a matrix, such as embeddings: float32 [n, in] for integer `indices` [n].

        Raises BridgeError where the tensor is no matrix, or an index is out of range.
        """
        from bridge.runtime.cpu.engines import dequantize

        check_matrix(self)
        chosen = np.atleast_1d(np.asarray(indices))
        check_indices(self, chosen, chosen.dtype.kind in "iu")
        chosen = chosen.astype(np.int64)
        out = dequantize.rows(self.type, self.raw.reshape(self.shape[0], -1)[chosen])
        if self.factors is not None:
            out = out * self.factors[0]
        if self.change is not None:
            a, b = self.change
            out = out + b[chosen] @ a
        return out

    # placement

    def prepare(self, release: bool = False) -> QuantTensor:
        """Repack a copy for the fastest kernel of this machine, once; returns the tensor itself.

        release  release the mapped pages of the file while they are copied, so that both are never in memory together

        The copy takes as many bytes as the file's; `rows` and `dequantize` still read the file. Raises BridgeError
        where a scale is not finite.
        """
        if not self._prepared:
            from bridge.runtime.cpu.engines import engine

            check_matrix(self)
            self._engine = engine.prepare(self, self._release if release else None)
            self._prepared = True
        if release:
            self.release_raw()
        return self

    def unprepare(self) -> None:
        """Drop the copy that `prepare` made."""
        self._engine, self._prepared = None, False

    def release_raw(self) -> None:
        """Tell the system that the mapped pages are not needed; they are read again from the file if they are."""
        self._release(0, self.nbytes)

    def _release(self, first: int, stop: int) -> None:
        """Release the pages that lie within bytes first..stop of `raw`, where it is mapped."""
        base = self.raw
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        mapped = base.obj if isinstance(base, memoryview) else base
        if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        origin = np.frombuffer(mapped, np.uint8, 1).ctypes.data
        start = self.raw.ctypes.data - origin
        begin = -(-(start + first) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def to(self, device: str | torch.device) -> Any:
        """The tensor on a `device`: "cpu" returns it as it is, "cuda" or "cuda:1" a CudaTensor on that GPU.

        A CudaTensor has the same methods, for torch tensors on the GPU. There is one for each GPU as long as it is in
        use. Raises BridgeError where the device is missing.
        """
        device = str(device)
        if device == "cpu":
            return self
        if device.partition(":")[0] != "cuda":
            raise BridgeError(f"{self.name}: unknown device {device!r}: choose cpu, cuda, cuda:0, cuda:1 ...")
        cuda("toolchain.device").require(device)  # without numba-cuda, the rest cannot be imported
        return cuda("tensor").moved(self, device)

    def _get_engine(self) -> Engine:
        if self._engine is None:
            from bridge.runtime.cpu.engines import engine

            self._engine = engine.unprepared(self)
        return self._engine

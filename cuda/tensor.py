"""A tensor of a GGUF on a GPU: what QuantTensor.to("cuda") gives, with QuantTensor's methods.

    w = f["blk.0.ffn_down.weight"].to("cuda")
    y = w.matvec(x)                                 x a torch tensor on the device, y too, nothing is copied

Products are queued on torch's current stream, whichever it is; the tensor may be dropped while they run. They can be
captured in a CUDA graph, once they have run before; the graph's replays need the tensor. Up to 8
columns of x the weights stay quantized; up to 64 they become halves in the registers of tensor cores; for more, rows
become f16 or bf16 tiles for torch's matrix product (matmul.py).
F32, F16 and BF16 tensors stay as they are, and torch multiplies with them. Threads and streams may share a tensor: what
a product needs besides the weights belongs to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import KINDS, DeviceMatrix, FloatMatrix
from bridge.cuda.product.activations import COLUMNS
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.matvec_shape import choose_shape
from bridge.cuda.toolchain import device as devices

from bridge.errors import BridgeError
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.operands import Product, check_indices, check_input, check_out, check_precision, is_torch


class CudaTensor(Product):
    """One matrix on a GPU: `name`, `type` as gguf spells it, `shape` [out, in], `device`."""

    def __init__(self, tensor: QuantTensor, device: Any = None):
        import torch

        self.name, self.type, self.shape = tensor.name, tensor.type, tensor.shape
        gpu = devices.require(device)
        self.matrix: DeviceMatrix | FloatMatrix = (
            FloatMatrix(tensor, gpu) if tensor.type in KINDS else DeviceMatrix.upload(tensor, gpu)
        )
        self._multipliers: dict[str, Multiplier] = {}
        self._torch_device = torch.device(gpu.place)
        self._bound: dict[Any, Callable[..., None]] = {}  # products that have run
        self._source = tensor

    @property
    def device(self) -> str:
        """Where it is, for instance "cuda:0"."""
        return str(self.matrix.device)

    @property
    def bpw(self) -> float:
        """Bits per weight that a product reads."""
        return self.matrix.bpw

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.matrix.nbytes

    @property
    def kernel(self) -> str:
        """The kernel of a product with one vector, for instance "cuda/q4_k, 2 rows a warp"."""
        if isinstance(self.matrix, FloatMatrix):
            return f"{self.matrix.weight.dtype} product"
        shape = choose_shape(self.matrix, 1)
        shared = f", {shape.split} warps a row" if shape.split > 1 else ""
        return f"cuda/{self.type.lower()}, {shape.rows} rows a warp{shared}"

    def __repr__(self) -> str:
        return f"CudaTensor({self.name!r}, {self.type}, {list(self.shape)}, {self.device})"

    def to(self, device: Any) -> Any:
        """The tensor on another device; "cpu" gives the QuantTensor it came from."""
        return self._source if str(device) == "cpu" else moved(self._source, device)

    def __deepcopy__(self, memo: Any) -> CudaTensor:
        return self  # nothing changes the weights, so copies share them

    def __reduce__(self) -> Any:
        return moved, (self._source, self.device)

    # products

    def matvec(self, x: Any, out: Any = None, precision: str = "int8") -> Any:
        """y = W x for x [in], float32, float16 or bfloat16 on this device; y float32 [out].

        "int8" rounds x to 8 bits in blocks of 32, or to the type of weights that are floats; "f32" does not. `out`,
        where given, is a contiguous float32 [out] on this device. Raises BridgeError where x or out does not fit, is
        elsewhere, or while a graph is captured before the product has ever run.
        """
        return self._product(x, out, precision, 1)

    def matmul(self, x: Any, out: Any = None, precision: str = "int8") -> Any:
        """Y = X W^T for X [tokens, in]: Y float32 [tokens, out]. Otherwise as `matvec`.

        Beyond 8 tokens quantized weights are rounded to x's type (to float16 for float32 x, or not at all with "f32")
        and x is not rounded to 8 bits. With "f32" torch then multiplies in TF32 where its own settings allow that, as
        for any float32. Without `out`, X may have more dimensions, [batch, tokens, in].
        """
        if out is None and getattr(x, "ndim", 2) > 2 and x.shape[-1] == self.shape[-1]:
            return self._product(x.reshape(-1, x.shape[-1]), None, precision, 2).reshape(*x.shape[:-1], self.shape[0])
        return self._product(x, out, precision, 2)

    def affine(self, x: Any, bias: Any, precision: str = "int8") -> Any:
        """X W^T + bias for X [tokens, in] and a float32 bias [out]; otherwise as `matmul`. Takes no other launch."""
        return self._product(x, None, precision, 2, bias)

    def _product(self, x: Any, out: Any, precision: str, dimensions: int, bias: Any = None) -> Any:
        import torch

        if type(x) is torch.Tensor:
            bound = self._bound.get((precision, dimensions, x.dtype, x.shape, bias is not None))
            if bound is not None and (y := self._again(bound, x, out, bias)) is not None:
                return y
        check_precision(precision)
        values = self._input(x, dimensions)
        tokens, rows = values.shape[0], self.shape[0]
        shape = (rows,) if dimensions == 1 else (tokens, rows)
        if out is None:
            result = torch.empty(shape, dtype=torch.float32, device=values.device)
        else:
            result = self._checked_out(out, shape)
        if bias is not None:
            bias = self._checked_bias(bias)
        with self.matrix.device.active():
            if precision not in self._multipliers:
                self._multipliers[precision] = Multiplier(self.matrix.device, precision)
            multiplier = self._multipliers[precision]
            multiplier.multiply(self.matrix, values, result.view(tokens, rows), bias)
            if 1 <= tokens <= COLUMNS and isinstance(self.matrix, DeviceMatrix):
                bound = multiplier.bind(self.matrix, values, result.view(tokens, rows), bias)
                self._bound[precision, dimensions, x.dtype, x.shape, bias is not None] = bound
        return result

    def _again(self, bound: Callable[..., None], x: Any, out: Any, bias: Any) -> Any:
        """A product of the same type and shape as before, its arguments packed; None if more must be checked."""
        import torch

        device = self._torch_device
        if x.device != device or not x.is_contiguous():
            return None
        moved = []
        if bias is not None:
            if not self._fits(bias, self.shape[:1]):
                return None
            moved.append(bias.data_ptr())
        shape = (*x.shape[:-1], self.shape[0])
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=device)
        elif type(out) is not torch.Tensor or not self._fits(out, shape):
            return None
        with self.matrix.device.active():
            bound(self.matrix.memory.stream(), x.data_ptr(), out.data_ptr(), *moved)
        return out

    def _fits(self, x: Any, shape: tuple[int, ...]) -> bool:
        """Whether kernels can take it as it is."""
        shaped = devices.kind(x) == "f32" and tuple(x.shape) == shape
        return shaped and x.device == self._torch_device and bool(x.is_contiguous())

    def _check_device(self, what: str, tensor: Any) -> None:
        if not is_torch(tensor):
            raise BridgeError(f"{self.name}: {what} is a {type(tensor).__name__}; must be a torch tensor")
        wanted = self.matrix.device.place
        if str(tensor.device) != wanted:
            raise BridgeError(f"{self.name}: {what} is on {tensor.device}, the tensor on {wanted}")

    def _input(self, x: Any, dimensions: int) -> Any:
        """x as a contiguous tensor [tokens, in] of one of the three types."""
        self._check_device("x", x)
        if devices.kind(x) is None:
            raise BridgeError(f"{self.name}: x has dtype {x.dtype}; must be float32, float16 or bfloat16")
        check_input(self, x, dimensions)
        return x.detach().contiguous().view(-1, self.shape[1])

    def _checked_bias(self, bias: Any) -> Any:
        self._check_device("bias", bias)
        if not self._fits(bias, self.shape[:1]):
            raise BridgeError(
                f"{self.name}: bias is {bias.dtype} {list(bias.shape)}; must be contiguous float32 [{self.shape[0]}]"
            )
        return bias.detach()

    def _checked_out(self, out: Any, shape: tuple[int, ...]) -> Any:
        self._check_device("out", out)
        check_out(self, out, shape, devices.kind(out) == "f32" and out.is_contiguous())
        return out.detach()

    # weights

    def dequantize(self, dtype: Any = None) -> Any:
        """The weights as a torch tensor [out, in] on the device: float32, float16 or bfloat16."""
        import torch

        kind = dtype or torch.float32
        out = torch.empty(self.shape, dtype=kind, device=self.matrix.device.place)
        if devices.kind(out) is None:
            raise BridgeError(f"{self.name}: dtype {kind}; must be float32, float16 or bfloat16")
        with self.matrix.device.active():
            dequantize.tile(self.matrix, 0, self.shape[0], out, self.matrix.memory.stream())
        return out

    def rows(self, indices: Any) -> Any:
        """Rows of the matrix (an embedding look-up) for integer indices [n]: float32 [n, in] on the device.

        Indices on the device are not waited for: a row that the matrix does not have is NaN. Others raise BridgeError.
        """
        import torch

        target = self.matrix.device.place
        chosen = torch.as_tensor(indices)
        on_device = is_torch(indices) and str(chosen.device) == target
        integers = not chosen.dtype.is_floating_point and chosen.dtype != torch.bool
        check_indices(self, chosen, integers, read=not on_device)
        chosen = chosen.to(target, torch.int64)
        missing = (chosen < 0) | (chosen >= self.shape[0]) if on_device else None
        if missing is not None:
            chosen = chosen.masked_fill(missing, 0)
        chosen = chosen.to(torch.int32).contiguous()
        out = torch.empty((len(chosen), self.shape[1]), device=target)
        with self.matrix.device.active():
            dequantize.rows(self.matrix, chosen, out, len(chosen), self.matrix.memory.stream())
        return out if missing is None else out.masked_fill_(missing[:, None], float("nan"))


def moved(tensor: QuantTensor, device: Any) -> CudaTensor:
    """The tensor on a GPU: the one that is still referenced, or a new one."""
    return _known.get(tensor, device)


_known = devices.Moved(CudaTensor)

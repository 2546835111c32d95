"""Products and look-ups as operators of torch, so that `torch.compile` puts them into its graphs as they are.

    gguf_bridge::product(x, tensor, rows, precision, bias)   x W^T + bias of x [n, in]: float32 [n, rows]
    gguf_bridge::product_gradient(y, tensor, columns)        y W of y [n, rows], the gradient of x: float32 [n, columns]
    gguf_bridge::rows(ids, tensor, columns)                  rows of W: float32 [n, columns]
    gguf_bridge::experts(x, chosen, weights, stack, precision)   what a layer's experts add: float32, as x
    gguf_bridge::few_experts(...)                            the same of few tokens on a GPU

A quantized tensor is not torch's: operators take its number, and a size of the result, for when only shapes are
computed. They run where the tensor is, on the CPU or a GPU.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bridge.runtime import QuantTensor

_TILE = 1 << 22  # weights dequantized at a time for a gradient

_numbers = count()
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(tensor: Any) -> int:
    """A number by which the operators find a tensor, or an object with its methods, as long as it is referenced."""
    number = next(_numbers)
    _known[number] = tensor
    return number


def multiply(x: Tensor, tensor: Any, number: int, rows: int, precision: str, bias: Tensor | None) -> Any:
    """The product of the operator below, called without torch's dispatcher where nobody compiles or differentiates.

    An operator costs 30 us a call, which is a tenth of a small model's token.
    """
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if type(x) is Tensor and not torch.compiler.is_compiling() and not differentiated and not x.is_meta:
        return multiply_on(tensor, x, precision, bias)
    return product(x, number, rows, precision, bias)


def multiply_on(matrix: Any, x: Tensor, precision: str, bias: Tensor | None) -> Tensor:
    """x W^T + bias, float32, with a tensor of this project that is where x is."""
    if bias is not None and hasattr(matrix, "affine"):  # in the same launch
        return matrix.affine(x, bias, precision)
    if type(matrix) is QuantTensor and x.dtype is torch.float32 and x.is_contiguous() and x.device.type == "cpu":
        y = torch.empty((len(x), matrix.shape[0]))
        matrix.multiply(x.detach().numpy(), y.numpy(), precision)
    else:
        y = matrix.matmul(x, precision=precision).float()  # a trellis layer's has the type of x
    return y if bias is None else y + bias


@torch.library.custom_op("gguf_bridge::product", mutates_args=())
def product(x: Tensor, tensor: int, rows: int, precision: str, bias: Tensor | None) -> Tensor:
    """x [n, in] of a float type, bias float32 [rows]; the gradient of x is that of the weights, whatever x was rounded
    to."""
    return multiply_on(_known[tensor], x, precision, bias)


@product.register_fake
def _(x: Tensor, tensor: int, rows: int, precision: str, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], rows), dtype=torch.float32)


@torch.library.custom_op("gguf_bridge::product_gradient", mutates_args=())
def product_gradient(y: Tensor, tensor: int, columns: int) -> Tensor:
    """y [n, rows], float32; tiles of the weights are dequantized for it."""
    matrix = _known[tensor]
    x = y.new_zeros((len(y), columns))
    step = max(1, _TILE // columns)
    for first in range(0, y.shape[1], step):
        indices = torch.arange(first, min(first + step, y.shape[1]), device=y.device)
        x += y[:, first : first + step] @ torch.as_tensor(matrix.rows(indices)).to(y.device)
    return x


@product_gradient.register_fake
def _(y: Tensor, tensor: int, columns: int) -> Tensor:
    return y.new_empty((y.shape[0], columns))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.tensor, *_ = inputs
    ctx.columns = x.shape[1]
    ctx.held = _known.get(ctx.tensor)  # the gradient may be asked for when the module is gone


def _backward(ctx: Any, y: Tensor) -> tuple[Any, ...]:
    of_bias = y.sum(0) if ctx.needs_input_grad[4] else None
    return product_gradient(y, ctx.tensor, ctx.columns), None, None, None, of_bias


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, ctx.tensor, _ = inputs
    ctx.rows = y.shape[1]
    ctx.held = _known.get(ctx.tensor)


def _backward_again(ctx: Any, x: Tensor) -> tuple[Any, ...]:
    return product(x, ctx.tensor, ctx.rows, "f32", None), None, None


product.register_autograd(_backward, setup_context=_keep)
product_gradient.register_autograd(_backward_again, setup_context=_keep_rows)


@torch.library.custom_op("gguf_bridge::rows", mutates_args=())
def rows(ids: Tensor, tensor: int, columns: int) -> Tensor:
    """ids [n], integers."""
    return torch.as_tensor(_known[tensor].rows(ids))


@rows.register_fake
def _(ids: Tensor, tensor: int, columns: int) -> Tensor:
    return ids.new_empty((ids.shape[0], columns), dtype=torch.float32)


# the host reads which experts were chosen: torch's compiler must not capture that in a CUDA graph
_NOT_CAPTURED = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op("gguf_bridge::experts", mutates_args=(), **_NOT_CAPTURED)
def experts(x: Tensor, chosen: Tensor, weights: Tensor, stack: int, precision: str) -> Tensor:
    """x [n, hidden]; chosen, of integers, and weights [n, used]. Without a gradient. Waits for a GPU."""
    return _known[stack].mix(x, chosen, weights, precision)


@torch.library.custom_op("gguf_bridge::few_experts", mutates_args=())
def few_experts(x: Tensor, chosen: Tensor, weights: Tensor, stack: int, precision: str) -> Tensor:
    """The same where the stack `takes` the pairs: it waits for nothing, and can be captured."""
    return _known[stack].mix(x, chosen, weights, precision)


@few_experts.register_fake
@experts.register_fake
def _(x: Tensor, chosen: Tensor, weights: Tensor, stack: int, precision: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)

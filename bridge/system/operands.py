"""Checks of the operands of products and look-ups, the same on the CPU and on a GPU. All raise BridgeError."""

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from bridge.errors import BridgeError

if TYPE_CHECKING:
    import numpy as np
    import torch

Array = TypeVar("Array", "np.ndarray", "torch.Tensor")  # what is multiplied, and the product


class Product:
    """The operators of a matrix W [out, in] that has `matvec` and `matmul`: W @ x and x @ W.T."""

    name: str
    shape: tuple[int, ...]
    matvec: Any
    matmul: Any
    __array_ufunc__ = None  # numpy's arrays then leave x @ W.T to us

    @property
    def T(self) -> "Transposed":
        """For x @ W.T, which is matmul(x), or matvec of one dimension."""
        check_matrix(self)
        return Transposed(self)

    def __matmul__(self, x: Array) -> Array:
        """W @ x for x [in] or [in, n]."""
        if getattr(x, "ndim", 0) not in (1, 2):
            return NotImplemented
        return self.matvec(x) if x.ndim == 1 else self.matmul(x.T).T

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self.name}: is quantized; its .dequantize() gives an array of floats")


class Transposed:
    """W.T of a `Product`, on the right side of @."""

    __array_ufunc__ = None

    def __init__(self, matrix: Product) -> None:
        self.T = matrix
        self.shape = matrix.shape[::-1]

    def __rmatmul__(self, x: Array) -> Array:
        if not getattr(x, "ndim", 0):
            return NotImplemented
        return self.T.matvec(x) if x.ndim == 1 else self.T.matmul(x)

    def __repr__(self) -> str:
        return f"{self.T!r}.T"


_PRECISIONS = ("int8", "f32")


def is_torch(x: Any) -> TypeGuard["torch.Tensor"]:
    """Whether x is a torch tensor; does not import torch."""
    return type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "detach")


def check_precision(precision: str) -> None:
    """The precision of activations must be "int8" or "f32"."""
    if precision not in _PRECISIONS:
        raise BridgeError(f"unknown precision {precision!r}: choose int8 or f32")


def check_matrix(tensor: Any) -> None:
    """A tensor that is multiplied has two dimensions."""
    if len(tensor.shape) != 2:
        raise BridgeError(f"{tensor.name}: is not a matrix, its shape is {list(tensor.shape)}")


def check_input(tensor: Any, x: Any, dimensions: int) -> None:
    """x is [in] or [tokens, in] of a tensor [out, in]."""
    columns = tensor.shape[1]
    if x.ndim != dimensions or x.shape[-1] != columns:
        wanted = f"[{columns}]" if dimensions == 1 else f"[tokens, {columns}]"
        raise BridgeError(f"{tensor.name}: x has shape {list(x.shape)}; must be {wanted}")


def check_out(tensor: Any, out: Any, shape: tuple[int, ...], usable: bool) -> None:
    """out has the result's shape, and is `usable`: float32 and contiguous."""
    if not usable or tuple(out.shape) != shape:
        raise BridgeError(
            f"{tensor.name}: out is {out.dtype} {list(out.shape)}; must be contiguous float32 {list(shape)}"
        )


def check_indices(tensor: Any, indices: Any, integers: bool, read: bool = True) -> None:
    """Indices [n], numpy's or torch's, are integers and, with `read`, rows of the tensor."""
    if indices.ndim != 1 or (len(indices) and not integers):
        raise BridgeError(f"{tensor.name}: row indices are {indices.dtype} {list(indices.shape)}; must be integers [n]")
    if not read or not len(indices):
        return
    if not 0 <= (least := int(indices.min())) <= (most := int(indices.max())) < tensor.shape[0]:
        raise BridgeError(f"{tensor.name}: row {least if least < 0 else most} is not one of {tensor.shape[0]}")

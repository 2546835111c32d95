"""Torch modules whose weights are tensors of a GGUF: linears, and embeddings.

For inference, and for training earlier layers: the weights have no gradients, but gradients pass through to their
input. Weights stay quantized, and go along when a model is moved to a GPU; `torch.compile` takes products as they
are. `placement.py` puts such modules into a whole model.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.nn.torch_ops import multiply, number_of, rows
from bridge.runtime import QuantTensor
from bridge.system.operands import check_matrix


class Placed(nn.Module):
    """A module with a tensor that is not torch's and moves with the module to another device."""

    place: torch.Tensor  # empty; torch moves it

    def __init__(self, tensor: Any):
        super().__init__()
        self.prepared = False  # whether the tensor was, when it left the CPU
        self.register_buffer("place", torch.empty(0, device=getattr(tensor, "device", "cpu")), persistent=False)
        self.hold(tensor)

    def hold(self, tensor: Any) -> None:
        """Replace the engine used for products."""
        self.tensor, self.number = tensor, number_of(tensor)

    def follow(self) -> None:
        """Take the tensor to where torch has moved the module's buffers: a GPU, or the CPU."""
        if self.place.device.type not in ("cpu", "cuda"):
            return
        before, moved = self.tensor, self.tensor.to(self.place.device)
        if moved is before:
            return
        self.hold(moved)
        if self.place.device.type == "cpu":
            if self.prepared:
                moved.prepare()
        elif getattr(before, "prepared", False):  # on the CPU: its repacked copy is as large as the weights
            self.prepared = True
            before.unprepare()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.follow()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """With the tensor of the CPU: whoever loads it may choose another device."""
        return {**self.__dict__, "tensor": self.tensor.to("cpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hold(self.tensor)  # a copy's has a number of its own
        self.follow()


class QuantLinear(Placed):
    """A torch module y = W x + bias with W [out, in] a QuantTensor. Gradients pass to x, and W has none.

    tensor     a QuantTensor, a TrellisLayer, or one of these on a GPU
    bias       float32 [out], or None
    order      int64 [out]: output i is row order[i] of the tensor; None: the tensor's own order
    columns    int64 [in]: column j of the tensor multiplies element columns[j] of x; None: x's own order
    precision  "int8" rounds x to 8 bits in blocks, as ggml does; "f32" does not. A TrellisLayer never rounds x

    x is [..., in] of any float type, y [..., out] of the same type. Raises BridgeError where x does not fit.
    """

    weight: torch.Tensor  # without values: models ask for its dtype
    bias: Any

    def __init__(
        self, tensor: Any, bias: torch.Tensor | None = None, order: np.ndarray | None = None,
        precision: str = "int8", columns: np.ndarray | None = None,
    ):  # fmt: skip
        check_matrix(tensor)
        super().__init__(tensor)
        self.out_features, self.in_features = tensor.shape
        self.weight = torch.empty(tensor.shape, device="meta")
        self.precision = precision
        device = self.place.device
        self.register_buffer("bias", None if bias is None else bias.to(device, torch.float32), persistent=False)
        for name, array in (("order", order), ("columns", columns)):
            self.register_buffer(name, None if array is None else torch.from_numpy(array).to(device), persistent=False)

    @property
    def adds_bias(self) -> bool:
        """Whether the product adds the bias: it must be in the tensor's order."""
        return self.bias is not None and self.order is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] of any float type, where the tensor is -> [..., out] of the same type."""
        if x.shape[-1:] != (self.in_features,):
            raise BridgeError(f"{self.tensor.name}: x has shape {list(x.shape)}; must be [..., {self.in_features}]")
        values = x.reshape(-1, self.in_features)
        if self.columns is not None:
            values = values[:, self.columns]
        if not values.is_cuda:  # kernels of the CPU take float32
            values = values.float()
        bias = self.bias if self.adds_bias else None
        y = multiply(values, self.tensor, self.number, self.out_features, self.precision, bias)
        if self.order is not None:
            y = y[:, self.order]
            if self.bias is not None:
                y = y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias.dtype != bias.dtype:  # it stays float32, as kernels add it
            self.bias = bias.to(self.bias.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, type={self.tensor.type}"


class JoinedLinear(nn.Module):
    """A linear layer whose rows are in several tensors of the file.

    parts  linears of the same x, whose outputs follow each other
    order  int64 [out]: output i is output order[i] of these
    """

    def __init__(self, parts: list[QuantLinear], order: np.ndarray):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features, self.out_features = parts[0].in_features, len(order)
        self.register_buffer("order", torch.from_numpy(order).to(parts[0].place.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out] of the same type."""
        return torch.cat([part(x) for part in self.parts], -1)[..., self.order]


class QuantEmbedding(Placed):
    """Rows of a QuantTensor [vocab, hidden], dequantized when they are looked up, times a factor in some models."""

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype = torch.float32, scale: float = 1.0):
        check_matrix(tensor)
        super().__init__(tensor)
        self.num_embeddings, self.embedding_dim = tensor.shape
        self.dtype, self.scale = dtype, scale

    @property
    def weight(self) -> torch.Tensor:
        """Empty; models ask it for the device."""
        return self.place

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., hidden]"""
        out: Any = rows(ids.reshape(-1), self.number, self.embedding_dim)
        out = out.reshape(*ids.shape, self.embedding_dim).to(self.dtype)
        return out if self.scale == 1 else out * torch.tensor(self.scale, dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.tensor.type}"

"""A GGUF's tensors under a `transformers` model: same code, same config, the file's quantized weights.

    model = AutoModelForCausalLM.from_config(config)      or from_pretrained: its weights are replaced
    bridge.nn.replace_linears(model, "model.gguf")

For inference, and for training earlier layers: the weights have no gradients, but gradients pass through to their
input. Weights stay quantized, and go along when the model is moved to a GPU; `torch.compile` takes products as they
are. `bridge.nn.load` makes such a model without ever holding the floats that are replaced.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.gguf_file.rope_rows import interleaved_rows
from bridge.nn.torch_ops import number_of, product, rows
from bridge.runtime import GGUFFile, QuantTensor, open_gguf
from bridge.runtime.decoder_config import read_config
from bridge.system.operands import check_matrix
from bridge.system.options import checked

_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


class Placed(nn.Module):
    """A module with a tensor that is not torch's and moves with the module to another device."""

    place: torch.Tensor  # empty; torch moves it

    def __init__(self, tensor: Any):
        super().__init__()
        check_matrix(tensor)
        self.prepared = False  # whether the tensor was, when it left the CPU
        self.register_buffer("place", torch.empty(0, device=getattr(tensor, "device", "cpu")), persistent=False)
        self.hold(tensor)

    def hold(self, tensor: Any) -> None:
        """Multiply with this one from now on."""
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
    """y = W x + bias with W [out, in] a QuantTensor. The gradient of x takes a product with the dequantized weights.

    tensor     or another with its methods: a TrellisLayer, whose x is never rounded, and both on a GPU
    order      int64 [out]: output i is row order[i] of the tensor, None for the tensor's own order
    precision  "f32", or "int8" to round x to 8 bits in blocks, as ggml does
    """

    bias: Any

    def __init__(
        self, tensor: Any, bias: torch.Tensor | None = None, order: np.ndarray | None = None,
        precision: str = "int8",
    ):  # fmt: skip
        super().__init__(tensor)
        self.out_features, self.in_features = tensor.shape
        self.precision = precision
        place = self.place.device
        self.register_buffer("bias", None if bias is None else bias.to(place, torch.float32), persistent=False)
        self.register_buffer("order", None if order is None else torch.from_numpy(order).to(place), persistent=False)

    @property
    def adds_bias(self) -> bool:
        """Whether the product adds the bias: it must be in the tensor's order."""
        return self.bias is not None and self.order is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] of any float type, where the tensor is -> [..., out] of the same type."""
        if x.shape[-1:] != (self.in_features,):
            raise BridgeError(f"{self.tensor.name}: x has shape {list(x.shape)}; must be [..., {self.in_features}]")
        given = x.reshape(-1, self.in_features)
        if not given.is_cuda:  # kernels of the CPU take float32
            given = given.float()
        own = self.bias if self.adds_bias else None
        y: Any = product(given, self.number, self.out_features, self.precision, own)
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


class QuantEmbedding(Placed):
    """Rows of a QuantTensor [vocab, hidden], dequantized when they are looked up."""

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype = torch.float32):
        super().__init__(tensor)
        self.num_embeddings, self.embedding_dim = tensor.shape
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., hidden]"""
        found: Any = rows(ids.reshape(-1), self.number, self.embedding_dim)
        return found.reshape(*ids.shape, self.embedding_dim).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.tensor.type}"


@checked
def replace_linears(
    model: nn.Module, gguf: str | Path | GGUFFile, precision: str = "int8", prepare: bool = True
) -> nn.Module:
    """Put a GGUF's linears, embeddings and norms into a transformers Llama, Mistral, Qwen2 or Qwen3; returns it.

    GGUF's llama keeps the rows of q and k in another order, which is undone on the products. Each tensor goes to the
    device of what it replaces.

    precision  see QuantLinear
    prepare    repack the weights for this CPU now (as much memory again as the file, and many times the speed)

    Raises:
        BridgeError: the file holds another architecture, or shapes that the model does not have.
    """
    file = gguf if isinstance(gguf, GGUFFile) else open_gguf(gguf)
    config = read_config(file.metadata, file.path)
    if any(name == f"model.layers.{config.layers}" for name, _ in model.named_modules()):
        raise BridgeError(f"{file.path}: has {config.layers} layers, fewer than the model; it belongs to another model")
    if not config.experts and not config.plain:
        raise BridgeError(f"{file.path}: {config.arch} cannot be used in a transformers model; bridge.Model runs it")
    if config.experts:
        raise BridgeError(
            f"{file.path}: a mixture of experts cannot be used in a transformers model; bridge.Model runs it"
        )
    for i in range(config.layers):
        for path, part in _LINEARS.items():
            heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(part)
            order = np.argsort(interleaved_rows(heads, config.head_dim)) if heads and config.graph.neighbours else None
            _replace_linear(model, f"model.layers.{i}.{path}", file, f"blk.{i}.{part}", order, precision, prepare)
        for path, part in _NORMS.items():
            if f"blk.{i}.{part}.weight" in file:
                _replace_norm(model, f"model.layers.{i}.{path}", file[f"blk.{i}.{part}.weight"])
    _replace_norm(model, "model.norm", file["output_norm.weight"])
    head = "output" if "output.weight" in file else "token_embd"
    _replace_linear(model, "lm_head", file, head, None, precision, prepare)
    embedding = _module(model, "model.embed_tokens")
    _expect("model.embed_tokens", (embedding.num_embeddings, embedding.embedding_dim), file["token_embd.weight"])
    dtype = embedding.dtype if isinstance(embedding, QuantEmbedding) else embedding.weight.dtype
    _set(model, "model.embed_tokens", QuantEmbedding(file["token_embd.weight"], dtype))
    return model


def _replace_linear(
    model: nn.Module, path: str, file: GGUFFile, name: str, order: np.ndarray | None, precision: str, prepare: bool
) -> None:
    tensor = file[f"{name}.weight"]
    old = _module(model, path)
    _expect(path, (old.out_features, old.in_features), tensor)
    bias = None
    if f"{name}.bias" in file:
        values = file[f"{name}.bias"].dequantize()
        bias = torch.from_numpy(values if order is None else values[order])
    if prepare and _device(old).type == "cpu":
        tensor.prepare()
    _set(model, path, QuantLinear(tensor, bias, order, precision))


def _replace_norm(model: nn.Module, path: str, tensor: QuantTensor) -> None:
    module = _module(model, path)
    _expect(path, tuple(module.weight.shape), tensor)
    values = torch.from_numpy(tensor.dequantize()).to(_device(module), module.weight.dtype)
    module.weight = nn.Parameter(values, requires_grad=False)


def _module(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BridgeError(f"{type(model).__name__} has no {path}; the GGUF is of another architecture") from None


def _device(module: nn.Module) -> torch.device:
    """The device of a module's weights; the CPU if they are on none yet."""
    first = next(chain(module.parameters(), module.buffers()))
    return torch.device("cpu") if first.is_meta else first.device


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module.to(_device(model.get_submodule(path))))


def _expect(path: str, shape: tuple[int, ...], tensor: QuantTensor) -> None:
    if shape != tensor.shape:
        raise BridgeError(f"{path}: shape {list(shape)}, {tensor.name} of the GGUF has {list(tensor.shape)}")

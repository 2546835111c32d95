"""Where a GGUF's tensors go in a transformers model: packed modules, and floats for what is not a matrix.

    placement = Placement(model, file)      reads names and shapes alone; the model may be on the meta device
    placement.floats()                      the model's other parameters: norms, routers, convolutions
    placement.fill()                        puts the packed modules in

Names, row orders and changes of values are those of the family's table (`bridge.models`), read from the GGUF to the
checkpoint; transformers' own conversions tell how a checkpoint's names differ from a model's. Linears, embeddings and
experts stay packed. What is F32 in the file, what transformers keeps in float32 (the weights of DeepSeek's indexer), or
cannot be restored without rounding again (DeepSeek's kv_b_proj, whose one half is transposed), becomes an ordinary
parameter.
"""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.checkpoint.tensor_names import layer_of
from bridge.errors import BridgeError
from bridge.gguf_file.tensor_names import block_of
from bridge.models import numbers_of_gguf, tensors_of_gguf
from bridge.models.gguf_config import ROPE_FACTORS, family_of_gguf, gguf_layers
from bridge.models.outline import Part
from bridge.models.restored import restored, rows_of
from bridge.nn.preparation import prepare as prepare_all
from bridge.nn.quant_experts import ClampedSwiglu, ExpertStack, Fused, Gated, QuantExperts, WeightedExperts
from bridge.nn.quant_linear import JoinedLinear, Placed, QuantEmbedding, QuantLinear
from bridge.runtime import GGUFFile, QuantTensor, open_gguf
from bridge.system.options import checked

# linear layers whose weights Jamba and DeepSeek V4 multiply with themselves
_READ_AS_FLOATS = "dt_proj", "o_a_proj"
_EXPERTS = ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True, eq=False)
class Piece:
    """What one tensor of the GGUF, or one of its matrices, or a run of its rows, holds of a checkpoint's tensor."""

    tensor: QuantTensor
    part: Part
    index: int
    count: int  # parts that the tensor has
    first: int  # the rows of the parts before it

    @property
    def matrix(self) -> QuantTensor | None:
        """The packed matrix; None where it is a vector, or floats."""
        matrix = self.tensor if self.count == 1 else None
        if matrix is None and len(self.tensor.shape) == 3:
            matrix = self.tensor[self.index]
        elif matrix is None and len(self.tensor.shape) == 2:
            matrix = self.tensor.slice_rows(self.first, self.first + self.part.shape[0])
        return matrix if matrix is not None and len(matrix.shape) == 2 and matrix.type != "F32" else None

    def values(self) -> np.ndarray:
        """float32, as the GGUF has them, in the shape of the part."""
        rows = self.tensor.dequantize().reshape(-1, *self.part.shape[1:])
        return rows[self.first : self.first + self.part.shape[0]]


class Reserved(nn.Module):
    """Keeps a place for a packed module while transformers loads the rest; `place` tells the device afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.weight = torch.empty(0)  # no parameter: some models initialize it by name, unless it is marked so
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]


class Placement:
    """The packed modules and the floats of a model on a GGUF.

    model      a transformers model of the GGUF's architecture, with or without weights
    precision  of activations in products: see QuantLinear

    Raises BridgeError where the two are not of one model.
    """

    def __init__(self, model: nn.Module, file: GGUFFile, precision: str = "int8"):
        self.model, self.file, self.precision = model, file, precision
        self._modules: dict[str, Callable[[], nn.Module]] = {}  # path -> what is put there
        self._numbers = numbers_of_gguf(file.metadata)
        self._floats: dict[str, list[Piece]] = {}  # parameter's name -> what it is made of
        if any(isinstance(module, Placed) for module in model.modules()):
            raise BridgeError(f"{self.kind}: has a GGUF's weights already; make the model anew for {file.path}")
        self._shapes = {n: tuple(p.shape) for n, p in chain(model.named_parameters(), model.named_buffers())}
        self._read()

    @property
    def kind(self) -> str:
        return type(self.model).__name__

    def floats(self) -> dict[str, torch.Tensor]:
        """Name of the parameter -> float32 values in its shape."""
        values = {name: _values(pieces, self._shapes[name]) for name, pieces in self._floats.items()}
        values |= {name: np.array(value) for name, value in self._numbers.items()}
        return {name: torch.from_numpy(array) for name, array in values.items()}

    def _check(self) -> None:
        """Every parameter has its values in the file."""
        for name, _ in self.model.named_parameters():
            path = name.rpartition(".")[0]
            if name not in (*self._floats, *self._numbers) and path not in self._modules and path != self._head():
                raise BridgeError(
                    f"{name}: {self.kind} has it, but the GGUF does not; give the config of the GGUF's own model"
                )

    def reserve(self) -> None:
        """Put `Reserved` where packed modules will be, and untie what is tied to their weights."""
        for path in self._modules:
            self.model.set_submodule(path, Reserved())
        untie(self.model, self._modules)

    def fill(self) -> None:
        """Put the packed modules in, each on the device of what it replaces."""
        for path, make in self._modules.items():
            old = self.model.get_submodule(path)
            self.model.set_submodule(path, make().to(_device(old)))
        untie(self.model, self._modules)

    # what goes where

    def _read(self) -> None:
        pieces, stacks = self._tensors()
        names = _names(self.model)
        placed: dict[tuple[str, str], list[Piece]] = {}
        for source, group in pieces.items():
            if not self._ignores(name := names(source)):
                target = self._path_and_leaf(name)
                placed[target] = _followed(placed.get(target, []), group)
        experts = self._expert_modules() if stacks else {}
        stays_float = float32_names(self.model)
        packed: dict[str, list[Piece]] = {}
        for (path, leaf), group in placed.items():
            floating = leaf != "weight" or path.endswith(_READ_AS_FLOATS) or stays_float(f"{path}.{leaf}")
            if floating or not _packs(self.model.get_submodule(path), group):
                self._floats[f"{path}.{leaf}"] = group
            else:
                packed[path] = group
        head = self._head()
        if head is not None and head not in packed and f"{head}.weight" not in self._floats:
            embedding = self.model.get_input_embeddings()  # type: ignore[operator]
            groups = (group for path, group in packed.items() if self.model.get_submodule(path) is embedding)
            shared = next(groups, None)
            if shared is not None:
                packed[head] = shared
        for path, group in packed.items():
            bias = self._floats.pop(f"{path}.bias", None)
            self._modules[path] = self._packed(path, group, None if bias is None else _joined(bias))
        for layer, stack in stacks.items():
            if layer not in experts:
                raise BridgeError(
                    f"{self.file.path}: {self.kind} of this transformers has layer {layer}'s experts in a way that is "
                    "unknown here; bridge.Model runs the file"
                )
            self._modules[experts[layer]] = self._experts(experts[layer], stack)
        self._check()

    def _tensors(self) -> tuple[dict[str, list[Piece]], dict[int, dict[str, QuantTensor]]]:
        """The pieces of every tensor of a checkpoint, and each layer's stacks of experts."""
        metadata = self.file.metadata
        family = family_of_gguf(metadata)
        layers = gguf_layers(metadata)
        inner = self.model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]
        config = {key: value for key, value in inner.items() if key != "quantization_config"}
        # but those of layers that predict further tokens
        shapes = {name: tensor.shape for name, tensor in self.file.items() if (block_of(name) or 0) < layers}
        if config.get("num_hidden_layers", layers) > layers:
            raise BridgeError(
                f"{self.file.path}: has {layers} layers, the model's config {config['num_hidden_layers']}; correct "
                "num_hidden_layers, or give the GGUF of that model"
            )
        pieces: dict[str, list[Piece]] = {}
        stacks: dict[int, dict[str, QuantTensor]] = {}
        for tensor in tensors_of_gguf(config, Path(self.kind), shapes, family.arch, family):
            if tensor.origin != "checkpoint":
                continue
            stored = self.file[tensor.name]
            if tensor.kind in _EXPERTS and tensor.name.endswith(".weight") and tensor.layer is not None:
                stacks.setdefault(tensor.layer, {})[tensor.kind] = stored
                continue
            first = 0
            for i, part in enumerate(tensor.parts):
                pieces.setdefault(part.source, []).append(Piece(stored, part, i, len(tensor.parts), first))
                first += part.shape[0]
        return pieces, stacks

    def _ignores(self, name: str) -> bool:
        """Whether the model has no use for a tensor that its checkpoints have, such as keys that a layer borrows."""
        if name in self._shapes:
            return False
        lists = (getattr(module, "_keys_to_ignore_on_load_unexpected", None) for module in self.model.modules())
        return any(re.search(pattern, name) for patterns in lists for pattern in patterns or ())

    def _path_and_leaf(self, name: str) -> tuple[str, str]:
        path, _, leaf = name.rpartition(".")
        if name not in self._shapes and name.removesuffix(".weight") != self._head():
            raise BridgeError(
                f"{name}: {self.file.path} has it, but {self.kind} does not; give the config of the GGUF's own model"
            )
        return path, leaf

    def _head(self) -> str | None:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return next((name for name, module in self.model.named_modules() if module is head), None)

    def _expert_modules(self) -> dict[int, str]:
        modules = {}
        for name, module in self.model.named_modules():
            down = getattr(module, "down_proj", None)
            layer = layer_of(name)
            if layer is not None and isinstance(down, nn.Parameter) and down.ndim == 3:
                modules[layer] = name
        return modules

    # what is made of the pieces

    def _packed(self, path: str, pieces: list[Piece], bias: np.ndarray | None) -> Callable[[], nn.Module]:
        """How the module of these pieces is made, once what it replaces may be gone."""
        module: Any = self.model.get_submodule(path)
        shape = tuple(module.weight.shape)
        shape = shape[::-1] if _is_conv1d(module) else shape
        rows = sum(piece.part.shape[0] for piece in pieces)
        if shape != (rows, pieces[0].part.shape[1]):
            raise BridgeError(
                f"{path}: shape {list(shape)}, {pieces[0].tensor.name} of the GGUF has "
                f"{[rows, pieces[0].part.shape[1]]}; give the config of the GGUF's own model"
            )
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "scalar_embed_scale", 1.0)
            table = pieces[0].tensor if len(pieces) > 1 else _matrix(pieces[0])  # of all its runs of rows
            return partial(QuantEmbedding, table, module.weight.dtype, scale)
        if len(pieces) == 1:
            picked = pieces[0].part
            order = None if picked.rows is None else np.argsort(picked.rows)
            values = None if bias is None else torch.from_numpy(bias)
            return partial(QuantLinear, _matrix(pieces[0]), values, order, self.precision, picked.columns)
        order = np.argsort(np.concatenate([rows_of(piece.part) for piece in pieces]))
        return lambda: JoinedLinear([QuantLinear(_matrix(p), precision=self.precision) for p in pieces], order)

    def _experts(self, path: str, stacks: dict[str, QuantTensor]) -> Callable[[], nn.Module]:
        """The stacks of a layer by their names: gate, up and down, or gate and up in one, or no gate."""
        module: Any = self.model.get_submodule(path)
        bias_pieces = {part: self._floats.pop(f"{path}.{part}_bias", None) for part in ("gate_up_proj", "down_proj")}
        bias_values = {
            part: torch.from_numpy(_values(pieces, self._shapes[f"{path}.{part}_bias"]))
            for part, pieces in bias_pieces.items()
            if pieces is not None
        }
        parts = [stacks[part] for part in _EXPERTS if part in stacks]
        alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
        if alpha is not None and hasattr(module, "limit"):
            activation: Any = ClampedSwiglu(alpha, module.limit)
        elif len(parts) == 3:
            limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
            activation = Gated(getattr(module, "act_fn", nn.functional.silu), limit)
        else:
            activation = Fused(Gated(module.act_fn)) if "ffn_gate_up_exps" in stacks else module.act_fn
        biases = None
        if len(bias_values) == 2:  # gpt-oss, whose gate and up alternate
            both = bias_values["gate_up_proj"]
            biases = both[:, ::2].contiguous(), both[:, 1::2].contiguous(), bias_values["down_proj"]
        kind = WeightedExperts if type(module).__name__ == "Llama4TextExperts" else QuantExperts
        return lambda: kind(ExpertStack.of(parts, activation, biases), self.precision)


def rope_factors(file: GGUFFile) -> dict[str, np.ndarray]:
    """The tensors that divide the frequencies of rotary embeddings, as `add_rope_factors` takes them."""
    return {name: file[f"{name}.weight"].dequantize() for name in ROPE_FACTORS if f"{name}.weight" in file}


def float32_names(model: nn.Module) -> Callable[[str], bool]:
    """Whether transformers keeps a tensor of this name in float32 where the rest of the model is in halves."""
    lists = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
    patterns = [p for module in model.modules() for each in lists for p in getattr(module, each, None) or ()]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def untie(model: nn.Module, modules: Iterable[str]) -> None:
    """Forget ties of weights that are no parameters any more."""
    gone = {f"{path}.weight" for path in modules}
    for ties in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, ties, None)
        if isinstance(tied, dict):
            setattr(model, ties, {key: of for key, of in tied.items() if not {key, of} & gone})


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _packs(module: nn.Module, pieces: list[Piece]) -> bool:
    """Whether a module multiplies with, or looks rows up in, what these pieces hold as they are."""
    changes = {None, "conv1d"} if _is_conv1d(module) else {None}
    kinds = _is_conv1d(module) or isinstance(module, nn.Linear | nn.Embedding)
    return kinds and all(
        piece.matrix is not None and piece.part.change in changes and piece.part.matrix is None
        and piece.part.factor is None
        and (len(pieces) == 1 or piece.part.columns is None)
        for piece in pieces
    )  # fmt: skip


def _followed(first: list[Piece], others: list[Piece]) -> list[Piece]:
    """The pieces of a tensor that a model has in one with another, whose rows come first: MiniMax M3's gate and up."""
    if not first:
        return others
    begin = 1 + max(int(rows_of(piece.part).max()) for piece in first)
    return first + [replace(p, part=replace(p.part, rows=begin + rows_of(p.part))) for p in others]


def _matrix(piece: Piece) -> QuantTensor:
    assert piece.matrix is not None
    return piece.matrix


def _values(pieces: list[Piece], shape: tuple[int, ...]) -> np.ndarray:
    """float32 of a parameter's shape: rows and columns where they were before the conversion."""
    return restored([(piece.part, piece.values()) for piece in pieces], shape)


def _joined(pieces: list[Piece]) -> np.ndarray:
    return _values(pieces, (sum(piece.part.shape[0] for piece in pieces),))


def _names(model: nn.Module) -> Callable[[str], str]:
    """A checkpoint's name of a tensor -> the model's name of the parameter."""
    names = {name: True for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers())}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before version 5 models had a checkpoint's names
        return str
    mapping = deepcopy(get_model_conversion_mapping(model))  # it keeps what it has matched
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def name(source: str) -> str:
        if source in names:
            return source
        return rename_source_key(source, renamings, converters, model.base_model_prefix, names)[0]

    return name


def _device(module: nn.Module) -> torch.device:
    """The device of a module's weights; the CPU if they are on none yet."""
    first = next(chain(module.parameters(), module.buffers()))
    return torch.device("cpu") if first.is_meta else first.device


@checked
def replace_linears(
    model: nn.Module, gguf: str | Path | GGUFFile, precision: str = "int8", prepare: bool = True
) -> nn.Module:
    """Put a GGUF's weights into a transformers model of its architecture.

    model      the model; each tensor goes to the device of what it replaces
    gguf       the file, or an open one
    precision  "int8" rounds the inputs of products to 8 bits in blocks, as ggml does; "f32" does not
    prepare    repack the weights for this CPU now, and release the mapped pages of the file

    Linears, embeddings and experts become modules on the file's own blocks. Everything else keeps its kind and takes
    the file's values.

    Returns the same model. Raises BridgeError where the file holds another architecture, or shapes that the model does
    not have.
    """
    placement = Placement(model, gguf if isinstance(gguf, GGUFFile) else open_gguf(gguf), precision)
    floats = placement.floats()
    placement.fill()
    for name, values in floats.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, leaf)
        device = torch.device("cpu") if old.is_meta else old.device
        values = values.to(device, old.dtype)
        if isinstance(old, nn.Parameter):
            setattr(module, leaf, nn.Parameter(values, requires_grad=False))
        else:
            module.register_buffer(leaf, values)
    model.tie_weights()  # type: ignore[operator]
    if prepare:
        prepare_all(model)
    return model

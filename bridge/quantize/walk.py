"""Calibration: a text goes through a model layer by layer, and each layer is quantized on the inputs it will see.

A decoder layer (any block of modules) is taken in stages (`stages`). Each stage's Hessians are gathered with all
stages before it quantized already; then the block's outputs, now of quantized weights, are the next block's inputs.
With feed="float" they are the float model's.

Memory: one block's weights twice where float inputs are wanted too, its Hessians, and the activations between
blocks, float32 [tokens, hidden], once or twice, or none of them where they go to disk. The model itself may be in
memory, or come block by block from a checkpoint (`float_model`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.block_inputs import Feed, Folder, first_feeds
from bridge.quantize.experts import lend, put_back, take_apart
from bridge.quantize.head import head_hessian, head_of
from bridge.quantize.hessian import Hessian
from bridge.quantize.layers import is_layer, matrix, matrix_shape, set_matrix
from bridge.quantize.stages import Stage, find_stages, inputs, mixture_of


@dataclass(frozen=True)
class Calibrated:
    """One layer, ready to be quantized."""

    name: str
    weight: torch.Tensor  # float32 [out, columns], the float model's
    hessian: Hessian
    last: bool = False  # no other layer has this Hessian


# gets a layer; returns its quantized weights as floats [out, columns], and whatever the caller wants to keep of them
Quantizer = Callable[[Calibrated], tuple[torch.Tensor, Any]]
Known = Callable[[str], torch.Tensor | None]
# gets a block, its layers, its feeds, and what the checkpoint calls a module of the block; may change floats in place
Prepare = Callable[[nn.Module, Mapping[str, nn.Module], Sequence[Feed], Callable[[str], str]], None]


class Source(Protocol):
    """A model whose weights are brought in when they are wanted.

    model, prefix, blocks   a `transformers` decoder, the name of its list of blocks, and the list
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def prefix(self) -> str: ...
    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    def load(self, block: int | None) -> None:
        """Give a block its weights; None: what runs before the blocks."""

    def drop(self, block: int | None) -> None:
        """Take them away."""

    def load_head(self) -> None:
        """Give the output head its weights."""

    def drop_head(self) -> None:
        """Take them away."""

    def name(self, layer: str) -> str:
        """A layer's name in the checkpoint, of its name in the model."""


class InMemory:
    """A model that is whole in memory; its experts are taken apart while their block is calibrated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefix, blocks = decoder_blocks(model)
        self.blocks: Sequence[nn.Module] = list(blocks)
        self._taken: list[tuple[nn.Module, str, nn.Module]] = []

    def load(self, block: int | None) -> None:
        if block is not None:
            self._taken = take_apart(self.blocks[block])

    def drop(self, block: int | None) -> None:
        put_back(self._taken)
        self._taken = []

    def load_head(self) -> None: ...

    def drop_head(self) -> None: ...

    def name(self, layer: str) -> str:
        return layer


@torch.no_grad()
def quantize_model(
    model: nn.Module | Source,
    tokens: torch.Tensor,
    quantizer: Quantizer,
    *,
    feed: str = "quantized",
    cross: bool = False,
    batch: int = 16,
    wanted: Callable[[str], bool] = lambda name: True,
    known: Known = lambda name: None,
    offload: str | Path | None = None,
    prepare: Prepare | None = None,
    head: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside a `transformers` decoder's blocks in place; yields (name, what the quantizer kept).

    model    in memory, or a `FloatModel`, which keeps nothing of the quantized weights and whose layers are named
             as the checkpoint's
    tokens   int [sequences, length]
    feed     whose outputs the next block gets: "quantized" or "float"
    cross    gather GPTAQ's cross term too, which runs the float blocks beside the quantized ones
    batch    sequences in a forward pass
    wanted   whether a layer of this name is to be quantized
    known    weights [out, columns] of a layer that was quantized before, or None: it is not quantized again
    offload  a folder for the activations between blocks; None: they stay in memory
    prepare  called with each block before its layers are quantized, to change it without changing what it computes
    head     quantize the output head too, unless it is the embeddings
    """
    if feed not in ("quantized", "float"):
        raise BridgeError(f"inputs of the next layer from {feed!r}; 'quantized' and 'float' are possible")
    source: Source = InMemory(model) if isinstance(model, nn.Module) else model
    positions = getattr(source.model.config, "max_position_embeddings", None)
    if positions and tokens.shape[1] > positions:
        raise BridgeError(
            f"calibration sequences of {tokens.shape[1]} tokens, and the model knows {positions} positions; "
            f"take shorter ones (--sequence-length {positions})"
        )
    source.model.eval()
    with Folder(offload) as folder:
        source.load(None)
        try:
            feeds = first_feeds(source.model, source.blocks, tokens.split(batch), folder)
        finally:
            source.drop(None)
        float_feeds = [f.copy() for f in feeds] if cross else None
        for i, block in enumerate(source.blocks):
            source.load(i)
            try:
                for f in (*feeds, *(float_feeds or ())):
                    f.at(i)
                prefix = f"{source.prefix}.{i}."
                layers = {source.name(prefix + n): m for n, m in block.named_modules() if is_layer(m)}
                layers = {n: m for n, m in layers.items() if wanted(n)}
                if prepare is not None:
                    prepare(block, layers, feeds, lambda n, prefix=prefix: source.name(prefix + n))  # type: ignore[misc]
                original = _float_twin(block) if cross or feed == "float" else None
                yield from _quantize_layers(block, layers, feeds, quantizer, original, float_feeds, known)
                for f in feeds:
                    f.pass_on(f.into(original if feed == "float" and original is not None else block))
                for f in float_feeds or ():
                    assert original is not None
                    f.pass_on(f.into(original))
            finally:
                source.drop(i)
        if head:
            yield from _quantize_head(source, tokens.split(batch), feeds, float_feeds, quantizer, wanted, known)


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    feeds: Sequence[Feed],
    quantizer: Quantizer,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside any module, stage by stage in the order of their calls; yields as `quantize_model`."""
    layers = {n: m for n, m in block.named_modules() if is_layer(m) and wanted(n)}
    yield from _quantize_layers(block, layers, feeds, quantizer)


def _quantize_layers(
    block: nn.Module,
    layers: Mapping[str, nn.Module],
    feeds: Sequence[Feed],
    quantizer: Quantizer,
    original: nn.Module | None = None,
    float_feeds: Sequence[Feed] | None = None,
    known: Known = lambda name: None,
) -> Iterator[tuple[str, Any]]:
    """original  the float block (`_float_twin`); float_feeds  the float model's inputs"""
    of = dict(zip(block.modules(), original.modules(), strict=True)) if original is not None else {}
    originals = {n: of[m] for n, m in layers.items() if m in of}
    done = {n: values for n in layers if (values := known(n)) is not None}
    if len(done) == len(layers):
        for n in layers:
            _replace(layers[n], done.pop(n), originals.get(n))
        return
    for whole in find_stages(block, layers, feeds):
        for stage in whole.parts(layers, bool(float_feeds)):
            names = [n for group in stage.groups.values() for n in group]
            if all(n in done for n in names):
                hessians = {}
            else:
                hessians = _gather(block, stage, layers, feeds, original, originals, float_feeds)
            for key, group in stage.groups.items():
                missing = [n for n in group if n not in done]
                for n in group:
                    if n in done:
                        _replace(layers[n], done.pop(n), originals.get(n))
                        continue
                    values, kept = quantizer(Calibrated(n, matrix(layers[n]), hessians[key], n == missing[-1]))
                    _replace(layers[n], values, originals.get(n))
                    del values
                    yield n, kept
                    del kept
                hessians.pop(key, None)


def _replace(layer: nn.Module, values: torch.Tensor, original: nn.Module | None) -> None:
    """Put quantized weights in the place of a layer's; what shared them in the float block gets them as they were."""
    if original is not None:
        weight: torch.Tensor = original.weight  # type: ignore[assignment]
        original.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    set_matrix(layer, values)


def _quantize_head(
    source: Source,
    batches: Sequence[torch.Tensor],
    feeds: Sequence[Feed],
    float_feeds: Sequence[Feed] | None,
    quantizer: Quantizer,
    wanted: Callable[[str], bool],
    known: Known,
) -> Iterator[tuple[str, Any]]:
    """feeds hold the last block's outputs."""
    name, module = head_of(source.model)
    name = source.name(name)
    if not wanted(name) or known(name) is not None:
        return
    source.load(None)
    source.load_head()
    try:
        if module.weight is not source.model.get_input_embeddings().weight:  # type: ignore[operator]
            floats = (f.value() for f in float_feeds) if float_feeds else None
            hessian = head_hessian(source.model, source.blocks, batches, (f.value() for f in feeds), floats)
            values, kept = quantizer(Calibrated(name, matrix(module), hessian))
            set_matrix(module, values)
            yield name, kept
    finally:
        source.drop(None)
        source.drop_head()


def _gather(
    block: nn.Module,
    stage: Stage,
    layers: Mapping[str, nn.Module],
    feeds: Sequence[Feed],
    original: nn.Module | None,
    originals: Mapping[str, nn.Module],
    float_feeds: Sequence[Feed] | None,
) -> dict[str, Hessian]:
    """The Hessian of each group of a stage."""
    hessians = {}
    for key, group in stage.groups.items():
        first = layers[group[0]]
        hessians[key] = Hessian(group[0], matrix_shape(first)[1], next(first.parameters()).device)
    mixture = mixture_of(block, stage, layers)
    for i, f in enumerate(feeds):
        seen = inputs(block, stage, layers, f)
        floats: dict[str, torch.Tensor] = {}
        # where experts are modules of their own from the start, the float model's may see other tokens: no cross term
        if original is not None and float_feeds and (mixture or not stage.fellows):
            floats = inputs(original, stage, originals, float_feeds[i], mixture.routing if mixture else None)
        for key, x in seen.items():
            hessians[key].add(x, floats.pop(key, None))
    if stage.fellows:
        lend(list(hessians.values()))
    return hessians


def _float_twin(block: nn.Module) -> nn.Module:
    """A copy of a block that shares its tensors until `_replace` changes them."""
    return copy.deepcopy(block, {id(t): t for t in (*block.parameters(), *block.buffers())})


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of a `transformers` model's decoder blocks. Raises BridgeError where there is none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise BridgeError(f"{type(model).__name__}: no list of {count} decoder layers found; use bridge.quantize.gptq")

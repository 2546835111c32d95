"""Calibration: tokens pass through a model layer by layer, and each layer is quantized for the inputs it will see.

A decoder block (any module) is processed in stages (`stages`). Each stage's Hessians are gathered after all stages
before it have been quantized; the block's outputs, with quantized weights, are then the next block's inputs. With
feed="float" those are the float model's.

Memory: one block's weights (twice if float inputs are needed too), its Hessians, and the activations between blocks,
[tokens, hidden], once or twice, as far as they do not go to disk (`needs` counts). The model itself may be in memory,
or be read block by block from a checkpoint (`float_model`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bridge.errors import BridgeError, parameter
from bridge.quantize.activations import Resumption, Shelf
from bridge.quantize.block_inputs import (
    BlockInputs,
    embedded,
    first_inputs,
    head_hessian,
    head_of,
    is_layer,
    matrix,
    matrix_shape,
    set_embeddings,
    set_matrix,
)  # fmt: skip
from bridge.quantize.experts import is_short, lend, merged, restore_experts, split_experts
from bridge.quantize.hessian import Hessian
from bridge.quantize.replay import Replay
from bridge.quantize.stages import Stage, find_stages, mixture_of, stage_inputs
from bridge.quantize.target import takes_products


@dataclass(frozen=True)
class LayerInput:
    """What a quantizer gets: one layer, not yet quantized."""

    name: str
    weight: torch.Tensor  # float32 [out, columns], the float model's
    hessian: Hessian
    outputs: torch.Tensor | None = None  # A of `two_sided.round_two_sided`, [blocks, n, n]
    last: bool = False  # no other layer has this Hessian, and no later rows
    rows: tuple[int, int, int] | None = None  # first, end and number of all: a part of the output head


# a layer -> its quantized weights as floats [out, columns], and anything that the caller wants to have of it
Quantizer = Callable[[LayerInput], tuple[torch.Tensor, Any]]
Known = Callable[[str], torch.Tensor | None]
Outputs = Callable[[str], torch.Tensor | None]
Spans = Callable[[str, int, int], Iterable[slice]]
# (block, its layers, its inputs, name in the block -> name in the checkpoint); may change floats in place
Prepare = Callable[[nn.Module, Mapping[str, nn.Module], Sequence[BlockInputs], Callable[[str], str]], None]


class StreamedModel(Protocol):
    """A model whose weights are loaded when they are needed.

    model, prefix, blocks   a `transformers` decoder, the name of its list of blocks, and the list
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def prefix(self) -> str: ...
    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    def load(self, block: int | None) -> None:
        """Load a block's weights; None: those of everything outside the blocks except the head."""

    def drop(self, block: int | None) -> None:
        """Free what `load` has loaded."""

    def untied_head(self) -> tuple[str, tuple[int, int]] | None:
        """The output head's name and (out, columns); None if it is tied to the embeddings."""

    def head_rows(self, rows: slice) -> torch.Tensor:
        """Some rows of the output head's weights, float32 [rows, columns], a copy."""

    def set_head_rows(self, rows: slice, values: torch.Tensor) -> None:
        """Replace them."""

    def name(self, layer: str) -> str:
        """A layer's name in the checkpoint, given its name in the model."""


class InMemory:
    """A model that is completely in memory; its experts are split while their block is calibrated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefix, blocks = decoder_blocks(model)
        self.blocks: Sequence[nn.Module] = list(blocks)
        self._split: list[tuple[nn.Module, str, nn.Module]] = []

    def load(self, block: int | None) -> None:
        if block is not None:
            self._split = split_experts(self.blocks[block])

    def drop(self, block: int | None) -> None:
        restore_experts(self._split)
        self._split = []

    def untied_head(self) -> tuple[str, tuple[int, int]] | None:
        name, head = head_of(self.model)
        tied = head.weight is self.model.get_input_embeddings().weight  # type: ignore[operator]
        return None if tied else (name, matrix_shape(head))

    def head_rows(self, rows: slice) -> torch.Tensor:
        _, head = head_of(self.model)
        return head.weight.data[rows].to(torch.float32, copy=True)  # type: ignore[index, union-attr]

    def set_head_rows(self, rows: slice, values: torch.Tensor) -> None:
        _, head = head_of(self.model)
        head.weight.data[rows] = values.to(head.weight.data)  # type: ignore[index, union-attr, operator]

    def name(self, layer: str) -> str:
        return layer


@torch.no_grad()
def quantize_model(
    model: nn.Module | StreamedModel,
    tokens: torch.Tensor,
    quantizer: Quantizer,
    *,
    feed: str = "quantized",
    until: int | None = None,
    cross: bool = False,
    batch: int = 16,
    held: int = 0,
    wanted: Callable[[str], bool] = lambda name: True,
    known: Known = lambda name: None,
    outputs: Outputs = lambda name: None,
    offload: str | Path | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    hessians: int | None = None,
    resume: Resumption | None = None,
    prepare: Prepare | None = None,
    embeddings: Iterable[torch.Tensor] = (),
    head: bool = False,
    head_spans: Spans = lambda name, rows, columns: [slice(0, rows)],
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers of a `transformers` decoder's blocks in place; yields (name, the quantizer's other result).

    model    in memory, or a `FloatModel`, which drops the quantized weights and names layers as the checkpoint does
    tokens   int [sequences, length]
    feed     which blocks feed the next one: "quantized" or "float"
    until    how many blocks are passed; None: all, and then the head
    cross    gather GPTAQ's cross term too, which also runs the float blocks
    batch    sequences in a forward pass
    held     how many of the last sequences are held back to choose settings on; 0: spans of all, see `hessian`
    wanted   whether to quantize the layer of this name
    known    weights [out, columns] of a layer that was quantized before; None: quantize it
    outputs  A of a layer, float32 [blocks, n, n], see `two_sided.round_two_sided`; None: all outputs count the same
    offload  a folder for the activations that do not stay in memory
    memory   bytes of activations in memory; None: all of them, or, with a folder, none
    dtype    of these activations; None: that of the model's arithmetic
    hessians  bytes of experts' Hessians that are gathered in one pass; None: 2 GB
    resume   where the inputs of the next block are kept, to start at it in another run; the layers before are `known`
    prepare  called before a block's layers are quantized; may change its weights, but not what it computes
    embeddings  the quantized ones, float [rows, hidden], some rows after the others; none: they are the float model's
    head     quantize the output head too, unless it is tied to the embeddings
    head_spans  (name, rows, columns) of the head -> the rows that are quantized at a time. It is the largest matrix: as
             a whole it takes several times its size in memory. No spans: it is not quantized
    """
    if feed not in ("quantized", "float"):
        raise BridgeError(f"unknown {parameter('feed')} {feed!r}: choose quantized or float")
    source: StreamedModel = InMemory(model) if isinstance(model, nn.Module) else model
    check_length(tokens.shape[1], positions_of(_text_config(source.model)))
    source.model.eval()
    parts = in_batches(tokens, batch, held)
    with Shelf(offload, memory, dtype) as shelf:
        source.load(None)
        source.load(0)
        try:
            batches = first_inputs(source.model, source.blocks, parts, shelf)
            if held:
                for i, b in enumerate(batches):
                    b.held = i >= -(-(len(tokens) - held) // batch)
            apart = cross and feed == "quantized"  # else the float model's inputs are the blocks' own
            float_batches = [b.copy() for b in batches] if apart else None
            if feed == "quantized" and set_embeddings(source.model, embeddings):
                for b, part in zip(batches, parts, strict=True):
                    b.advance(embedded(source.model, source.blocks, part))
        finally:
            source.drop(0)
            source.drop(None)
        start = _resumed(resume, batches, float_batches)
        for i, block in list(enumerate(source.blocks))[start:until]:
            source.load(i)
            try:
                for b in (*batches, *(float_batches or ())):
                    b.select_block(i)
                prefix = f"{source.prefix}.{i}."
                layers = {source.name(prefix + n): m for n, m in block.named_modules() if is_layer(m)}
                layers = {n: m for n, m in layers.items() if wanted(n)}
                if prepare is not None:
                    prepare(block, layers, batches, lambda n, prefix=prefix: source.name(prefix + n))  # type: ignore[misc]
                original = float_twin(block) if cross or feed == "float" else None
                replays = [Replay(block, b) for b in batches]
                twins = float_batches or (batches if cross else None)
                floats = [Replay(original, b) for b in twins or ()] if original is not None else []
                yield from _quantize_layers(layers, replays, quantizer, original, floats, known, outputs, hessians)
                if feed == "float" and original is not None:
                    for r in replays:
                        r.clear()
                    replays = [] if floats else [Replay(original, b) for b in batches]
                for r in (*replays, *floats):
                    output = r.run()
                    r.clear()
                    r.batch.advance(output)
                    del output
                if resume is not None:
                    _keep(resume, i + 1, batches, float_batches, dtype)
            finally:
                source.drop(i)
        if head and until is None:
            twins = float_batches or (batches if cross else None)
            yield from _quantize_head(source, parts, batches, twins, quantizer, wanted, known, head_spans)


def in_batches(tokens: torch.Tensor, batch: int, held: int) -> list[torch.Tensor]:
    """Sequences that pass together; none has both some that are held back and others."""
    return [part for some in tokens.split([len(tokens) - held, held]) if len(some) for part in some.split(batch)]


def _resumed(
    resume: Resumption | None, batches: Sequence[BlockInputs], float_batches: Sequence[BlockInputs] | None
) -> int:
    """The first block that was not finished; the batches become its inputs."""
    start = 0 if resume is None else resume.block(len(batches), float_batches is not None)
    if resume is not None and start:
        for own, floats in ((batches, False), (float_batches or (), True)):
            for number, batch in enumerate(own):
                batch.advance(resume.read(start, number, floats).to(batch.value()))
    return start


def _keep(
    resume: Resumption,
    block: int,
    batches: Sequence[BlockInputs],
    float_batches: Sequence[BlockInputs] | None,
    dtype: torch.dtype | None,
) -> None:
    for own, floats in ((batches, False), (float_batches or (), True)):
        for number, batch in enumerate(own):
            resume.write(block, number, floats, batch.value().to(dtype))
    resume.finish(block)


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    batches: Sequence[BlockInputs],
    quantizer: Quantizer,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside any module, stage by stage in the order of their calls; yields as `quantize_model`."""
    layers = {n: m for n, m in block.named_modules() if is_layer(m) and wanted(n)}
    yield from _quantize_layers(layers, [Replay(block, b) for b in batches], quantizer)


def _quantize_layers(
    layers: Mapping[str, nn.Module],
    replays: Sequence[Replay],
    quantizer: Quantizer,
    original: nn.Module | None = None,
    floats: Sequence[Replay] = (),
    known: Known = lambda name: None,
    outputs: Outputs = lambda name: None,
    together: int | None = None,
) -> Iterator[tuple[str, Any]]:
    """original: the float block (`float_twin`); floats: its passes, with the float model's inputs."""
    block, batches = replays[0].block, [r.batch for r in replays]
    of = dict(zip(block.modules(), original.modules(), strict=True)) if original is not None else {}
    originals = {n: of[m] for n, m in layers.items() if m in of}
    done = {n: values for n in layers if (values := known(n)) is not None}
    if len(done) == len(layers):
        for n in layers:
            replace_layer(layers[n], done.pop(n), originals.get(n))
        return
    stages, ends = find_stages(block, layers, batches)
    for replay in (*replays, *floats):
        replay.ends = ends
    for whole in stages:
        everyone: Hessian | None = None  # of all the stage's experts
        for stage in whole.parts(layers, bool(floats), together):
            names = [n for group in stage.groups.values() for n in group]
            hessians = {} if all(n in done for n in names) else gather(stage, layers, replays, originals, floats)
            if stage.experts and any(map(is_short, hessians.values())):
                own = list(hessians.values())
                if everyone is None:
                    complete = len(own) == len(whole.groups)
                    everyone = merged(own) if complete else gather_together(whole, layers, replays)
                lend(own, everyone)
            for key, group in stage.groups.items():
                missing = [n for n in group if n not in done]
                for n in group:
                    if n in done:
                        replace_layer(layers[n], done.pop(n), originals.get(n))
                        continue
                    values, kept = quantizer(
                        LayerInput(n, matrix(layers[n]), hessians[key], outputs(n), n == missing[-1])
                    )
                    replace_layer(layers[n], values, originals.get(n))
                    del values
                    yield n, kept
                    del kept
                hessians.pop(key, None)


def replace_layer(layer: nn.Module, values: torch.Tensor, original: nn.Module | None) -> None:
    """Set a layer's quantized weights; the same layer of the float block, which shared them, gets a copy first."""
    if original is not None:
        weight: torch.Tensor = original.weight  # type: ignore[assignment]
        original.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    set_matrix(layer, values)


def _quantize_head(
    source: StreamedModel,
    tokens: Sequence[torch.Tensor],
    outputs: Sequence[BlockInputs],
    float_outputs: Sequence[BlockInputs] | None,
    quantizer: Quantizer,
    wanted: Callable[[str], bool],
    known: Known,
    spans: Spans,
) -> Iterator[tuple[str, Any]]:
    """outputs: those of the last block for each batch of tokens."""
    head = source.untied_head()
    if head is None or not wanted(head[0]):
        return
    name, (count, columns) = head
    todo = list(spans(name, count, columns))
    if not todo or known(name) is not None:
        return
    source.load(None)
    try:
        floats = (b.value() for b in float_outputs) if float_outputs else None
        own = (b.value() for b in outputs)
        hessian = head_hessian(source.model, source.blocks, tokens, outputs[0].items, own, floats)
    finally:
        source.drop(None)
    for rows in todo:
        part = None if rows == slice(0, count) else (rows.start, rows.stop, count)
        values, kept = quantizer(LayerInput(name, source.head_rows(rows), hessian, None, rows is todo[-1], part))
        source.set_head_rows(rows, values)
        del values
        yield name, kept
        del kept


def gather(
    stage: Stage,
    layers: Mapping[str, nn.Module],
    replays: Sequence[Replay],
    originals: Mapping[str, nn.Module],
    floats: Sequence[Replay],
    first: int = 0,
) -> dict[str, Hessian]:
    """The Hessian of each group of a stage; `first`: how many tokens of the text come before these passes'."""
    hessians = {}
    for key, group in stage.groups.items():
        own = layers[group[0]]
        hessians[key] = Hessian(group[0], matrix_shape(own)[1], next(own.parameters()).device, first)
    mixture = mixture_of(replays[0].block, stage, layers)
    products = _with_products(stage, originals, floats)
    for i, replay in enumerate(replays):
        added: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
        seen = stage_inputs(stage, layers, replay, residuals=added[0] if products else None)
        twins: dict[str, torch.Tensor] = {}
        # experts that are separate modules in the model itself may see other tokens in the float model: no cross term
        if floats and (mixture or not stage.experts):
            routed = mixture.routing if mixture else None
            twins = stage_inputs(stage, originals, floats[i], routed, added[1] if products else None)
        for key, x in seen.items():
            x_float, outputs = twins.pop(key, None), None
            if key in products and x_float is not None:
                outputs = {n: _float_output(originals[n], own, floats[i], x_float) for n, own in products[key].items()}
                for n in added[0].keys() & added[1].keys():
                    outputs[n] = outputs[n].float() + (added[1][n] - added[0][n]).reshape(outputs[n].shape)
                x_float = None
            hessians[key].add(x, x_float, replay.batch.held, outputs)
    return hessians


def _with_products(
    stage: Stage, originals: Mapping[str, nn.Module], floats: Sequence[Replay]
) -> dict[str, dict[str, str]]:
    """The groups whose float outputs are gathered in place of the cross term, with their layers' names in the block."""
    if not floats or stage.experts:
        return {}
    names = {module: name for name, module in floats[0].block.named_modules()}
    found = {}
    for key, group in stage.groups.items():
        modules = [originals[n] for n in group]
        (*_, columns), rows = matrix_shape(modules[0]), [matrix_shape(m)[0] for m in modules]
        at_hand = all(floats[0].returns(names[m]) for m in modules)
        if takes_products(rows, columns, at_hand) and all(type(m).forward is nn.Linear.forward for m in modules):
            found[key] = {n: names[originals[n]] for n in group}
    return found


def _float_output(layer: nn.Module, name: str, replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """The output of a block's layer, without its bias, for inputs x that the replay has just passed."""
    found = replay.output(name)
    if found is None:
        found = layer(x.to(layer.weight.dtype))
    bias = getattr(layer, "bias", None)
    return found if bias is None else found - bias


def gather_together(stage: Stage, layers: Mapping[str, nn.Module], replays: Sequence[Replay]) -> Hessian:
    """One Hessian of the inputs of all groups of a stage."""
    first = layers[next(iter(stage.groups.values()))[0]]
    hessian = Hessian("all experts", matrix_shape(first)[1], next(first.parameters()).device)
    for replay in replays:
        for x in stage_inputs(stage, layers, replay).values():
            hessian.add(x)
    return hessian


def float_twin(block: nn.Module) -> nn.Module:
    """A copy of a block that shares its tensors until `replace_layer` changes them."""
    return copy.deepcopy(block, {id(t): t for t in (*block.parameters(), *block.buffers())})


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of a `transformers` model's decoder blocks. Raises BridgeError if there is none."""
    count = getattr(_text_config(model), "num_hidden_layers", None)
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    if not lists:
        raise BridgeError(f"{type(model).__name__}: no list of {count} decoder layers found; use bridge.quantize.gptq")
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    inside = next(n for n, m in model.named_modules() if m is embeddings).rpartition(".")[0]
    # a model that sees may have as many layers for images
    return next(((n, m) for n, m in lists.items() if n.startswith(f"{inside}.")), next(iter(lists.items())))


def positions_of(config: Any) -> int | None:
    """The most tokens that a model of this `transformers` config takes at once; None where there is no limit."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # the latter: MPT


def check_length(length: int, positions: int | None) -> None:
    """BridgeError where sequences are longer than the model has positions; None: it has no limit."""
    if positions is not None and length > positions:
        raise BridgeError(
            f"calibration sequences have {length} tokens, but the model has {positions} positions; "
            f"use shorter ones: {parameter('length', positions)}"
        )


def _text_config(model: nn.Module) -> Any:
    """The config of a model, or of the language model in one of several parts."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config

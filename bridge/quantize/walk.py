"""Calibration: tokens pass through a model layer by layer, and each layer is quantized for the inputs it will see.

A decoder block (any module) is processed in stages (`stages`). Each stage's Hessians are gathered after all stages
before it have been quantized; the block's outputs, with quantized weights, are then the next block's inputs. With
feed="float" those are the float model's.

Memory: one block's weights (twice if float inputs are needed too), its Hessians, and the activations between blocks,
[tokens, hidden], once or twice, as far as they do not go to disk (`needs` counts). The model itself may be in memory,
or be read block by block from a checkpoint (`float_model`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError, parameter
from bridge.quantize.activations import Resumption, Shelf
from bridge.quantize.block_inputs import (
    BlockInputs,
    embedded,
    first_inputs,
    head_hessian,
    is_layer,
    matrix,
    set_embeddings,
)  # fmt: skip
from bridge.quantize.experts import is_short, lend, merged
from bridge.quantize.float_twin import float_twin, replace_layer
from bridge.quantize.hessian import Hessian
from bridge.quantize.quantizer import Known, LayerInput, Outputs, Prepare, Quantizer, Spans, Weights
from bridge.quantize.replay import Replay
from bridge.quantize.stage_hessians import gather, gather_together
from bridge.quantize.stages import find_stages
from bridge.quantize.streamed_model import InMemory, StreamedModel, check_length, positions_of, text_config


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
    weights: Weights = lambda names: None,
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
    outputs  A of a layer; None: all outputs count the same
    weights  how much each token counts in H of these layers, which have the same inputs, see `token_weights`
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
    check_length(tokens.shape[1], positions_of(text_config(source.model)))
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
                yield from _quantize_layers(
                    layers, replays, quantizer, original, floats, known, outputs, weights, hessians
                )
                if feed == "float" and original is not None:
                    for r in replays:
                        r.clear()
                    replays = [] if floats else [Replay(original, b) for b in batches]
                _advance((*replays, *floats))
                del original, replays, floats  # the float block's memory
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


def _advance(replays: Sequence[Replay]) -> None:
    """Make the block's outputs the batches' inputs."""
    for replay in replays:
        output = replay.run()
        replay.clear()
        replay.batch.advance(output)
        del output


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
    weights: Weights = lambda names: None,
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
    stages, ends = find_stages(block, layers, batches, weights)
    for replay in (*replays, *floats):
        replay.ends = ends
    for whole in stages:
        everyone: Hessian | None = None  # of all the stage's experts
        for stage in whole.parts(layers, bool(floats), together):
            names = [n for group in stage.groups.values() for n in group]
            hessians = {}
            if not all(n in done for n in names):
                hessians = gather(stage, layers, replays, originals, floats, weights=weights)
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

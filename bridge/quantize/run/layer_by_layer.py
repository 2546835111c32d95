"""Calibration: tokens pass through a model layer by layer, and each layer is quantized for the inputs it will see.

Memory: one block's weights (twice if float inputs are needed too), its Hessians, and the activations between blocks,
[tokens, hidden], once or twice, as far as they do not go to disk (`needs` counts). The model itself may be in memory,
or be read block by block from a checkpoint (`float_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, Unpack

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.method import Method, Quantized, groups, superblocks
from bridge.quantize.model.block_inputs import BlockInputs
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.stages import Stage
from bridge.quantize.model.streamed_model import InMemory, StreamedModel, check_sequences
from bridge.quantize.quantizer import Quantizer
from bridge.quantize.run.block_work import Batch, Ends
from bridge.quantize.run.cluster import Tasks
from bridge.quantize.run.walk import Walk, WalkKeywords, rows_at_once
from bridge.quantize.run.worker import Worker, any_has_too_few_tokens, completed, merged_experts
from bridge.system.options import checked


@checked
def quantize_model(
    model: nn.Module | StreamedModel, tokens: torch.Tensor, quantizer: Quantizer, **options: Unpack[WalkKeywords]
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers of a `transformers` decoder's blocks in place; yields (name, the quantizer's other result).

    model    in memory, or a `FloatModel`, which drops the quantized weights and names layers as the checkpoint does
    tokens   int [sequences, length]
    options  fields of `Walk`
    """
    source: StreamedModel = InMemory(model) if isinstance(model, nn.Module) else model
    with Tasks(Walk(tokens, quantizer, **options), source) as tasks:
        yield from quantized_layers(tasks)


@torch.no_grad()
def quantized_layers(tasks: Tasks) -> Iterator[tuple[str, Any]]:
    """Quantize the layers of a walk; yields as `quantize_model`. On a cluster, the other result is a `StoredLayer`."""
    walk, model = tasks.walk, tasks.model
    check_sequences(model.model, walk.tokens.shape[1])
    model.model.eval()
    if walk.two_sided:
        yield from _embeddings(tasks)
    stored = walk.stored_inputs
    start = 0 if stored is None else stored.block(len(walk.batches()), walk.float_inputs)
    for block in range(len(model.blocks))[start : walk.until]:
        done: dict[str, Any] = {}
        ends = yield from _block(tasks, block, done)
        list(tasks.results(tasks.each(Worker.advanced, block, dict(done), ends)))
        if stored is not None:
            stored.finish(block + 1)
    if walk.head and walk.until is None:
        yield from _head(tasks)


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    batches: Sequence[BlockInputs],
    quantizer: Quantizer,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside any module, stage by stage in the order of their calls; yields as `quantize_model`."""
    walk = Walk(torch.empty(0, 1), quantizer, wanted=wanted)
    with Tasks(walk, _SingleBlock(block), batches={i: Batch(inputs) for i, inputs in enumerate(batches)}) as tasks:
        yield from _block(tasks, 0, {})


class _SingleBlock(InMemory):
    """A module as a model of one block."""

    def __init__(self, block: nn.Module) -> None:
        self.model, self.prefix, self.blocks = block, "", [block]

    def load(self, block: int | None) -> None:
        """It is in memory."""

    def drop(self, block: int | None) -> None:
        """It stays there."""

    def name(self, layer: str) -> str:
        return layer.removeprefix(".0.")


@checked
def gptq(
    module: nn.Module,
    batches: Iterable[torch.Tensor | Sequence[Any] | Mapping[str, Any]],
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    act_order: str = "fixed",
    damping: float = 0.01,
    sweeps: int = 0,
    type: str | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Quantized]:
    """Quantize every Linear, Conv1D and Conv2d of a module in place, in the order of their calls.

    module      any torch module; the weights of its layers become the dequantized ones
    batches     the arguments of each call to calibrate with: a tensor, a sequence of positional arguments or a mapping
                of named ones
    bits        bits of a code, 2 to 8; 0: ternary
    group_size  columns that share a scale; -1: all columns of a row
    symmetric   whether the zero point is in the middle of the codes
    act_order   order in which columns are rounded: "fixed" (whole groups by falling diagonal of the Hessian), "none",
                "static" or "free" (desc_act)
    damping     added to the Hessian's diagonal, as a fraction of its mean
    sweeps      number of sweeps of refinement after GPTQ
    type        a GGUF type such as "Q4_K", whose blocks replace the groups
    wanted      called with the name of each layer; returns whether to quantize it

    Each layer is calibrated on inputs that come from the quantized layers before it. The method is GPTQ (Frantar et al.
    2022, arXiv:2210.17323).

    Returns a `bridge.quantize.method.Quantized` for each layer, by name. Raises BridgeError without batches, for an
    unknown type or order, and where weights or inputs hold NaN.
    """
    inputs = [_block_inputs(batch) for batch in batches]
    if not inputs:
        raise BridgeError("no calibration batches; give at least one")
    grid = superblocks(type) if type else groups(bits, group_size, symmetric)
    method = Method(grid, act_order, damping, sweeps=sweeps)
    training = module.training
    module.eval()
    try:
        return dict(quantize_block(module, inputs, method.layer, wanted=wanted))
    finally:
        module.train(training)


def _block_inputs(batch: Any) -> BlockInputs:
    if isinstance(batch, Mapping):
        return BlockInputs(None, kwargs=dict(batch), named=True)
    return BlockInputs(batch[0], tuple(batch[1:])) if isinstance(batch, tuple | list) else BlockInputs(batch)


def _block(tasks: Tasks, block: int, done: dict[str, Any]) -> Generator[tuple[str, Any], None, Ends]:
    """Quantize a block's layers, and add them to `done`; returns where the passes through it end."""
    layers = tasks.layers(block)
    done |= {name: finished for name in layers if (finished := tasks.walk.layers.finished(name)) is not None}
    if len(done) == len(layers):
        return {}
    stages, ends = tasks.result(tasks.start(Worker.stages, block, dict(done), tasks.parts[0]))
    for stage in stages:
        yield from _stage(tasks, block, stage, layers, ends, done)
    return ends


def _stage(
    tasks: Tasks, block: int, full_stage: Stage, layers: Mapping[str, nn.Module], ends: Ends, done: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Quantize a stage's layers, and add them to the finished ones of the block."""
    everyone: Any = None
    for stage in full_stage.parts(layers, tasks.walk.cross, tasks.walk.hessians):
        keys = {name: key for key, group in stage.groups.items() for name in group if name not in done}
        if not keys:
            continue
        before = dict(done)
        hessians = tasks.sum(tasks.each(Worker.gathered, block, before, stage, ends))
        if stage.experts and tasks.result(tasks.submit(any_has_too_few_tokens, hessians)):
            if everyone is None and len(stage.groups) == len(full_stage.groups):
                everyone = tasks.submit(merged_experts, hessians, tasks.alone)
            elif everyone is None:
                everyone = tasks.sum(tasks.each(Worker.of_all_experts, block, before, full_stage, ends))
            hessians = tasks.submit(completed, hessians, everyone, tasks.alone)
        if not tasks.alone:
            hessians = {key: tasks.submit(getitem, hessians, key) for key in set(keys.values())}
        names = iter(keys)
        for result in tasks.results(_layers(tasks, block, done if tasks.alone else before, keys, hessians)):
            name = next(names)
            done[name] = None if tasks.alone else result
            yield name, result
            del result


def _layers(
    tasks: Tasks, block: int, done: Mapping[str, Any], keys: Mapping[str, str], hessians: dict[str, Any]
) -> Iterator[Any]:
    """Start a task for each layer. A Hessian is freed with the last layer that has it; `keys`: by layer, which one."""
    last = {key: name for name, key in keys.items()}
    for name, key in keys.items():
        hessian = hessians.pop(key) if name == last[key] else hessians[key]
        yield tasks.start(Worker.quantized, block, done, name, hessian, name == last[key])


def _embeddings(tasks: Tasks) -> Iterator[tuple[str, Any]]:
    """Quantize the embeddings, if half of their H is known."""
    model = tasks.model
    assert isinstance(model, FloatModel)
    name = model.embedding_and_head()[0]
    if tasks.walk.wanted(name) and tasks.walk.layers.outputs(name) is not None:
        yield from _by_rows(tasks, Worker.embedding_rows, name, model.head()[1])


def _head(tasks: Tasks) -> Iterator[tuple[str, Any]]:
    """Quantize the output head, unless it is tied to the embeddings."""
    head = tasks.model.untied_head()
    if head is None or not tasks.walk.wanted(head[0]) or tasks.walk.layers.finished(head[0]) is not None:
        return

    def hessians() -> Any:
        return tasks.sum(tasks.each(Worker.head_gathered))

    yield from _by_rows(tasks, Worker.head_rows, *head, hessians)


def _by_rows(
    tasks: Tasks, task: Callable[..., Any], name: str, shape: tuple[int, int], *needed: Callable[[], Any]
) -> Iterator[tuple[str, Any]]:
    """Quantize a matrix some rows at a time; what the tasks need is made only if there are rows left."""
    count, columns = shape
    spans = list(tasks.walk.layers.missing(name, count, rows_at_once(columns)))
    more = [make() for make in needed] if spans else []
    started = (tasks.start(task, name, (rows.start, rows.stop, count), *more, rows is spans[-1]) for rows in spans)
    for result in tasks.results(started):
        yield name, result
        del result

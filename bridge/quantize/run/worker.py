"""What a process keeps of a calibration from block to block, and the tasks that it runs.

Alone, a process keeps the inputs of the present block in memory or in files of its own. On a cluster, what tasks read
and write is in files that all machines see: the checkpoint, finished layers, and the inputs of the present block
(`stored_inputs`). So any worker can run any task again, and one that is lost takes its unfinished ones with it. A
worker keeps the block that it has loaded, and the passes of its sequences (`replay`), which other workers would start
anew.

What a task gets, others get too, and Dask may be sending it meanwhile: no task changes it, unless the process is alone.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from bridge.quantize.layer_store import StoredLayer
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.block_inputs import embedded, first_inputs, head_hessian, is_layer, matrix, set_embeddings
from bridge.quantize.model.embeddings import embeddings_hessian
from bridge.quantize.model.experts import complete_from_all_experts, has_too_few_tokens, merged
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.replay import OutputOfModule
from bridge.quantize.model.stages import Stage
from bridge.quantize.model.streamed_model import StreamedModel, loaded
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.run.block_work import Batch, BlockWork, Ends, float_twin
from bridge.quantize.run.walk import Walk
from bridge.quantize.solve.hessian import Hessian

# the finished layers of a block, by name; of those that this process has put in already, only the name is looked at
Done = Mapping[str, StoredLayer | torch.Tensor | None]
P = ParamSpec("P")
R = TypeVar("R")


def task(method: "Callable[Concatenate[Worker, P], R]") -> "Callable[Concatenate[Worker | Walk, P], R]":
    """A method of a worker that may be called with a walk instead: the process's worker runs it."""

    @wraps(method)
    def run(worker: "Worker | Walk", *args: P.args, **options: P.kwargs) -> R:
        if isinstance(worker, Worker):
            return method(worker, *args, **options)
        with process_worker(worker) as present:
            return method(present, *args, **options)

    return run


class Worker:
    """A model and some batches of a walk's sequences, by their numbers.

    model    in this process, which does all the work; None: one of several workers, which opens the checkpoint
    batches  the inputs of the first block, where they are at hand
    """

    def __init__(self, walk: Walk, model: StreamedModel | None = None, batches: Mapping[int, Batch] | None = None):
        self.walk, self.alone = walk, model is not None
        if model is None:
            assert walk.open is not None
            model = FloatModel(walk.open(), walk.arithmetic, walk.device)
        self.model: Any = model
        self.sequences, self.activations = walk.batches(), ActivationStore(walk.offload, walk.memory, walk.dtype)
        self._before = [0, *accumulate(batch.numel() for batch in self.sequences)]  # tokens of the text
        self._batches = dict(batches or {})
        self._block: int | None = None
        self._work: BlockWork | None = None

    def leave(self) -> None:
        """Free the block."""
        if self._work is not None:
            self._work.clear()
        self._work = None
        if self._block is not None:
            self.model.drop(self._block)
        self._block = None

    def close(self) -> None:
        self.leave()
        self.activations.__exit__()
        if not self.alone:
            self.model.ckpt.close()

    def enter(self, block: int, done: Done, numbers: Sequence[int] = ()) -> tuple[BlockWork, dict[int, Batch]]:
        """Load a block with its finished layers, and the inputs of the batches with these numbers."""
        batches = self._inputs(block, numbers)
        if self._work is None or self._block != block or not self._work.replaced <= done.keys():
            self.leave()
            self.model.load(block)
            self._block, module = block, self.model.blocks[block]
            layers = layers_of_block(self.walk, self.model, block)
            if self.walk.prepare is not None:
                prefix = f"{self.model.prefix}.{block}."
                inputs = [batch.inputs for batch in batches.values()]
                self.walk.prepare(module, layers, inputs, lambda name: self.model.name(prefix + name))
            twin = float_twin(module) if self.walk.cross or self.walk.feed == "float" else None
            self._work = BlockWork(self.walk, module, layers, twin)
        for name in sorted(done.keys() - self._work.replaced):
            layer = done[name]
            values = torch.from_numpy(layer.values()) if isinstance(layer, StoredLayer) else layer
            assert values is not None
            self._work.replace(name, values)
        return self._work, batches

    def _inputs(self, block: int, numbers: Sequence[int]) -> dict[int, Batch]:
        """The batches, at the inputs of a block."""
        missing = [n for n in numbers if n not in self._batches or (not block and self._batches[n].block)]
        if missing:
            self._begin(missing)
        for number in numbers:
            batch = self._batches[number]
            for inputs, floats in batch.both():
                if batch.block != block:
                    stored = self.walk.stored_inputs
                    assert stored is not None
                    inputs.advance(stored.read(block, number, floats).to(inputs.value()))
                if inputs.calls and block < len(self.model.blocks):
                    inputs.select_block(block)
            batch.block = block
        return {number: self._batches[number] for number in numbers}

    def _begin(self, numbers: Sequence[int]) -> None:
        """Find what the blocks are called with for these batches."""
        self.leave()
        model, blocks = self.model.model, self.model.blocks
        with loaded(self.model, None, 0):
            tokens = [self.sequences[number] for number in numbers]
            inputs_of_batches = first_inputs(model, blocks, tokens, self.activations)
            for number, inputs in zip(numbers, inputs_of_batches, strict=True):
                if self.walk.held:
                    inputs.held = self._before[number] >= self.walk.tokens[: -self.walk.held].numel()
                self._batches[number] = Batch(inputs, inputs.copy() if self.walk.float_inputs else None)
            name = self.model.embedding_and_head()[0] if isinstance(self.model, FloatModel) else ""
            if self.walk.feed == "quantized" and set_embeddings(model, self.walk.layers.values_by_rows(name)):
                for inputs, part in zip(inputs_of_batches, tokens, strict=True):
                    inputs.advance(embedded(model, blocks, part))

    @task
    def stages(self, block: int, done: Done, numbers: Sequence[int]) -> tuple[list[Stage], dict[str, OutputOfModule]]:
        """The stages of a block, and where the passes through it end; by its first batches."""
        work, batches = self.enter(block, done, numbers)
        return work.stages(list(batches.values()))

    @task
    def gathered(self, block: int, done: Done, stage: Stage, ends: Ends, numbers: Sequence[int]) -> dict[str, Hessian]:
        """The Hessians of a stage's groups over a part of the sequences."""
        work, batches = self.enter(block, done, numbers)
        return work.gather(stage, batches, ends, self._before[numbers[0]])

    @task
    def of_all_experts(
        self, block: int, done: Done, stage: Stage, ends: Ends, numbers: Sequence[int]
    ) -> dict[str, Hessian]:
        """One Hessian of all experts of a stage."""
        work, batches = self.enter(block, done, numbers)
        return {"": work.gather_together(stage, batches, ends)}

    @task
    def quantized(self, block: int, done: Done, name: str, hessian: Hessian, last: bool) -> Any:
        """Quantize a layer; returns what the quantizer says of it. `last`: of those that share the Hessian."""
        if (result := self._stored(name, None)) is not None:
            return result
        work, _ = self.enter(block, done)
        outputs = self.walk.layers.outputs(name)
        values, result = self._quantize(name, matrix(work.layers[name]), hessian, last, None, outputs)
        if self.alone:
            work.replace(name, values)
        return result

    @task
    def advanced(self, block: int, done: Done, ends: Ends, numbers: Sequence[int]) -> None:
        """Make the block's outputs the next one's inputs, and store them."""
        work, batches = self.enter(block, done, numbers)
        stored = self.walk.stored_inputs
        for number, batch in batches.items():
            work.advance(number, batch, ends)
            for inputs, floats in batch.both():
                if stored is not None:
                    stored.write(block + 1, number, floats, inputs.value().to(self.walk.dtype))

    @task
    def head_gathered(self, numbers: Sequence[int]) -> dict[str, Hessian]:
        """The head's Hessian over a part of the sequences."""
        self.leave()
        model, blocks = self.model.model, self.model.blocks
        batches = self._inputs(len(blocks), numbers).values()
        with loaded(self.model, None):
            tokens = [self.sequences[number] for number in numbers]
            outputs, items = (batch.inputs.value() for batch in batches), next(iter(batches)).inputs.items
            floats = ((batch.floats or batch.inputs).value() for batch in batches) if self.walk.cross else None
            return {"": head_hessian(model, blocks, tokens, items, outputs, floats, self._before[numbers[0]])}

    @task
    def head_rows(self, name: str, rows: tuple[int, int, int], hessians: dict[str, Hessian], last: bool) -> Any:
        """Quantize rows (from, to, of all) of the head; `last`: no others come later."""
        if (result := self._stored(name, rows)) is not None:
            return result
        span = slice(*rows[:2])
        values, result = self._quantize(name, self.model.head_rows(span), hessians[""], last, rows)
        self.model.set_head_rows(span, values)
        return result

    @task
    def embedding_rows(self, name: str, rows: tuple[int, int, int], last: bool) -> Any:
        """Quantize rows (from, to, of all) of the embeddings."""
        if (stored := self._stored(name, rows)) is not None:
            return stored
        half = self.walk.layers.outputs(name)
        assert half is not None
        hessian = embeddings_hessian(name, half.blocks[0], self.walk.tokens.numel())
        return self._quantize(name, self.model.embedding_rows(slice(*rows[:2])), hessian, last, rows)[1]

    def _stored(self, name: str, rows: tuple[int, int, int] | None) -> StoredLayer | None:
        """A layer that was stored by a worker before it was lost."""
        return None if self.alone else self.walk.store.stored(name, _part(rows))

    def _quantize(
        self, name: str, weight: torch.Tensor, hessian: Hessian, last: bool, rows: Any, outputs: Any = None
    ) -> tuple[torch.Tensor, Any]:
        hessian, last = (hessian, last) if self.alone else (copy.deepcopy(hessian), True)
        return self.walk.quantizer(LayerInput(name, weight, hessian, outputs, last, _part(rows)))


def layers_of_block(walk: Walk, model: StreamedModel, block: int) -> dict[str, nn.Module]:
    """The layers of a block that are quantized, by name; of a model in memory, while the block is loaded."""
    named = model.blocks[block].named_modules()
    layers = {model.name(f"{model.prefix}.{block}.{name}"): module for name, module in named if is_layer(module)}
    return {name: module for name, module in layers.items() if walk.wanted(name)}


def _part(rows: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    """(from, to, of all) of a layer that has some rows of a matrix; None: it has all."""
    return None if rows is None or rows[:2] == (0, rows[2]) else rows


def added(one: dict[str, Hessian], other: dict[str, Hessian]) -> dict[str, Hessian]:
    """The sum of the Hessians of two parts."""
    both = copy.deepcopy(one)
    for key, hessian in both.items():
        hessian.include(other[key])
    return both


def merged_experts(hessians: dict[str, Hessian], alone: bool) -> dict[str, Hessian]:
    """One Hessian of all experts, from those of each."""
    return {"": merged([*(hessians if alone else copy.deepcopy(hessians)).values()])}


def completed(hessians: dict[str, Hessian], everyone: dict[str, Hessian], alone: bool) -> dict[str, Hessian]:
    """The experts' Hessians, completed from that of all."""
    if not alone:
        hessians, everyone = copy.deepcopy((hessians, everyone))
    complete_from_all_experts(list(hessians.values()), everyone[""])
    return hessians


def any_has_too_few_tokens(hessians: dict[str, Hessian]) -> bool:
    """Whether an expert saw too few tokens."""
    return any(map(has_too_few_tokens, hessians.values()))


_lock = threading.RLock()
_workers: list[Worker] = []


@contextmanager
def process_worker(walk: Walk) -> Iterator[Worker]:
    """The process's worker: one walk at a time, one task at a time."""
    with _lock, torch.no_grad():
        run = walk.store.job, walk.store.folder
        if not _workers or (_workers[0].walk.store.job, _workers[0].walk.store.folder) != run:
            close_workers()
            _workers.append(Worker(walk))
        yield _workers[0]


def close_workers() -> None:
    """Free what this process's worker keeps."""
    with _lock:
        while _workers:
            _workers.pop().close()

"""The tasks of calibration that is spread over machines (`spread`), and what a process keeps between them.

What tasks read and write is in files that all machines see: the checkpoint, finished layers, and the inputs of the
present block (`kept_inputs`). So any worker can run any task again, and one that is lost takes its unfinished ones with
it. A worker keeps the block that it has loaded, and the passes of its sequences (`replay`), which other workers would
start anew.

What a task gets, others get too, and Dask may be sending it meanwhile: no task changes it.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from bridge.checkpoint import Checkpoint
from bridge.quantize.activations import Kept, Shelf
from bridge.quantize.block_inputs import (
    BlockInputs,
    embedded,
    first_inputs,
    first_of,
    head_hessian,
    is_layer,
    matrix,
    set_embeddings,
)  # fmt: skip
from bridge.quantize.embeddings import embeddings_hessian
from bridge.quantize.experts import is_short, lend, merged
from bridge.quantize.float_model import FloatModel, fast_arithmetic
from bridge.quantize.float_twin import float_twin, replace_layer
from bridge.quantize.forward_passes import output_hessians
from bridge.quantize.hessian import Hessian
from bridge.quantize.kept_inputs import KeptInputs
from bridge.quantize.layer_store import LayerStore, StoredLayer
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.replay import End, Replay
from bridge.quantize.stage_hessians import gather, gather_together
from bridge.quantize.stages import Stage, find_stages
from bridge.quantize.two_sided import summed
from bridge.quantize.walk import in_batches
from bridge.system.folder_locks import temporary_beside

Done = Mapping[str, StoredLayer]


@dataclass(frozen=True)
class SpreadJob:
    """What each task gets; workers unpickle it.

    open      opens the checkpoint
    quantize  quantizes a layer and stores it
    store     of the finished layers
    tokens    int64 [sequences, length]
    batch     sequences in a forward pass; held, cross, feed   as of `quantize_model`
    names     the layers to quantize
    two_sided  gather A of the layers' outputs, and quantize the embeddings
    dtype     of all arithmetic; kept_dtype: of the inputs of the present block in files, None: that of the arithmetic
    """

    open: Callable[[], Checkpoint]
    quantize: Callable[[LayerInput], StoredLayer]
    store: LayerStore
    tokens: torch.Tensor
    batch: int
    held: int
    names: frozenset[str]
    feed: str = "quantized"
    cross: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kept_dtype: torch.dtype | None = None
    offload: Any = None
    two_sided: bool = False

    def batches(self) -> list[torch.Tensor]:
        """The sequences that pass together."""
        return in_batches(self.tokens, self.batch, self.held)

    @property
    def apart(self) -> bool:
        """Whether the float model's inputs are others than the blocks'."""
        return self.cross and self.feed == "quantized"

    def kept(self) -> KeptInputs:
        """The inputs of the present block."""
        return KeptInputs(self.store.folder, self.store.job)


class _Worker:
    """What a process keeps between the tasks of a job."""

    def __init__(self, job: SpreadJob) -> None:
        self.job, self.model = job, FloatModel(job.open(), job.dtype, job.device)
        self.batches, self.shelf = job.batches(), Shelf(job.offload)
        self.before = [0, *accumulate(part.numel() for part in self.batches)]  # tokens of the text
        self._first: dict[int, BlockInputs] = {}
        self._embedded: dict[int, Kept] = {}  # with quantized embeddings, where there are any
        self._block: int | None = None
        self._applied: set[str] = set()
        self._passes: dict[int, tuple[Replay, Replay | None]] = {}
        self.layers: dict[str, nn.Module] = {}
        self.original: nn.Module | None = None
        self.originals: dict[str, nn.Module] = {}

    def leave(self) -> None:
        """Free the block."""
        for replay in (r for both in self._passes.values() for r in both if r is not None):
            replay.clear()
        self._passes, self.layers, self.original, self.originals = {}, {}, None, {}
        if self._block is not None:
            self.model.drop(self._block)
        self._block = None

    def close(self) -> None:
        """Free everything."""
        self.leave()
        self.shelf.__exit__()
        self.model.ckpt.close()

    def enter(self, block: int, done: Done, numbers: Sequence[int]) -> None:
        """Load a block with its finished layers, for batches with these numbers."""
        self.call(numbers)
        if self._block != block or not self._applied <= done.keys():
            self.leave()
            self.model.load(block)
            self._block, self._applied = block, set()
            own = self.model.blocks[block]
            named = {f"{self.model.prefix}.{block}.{n}": m for n, m in own.named_modules() if is_layer(m)}
            self.layers = {name: m for n, m in named.items() if (name := self.model.name(n)) in self.job.names}
            if self.job.cross or self.job.feed == "float":
                self.original = float_twin(own)
                of = dict(zip(own.modules(), self.original.modules(), strict=True))
                self.originals = {name: of[m] for name, m in self.layers.items()}
        for name in sorted(done.keys() - self._applied):
            replace_layer(self.layers[name], torch.from_numpy(done[name].values()), self.originals.get(name))
            self._applied.add(name)

    def call(self, numbers: Sequence[int]) -> None:
        """Find what the blocks are called with for these batches."""
        missing = [number for number in numbers if number not in self._first]
        if not missing:
            return
        self.leave()
        self.model.load(None)
        self.model.load(0)
        try:
            tokens = [self.batches[number] for number in missing]
            found = first_inputs(self.model.model, self.model.blocks, tokens, self.shelf)
            values = self.job.store.values_by_rows(self.model.embedding_and_head()[0])
            if self.job.feed == "quantized" and set_embeddings(self.model.model, values):
                for number, part, own in zip(missing, tokens, found, strict=True):
                    self._embedded[number] = own.keep(embedded(self.model.model, self.model.blocks, part))
        finally:
            self.model.drop(0)
            self.model.drop(None)
        for number, own in zip(missing, found, strict=True):
            if self.job.held:
                own.held = self.before[number] >= self.job.tokens[: -self.job.held].numel()
            self._first[number] = own

    def inputs(self, block: int, number: int, floats: bool = False) -> BlockInputs:
        """A batch's inputs of a block."""
        first = self._first[number]
        if block:
            x = self.job.kept().read(block, number, floats).to(first.value())
        else:
            x = first.value() if floats or number not in self._embedded else self._embedded[number].value()
        own = replace(first, x=first.keep(x))
        if block < len(self.model.blocks):
            own.select_block(block)
        return own

    def passes(self, block: int, numbers: Sequence[int], ends: Mapping[str, End]) -> list[tuple[Replay, Replay | None]]:
        """Each batch's passes through the block, and through the float block."""
        for number in numbers:
            if number not in self._passes:
                own, twin = self.inputs(block, number), None
                if self.job.cross and self.original is not None:
                    theirs = self.inputs(block, number, True) if self.job.apart else own
                    twin = Replay(self.original, theirs, ends)
                self._passes[number] = Replay(self.model.blocks[block], own, ends), twin
        return [self._passes[number] for number in numbers]


_lock = threading.RLock()
_present: list[_Worker] = []


@contextmanager
def _at_work(job: SpreadJob) -> Iterator[_Worker]:
    """The process's worker: one job at a time, one task at a time."""
    with _lock, torch.no_grad():
        if not _present or (_present[0].job.store.job, _present[0].job.store.folder) != (
            job.store.job,
            job.store.folder,
        ):
            leave_work()
            _present.append(_Worker(job))
        yield _present[0]


def leave_work() -> None:
    """Free what this process's worker keeps."""
    with _lock:
        while _present:
            _present.pop().close()


def same(value: Any) -> Any:
    """What is sent once, for other tasks."""
    return value


def stages_of(job: SpreadJob, block: int, done: Done, numbers: Sequence[int]) -> tuple[list[Stage], dict[str, End]]:
    """The stages of a block, and where the passes through it end; by its first batches."""
    with _at_work(job) as worker:
        worker.enter(block, done, numbers)
        batches = (worker.inputs(block, number) for number in numbers)
        return find_stages(worker.model.blocks[block], worker.layers, batches, job.store.weights)


def gathered(
    job: SpreadJob, block: int, done: Done, stages: tuple[Stage, Mapping[str, End]], numbers: Sequence[int]
) -> dict[str, Hessian]:
    """The Hessians of a stage's groups over a part of the sequences."""
    with _at_work(job) as worker:
        worker.enter(block, done, numbers)
        passes = worker.passes(block, numbers, stages[1])
        floats = [twin for _, twin in passes if twin is not None]
        own = [replay for replay, _ in passes]
        first = worker.before[numbers[0]]
        return gather(stages[0], worker.layers, own, worker.originals, floats, first, job.store.weights)


def of_all_experts(
    job: SpreadJob, block: int, done: Done, stages: tuple[Stage, Mapping[str, End]], numbers: Sequence[int]
) -> dict[str, Hessian]:
    """One Hessian of all experts of a stage."""
    with _at_work(job) as worker:
        worker.enter(block, done, numbers)
        own = [replay for replay, _ in worker.passes(block, numbers, stages[1])]
        return {"": gather_together(stages[0], worker.layers, own)}


def added(one: dict[str, Hessian], other: dict[str, Hessian]) -> dict[str, Hessian]:
    """The sum of the Hessians of two parts."""
    both = copy.deepcopy(one)
    for key, hessian in both.items():
        hessian.include(other[key])
    return both


def any_is_short(hessians: dict[str, Hessian]) -> bool:
    """Whether an expert saw too few tokens."""
    return any(map(is_short, hessians.values()))


def merged_experts(hessians: dict[str, Hessian]) -> dict[str, Hessian]:
    """One Hessian of all experts."""
    return {"": merged(copy.deepcopy(list(hessians.values())))}


def lent(hessians: dict[str, Hessian], everyone: dict[str, Hessian]) -> dict[str, Hessian]:
    """The experts' Hessians, completed from that of all."""
    found = copy.deepcopy(hessians)
    lend(list(found.values()), copy.deepcopy(everyone[""]))
    return found


def quantized_layer(job: SpreadJob, block: int, done: Done, name: str, hessian: Hessian) -> StoredLayer:
    """A layer, quantized and stored."""
    found = job.store.stored(name, None)  # where the task's first worker was lost when it had stored it
    if found is not None:
        return found
    with _at_work(job) as worker:
        worker.enter(block, done, [])
        return job.quantize(
            LayerInput(name, matrix(worker.layers[name]), copy.deepcopy(hessian), job.store.outputs(name))
        )


def advanced(job: SpreadJob, block: int, done: Done, ends: Mapping[str, End], numbers: Sequence[int]) -> None:
    """Write the inputs of the next block."""
    with _at_work(job) as worker:
        worker.enter(block, done, numbers)
        kept = job.kept()
        for number, (own, twin) in zip(numbers, worker.passes(block, numbers, ends), strict=True):
            floats = twin
            if job.feed == "float" and twin is None:
                assert worker.original is not None
                floats = Replay(worker.original, own.batch)
            for replay, of_floats in ((own, False), (floats, True)) if job.apart else ((floats or own, False),):
                assert replay is not None
                output = replay.run()
                kept.write(block + 1, number, of_floats, first_of(output).to(job.kept_dtype))
            own.clear()
            if twin is not None:
                twin.clear()


def head_gathered(job: SpreadJob, numbers: Sequence[int]) -> dict[str, Hessian]:
    """The head's Hessian over a part of the sequences."""
    with _at_work(job) as worker:
        worker.call(numbers)
        worker.leave()
        model, block = worker.model, len(worker.model.blocks)
        own = [worker.inputs(block, number) for number in numbers]
        twins = [worker.inputs(block, number, True) for number in numbers] if job.apart else own if job.cross else None
        model.load(None)
        try:
            tokens = [worker.batches[number] for number in numbers]
            floats = None if twins is None else (b.value() for b in twins)
            values, first = (b.value() for b in own), worker.before[numbers[0]]
            return {"": head_hessian(model.model, model.blocks, tokens, own[0].items, values, floats, first)}
        finally:
            model.drop(None)


def head_rows(job: SpreadJob, name: str, rows: tuple[int, int, int], hessians: dict[str, Hessian]) -> StoredLayer:
    """Rows (from, to, of all) of the head, quantized and stored."""
    part = None if rows[:2] == (0, rows[2]) else rows
    found = job.store.stored(name, part)
    if found is not None:
        return found
    with _at_work(job) as worker:
        weight = worker.model.head_rows(slice(*rows[:2]))
        return job.quantize(LayerInput(name, weight, copy.deepcopy(hessians[""]), None, rows=part))


def embedding_rows(job: SpreadJob, name: str, rows: tuple[int, int, int]) -> StoredLayer:
    """Rows (from, to, of all) of the embeddings, quantized and stored."""
    part = None if rows[:2] == (0, rows[2]) else rows
    found = job.store.stored(name, part)
    if found is not None:
        return found
    half = job.store.outputs(name)
    assert half is not None
    with _at_work(job) as worker:
        hessian = embeddings_hessian(name, half.blocks[0], job.tokens.numel())
        return job.quantize(LayerInput(name, worker.model.embedding_rows(slice(*rows[:2])), hessian, rows=part))


def part_outputs(
    job: SpreadJob, part: int, tokens: torch.Tensor, held: torch.Tensor | None, first: int, todo: frozenset[str]
) -> frozenset[str]:
    """Keep A and |g| of a part of the sequences, of each layer; returns those that have A."""
    found = set()
    with (
        _at_work(job) as worker,
        temporary_beside(job.store.folder.with_name(f"{job.store.folder.name}-{part}")) as folder,
    ):
        worker.leave()
        kept = Shelf(folder, None, job.kept_dtype)
        with torch.enable_grad(), kept:
            model = FloatModel(worker.model.ckpt, fast_arithmetic(job.device), job.device)
            gathered = output_hessians(
                model, tokens, kept, first, held=held, products=job.two_sided,
                norms=lambda name, norms: job.store.save_norms(name, norms, part),
            )  # fmt: skip
            for name, outputs in gathered:
                if name in todo and job.two_sided:
                    job.store.save_outputs(name, outputs, part)
                    found.add(name)
    return frozenset(found)


def sum_outputs(job: SpreadJob, name: str, shares: Sequence[float], found: Sequence[frozenset[str]]) -> None:
    """Keep A of a layer, of all parts: the sum of `shares` of those that have it."""
    if job.store.has_outputs([name]):
        return
    own = [(job.store.outputs(name, part), share) for part, share in enumerate(shares) if name in found[part]]
    job.store.save_outputs(name, summed([(outputs, share) for outputs, share in own if outputs is not None]))


def join_norms(job: SpreadJob, name: str, parts: int) -> None:
    """Keep |g| of all tokens of a layer, where each part of the sequences has it."""
    found = [job.store.norms(name, part) for part in range(parts)]
    if all(own is not None for own in found):
        job.store.save_norms(name, torch.cat([own for own in found if own is not None]))

"""Where the tasks of a calibration run: in this process alone, or as tasks of a cluster, through Dask's client.

The sequences are cut into parts. For each stage of a block, a task for each part gathers the Hessians of its sequences,
tasks add these up two by two in a fixed order, and each layer is a task again; then each part passes through the block.
A of the layers' outputs (`two_sided`), and the embeddings' matrix (`embeddings`), is summed over parts as well, from
one pass of each part through the model.

Floating-point sums depend on how the sequences are cut, so the codes depend on the number of parts, but not on that of
workers. One part gives the codes of one process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bridge.quantize.model.streamed_model import StreamedModel
from bridge.quantize.run.block_work import Batch
from bridge.quantize.run.walk import Walk
from bridge.quantize.run.worker import Worker, added, close_workers, layers_of_block
from bridge.system.cpu.row_threads import slices


class LocalCluster:
    """What is used of `distributed.Client`, for this process: a task runs when it is submitted.

    What `submit` returns may be an argument of other tasks, for its result.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **_options: Any) -> Any:
        return function(*args)

    def gather(self, futures: list[Any]) -> list[Any]:
        return futures


@dataclass(frozen=True)
class Spread:
    """Where tasks run.

    cluster  a `distributed.Client`, or what has the methods of `LocalCluster`
    parts    of the sequences
    options  of `submit` for a task of a part, by its number: the worker that should have it
    """

    cluster: Any = field(default_factory=LocalCluster)
    parts: int = 1
    options: Callable[[int], dict[str, Any]] = lambda part: {}


class Tasks:
    """A walk's tasks, done in this process without `spread`; as a context manager it frees what it keeps for them."""

    def __init__(
        self, walk: Walk, model: StreamedModel, spread: Spread | None = None, batches: Mapping[int, Batch] | None = None
    ) -> None:
        self.walk, self.model, self.alone = walk, model, spread is None
        self.spread = spread or Spread()
        self.parts = [range(cut.start, cut.stop) for cut in slices(len(batches or walk.batches()), self.spread.parts)]
        self._worker = Worker(walk, model, batches) if self.alone else self.submit(identity, walk)

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Start a task that needs no worker's model."""
        return self.spread.cluster.submit(function, *args, pure=False, **options)

    def start(self, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.submit(task, self._worker, *args, **options)

    def each(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Start a worker's task for each part of the sequences, whose numbers come last."""
        return [self.start(task, *args, part, **self.spread.options(i)) for i, part in enumerate(self.parts)]

    def layers(self, block: int) -> dict[str, nn.Module]:
        """The layers of a block that are quantized, by name."""
        if self.alone:
            return dict(self._worker.enter(block, {}, self.parts[0])[0].layers)
        return layers_of_block(self.walk, self.model, block)

    def sum(self, hessians: list[Any]) -> Any:
        """The sum of the parts' Hessians, two by two."""
        while len(hessians) > 1:
            pairs = [hessians[start : start + 2] for start in range(0, len(hessians), 2)]
            hessians = [self.submit(added, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return hessians[0]

    def result(self, started: Any) -> Any:
        return self.spread.cluster.gather([started])[0]

    def results(self, started: Iterable[Any]) -> Iterator[Any]:
        """What tasks return; those of this process alone start one after the other, as they are asked for."""
        return iter(started) if self.alone else iter(self.spread.cluster.gather(list(started)))

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alone:
            self._worker.close()
        else:
            close_workers()


def identity(value: Any) -> Any:
    """The value, which is sent to the cluster once, for other tasks."""
    return value

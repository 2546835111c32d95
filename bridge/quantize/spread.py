"""Calibration spread over machines: tasks (`spread_tasks`) that a cluster runs, through Dask's client.

The sequences are cut into parts. For each stage of a block, a task for each part gathers the Hessians of its sequences,
tasks add these up two by two in a fixed order, and each layer is a task again; then each part passes through the block.
A of the layers' outputs (`two_sided`), and the embeddings' matrix (`embeddings`), is summed over parts as well, from
one pass of each part through the model.

Sums of other parts are rounded otherwise, so the codes depend on the number of parts, not on that of workers. One part
gives the codes of `quantize_model`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Protocol

from bridge.quantize import spread_tasks as tasks
from bridge.quantize.block_inputs import is_layer
from bridge.quantize.experts import expert_pattern
from bridge.quantize.float_model import FloatModel
from bridge.quantize.forward_passes import sequences_at_once
from bridge.quantize.layer_store import StoredLayer
from bridge.quantize.mixture import Calibrating
from bridge.quantize.replay import End
from bridge.quantize.spread_tasks import SpreadJob
from bridge.quantize.stages import Stage
from bridge.system.row_threads import slices


class Cluster(Protocol):
    """`distributed.Client`, or what has its two methods."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Start a task; what this returns may be an argument of others, for its result."""

    def gather(self, futures: list[Any]) -> list[Any]:
        """The results."""


class Here:
    """A cluster of this process, which runs a task when it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **_options: Any) -> Any:
        """The task's result."""
        return function(*args)

    def gather(self, futures: list[Any]) -> list[Any]:
        """The same."""
        return futures


@dataclass(frozen=True)
class Spread:
    """Where tasks run.

    parts    of the sequences
    options  of `submit` for a task of a part, by its number: the worker that should have it
    """

    cluster: Cluster = field(default_factory=Here)
    parts: int = 1
    options: Callable[[int], dict[str, Any]] = lambda part: {}


class _Walk:
    """A job's tasks in order."""

    def __init__(
        self, job: SpreadJob, spread: Spread, model: FloatModel, finished: Callable[[StoredLayer], None]
    ) -> None:
        self.job, self.model, self.finished, self.store = job, model, finished, job.store
        self.spread, self.cluster = spread, spread.cluster
        self.sent = self._submit(tasks.same, job)
        self.parts = [range(part.start, part.stop) for part in slices(len(job.batches()), spread.parts)]

    def _submit(self, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.cluster.submit(task, *args, pure=False, **options)

    def _each(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """A task for each part of the sequences."""
        return [
            self._submit(task, self.sent, *args, part, **self.spread.options(number))
            for number, part in enumerate(self.parts)
        ]

    def _sum(self, parts: list[Any]) -> Any:
        """Of Hessians, two by two."""
        while len(parts) > 1:
            pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
            parts = [self._submit(tasks.added, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return parts[0]

    def outputs(self) -> None:
        """Keep A of each layer that is not finished, and the tokens' weights."""
        todo = self.job.names - self.store.layers.keys()
        if self.store.has_outputs(todo):
            return
        tokens = self.job.tokens
        batch = sequences_at_once(self.model, tokens.shape[1])
        batches = slices(-(-len(tokens) // batch), self.spread.parts)
        cuts = [tokens[part.start * batch : part.stop * batch] for part in batches]
        held = Calibrating(tokens, held=self.job.held).held_tokens()
        found = self.cluster.gather(
            [
                self._submit(
                    tasks.part_outputs,
                    self.sent,
                    number,
                    cut,
                    None if held is None else held.split([part.numel() for part in cuts])[number],
                    batches[number].start,
                    todo,
                    **self.spread.options(number),
                )
                for number, cut in enumerate(cuts)
            ]
        )
        shares = [cut.numel() / tokens.numel() for cut in cuts]
        self.cluster.gather([self._submit(tasks.sum_outputs, self.sent, name, shares, found) for name in sorted(todo)])
        patterns = sorted({expert_pattern(name) for name in todo})
        self.cluster.gather([self._submit(tasks.join_norms, self.sent, name, len(cuts)) for name in patterns])
        for name in todo:
            for part in range(len(cuts)):
                self.store.drop_outputs(name, part)

    def blocks(self, until: int | None) -> None:
        """Quantize the blocks' layers."""
        kept = self.job.kept()
        start = kept.block(len(self.job.batches()), self.job.apart)
        for block in range(len(self.model.blocks))[start:until]:
            names = [name for name in self.model.linears(slice(block, block + 1)) if name in self.job.names]
            done = {name: self.store.layers[name] for name in names if name in self.store.layers}
            ends: dict[str, End] = {}
            if len(done) < len(names):
                stages, ends = self.cluster.gather(
                    [self._submit(tasks.stages_of, self.sent, block, done, self.parts[0])]
                )[0]
                for stage in stages:
                    self._stage(block, stage, ends, done)
            self.cluster.gather(self._each(tasks.advanced, block, dict(done), ends))
            kept.finish(block + 1)

    def _stage(self, block: int, whole: Stage, ends: Mapping[str, End], done: dict[str, StoredLayer]) -> None:
        """Quantize a stage's layers, and add them to the finished ones of the block."""
        own = self.model.blocks[block].named_modules(prefix=f"{self.model.prefix}.{block}")
        layers = {self.model.name(name): module for name, module in own if is_layer(module)}
        everyone: Any = None
        for stage in whole.parts(layers, self.job.cross):
            names = {n: key for key, group in stage.groups.items() for n in group if n not in done}
            if not names:
                continue
            before = dict(done)
            hessians = self._sum(self._each(tasks.gathered, block, before, (stage, ends)))
            if stage.experts and self.cluster.gather([self._submit(tasks.any_is_short, hessians)])[0]:
                if everyone is None and len(stage.groups) == len(whole.groups):
                    everyone = self._submit(tasks.merged_experts, hessians)
                elif everyone is None:
                    everyone = self._sum(self._each(tasks.of_all_experts, block, before, (whole, ends)))
                hessians = self._submit(tasks.lent, hessians, everyone)
            of = {key: self._submit(getitem, hessians, key) for key in set(names.values())}
            sent = [
                self._submit(tasks.quantized_layer, self.sent, block, before, name, of[key])
                for name, key in names.items()
            ]
            for layer in self.cluster.gather(sent):
                done[layer.name] = layer
                self.store.add(layer)
                self.finished(layer)

    def embeddings(self, spans: Callable[[str, int, int], Sequence[slice]]) -> None:
        """Quantize the embeddings, of which `outputs` has kept half of H."""
        name = self.model.embedding_and_head()[0]
        if name not in self.job.names:
            return
        count, columns = self.model.head()[1]
        cuts = [(rows.start, rows.stop, count) for rows in spans(name, count, columns)]
        sent = [self._submit(tasks.embedding_rows, self.sent, name, rows) for rows in cuts]
        for layer in self.cluster.gather(sent):
            self.store.add(layer)
            self.finished(layer)

    def head(self, spans: Callable[[str, int, int], Sequence[slice]]) -> None:
        """Quantize the output head, unless it is tied to the embeddings."""
        head = self.model.untied_head()
        if head is None or head[0] not in self.job.names:
            return
        name, (count, columns) = head
        todo = list(spans(name, count, columns))
        if not todo or name in self.store.layers:
            return
        hessians = self._sum(self._each(tasks.head_gathered))
        cuts = [(rows.start, rows.stop, count) for rows in todo]
        for layer in self.cluster.gather(
            [self._submit(tasks.head_rows, self.sent, name, rows, hessians) for rows in cuts]
        ):
            self.store.add(layer)
            self.finished(layer)


def quantize_spread(
    job: SpreadJob,
    spread: Spread,
    model: FloatModel,
    matrix_spans: Callable[[str, int, int], Sequence[slice]],
    *,
    until: int | None = None,
    finished: Callable[[StoredLayer], None] = lambda layer: None,
) -> None:
    """Quantize and store the layers of a job on a cluster; `finished` is called with each.

    model       the job's, of which nothing is loaded here
    matrix_spans   of the embeddings and the head, as `head_spans` of `quantize_model`; until: see there

    Raises BridgeError as `quantize_model` does.
    """
    walk = _Walk(job, spread, model, finished)
    try:
        walk.outputs()
        if job.two_sided:
            walk.embeddings(matrix_spans)
        walk.blocks(until)
        if until is None:
            walk.head(matrix_spans)
    finally:
        tasks.leave_work()

"""Layers of a checkpoint that the machines of a Dask cluster plan and write.

Every worker opens the source by itself and sees the folder that is written, whose files are there with their headers:
layers have places of their own, so a layer that is written twice, as when a worker is lost, is there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.labels.hosts import for_host
from bridge.checkpoint.write.layer_writer import Counts, LayerWriter
from bridge.conversion.checkpoints.checkpoint_source import CheckpointSource
from bridge.conversion.checkpoints.family_names import names_of_family
from bridge.conversion.checkpoints.layer_plan import Layer, LayerPlan
from bridge.conversion.checkpoints.write_layers import ExportedTensor, write_planned

_PART = 1 << 28  # weights of a task


@dataclass(frozen=True)
class Request:
    """What becomes of a checkpoint, as `repack` takes it.

    in_order  layers that are calibrated in the order of their columns, see `CheckpointSource.keep_order`
    """

    format: str
    host: str | None
    bits: int | None
    dtype: str | None
    clamp: bool
    in_order: frozenset[str] = frozenset()

    @property
    def written(self) -> WrittenFormat | None:
        """The format, as far as the program reads it that is to load the checkpoint; None: floats."""
        written = for_host(FORMATS.get(self.format), self.host)
        return replace(written, zeros="raised to 1") if written and self.clamp else written

    def source(self, ckpt: Checkpoint) -> CheckpointSource:
        """The checkpoint as what is written from."""
        source = CheckpointSource(ckpt, self.written, self.dtype, names_of_family(ckpt, self.written))
        if self.in_order:
            source.keep_order(self.in_order)
        return source


@dataclass(frozen=True)
class Cluster:
    """Where layers are planned and written.

    client   a `distributed.Client`
    path     of the source
    config   the folder with its config.json
    request  what becomes of it
    """

    client: Any
    path: Path
    config: Path
    request: Request

    def plans(self, layers: Iterable[Layer]) -> dict[str, LayerPlan | None]:
        """What becomes of each layer, by module."""
        tasks = [self._submit(_planned, part) for part in _parts(layers)]
        return {module: plan for plans in self.client.gather(tasks) for module, plan in plans.items()}

    def write(
        self, writer: LayerWriter, layers: Iterable[Layer], plans: Mapping[str, LayerPlan]
    ) -> Iterator[ExportedTensor]:
        """Write layers, and tell what became of them; `writer` counts them."""
        tasks = [
            self._submit(_written, writer.for_others(part), {module: plans[module] for module in part})
            for part in _parts(layers)
        ]
        for task in tasks:
            reports, counts = task.result()
            writer.count(counts)
            yield from reports

    def _submit(self, function: Any, *arguments: Any) -> Any:
        return self.client.submit(function, self.path, self.config, self.request, *arguments, pure=False)


def _parts(layers: Iterable[Layer]) -> Iterator[list[str]]:
    """Modules of consecutive layers, for one task each."""
    part: list[str] = []
    weights = 0
    for layer in layers:
        part.append(layer.module)
        weights += layer.shape[0] * layer.shape[1]
        if weights >= _PART:
            yield part
            part, weights = [], 0
    if part:
        yield part


@contextmanager
def _layers(path: Path, config: Path, request: Request, modules: Iterable[str]) -> Iterator[list[Layer]]:
    wanted = frozenset(modules)
    with open_checkpoint(path, None if config == path else config) as ckpt:
        yield [layer for layer in request.source(ckpt).layers() if layer.module in wanted]


def _planned(path: Path, config: Path, request: Request, modules: list[str]) -> dict[str, LayerPlan | None]:
    """A worker's task: the plans of some layers."""
    with _layers(path, config, request, modules) as layers:
        return {layer.module: layer.plan(request.bits) for layer in layers}


def _written(
    path: Path, config: Path, request: Request, writer: LayerWriter, plans: dict[str, LayerPlan]
) -> tuple[list[ExportedTensor], Counts]:
    """A worker's task: some layers written, what became of them, and what the writer counted."""
    with _layers(path, config, request, plans) as layers:
        reports = write_planned(writer, [(layer, plans[layer.module]) for layer in layers])
        return reports, writer.counts

"""Planned layers into a checkpoint, run of rows by run, and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.checkpoint.write.layer_writer import LayerWriter
from bridge.conversion.checkpoints.checkpoint_plan import CheckpointPlan
from bridge.conversion.checkpoints.layer_plan import (
    ALL_CODES,
    AS_FLOATS,
    CALIBRATED,
    EXACT,
    ROUNDED,
    Coded,
    Layer,
    LayerPlan,
    Rows,
    is_symmetric,
)
from bridge.conversion.checkpoints.to_checkpoint import group_rounding
from bridge.conversion.paths import layers_of
from bridge.errors import BridgeError, parameter, refused
from bridge.quantize.run.calibrate import LayerTarget, quantize_layers
from bridge.quantize.run.calibration_text import with_length
from bridge.quantize.settings import Calibration
from bridge.system.report import FolderReport
from bridge.system.text import align, percent

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore


@dataclass
class ExportedTensor:
    name: str
    type: str
    how: str  # EXACT, ALL_CODES (scales rounded), ROUNDED, CALIBRATED or AS_FLOATS
    bits: int = 0
    group_size: int = 0
    kind: str = "int"  # of the codes: int, NVFP4, MXFP4, FP8 or MXFP8
    rows: int = 1  # that share a scale; -1: all
    nmse: float = 0.0  # squared error over squared weights, of a quantized layer
    share: float | None = None  # the error as a share of the type's own noise, where that is known


@dataclass(repr=False)
class Exported(FolderReport):
    """The report of a written checkpoint folder.

    outputs          the folder
    seconds          wall time, without compiling
    compile_seconds  wall time that compiling kernels took
    notes            sentences about what the user should know
    home             the source's folder
    blocks           how each block was calibrated, one dict for each
    format           format of the checkpoint: "mlx"
    nbytes           bytes of its tensors
    tensors          the name, type, bits and error of each tensor
    """

    tensors: list[ExportedTensor]

    def table(self) -> list[str]:
        """A row for each type and what became of it."""
        rows: list[tuple[str, ...]] = [("tensors", "type", "becomes", "codes", "NMSE", "of its own noise")]
        groups: dict[tuple[str, str, str], list[ExportedTensor]] = {}
        for t in self.tensors:
            form = self.format if self.format == "floats" else "floats"
            if t.bits:
                form = Groups(t.bits, t.group_size, kind=t.kind, rows=t.rows).in_words()
            groups.setdefault((t.type, t.how, form), []).append(t)
        for (type, how, form), members in groups.items():
            worst = max(t.nmse for t in members)
            error = "" if how == AS_FLOATS else "exact" if worst == 0 else f"{worst:.1e}"
            shares = [t.share for t in members if t.share]
            rows.append((str(len(members)), type, form, how, error, percent(max(shares)) if shares else ""))
        return align(rows, (False, True, True, True, False, False))

    def summary(self) -> str:
        """The lines that the command prints."""
        return self.printed(self.table(), size=self.size_and_time())


def calibrated(
    ckpt: Checkpoint, path: Path, plan: CheckpointPlan, calibrate: Calibration, force: bool
) -> tuple[LayerStore, list[str]]:
    """The layers that would be rounded, quantized with a text, and notes; `plan` becomes theirs."""
    written = plan.written
    layers = {module: layer.groups for module, layer in plan.layers.items() if layer.how == ROUNDED}
    if not layers:
        why = f"{written.name} holds the codes of all its layers; leave out {parameter('calibrate')}"
        raise BridgeError(f"{ckpt.path}: {why}")
    if calibrate.act_order == "free" and not written.act_order:
        raise refused("act_order", "free", f"{written.name} has no column permutation; choose fixed, static or none")
    if calibrate.method == "awq":
        why = "changes norms too, which are kept; choose two-sided, gptaq, gptq or rtn"
        raise refused("method", "awq", why)
    calibrate.check_checkpoint()
    if calibrate.blocks is not None:
        raise refused("blocks", calibrate.blocks, "all blocks are calibrated in one run")
    symmetric = {module for module, groups in layers.items() if is_symmetric(groups.bits, written)}
    calibrate, notes = with_length(ckpt, calibrate)
    targets = {n: LayerTarget(*group_rounding(groups, n in symmetric, calibrate)) for n, groups in layers.items()}
    stored, more = quantize_layers(ckpt, calibrate, targets, layers_of(path), force)
    for module, layer in stored.layers.items():
        groups = plan.layers[module].groups
        if written.order_part and calibrate.act_order == "free":
            groups = groups._replace(act_order=not layer.tensor().sequential)
        plan.layers[module] = replace(plan.layers[module], how=CALIBRATED, groups=groups)
    return stored, [*notes, *more]


def write_layers(
    writer: LayerWriter, plan: CheckpointPlan, stored: LayerStore | None, workers: Workers | None = None, *,
    rows: Mapping[str, np.ndarray] | None = None,
) -> list[ExportedTensor]:  # fmt: skip
    """Write all layers of a plan, those that were `calibrated` from where they are stored, the others on `workers` if
    there are some.

    rows  the new orders of rows, by module, of layers that were calibrated in the old ones
    """
    layers = [(plan.sources[module], layer_plan) for module, layer_plan in plan.layers.items()]
    finished = stored.layers if stored is not None else {}
    reports = []
    for layer, layer_plan in layers:
        if layer.module in finished:
            codes = finished[layer.module].tensor()
            if rows and layer.module in rows:
                codes = codes.take_rows(rows[layer.module])
            writer.add(codes)
            errors = layer.squared_errors(layer_plan, codes, (slice(0, codes.shape[0]),))
            reports.append(_report(layer, layer_plan, *errors))
    rest = [(layer, layer_plan) for layer, layer_plan in layers if layer.module not in finished]
    if workers is None:
        return [*reports, *write_planned(writer, rest)]
    return [*reports, *workers.write(writer, [layer for layer, _ in rest], plan.layers)]


class Workers(Protocol):
    """Other machines that write layers."""

    def write(
        self, writer: LayerWriter, layers: Iterable[Layer], plans: Mapping[str, LayerPlan]
    ) -> Iterable[ExportedTensor]: ...


def write_planned(writer: LayerWriter, layers: Sequence[tuple[Layer, LayerPlan]]) -> list[ExportedTensor]:
    """Write layers as they are planned."""
    sums = {layer.module: (0.0, 0.0) for layer, _ in layers}
    for first, tensor, (error, signal) in _rows_of(layers):
        writer.add(tensor, first)
        sums[tensor.name] = sums[tensor.name][0] + error, sums[tensor.name][1] + signal
    return [_report(layer, plan, *sums[layer.module]) for layer, plan in layers]


_Written = tuple[int, Coded, tuple[float, float]]


def _rows_of(layers: Iterable[tuple[Layer, LayerPlan]]) -> Iterator[_Written]:
    """Rows of layers: how many came before, codes, and squared errors. While some are written, the next are made."""

    def codes(layer: Layer, plan: LayerPlan, rows: Rows, arrays: ReusedArrays) -> _Written:
        tensor = layer.codes(plan, rows, arrays)
        return rows[0].start * len(rows), tensor, layer.squared_errors(plan, tensor, rows)

    work = ((layer, plan, rows) for layer, plan in layers for rows in layer.runs(plan))
    with ThreadPoolExecutor(1) as thread:
        ahead: Future[_Written] | None = None
        for (layer, plan, rows), arrays in zip(work, cycle((ReusedArrays(), ReusedArrays()))):
            following = thread.submit(codes, layer, plan, rows, arrays)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _report(layer: Layer, plan: LayerPlan, error: float, signal: float) -> ExportedTensor:
    """What became of a layer. Blocks that are written as they are need not be compared."""
    groups, how = plan.groups, plan.how
    return ExportedTensor(
        f"{layer.module}.weight", layer.type, ALL_CODES if how == EXACT and error else how, groups.bits,
        groups.group_size, groups.kind, groups.rows, error / signal if signal else 0.0, layer.share(how, error),
    )  # fmt: skip

"""Quantizes the layers that a plan says are calibrated, each to its type; `executor` writes the finished blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoint import Checkpoint
from bridge.conversion.planning.importance import importance_of_tensors
from bridge.conversion.planning.matrix_scales import rounded_scale
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan import How, Plan
from bridge.errors import BridgeError, parameter
from bridge.models.outline import Part
from bridge.quantize.run.calibrate import LayerTarget, quantize_layers
from bridge.quantize.settings import Calibration

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore


def _targets(plan: Plan, settings: Calibration) -> dict[str, LayerTarget]:
    """The layers to calibrate, by module."""
    from bridge.quantize import superblocks

    return {
        str(part.layer): LayerTarget(
            t.type, settings.quantizer(superblocks(t.type, rounded_scale(plan.metadata, t))), part.columns
        )
        for t in plan.tensors
        for part, how in zip(t.parts, t.how, strict=True)
        if how == "calibrated"
    }


def quantize_planned(
    ckpt: Checkpoint, plan: Plan, reader: PartReader, settings: Calibration, folder: Path, force: bool, optional: bool
) -> tuple[Plan, LayerStore | None, list[str]]:
    """Quantize the layers of a plan that are calibrated.

    optional  no layers where every one keeps its codes, instead of BridgeError

    Returns the plan, in which layers that the text does not reach are quantized without it, the layers, and notes.
    Raises BridgeError as `quantize_layers` does.
    """
    targets = _targets(plan, settings)
    if not targets and optional:
        return plan, None, []
    if not targets:
        ways = f"convert it without {parameter('calibrate')}, or give a smaller {parameter('type')}"
        raise BridgeError(f"{ckpt.path}: every layer keeps its codes in these types; {ways}")
    layers, notes = quantize_layers(ckpt, settings, targets, folder, force)
    if settings.imatrix_out is not None and settings.blocks is None:
        _write_imatrix(plan, layers, settings)

    def reached(part: Part, how: How) -> How:
        if how != "calibrated" or part.layer in layers.layers:
            return how
        return "requantized" if reader.coded(part) else "rounded"

    tensors = [replace(t, how=tuple(map(reached, t.parts, t.how))) for t in plan.tensors]
    return replace(plan, tensors=tensors), layers, notes


def _write_imatrix(plan: Plan, stored: LayerStore, settings: Calibration) -> None:
    """Write llama.cpp's importance matrix of the tensors whose parts were all calibrated."""
    from bridge.gguf_file.imatrix import write_imatrix

    layers = {name: (layer.importance(), layer.tokens) for name, layer in stored.layers.items()}
    importance = importance_of_tensors(plan.tensors, layers)
    assert settings.imatrix_out is not None
    assert settings.length is not None
    write_imatrix(settings.imatrix_out, importance, settings.length, [str(source) for source in settings.sources])

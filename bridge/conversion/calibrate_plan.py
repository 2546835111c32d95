"""Quantizes the layers of a plan with a calibration text, where codes cannot be carried or came as floats.

Each of these layers is quantized to the type that the plan has for it; `executor` writes the finished blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.blocks import Q8_0, TYPES
from bridge.blocks.read import CALIBRATED
from bridge.checkpoint import Checkpoint
from bridge.conversion.calibrate_layers import LayerTarget, quantize_layers
from bridge.conversion.importance import importance_of_tensors
from bridge.conversion.matrix_scales import rounded_scale
from bridge.conversion.part_reader import PartReader
from bridge.conversion.plan import How, Plan, PlannedTensor
from bridge.errors import BridgeError, parameter
from bridge.models.outline import Part
from bridge.quantize.settings import Calibration

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore


def mark_calibrated(plan: Plan, reader: PartReader, method: str) -> Plan:
    """The plan in which parts that cannot keep their codes are calibrated: those in block types inside decoder blocks,
    and those of the output head if it is to have less than 8 bits; two-sided, the embeddings too."""
    return _with_how(plan, lambda t, part, how: "calibrated" if _is_calibrated(t, part, how, reader, method) else how)


def _is_calibrated(tensor: PlannedTensor, part: Part, how: How, reader: PartReader, method: str) -> bool:
    block = (TYPES | CALIBRATED).get(tensor.type)
    outside = ("output", "token_embd") if method == "two-sided" else ("output",)
    inside = tensor.layer is not None or (tensor.kind in outside and block is not Q8_0)
    if not (tensor.quantizable and inside and block is not None and part.layer is not None):
        return False
    # matrices of 3-D tensors are rounded to nearest when they are written
    whole = part.layer in reader.ckpt.modules or f"{part.layer}.weight" in reader.ckpt.tensors
    return how in ("requantized", "rounded") and (method != "rtn" or whole)


def _layers(plan: Plan) -> dict[str, tuple[str, np.ndarray | None, float]]:
    """The layers to calibrate: by module, the type, the order of columns if they are permuted, and what multiplies the
    whole matrix."""
    return {
        str(part.layer): (t.type, part.columns, rounded_scale(plan.metadata, t))
        for t in plan.tensors
        for part, how in zip(t.parts, t.how, strict=True)
        if how == "calibrated"
    }


def _with_how(plan: Plan, change: Callable[[PlannedTensor, Part, How], How]) -> Plan:
    tensors = [
        replace(t, how=tuple(change(t, part, how) for part, how in zip(t.parts, t.how, strict=True)))
        for t in plan.tensors
    ]
    return replace(plan, tensors=tensors)


def quantize_planned(
    ckpt: Checkpoint, plan: Plan, reader: PartReader, settings: Calibration, folder: Path, force: bool, optional: bool
) -> tuple[Plan, LayerStore | None, list[str]]:
    """Quantize the layers of a plan that cannot keep their codes.

    optional  no layers where every one keeps its codes, instead of BridgeError

    Returns the plan with the parts that are calibrated marked, their layers, and notes. Raises BridgeError as
    `quantize_layers` does.
    """
    from bridge.quantize import superblocks

    marked = mark_calibrated(plan, reader, settings.method)
    targets = {
        name: LayerTarget(type_, settings.quantizer(superblocks(type_, scale)), columns)
        for name, (type_, columns, scale) in _layers(marked).items()
    }
    if not targets and optional:
        return plan, None, []
    if not targets:
        given = parameter("calibrate")
        raise BridgeError(
            f"{ckpt.path}: every layer keeps its codes in these types; convert it without {given}, or give a smaller "
            f"{parameter('type')}"
        )
    layers, notes = quantize_layers(ckpt, settings, targets, folder, force)
    if settings.imatrix_out is not None and settings.blocks is None:
        _write_imatrix(marked, layers, settings)

    def seen(tensor: PlannedTensor, part: Part, how: How) -> How:
        if how != "calibrated" or part.layer in layers.layers:
            return how
        return "requantized" if reader.coded(part) else "rounded"

    return _with_how(marked, seen), layers, notes


def _write_imatrix(plan: Plan, kept: LayerStore, settings: Calibration) -> None:
    """Write llama.cpp's importance matrix of the tensors whose parts were all calibrated."""
    from bridge.gguf_file.imatrix import write_imatrix

    layers = {name: (layer.importance(), layer.tokens) for name, layer in kept.layers.items()}
    found = importance_of_tensors(plan.tensors, layers)
    assert settings.imatrix_out is not None
    assert settings.length is not None
    write_imatrix(settings.imatrix_out, found, settings.length, [str(source) for source in settings.sources])

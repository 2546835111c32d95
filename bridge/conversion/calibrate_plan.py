"""Quantizes the layers that a plan says are calibrated, each to its type; `executor` writes the finished blocks.

With `--method imatrix`, a text tells only llama.cpp's importance matrix of a model, to round its floats with. It goes
through a file, `imatrix_out` or a temporary one, so that the GGUF is what `convert --imatrix` makes of that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bridge.checkpoint import Checkpoint
from bridge.conversion.planning.importance import Importance, importance_of_tensors
from bridge.conversion.planning.matrix_scales import rounded_scale
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan import How, Plan
from bridge.errors import BridgeError, parameter
from bridge.models.outline import ModelTensor, Part
from bridge.quantize.run.calibrate import LayerTarget, quantize_layers
from bridge.quantize.run.calibration_text import calibration_set
from bridge.quantize.settings import Calibration

if TYPE_CHECKING:
    import numpy as np

    from bridge.quantize.layer_store import LayerStore


def quantize_planned(
    ckpt: Checkpoint, plan: Plan, reader: PartReader, settings: Calibration, folder: Path, force: bool, optional: bool
) -> tuple[Plan, LayerStore | None, list[str]]:
    """Quantize the layers of a plan that are calibrated.

    optional  no layers where every one keeps its codes, instead of BridgeError

    Returns the plan, in which layers that the text does not reach are quantized without it, the layers, and notes.
    Raises BridgeError as `quantize_layers` does.
    """
    from bridge.quantize import superblocks

    targets: dict[str, LayerTarget] = {}  # by module
    for t in plan.tensors:
        for part in (part for part, how in zip(t.parts, t.how, strict=True) if how == "calibrated"):
            method = settings.quantizer(superblocks(t.type, rounded_scale(plan.metadata, t)))
            targets[str(part.layer)] = LayerTarget(t.type, method, part.columns)
    if not targets and optional:
        return plan, None, []
    if not targets:
        ways = f"convert it without {parameter('calibrate')}, or give a smaller {parameter('type')}"
        raise BridgeError(f"{ckpt.path}: every layer keeps its codes in these types; {ways}")
    layers, notes = quantize_layers(ckpt, settings, targets, folder, force)
    if settings.imatrix_out is not None and settings.blocks is None:
        measured = {name: (layer.importance(), layer.tokens) for name, layer in layers.layers.items()}
        _write_imatrix(Path(settings.imatrix_out), plan.tensors, measured, settings)

    def reached(part: Part, how: How) -> How:
        if how != "calibrated" or part.layer in layers.layers:
            return how
        return "requantized" if reader.coded(part) else "rounded"

    tensors = [replace(t, how=tuple(map(reached, t.parts, t.how))) for t in plan.tensors]
    return replace(plan, tensors=tensors), layers, notes


def _write_imatrix(
    file: Path, tensors: Sequence[ModelTensor], layers: Mapping[str, tuple[np.ndarray, int]], settings: Calibration
) -> None:
    """Write llama.cpp's importance matrix of the tensors whose parts are all among the layers."""
    from bridge.gguf_file.imatrix import write_imatrix

    assert settings.length is not None  # by with_length
    importance = importance_of_tensors(tensors, layers)
    write_imatrix(file, importance, settings.length, [str(source) for source in settings.sources])


def measured_importance(ckpt: Checkpoint, tensors: Sequence[ModelTensor], settings: Calibration) -> Importance:
    """The importance of the tensors' columns on the calibration text."""
    from bridge.gguf_file.imatrix import read_imatrix
    from bridge.quantize.input_squares import mean_input_squares
    from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
    from bridge.quantize.run.needs import needs_of_pass
    from bridge.quantize.run.walk import sequences_together

    assert settings.length is not None  # by with_length
    model = FloatModel(ckpt, fast_arithmetic(settings.device), settings.device)  # means need no more precision
    tokens = calibration_set(model, settings, ()).tokens
    batch = sequences_together(settings.length)
    needs = needs_of_pass(model, (len(tokens), settings.length), settings)
    if settings.say:
        settings.say(f"importance of {tokens.numel():,} tokens: {needs}")

    def done(blocks: int, total: int) -> None:
        if settings.progress:
            settings.progress(blocks, total, "importance matrix")

    with TemporaryDirectory(dir=settings.offload) as folder:
        layers = mean_input_squares(model, tokens, batch=batch, offload=folder, memory=needs.layers, done=done)
        file = Path(settings.imatrix_out or Path(folder) / "imatrix.gguf")
        _write_imatrix(file, tensors, layers, settings)
        return Importance(read_imatrix(file), None if settings.imatrix_out is None else str(file))

"""A float model becomes a GPTQ or AWQ checkpoint: layers quantized with a text, everything else copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoint.files.dtypes import torch_dtype
from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.files.hub import model_name, open_by_name
from bridge.checkpoint.formats.registry import FORMATS, QUANTIZED
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.write.report import Written
from bridge.checkpoint.write.writer import write_checkpoint
from bridge.conversion.paths import files_of, layers_of
from bridge.errors import BridgeError, parameter
from bridge.models import float_layers
from bridge.quantize.run.calibrate import LayerTarget, quantize_layers
from bridge.quantize.run.calibration_text import with_length
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.options import checked

if TYPE_CHECKING:
    import torch

    from bridge.checkpoint import Checkpoint
    from bridge.quantize.method import Method


@checked
@thread_limit()
def quantize_checkpoint(
    checkpoint: str | Path,
    out: str | Path | None = None,
    format: str = "gptq_v2",
    *,
    config: str | Path | None = None,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    calibrate: Calibration,
    clamp: bool = False,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Written:
    """Quantize the linear layers of a float model's decoder blocks and write a checkpoint folder.

    checkpoint  a folder in Hugging Face layout, or a Hub id
    out         the folder to write; default: the model's name and the format, in the current folder
    format      "gptq" (v1), "gptq_v2", or "awq" (gemm)
    group_size  columns in a group; -1: whole rows
    symmetric   whether the middle code stands for 0; awq has a zero point for each group in any case
    calibrate   the text and the method. Finished layers are stored in the folder `<out>.layers` until all is written: a
                second run continues where an interrupted one stopped
    clamp       gptq: make zero points of 0, which v1 cannot hold, into 1
    progress    called with the bytes written, of how many, and the tensor, after the layers are quantized; while they
                are, that of `calibrate` is called

    Raises BridgeError for anything wrong with the input, and where the format cannot hold what is asked for.
    """
    from bridge.quantize.awq import Awq

    if format not in QUANTIZED:
        raise BridgeError(f"unknown {parameter('format', format)}: choose {', '.join(QUANTIZED)}")
    written, groups = FORMATS[format], Groups(bits, group_size)
    if clamp and written.holds_zero:
        raise BridgeError(f"{format} holds every zero point; leave out {parameter('clamp', True)}, which is for gptq")
    calibrate.check_checkpoint()
    path = Path(out) if out is not None else Path(f"{model_name(str(checkpoint))}-{format}-{bits}bit")
    with open_by_name(checkpoint, config) as ckpt:
        check_folder(ckpt, path, force, files_of(*calibrate.files))
        calibrate, length_notes = with_length(ckpt, calibrate)
        grid, method = group_rounding(groups, symmetric and written.rounding != "asymmetric", calibrate)
        awq = Awq(method, stored=_norms(ckpt), folder=layers_of(path)) if calibrate.method == "awq" else None
        shapes = linears(ckpt)
        obstacles = {
            name: written.obstacle(groups, shape)
            if f"{name}.weight" in ckpt.tensors
            else "it is part of a tensor of all experts"
            for name, shape in shapes.items()
        }
        targets = {name: LayerTarget(grid, awq or method) for name, why in obstacles.items() if why is None}
        if not targets:
            why = next(iter(obstacles.values()), "no layers")
            raise BridgeError(f"{ckpt.path}: no layer can be {format} with {grid}: {why}")
        prepare = awq.prepare if awq else None
        stored, notes = quantize_layers(ckpt, calibrate, targets, layers_of(path), force, prepare, complete=True)
        notes = [*length_notes, *notes]
        notes += [f"{name}: stays float: {why}" for name, why in obstacles.items() if why]
        if calibrate.blocks is not None:
            return Written([path], 0.0, format, 0, 0, notes=notes, home=ckpt.home)
        done = write_checkpoint(
            ckpt, path, format, dict.fromkeys(targets, groups), (stored.layers[name].tensor() for name in targets),
            floats=awq.floats if awq else None, clamp=clamp, force=force, progress=progress,
        )  # fmt: skip
        errors = [layer.error for layer in stored.layers.values()]
        if errors and calibrate.method != "rtn":
            done.lost = sum(errors) / len(errors), max(errors)
        done.home, done.blocks = ckpt.home, stored.blocks
        stored.remove()
    done.notes += notes
    return done


def group_rounding(layer: Groups, symmetric: bool, calibrate: Calibration) -> tuple[str, Method]:
    """The name of a layer's grid, and what quantizes it to that."""
    from bridge.quantize import groups

    bits, size = layer.bits, layer.group_size
    grid = groups(bits, size, symmetric, shrink=calibrate.method == "rtn")
    return f"{bits} bits, groups of {size}, {'symmetric' if symmetric else 'asymmetric'}", calibrate.quantizer(grid)


def _norms(ckpt: Checkpoint) -> torch.dtype:
    """The dtype of the norms: what AWQ changes of the floats is stored in it again."""
    stored = next((i.dtype for i in ckpt.tensors.values() if len(i.shape) == 1), "F16")
    return torch_dtype(stored if stored in ("F32", "BF16") else "F16")


def linears(ckpt: Checkpoint) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers inside the decoder's blocks, by name, but for those that are always floats."""
    from bridge.quantize.model.float_model import FloatModel

    shapes = FloatModel(ckpt).linears()
    floats = float_layers(ckpt.config, ckpt.home, shapes)
    return {name: shape for name, shape in shapes.items() if name not in floats}

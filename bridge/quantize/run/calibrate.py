"""Quantizes layers of a checkpoint with the Hessians of their inputs, in the model's own order.

Finished layers are stored with what they depend on, so that another run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import bridge
from bridge.blocks.read import WRITTEN
from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import open_by_name
from bridge.errors import BridgeError, parameter, refused
from bridge.quantize.run.calibration_text import calibration_set
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import slices
from bridge.system.storage.files import disk_errors
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.text import percent

if TYPE_CHECKING:
    import torch

    from bridge.quantize.awq import Awq
    from bridge.quantize.layer_store import LayerStore, StoredLayer
    from bridge.quantize.method import Method
    from bridge.quantize.model.float_model import FloatModel
    from bridge.quantize.quantizer import LayerInput, Prepare
    from bridge.quantize.run.needs import Needs
    from bridge.quantize.text.mixture import CalibrationSet

# options on which no layer depends
_ELSEWHERE = {"text", "blocks", "memory", "offload", "imatrix_out", "progress", "say", "spread"}


@dataclass(frozen=True)
class LayerTarget:
    """What a layer is quantized to.

    grid     its name in the job's record, "Q4_K"
    method   what quantizes it
    columns  int [columns], their order in the GGUF; None: the checkpoint's
    """

    grid: str
    method: Method | Awq
    columns: np.ndarray | None = None

    @property
    def bits(self) -> float:
        """Bits per weight, about."""
        return WRITTEN[self.grid].bpw if self.grid in WRITTEN else float(self.grid.split()[0])


def quantize_layers(
    ckpt: Checkpoint,
    settings: Calibration,
    targets: dict[str, LayerTarget],
    folder: Path,
    force: bool,
    prepare: Prepare | None = None,
    complete: bool = False,
) -> tuple[LayerStore, list[str]]:
    """Quantize layers of a checkpoint one after the other; those that are stored already are not made again.

    targets   by module
    folder    where finished layers are stored
    force     whether layers of another run may be replaced there
    prepare   see `quantize_model`
    complete  round the layers that the text does not reach to nearest; else they are not among those returned

    Returns the stored layers, of `settings.blocks` alone where these are given, and notes. Raises BridgeError as
    `read_tokens` and `quantize_model` do.
    """
    import torch

    from bridge.quantize.block_log import BlockLog
    from bridge.quantize.layer_store import LayerStore
    from bridge.quantize.model.float_model import FloatModel, arithmetic
    from bridge.quantize.run.needs import Job, needs_of

    model = calibration = needs = log = None
    dtype = torch.float32
    if settings.method != "rtn":
        if settings.method != "awq":  # its scales are multiplied into weights and norms, which are stored
            dtype = arithmetic(ckpt, settings.device)
        model = FloatModel(ckpt, dtype, settings.device)
        calibration = calibration_set(model, settings, targets)
    job = _job(ckpt, settings, targets, calibration, dtype)
    until = None
    if model is not None and settings.blocks is not None:
        targets, until = _of_part(model, targets, settings.blocks)
    if model is not None and calibration is not None:
        bits = {name: target.bits for name, target in targets.items()}
        sequences, length = calibration.tokens.shape
        needs = needs_of(Job(model, (sequences, length), bits, settings, calibration.held > 0), settings.memory)
    layers = LayerStore(folder, job, force, settings.blocks)
    if model is not None and calibration is not None and needs is not None:
        blocks, weights = _blocks(model, targets)
        log = BlockLog(blocks, weights, calibration.tokens.numel(), layers.layers, settings.say)
        layers.blocks = log.records
        if settings.say:
            settings.say(str(needs))

    def finished(layer: StoredLayer) -> None:
        layers.add(layer)
        if log is not None:
            log.layer(layer)
        if settings.progress:
            rows = "rows {} to {} of {} ".format(*layer.rows) if layer.rows else ""
            settings.progress(len(layers.layers), len(targets), f"{layer.name} {rows}error {layer.error:.2e}")

    if settings.progress:
        settings.progress(len(layers.layers), len(targets), "")
    try:
        if model is None or calibration is None or needs is None:
            quantized = _rounded_to_nearest(ckpt, targets, targets, layers)
        else:
            quantized = calibrated_layers(model, settings, calibration, needs, targets, layers, prepare, until)
        with closing(quantized):
            for layer in quantized:
                finished(layer)
    except BaseException as stop:
        layers.remove_if_empty()
        if isinstance(stop, KeyboardInterrupt) and layers.folder.exists():
            stored = f"{len(layers.layers)} of {len(targets)} layers are stored in {layers.folder}"
            stop.args = (f"stopped; {stored}: the same command continues from there",)
        raise
    missed = sorted(targets.keys() - layers.layers.keys())
    if complete:
        for layer in _rounded_to_nearest(ckpt, missed, targets, layers):
            finished(layer)
    notes = list(layers.notes)
    if settings.blocks is not None:
        notes.append(_part_note(settings.blocks, layers))
    notes += [_lost_note(layers.layers, settings)] if calibration is not None and layers.layers else []
    notes += _alone_notes(layers.layers)
    notes += [f"{name}: not seen among the model's layers; rounded to nearest instead" for name in missed]
    return layers, notes + [note for layer in layers.layers.values() if (note := _damping_note(layer, settings))]


def _blocks(model: FloatModel, targets: Collection[str]) -> tuple[list[list[str]], dict[str, int]]:
    """The layers to be quantized, block by block, the embeddings with the first and the output head last; and how many
    weights each has."""
    embeddings, head = model.embedding_and_head()
    shape = model.head()[1]
    shapes = {embeddings: shape, **model.linears(), head: shape}
    weights = {name: rows * columns for name, (rows, columns) in shapes.items() if name in targets}
    blocks = [[name for name in model.layers_of(i) if name in weights] for i in range(len(model.blocks))]
    blocks[0] = [embeddings] * (embeddings in weights) + blocks[0]
    return blocks + [[head]] * (head in weights and head != embeddings), weights


def calibrated_layers(
    model: FloatModel,
    settings: Calibration,
    calibration: CalibrationSet,
    needs: Needs,
    targets: dict[str, LayerTarget],
    layers: LayerStore,
    prepare: Prepare | None,
    until: int | None,
) -> Generator[StoredLayer, None, None]:
    """Quantize and store the layers of a model; those that are stored already are put in.

    needs  of the job: how much memory activations get
    until  how many blocks are passed; None: all
    """
    spread, todo = settings.spread, frozenset(targets.keys() - layers.layers.keys())
    ckpt = model.ckpt
    if spread is not None and type(ckpt) is not Checkpoint:
        raise BridgeError(f"{ckpt.path}: machines share the work on checkpoints only, not on a GGUF")
    if not todo and prepare is None:
        return

    import torch

    from bridge.quantize.run.cluster import Tasks
    from bridge.quantize.run.gradients import gather_gradients
    from bridge.quantize.run.layer_by_layer import quantized_layers
    from bridge.quantize.run.walk import Walk, sequences_together

    def report(what: str) -> None:
        if settings.progress:
            settings.progress(len(layers.layers), len(layers.layers) + len(todo), f"gradients: {what}")

    with ExitStack() as stack:
        folder = None if settings.offload is None else Path(settings.offload)
        if spread is None:
            beside = (folder or layers.folder.parent) / layers.folder.name
            stack.enter_context(disk_errors(beside, "activations", "folder"))
            folder = stack.enter_context(temporary_beside(beside))
        walk = Walk(
            calibration.tokens, partial(_quantized, targets, layers.apart()),
            batch=sequences_together(calibration.tokens.shape[1]), held=calibration.held, feed=settings.feed,
            cross=settings.cross, until=until, wanted=frozenset(targets).__contains__, layers=layers,
            two_sided=settings.two_sided, head=True, prepare=prepare, offload=folder,
            memory=needs.layers if spread is None else None, dtype=torch.bfloat16 if model.stored_in_bfloat16 else None,
            hessians=needs.hessians if spread is None else None,
            open=partial(open_by_name, ckpt.path, None if ckpt.home == ckpt.path else ckpt.home),
            arithmetic=model.dtype, device=settings.device,
        )  # fmt: skip
        tasks = stack.enter_context(Tasks(walk, model, spread))
        if settings.needs_gradients and todo:
            gather_gradients(tasks, todo, needs.gradients if spread is None else None, report)
        for _, layer in quantized_layers(tasks):
            yield layer


def _quantized(
    targets: dict[str, LayerTarget], layers: LayerStore, layer: LayerInput
) -> tuple[torch.Tensor, StoredLayer]:
    """Quantize a layer and store it: its dequantized weights, and where it is."""
    target = targets[layer.name]
    values, quantized = target.method.layer(layer, target.columns)
    weight, squares = layer.weight.cpu().numpy(), layer.hessian.mean_squares()
    return values, layers.save(quantized, weight, squares, layer.hessian.tokens, layer.rows)


def _of_part(
    model: FloatModel, targets: dict[str, LayerTarget], part: tuple[int, int]
) -> tuple[dict[str, LayerTarget], int | None]:
    """The layers in part I of N of the model's blocks, the first with the embeddings, the last with the output head,
    and the number of blocks up to its end; None: all."""
    number, count = part
    if count > len(model.blocks):
        raise refused("blocks", part, f"the model has {len(model.blocks)} blocks")
    blocks = slices(len(model.blocks), count)[number - 1]
    untied = model.untied_head()
    outside = {model.embedding_and_head()[0]} if number == 1 else set()
    outside |= {untied[0]} if untied is not None and number == count else set()
    wanted = model.linears(blocks).keys() | outside
    return {n: target for n, target in targets.items() if n in wanted}, None if number == count else blocks.stop


def _part_note(part: tuple[int, int], layers: LayerStore) -> str:
    return (
        f"{len(layers.layers)} layers, part {part[0]} of {part[1]}, are stored in {layers.folder}: when all parts are, "
        f"next to each other, the same command without {parameter('blocks')} writes the file"
    )


def _rounded_to_nearest(
    ckpt: Checkpoint, names: Iterable[str], targets: dict[str, LayerTarget], layers: LayerStore
) -> Generator[StoredLayer, None, None]:
    """Round layers to nearest, each by itself, without a text."""
    import torch

    from bridge.quantize.quantizer import LayerInput
    from bridge.quantize.run.walk import rows_at_once
    from bridge.quantize.solve.hessian import Hessian

    for name in sorted(names):
        coded = name in ckpt.modules
        count, columns = ckpt.modules[name].shape if coded else ckpt.tensors[f"{name}.weight"].shape
        hessian = Hessian(name, columns)
        for rows in layers.missing(name, count, rows_at_once(columns)):
            if coded:
                weight = ckpt.read_module(name, np.arange(rows.start, rows.stop)).dequantize()
            else:
                weight = ckpt.read_float(f"{name}.weight", (rows.start, rows.stop))
            part = None if len(weight) == count else (rows.start, rows.stop, count)
            yield _quantized(targets, layers.apart(), LayerInput(name, torch.from_numpy(weight), hessian, rows=part))[1]


def _job(
    ckpt: Checkpoint,
    settings: Calibration,
    targets: dict[str, LayerTarget],
    calibration: CalibrationSet | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What finished layers depend on, as JSON: other layers are not taken over from an earlier run."""
    options = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _ELSEWHERE}
    if settings.spread is not None and settings.spread.parts > 1:
        options["parts"] = settings.spread.parts  # of the sums
    files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in ckpt.files]
    layers = [[name, t.grid, None if t.columns is None else t.columns.tolist()] for name, t in sorted(targets.items())]
    return {
        "by": bridge.__version__,
        "solver": _solver(),
        "arithmetic": str(dtype),
        "checkpoint": str(ckpt.path.resolve()),
        "files": files,
        "options": options,
        "tokens": None if calibration is None else hashlib.sha256(calibration.read.numpy().tobytes()).hexdigest(),
        "own samples": None if calibration is None else calibration.drawn,  # rounding may change which tokens are drawn
        "layers": hashlib.sha256(json.dumps(layers).encode()).hexdigest(),
    }


@cache
def _solver() -> str:
    """The version of what quantizes layers: the digest of its sources."""
    folder = Path(bridge.__file__).parent / "quantize"
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _lost_note(layers: dict[str, StoredLayer], settings: Calibration) -> str:
    worst = max(layers.values(), key=lambda layer: layer.error)
    mean = sum(layer.error for layer in layers.values()) / len(layers)
    tokens = max(layer.tokens for layer in layers.values())
    return (
        f"{len(layers)} layers calibrated on {tokens} tokens of {' and '.join(map(str, settings.sources))}: "
        f"their outputs lost {percent(mean)} of their power on average, {percent(worst.error)} at most ({worst.name})"
    )


def _alone_notes(layers: dict[str, StoredLayer]) -> list[str]:
    names = sorted(name for name, layer in layers.items() if layer.alone)
    if not names:
        return []
    return [
        f"{len(names)} of {len(layers)} layers were rounded as with an importance matrix, which serves the tokens held "
        f"back better: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    ]


def _damping_note(layer: StoredLayer, settings: Calibration) -> str | None:
    if settings.method in ("rtn", "awq") or layer.damping == settings.damping:
        return None
    if layer.damping == float("inf"):
        return f"{layer.name}: no damping makes its Hessian positive definite; rounded to nearest"
    return f"{layer.name}: its Hessian took a damping of {layer.damping:g} instead of {settings.damping:g}"

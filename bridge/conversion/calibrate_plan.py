"""Quantizes the layers of a plan with a calibration text, where codes cannot be carried or came as floats.

Each of these layers is quantized to the type that the plan has for it, with the Hessian of its inputs
(`bridge.quantize`), in the model's own order. `executor` writes the finished blocks.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import bridge
from bridge.blocks import Q8_0, TYPES
from bridge.blocks.read import CALIBRATED
from bridge.checkpoint import Checkpoint
from bridge.conversion.part_reader import PartReader
from bridge.conversion.plan import How, Plan, PlannedTensor
from bridge.errors import BridgeError, BridgeWarning, parameter
from bridge.models.outline import Part
from bridge.models.wrapper import text_config
from bridge.quantize.settings import Calibration
from bridge.system.files import disk_errors
from bridge.system.folder_locks import temporary_beside
from bridge.system.free_memory import free_memory
from bridge.system.text import percent

if TYPE_CHECKING:
    import torch

    from bridge.quantize.awq import Awq
    from bridge.quantize.float_model import FloatModel
    from bridge.quantize.layer_store import LayerStore, StoredLayer
    from bridge.quantize.method import Method
    from bridge.quantize.mixture import Calibrating
    from bridge.quantize.walk import LayerInput, Prepare

_LENGTH = 2048  # tokens in a sequence
_TOKENS_PER_COLUMN = 4  # of the widest input, at least
_TOKENS_AT_ONCE = 4096
_WEIGHTS_AT_ONCE = 1 << 26  # of the output head: quantizing takes eight times their 256 MB


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


def _layers(plan: Plan) -> dict[str, tuple[str, np.ndarray | None]]:
    """The layers to calibrate: by module, the type, and the order of columns if they are permuted."""
    return {
        str(part.layer): (t.type, part.columns)
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


def quantize_layers(
    ckpt: Checkpoint,
    settings: Calibration,
    targets: dict[str, LayerTarget],
    folder: Path,
    force: bool,
    prepare: Prepare | None = None,
) -> tuple[LayerStore, list[str]]:
    """Quantize layers of a checkpoint one after the other; those that are stored already are not made again.

    targets  by module
    folder   where finished layers are stored
    force    whether layers of another run may be replaced there
    prepare  see `quantize_model`

    Returns the stored layers and notes. Raises BridgeError as `read_tokens` and `quantize_model` do.
    """
    from bridge.quantize.float_model import FloatModel
    from bridge.quantize.layer_store import LayerStore

    model = found = None
    if settings.method != "rtn":
        model = FloatModel(ckpt, device=settings.device)
        found = calibrating(model, settings, targets)
    layers = LayerStore(folder, _job(ckpt, settings, targets, found), force)

    def quantizer(layer: LayerInput) -> tuple[torch.Tensor, None]:
        target = targets[layer.name]
        values, quantized = target.method.layer(layer, target.columns)
        weight, squares = layer.weight.cpu().numpy(), layer.hessian.mean_squares()
        layers.save(quantized, weight, squares, layer.hessian.tokens, layer.rows)
        if settings.progress:
            rows = "rows {} to {} of {} ".format(*layer.rows) if layer.rows else ""
            settings.progress(len(layers.layers), len(targets), f"{layer.name} {rows}error {quantized.error:.2e}")
        return values, None

    if settings.progress:
        settings.progress(len(layers.layers), len(targets), "")
    try:
        if model is None or found is None:
            _round_to_nearest(ckpt, targets, quantizer, layers)
        else:
            _walk(model, settings, found, targets, quantizer, layers, prepare)
    except BaseException as stop:
        layers.remove_if_empty()
        if isinstance(stop, KeyboardInterrupt) and layers.folder.exists():
            stored = f"{len(layers.layers)} of {len(targets)} layers are stored in {folder}"
            stop.args = (f"stopped; {stored}: the same command continues from there",)
        raise
    missed = sorted(targets.keys() - layers.layers.keys())
    notes = list(layers.notes)
    notes += [_lost_note(layers.layers, settings)] if found is not None and layers.layers else []
    notes += [f"{name}: not seen among the model's layers; rounded to nearest instead" for name in missed]
    return layers, notes + [note for layer in layers.layers.values() if (note := _damping_note(layer, settings))]


def with_length(ckpt: Checkpoint, settings: Calibration) -> tuple[Calibration, list[str]]:
    """The settings with the number of tokens in a sequence, where it was not given, and notes.

    Raises BridgeError if the model has fewer positions than were asked for.
    """
    from bridge.quantize.float_model import positions
    from bridge.quantize.walk import check_length

    if settings.method == "rtn":
        return settings, []
    most = positions(ckpt)
    if settings.length is not None:
        check_length(settings.length, most)
        return settings, []
    if most is None or most >= _LENGTH:
        return replace(settings, length=_LENGTH), []
    return replace(settings, length=most), [
        f"calibration sequences have {most} tokens instead of {_LENGTH}, as many as the model has positions"
    ]


def calibrating(model: FloatModel, settings: Calibration, layers: Collection[str]) -> Calibrating:
    """The sequences to calibrate on; a BridgeWarning where they are few for the inputs of these layers.

    Raises BridgeError as `calibration_sequences` does.
    """
    from bridge.quantize.mixture import calibration_sequences
    from bridge.quantize.texts import TOKEN_FILES, load_tokenizer

    ckpt = model.ckpt
    assert settings.length is not None  # by with_length
    if settings.text is None:
        given = parameter("method", settings.method)
        raise BridgeError(f"{given}: needs a calibration text; only rtn does without")
    texts = [source for source in settings.sources if source.file is None or source.file.suffix not in TOKEN_FILES]
    tokenizer = load_tokenizer(ckpt.home) if texts else None
    found = calibration_sequences(
        settings.sources,
        tokenizer,
        settings.samples,
        settings.length,
        settings.seed,
        text_config(ckpt.config).get("vocab_size"),
        lambda count, length: _own_samples(model, tokenizer, settings, count, length),
    )
    tokens = found.tokens
    columns = {name: shape[1] for name, shape in [*model.linears().items(), model.head()] if name in layers}
    widest = max(columns, key=columns.__getitem__, default=None)
    if widest is not None and tokens.numel() < (enough := _TOKENS_PER_COLUMN * columns[widest]):
        ways = ["a longer text"] if len(tokens) < settings.samples else []
        if settings.samples * settings.length < enough:
            ways.append(parameter("samples", -(-enough // settings.length)))
        warnings.warn(
            f"{tokens.numel()} calibration tokens are few for the {columns[widest]} inputs of {widest}, whose codes "
            f"may suit this text alone; give at least {enough} tokens: {' and '.join(ways)}",
            BridgeWarning,
            stacklevel=2,
        )
    return found


def _own_samples(
    model: FloatModel, tokenizer: Any, settings: Calibration, count: int, length: int
) -> torch.Tensor | None:
    """The model's own samples int64 [count, length]; None, and a BridgeWarning, where it cannot give any."""
    from bridge.quantize.default_text import openings
    from bridge.quantize.own_samples import fits_in_memory, own_samples

    def said(done: int, total: int) -> None:
        if settings.progress:
            settings.progress(0, 1, f"own samples: {done} of {total} tokens")

    samples = None
    why = "its weights do not fit in memory"
    if fits_in_memory(model, free_memory()):
        why = "transformers keeps no cache for it"
        end = model.model.config.get_text_config().eos_token_id
        ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
        samples = own_samples(model, openings(tokenizer), sorted(ends), count, length, settings.seed or 0, said)
    if samples is None:
        warnings.warn(
            f"{model.ckpt.path}: {why}, so it is calibrated without samples of its own, on the shipped texts alone",
            BridgeWarning,
            stacklevel=2,
        )
    return samples


def _walk(
    model: FloatModel,
    settings: Calibration,
    found: Calibrating,
    targets: dict[str, LayerTarget],
    quantizer: Callable[[LayerInput], tuple[torch.Tensor, None]],
    layers: LayerStore,
    prepare: Prepare | None,
) -> None:
    """Take the tokens through the model, layer by layer."""
    from bridge.quantize import quantize_model
    from bridge.quantize.embeddings import embeddings_hessian, quantize_embeddings
    from bridge.quantize.kept_inputs import KeptInputs

    todo = targets.keys() - layers.layers.keys()
    two_sided = settings.method == "two-sided" and bool(todo)
    if two_sided and not layers.has_outputs(todo):
        beside = (settings.offload or layers.folder.parent) / layers.folder.name
        with disk_errors(beside, "activations", "folder"), temporary_beside(beside) as folder:
            _keep_output_hessians(model, settings, found.tokens, todo, folder, layers)

    def spans(name: str, rows: int, columns: int) -> list[slice]:
        return layers.missing(name, rows, _rows_at_once(columns))

    embeddings = model.embedding_and_head()[0]
    half = layers.outputs(embeddings) if two_sided and embeddings in todo else None
    if half is not None:
        quantize_embeddings(model, embeddings_hessian(embeddings, half[0], found.tokens.numel()), quantizer, spans)
    walk = quantize_model(
        model,
        found.tokens,
        quantizer,
        held=found.held,
        feed=settings.feed,
        cross=settings.cross,
        batch=max(1, _TOKENS_AT_ONCE // found.tokens.shape[1]),
        wanted=targets.__contains__,
        known=layers.values,
        outputs=layers.outputs if two_sided else lambda name: None,
        offload=settings.offload,
        resume=KeptInputs(layers.folder, layers.job) if prepare is None else None,  # which every block has to see
        prepare=prepare,
        head=True,
        head_spans=spans,
    )
    for _ in walk:
        pass


def _keep_output_hessians(
    model: FloatModel,
    settings: Calibration,
    tokens: torch.Tensor,
    targets: Collection[str],
    folder: Path,
    layers: LayerStore,
) -> None:
    """Keep A of each layer, see `two_sided`, until it is finished.

    folder  for the activations of the passes
    """
    from bridge.quantize.forward_passes import output_hessians

    def said(what: str) -> None:
        if settings.progress:
            settings.progress(len(layers.layers), len(layers.layers) + len(targets), f"gradients: {what}")

    said("forward")
    missing = set(targets)
    for name, outputs in output_hessians(model, tokens, folder):
        said(name)
        if name in missing:
            layers.save_outputs(name, outputs)
            missing.remove(name)
    for name in missing:
        layers.save_outputs(name, None)


def _round_to_nearest(
    ckpt: Checkpoint, names: Iterable[str], quantizer: Callable[[LayerInput], object], layers: LayerStore
) -> None:
    """Without a text: every layer by itself."""
    import torch

    from bridge.quantize.hessian import Hessian
    from bridge.quantize.walk import LayerInput

    for name in sorted(names):
        coded = name in ckpt.modules
        count, columns = ckpt.modules[name].shape if coded else ckpt.tensors[f"{name}.weight"].shape
        hessian = Hessian(name, columns)
        for rows in layers.missing(name, count, _rows_at_once(columns)):
            if coded:
                weight = ckpt.read_module(name, np.arange(rows.start, rows.stop)).dequantize()
            else:
                weight = ckpt.read_float(f"{name}.weight", (rows.start, rows.stop))
            part = None if len(weight) == count else (rows.start, rows.stop, count)
            quantizer(LayerInput(name, torch.from_numpy(weight), hessian, rows=part))


def _rows_at_once(columns: int) -> int:
    return max(1, _WEIGHTS_AT_ONCE // columns)


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
        name: LayerTarget(type_, settings.quantizer(superblocks(type_)), columns)
        for name, (type_, columns) in _layers(marked).items()
    }
    if not targets and optional:
        return plan, None, []
    if not targets:
        given = parameter("calibrate")
        raise BridgeError(f"{ckpt.path}: every layer keeps its codes in these types; convert it without {given}")
    layers, notes = quantize_layers(ckpt, settings, targets, folder, force)
    if settings.imatrix_out is not None:
        _write_imatrix(marked, layers, settings)

    def seen(tensor: PlannedTensor, part: Part, how: How) -> How:
        if how != "calibrated" or part.layer in layers.layers:
            return how
        return "requantized" if reader.coded(part) else "rounded"

    return _with_how(marked, seen), layers, notes


def _write_imatrix(plan: Plan, kept: LayerStore, settings: Calibration) -> None:
    """Write llama.cpp's importance matrix of the tensors whose parts were all calibrated."""
    from bridge.gguf_file.imatrix import write_imatrix

    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for tensor in plan.tensors:
        layers = [layer for part in tensor.parts if (layer := kept.layers.get(part.layer or ""))]
        if tensor.kind != "token_embd" and layers and len(layers) == len(tensor.parts):
            rows = layers if len(tensor.shape) == 3 else layers[:1]  # parts of a fused matrix share their inputs
            found[tensor.name] = (
                np.stack([layer.importance() for layer in rows]), np.array([layer.tokens for layer in rows])
            )  # fmt: skip
    assert settings.imatrix_out is not None
    assert settings.length is not None
    write_imatrix(settings.imatrix_out, found, settings.length, [str(source) for source in settings.sources])


def _job(
    ckpt: Checkpoint, settings: Calibration, targets: dict[str, LayerTarget], found: Calibrating | None
) -> dict[str, Any]:
    """What the layers depend on."""
    options = {k: v for k, v in asdict(settings).items() if k not in ("text", "offload", "imatrix_out", "progress")}
    files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in ckpt.files]
    said = [[name, w.grid, None if w.columns is None else w.columns.tolist()] for name, w in sorted(targets.items())]
    return {
        "by": bridge.__version__,
        "checkpoint": str(ckpt.path.resolve()),
        "files": files,
        "options": options,
        "tokens": None if found is None else hashlib.sha256(found.read.numpy().tobytes()).hexdigest(),
        "own samples": None if found is None else found.drawn,  # rounding may change which tokens are drawn
        "layers": hashlib.sha256(json.dumps(said).encode()).hexdigest(),
    }


def _lost_note(layers: dict[str, StoredLayer], settings: Calibration) -> str:
    worst = max(layers.values(), key=lambda layer: layer.error)
    mean = sum(layer.error for layer in layers.values()) / len(layers)
    tokens = max(layer.tokens for layer in layers.values())
    return (
        f"{len(layers)} layers calibrated on {tokens} tokens of {' and '.join(map(str, settings.sources))}: "
        f"their outputs lost {percent(mean)} of their power on average, {percent(worst.error)} at most ({worst.name})"
    )


def _damping_note(layer: StoredLayer, settings: Calibration) -> str | None:
    if settings.method in ("rtn", "awq") or layer.damping == settings.damping:
        return None
    if layer.damping == float("inf"):
        return f"{layer.name}: no damping makes its Hessian positive definite; rounded to nearest"
    return f"{layer.name}: its Hessian took a damping of {layer.damping:g} instead of {settings.damping:g}"

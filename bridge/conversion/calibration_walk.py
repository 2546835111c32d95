"""Takes a calibration text through a model, within the memory that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import open_by_name
from bridge.errors import BridgeError
from bridge.quantize.settings import Calibration
from bridge.system.files import disk_errors
from bridge.system.folder_locks import temporary_beside

if TYPE_CHECKING:
    import torch

    from bridge.quantize.activations import Shelf
    from bridge.quantize.float_model import FloatModel
    from bridge.quantize.layer_store import LayerStore, StoredLayer
    from bridge.quantize.mixture import Calibrating
    from bridge.quantize.needs import Needs
    from bridge.quantize.quantizer import LayerInput, Prepare

_TOKENS_AT_ONCE = 4096
_WEIGHTS_AT_ONCE = 1 << 26  # of the output head: quantizing takes eight times their 256 MB


def rows_at_once(columns: int) -> int:
    """How many rows of a matrix that is quantized by itself are quantized together."""
    return max(1, _WEIGHTS_AT_ONCE // columns)


def _spans(layers: LayerStore, name: str, rows: int, columns: int) -> list[slice]:
    """The rows of such a matrix that are not stored, cut into those that are quantized together."""
    return layers.missing(name, rows, rows_at_once(columns))


def needs(model: FloatModel, settings: Calibration, found: Calibrating, bits: Mapping[str, float]) -> Needs:
    """What the run takes. Raises BridgeError as `needs_of`.

    bits  of a weight, by layer that is quantized
    """
    from bridge.quantize.needs import Job, needs_of

    sequences, length = found.tokens.shape
    columns = model.head()[1][1]
    at_once = _TOKENS_AT_ONCE, rows_at_once(columns)
    gathered = settings.cross, found.held > 0, settings.felt, settings.two_sided
    job = Job(model, (sequences, length), bits, *gathered, settings.sweeps, *at_once)
    return needs_of(job, settings.memory)


def walk_layers(
    model: FloatModel,
    settings: Calibration,
    found: Calibrating,
    room: Needs,
    targets: Collection[str],
    quantizer: Callable[[LayerInput], tuple[torch.Tensor, None]],
    layers: LayerStore,
    prepare: Prepare | None,
    until: int | None,
) -> None:
    """Quantize the layers of a model; those that are stored already are put in.

    room   how much memory activations get
    until  how many blocks are passed; None: all
    """
    if not set(targets) - layers.layers.keys() and prepare is None:
        return

    import torch

    from bridge.quantize import quantize_model
    from bridge.quantize.activations import Shelf
    from bridge.quantize.embeddings import embeddings_hessian, quantize_embeddings
    from bridge.quantize.kept_inputs import KeptInputs

    beside = (settings.offload or layers.folder.parent) / layers.folder.name
    with disk_errors(beside, "activations", "folder"), temporary_beside(beside) as folder:
        dtype = torch.bfloat16 if model.stored_in_bfloat16 else None
        todo = set(targets) - layers.layers.keys()
        two_sided = settings.two_sided and bool(todo)
        felt = settings.felt and bool(todo)
        if felt and not layers.has_outputs(todo):
            with Shelf(folder, room.gradients, dtype) as shelf:
                _keep_output_hessians(model, settings, found, todo, shelf, layers)
        spans = partial(_spans, layers)
        embeddings = model.embedding_and_head()[0]
        half = layers.outputs(embeddings) if two_sided and embeddings in todo else None
        if half is not None:
            hessian = embeddings_hessian(embeddings, half.blocks[0], found.tokens.numel())
            quantize_embeddings(model, hessian, quantizer, spans)
        walk = quantize_model(
            model,
            found.tokens,
            quantizer,
            held=found.held,
            feed=settings.feed,
            until=until,
            cross=settings.cross,
            batch=max(1, _TOKENS_AT_ONCE // found.tokens.shape[1]),
            wanted=set(targets).__contains__,
            known=layers.values,
            outputs=layers.outputs if two_sided else lambda name: None,
            weights=layers.weights if felt else lambda names: None,
            offload=folder,
            memory=room.layers,
            dtype=dtype,
            hessians=room.hessians,
            resume=KeptInputs(layers.folder, layers.job) if prepare is None else None,  # which every block has to see
            prepare=prepare,
            embeddings=layers.values_by_rows(embeddings),
            head=True,
            head_spans=spans,
        )
        for _ in walk:
            pass


def spread_layers(
    model: FloatModel,
    settings: Calibration,
    found: Calibrating,
    targets: Collection[str],
    quantize: Callable[[LayerInput], StoredLayer],
    finished: Callable[[StoredLayer], None],
    layers: LayerStore,
    until: int | None,
) -> None:
    """The same on a cluster; `quantize` quantizes a layer there and stores it, `finished` is called with each."""
    import torch

    from bridge.quantize.spread import quantize_spread
    from bridge.quantize.spread_tasks import SpreadJob

    ckpt = model.ckpt
    if type(ckpt) is not Checkpoint:
        raise BridgeError(f"{ckpt.path}: machines share the work on checkpoints only, not on a GGUF")
    job = SpreadJob(
        open=partial(open_by_name, ckpt.path, None if ckpt.home == ckpt.path else ckpt.home),
        quantize=quantize,
        store=layers,
        tokens=found.tokens,
        batch=max(1, _TOKENS_AT_ONCE // found.tokens.shape[1]),
        held=found.held,
        names=frozenset(targets),
        feed=settings.feed,
        cross=settings.cross,
        device=settings.device,
        dtype=model.dtype,
        kept_dtype=torch.bfloat16 if model.stored_in_bfloat16 else None,
        offload=settings.offload,
        two_sided=settings.two_sided,
    )
    if not set(targets) - layers.layers.keys():
        return
    quantize_spread(
        job,
        settings.spread,
        model,
        partial(_spans, layers),
        until=until,
        finished=finished,
    )


def _keep_output_hessians(
    model: FloatModel,
    settings: Calibration,
    found: Calibrating,
    targets: Collection[str],
    shelf: Shelf,
    layers: LayerStore,
) -> None:
    """Keep A of each layer, see `two_sided`, until it is finished, and the tokens' weights."""
    from bridge.quantize.float_model import FloatModel, fast_arithmetic
    from bridge.quantize.forward_passes import output_hessians
    from bridge.quantize.kept_inputs import KeptInputs

    def said(what: str) -> None:
        if settings.progress:
            settings.progress(len(layers.layers), len(layers.layers) + len(targets), f"gradients: {what}")

    said("forward")
    missing = {name for name in targets if not layers.has_outputs([name])}
    resume = KeptInputs(layers.folder, layers.job, "gradients")
    products = settings.two_sided
    model = FloatModel(model.ckpt, fast_arithmetic(model.device), model.device)
    for name, outputs in output_hessians(
        model, found.tokens, shelf, resume=resume, held=found.held_tokens(), norms=layers.save_norms, products=products
    ):
        said(name)
        if name in missing:
            layers.save_outputs(name, outputs if products else None)
            missing.remove(name)
        if not missing:
            break
    for name in missing:
        layers.save_outputs(name, None)
    resume.finish(0)

"""The way back: a GGUF becomes a checkpoint folder, with its codes where the format holds them.

    bridge.export("model.gguf", "folder", "gptq_v2")

Names and row orders are the family's (`gguf_source`), codes and groups come from the blocks (`layer_forms`), and the
folder is written as `quantize --format` writes one. Memory holds some rows of a layer: the headers tell bits and
groups, for which layers are read once before. Of layers whose first rows are packed as they are, the others are taken
to be, and all is written again if they are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.conversion.codes_of_blocks import NotPlain
from bridge.conversion.expert_stacks import in_stacks
from bridge.conversion.gguf_checkpoint import open_source
from bridge.conversion.gguf_config import checked_source, write_config
from bridge.conversion.gguf_source import Assembled, GgufSource, Place
from bridge.conversion.layer_forms import (
    ALL_CODES,
    AS_FLOATS,
    BITS,
    CALIBRATED,
    EXACT,
    ROUNDED,
    Form,
    codes_at,
    common_size,
    form_of,
    is_symmetric,
    lost,
    noise_of,
    slices,
)
from bridge.conversion.mlx_config import mlx_config
from bridge.conversion.paths import files_of
from bridge.conversion.to_checkpoint import calibrate_groups
from bridge.encode.block_words import Room
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, expect_model, read_gguf
from bridge.quantize.checkpoint_writer import CheckpointWriter
from bridge.quantize.settings import Calibration
from bridge.system import compiling
from bridge.system.files import expanded
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.row_threads import thread_limit
from bridge.system.text import align, compile_text, percent, size_text, summarise_notes

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore

FORMATS = ("floats", "gptq", "gptq_v2", "gptq_p", "awq", "compressed-tensors", "mlx", "hqq", "modelopt")
DTYPES = ("F16", "BF16", "F32")
_LAYER = re.compile(r"blk\.\d+\.(attn|ffn)_(?!gate_inp)[a-z_]+\.weight")


@dataclass
class ExportedTensor:
    """What became of a tensor.

    how    EXACT, ALL_CODES (scales rounded), ROUNDED, CALIBRATED or AS_FLOATS
    kind   of the codes: int, NVFP4 or MXFP4
    nmse   squared error over squared weights, of a quantized layer
    share  the error as a share of the type's own noise, where that is known
    """

    name: str
    type: str
    how: str
    bits: int = 0
    group_size: int = 0
    kind: str = "int"
    nmse: float = 0.0
    share: float | None = None


@dataclass
class Exported:
    """A report. `seconds` leaves out the `compile_seconds` of kernels, `nbytes` is the size of the new tensors."""

    out: Path
    format: str
    tensors: list[ExportedTensor]
    nbytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0

    def summary(self) -> str:
        """A row for each type and what became of it."""
        rows: list[tuple[str, ...]] = [("tensors", "type", "becomes", "codes", "NMSE", "of its own noise")]
        groups: dict[tuple[str | int, ...], list[ExportedTensor]] = {}
        for t in self.tensors:
            groups.setdefault((t.type, t.how, t.kind, t.bits, t.group_size), []).append(t)
        for (type, how, kind, bits, size), members in groups.items():
            form = f"{bits} bits" if kind == "int" else str(kind)
            form = f"{form}, groups of {size}" if bits else self.format if self.format == "floats" else "floats"
            worst = max(t.nmse for t in members)
            error = "" if how == AS_FLOATS else "exact" if worst == 0 else f"{worst:.1e}"
            shares = [t.share for t in members if t.share]
            rows.append((str(len(members)), str(type), form, str(how), error, percent(max(shares)) if shares else ""))
        lines = align(rows, (False, True, True, True, False, False))
        lines += [f"note: {note}" for note in summarise_notes(self.notes)]
        took = f"{self.seconds:.1f} s{compile_text(self.compile_seconds)}"
        return "\n".join([*lines, f"{size_text(self.nbytes)} in {took}", f"wrote {self.out}"])


@checked
@thread_limit()
def export(
    model: str | Path,
    out: str | Path,
    format: str = "floats",
    *,
    bits: int | None = None,
    config: str | Path | None = None,
    dtype: str | None = None,
    calibrate: Calibration | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a GGUF as a checkpoint folder.

    model     a GGUF, or any shard of one
    out       the folder to write
    format    "floats", "gptq" (v1), "gptq_v2", "gptq_p" (planar, of GPTQModel: 5 to 7 bits too), "awq" (gemm),
              "compressed-tensors" (pack-quantized, MXFP4, NVFP4), "mlx" (affine, mxfp4, nvfp4), "hqq" or "modelopt"
              (NVFP4). The layers of the decoder's blocks keep their codes where the format holds them, see
              `codes_of_blocks`; the others are rounded, or floats where the format has too few bits. The experts of
              a mixture are stacks in MLX, or floats in families whose stacks mlx-lm does not name, see `mlx_experts`
    bits      that layers have at most: those whose codes take more, and floats, are rounded to them; None: layers have
              those that their codes take, or are rounded to the least that add under 15% of the type's own noise, or 8
              where that is not known
    config    folder with config.json and tokenizer of the model, which are copied; None: they are made of the GGUF's
              metadata, see `gguf_config`. If it is of a model of several parts, the checkpoint is too: the language
              model from the GGUF, the others (vision towers) from the folder's weights, or missing if it has none
    dtype     of floats: "F16", "BF16" or "F32"; None: BF16 if the GGUF has tensors of that type, else F16. In MLX F16,
              as its scales are
    calibrate  the text and the method that layers are quantized with which would else be rounded; their bits and groups
              stay as they are without. Not awq, which scales norms too. Finished layers are stored in the folder
              `<out>.layers` until all is written: a second run continues where an interrupted one stopped
    force     replace an existing checkpoint
    progress  called with (bytes done, all bytes, tensor); while layers are calibrated, that of `calibrate` is

    Raises BridgeError for a damaged GGUF, one whose architecture is unknown or not that of the config, metadata that
    transformers does not convert, a tensor that cannot be separated from others again, and a value that the dtype
    cannot hold.
    """
    started, compiled = compiling.clock(), compiling.seconds()
    if format not in FORMATS:
        raise BridgeError(f"unknown {parameter('format', format)}: choose {', '.join(FORMATS)}")
    if bits is not None and bits not in BITS.get(format, ()):
        known = ", ".join(map(str, BITS.get(format, ())))
        raise BridgeError(f"{parameter('bits', bits)}: {format} has {known or 'no codes that are rounded to'}")
    if dtype not in (None, *DTYPES):
        raise BridgeError(f"unknown {parameter('dtype', dtype)}: choose {', '.join(DTYPES)}")
    if calibrate is not None and format == "floats":
        raise BridgeError(f"{parameter('calibrate')}: floats are not rounded; choose another {parameter('format')}")
    gguf = read_gguf(expanded(model))
    expect_model(gguf.metadata, gguf.files[0])
    if dtype is None:
        dtype = "BF16" if format != "mlx" and any(t.type == "BF16" for t in gguf.tensors.values()) else "F16"
    quantized = format != "floats"
    with ExitStack() as stack:
        if config is None:
            made = Path(stack.enter_context(TemporaryDirectory()))
            write_config(gguf, made)
            source = checked_source(gguf, made, dtype, quantized)
        else:
            source = GgufSource(gguf, expanded(config), dtype, quantized)
        home = None if config is None else expanded(config)
        request = gguf, source, expanded(out), format, bits, calibrate, home, force, progress
        try:
            done = _write(*request, first_rows_tell=True)
        except NotPlain:
            done = _write(*request, first_rows_tell=False)
    done.seconds, done.compile_seconds = compiling.clock() - started, compiling.seconds() - compiled
    return done


def _write(
    gguf: StoredModel,
    source: GgufSource,
    path: Path,
    format: str,
    bits: int | None,
    calibrate: Calibration | None,
    home: Path | None,
    force: bool,
    progress: Progress | None,
    first_rows_tell: bool,
) -> Exported:
    """Write the folder; the times are left to the caller. Raises NotPlain if first rows do not tell what others are."""
    check_folder(source, path, force, [*gguf.files, *files_of(*(calibrate.files if calibrate else []))])
    reports: dict[str, ExportedTensor] = {}
    own_forms: dict[str, Form | None] = {}
    whole: dict[str, Place] = {}
    float_stacks = 0
    for name, place in source.places.items():
        reports[name] = ExportedTensor(name, place.stored.type, AS_FLOATS)
        if format == "floats" or not _LAYER.fullmatch(place.stored.name):
            continue
        if isinstance(place, Place) and len(place.part.shape) == 2:
            own_forms[place.part.module] = form_of(place, format, bits, first_rows_tell)
            whole[place.part.module] = place
        elif isinstance(place, Assembled) and place.places[0].part.matrix is not None:
            float_stacks += 1
    forms = {module: form for module, form in own_forms.items() if form is not None}
    stacks: dict[str, tuple[str, int]] = {}
    if format == "mlx":
        source.config = mlx_config(source.config)
        forms, stacks = in_stacks(str(source.config.get("model_type")), own_forms)
    own_sizes = {form.groups.group_size for form in forms.values()}
    if format == "awq":
        forms = common_size(forms, whole)
    layers = {module: form.groups for module, form in forms.items()}
    if format != "floats" and not layers:
        rounding = (
            f", or {parameter('bits', max(BITS[format]))}, which rounds them" if BITS[format] and not bits else ""
        )
        raise BridgeError(
            f"{gguf.files[0]}: has no layer that {format} holds; choose {parameter('format', 'floats')}{rounding}"
        )
    notes = [*source.notes]
    kept: LayerStore | None = None
    if calibrate is not None:
        kept, said = _calibrated(gguf, home, path, format, forms, calibrate, force)
        forms = {m: replace(form, how=CALIBRATED) if m in kept.layers else form for m, form in forms.items()}
        notes += said
    with CheckpointWriter(
        source,
        path,
        format if layers else "gptq_v2",
        layers,
        stacks=stacks,
        clamp=kept is not None,  # GPTQ v1: a calibrated zero point of 0
        force=force,
        progress=progress,
    ) as writer:
        sums = dict.fromkeys(forms, (0.0, 0.0))
        for module, layer in kept.layers.items() if kept is not None else ():
            codes, every_row = layer.tensor(), (slice(0, whole[module].part.shape[0]),)
            writer.add(codes)
            sums[module] = lost(whole[module], format, forms[module], codes, every_row)
        others = {module: form for module, form in forms.items() if form.how != CALIBRATED}
        for first, tensor, (error, signal) in _layers(whole, others, format):
            writer.add(tensor, first)
            sums[tensor.name] = sums[tensor.name][0] + error, sums[tensor.name][1] + signal
        for module, form in forms.items():
            reports[f"{module}.weight"] = _report(whole[module], form, *sums[module])
        written = writer.finish()
    if kept is not None:
        kept.remove()
    rest = sum(t.how == ROUNDED for t in reports.values())
    if rest:
        offer = "" if format == "awq" else f"; {parameter('calibrate')} quantizes such layers with a text"
        within = f" in {bits} bits" if bits else ""
        notes.append(f"{rest} layers have no codes that {format} holds{within}: rounded{offer}")
    if format == "awq" and len(own_sizes) > 1:
        size = next(iter(layers.values())).group_size
        notes.append(f"all layers have groups of {size}, since AWQ has one size: scales of larger groups are repeated")
    experts = 0 if stacks else sum(".experts." in module for module in own_forms)
    if format == "mlx" and experts:
        notes.append(f"{experts} matrices of experts are floats: mlx-lm has no stacks of codes that hold all of them")
    if float_stacks:
        notes.append(
            f"{float_stacks} stacks of experts are floats: checkpoints of this architecture have them as one tensor"
        )
    return Exported(written.out, format, list(reports.values()), written.nbytes, 0.0, notes)


def _calibrated(
    gguf: StoredModel,
    home: Path | None,
    path: Path,
    format: str,
    forms: Mapping[str, Form],
    calibrate: Calibration,
    force: bool,
) -> tuple[LayerStore, list[str]]:
    """The layers that would be rounded, quantized with a text, and notes.

    home  the folder of config and tokenizer; None: they are made of the metadata
    """
    layers = {module: form.groups for module, form in forms.items() if form.how == ROUNDED}
    if not layers:
        given = parameter("calibrate")
        raise BridgeError(f"{gguf.files[0]}: {format} holds the codes of all its layers; export it without {given}")
    if calibrate.act_order == "free" and not format.startswith("gptq"):
        given = parameter("act_order", "free")
        raise BridgeError(f"{given}: {format} has no column permutation; choose fixed, static or none")
    symmetric = {module for module, groups in layers.items() if is_symmetric(groups.bits, format)}
    with open_source(gguf.files[0], home, by_family=True) as ckpt:
        return calibrate_groups(ckpt, layers, symmetric, calibrate, path, force)


def _layers(
    places: dict[str, Place], forms: dict[str, Form], format: str
) -> Iterator[tuple[int, GroupedTensor | PackedTensor, tuple[float, float]]]:
    """Rows of layers: how many came before, codes, and `lost`. While some are written, the next are made."""

    def made(
        module: str, runs: tuple[slice, ...], room: Room
    ) -> tuple[int, GroupedTensor | PackedTensor, tuple[float, float]]:
        place, form = places[module], forms[module]
        tensor = codes_at(place, format, form, runs, room)
        return runs[0].start * len(runs), tensor, lost(place, format, form, tensor, runs)

    work = ((name, runs) for name, form in forms.items() for runs in slices(places[name].part.shape, format, form))
    with ThreadPoolExecutor(1) as thread:
        ahead: Future[tuple[int, GroupedTensor | PackedTensor, tuple[float, float]]] | None = None
        for (module, runs), room in zip(work, cycle((Room(), Room()))):
            following = thread.submit(made, module, runs, room)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _report(place: Place, form: Form, error: float, signal: float) -> ExportedTensor:
    """What became of a layer. Blocks that are written as they are need not be compared."""
    groups, how = form.groups, form.how
    noise = noise_of(place) if how == ROUNDED else None  # calibrated weights move on purpose
    return ExportedTensor(
        f"{place.part.module}.weight",
        place.stored.type,
        ALL_CODES if how == EXACT and error else how,
        groups.bits,
        groups.group_size,
        groups.kind,
        error / signal if signal else 0.0,
        error / noise if noise else None,
    )

"""The way back: a GGUF becomes a checkpoint folder, with its codes where the format holds them.

    bridge.export("model.gguf", "folder", "gptq_v2")

Names and row orders are the family's (`gguf_source`), codes and groups come from the blocks (`layer_plan`), and the
folder is written as `quantize --format` writes one. Memory holds some rows of a layer: the headers tell bits and
groups, for which layers are read once before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.files.hub import resolve_gguf
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.checkpoint.write.writer import CheckpointWriter
from bridge.conversion.checkpoints import layer_plan
from bridge.conversion.checkpoints.checkpoint_plan import CheckpointPlan
from bridge.conversion.checkpoints.layer_plan import ALL_CODES, AS_FLOATS, CALIBRATED, EXACT, ROUNDED, LayerCodes, Rows
from bridge.conversion.checkpoints.to_checkpoint import group_rounding
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.gguf_input.gguf_config import checked_source, write_config
from bridge.conversion.gguf_input.gguf_source import GgufSource
from bridge.conversion.paths import files_of, layers_of
from bridge.errors import BridgeError, parameter, refused
from bridge.gguf_file.reader import StoredModel, expect_model, read_gguf
from bridge.quantize.run.calibrate import LayerTarget, quantize_layers
from bridge.quantize.run.calibration_text import with_length
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import compiling
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.report import FolderReport
from bridge.system.storage.files import expanded
from bridge.system.text import align, percent

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore

DTYPES = ("F16", "BF16", "F32")


@dataclass
class ExportedTensor:
    name: str
    type: str
    how: str  # EXACT, ALL_CODES (scales rounded), ROUNDED, CALIBRATED or AS_FLOATS
    bits: int = 0
    group_size: int = 0
    kind: str = "int"  # of the codes: int, NVFP4 or MXFP4
    nmse: float = 0.0  # squared error over squared weights, of a quantized layer
    share: float | None = None  # the error as a share of the type's own noise, where that is known


@dataclass(repr=False)
class Exported(FolderReport):
    """The report of a GGUF that became a checkpoint folder."""

    tensors: list[ExportedTensor]

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
        return self.printed(lines, size=self.size_and_time())


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
              (NVFP4). The linear layers of the decoder's blocks keep their codes where the format holds them, see
              `codes_of_blocks`; the others are rounded, or floats where the format has too few bits. Routers stay
              floats. The experts of a mixture are stacks in MLX, or floats in families whose stacks mlx-lm does not
              name, see `mlx_models`
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
    if format not in ("floats", *FORMATS):
        raise BridgeError(f"unknown {parameter('format', format)}: choose floats, {', '.join(FORMATS)}")
    written = FORMATS.get(format)
    if bits is not None and (written is None or bits not in written.bits):
        known = ", ".join(map(str, written.bits if written else ()))
        raise refused("bits", bits, f"{format} has {known or 'no codes that are rounded to'}")
    if dtype not in (None, *DTYPES):
        raise BridgeError(f"unknown {parameter('dtype', dtype)}: choose {', '.join(DTYPES)}")
    if calibrate is not None and written is None:
        raise refused("calibrate", None, f"floats are not rounded; choose another {parameter('format')}")
    gguf = read_gguf(resolve_gguf(model))
    expect_model(gguf.metadata, gguf.files[0])
    if dtype is None:
        dtype = "BF16" if any(tensor.type == "BF16" for tensor in gguf.tensors.values()) else "F16"
        dtype = (written and written.dtype) or dtype
    path, home = expanded(out), None if config is None else expanded(config)
    with ExitStack() as stack:
        if home is None:
            temporary = Path(stack.enter_context(TemporaryDirectory()))
            write_config(gguf, temporary)
            source = checked_source(gguf, temporary, dtype, quantized=written is not None)
        else:
            source = GgufSource(gguf, home, dtype, quantized=written is not None)
        check_folder(source, path, force, [*gguf.files, *files_of(*(calibrate.files if calibrate else []))])
        reports = {name: ExportedTensor(name, tensor.stored.type, AS_FLOATS) for name, tensor in source.sources.items()}
        notes, stored, plan = [*source.notes], None, None
        if written is not None:
            plan = _planned(gguf, source, written, bits)
            if calibrate is not None:
                stored, more = _calibrated(gguf, home, path, plan, calibrate, force)
                notes += more
            notes += plan.notes()
        with CheckpointWriter(
            source,
            path,
            format if plan else None,
            {module: layer.groups for module, layer in plan.layers.items()} if plan else {},
            stacks=plan.stacks if plan else {},
            clamp=stored is not None,  # GPTQ v1: a calibrated zero point of 0
            force=force,
            progress=progress,
        ) as writer:
            if plan is not None:
                reports |= {report.name: report for report in _write_all(writer, plan, stored)}
            done = writer.finish()
    if stored is not None:
        stored.remove()
    compiled, seconds, tensors = compiling.seconds() - compiled, compiling.clock() - started, list(reports.values())
    return Exported(done.outputs, seconds, done.format, done.nbytes, tensors, compile_seconds=compiled, notes=notes)


def _planned(gguf: StoredModel, source: GgufSource, written: WrittenFormat, bits: int | None) -> CheckpointPlan:
    """What becomes of the layers; the config of `source` becomes the format's. Raises BridgeError if all are floats."""
    plan = CheckpointPlan(source, written, bits)
    source.config = written.config(source.config)
    if not plan.layers:
        widest = f", or {parameter('bits', written.bits[-1])}, which rounds them" if written.bits and not bits else ""
        floats = parameter("format", "floats")
        raise BridgeError(f"{gguf.files[0]}: has no layer that {written.name} holds; choose {floats}{widest}")
    return plan


def _calibrated(
    gguf: StoredModel, home: Path | None, path: Path, plan: CheckpointPlan, calibrate: Calibration, force: bool
) -> tuple[LayerStore, list[str]]:
    """The layers that would be rounded, quantized with a text, and notes; `plan` becomes theirs.

    home  the folder of config and tokenizer; None: they are made of the metadata
    """
    written = plan.written
    layers = {module: layer.groups for module, layer in plan.layers.items() if layer.how == ROUNDED}
    if not layers:
        why = f"{written.name} holds the codes of all its layers; export it without {parameter('calibrate')}"
        raise BridgeError(f"{gguf.files[0]}: {why}")
    if calibrate.act_order == "free" and not written.act_order:
        raise refused("act_order", "free", f"{written.name} has no column permutation; choose fixed, static or none")
    symmetric = {module for module, groups in layers.items() if layer_plan.is_symmetric(groups.bits, written)}
    with open_source(gguf.files[0], home, by_family=True) as ckpt:
        if calibrate.method == "awq":
            why = "changes norms too, which an export keeps; choose two-sided, gptaq, gptq or rtn"
            raise refused("method", "awq", why)
        calibrate.check_checkpoint()
        if calibrate.blocks is not None:
            raise refused("blocks", calibrate.blocks, "an export calibrates all blocks in one run")
        calibrate, notes = with_length(ckpt, calibrate)
        targets = {n: LayerTarget(*group_rounding(groups, n in symmetric, calibrate)) for n, groups in layers.items()}
        stored, more = quantize_layers(ckpt, calibrate, targets, layers_of(path), force)
    for module in stored.layers:
        plan.layers[module] = replace(plan.layers[module], how=CALIBRATED)
    return stored, [*notes, *more]


def _write_all(writer: CheckpointWriter, plan: CheckpointPlan, stored: LayerStore | None) -> Iterator[ExportedTensor]:
    layers = {module: LayerCodes(plan.sources[module], plan.written, layer) for module, layer in plan.layers.items()}
    sums = dict.fromkeys(layers, (0.0, 0.0))
    calibrated = stored.layers if stored is not None else {}
    for module, layer in calibrated.items():
        codes = layer.tensor()
        writer.add(codes)
        sums[module] = layers[module].squared_errors(codes, (slice(0, codes.shape[0]),))
    for first, tensor, (error, signal) in _rows_of([layers[module] for module in layers if module not in calibrated]):
        writer.add(tensor, first)
        sums[tensor.name] = sums[tensor.name][0] + error, sums[tensor.name][1] + signal
    return (_report(layer, *sums[module]) for module, layer in layers.items())


_Written = tuple[int, GroupedTensor | PackedTensor, tuple[float, float]]


def _rows_of(layers: Iterable[LayerCodes]) -> Iterator[_Written]:
    """Rows of layers: how many came before, codes, and squared errors. While some are written, the next are made."""

    def codes(layer: LayerCodes, rows: Rows, arrays: ReusedArrays) -> _Written:
        tensor = layer.codes(rows, arrays)
        return rows[0].start * len(rows), tensor, layer.squared_errors(tensor, rows)

    work = ((layer, rows) for layer in layers for rows in layer.runs())
    with ThreadPoolExecutor(1) as thread:
        ahead: Future[_Written] | None = None
        for (layer, rows), arrays in zip(work, cycle((ReusedArrays(), ReusedArrays()))):
            following = thread.submit(codes, layer, rows, arrays)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _report(layer: LayerCodes, error: float, signal: float) -> ExportedTensor:
    """What became of a layer. Blocks that are written as they are need not be compared."""
    source, groups, how = layer.source, layer.plan.groups, layer.plan.how
    noise = layer_plan.noise_of(source) if how == ROUNDED else None  # calibrated weights move on purpose
    return ExportedTensor(
        f"{source.part.module}.weight", source.stored.type, ALL_CODES if how == EXACT and error else how, groups.bits,
        groups.group_size, groups.kind, error / signal if signal else 0.0, error / noise if noise else None,
    )  # fmt: skip

"""The way back: a GGUF becomes a checkpoint folder, with its codes where the format holds them.

    bridge.export("model.gguf", "folder", "gptq_v2")

Names and row orders are the family's (`gguf_source`), codes and groups come from the blocks (`codes_of_blocks`), and
the folder is written as `quantize --format` writes one. No layer stays in memory: the headers tell bits and groups, for
which layers are read once before. Of layers whose first rows are packed as they are, the others are taken to be, and
all is written again if they are not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bridge.blocks import TYPES
from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.formats.fp4_layouts import fp4_obstacle
from bridge.checkpoint.formats.layouts import (
    GPTQ_BITS,
    HQQ_BITS,
    HQQ_SIZES,
    MLX_BITS,
    MLX_SIZES,
    PLANAR_BITS,
    mlx_biases,
)
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.conversion.codes_of_blocks import (
    NotPlain,
    codes_of,
    fp4_of,
    fp4_scales,
    is_plain,
    own_noise,
    packed_of,
    regrouped,
    rounded,
)
from bridge.conversion.gguf_config import checked_source, write_config
from bridge.conversion.gguf_source import Assembled, GgufSource, Place
from bridge.encode.block_words import TILE, TYPES_IN_WORDS, Room
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, read_gguf
from bridge.quantize.checkpoint_writer import CheckpointWriter, Groups, refusal
from bridge.runtime.cpu.dequantize import FLOATS
from bridge.system.files import expanded
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.text import align, percent, size_text

FORMATS = ("floats", "gptq", "gptq_v2", "gptq_p", "awq", "compressed-tensors", "mlx", "hqq", "modelopt")
BITS: dict[str, tuple[int, ...]] = {
    "gptq": GPTQ_BITS, "gptq_v2": GPTQ_BITS, "gptq_p": PLANAR_BITS, "awq": (4,), "compressed-tensors": (4, 8),
    "mlx": MLX_BITS, "hqq": HQQ_BITS, "modelopt": (),
}  # fmt: skip
DTYPES = ("F16", "BF16", "F32")
EXACT, ALL_CODES, ROUNDED, AS_FLOATS = "exact", "all codes", "rounded", "floats"
_OFFSET_SIZES = {"mlx": MLX_SIZES, "hqq": HQQ_SIZES}  # formats with any zero points, and their group sizes
_IN_WORDS = ("gptq", "gptq_v2", "gptq_p", "compressed-tensors", "mlx")  # formats that pack consecutive codes
_AT_ONCE = 1 << 20  # values of a layer that are rounded or compared
_LAYER = re.compile(r"blk\.\d+\.(attn|ffn)_(?!gate_inp)[a-z_]+\.weight")


@dataclass
class ExportedTensor:
    """What became of a tensor.

    how    EXACT, ALL_CODES (scales rounded), ROUNDED or AS_FLOATS
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
    """A report. `seconds` is all of the time that it took, `nbytes` the size of the new tensors."""

    out: Path
    format: str
    tensors: list[ExportedTensor]
    nbytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)

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
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, f"{size_text(self.nbytes)} in {self.seconds:.1f} s", f"wrote {self.out}"])


@checked
def export(
    model: str | Path,
    out: str | Path,
    format: str = "floats",
    *,
    bits: int | None = None,
    config: str | Path | None = None,
    dtype: str | None = None,
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
              a mixture are floats in MLX, which mlx-lm stacks itself
    bits      of layers that are rounded; None: the least of the format's that add under 15% of the type's own noise, 8
              where that is not known
    config    folder with config.json and tokenizer of the model, which are copied; None: they are made of the GGUF's
              metadata, see `gguf_config`. If it is of a model of several parts, the checkpoint is too: the language
              model from the GGUF, the others (vision towers) from the folder's weights, or missing if it has none
    dtype     of floats: "F16", "BF16" or "F32"; None: BF16 if the GGUF has tensors of that type, else F16. In MLX F16,
              as its scales are
    force     replace an existing checkpoint
    progress  called with (bytes done, all bytes, tensor)

    Raises BridgeError for a damaged GGUF, one whose architecture is unknown or not that of the config, metadata that
    transformers does not convert, a tensor that cannot be separated from others again, and a value that the dtype
    cannot hold.
    """
    started = time.perf_counter()
    if format not in FORMATS:
        raise BridgeError(f"unknown {parameter('format', format)}: choose {', '.join(FORMATS)}")
    if bits is not None and bits not in BITS.get(format, ()):
        known = ", ".join(map(str, BITS.get(format, ())))
        raise BridgeError(f"{parameter('bits', bits)}: {format} has {known or 'no codes that are rounded to'}")
    if dtype not in (None, *DTYPES):
        raise BridgeError(f"unknown {parameter('dtype', dtype)}: choose {', '.join(DTYPES)}")
    gguf = read_gguf(expanded(model))
    if dtype is None:
        dtype = "BF16" if format != "mlx" and any(t.type == "BF16" for t in gguf.tensors.values()) else "F16"
    quantized = format != "floats"
    with ExitStack() as stack:
        if config is None:
            home = Path(stack.enter_context(TemporaryDirectory()))
            write_config(gguf, home)
            source = checked_source(gguf, home, dtype, quantized)
        else:
            source = GgufSource(gguf, expanded(config), dtype, quantized)
        request = gguf, source, expanded(out), format, bits, force, progress
        try:
            done = _write(*request, first_rows_tell=True)
        except NotPlain:
            done = _write(*request, first_rows_tell=False)
    done.seconds = time.perf_counter() - started
    return done


@dataclass(frozen=True)
class _Form:
    """How a layer is written, which its data tells: what becomes of it, and how the format describes it.

    offsets  zero points are not whole numbers
    packed   codes and scales of the blocks are the format's, see `packed_of`
    """

    how: str
    groups: Groups
    offsets: bool = False
    packed: bool = False


def _write(
    gguf: StoredModel,
    source: GgufSource,
    path: Path,
    format: str,
    bits: int | None,
    force: bool,
    progress: Progress | None,
    first_rows_tell: bool,
) -> Exported:
    """Write the folder; `seconds` is left to the caller. Raises NotPlain if first rows do not tell what others are."""
    check_folder(source, path, force, gguf.files)
    reports: dict[str, ExportedTensor] = {}
    forms: dict[str, _Form] = {}
    whole: dict[str, Place] = {}
    stacks = 0
    for name, place in source.places.items():
        reports[name] = ExportedTensor(name, place.stored.type, AS_FLOATS)
        if format == "floats" or not _LAYER.fullmatch(place.stored.name):
            continue
        if isinstance(place, Place) and len(place.part.shape) == 2:
            form = _form(place, format, bits, first_rows_tell)
            if form is not None:
                forms[place.part.module] = form
                whole[place.part.module] = place
        elif isinstance(place, Assembled) and place.places[0].part.matrix is not None:
            stacks += 1
    layers = {module: form.groups for module, form in forms.items()}
    if format != "floats" and not layers:
        rounding = (
            f", or {parameter('bits', max(BITS[format]))}, which rounds them" if BITS[format] and not bits else ""
        )
        raise BridgeError(
            f"{gguf.files[0]}: has no layer that {format} holds; choose {parameter('format', 'floats')}{rounding}"
        )
    if format == "awq" and len(set(layers.values())) > 1:
        sizes = " and ".join(sorted({str(groups.group_size) for groups in layers.values()}))
        raise BridgeError(f"{gguf.files[0]}: has groups of {sizes}, but AWQ has one size for all; choose gptq_v2")
    with CheckpointWriter(
        source, path, format if layers else "gptq_v2", layers, force=force, progress=progress
    ) as writer:
        for module, tensor, report in _layers(whole, forms, format):
            writer.add(tensor)
            reports[f"{module}.weight"] = report
        written = writer.finish()
    rest = sum(t.how == ROUNDED for t in reports.values())
    notes = [*source.notes]
    if rest:
        notes.append(f"{rest} layers have no codes that {format} holds: rounded")
    if stacks:
        notes.append(f"{stacks} stacks of experts are floats: checkpoints of this architecture have them as one tensor")
    return Exported(written.out, format, list(reports.values()), written.nbytes, 0.0, notes)


def _layers(
    places: dict[str, Place], forms: dict[str, _Form], format: str
) -> Iterator[tuple[str, GroupedTensor | PackedTensor, ExportedTensor]]:
    """Layers and what became of them; while one is written, the next is made."""

    def made(module: str, form: _Form, room: Room) -> tuple[str, GroupedTensor | PackedTensor, ExportedTensor]:
        place = places[module]
        tensor = _tensor(place, format, form, room)
        return module, tensor, _report(place, tensor, form, format)

    with ThreadPoolExecutor(1) as thread:
        ahead: Future[tuple[str, GroupedTensor | PackedTensor, ExportedTensor]] | None = None
        for (module, form), room in zip(forms.items(), cycle((Room(), Room()))):
            following = thread.submit(made, module, form, room)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _form(place: Place, format: str, bits: int | None, first_rows_tell: bool) -> _Form | None:
    """What a layer becomes in a format; None if it stays in floats.

    bits             those that it is rounded to, if it is
    first_rows_tell  whether its blocks are packed as they are
    """
    type, shape = place.stored.type, (place.part.shape[0], place.part.shape[1])
    if place.part.change is not None or type in FLOATS:
        return None
    if format == "mlx" and len(place.tensor.parts) > 1:
        return None
    first = fp4_of(place.part.module, type, place.raw(slice(1), ordered=False), place.scale)
    if (
        first is not None
        and fp4_obstacle(format, first) is None
        and (
            first_rows_tell
            or all(fp4_scales(type, place.raw(rows, ordered=False)) is not None for rows in _runs(shape))
        )
    ):
        return _Form(EXACT, Groups(4, first.group_size, True, first.kind), packed=True)
    for offsets in (False, True) if format in _OFFSET_SIZES else (False,):
        found = _coded_form(place, format, offsets, first_rows_tell)
        if found is not None:
            break
    else:
        found = _rounded_form(place, format, bits)
    return None if found is None or refusal(format, found.groups, shape) else found


def _coded_form(place: Place, format: str, offsets: bool, first_rows_tell: bool) -> _Form | None:
    """Bits and groups of a layer that keeps its codes; None where the format does not hold them.

    Of a plain type, some rows tell both mostly; the others are only looked through for scales that do not fit, or not
    at all with `first_rows_tell`.
    """
    type, shape = place.stored.type, (place.part.shape[0], place.part.shape[1])
    block, width, size, middle, plain = TYPES.get(type), 0, shape[1], True, True
    if block is None:
        return None
    own = (block.levels - 1).bit_length(), block.sub
    in_words = type in TYPES_IN_WORDS and format in _IN_WORDS
    most = next((n for n in BITS[format] if n >= own[0]), 0)
    for rows in _runs(shape, first=16):
        if rows.start and plain and in_words and first_rows_tell and (width, size) == own:
            break
        raw = place.raw(rows, ordered=False)
        plain &= is_plain(type, raw)
        if (width, size) == (most, block.sub) and plain:
            continue
        tensor = _coded("", type, raw, format, BITS[format], offsets)
        if tensor is None:
            return None
        width, size = max(width, tensor.bits), min(size, tensor.group_size)
        middle &= bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
    packed = plain and in_words and (width, size) == own
    return _Form(EXACT, _groups(width, size, middle, shape, format), offsets, packed)


def _coded(
    name: str, type: str, raw: np.ndarray, format: str, bits: tuple[int, ...], offsets: bool
) -> GroupedTensor | None:
    """The codes of blocks in groups that a format has; None where it does not hold them."""
    tensor = codes_of(name, type, raw, bits, offsets)
    if tensor is not None and format in _OFFSET_SIZES:
        tensor = regrouped(tensor, _OFFSET_SIZES[format])
        if tensor is not None and not np.isfinite(mlx_biases(tensor)).all():
            return None
    if tensor is None or not np.isfinite(tensor.scales).all() or (format == "gptq" and (tensor.zeros == 0).any()):
        return None
    return tensor


def _rounded_form(place: Place, format: str, bits: int | None) -> _Form | None:
    """Bits of a layer that is rounded to nearest; None where the format has too few, or groups of 32 do not fit."""
    shape = place.part.shape[0], place.part.shape[1]
    if shape[1] % 32:
        return None
    noise = own_noise(place.stored.type, place.raw())
    limit = REQUANTIZED_LIMIT * noise if noise is not None and bits is None else np.inf
    for width in BITS[format] if bits is None else (bits,):
        if bits is None and width < 8 and noise is None:
            continue
        error, finite = 0.0, True
        for rows in _runs(shape):
            weights = place.floats(rows)
            found = _rounded(place.part.module, weights, width, format)
            finite &= bool(np.isfinite(found.scales).all())
            error += float(np.square(found.dequantize() - weights, dtype=np.float64).sum())
            if width < 8 and not error <= limit:
                break
        if finite and (width == 8 or error <= limit):
            return _Form(ROUNDED, _groups(width, 32, _is_symmetric(width, format), shape, format))
    return None


def _is_symmetric(bits: int, format: str) -> bool:
    """Whether layers are rounded around the middle: below 8 bits they have zero points, but for compressed-tensors,
    which transformers does not load with them."""
    return bits == 8 or format == "compressed-tensors"


def _rounded(name: str, weights: np.ndarray, bits: int, format: str) -> GroupedTensor:
    """Weights rounded to nearest, in groups of 32."""
    return rounded(name, weights, bits, _is_symmetric(bits, format), least=format == "gptq")


def _groups(bits: int, size: int, middle: bool, shape: tuple[int, int], format: str) -> Groups:
    """How a format describes a layer; `middle`: all zero points are the middle of the codes."""
    whole = 32 < size == shape[1] and format not in _OFFSET_SIZES  # rows of 32 are groups as other layers have
    return Groups(bits, -1 if whole else size, format == "compressed-tensors" and middle)


def _tensor(place: Place, format: str, form: _Form, room: Room) -> GroupedTensor | PackedTensor:
    """A layer in the form that was found."""
    module, shape = place.part.module, (place.part.shape[0], place.part.shape[1])
    if form.how == ROUNDED:
        parts = [_rounded(module, place.floats(rows), form.groups.bits, format) for rows in _runs(shape)]
        codes, scales, zeros = (
            np.concatenate(x) for x in zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True)
        )
        return replace(parts[0], codes=codes, scales=scales, zeros=zeros)
    if form.packed:
        pieces = (place.raw(rows) for rows in _runs(shape)) if place.part.rows is None else (place.raw(),)
        return packed_of(module, place.stored.type, pieces, shape, place.scale, format.startswith("gptq"), room)
    found = _coded(module, place.stored.type, place.raw(), format, (form.groups.bits,), form.offsets)
    assert found is not None  # `_form` looked through all rows
    return found


def _report(place: Place, tensor: GroupedTensor | PackedTensor, form: _Form, format: str) -> ExportedTensor:
    """What became of a layer. Blocks that are written as they are need not be compared."""
    type, groups, how = place.stored.type, form.groups, form.how
    error, signal, share = 0.0, 0.0, None
    if isinstance(tensor, GroupedTensor) and (how == ROUNDED or _is_changed(type, format)):
        for rows in _runs((place.part.shape[0], place.part.shape[1])):
            weights = place.floats(rows)
            error += float(np.square(_held(tensor, format, rows) - weights, dtype=np.float64).sum())
            signal += float(np.square(weights, dtype=np.float64).sum())
        noise = own_noise(type, place.raw()) if how == ROUNDED else None
        share = error / noise if noise else None
    return ExportedTensor(
        f"{place.part.module}.weight",
        type,
        ALL_CODES if how == EXACT and error else how,
        groups.bits,
        groups.group_size,
        groups.kind,
        error / signal if signal else 0.0,
        share,
    )


def _is_changed(type: str, format: str) -> bool:
    """Whether a format rounds the scales or offsets of a type whose codes it holds."""
    return TYPES[type].is_k or (TYPES[type].has_min and format != "mlx")


def _held(tensor: GroupedTensor, format: str, rows: slice) -> np.ndarray:
    """float32 of some rows of a layer as the checkpoint has it."""
    if format not in _OFFSET_SIZES:
        return tensor.dequantize(rows)
    scales = tensor.scales[rows].astype(np.float32)
    codes, scales = tensor.codes[rows], np.repeat(scales, tensor.group_size, 1)
    if format == "mlx":
        return codes * scales + np.repeat(mlx_biases(tensor)[rows].astype(np.float32), tensor.group_size, 1)
    zeros = tensor.zeros[rows].astype(np.float16).astype(np.float32)
    return (codes - np.repeat(zeros, tensor.group_size, 1)) * scales


def _runs(shape: tuple[int, int], first: int | None = None) -> Iterator[slice]:
    """Slices of rows of about a million values that cover a matrix, whole tiles; `first`: rows of the first."""
    step, start = max(TILE, _AT_ONCE // shape[1] // TILE * TILE), 0
    while start < shape[0]:
        stop = min(start + (min(first, step) if first and start == 0 else step), shape[0])
        yield slice(start, stop)
        start = stop

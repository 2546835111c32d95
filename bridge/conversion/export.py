"""The way back: a GGUF becomes a checkpoint folder, with its codes where the format holds them.

    bridge.export("model.gguf", "folder", "gptq_v2")

Names and row orders are the family's (`gguf_source`), codes and groups come from the blocks (`codes_of_blocks`), and
the folder is written as `quantize --format` writes one. Layers are read twice, once for the headers: none stays in
memory.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.fp4_layouts import fp4_obstacle
from bridge.checkpoint.formats.layouts import GPTQ_BITS, HQQ_BITS, HQQ_SIZES, MLX_BITS, MLX_SIZES, mlx_biases
from bridge.checkpoint.grouped import GroupedTensor
from bridge.conversion.codes_of_blocks import codes_of, fp4_of, own_noise, regrouped, rounded
from bridge.conversion.gguf_config import checked_source, write_config
from bridge.conversion.gguf_source import GgufSource, Place
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, read_gguf
from bridge.quantize.checkpoint_writer import CheckpointWriter, Groups, refusal
from bridge.system.files import expanded
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.text import align, percent, size_text

FORMATS = ("floats", "gptq", "gptq_v2", "awq", "compressed-tensors", "mlx", "hqq", "modelopt")
BITS: dict[str, tuple[int, ...]] = {
    "gptq": GPTQ_BITS, "gptq_v2": GPTQ_BITS, "awq": (4,), "compressed-tensors": (4, 8), "mlx": MLX_BITS,
    "hqq": HQQ_BITS, "modelopt": (),
}  # fmt: skip
DTYPES = ("F16", "BF16", "F32")
EXACT, ALL_CODES, ROUNDED, AS_FLOATS = "exact", "all codes", "rounded", "floats"
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
    format    "floats", "gptq" (v1), "gptq_v2", "awq" (gemm), "compressed-tensors" (pack-quantized, MXFP4, NVFP4), "mlx"
              (affine, mxfp4, nvfp4), "hqq" or "modelopt" (NVFP4). The layers of the decoder's blocks keep their codes
              where the format holds them, see `codes_of_blocks`; the others are rounded, or floats where the
              format has too few bits. The experts of a mixture are floats in MLX, which mlx-lm stacks itself
    bits      of layers that are rounded; None: the least of the format's that add under 15% of the type's own noise, 8
              where that is not known
    config    folder with config.json and tokenizer of the model, which are copied; None: transformers makes them of
              the GGUF's metadata, see `gguf_config`
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
    with ExitStack() as stack:
        if config is None:
            home = Path(stack.enter_context(TemporaryDirectory()))
            write_config(gguf, home)
            source = checked_source(gguf, home, dtype)
        else:
            source = GgufSource(gguf, expanded(config), dtype)
        done = _write(gguf, source, expanded(out), format, bits, force, progress)
    done.seconds = time.perf_counter() - started
    return done


@dataclass(frozen=True)
class _Layer:
    """A layer in a format: what is written, how it came to that, and how the format describes it."""

    tensor: GroupedTensor | Fp4Tensor
    how: str
    groups: Groups


def _write(
    gguf: StoredModel,
    source: GgufSource,
    path: Path,
    format: str,
    bits: int | None,
    force: bool,
    progress: Progress | None,
) -> Exported:
    """Write the folder; `seconds` is left to the caller."""
    check_folder(source, path, force, gguf.files)
    reports: dict[str, ExportedTensor] = {}
    layers: dict[str, Groups] = {}
    for name, place in source.places.items():
        reports[name] = ExportedTensor(name, place.stored.type, AS_FLOATS)
        if format != "floats" and _LAYER.fullmatch(place.stored.name) and len(place.part.shape) == 2:
            layer = _layer(place, format, bits)
            if layer is not None:
                layers[place.part.module] = layer.groups
                reports[name] = _report(name, place, layer, format)
    if format != "floats" and not layers:
        raise BridgeError(f"{gguf.files[0]}: has no layer that {format} holds; choose {parameter('format', 'floats')}")
    if format == "awq" and len(set(layers.values())) > 1:
        sizes = " and ".join(sorted({str(groups.group_size) for groups in layers.values()}))
        raise BridgeError(f"{gguf.files[0]}: has groups of {sizes}, but AWQ has one size for all; choose gptq_v2")
    with CheckpointWriter(
        source, path, format if layers else "gptq_v2", layers, force=force, progress=progress
    ) as writer:
        for module, groups in layers.items():
            again = _layer(source.places[f"{module}.weight"], format, groups.bits)
            assert again is not None  # it was found above
            writer.add(again.tensor)
        written = writer.finish()
    rest = sum(t.how == ROUNDED for t in reports.values())
    notes = [f"{rest} layers have no codes that {format} holds: rounded"] if rest else []
    return Exported(written.out, format, list(reports.values()), written.nbytes, 0.0, notes)


def _layer(place: Place, format: str, bits: int | None) -> _Layer | None:
    """A layer in a format; None if it stays in floats. `bits`: those that it is rounded to, if it is."""
    module, shape = place.part.module, (place.part.shape[0], place.part.shape[1])
    if place.part.change is not None or place.stored.type in ("F32", "F16", "BF16", "F64"):
        return None
    if format == "mlx" and len(place.tensor.parts) > 1:
        return None
    raw = np.ascontiguousarray(place.raw())
    floats = fp4_of(module, place.stored.type, raw, place.scale)
    if floats is not None and fp4_obstacle(format, floats) is None:
        return _Layer(floats, EXACT, Groups(4, floats.group_size, True, floats.kind))
    tensor, how = codes_of(module, place.stored.type, raw, BITS[format]), EXACT
    if format in ("mlx", "hqq"):
        sizes = MLX_SIZES if format == "mlx" else HQQ_SIZES
        tensor = tensor and regrouped(tensor, sizes)
        if tensor is None:
            tensor = codes_of(module, place.stored.type, raw, BITS[format], offsets=True)
            tensor = tensor and regrouped(tensor, sizes)
        if tensor is not None and not np.isfinite(mlx_biases(tensor)).all():
            tensor = None
    if tensor is None or not np.isfinite(tensor.scales).all() or (format == "gptq" and (tensor.zeros == 0).any()):
        tensor, how = _rounded(place, raw, format, bits), ROUNDED
    if tensor is None:
        return None
    size = tensor.group_size if tensor.group_size < shape[1] or format in ("mlx", "hqq") else -1
    middle = bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
    groups = Groups(tensor.bits, size, format == "compressed-tensors" and middle)
    return None if refusal(format, groups, shape) else _Layer(tensor, how, groups)


def _rounded(place: Place, raw: np.ndarray, format: str, bits: int | None) -> GroupedTensor | None:
    """A layer rounded to nearest; None where the format has too few bits, or groups of 32 do not fit.

    Below 8 bits, groups have zero points, but for compressed-tensors, which transformers does not load with them.
    """
    if place.part.shape[1] % 32:
        return None
    weights, noise = place.floats(), own_noise(place.stored.type, raw)
    limit = REQUANTIZED_LIMIT * noise if noise is not None else None
    for width in BITS[format] if bits is None else (bits,):
        if bits is None and width < 8 and limit is None:
            continue
        symmetric = width == 8 or format == "compressed-tensors"
        found = rounded(place.part.module, weights, width, symmetric, least=format == "gptq")
        fits = limit is None or np.square(found.dequantize() - weights, dtype=np.float64).sum() <= limit
        if np.isfinite(found.scales).all() and (fits or width == 8 or bits is not None):
            return found
    return None


def _report(name: str, place: Place, layer: _Layer, format: str) -> ExportedTensor:
    """What became of a layer."""
    tensor, groups, how = layer.tensor, layer.groups, layer.how
    weights, noise = place.floats(), own_noise(place.stored.type, np.ascontiguousarray(place.raw()))
    error = float(np.square(_held(tensor, format) - weights, dtype=np.float64).sum())
    signal = float(np.square(weights, dtype=np.float64).sum())
    return ExportedTensor(
        name,
        place.stored.type,
        ALL_CODES if how == EXACT and error else how,
        groups.bits,
        groups.group_size,
        groups.kind,
        error / signal if signal else 0.0,
        error / noise if noise and how == ROUNDED else None,
    )


def _held(tensor: GroupedTensor | Fp4Tensor, format: str) -> np.ndarray:
    """float32 of a layer as the checkpoint has it."""
    if isinstance(tensor, Fp4Tensor) or format not in ("mlx", "hqq"):
        return tensor.dequantize()
    scales = np.repeat(tensor.scales.astype(np.float32), tensor.group_size, 1)
    if format == "mlx":
        return tensor.codes * scales + np.repeat(mlx_biases(tensor).astype(np.float32), tensor.group_size, 1)
    return (tensor.codes - np.repeat(tensor.zeros.astype(np.float16).astype(np.float32), tensor.group_size, 1)) * scales

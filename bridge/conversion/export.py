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
from bridge.checkpoint.formats.layouts import GPTQ_BITS, MLX_BITS, MLX_SIZES, mlx_biases
from bridge.checkpoint.grouped import GroupedTensor
from bridge.conversion.codes_of_blocks import codes_of, regrouped, rounded
from bridge.conversion.gguf_config import checked_source, write_config
from bridge.conversion.gguf_source import GgufSource, Place
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, read_gguf
from bridge.quantize.checkpoint_writer import CheckpointWriter, Groups, refusal
from bridge.system.files import expanded
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.text import align, size_text

FORMATS = ("floats", "gptq", "gptq_v2", "awq", "compressed-tensors", "mlx")
BITS = {"gptq": GPTQ_BITS, "gptq_v2": GPTQ_BITS, "awq": (4,), "compressed-tensors": (4, 8), "mlx": MLX_BITS}
DTYPES = ("F16", "BF16", "F32")
EXACT, ALL_CODES, ROUNDED, AS_FLOATS = "exact", "all codes", "rounded to 8 bits", "floats"
_LAYER = re.compile(r"blk\.\d+\.(attn|ffn)_(?!gate_inp)[a-z_]+\.weight")


@dataclass
class ExportedTensor:
    """What became of a tensor.

    how   EXACT, ALL_CODES (scales rounded), ROUNDED or AS_FLOATS
    nmse  squared error over squared weights, of a quantized layer
    """

    name: str
    type: str
    how: str
    bits: int = 0
    group_size: int = 0
    nmse: float = 0.0


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
        rows: list[tuple[str, ...]] = [("tensors", "type", "becomes", "codes", "NMSE")]
        kinds = dict.fromkeys((t.type, t.how, t.bits, t.group_size) for t in self.tensors)
        for kind in kinds:
            members = [t for t in self.tensors if (t.type, t.how, t.bits, t.group_size) == kind]
            type, how, bits, size = kind
            form = f"{bits} bits, groups of {size}" if bits else self.format if self.format == "floats" else "floats"
            worst = max(t.nmse for t in members)
            error = "" if how == AS_FLOATS else "exact" if worst == 0 else f"{worst:.1e}"
            rows.append((str(len(members)), type, form, how, error))
        lines = align(rows, (False, True, True, True, False))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, f"{size_text(self.nbytes)} in {self.seconds:.1f} s", f"wrote {self.out}"])


@checked
def export(
    model: str | Path,
    out: str | Path,
    format: str = "floats",
    *,
    config: str | Path | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a GGUF as a checkpoint folder.

    model     a GGUF, or any shard of one
    out       the folder to write
    format    "floats", "gptq" (v1), "gptq_v2", "awq" (gemm), "compressed-tensors" (pack-quantized) or "mlx" (affine).
              The layers of the decoder's blocks keep their codes where the format holds them, see `codes_of_blocks`;
              the others are rounded to 8 bits, in AWQ they are floats, and so are the experts of a mixture in MLX,
              which mlx-lm stacks itself
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
        done = _write(gguf, source, expanded(out), format, force, progress)
    done.seconds = time.perf_counter() - started
    return done


def _write(
    gguf: StoredModel, source: GgufSource, path: Path, format: str, force: bool, progress: Progress | None
) -> Exported:
    """Write the folder; `seconds` is left to the caller."""
    check_folder(source, path, force, gguf.files)
    reports, layers = {}, {}
    for name, place in source.places.items():
        reports[name] = ExportedTensor(name, place.stored.type, AS_FLOATS)
        if format != "floats" and _LAYER.fullmatch(place.stored.name) and len(place.part.shape) == 2:
            module = place.part.module
            layer = _layer(module, place, format)
            if layer is not None:
                tensor, how = layer
                size = tensor.group_size if tensor.group_size < tensor.shape[1] or format == "mlx" else -1
                middle = bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
                layers[module] = Groups(tensor.bits, size, format == "compressed-tensors" and middle)
                error = _nmse(place.floats(), tensor, format)
                reports[name] = ExportedTensor(name, place.stored.type, how, tensor.bits, size, error)
                if reports[name].nmse and how == EXACT:
                    reports[name].how = ALL_CODES
    if format != "floats" and not layers:
        raise BridgeError(f"{gguf.files[0]}: has no layer that {format} holds; choose {parameter('format', 'floats')}")
    if format == "awq" and len(set(layers.values())) > 1:
        sizes = " and ".join(sorted({str(groups.group_size) for groups in layers.values()}))
        raise BridgeError(f"{gguf.files[0]}: has groups of {sizes}, but AWQ has one size for all; choose gptq_v2")
    with CheckpointWriter(
        source, path, format if layers else "gptq_v2", layers, force=force, progress=progress
    ) as writer:
        for module in layers:
            again = _layer(module, source.places[f"{module}.weight"], format)
            assert again is not None  # it was found above
            writer.add(again[0])
        written = writer.finish()
    rest = sum(t.how == ROUNDED for t in reports.values())
    notes = [f"{rest} layers have no codes that {format} holds: rounded to 8 bits"] if rest else []
    return Exported(written.out, format, list(reports.values()), written.nbytes, 0.0, notes)


def _layer(module: str, place: Place, format: str) -> tuple[GroupedTensor, str] | None:
    """A layer in a format, and how; None if it stays in floats."""
    shape, bits = place.part.shape, BITS[format]
    if place.part.change is not None or place.stored.type in ("F32", "F16", "BF16", "F64"):
        return None
    if format == "mlx" and len(place.tensor.parts) > 1:
        return None
    raw = np.ascontiguousarray(place.raw())
    tensor, how = codes_of(module, place.stored.type, raw, bits), EXACT
    if format == "mlx":
        tensor = tensor and regrouped(tensor, MLX_SIZES)
        if tensor is None:
            tensor = codes_of(module, place.stored.type, raw, bits, offsets=True)
            tensor = tensor and regrouped(tensor, MLX_SIZES)
        if tensor is not None and not np.isfinite(mlx_biases(tensor)).all():
            tensor = None
    if tensor is None and format != "awq" and shape[1] % 32 == 0:
        tensor, how = rounded(module, place.floats()), ROUNDED
    if tensor is None or not np.isfinite(tensor.scales).all():
        return None
    if format == "gptq" and (tensor.zeros == 0).any():
        tensor, how = rounded(module, place.floats()), ROUNDED
    size = tensor.group_size if tensor.group_size < shape[1] or format == "mlx" else -1
    return None if refusal(format, Groups(tensor.bits, size), (shape[0], shape[1])) else (tensor, how)


def _nmse(weights: np.ndarray, tensor: GroupedTensor, format: str) -> float:
    """Squared error over squared weights of the layer as the checkpoint has it."""
    signal = float(np.square(weights, dtype=np.float64).sum())
    if format == "mlx":
        scales, biases = (
            np.repeat(x.astype(np.float32), tensor.group_size, 1) for x in (tensor.scales, mlx_biases(tensor))
        )
        held = tensor.codes * scales + biases
    else:
        held = tensor.dequantize()
    return float(np.square(held - weights, dtype=np.float64).sum()) / signal if signal else 0.0

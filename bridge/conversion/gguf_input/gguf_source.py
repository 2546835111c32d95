"""A GGUF as the float model of a checkpoint: its tensors under their old names, with rows in their old order.

Names and orders are those of the family's table (`bridge.models.tensors_of_gguf`), read from the GGUF to the
checkpoint. A tensor is dequantized when it is read, and nothing stays in memory. One that a GGUF has in several, or in
another shape, is put together of its parts. With the config of a model of several parts, the others (vision towers)
come from the config's folder, if it has weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.files.dtypes import NUMPY, from_float32, is_finite, not_finite
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.files.weight_files import belongs, open_store
from bridge.checkpoint.labels.detect_format import QUANT_CONFIGS
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, StoredTensor
from bridge.models import numbers_of_gguf, tensors_of_gguf
from bridge.models.gguf_config import family_of_gguf
from bridge.models.outline import ADDED, OutlineTensor, Part, without_added
from bridge.models.restored import restored, rows_of, shape_of
from bridge.models.wrapper import has_parts, name_in_parts, text_names
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED
from bridge.runtime.cpu.engines.dequantize import rows as dequantized
from bridge.system.storage.files import files_below, read_json


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """Where a checkpoint's tensor is in a GGUF: a tensor or one of its matrices; `scale` multiplies it (NVFP4)."""

    tensor: OutlineTensor
    part: Part
    stored: StoredTensor
    matrix: int
    scale: float = 1.0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out, in) of a linear layer."""
        return self.part.shape[0], self.part.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape[::-1] if self.part.change == "conv1d" else self.part.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the GGUF."""
        return self.height * self._row_bytes

    @property
    def height(self) -> int:
        """Rows of blocks; a vector is one."""
        return _height(self.part)

    @cached_property
    def _first(self) -> int:
        """The rows of the parts before it."""
        return sum(map(_height, self.tensor.parts[: self.matrix]))

    @cached_property
    def _row_bytes(self) -> int:
        return self.stored.raw.size // sum(map(_height, self.tensor.parts))

    def raw(self, rows: slice = slice(None), ordered: bool = True) -> np.ndarray:
        """The blocks, uint8 [out, row bytes], or a run `rows` of them; not `ordered`: in the GGUF's order of rows."""
        size, start = self._row_bytes, self._first
        first, stop, _ = rows.indices(self.height)
        if not ordered or self.part.rows is None or len(self.part.shape) == 1:
            return self.stored.read((start + first) * size, (start + stop) * size).reshape(-1, size)
        picked = np.argsort(self.part.rows)[first:stop]
        if not picked.size:
            return np.empty((0, size), np.uint8)
        least, most = int(picked.min()), int(picked.max())
        raw = self.stored.read((start + least) * size, (start + most + 1) * size).reshape(-1, size)
        return raw[picked - least]

    def floats(self, rows: slice = slice(None)) -> np.ndarray:
        """The values, float32, as the checkpoint had them; `rows`: a run of these."""
        matrix = len(self.part.shape) > 1 and self.part.change != "conv1d"
        values = dequantized(self.stored.type, self.raw(rows if matrix else slice(None)))
        if self.scale != 1:
            values *= np.float32(self.scale)
        if matrix:
            return without_added(values, self.part.change)
        values = values.reshape(self.part.shape)
        if len(self.part.shape) == 1 and self.part.rows is not None:
            values = values[np.argsort(self.part.rows)]
        values = without_added(values, self.part.change)
        return np.ascontiguousarray(values.T)[rows] if self.part.change == "conv1d" else values[rows]

    def values(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 as the GGUF has them, in the part's shape but for `rows`, a run of them."""
        values = dequantized(self.stored.type, self.raw(rows, ordered=False)) * np.float32(self.scale)
        return values.reshape(-1, *self.part.shape[1:])


def _height(part: Part) -> int:
    return part.shape[0] if len(part.shape) > 1 else 1


@dataclass(frozen=True, eq=False)
class AssembledTensor:
    """A checkpoint's tensor that is put together of several sources, or has another shape than its source: floats."""

    sources: tuple[SourceTensor, ...]

    @property
    def stored(self) -> StoredTensor:
        """The first tensor of the GGUF that it is in."""
        return self.sources[0].stored

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of([source.part for source in self.sources])

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def floats(self, rows: slice = slice(None)) -> np.ndarray:
        """The values, float32; `rows`: a run of these, or of the matrices of a stack. No others are read."""
        first, stop, _ = rows.indices(self.shape[0])
        if any(source.part.matrix is None and not _by_rows(source.part) for source in self.sources):
            pieces = [(source.part, source.values()) for source in self.sources]
            return restored(pieces, self.shape)[rows]
        run_pieces = [piece for source in self.sources for piece in _run_of(source, first, stop)]
        return restored(run_pieces, (stop - first, *self.shape[1:]))


def _by_rows(part: Part) -> bool:
    """Whether a row of the checkpoint's tensor is a row of the GGUF's."""
    return len(part.shape) == 2 and part.factor is None and part.change in (None, *ADDED)


def _run_of(source: SourceTensor, first: int, stop: int) -> Iterator[tuple[Part, np.ndarray]]:
    """What a source has of a run of rows or matrices of the checkpoint's tensor, counted from the first of them."""
    part = source.part
    if part.matrix is not None:
        if first <= part.matrix < stop:
            yield replace(part, matrix=part.matrix - first), source.values()
        return
    rows = rows_of(part)
    indices = np.flatnonzero((rows >= first) & (rows < stop))
    indices = indices[np.sort(np.unique(rows[indices], return_index=True)[1])]  # rows beyond a vocabulary repeat others
    if indices.size:
        values = source.values(slice(int(indices.min()), int(indices.max()) + 1))[indices - indices.min()]
        yield replace(part, shape=values.shape, rows=rows[indices] - first, stored=None), values


class GgufSource:
    """What `CheckpointWriter` reads of a float model, from a GGUF.

    model      the opened GGUF
    home       the folder with config.json and tokenizer
    dtype      of all floats in the checkpoint: F16, BF16 or F32
    quantized  whether layers will be, as `tensors_of_gguf` has it
    made       whether config and tokenizer were made of the GGUF's metadata
    numbers    checkpoint's name -> value, of tensors that are no tensors of the GGUF: numbers in its metadata, and ones
               of what others have been multiplied by
    sources     checkpoint's name -> `SourceTensor` or `AssembledTensor`
    used       the GGUF's name -> what the family's table says of it
    notes      what becomes of the other parts of a model of several

    Raises BridgeError if config and GGUF are not of the same model.
    """

    format = "GGUF"

    def __init__(self, model: StoredModel, home: Path, dtype: str, quantized: bool = False, made: bool = False) -> None:
        self.path = self.home = home
        config = read_json(home / "config.json")
        self.config: dict[str, Any] = {
            k: v for k, v in config.items() if k not in ("quantization_config", "quantization", "torch_dtype")
        }
        self.config["dtype"] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[dtype]
        self.quant = QuantConfig()
        # what is not copied: weights, what describes them, and what is not a checkpoint's
        self.files = [
            f
            for f in files_below(home)
            if f.name in (*QUANT_CONFIGS, "model.safetensors.index.json") or not _copied(f, home)
        ]
        arch = str(model.metadata.get("general.architecture"))
        self.used: dict[str, OutlineTensor] = {}
        sources_of: dict[str, list[SourceTensor]] = {}
        shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
        family = family_of_gguf(model.metadata) if made else None  # of a model with images, maybe
        for tensor in tensors_of_gguf(config, home, shapes, arch, family, quantized):
            if tensor.origin == "checkpoint":
                self.used[tensor.name] = tensor
                stored = model.tensors[tensor.name]
                scales = model.scales_of(stored)
                for i, part in enumerate(tensor.parts):
                    scale = 1.0 if scales is None else float(scales[i if scales.size > 1 else 0])
                    sources_of.setdefault(part.source, []).append(SourceTensor(tensor, part, stored, i, scale))
        self.sources: dict[str, SourceTensor | AssembledTensor] = {
            name: sources[0] if _is_whole(sources) else AssembledTensor(tuple(sources))
            for name, sources in sources_of.items()
        }
        self.tensors = {name: self._info(name, source, dtype) for name, source in self.sources.items()}
        numbers, in_parts = numbers_of_gguf(model.metadata), has_parts(config)
        self.numbers = {name_in_parts(name, config) if in_parts else name: value for name, value in numbers.items()}
        parts = (part for tensor in self.used.values() for part in tensor.parts)
        self.numbers |= {part.times: np.ones(part.shape, np.float32) for part in parts if part.times is not None}
        for name, value in self.numbers.items():
            kind = "I64" if value.dtype == np.int64 else dtype
            self.tensors[name] = TensorInfo(name, kind, value.shape, value.size * NUMPY[kind].itemsize, self.path)
        self.notes: list[str] = []
        self._others: dict[str, tuple[Store, str]] = {}
        if has_parts(config):
            self._add_others(config)

    def _add_others(self, config: dict[str, Any]) -> None:
        """The floats of the model's other parts, in the dtypes of the config's folder."""
        store = open_store(self.home) if any(self.home.glob("*.safetensors")) else Store([])
        for name in text_names(store.tensors)[1]:
            info = replace(store.tensors[name], name=name_in_parts(name, config))
            if info.dtype not in NUMPY or not info.floating:
                raise BridgeError(f"{info.file}: {name} is {info.dtype}; take the float model's config and weights")
            self.tensors[info.name] = info
            self._others[info.name] = store, name
        self.notes.append(
            f"{len(self._others)} tensors of other parts than the language model come from {self.home}"
            if self._others
            else "the GGUF has the language model alone: tensors of other parts, such as a vision tower, are missing; "
            f"{parameter('config')} of a folder with the original weights adds them"
        )

    @property
    def store(self) -> "GgufSource":
        return self

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor's values in the dtype of the new checkpoint. Raises BridgeError if one is not finite, or in it."""
        if name in self._others:
            store, stored = self._others[name]
            return store.read(stored, rows)
        dtype, run = self.tensors[name].dtype, slice(*(rows or (None,)))
        if name in self.numbers:
            value = self.numbers[name]
            if dtype == "I64":
                return value
            return from_float32(value.reshape(-1), dtype, name).reshape(value.shape)
        source = self.sources[name]
        unchanged = isinstance(source, SourceTensor) and source.part.change is None and len(source.part.shape) > 1
        if isinstance(source, SourceTensor) and unchanged and source.stored.type == dtype:
            elements = source.raw(run).view(NUMPY[dtype])
            if not is_finite(elements, dtype):
                raise not_finite(source.stored.file, name)
            return elements
        values = source.floats(run)
        if not np.isfinite(values).all():
            raise not_finite(source.stored.file, name)
        return from_float32(values, dtype, name)

    def _info(self, name: str, source: SourceTensor | AssembledTensor, dtype: str) -> TensorInfo:
        if source.stored.type not in (*READ, *UNQUANTIZED):
            raise BridgeError(f"{source.stored.name}: is {source.stored.type}, which is not read")
        if source.stored.type == "I32":  # a table of integers, as transformers keeps it
            dtype = "I64"
        return TensorInfo(name, dtype, source.shape, math.prod(source.shape) * NUMPY[dtype].itemsize, self.path)


def _is_whole(sources: list[SourceTensor]) -> bool:
    """Whether a tensor of the GGUF, or a matrix of one, is the checkpoint's: its blocks need no floats in between."""
    part = sources[0].part
    picked = not all(x is None for x in (part.columns, part.matrix, part.stored, part.factor))
    return len(sources) == 1 and not picked and part.change in (None, "conv1d", *ADDED)


def _copied(file: Path, home: Path) -> bool:
    """Whether a file of the config's folder belongs into the new checkpoint: a config, or a part of the tokenizer."""
    name = file.relative_to(home).as_posix()
    return belongs(name) and not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))

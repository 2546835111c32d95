"""A GGUF as the float model of a checkpoint: its tensors under their old names, with rows in their old order.

Names and orders are those of the family's table (`bridge.models.tensors_of_gguf`), read from the GGUF to the
checkpoint. A tensor is dequantized when it is read, and nothing stays in memory.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.files.dtypes import NUMPY, from_float32
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.files.weight_files import belongs
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.gguf_file.reader import StoredModel, StoredTensor
from bridge.models import numbers_of_gguf, tensors_of_gguf
from bridge.models.gguf_config import family_of_gguf
from bridge.models.outline import OutlineTensor, Part
from bridge.models.restored import restored, shape_of
from bridge.runtime.cpu.dequantize import FLOATS
from bridge.runtime.cpu.dequantize import rows as dequantized
from bridge.system.files import files_below, read_json

_QUANT_CONFIGS = (
    "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json",
    "model.safetensors.index.json",
)  # fmt: skip
# vectors that checkpoints have as matrices of one row
_ROWS = ("mlp.shared_expert_gate.weight",)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a checkpoint's tensor is in a GGUF: a tensor of it, or one of its matrices.

    scale  of the whole matrix, which NVFP4 may have
    """

    tensor: OutlineTensor
    part: Part
    stored: StoredTensor
    matrix: int
    scale: float = 1.0

    @property
    def height(self) -> int:
        """Rows of blocks; a vector is one."""
        return self.part.shape[0] if len(self.part.shape) > 1 else 1

    def raw(self, rows: slice = slice(None), ordered: bool = True) -> np.ndarray:
        """Its blocks, uint8 [out, row bytes], rows in the checkpoint's order; `rows`: of these, a run.

        ordered  if not, rows are in the GGUF's order, which need not be read whole for a run
        """
        size = self.stored.raw.size // (len(self.tensor.parts) * self.height)
        first, stop, _ = rows.indices(self.height)
        start = self.matrix * self.height
        if not ordered or self.part.rows is None or len(self.part.shape) == 1:
            return self.stored.read((start + first) * size, (start + stop) * size).reshape(-1, size)
        raw = self.stored.read(start * size, (start + self.height) * size).reshape(-1, size)
        return raw[np.argsort(self.part.rows)[first:stop]]

    def values(self) -> np.ndarray:
        """Its values, float32 in the part's shape, as the GGUF has them."""
        return dequantized(self.stored.type, self.raw(ordered=False)).reshape(self.part.shape) * np.float32(self.scale)

    def floats(self, rows: slice = slice(None)) -> np.ndarray:
        """Its values, float32, as the checkpoint had them; `rows`: of these, a run."""
        matrix = len(self.part.shape) > 1 and self.part.change != "conv1d"
        values = dequantized(self.stored.type, self.raw(rows if matrix else slice(None)))
        if self.scale != 1:
            values *= np.float32(self.scale)
        if matrix:
            return values - 1 if self.part.change == "+1" else values
        values = values.reshape(self.part.shape)
        if len(self.part.shape) == 1 and self.part.rows is not None:
            values = values[np.argsort(self.part.rows)]
        if self.part.change == "+1":
            values = values - 1
        return np.ascontiguousarray(values.T)[rows] if self.part.change == "conv1d" else values[rows]


@dataclass(frozen=True, eq=False)
class Joined:
    """A checkpoint's tensor that is put together again from several places, or whose values were changed."""

    pieces: tuple[Place, ...]
    shape: tuple[int, ...]

    @property
    def type(self) -> str:
        return self.pieces[0].stored.type

    def floats(self, rows: slice = slice(None)) -> np.ndarray:
        """Its values, float32, as the checkpoint had them; `rows`: of these, a run."""
        return restored([(place.part, place.values()) for place in self.pieces], self.shape)[rows]


class GgufSource:
    """What `CheckpointWriter` reads of a float model, from a GGUF.

    model   the opened GGUF
    home    the folder with config.json and tokenizer
    made    whether these were made of the GGUF's metadata
    numbers checkpoint's name -> value, of tensors that are numbers in the GGUF's metadata
    dtype   of all floats in the checkpoint: F16, BF16 or F32
    places  checkpoint's name -> `Place`, of tensors whose blocks are in the GGUF as they are
    joined  checkpoint's name -> `Joined`, of all others

    Raises BridgeError if config and GGUF are not of the same model.
    """

    format = "GGUF"

    def __init__(self, model: StoredModel, home: Path, dtype: str, made: bool = False) -> None:
        self.path = self.home = home
        config = read_json(home / "config.json")
        self.config: dict[str, Any] = {
            k: v for k, v in config.items() if k not in ("quantization_config", "quantization", "torch_dtype")
        }
        self.config["dtype"] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[dtype]
        self.quant = QuantConfig()
        # what is not copied: weights, what describes them, and what is not a checkpoint's
        self.files = [f for f in files_below(home) if f.name in _QUANT_CONFIGS or not _copied(f, home)]
        arch = str(model.metadata.get("general.architecture"))
        named = config
        if made:  # of the language model alone, where the GGUF's architecture is that of a model with images
            named = {**config, "architectures": [family_of_gguf(model.metadata).architectures[0]]}
        self.numbers = numbers_of_gguf(model.metadata)
        pieces: dict[str, list[Place]] = {}
        shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
        for tensor in tensors_of_gguf(named, home, shapes, arch):
            if tensor.origin == "checkpoint":
                stored = model.tensors[tensor.name]
                scales = model.scales_of(stored)
                for i, part in enumerate(tensor.parts):
                    scale = 1.0 if scales is None else float(scales[i if scales.size > 1 else 0])
                    pieces.setdefault(part.source, []).append(Place(tensor, part, stored, i, scale))
        self.places = {name: found[0] for name, found in pieces.items() if len(found) == 1 and _whole(found[0].part)}
        self.joined = {
            name: Joined(tuple(found), shape_of([place.part for place in found]))
            for name, found in pieces.items()
            if name not in self.places
        }
        self.tensors = {name: self._info(name, found, dtype) for name, found in pieces.items()}
        for name, value in self.numbers.items():
            self.tensors[name] = TensorInfo(name, dtype, value.shape, NUMPY[dtype].itemsize, self.path)

    @property
    def store(self) -> "GgufSource":
        return self

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor's values in the dtype of the new checkpoint. Raises BridgeError if F16 cannot hold one."""
        dtype, shape, run = self.tensors[name].dtype, self.tensors[name].shape, slice(*(rows or (None,)))
        if name in self.numbers:
            return from_float32(self.numbers[name].reshape(-1), dtype, name).reshape(shape)
        if name in self.joined:
            return from_float32(self.joined[name].floats(run), dtype, name)
        place = self.places[name]
        if place.stored.type == dtype and place.part.change is None and len(place.part.shape) > 1:
            return place.raw(run).view(NUMPY[dtype])
        if name.endswith(_ROWS):
            return from_float32(place.floats().reshape(shape)[run], dtype, name)
        return from_float32(place.floats(run), dtype, name)

    def _info(self, name: str, pieces: list[Place], dtype: str) -> TensorInfo:
        for place in pieces:
            if place.stored.type not in (*READ, *FLOATS):
                raise BridgeError(f"{place.stored.name}: is {place.stored.type}, which is not read")
        if name in self.joined:
            shape = self.joined[name].shape
        else:
            part = pieces[0].part
            shape = part.shape[::-1] if part.change == "conv1d" else part.shape
            shape = (1, *shape) if name.endswith(_ROWS) else shape
        return TensorInfo(name, dtype, shape, math.prod(shape) * NUMPY[dtype].itemsize, self.path)


def _whole(part: Part) -> bool:
    """Whether a GGUF has all rows of a part's source, in some order, as it was or with one added."""
    picked = part.columns is not None or part.matrix is not None or part.stored is not None
    return not picked and part.factor is None and part.change in (None, "+1", "conv1d")


def _copied(file: Path, home: Path) -> bool:
    """Whether a file of the config's folder belongs into the new checkpoint: a config, or a part of the tokenizer."""
    name = file.relative_to(home).as_posix()
    return belongs(name) and not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))

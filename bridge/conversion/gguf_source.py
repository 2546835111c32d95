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
from bridge.models import tensors_of_gguf
from bridge.models.outline import OutlineTensor, Part
from bridge.runtime.cpu.dequantize import FLOATS
from bridge.runtime.cpu.dequantize import rows as dequantized
from bridge.system.files import files_below, read_json

_QUANT_CONFIGS = (
    "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json",
    "model.safetensors.index.json",
)  # fmt: skip


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


class GgufSource:
    """What `CheckpointWriter` reads of a float model, from a GGUF.

    model   the opened GGUF
    home    the folder with config.json and tokenizer
    dtype   of all floats in the checkpoint: F16, BF16 or F32
    places  checkpoint's name -> `Place`

    Raises BridgeError if config and GGUF are not of the same model, or its tensors cannot be separated again.
    """

    format = "GGUF"

    def __init__(self, model: StoredModel, home: Path, dtype: str) -> None:
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
        self.places: dict[str, Place] = {}
        shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
        for tensor in tensors_of_gguf(config, home, shapes, arch):
            if tensor.origin == "checkpoint":
                for i, part in enumerate(tensor.parts):
                    if part.columns is not None or part.matrix is not None or part.stored is not None:
                        raise BridgeError(f"{tensor.name}: is a part of {part.source}, which is not put together again")
                    if part.change not in (None, "+1", "conv1d"):
                        raise BridgeError(f"{tensor.name}: {part.source} ({part.change}) cannot be restored")
                    stored = model.tensors[tensor.name]
                    scales = model.scales_of(stored)
                    scale = 1.0 if scales is None else float(scales[i if scales.size > 1 else 0])
                    self.places[part.source] = Place(tensor, part, stored, i, scale)
        self.tensors = {name: self._info(name, place, dtype) for name, place in self.places.items()}

    @property
    def store(self) -> "GgufSource":
        return self

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor's values in the dtype of the new checkpoint. Raises BridgeError if F16 cannot hold one."""
        place, dtype = self.places[name], self.tensors[name].dtype
        if place.stored.type == dtype and place.part.change is None and len(place.part.shape) > 1:
            return place.raw(slice(*(rows or (None,)))).view(NUMPY[dtype])
        values = self.places[name].floats(slice(*(rows or (None,))))
        return from_float32(values, dtype, name)

    def _info(self, name: str, place: Place, dtype: str) -> TensorInfo:
        if place.stored.type not in (*READ, *FLOATS):
            raise BridgeError(f"{place.stored.name}: is {place.stored.type}, which is not read")
        shape = place.part.shape[::-1] if place.part.change == "conv1d" else place.part.shape
        return TensorInfo(name, dtype, shape, math.prod(shape) * NUMPY[dtype].itemsize, self.path)


def _copied(file: Path, home: Path) -> bool:
    """Whether a file of the config's folder belongs into the new checkpoint: a config, or a part of the tokenizer."""
    name = file.relative_to(home).as_posix()
    return belongs(name) and not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))

"""A quantized checkpoint as the float model that another is written of: its layers are matrices of floats.

Names are those that the reader gives its modules, of stacks of experts one for each, or those of the family's
checkpoints, see `family_names`. All other tensors are as they are stored.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from bridge.checkpoint import Checkpoint, TensorInfo
from bridge.checkpoint.files.dtypes import NUMPY, from_float32, not_finite
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.grouped import CodedTensor, PackedTensor
from bridge.checkpoint.labels.detect_format import QUANT_CONFIGS
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import layer_of
from bridge.conversion.checkpoints.coded_layer import CodedLayer, FloatLayer
from bridge.conversion.checkpoints.family_names import FamilyNames
from bridge.conversion.checkpoints.layer_plan import Layer
from bridge.models.outline import Fold

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # as config.json has them
_DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})  # the second is the older
_LABELS = frozenset({"quantization_config", "quantization", "compression_config", "quip_params"})  # of config.json
_HEAD = "lm_head"


class CheckpointSource:
    """What `CheckpointWriter` reads of a float model, from a quantized checkpoint.

    ckpt     the opened checkpoint
    written  the format to be written; None: floats
    dtype    of all floats in the new checkpoint: F16, BF16 or F32; None: layers that become floats have the model's,
             and others keep theirs, but BF16 becomes F16 in a format that has no other
    names    what its family tells: where the act-order of a layer is undone by permuting its columns, and rows of
             others; and tensors that are put together of layers

    Its attribute `rows` is the new orders of rows, by module.
    """

    def __init__(self, ckpt: Checkpoint, written: WrittenFormat | None, dtype: str | None, names: FamilyNames) -> None:
        self.path, self.home, self.format = ckpt.path, ckpt.home, ckpt.format
        self.quant = QuantConfig()
        self.config: dict[str, Any] = {key: value for key, value in ckpt.config.items() if key not in _LABELS}
        self.files = [*ckpt.files, *(folder / name for folder in (ckpt.home, ckpt.path) for name in QUANT_CONFIGS)]
        self._ckpt, self._written, self._dtype = ckpt, written, dtype
        self._folds = names.folds
        self.rows, self._columns = _permutations(ckpt, names.folds)
        self.notes, self.stacks = names.notes, len(names.assembled)
        self._module = lru_cache(2)(self._read_module)  # it is read for its plan, to be packed, and to be compared
        changed = dtype or (written and written.dtype)
        of_layers = changed or self._model_dtype()
        if changed:
            self.config = _with_dtype(self.config, next(name for name, kind in _DTYPES.items() if kind == changed))
        self._assembled = names.assembled
        parts = {name for layers in self._assembled.values() for name in layers.sources}
        self._modules = {f"{m}.weight": m for m in ckpt.modules if f"{m}.weight" not in parts}
        self.tensors = {
            name: TensorInfo(name, of_layers, shape, shape[0] * shape[1] * NUMPY[of_layers].itemsize, info.file)
            for name, module in self._modules.items()
            for info, shape in [(ckpt.modules[module], ckpt.modules[module].shape)]
        }
        for name, info in ckpt.tensors.items():
            if name in parts:
                continue
            kind = of_layers if info.dtype in FLOAT8 else self._stored_dtype(info)
            self.tensors[name] = TensorInfo(name, kind, info.shape, info.size * NUMPY[kind].itemsize, info.file)

        for name, layers in self._assembled.items():
            nbytes = math.prod(layers.shape) * NUMPY[of_layers].itemsize
            self.tensors[name] = TensorInfo(name, of_layers, layers.shape, nbytes, ckpt.path)

    @property
    def store(self) -> "CheckpointSource":
        return self

    def keep_order(self, consumers: Collection[str]) -> None:
        """Permute no columns of these layers, and no rows of others for them."""
        self._folds = [fold for fold in self._folds if fold.consumer not in consumers]
        self.rows, self._columns = _permutations(self._ckpt, self._folds)
        self._module.cache_clear()

    def layers(self) -> Iterator[Layer]:
        """The layers that may have codes in the new format, as they are in the order of their files."""
        assert self._written is not None
        for name, info in self.tensors.items():
            module = name.removesuffix(".weight")
            if name in self._assembled or not self._holds(module):
                continue
            if name in self._modules:
                shape = self._ckpt.modules[module].shape
                yield CodedLayer(
                    self._written, module, self._type(module), shape, info.file, partial(self._module, module)
                )
            elif self._ckpt.tensors[name].dtype in FLOAT8 and name != module and len(info.shape) == 2:
                shape = info.shape[0], info.shape[1]
                read = partial(self._floats, name)
                stored = partial(self._float8, name)
                yield FloatLayer(self._written, module, self._ckpt.stored_as(name), shape, info.file, read, stored)

    def type_of(self, name: str) -> str:
        """What a tensor is in the source, for the report."""
        if name in self._assembled:
            name = min(self._assembled[name].sources)
        module = name.removesuffix(".weight")
        return self._type(module) if module in self._ckpt.modules else self._ckpt.stored_as(name)

    def _type(self, module: str) -> str:
        return f"{self.format} {self._ckpt.modules[module].bits} bits"

    def _holds(self, module: str) -> bool:
        """Whether the format has codes for a module of that name: all have for linear layers of blocks."""
        assert self._written is not None
        if layer_of(module) is not None:
            return True
        return self._written.head if module.rpartition(".")[2] == _HEAD else self._written.embeddings

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor, or its rows start..stop, in the dtype of the new checkpoint.

        Raises BridgeError if a value of a layer, or of a tensor that changes its dtype, is not finite or not in it.
        """
        dtype, run = self.tensors[name].dtype, slice(*(rows or (None,)))
        if name in self._assembled:
            values = self._assembled[name].floats(run)
        elif name in self._modules:
            values = self._module(self._modules[name]).dequantize(run)
        elif dtype == self._ckpt.tensors[name].dtype and name.rpartition(".")[0] not in self.rows:
            return self._ckpt.store.read(name, rows)
        else:
            values = self._floats(name, run)
        if not np.isfinite(values).all():
            raise not_finite(self.tensors[name].file, name)
        return from_float32(values, dtype, name)

    def _floats(self, name: str, rows: slice) -> np.ndarray:
        """float32 of a tensor that is no module's weight, or some of its rows."""
        order = self.rows.get(name.rpartition(".")[0])
        if order is not None:
            return self._ckpt.read_float(name)[order][rows]
        if not self._ckpt.tensors[name].shape:
            return self._ckpt.read_float(name)
        start, stop, _ = rows.indices(self._ckpt.tensors[name].shape[0])
        return self._ckpt.read_float(name, (start, stop))

    def _float8(self, name: str) -> PackedTensor | None:
        """The bytes and scales of a matrix of 8-bit floats, with the scale of its activations if that has one."""
        module = name.removesuffix(".weight")
        tensor = None if module in self.rows else self._ckpt.read_float8(name)
        return None if tensor is None else replace(tensor, input_scale=self._input_scales.get(module))

    @cached_property
    def _input_scales(self) -> dict[str, float]:
        """The scales of activations of all matrices of 8-bit floats, by module; empty where one has none."""
        scales = {}
        for name, info in self._ckpt.tensors.items():
            if info.dtype in FLOAT8 and info.is_matrix:
                module = name.removesuffix(".weight")
                inputs = self._ckpt.store.tensors.get(f"{module}.input_scale")
                if inputs is None or not inputs.floating or inputs.size != 1:
                    return {}
                scales[module] = float(self._ckpt.store.read_float(inputs.name).reshape(-1)[0])
        return scales if all(np.isfinite(scale) and scale > 0 for scale in scales.values()) else {}

    def _read_module(self, module: str) -> CodedTensor:
        tensor = self._ckpt.read_module(module)
        if (order := self._columns.get(module)) is not None:
            tensor = tensor.take_columns(order)
        return tensor if (order := self.rows.get(module)) is None else tensor.take_rows(order)

    def _model_dtype(self) -> str:
        """Of the config, or of most of its floats."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        kinds = Counter(info.dtype for info in self._ckpt.tensors.values() if info.dtype in _DTYPES.values())
        return _DTYPES.get(str(stated)) or next(iter(dict(kinds.most_common(1))), "F16")

    def _stored_dtype(self, info: TensorInfo) -> str:
        """Of a tensor of floats, or of a table of integers, in the new checkpoint."""
        if not info.floating:
            return info.dtype
        to_half = info.dtype == "BF16" and self._written is not None and self._written.dtype == "F16"
        return self._dtype or ("F16" if to_half else info.dtype)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json with another dtype of the model, and of its parts where they state one."""
    changed: dict[str, Any] = {"dtype": dtype}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict) and not _DTYPE_KEYS.isdisjoint(value):
            changed[key] = _with_dtype(value, dtype)
        elif key not in _DTYPE_KEYS:
            changed[key] = value
    return changed


def _permutations(ckpt: Checkpoint, folds: Iterable[Fold]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The new orders of rows and of columns, by module, that undo the act-order of consumers."""
    rows: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    for fold in folds:
        group = ckpt.group_order(fold.consumer) if fold.consumer in ckpt.modules else None
        heights = [_height(ckpt, producer) for producer in fold.producers]
        if group is None or not all(height and height % len(group) == 0 for height in heights):
            continue
        order = columns[fold.consumer] = np.argsort(group, kind="stable")
        for producer, height in zip(fold.producers, heights, strict=True):  # one that holds gate and up has both
            rows[producer] = (np.arange(0, height, len(order))[:, None] + order).reshape(-1)
    return rows, columns


def _height(ckpt: Checkpoint, module: str) -> int:
    """The rows of a module; 0 where it is not there."""
    if module in ckpt.modules:
        return ckpt.modules[module].shape[0]
    info = ckpt.tensors.get(f"{module}.weight")
    return info.shape[0] if info is not None else 0

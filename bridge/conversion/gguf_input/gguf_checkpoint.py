"""A GGUF in the place of a checkpoint: what `convert` and `quantize` read of a model that exists only as one.

Its tensors come as floats: blocks are dequantized when they are read. Metadata, names and the order of rows are the
GGUF's own, so any architecture will do, and a tensor that keeps its type is copied byte for byte. Calibration runs the
model in transformers: for that, tensors have the names and rows of the family's checkpoints, and config and tokenizer
are made of the metadata (`gguf_config`).
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.dtypes import NUMPY, is_finite, not_finite
from bridge.checkpoint.files.hub import kind_of, resolve_model
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.conversion.gguf_input.gguf_config import checked_source, write_config
from bridge.conversion.gguf_input.gguf_source import AssembledTensor, GgufSource, SourceTensor
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel, StoredTensor, expect_model, read_gguf
from bridge.models.outline import Outline, OutlineTensor, Part
from bridge.models.template import copied_metadata, quantizable, stop_texts
from bridge.runtime.cpu.engines.dequantize import UNQUANTIZED
from bridge.system.storage.files import expanded


@dataclass(frozen=True)
class _Stored(TensorInfo):
    """A tensor of a GGUF; its dtype is the GGUF's type."""

    @property
    def floating(self) -> bool:
        return True


class _GgufStore(Store):
    """The tensors of a GGUF, by the names of a checkpoint."""

    def __init__(self, model: StoredModel, sources: Mapping[str, SourceTensor | AssembledTensor]) -> None:
        super().__init__([])
        self.files = model.files
        self.sources = sources
        for name, source in sources.items():
            self.tensors[name] = _Stored(name, source.stored.type, source.shape, source.nbytes, source.stored.file)

    def read_float(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """float32; of a stack of matrices, `rows` are matrices."""
        source = self.sources[name]
        if source.stored.type not in (*READ, *UNQUANTIZED):
            raise BridgeError(f"{source.stored.file}: {name} is {source.stored.type}, which is not read")
        return source.floats(slice(*(rows or (None,))))


class GgufCheckpoint(Checkpoint):
    """An opened GGUF.

    model        the file as it is stored
    outline      its own metadata and tensors
    home         folder with config.json and tokenizer; empty where nothing needs them
    temporaries  closed with it
    """

    unties: ClassVar = False  # its outline has one matrix

    def __init__(
        self,
        model: StoredModel,
        sources: Mapping[str, SourceTensor | AssembledTensor],
        tensors: list[OutlineTensor],
        home: Path,
        config: dict[str, Any],
        temporaries: ExitStack,
    ) -> None:
        super().__init__(model.files[0], config, QuantConfig(), _GgufStore(model, sources), home)
        self.tensors, self.notes = dict(self.store.tensors), []  # NVFP4's scales of inputs are tensors like others
        metadata = copied_metadata(model.metadata)
        self.outline = Outline(metadata, tensors, stop=stop_texts(metadata))
        self.format = "GGUF"
        self.model, self._temporaries = model, temporaries

    @property
    def quantized(self) -> bool:
        """Whether it has tensors in block types."""
        return any(tensor.type not in UNQUANTIZED for tensor in self.model.tensors.values())

    def copied(self, name: str, type: str, shape: tuple[int, ...]) -> np.ndarray:
        """uint8: a tensor's bytes, by its GGUF name. Raises BridgeError if its type or shape differs, or it has NaN."""
        stored = self.model.tensors.get(name)
        if stored is None or (stored.type, stored.shape) != (type, shape):
            raise BridgeError(f"{self.path}: has no {type} {name} of {list(shape)}; the plan is of another GGUF")
        data = stored.read(0, stored.raw.size)
        if not _is_finite(type, data):
            raise not_finite(stored.file, name)
        return data

    def blocks(self, name: str, type: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """uint8 [rows, row bytes] of a tensor, by its GGUF name; None if its type or shape differs. Thread-safe."""
        stored = self.model.tensors.get(name)
        if stored is None or (stored.type, stored.shape) != (type, shape):
            return None
        return stored.raw.reshape(math.prod(shape[:-1]), -1)

    def close(self) -> None:
        """Remove config and tokenizer if they were made."""
        super().close()
        self._temporaries.close()


def open_source(
    source: str | Path,
    config: str | Path | None = None,
    *,
    needs_config: bool = True,
    detect_lattice: bool = False,
    by_family: bool = False,
) -> Checkpoint:
    """Open what a model is converted from: a checkpoint, see `open_by_name`, or a GGUF, by name too.

    by_family  whether a GGUF's tensors have the names and rows of its family's checkpoints, with config and tokenizer

    Raises BridgeError as `open_by_name` does, and for a GGUF that is damaged, no model, or without a known family.
    """
    path = resolve_model(source, config)
    if kind_of(path, config) != "gguf":
        return open_checkpoint(path, config, needs_config=needs_config, detect_lattice=detect_lattice)
    if not needs_config:
        raise BridgeError(f"{source}: is a GGUF and keeps its names and metadata; leave out {parameter('template')}")
    if config is not None and not by_family:
        raise BridgeError(f"{source}: is a GGUF and keeps its metadata and tokenizer; leave out {parameter('config')}")
    model = read_gguf(path)
    expect_model(model.metadata, model.files[0])
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory())) if config is None else expanded(config)
        ckpt = _by_family(model, home, config is None, stack) if by_family else _by_itself(model, home, stack)
    if detect_lattice:
        ckpt.take_lattices()
    return ckpt


def _by_itself(model: StoredModel, home: Path, stack: ExitStack) -> GgufCheckpoint:
    """A GGUF under its own names."""
    sources: dict[str, SourceTensor | AssembledTensor] = {}
    tensors = []
    for stored in model.tensors.values():
        fixed = _fixed_type(model, stored)
        parts: tuple[Part, ...] = (Part(stored.name, stored.shape),)
        if fixed is None and len(stored.shape) == 3:
            parts = tuple(Part(stored.name, stored.shape[1:], matrix=i) for i in range(stored.shape[0]))
        tensors.append(OutlineTensor(stored.name, stored.shape, parts, fixed_type=fixed))
        matrices = tuple(SourceTensor(tensors[-1], part, stored, i) for i, part in enumerate(parts))
        sources[stored.name] = matrices[0] if parts[0].matrix is None else AssembledTensor(matrices)
    return GgufCheckpoint(model, sources, tensors, home, {}, stack.pop_all())


def _by_family(model: StoredModel, home: Path, make: bool, stack: ExitStack) -> GgufCheckpoint:
    """A GGUF under the names of its family's checkpoints; `make`: write config and tokenizer to `home`."""
    if make:
        write_config(model, home)
    source = checked_source(model, home, "F32") if make else GgufSource(model, home, "F32")
    if source.numbers:
        name = next(iter(source.numbers))
        raise BridgeError(f"{model.files[0]}: {name} is no tensor of the GGUF; convert the original model")
    tensors = []
    for stored in model.tensors.values():
        if stored.name in source.used:
            tensor = source.used[stored.name]
            is_fixed = tensor.fixed_type is not None or _fixed_type(model, stored) is not None
            tensors.append(replace(tensor, fixed_type=stored.type if is_fixed else None))
        else:  # made from the config
            data = stored.read(0, stored.raw.size)
            tensors.append(OutlineTensor(stored.name, stored.shape, data=data, fixed_type=stored.type))
    return GgufCheckpoint(model, source.sources, tensors, home, source.config, stack.pop_all())


def _is_finite(type: str, raw: np.ndarray) -> bool:
    """Whether all values of a type's bytes, uint8, are finite; of types that are not read, nothing is known.

    Of blocks with halves, these alone are looked at; of MXFP4, the byte that stands for NaN. NVFP4 has none: see there.
    """
    if type in UNQUANTIZED:
        return is_finite(raw.view(NUMPY[type]), type)
    block = READ.get(type)
    if block is None or (block.scales and block.subs > 1):
        return True
    blocks = raw.reshape(-1, block.nbytes)
    if block.scales:
        return not (blocks[:, 0] == block.no_scale).any()
    if block.d_nibbles:
        from bridge.encode.block_bytes import unpack_scales

        scales = unpack_scales(block, raw.reshape(1, -1), np.ones(len(blocks) * block.subs, np.int8))
        return bool(np.isfinite(scales).all())
    halves = (block.d_at, block.dmin_at) if block.has_min else (block.d_at,)
    # exponents that are not all ones
    return all(bool((blocks[:, offset + 1] & 0x7C != 0x7C).all()) for offset in halves)


def _fixed_type(model: StoredModel, stored: StoredTensor) -> str | None:
    """The type that a tensor keeps: one that no quantizer changes, or whose scale is a tensor by itself."""
    return None if quantizable(stored) and model.scales_of(stored) is None else stored.type

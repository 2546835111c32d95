"""Quantized layers as a checkpoint, with all other tensors of the float model: GPTQ, AWQ, compressed-tensors, MLX.

    with open_checkpoint("Qwen3-8B") as ckpt:
        layers = {name: Groups(4, 128) for name in ...}
        with CheckpointWriter(ckpt, Path("Qwen3-8B-GPTQ"), "gptq_v2", layers) as writer:
            for ...: writer.add(quantized.tensor())
            done = writer.finish()

The shapes of all tensors are known beforehand, so each file's header is written first, and layers go to their places
in any order: none stays in memory. Floats keep their dtypes; tied embeddings, tokenizer and all other files are copied.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict, Unpack

import numpy as np

from bridge.checkpoint import TensorInfo
from bridge.checkpoint.files.dtypes import NUMPY, from_float32
from bridge.checkpoint.files.folder import CheckpointFolder, Source, sync
from bridge.checkpoint.files.store import header_of
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import Groups, QuantizedLayers, WrittenFormat, raised, zeros_of_0
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import layer_of
from bridge.checkpoint.write.report import Written
from bridge.errors import BridgeError
from bridge.system.kernels import compiling
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.storage.files import expanded
from bridge.system.text import unknown

_CHUNK = 8 << 20  # bytes of floats copied at a time
_TOWERS = frozenset({"vision_config", "audio_config"})  # keys of the config of a model of several parts


class Floats(Protocol):
    """Tensors of floats by name: the store of a checkpoint, or of a GGUF as one."""

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...
    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray: ...


class FloatSource(Source, Protocol):
    """The model that a checkpoint is written from."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def quant(self) -> QuantConfig: ...
    @property
    def format(self) -> str: ...
    @property
    def tensors(self) -> dict[str, TensorInfo]: ...
    @property
    def store(self) -> Floats: ...


class CheckpointWriter:
    """The new checkpoint. Use as a context manager: leaving it without `finish` removes every trace.

    ckpt        of the float model
    path        the folder to write
    format      a name of `FORMATS`; where no layer is quantized, None
    layers      the layers to be quantized, by their names in the checkpoint, without ".weight"
    transposed  layers whose weight is stored as [in, out] (Conv1D of transformers)
    stacks      layer -> the tensor of three dimensions that it is in, and which matrix of it; all have the same form
    clamp       where the format has no zero point of 0: raise these to 1, with their codes
    shard_size  bytes per file
    force       replace an existing checkpoint
    progress    called with (bytes done, bytes in all, tensor)

    Raises BridgeError for a layer that is missing or that the format cannot hold, and for a target that cannot be
    written.
    """

    def __init__(
        self, ckpt: FloatSource, path: str | Path, format: str | None, layers: Mapping[str, Groups], *,
        transposed: Collection[str] = (), stacks: Mapping[str, tuple[str, int]] | None = None, clamp: bool = False,
        shard_size: int = 5_000_000_000, force: bool = False, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        if format not in FORMATS and (layers or format is not None):
            raise unknown("checkpoint format", str(format), [*FORMATS])
        if ckpt.quant.method is not None:
            raise BridgeError(f"{ckpt.path}: is already {ckpt.format}; quantize the original float model")
        self._begun = compiling.clock()
        self._ckpt, self._layers, self._clamp = ckpt, dict(layers), clamp
        self._format: WrittenFormat
        self._name = format or "floats"
        if format is not None:
            self._format = FORMATS[format]
        self._tick = progress or (lambda *_: None)
        self._shapes = {name: self._shape(name, name in transposed) for name in layers}
        self._stacks = dict(stacks or {})
        self._todo = set(layers)
        self._asymmetric = self._act_order = False
        self._raised = (0, 0)
        self._done = 0
        self._plan(shard_size)
        self._folder = CheckpointFolder(ckpt, expanded(path), force)
        try:
            self._folder.guard(self._write_heads, "the headers of the files")
        except BaseException:
            self._folder.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()

    def add(self, tensor: GroupedTensor | PackedTensor, first: int | None = None) -> None:
        """Write one layer, or its rows from `first` on. Raises BridgeError if it is not as announced, or the format
        cannot hold it.

        first  of rows that fill whole words, one run after another. Where words have codes of several parts of a layer
               (HQQ), rows are as many of each part, and `first` counts those before
        """
        name = tensor.name
        if name not in self._todo:
            raise BridgeError(f"{name}: is not a layer to be quantized, or was added twice")
        layer, (out, columns) = self._layers[name], self._shapes[name]
        begin, rows, count = first or 0, out if first is None else tensor.shape[0], tensor.scales.shape[1]
        announced = layer.kind, layer.bits, (rows, columns), layer.count(columns)
        if (tensor.kind, tensor.bits, tensor.shape, count) != announced:
            raise BridgeError(
                f"{name}: is {list(tensor.shape)} of {tensor.bits} bits in {count} groups per row; "
                f"announced was {list(self._shapes[name])} of {layer.bits} bits in groups of {layer.group_size}"
            )
        if isinstance(tensor, GroupedTensor):
            if self._clamp and not self._format.holds_zero:
                zeros = zeros_of_0(tensor)
                tensor, lost = raised(tensor)
                self._raised = self._raised[0] + zeros, self._raised[1] + lost
            asymmetric = bool((tensor.zeros != 1 << (layer.bits - 1)).any())
            if layer.symmetric and asymmetric:
                raise BridgeError(f"{name}: was announced as symmetric, but has zero points")
            if self._format.order_part and tensor.sequential == layer.act_order:
                raise BridgeError(f"{name}: has {'no ' * layer.act_order}act-order, other than was announced")
            self._asymmetric |= asymmetric
            self._act_order |= not tensor.sequential
        shapes, lanes = self._format.shapes(layer, (out, columns)), self._format.lanes(layer.bits)
        for part, values in self._format.pack(tensor).items():
            if f"{name}.{part}" in self._locations:
                if part == self._format.shape_part:
                    values = np.array((out, columns), values.dtype)
                dtype, shape = shapes[part]
                if values.dtype.kind == "f" and values.dtype != NUMPY[dtype]:  # scales, which it holds
                    values = from_float32(values, dtype)
                if rows < out and lanes > 1 and len(values) == rows * count:  # of groups, row by row
                    values, shape = values.reshape(lanes, -1), (lanes, math.prod(shape) // lanes)
                self._write_rows(f"{name}.{part}", values, shape, begin, out)
        if begin + rows == out:
            self._todo.remove(name)

    def finish(self, floats: Mapping[str, np.ndarray] | None = None) -> Written:
        """Write everything else, sync, and rename into place.

        floats  tensors that have changed, by full name (AWQ's norms and biases); all others are copied
        """
        floats = floats or {}
        if self._todo:
            raise BridgeError(
                f"{self._folder.path}: {len(self._todo)} of {len(self._layers)} layers have not been quantized, "
                f"starting with {min(self._todo)}"
            )
        unknown = floats.keys() - self._floats.keys()
        if unknown:
            raise BridgeError(f"{min(unknown)}: has changed but is not a float tensor of the new checkpoint")
        for name, info in self._floats.items():
            self._write(name, [_stored(floats[name], info)] if name in floats else self._copied(info))
        for file in self._files:
            with open(self._folder.folder / file, "rb+") as stream:
                self._folder.guard(lambda stream=stream: sync(stream), file)  # type: ignore[misc]
        for name, content in self._configs().items():
            self._folder.write_file(name, (json.dumps(content, indent=2) + "\n").encode())
        source_files = [*self._ckpt.files, *self._ckpt.path.glob("*.index.json")]
        self._folder.copy_rest(source_files)
        self._folder.finish()
        seconds = compiling.clock() - self._begun
        return Written(
            [self._folder.path], seconds, self._name, self._nbytes, len(self._layers), self._raised,
            self._folder.left_out,
        )  # fmt: skip

    # the files

    def _shape(self, name: str, transposed: bool) -> tuple[int, int]:
        """(out, in) of a layer."""
        info = self._ckpt.tensors.get(f"{name}.weight")
        if info is None or len(info.shape) != 2:
            tied = name == "lm_head" and self._ckpt.config.get("tie_word_embeddings")
            raise BridgeError(
                f"{self._ckpt.path}: has no matrix {name}.weight to quantize"
                + ("; the head is tied to the embeddings, leave it out" if tied else "; is it another model's?")
            )
        out, columns = info.shape[::-1] if transposed else info.shape
        if why := self._format.obstacle(self._layers[name], (out, columns)):
            raise BridgeError(f"{name}: {why}")
        return out, columns

    def _plan(self, shard_size: int) -> None:
        """Assign all tensors to files and positions."""
        heights = Counter(stack for stack, _ in self._stacks.values())
        within: dict[str, tuple[str, int]] = {}  # a layer's part -> the stack's, and where in it
        shards: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
        self._floats: dict[str, TensorInfo] = {}
        room = shard_size
        for name, info in self._ckpt.store.tensors.items():
            module = name.removesuffix(".weight")
            entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
            if module in self._layers and name != module:
                layer = self._layers[module]
                lacks = self._format.lacking(layer)
                shapes = {
                    part: shape
                    for part, shape in self._format.shapes(layer, self._shapes[module]).items()
                    if part not in lacks
                }
                stack, matrix = self._stacks.get(module, (module, 0))
                for part, (dtype, shape) in shapes.items():
                    nbytes = math.prod(shape) * NUMPY[dtype].itemsize
                    if module in self._stacks:
                        within[f"{module}.{part}"] = f"{stack}.{part}", matrix * nbytes
                        shape, nbytes = (heights[stack], *shape), heights[stack] * nbytes
                    if matrix == 0:
                        entries[f"{stack}.{part}"] = (dtype, shape, nbytes)
            else:
                self._floats[name] = info
                entries[name] = (info.dtype, info.shape, info.nbytes)
            nbytes = sum(entry[2] for entry in entries.values())
            if shards[-1] and nbytes > room:
                shards.append({})
                room = shard_size
            shards[-1] |= entries
            room -= nbytes
        self._heads: dict[str, bytes] = {}
        self._files: dict[str, int] = {}
        self._locations: dict[str, tuple[str, int]] = {}
        for i, shard in enumerate(shards):
            file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            # the widest first, so that all are aligned
            ordered = dict(sorted(shard.items(), key=lambda item: -item[1][2] // max(1, math.prod(item[1][1]))))
            self._heads[file], starts = header_of(ordered)
            self._files[file] = len(self._heads[file]) + sum(entry[2] for entry in shard.values())
            self._locations |= {name: (file, start) for name, start in starts.items()}
        self._file_of = {name: file for name, (file, _) in self._locations.items()}
        for name, (stack, offset) in within.items():
            file, start = self._locations[stack]
            self._locations[name] = file, start + offset
        self._nbytes = sum(entry[2] for shard in shards for entry in shard.values())

    def _write_heads(self) -> None:
        for file, head in self._heads.items():
            with open(self._folder.folder / file, "xb") as out:
                out.write(head)
                out.truncate(self._files[file])

    def _write(self, name: str, pieces: Iterable[np.ndarray], offset: int = 0, step: int = 0) -> None:
        """Write the bytes of a tensor, piece by piece.

        at    byte of the first
        step  bytes from one to the next; 0: there are none in between
        """
        file, start = self._locations[name]

        def write() -> None:
            with open(self._folder.folder / file, "rb+") as out:
                out.seek(start + offset)
                for i, piece in enumerate(pieces):
                    if step:
                        out.seek(start + offset + i * step)
                    out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                    self._done += piece.nbytes
                    self._tick(self._done, self._nbytes, name)

        self._folder.guard(write, name)

    def _write_rows(self, name: str, values: np.ndarray, shape: tuple[int, ...], first: int, out: int) -> None:
        """Write what a tensor of this shape has of the rows from `first` on of a layer of `out` rows."""
        if values.shape == shape:
            if first == 0:
                self._write(name, [values])
        elif values.shape[1:] == shape[1:]:
            self._write(name, [values], first * shape[0] // out * (values.nbytes // len(values)))
        else:  # rows of the layer are columns of it
            self._write(name, values, first * shape[1] // out * values.itemsize, shape[1] * values.itemsize)

    def _copied(self, info: TensorInfo) -> Iterable[np.ndarray]:
        """A float tensor as it is stored, in slices of rows."""
        if not info.shape or not info.nbytes:
            return [self._ckpt.store.read(info.name)]
        step = max(1, _CHUNK * info.shape[0] // info.nbytes)
        cuts = range(0, info.shape[0], step)
        return (self._ckpt.store.read(info.name, (row, min(row + step, info.shape[0]))) for row in cuts)

    # the labels

    def _configs(self) -> dict[str, Any]:
        """config.json and the other small files that describe the weights."""
        if not self._layers:
            return {"config.json": self._ckpt.config, **self._index()}
        groups = {self._stacks.get(name, (name, 0))[0]: layer for name, layer in self._layers.items()}
        layers = QuantizedLayers(groups, self._float_modules(), self._asymmetric, self._act_order, self._has_towers())
        labels = self._format.labels(layers)
        configs: dict[str, Any] = {"config.json": {**self._ckpt.config, **labels}}
        if self._format.labels_file:
            configs[self._format.labels_file] = labels["quantization_config"]
        return configs | self._index()

    def _index(self) -> dict[str, Any]:
        """The index of several files, by its name."""
        if len(self._files) < 2:
            return {}
        weight_map = dict(sorted(self._file_of.items()))
        return {"model.safetensors.index.json": {"metadata": {"total_size": self._nbytes}, "weight_map": weight_map}}

    def _float_modules(self) -> list[str]:
        """Modules whose matrices stay floats, which a reader would expect to be quantized: not embeddings and head."""
        names = [
            n.removesuffix(".weight") for n, i in self._floats.items() if n.endswith(".weight") and len(i.shape) == 2
        ]
        return [n for n in names if n != "lm_head" and (self._has_towers() or layer_of(n) is not None or "proj" in n)]

    def _has_towers(self) -> bool:
        """Whether the model has other parts than a language model."""
        return not _TOWERS.isdisjoint(self._ckpt.config)


class WriterKeywords(TypedDict, total=False):
    """The keywords of `CheckpointWriter`."""

    transposed: Collection[str]
    stacks: Mapping[str, tuple[str, int]] | None
    clamp: bool
    shard_size: int
    force: bool
    progress: Progress | None


@checked
def write_checkpoint(
    ckpt: FloatSource, path: str | Path, format: str, layers: Mapping[str, Groups],
    tensors: Iterable[GroupedTensor] | Mapping[str, GroupedTensor], *, floats: Mapping[str, np.ndarray] | None = None,
    **options: Unpack[WriterKeywords],
) -> Written:  # fmt: skip
    """Write a checkpoint of layers in any order, or of a mapping by name, which may load each on access.

    floats   see `CheckpointWriter.finish`
    options  see `CheckpointWriter`
    """
    with CheckpointWriter(ckpt, path, format, layers, **options) as writer:
        for tensor in (tensors[name] for name in layers) if isinstance(tensors, Mapping) else tensors:
            writer.add(tensor)
        return writer.finish(floats)


def _stored(values: np.ndarray, info: TensorInfo) -> np.ndarray:
    """float32 values in the dtype of the tensor that they replace."""
    if values.shape != info.shape:
        raise BridgeError(f"{info.name}: is {list(values.shape)}, but {list(info.shape)} in the model")
    if not np.isfinite(stored := from_float32(values, info.dtype)).all() and info.dtype != "BF16":
        raise BridgeError(f"{info.name}: too large for {info.dtype} after scaling; save the model as bf16")
    return stored

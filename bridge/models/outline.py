"""A model as GGUF wants it, before the checkpoint's data is looked at: names, sources, row orders, metadata.

A family (`bridge.models`) or a template (`bridge.models.template`) makes an Outline;
`bridge.conversion.planning.planner` makes a Plan of it. It holds no weights, but for small tensors that are made from
the config and those that a template keeps.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from gguf.gguf_writer import GGUFValue

from bridge.checkpoint.tensor_names import expert_of
from bridge.errors import BridgeError
from bridge.gguf_file.tensor_names import block_of, without_block

# where a tensor comes from; "scale": what multiplies a tensor of NVFP4, a tensor of its own
Origin = Literal["checkpoint", "config", "template", "scale"]
FRAMES = ("frame 0", "frame 1")
ADDED = {"+1": 1.0, "+1/5": 1 / 5, "+1/5^1.5": 1 / 5**1.5}  # what is added to norms that are stored without it
CHANGES = (
    "transposed", "conv1d", "squeezed", "scalar", "patches", "colours first", "swapped", "exp", "-exp", "softplus",
    "unit columns", "targets", *ADDED, *FRAMES,
)  # fmt: skip


def without_added(values: np.ndarray, change: str | None) -> np.ndarray:
    """The values as they are stored, before a number of `ADDED` was added; the same ones where none was."""
    return values - np.float32(ADDED[change]) if change in ADDED else values


COLOURS = 3


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that a tensor of the GGUF takes from one tensor of the checkpoint.

    source   in the checkpoint, "model.layers.0.self_attn.q_proj.weight", of a quantized module too
    shape    (out, in) or (n,) as the GGUF has it: a stored tensor may be padded with zeros beyond it
    rows     int64 [out] or None: row i of the GGUF is row rows[i] of the source
    columns  int64 [in] or None: the source's columns in the GGUF's order
    factor   float32 [rows of the source] or None: what its rows are multiplied by; codes stay, scales change
    times    another tensor of the checkpoint that a vector is multiplied by, or None
    folded   whether `columns` undoes act-order: an imatrix has the columns in the order before that
    matrix   which matrix of a 3-D source this is
    stored   the source's shape where `rows` or `columns` pick from more than they return; after `change`
    change   what is done to the source before rows and columns are picked: "transposed"; "squeezed", dimensions of
             one dropped; "+1", one added, and others of `ADDED`; "exp", e to the power of it, "-exp", minus that:
             the result is floats, whatever it was.
             "frame 0", "frame 1": filters of one of two frames, of [out, in, frames, height, width].
             "softplus": log(1 + e to the power of it). "scalar": one number as a vector, which may be infinite.
             "unit columns": each of length one.
             "targets": whole numbers, each counted from its own place, as numbers that are counted from 0.
             "patches": [out, side * side * colours] as filters [out, colours, side, side]; "colours first": the
             same order of columns, or of a vector's elements, in the old shape. "swapped": the first two dimensions.
             "conv1d": transposed where it is floats, for quantizers turn such layers into linear ones
    """

    source: str
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    matrix: int | None = None
    stored: tuple[int, ...] | None = None
    change: str | None = None
    factor: np.ndarray | None = None
    times: str | None = None
    folded: bool = False

    @property
    def module(self) -> str:
        """The linear layer that this is the weight of."""
        return self.source.removesuffix(".weight")

    @property
    def layer(self) -> str | None:
        """What calibration calls the linear layer: a matrix of a 3-D tensor as if it stood by itself.

        experts.gate_up_proj -> experts.3.gate_proj, its first half of rows or each second one, or experts.3.up_proj;
        None: neither, or its rows are multiplied
        """
        if self.factor is not None:
            return None
        if self.matrix is None:
            return self.module
        experts, _, name = self.source.rpartition(".")
        if name == "gate_up_proj" and self.rows is not None:
            rows, count = self.rows, np.arange(len(self.rows))
            name = ""
            if np.array_equal(rows, count) or np.array_equal(rows, 2 * count):
                name = "gate_proj"
            elif np.array_equal(rows, count + len(count)) or np.array_equal(rows, 2 * count + 1):
                name = "up_proj"
        elif name != "down_proj" or self.rows is not None:
            name = ""
        return f"{experts}.{self.matrix}.{name}" if name and self.change in (None, "transposed") else None


def changed_shape(change: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor of the checkpoint has after a change of `Part`; of "conv1d", if it is floats."""
    if change in ("transposed", "conv1d"):
        return shape[::-1]
    if change in FRAMES:
        return (*shape[:2], *shape[3:])
    if change == "squeezed":
        return tuple(n for n in shape if n > 1)
    if change == "scalar":
        return shape or (1,)
    if change == "swapped":
        return (*shape[1::-1], *shape[2:])
    if change == "patches" and len(shape) == 2:
        side = math.isqrt(shape[1] // COLOURS)
        return (shape[0], COLOURS, side, side)
    return shape


class Stack(NamedTuple):
    """A matrix, or those of experts, under one of the names that a `Row` has for it.

    name        of a linear layer, with * for an expert's number, or of a 3-D tensor of all experts
    rows        of its matrices that are meant; None: all
    matrix      the shape of a matrix, with all rows
    transposed  whether its matrices are transposed in the file unless shapes tell otherwise
    """

    name: str
    rows: np.ndarray | None
    matrix: tuple[int, ...]
    transposed: bool

    @classmethod
    def of(cls, source: str, shape: tuple[int, ...]) -> Self:
        """The stack of a source without *, of which an expert has matrices of `shape`."""
        name, _, share = source.rstrip("^").rstrip("]").partition("[")
        if not share:
            return cls(name, None, shape, source.endswith("^"))
        which, of = map(int, share.replace("::", "/").split("/"))
        rows = which + of * np.arange(shape[0]) if "::" in share else which * shape[0] + np.arange(shape[0])
        return cls(name, rows, (of * shape[0], *shape[1:]), source.endswith("^"))

    def transposed_in(self, shapes: Mapping[str, Sequence[int]]) -> bool | None:
        """Whether its shape in the checkpoint is that of transposed matrices; None where it does not tell."""
        if self.matrix[0] == self.matrix[1] or not shapes.get(self.name):
            return None
        return tuple(shapes[self.name][1:]) == self.matrix[::-1]


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One tensor of the GGUF, whatever its type.

    name    in the GGUF, "blk.0.attn_q.weight"
    shape   in row-major order, (out, in), (experts, out, in) or (n,)
    parts   what it is read from, one after another: one, a layer's experts, or q, k and v of a fused matrix
    data    instead of parts: float32 values, or the bytes of its type
    origin  where parts or data come from
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    data: np.ndarray | None = field(default=None, repr=False)
    origin: Origin = "checkpoint"

    @property
    def kind(self) -> str:
        """The name without layer and suffix: "attn_q", "ffn_down", "token_embd"."""
        name = without_block(self.name)
        return name.rpartition(".")[0] or name

    @property
    def layer(self) -> int | None:
        """0-based; None outside the blocks."""
        return block_of(self.name)

    @property
    def source(self) -> str | None:
        """Its name in the checkpoint; of experts, with * for their number; None where it has none."""
        if not self.parts:
            return None
        name = self.parts[0].source
        expert = expert_of(name) if len(self.parts) > 1 else None
        return expert.pattern if expert else name


@dataclass(frozen=True, eq=False)
class OutlineTensor(ModelTensor):
    """A tensor before types are chosen.

    fixed_type  the type it must have: F32 for norms, biases and routers, a template's own; None: to be chosen
    stacks      all names that the family knows, where there are several, without their start in a larger model
    """

    fixed_type: str | None = None
    stacks: tuple[Stack, ...] = ()

    @property
    def in_block(self) -> bool:
        """Whether it has linear layers of a block that may be codes: no routers, nor what layers that predict further
        tokens have besides, which programs that load codes do not expect to be any."""
        return self.fixed_type is None and self.layer is not None and not self.kind.startswith("nextn.")


@dataclass(frozen=True)
class Fold:
    """A linear layer whose columns are the rows of others, element by element: module names.

    Permuting the columns of `consumer` and the rows of every producer alike changes nothing.
    """

    consumer: str
    producers: tuple[str, ...]


@dataclass(eq=False)
class Outline:
    """A model as GGUF wants it, before the checkpoint's data is looked at.

    metadata   every key but general.file_type and general.quantization_version
    tensors    in the order in which they are to be written
    folds      where act-order can be undone by permuting rows elsewhere
    unused     tensors of the checkpoint that GGUF does not need
    zero_only  tensors that llama.cpp's graph has no place for: they must be all zeros (old GPTQ tools write such
               biases), or the model is refused
    optional   biases that are left out where they are all zeros: old GPTQ tools write them for every layer
    others     tensors of the checkpoint that belong to other parts of the model: towers for images or sound
    numbers    keys that list what tensors of one number hold: key -> their names
    integers   keys that list the integers of a tensor: key -> its name
    stop       the texts of the tokens that end a reply, the EOS token first
    notes      what the reader of the report should know
    """

    metadata: dict[str, GGUFValue]
    tensors: list[OutlineTensor]
    folds: list[Fold] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    zero_only: list[str] = field(default_factory=list)
    optional: frozenset[str] = frozenset()
    others: list[str] = field(default_factory=list)
    numbers: dict[str, list[str]] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tied(tensors: Iterable[ModelTensor]) -> bool:
    """Whether the embeddings are the output head too."""
    return all(tensor.kind != "output" for tensor in tensors)


def number(metadata: Mapping[str, GGUFValue], key: str, default: int = 0) -> int:
    """A count of the architecture's, such as block_count; the largest where layers differ. BridgeError for others."""
    name = f"{metadata['general.architecture'].value}.{key}"
    if name not in metadata:
        return default
    value: Any = metadata[name].value
    counts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(count, (int, np.integer)) for count in counts):
        raise BridgeError(f"{name}: is {reprlib.repr(value)}, must be a whole number")
    return int(max(counts, default=default))

"""What is known of a checkpoint format that is also written. The module of its reader ends with the record.

    shapes      how the format stores a layer, also what the reader compares with
    pack        a GroupedTensor, or a PackedTensor -> the layer's tensors: the inverse of `Reader.read`
    refusal     which layers it cannot hold
    labels      what config.json says of all layers: the inverse of `Reader.complete`
    the others  what decides the bits, groups and zero points of a layer that is written, and how it is packed

`registry` lists all records.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32, from_float32
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.tensor_names import joined
from bridge.errors import BridgeError

Parts = dict[str, np.ndarray]  # by the last part of the name
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dtype as safetensors names it, shape


class Groups(NamedTuple):
    """How one layer is quantized.

    bits        per code; ternary codes have 2
    group_size  -1: one group per row
    symmetric   zero points are not stored, where the format allows that
    kind        of the codes: int, NVFP4, MXFP4, FP8 or MXFP8
    act_order   groups are of any columns, which the format's `order_part` tells
    scales      the dtype of scales
    rows        that share a scale; -1: all
    static      whether activations have a scale that is stored
    """

    bits: int
    group_size: int
    symmetric: bool = False
    kind: str = "int"
    act_order: bool = False
    scales: str = "F16"
    rows: int = 1
    static: bool = False

    @property
    def strategy(self) -> str:
        """What has a scale: a tensor, channel, block or group."""
        if self.rows != 1:
            return "tensor" if self.rows < 0 else "block"
        return "group" if self.group_size > 0 else "channel"

    def in_words(self) -> str:
        """The kind of the codes and what has a scale."""
        kind = f"{self.bits} bits" if self.kind == "int" else self.kind
        each = {
            "tensor": "one scale",
            "channel": "one scale a row",
            "block": f"blocks of {self.rows}x{self.group_size}",
        }
        return f"{kind}, {each.get(self.strategy, f'groups of {self.group_size}')}"

    def sizes(self) -> dict[str, int]:
        """Bits and group size, under the names of most configs."""
        return {"bits": self.bits, "group_size": self.group_size}

    def width(self, columns: int) -> int:
        """The columns of a group, of a row of so many."""
        return self.group_size if self.group_size > 0 else columns

    def count(self, columns: int) -> int:
        """How many groups a row has; the last may be short."""
        return -(-columns // self.group_size) if self.group_size > 0 else 1

    def indivisible(self, columns: int, of: str = "") -> str | None:
        """Why groups that must be of equal size do not fit a row; None if they do."""
        if self.group_size <= 0 or columns % self.group_size == 0:
            return None
        return f"groups of {self.group_size} do not divide {columns} columns{of}; leave it in floats"


@dataclass(frozen=True)
class QuantizedLayers:
    """What the labels of a checkpoint describe.

    groups      by the layer's name, at least one
    floats      matrices of blocks that are not quantized, which a reader would expect to be
    asymmetric  whether a layer has zero points other than the middle
    act_order   whether a layer has it
    towers      whether the model has other parts than a language model, though their tensors may be missing
    """

    groups: Mapping[str, Groups]
    floats: list[str]
    asymmetric: bool
    act_order: bool
    towers: bool

    def with_joined(self) -> "QuantizedLayers":
        """These and the layers that vLLM and SGLang make of several that are quantized alike, or all floats."""
        of_joined = joined({**self.groups, **dict.fromkeys(self.floats)})
        groups = {name: groups for name, groups in of_joined.items() if groups is not None}
        floats = [name for name, groups in of_joined.items() if groups is None]
        return replace(self, groups={**groups, **self.groups}, floats=[*self.floats, *floats])

    @property
    def usual(self) -> Groups:
        """The groups that most layers have."""
        return Counter(self.groups.values()).most_common(1)[0][0]

    def others(self) -> dict[str, Groups]:
        """The layers that differ from the usual."""
        usual = self.usual
        return {name: groups for name, groups in self.groups.items() if groups != usual}


@dataclass(frozen=True)
class WrittenFormat:
    """A checkpoint format that is written.

    name             as `--format` has it
    hint             for the help: what else is to be said of the name
    bits             of integer codes, ascending
    group_sizes      of integer codes; empty: any
    fp4              kinds of 4-bit floats that it holds
    tensor_scale     whether it has a scale for a whole matrix of 4-bit floats
    fp8              what may have a scale of 8-bit floats, the preferred first: tensor, channel, block (of 128 x 128),
                     or group (of 32 columns, a power of two); "static tensor", "static channel": with a scale of
                     activations
    zeros            zero points: integers, integers but 0, integers of which 0 becomes 1 with its codes, the middle of
                     the codes alone, any halves, or the products -scale * zero point as halves
    rounding         zero points of layers that are rounded below 8 bits: the middle of the codes, any, or as asked
    scale_dtypes     those that scales may have; halves are preferred
    act_order        whether groups may be of any columns
    one_size         whether all layers have groups of one size
    in_words         whether consecutive codes of a row fill 32-bit words, as `write.block_words` packs them
    transposed       whether rows of a layer are columns of its tensors
    lanes            bits -> into how many parts of rows a word looks: with 2, it has codes of a row of each half
    refusal          (groups, (out, in)) -> why the format cannot hold such integer codes, None if it can
    shapes           (groups, (out, in)) -> its tensors' dtypes and shapes
    pack             layer -> its tensors
    zeros_part       the tensor that a symmetric layer lacks, if there is one
    order_part       the tensor that a layer without act-order lacks, if there is one
    shape_part       the tensor that holds a layer's shape, if there is one
    labels           the keys of config.json that describe the layers
    labels_file      a file that has quantization_config too
    config           config.json as the format's readers need it
    dtype            of floats, if the format's scales ask for one
    stack_of         (config.json's model_type, module) -> the stack of experts that the module is in, and which of its
                     matrices; None for others. None: the format has no stacks
    head             whether the output head may have codes
    embeddings       whether the embeddings may
    by_quantize      whether `quantize --format` writes it too
    """

    name: str
    bits: tuple[int, ...]
    shapes: Callable[[Groups, tuple[int, int]], Shapes]
    pack: Callable[[Any], Parts]
    labels: Callable[[QuantizedLayers], dict[str, Any]]
    refusal: Callable[[Groups, tuple[int, int]], str | None] = lambda _groups, _shape: None
    hint: str = ""
    group_sizes: tuple[int, ...] = ()
    fp4: tuple[str, ...] = ()
    tensor_scale: bool = True
    fp8: tuple[str, ...] = ()
    zeros: Literal["integers", "integers from 1", "raised to 1", "middle", "halves", "products"] = "integers"
    rounding: Literal["symmetric", "asymmetric", "either"] = "either"
    scale_dtypes: tuple[str, ...] = ("F16",)
    act_order: bool = False
    one_size: bool = False
    in_words: bool = False
    transposed: bool = False
    lanes: Callable[[int], int] = lambda _bits: 1
    zeros_part: str = ""
    order_part: str = ""
    shape_part: str = ""
    labels_file: str = ""
    config: Callable[[dict[str, Any]], dict[str, Any]] = dict
    dtype: str | None = None
    stack_of: Callable[[str, str], tuple[str, int] | None] | None = None
    head: bool = False
    embeddings: bool = False
    by_quantize: bool = False

    @property
    def any_zeros(self) -> bool:
        """Whether zero points need not be integers."""
        return self.zeros in ("halves", "products")

    @property
    def holds_zero(self) -> bool:
        """Whether a zero point may be 0."""
        return self.zeros != "integers from 1"

    @property
    def from_1(self) -> bool:
        """Whether zero points are at least 1 as they are written."""
        return self.zeros in ("integers from 1", "raised to 1")

    def lacking(self, groups: Groups) -> set[str]:
        """The tensors of the format that such a layer lacks."""
        lacks = {self.zeros_part: groups.symmetric, self.order_part: not groups.act_order}
        return {part for part, absent in lacks.items() if absent}

    def holds_fp4(self, kind: str, tensor_scale: float) -> bool:
        """Whether it holds 4-bit floats of a kind with this scale of the whole matrix."""
        return kind in self.fp4 and (self.tensor_scale or tensor_scale == 1)

    def obstacle(self, groups: Groups, shape: tuple[int, int]) -> str | None:
        """Why it cannot hold a layer (out, in), in one line; None if it can."""
        if groups.kind == "FP8":
            return None
        return self.refusal(groups, shape) if groups.kind == "int" else groups.indivisible(shape[1])

    def scale_dtype(self, scales: np.ndarray) -> str:
        """The first of its dtypes that holds float32 scales exactly; halves if none does."""
        return next((dtype for dtype in self.scale_dtypes if (in_dtype(scales, dtype) == scales).all()), "F16")

    def stored_scales(self, tensor: GroupedTensor) -> np.ndarray:
        """The scales as halves; as float32 where the format has others, which hold them exactly.

        Raises BridgeError unless the format holds the tensor exactly, except zero points of 0.
        """
        scales = tensor.scales.astype(np.float16)
        halves = bool((scales == tensor.scales).all())
        dtype = self.scale_dtype(tensor.scales)
        top = 2**tensor.bits - 1
        integral = (tensor.zeros == np.rint(tensor.zeros)) & (tensor.zeros >= 0) & (tensor.zeros <= top)
        why = self.refusal(Groups(tensor.bits, tensor.group_size), tensor.shape)
        if tensor.group_of_column is not None and not self.act_order:
            why = f"{self.name} has no act-order; quantize with groups of consecutive columns"
        elif tensor.codes.max(initial=0) > top:
            why = f"the code {tensor.codes.max()} is beyond {tensor.bits} bits"
        elif not self.any_zeros and not integral.all():
            why = f"{self.name} can only hold zero points that are integers from 0 to {top}; write a GGUF instead"
        elif not (halves or dtype != "F16") or not np.isfinite(tensor.scales).all():
            why = "its scales are not half-precision floats; round them before choosing codes"
        if why:
            raise BridgeError(f"{tensor.name}: {why}")
        return scales if halves else tensor.scales


def in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to a dtype."""
    return as_float32(from_float32(values, dtype), dtype)


def have_shapes(tensors: Mapping[str, TensorInfo], shapes: Shapes, stack: tuple[int, ...] = ()) -> bool:
    """Whether a module's tensors are stored in these shapes and dtypes; halves stand for any floats.

    stack  the dimensions before a matrix's, of modules that are stacked
    """
    return all(
        part in tensors
        and tensors[part].shape == (*stack, *shape)
        and (tensors[part].floating if dtype == "F16" else tensors[part].dtype == dtype)
        for part, (dtype, shape) in shapes.items()
    )


def zeros_of_0(tensor: GroupedTensor) -> int:
    """How many groups have a zero point of 0."""
    return int(np.count_nonzero(tensor.zeros == 0))


def raised(tensor: GroupedTensor) -> tuple[GroupedTensor, int]:
    """The tensor with zero points of 0 changed to 1 and those groups' codes raised by 1: the same weights, except
    at the greatest code, where they lose a step. Also the number of such weights."""
    by = (tensor.zeros == 0)[:, tensor.groups()]
    lost = by & (tensor.codes == 2**tensor.bits - 1)
    codes = tensor.codes + (by & ~lost).astype(np.uint8)
    return replace(tensor, codes=codes, zeros=np.maximum(tensor.zeros, 1)), int(lost.sum())

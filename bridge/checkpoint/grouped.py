"""The one in-memory form of a group-quantized linear layer: every reader of integer codes returns it.

W[o, k] = scales[o, g] * (codes[o, k] - zeros[o, g]),   g = group_of_column[k]

Scales may be negative (MLX, auto-round), zero points fractional (MLX, HQQ). Codes of 4-bit floats (`fp4`) and codes
that were decoded to floats (`decoded`) have their own forms; all are CodedTensors.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from bridge.errors import BridgeError


class CodedTensor:
    """A linear layer's weight as codes in groups of columns, whatever a code means."""

    per_weight: ClassVar[str] = "codes"  # the field that is [out, in]
    per_group: ClassVar[tuple[str, ...]]  # the fields that are [out, G]
    padding: int = 1  # 1: sides may be padded with zeros only
    name: str
    bits: int
    codes: np.ndarray
    scales: np.ndarray
    group_size: int
    group_of_column: np.ndarray | None = None
    bias: np.ndarray | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.bits} bits, {list(self.shape)})"

    @property
    def obstacle(self) -> str | None:
        """Why no block type can carry these codes; None if some can."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return getattr(self, self.per_weight).shape

    @property
    def sequential(self) -> bool:
        """Whether groups are runs of consecutive columns (no act-order)."""
        return self.group_of_column is None

    def groups(self) -> np.ndarray:
        """int32 [in]: the group of each column."""
        if self.group_of_column is not None:
            return self.group_of_column
        return (np.arange(self.codes.shape[1], dtype=np.int32) // self.group_size).astype(np.int32)

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """The weights, float32 [out, in], or those of a slice of `rows`."""
        raise NotImplementedError

    def noise(self) -> float:
        """The checkpoint's own expected quantization noise, summed over all weights."""
        raise NotImplementedError

    def _selected(self, index: object, group_index: object) -> dict[str, np.ndarray]:
        """The per-weight field and the per-group fields at some rows and columns."""
        cut = {field: np.ascontiguousarray(getattr(self, field)[group_index]) for field in self.per_group}
        return {self.per_weight: np.ascontiguousarray(getattr(self, self.per_weight)[index]), **cut}

    def scaled(self, factor: np.ndarray) -> "CodedTensor":
        """Rows multiplied by float32 [out]: the same codes where scales can take it, else floats."""
        raise NotImplementedError

    def take_rows(self, order: np.ndarray) -> Self:
        """Permute the rows (output features): codes, scales, zero points and bias."""
        return replace(  # type: ignore[type-var]
            self, bias=None if self.bias is None else self.bias[order], **self._selected(order, order)
        )

    def take_columns(self, order: np.ndarray) -> Self:
        """Permute the columns (input features); groups that become sequential are recognized."""
        group = self.groups()[order]
        size = column_group_size(group)
        used = int(group[-1]) + 1 if size else self.scales.shape[1]  # cropping may have emptied the last groups
        return replace(  # type: ignore[type-var]
            self,
            group_size=size or self.group_size,
            group_of_column=None if size else group,
            **self._selected((slice(None), order), (slice(None), slice(used))),
        )

    def crop(self, out: int, columns: int) -> Self:
        """The first `out` rows and `columns` columns: the tensor without its zero padding.

        Raises BridgeError if the tensor is smaller.
        """
        if self.shape == (out, columns):
            return self
        if self.shape[0] < out or self.shape[1] < columns:
            raise BridgeError(
                f"{self.name}: is {list(self.shape)} but the config requires {[out, columns]}; "
                "correct config.json's sizes"
            )
        order = self.group_of_column
        groups = self.scales.shape[1] if order is not None else -(-columns // self.group_size)
        cut = self._selected((slice(out), slice(columns)), (slice(out), slice(groups)))
        if order is not None:
            cut["group_of_column"] = order[:columns]
        return replace(self, bias=None if self.bias is None else self.bias[:out], **cut)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class GroupedTensor(CodedTensor):
    """A linear layer's weight as integer codes: W[o, k] = scales[o, g] * (codes[o, k] - zeros[o, g]), g the group of k.

    codes            uint8 [out, in]
    scales           float32 [out, G], exactly the stored values
    zeros            float32 [out, G], true zero points (integers for GPTQ and AWQ)
    group_size       columns in a group; the last group may be short. Ignored where
                     `group_of_column` is given
    group_of_column  int32 [in], or None where column k is in group k // group_size
    bits             per code
    name             the module's name in the checkpoint, for messages
    bias             float32 [out] or None
    ternary          whether codes are 0, 1 and 2 only
    notes            sentences about what the reader found
    """

    name: str
    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_size: int
    group_of_column: np.ndarray | None = None
    bias: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())  # what the reader found and did, for the report
    ternary: bool = False
    per_group: ClassVar = ("scales", "zeros")
    kind: ClassVar = "int"

    def __post_init__(self) -> None:
        out, columns = self.codes.shape
        groups = self.scales.shape[1]
        if self.scales.shape != (out, groups) or self.zeros.shape != (out, groups):
            raise BridgeError(
                f"{self.name}: scales {list(self.scales.shape)} and zero points {list(self.zeros.shape)} "
                f"do not fit {out} rows; the checkpoint is damaged"
            )
        if self.group_of_column is None and groups != -(-columns // self.group_size):
            raise BridgeError(
                f"{self.name}: {groups} groups of {self.group_size} do not cover {columns} columns; "
                "the group size in the config is wrong, or the scales are"
            )

    @property
    def levels(self) -> int:
        """Codes are 0..levels-1."""
        return 3 if self.ternary else 2**self.bits

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """The weights, float32 [out, in], or those of a slice of `rows`."""
        out, columns = self.codes[rows].shape
        if self.sequential and columns == self.scales.shape[1] * self.group_size:  # the same products, group by group
            weights = self.codes[rows].astype(np.float32).reshape(out, -1, self.group_size)
            weights -= self.zeros[rows][:, :, None]
            weights *= self.scales[rows][:, :, None]
            return weights.reshape(out, columns)
        group = self.groups()
        return self.scales[rows][:, group] * (self.codes[rows].astype(np.float32) - self.zeros[rows][:, group])

    def code_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [out, G]: the least and the greatest code of each group; 255 and 0 of one without columns."""
        out, columns = self.codes.shape
        if self.sequential and columns == self.scales.shape[1] * self.group_size:
            codes = self.codes.reshape(out, -1, self.group_size)
            return codes.min(axis=2), codes.max(axis=2)
        groups = self.groups()
        order = np.argsort(groups, kind="stable")
        used, starts = np.unique(groups[order], return_index=True)
        codes = self.codes[:, order]
        low, high = np.full(self.scales.shape, 255, np.uint8), np.zeros(self.scales.shape, np.uint8)
        low[:, used] = np.minimum.reduceat(codes, starts, axis=1)
        high[:, used] = np.maximum.reduceat(codes, starts, axis=1)
        return low, high

    def half_products(self) -> np.ndarray:
        """float16 [out, G]: -scale * zero point, added to scaled codes. Infinite where a half cannot hold it."""
        with np.errstate(over="ignore"):
            return np.asarray(-self.zeros * self.scales, np.float16) + np.float16(0)  # no -0

    def scaled(self, factor: np.ndarray) -> Self:
        return replace(self, scales=self.scales * factor[:, None])

    def noise(self) -> float:
        """The checkpoint's own expected quantization noise: sum of s^2 / 12 over all weights."""
        columns = np.bincount(self.groups(), minlength=self.scales.shape[1])
        return float((np.square(self.scales, dtype=np.float64) @ columns).sum() / 12)


def column_group_size(group: np.ndarray) -> int | None:
    """The group size if `group` (int [in]) is 0,0,..,1,1,.. in equal runs (the last may be short), else None."""
    size = int(np.searchsorted(group, 1)) if group[0] == 0 else 0
    if size and np.array_equal(group, np.arange(len(group)) // size):
        return size
    return None


def fit_group_size(columns: int, groups: int, claimed: int) -> int | None:
    """The group size that makes `groups` of `columns`: the claimed one, else a power of two, else None."""
    for size in (claimed, columns if groups == 1 else 0, *(1 << n for n in range(3, 15))):
        if size > 0 and -(-columns // size) == groups:
            return min(size, columns)
    return None


@dataclass(frozen=True)
class PackedTensor:
    """A linear layer whose codes are packed as checkpoints store them: on the way from blocks, none is a byte.

    words         uint32 [out, in * bits / 32]; the first code of a word is in the low bits. May be a transposed view.
                  Of 8-bit floats their bits, uint8 [out, in]
    scales        float16 [out, G], or such a view; of FP8 float32 [out / rows, G]; of other floats the bits of 8-bit
                  ones, uint8
    zero          zero point of all groups
    biases        float16 [out, G] that are added to scaled codes, instead of a zero point; or None
    kind          int, NVFP4, MXFP4, FP8 or MXFP8
    tensor_scale  of the whole tensor, which NVFP4 may have
    rows          that share a scale
    input_scale   of activations, if they are to be 8-bit floats with that scale
    """

    name: str
    bits: int
    words: np.ndarray
    scales: np.ndarray
    group_size: int
    zero: int = 0
    biases: np.ndarray | None = None
    kind: str = "int"
    tensor_scale: float = 1.0
    rows: int = 1
    input_scale: float | None = None
    sequential: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, words = self.words.shape
        return out, words * self.words.itemsize * 8 // self.bits

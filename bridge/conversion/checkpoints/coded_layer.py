"""A layer of a quantized checkpoint, on its way to another format, see `codes_in_format`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard
from zlib import crc32

import numpy as np

from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.written import Groups, in_dtype
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, PackedTensor
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.conversion.checkpoints.codes_in_format import (
    as_integers,
    fp8_in_format,
    in_format,
    in_groups_of,
    packed_fp4,
)
from bridge.conversion.checkpoints.layer_plan import (
    CALIBRATED,
    EXACT,
    ROUNDED,
    Coded,
    Layer,
    LayerPlan,
    Rows,
    groups_of,
    joined,
)


@dataclass(frozen=True)
class CodedLayer(Layer):
    """A layer that a checkpoint stores as codes.

    tensor  reads it
    """

    tensor: Callable[[], CodedTensor]

    def floats(self, rows: slice) -> np.ndarray:
        return self.tensor().dequantize(rows)

    def noise(self) -> float | None:
        return self.tensor().noise()

    def share(self, how: str, error: float) -> float | None:
        noise = self.noise() if error and how != CALIBRATED else None
        return error / noise if noise else None

    def _coded_plan(self, known: tuple[int, ...], bits: int | None) -> LayerPlan | None:
        tensor = self.tensor()
        if self._holds_fp4(tensor) and (bits is None or bits >= tensor.bits):
            return LayerPlan(EXACT, Groups(4, tensor.group_size, True, tensor.kind), packed=True)
        coded = self._in_bits(tensor, known)
        if coded is None:
            return None
        middle = bool((coded.zeros == 1 << (coded.bits - 1)).all())
        groups = groups_of(coded.bits, coded.group_size, middle, self.shape, self.written)
        order = 0 if coded.group_of_column is None else crc32(coded.group_of_column.tobytes())
        act_order = bool(self.written.order_part) and not coded.sequential
        groups = groups._replace(act_order=act_order, scales=self.written.scale_dtype(coded.scales))
        return LayerPlan(EXACT, groups, order=order)

    def _holds_fp4(self, tensor: CodedTensor) -> TypeGuard[Fp4Tensor]:
        """Whether it is of 4-bit floats that the format holds."""
        if not isinstance(tensor, Fp4Tensor) or not tensor.sequential:
            return False
        return self.written.holds_fp4(tensor.kind, tensor.tensor_scale)

    def _in_bits(self, tensor: CodedTensor, bits: tuple[int, ...]) -> GroupedTensor | None:
        """The codes as the format holds them; None where it does not."""
        integers = as_integers(tensor) if isinstance(tensor, Fp4Tensor) else tensor
        return in_format(integers, self.written, bits) if isinstance(integers, GroupedTensor) else None

    def codes(self, plan: LayerPlan, rows: Rows, arrays: ReusedArrays) -> Coded:
        tensor, groups = self.tensor(), plan.groups
        if plan.packed:
            assert isinstance(tensor, Fp4Tensor)  # as it was planned
            return replace(packed_fp4(tensor), name=self.module)
        if plan.how == ROUNDED:
            coded: GroupedTensor | None = joined([*self._rounded_pieces(plan, *rows)])
        else:
            coded = self._in_bits(tensor, (groups.bits,))
        assert coded is not None  # as it was planned
        return replace(in_groups_of(coded, groups.width(self.shape[1])), name=self.module, bias=None)

    def squared_errors(self, plan: LayerPlan, tensor: Coded, rows: Rows) -> tuple[float, float]:
        if plan.how == EXACT and isinstance(tensor, GroupedTensor) and self._keeps_weights(tensor):
            return 0.0, 0.0
        return super().squared_errors(plan, tensor, rows)

    def _keeps_weights(self, tensor: GroupedTensor) -> bool:
        """Whether it is seen from codes, scales and zero points alone that all weights are those of the checkpoint."""
        source, written = self.tensor(), self.written
        raised = written.from_1 and not tensor.zeros.all()
        if raised or written.zeros == "products" or not isinstance(source, GroupedTensor):
            return False
        source = in_groups_of(source, tensor.group_size)
        zeros = in_dtype(tensor.zeros, "F16") if written.zeros == "halves" else tensor.zeros
        shifts = zeros - source.zeros
        codes = tensor.codes
        if shifts.any():
            codes = codes - shifts.astype(np.int16)[:, tensor.groups()]
        whole_steps = np.array_equal(shifts, np.rint(shifts))
        return whole_steps and np.array_equal(tensor.scales, source.scales) and np.array_equal(codes, source.codes)

    def _values(self, tensor: GroupedTensor, rows: slice) -> np.ndarray:
        if self.written.zeros != "products":
            return super()._values(tensor, rows)
        products = tensor.half_products()[rows].astype(np.float32)  # as its reader computes with them
        scales = tensor.scales[rows]
        zeros = np.divide(-products, scales, out=np.zeros_like(scales), where=scales != 0)
        return replace(tensor, codes=tensor.codes[rows], scales=scales, zeros=zeros).dequantize()


@dataclass(frozen=True)
class FloatLayer(Layer):
    """A layer of 8-bit floats with scales.

    read    its rows, float32
    stored  its bytes and scales; None where no format has them
    """

    read: Callable[[slice], np.ndarray]
    stored: Callable[[], PackedTensor | None]

    def floats(self, rows: slice) -> np.ndarray:
        return self.read(rows)

    def noise(self) -> float | None:
        return None

    def _in_format(self) -> PackedTensor | None:
        """It as the format holds it; None where it does not."""
        tensor = self.stored() if self.written.fp8 else None
        return None if tensor is None else fp8_in_format(tensor, self.written)

    def _coded_plan(self, known: tuple[int, ...], bits: int | None) -> LayerPlan | None:
        tensor = self._in_format() if bits is None or bits >= 8 else None
        if tensor is None:
            return None
        static = tensor.input_scale is not None
        groups = Groups(8, tensor.group_size, True, tensor.kind, scales="F32", rows=tensor.rows, static=static)
        return LayerPlan(EXACT, groups, packed=True)

    def _rounded_plan(self, bits: int | None) -> LayerPlan | None:
        return None if bits is None else super()._rounded_plan(bits)

    def codes(self, plan: LayerPlan, rows: Rows, arrays: ReusedArrays) -> Coded:
        if plan.packed:
            tensor = self._in_format()
            assert tensor is not None  # as it was planned
            return tensor
        return in_groups_of(joined([*self._rounded_pieces(plan, *rows)]), plan.groups.width(self.shape[1]))

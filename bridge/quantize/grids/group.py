"""The grid of GPTQ and AWQ: per row and group of columns a scale and an integer zero point, w = scale * (q - zero).

Fitted as GPTQ does: from the least to the greatest weight, including 0; symmetric: zero in the middle. Ternary, as in
the reference GPTQ's quantizer with maxq < 0: codes 0, 1, 2 are the least weight, 0 and the greatest, and a weight
becomes one of the outer two if it is beyond half of it. `shrink` takes the scale and zero point of the least weighted
squared error instead (`round_groups`): what is rounded to nearest, without GPTQ, gains by it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Self

import numpy as np

from bridge.checkpoint.grouped import GroupedTensor
from bridge.encode.rounding.round_groups import fit_groups
from bridge.errors import BridgeError
from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.solve.refine import GAIN, Metric, line_target, move
from bridge.system.cpu.row_threads import over_rows
from bridge.system.kernels.half import ZERO, round_half
from bridge.system.kernels.jit import UNSET, inlined, specialize

_STEPS = 3  # scales tried to either side
_GROUP_STEP = np.float32(0.015)  # of the scale

# set by `specialize`; others: zero points tried with each scale
lanes = others = 0
neighbours = try_lines = UNSET


def _neighbours(scale, zero, high, tried):
    """Write lines near scale * (q - zero): slope, offset and zero point in rows 0, 1 and 3; returns its offset."""
    for lane in range(lanes):
        s = round_half(scale * (np.float32(1) + _GROUP_STEP * np.float32(lane // others - _STEPS)))
        z = min(max(zero + np.float32(lane % others - others // 2), ZERO), high)
        tried[0, lane] = s
        tried[1, lane] = -(s * z)
        tried[3, lane] = z
    return -(scale * zero)


def _refit(codes, g, hessian, order, push, inverse, scales, zeros, low, high):
    n = codes.shape[1]
    gathered, target, values = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    scratch = np.empty((2, n, lanes), np.float32)
    tried = np.empty((4, lanes), np.float32)
    for row in range(codes.shape[0]):
        a = scales[row]
        c = neighbours(a, zeros[row], high, tried)
        for k in range(n):
            values[k] = a * np.float32(codes[row, k]) + c
        bound = line_target(values, g[row], order, inverse, gathered, target) * GAIN
        try_lines(target, push, tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], bound)
        if best >= 0:
            scales[row] = tried[0, best]
            zeros[row] = tried[3, best]
            move(order, scratch[0, :, best], tried[0, best], tried[1, best], codes[row], values, g[row], hessian)


@cache
def _refitter(symmetric: bool) -> Callable[..., None]:
    lanes, others = (8, 1) if symmetric else (32, 3)  # symmetric: zero points stay
    name = "symmetric" if symmetric else "asymmetric"
    specialized = specialize(_neighbours, name, inlined, lanes=lanes, others=others)
    return specialize(_refit, name, lanes=lanes, neighbours=specialized, try_lines=line_search(lanes))


@dataclass
class GroupGrid:
    """Groups of `group_size` columns (-1: the whole row) with codes of `bits` bits; `bits` 0: ternary.

    The last group may be shorter. With `half`, scales are rounded to float16, as checkpoints store them.
    """

    rows: int
    columns: int
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    shrink: bool = False
    half: bool = True
    dtype: type = np.float32
    vectors: ClassVar[bool] = False
    a: np.ndarray = field(init=False)
    c: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.bits <= 8 or self.bits == 1:
            raise BridgeError(f"{self.bits} bits per code: must be 2 to 8, or 0 for ternary weights")
        if self.group_size == -1:
            self.group_size = self.columns
        if self.group_size < 1:
            raise BridgeError(f"groups of {self.group_size} columns: must be positive, or -1 for the whole row")
        self.fit_columns = self.sub = self.group_size
        self.low, self.high = 0, 2**self.bits - 1 if self.bits else 2
        self.ternary = not self.bits
        groups = -(-self.columns // self.group_size)
        self.scales: np.ndarray = np.ones((self.rows, groups), self.dtype)
        self.zeros: np.ndarray = np.zeros((self.rows, groups), self.dtype)
        self.a = np.ones((self.rows, groups), self.dtype)
        self.c = np.zeros((self.rows, groups), self.dtype)

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        """Fit group `run` to weights [rows, n], n columns of importance [n]."""
        if self.shrink and self.half and not self.ternary:
            values = np.ascontiguousarray(weights, np.float32), np.ascontiguousarray(importance, np.float32)
            self.scales[:, run], self.zeros[:, run] = fit_groups(*values, self.bits, self.symmetric)
            self.set_lines(run)
            return
        low = np.minimum(weights.min(axis=1), 0)
        high = np.maximum(weights.max(axis=1), 0)
        if self.symmetric:
            high = np.maximum(-low, high)
            low = np.where(low < 0, -high, low)
        empty = (low == 0) & (high == 0)
        low, high = np.where(empty, -1, low), np.where(empty, 1, high)
        if self.ternary:
            self.a[:, run], self.c[:, run] = (x.astype(np.float16) if self.half else x for x in (high, low))
            self.scales[:, run], self.zeros[:, run] = self.a[:, run], 1
            return
        scale = self._stored((high - low) / self.high)
        zero = np.full_like(scale, (self.high + 1) // 2) if self.symmetric else np.rint(-low / scale)
        self.scales[:, run], self.zeros[:, run] = scale, np.clip(zero, self.low, self.high)
        self.set_lines(run)

    def refit(self, run: int, codes: np.ndarray, g: np.ndarray, metric: Metric, sweep: int) -> None:
        """Move the scale and zero point of group `run`, codes following, in the metric of H; see `refine.Refinable`.

        Does nothing without `half`.
        """
        if not self.half:
            return
        scales, zeros = (np.ascontiguousarray(f[:, run], np.float32) for f in (self.scales, self.zeros))
        refit, low, high = _refitter(self.symmetric), np.float32(self.low), np.float32(self.high)
        order, push, inverse = metric.order[0], metric.push[0], metric.inverse[0]

        def work(r: slice) -> None:
            refit(codes[r], g[r], metric.hessian, order, push, inverse, scales[r], zeros[r], low, high)

        over_rows(len(codes), work)
        self.scales[:, run], self.zeros[:, run] = scales, zeros
        self.set_lines(run)

    def copy_rows(self, rows: np.ndarray, source: Self, source_rows: np.ndarray) -> None:
        """See `gptq_solver.Grid`."""
        for name in ("scales", "zeros", "a", "c"):
            getattr(self, name)[rows] = getattr(source, name)[source_rows]

    def set_lines(self, run: int) -> None:
        """The line of a group after its scale or zero point has changed."""
        self.a[:, run] = self.scales[:, run]
        self.c[:, run] = -self.scales[:, run] * self.zeros[:, run]

    def _stored(self, scale: np.ndarray) -> np.ndarray:
        if not self.half:
            return scale.astype(self.dtype)
        return np.maximum(scale.astype(np.float16), np.float16(2.0**-24)).astype(self.dtype)

    def tensor(
        self, name: str, codes: np.ndarray, layout: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> GroupedTensor:
        """The quantized layer. layout int [columns]: the weight matrix's columns in the order in which groups were cut
        (act-order); None: unchanged. Raises BridgeError for ternary groups that are not symmetric."""
        if self.ternary and ((self.c != -self.a) & (self.c != 0)).any():
            raise BridgeError(f"{name}: a checkpoint cannot hold ternary weights from -a to b; use symmetric groups")
        group_of_column = None
        codes = codes.astype(np.uint8)
        if layout is not None:
            group_of_column = np.empty(self.columns, np.int32)
            group_of_column[layout] = np.arange(self.columns) // self.group_size
            back = np.empty_like(codes)
            back[:, layout] = codes
            codes = back
        return GroupedTensor(
            name=name, bits=self.bits or 2, codes=codes, scales=self.scales.astype(np.float32),
            zeros=self.zeros.astype(np.float32), group_size=self.group_size, group_of_column=group_of_column, bias=bias,
        )  # fmt: skip

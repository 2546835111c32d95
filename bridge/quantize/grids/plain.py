"""The grid of GGUF's plain types, whose scales are chosen with the codes. A block has one line:

    scaled types   a * q       a = d            q counted from the type's zero (Q2_0, Q4_0, Q5_0, Q8_0)
    affine types   a * q + c   a = d, c = m     (Q4_1, Q5_1)

The solver leaves runs of several blocks to the grid. When its turn comes, a block tries lines side by side, each with
the codes that error feedback gives (`try_lines`): the line fitted to its weights, those that map its widest weight to
about the last code, and then the neighbours of the best one. Refinement searches in the same way against the target
that all other errors imply, and then moves codes across the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from bridge.blocks import BlockType
from bridge.encode.rounding.round_plain import plain_quantizer
from bridge.quantize.grids.block_grid import BlockGrid
from bridge.quantize.grids.superblock import row_fitter
from bridge.quantize.grids.try_lines import least, line_search
from bridge.quantize.solve.refine import GAIN, Metric, descend, line_target, metric_of, move
from bridge.system.cpu.row_threads import over_rows
from bridge.system.kernels.half import INFINITY, LARGEST, ONE, ZERO, round_half
from bridge.system.kernels.jit import UNSET, inlined, specialize, uncounted

_RUN = 128  # columns at most whose blocks are rounded, and whose codes are moved, together

_SHIFT = np.float32(0.3)  # between starts of m, in steps of d

# set per type by `specialize`; others: m tried with each d
sub = lanes = others = 0
low = high = first = step = ZERO
starts = around = search = try_lines = UNSET


def _scaled_starts(lowest, highest, tried):
    """Write lines of both signs, d and m in rows 0 and 1; lowest, highest: the range of the weights."""
    for lane in range(lanes):
        sign = -ONE if lane & 1 else ONE
        # the least d that clips no weight
        full = max(-lowest / high, -highest / low) if lane & 1 else max(lowest / low, highest / high)
        d = full * low / (low - first - step * np.float32(lane // 2))
        tried[0, lane] = sign * round_half(min(d, LARGEST))
        tried[1, lane] = ZERO


def _affine_starts(lowest, highest, tried):
    """Write lines of d > 0, d and m in rows 0 and 1, that map the lowest weight to about code 0."""
    for lane in range(lanes):
        d = round_half(min((highest - lowest) / (high + first + step * np.float32(lane // others)), LARGEST))
        tried[0, lane] = d
        tried[1, lane] = round_half(lowest + d * _SHIFT * np.float32(lane % others - others // 2))


def _scaled_around(d, m, tried):
    """Write the neighbours of d * q, as far as the next start."""
    for lane in range(lanes):
        tried[0, lane] = round_half(d * (ONE + step / low * np.float32(2 * lane - lanes + 1) / np.float32(lanes)))
        tried[1, lane] = ZERO


def _affine_around(d, m, tried):
    """Write the neighbours of d * q + m, as far as the next start."""
    for lane in range(lanes):
        d_by = np.float32(lane // others - others // 2) * step / np.float32(others // 2)
        m_by = np.float32(lane % others - others // 2) * _SHIFT / np.float32(others // 2)
        tried[0, lane] = round_half(d * (ONE + d_by / high))
        tried[1, lane] = round_half(m + (m_by - d_by * np.float32(0.5)) * d)  # the middle of the range stays


def _search(target, push, d, m, bound, scratch, tried, q, e):
    """The best line for a block against its target, d * q + m among them; its codes and errors are written.

    Returns (cost, d, m); the cost is `bound` if no line costs less, and then nothing is written.
    """
    lowest = target[0]
    highest = target[0]
    for i in range(sub):
        lowest = min(lowest, target[i])
        highest = max(highest, target[i])
    starts(lowest, highest, tried)
    tried[0, 0] = d
    tried[1, 0] = m
    start_bound = INFINITY
    for stage in range(2):
        if stage:
            around(d, m, tried)
        try_lines(target, push, tried[0], tried[1], low, high, scratch[0], scratch[1], tried[2])
        best = least(tried[2], start_bound)
        if best >= 0:
            start_bound = tried[2, best]
            d = tried[0, best]
            m = tried[1, best]
            if start_bound < bound:
                bound = start_bound
                for i in range(sub):
                    q[i] = scratch[0, i, best]
                    e[i] = scratch[1, i, best]
    return bound, d, m


def _round_run(weight, columns, factor, push, d, m, codes, errors):
    """Round a run: weight [rows, n], overwritten, in the order of columns int [n], counted from the run's first.

    factor [n, n]: U; push [n / sub, sub, sub]: U^T of blocks, the diagonal inverted; codes, errors [rows, n] in that
    order are written, d and m float32 [rows, n / sub]
    """
    scratch = np.empty((2, sub, lanes), np.float32)
    tried = np.empty((3, lanes), np.float32)
    q = np.empty(sub, np.float32)
    n = weight.shape[1]
    for row in range(weight.shape[0]):
        w = weight[row]
        for s in range(n // sub):
            start = s * sub
            j = columns[start] // sub
            for i in range(sub):
                q[i] = ZERO
            block, e = w[start : start + sub], errors[row, start : start + sub]
            _, d[row, j], m[row, j] = search(
                block, push[s], d[row, j], m[row, j], INFINITY, scratch, tried, q, e
            )  # fmt: skip
            for i in range(sub):
                codes[row, start + i] = np.int16(q[i])
                by = errors[row, start + i]
                for k in range(start + sub, n):
                    w[k] -= by * factor[start + i, k]


def _refit_run(codes, g, hessian, order, push, inverse, d, m):
    """Choose the line of each block of a run again, against all other errors; see `refine.Refinable`."""
    scratch = np.empty((2, sub, lanes), np.float32)
    tried = np.empty((3, lanes), np.float32)
    gathered, target = np.empty(sub, np.float32), np.empty(sub, np.float32)
    q, e = np.empty(sub, np.float32), np.empty(sub, np.float32)
    n = codes.shape[1]
    values = np.empty(n, np.float32)
    for row in range(codes.shape[0]):
        for k in range(n):
            values[k] = d[row, k // sub] * np.float32(codes[row, k]) + m[row, k // sub]
        for j in range(n // sub):
            bound = line_target(values, g[row], order[j], inverse[j], gathered, target) * GAIN
            cost, new_d, new_m = search(target, push[j], d[row, j], m[row, j], bound, scratch, tried, q, e)
            if cost < bound:
                d[row, j] = new_d
                m[row, j] = new_m
                move(order[j], q, new_d, new_m, codes[row], values, g[row], hessian)


class _Kernels(NamedTuple):
    """The compiled `superblock.row_fitter`, `_round_run` and `_refit_run` of a type."""

    fit: Callable[..., None]
    round: Callable[..., None]
    refit: Callable[..., None]


@cache
def _kernels(block: BlockType) -> _Kernels:
    first, step = (np.float32(x) for x in block.text_starts)
    lanes, others = (64, 8) if block.has_min else (32, 1)
    scope: dict[str, Any] = {
        "sub": block.sub, "lanes": lanes, "others": others, "first": first, "step": step,
        "low": np.float32(-block.zero), "high": np.float32(block.levels - 1 - block.zero),
        "try_lines": line_search(lanes),
    }  # fmt: skip
    starts, around = (_affine_starts, _affine_around) if block.has_min else (_scaled_starts, _scaled_around)
    scope["starts"] = specialize(starts, block.name, inlined, **scope)
    scope["around"] = specialize(around, block.name, inlined, **scope)
    scope["search"] = specialize(_search, block.name, uncounted, **scope)
    run, refit = (specialize(function, block.name, **scope) for function in (_round_run, _refit_run))
    return _Kernels(row_fitter(block, plain_quantizer(block.name)), run, refit)


@dataclass
class PlainGrid(BlockGrid):
    """Blocks of a plain type over [rows, columns]; a and c are exact halves."""

    unit: ClassVar[int] = 1
    vectors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fit_columns = -(-self.a.shape[1] // -(-self.columns // _RUN)) * self.sub

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        """Fit each block, weighted as K-quants are; see `gptq_solver.Grid`."""
        a, c = self._of(run)
        for block in range(a.shape[1]):
            columns = slice(block * self.sub, (block + 1) * self.sub)
            x, h = np.ascontiguousarray(weights[:, columns]), importance[columns].astype(np.float32)
            a[:, block], c[:, block] = self._fitted(x, h)
        self._set(run, a, c)

    def _fitted(self, x: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """d and m, float32 [rows], of blocks x [rows, size] with columns of importance h [size]."""
        d, m = (np.zeros((self.rows, 1), np.float32) for _ in range(2))
        # by-products
        codes, sc = np.empty((self.rows, 1, self.sub), np.uint8), np.ones((self.rows, 1), np.int8)
        mn, sums = np.zeros((self.rows, 1), np.uint8), np.zeros((self.rows, 3))
        fit = _kernels(self.block).fit
        over_rows(self.rows, lambda r: fit(x[r], h, True, codes[r], sc[r], mn[r], d[r], m[r], sums[r]))
        return d[:, 0], m[:, 0]

    def round_run(
        self, run: int, weight: torch.Tensor, columns: np.ndarray, factor: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Round a run and choose its lines, as `CodebookGrid.round_run`; columns of a block are together."""
        w, upper = (np.array(t.cpu().numpy(), np.float32, order="C") for t in (weight, factor))
        n = len(columns)
        index = np.arange(n // self.sub)
        push = upper.reshape(len(index), self.sub, len(index), self.sub)[index, :, index].transpose(0, 2, 1).copy()
        i = np.arange(self.sub)
        push[:, i, i] = 1 / push[:, i, i]
        codes, errors = np.zeros(w.shape, np.int16), np.zeros(w.shape, np.float32)
        a, c = self._of(run)
        kernel = _kernels(self.block).round
        over_rows(self.rows, lambda r: kernel(w[r], columns, upper, push, a[r], c[r], codes[r], errors[r]))
        self._set(run, a, c)
        return codes, errors

    def metric(self, hessian: torch.Tensor) -> Metric:
        """What `refit` needs of H [n, n] of a run."""
        return metric_of(hessian, self.sub)

    def refit(self, run: int, codes: np.ndarray, g: np.ndarray, metric: Metric, sweep: int) -> None:
        """Choose the lines of a run again, then move codes; see `refine.Refinable`."""
        a, c = self._of(run)
        kernel = _kernels(self.block).refit
        over_rows(
            self.rows,
            lambda r: kernel(codes[r], g[r], metric.hessian, metric.order, metric.push, metric.inverse, a[r], c[r]),
        )
        self._set(run, a, c)
        descend(self, run, codes, g, metric)

    def _of(self, run: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = self._blocks(run)
        return np.ascontiguousarray(self.a[:, blocks]), np.ascontiguousarray(self.c[:, blocks])

    def _set(self, run: int, a: np.ndarray, c: np.ndarray) -> None:
        self.a[:, self._blocks(run)], self.c[:, self._blocks(run)] = a, c

    def _blocks(self, run: int) -> slice:
        count = self.fit_columns // self.sub
        return slice(run * count, (run + 1) * count)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """The blocks, uint8 [rows, row bytes], of codes int16 [rows, columns] in low..high."""
        none = np.zeros(self.a.shape, np.int8)
        q = (codes - self.low).astype(np.uint8)
        return self._pack(q.__getitem__, none, none.view(np.uint8), self.a, self.c)

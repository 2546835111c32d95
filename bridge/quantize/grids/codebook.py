"""The grid of GGUF's tables of values (IQ4, FP4) and codebooks (IQ3 to IQ1), whose scales are chosen with the codes.

    a * q,  a = unit * d * factor(sc)     q a value of the table, or a coordinate of a point
            a = d * scales[sc]            of FP4, where d is what multiplies the whole matrix

Codes here are the values themselves, so that a * q holds as on other grids. But which ones go together is up to the
codebook, so the solver leaves whole superblocks to the grid (`vectors`): d is fitted to the weights that error
feedback has left, and each sub-block takes the scale next to the fitted one that loses least when its units are
rounded one after the other. FP4 has no d to fit, so its scales begin at those of the largest weights. Scales and codes
belong together: fitting scales beforehand loses 13 to 20% more.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from bridge.encode.rounding.round_rows import quantizer_of
from bridge.quantize.grids.block_grid import BlockGrid
from bridge.quantize.grids.codebook_rounding import Rounding, rounding, scale_range
from bridge.quantize.grids.codebook_units import values_of_codes
from bridge.quantize.solve.hessian import factor_of
from bridge.system.cpu.row_threads import over_rows

_REACH = 4  # steps of a scale that are tried in the pass, to either side
_REFIT_REACH = 2
_DOUBLING_REACH = 1  # where each scale is twice the one before
_TRIES = ([1.0, 0.94, 1.03], [1.0, 0.97, 1.06])  # factors of d from which a refit starts over, per sweep in turn
_FLOOR = 1e-6  # the least importance of a column, relative to the mean


@dataclass(frozen=True)
class UnitMetric:
    """H of one run of columns, as `codebook_rounding` takes it; arrays are its arguments of these names."""

    hessian: np.ndarray
    order: np.ndarray
    factor: np.ndarray
    metric: np.ndarray
    inverse: np.ndarray
    within: np.ndarray
    squares: np.ndarray
    undo: np.ndarray


@dataclass
class CodebookGrid(BlockGrid):
    """Blocks of a table of values or a codebook over [rows, columns]."""

    scale: float = 1.0  # of FP4, what multiplies the whole matrix
    unit: int = field(init=False)
    sc: np.ndarray = field(init=False)  # int16 [rows, sub-blocks]; of FP4, bytes without sign
    d: np.ndarray = field(init=False)  # float32 [rows, blocks], exact halves; of FP4, `scale`
    row_fields: ClassVar[tuple[str, ...]] = ("sc", "d", "a")
    vectors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unit = self._rounding.units.unit
        values = values_of_codes(self.block)
        self.low, self.high = min(values), max(values)
        self.sc = np.ones(self.a.shape, np.int16)
        self.d = np.zeros((self.rows, self.columns // self.fit_columns), np.float32)

    @property
    def _rounding(self) -> Rounding:
        return rounding(self.block.name)

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        """Fit block `run` of every row, codes rounded to nearest; see `gptq_solver.Grid`."""
        block = self.block
        if block.scales:
            self._fit_stored(run, weights)
            return
        h = importance if np.isfinite(importance).all() else np.ones_like(importance)
        h = np.maximum(h / (h.mean() or 1.0), _FLOOR).astype(np.float32).reshape(block.subs, self.sub)
        x = np.ascontiguousarray(weights, np.float32).reshape(self.rows, block.subs, self.sub)
        q = np.empty((self.rows, block.subs, self.sub), np.uint8)
        mn, dmin = np.zeros((self.rows, block.subs), np.uint8), np.zeros((self.rows, 1), np.float32)
        sc, d = np.ones((self.rows, block.subs), np.int8), np.zeros((self.rows, 1), np.float32)
        sums = np.zeros((self.rows, 3))
        fitter = quantizer_of(block)
        over_rows(self.rows, lambda r: fitter(x[r], h, q[r], sc[r], mn[r], d[r], dmin[r], sums[r]))
        self._set(run, sc, d)

    def _fit_stored(self, run: int, weights: np.ndarray) -> None:
        """Set the least scales at which no weight is clipped."""
        low, high = scale_range(self.block)
        largest = np.abs(weights).reshape(self.rows, self.block.subs, self.sub).max(2)
        reached = np.array(self.block.scales[low:high]) * (self.high * self.scale)
        sc = (low + np.searchsorted(reached, largest)).astype(np.int16)
        self._set(run, sc, np.full((self.rows, 1), self.scale, np.float32))

    def round_run(self, run: int, weight: torch.Tensor, columns: np.ndarray, factor: torch.Tensor) -> tuple[Any, Any]:
        """Round a fitted run and choose its scales -> codes int16, and errors over U's diagonal float32, [rows, n].

        weight   [rows, n], what earlier errors have left; its columns are, and so are the results', in the order of
        columns  int [n], counted from the run's first; those of sub-blocks and units together
        factor   [n, n]: U of these
        """
        upper = factor.cpu().float()
        inverse = _unit_inverses(upper, self.unit)
        metric = inverse @ inverse.transpose(1, 2)
        w, u = (np.array(t.cpu().numpy(), np.float32, order="C") for t in (weight, upper))
        m, undo = _array(metric), _array(inverse)
        codes, errors = np.zeros(w.shape, np.int16), np.zeros(w.shape, np.float32)
        sc, d = self._of(run)
        rounding = self._rounding
        over_rows(
            self.rows,
            lambda r: rounding.run(
                w[r], columns, u, m, undo, d[r], sc[r], self._reach(_REACH), codes[r], errors[r], rounding.buffers()
            ),
        )
        self._set(run, sc, d)
        return codes, errors

    def metric(self, hessian: torch.Tensor) -> UnitMetric:
        """What `refit` needs of H [n, n] of a run."""
        h = hessian.cpu().double()
        order, factors, inverses, metrics, within = [], [], [], [], []
        diagonal = h.diagonal().numpy()
        for start in range(0, len(h), self.sub):
            sums = diagonal[start : start + self.sub].reshape(-1, self.unit).sum(1)
            units = np.argsort(-sums, kind="stable")
            columns = start + (units[:, None] * self.unit + np.arange(self.unit)).ravel()
            upper = factor_of(h[columns[:, None], columns])
            inverse = _unit_inverses(upper, self.unit)
            order.append(columns)
            factors.append(upper)
            inverses.append(inverse)
            metrics.append(inverse @ inverse.transpose(1, 2))
            within.append(upper.T @ upper)
        squares = _unit_blocks(h, self.unit)
        return UnitMetric(
            _array(h), np.array(order), _array(torch.stack(factors)), _array(torch.cat(metrics)),
            _array(torch.cat(inverses)), _array(torch.stack(within)), _array(squares),
            _array(torch.linalg.pinv(squares, hermitian=True)),
        )  # fmt: skip

    def refit(self, run: int, codes: np.ndarray, g: np.ndarray, metric: UnitMetric, sweep: int) -> None:
        """Move scales, d and codes of block `run`; see `refine.Refinable`.

        Sub-blocks are rounded again at scales next to theirs, against the target that G implies; d moves by least
        squares; all of this from several d. Then units move one at a time.
        """
        tries = np.array([1.0] if self.block.scales else _TRIES[sweep % len(_TRIES)], np.float32)
        sc, d = self._of(run)
        rounding, m, n = self._rounding, metric, codes.shape[1]

        def work(r: slice) -> None:
            saved = (*(np.empty(n, np.float32) for _ in range(4)), np.empty(self.block.subs, np.int64),
                     *(np.empty(n, np.float32) for _ in range(3)), np.empty(self.block.subs, np.int64))  # fmt: skip
            rounding.refit(
                codes[r], g[r], m.hessian, m.order, m.factor, m.metric, m.inverse, m.within, m.squares, m.undo,
                d[r], sc[r], self._reach(_REFIT_REACH), tries, rounding.buffers(), saved,
            )  # fmt: skip

        over_rows(self.rows, work)
        self._set(run, sc, d)

    def _reach(self, steps: int) -> int:
        """How many steps of a scale are tried, where steps are small: `steps`."""
        doubling = len(self.block.scales) > 3 and self.block.scales[3] == 2 * self.block.scales[2]
        return _DOUBLING_REACH if doubling else steps

    def _of(self, run: int) -> tuple[np.ndarray, np.ndarray]:
        subs = self.block.subs
        return np.ascontiguousarray(self.sc[:, run * subs :][:, :subs]), np.ascontiguousarray(self.d[:, run : run + 1])

    def _set(self, run: int, sc: np.ndarray, d: np.ndarray) -> None:
        """Set the scales of a block, and with them its lines."""
        of_run = slice(run * self.block.subs, (run + 1) * self.block.subs)
        self.sc[:, of_run], self.d[:, run : run + 1] = sc, d
        if self.block.scales:
            self.a[:, of_run] = d * np.array(self.block.scales, np.float32)[sc]
            return
        factor = 2 * sc.astype(np.float32) + 1 if self.block.odd_scales else sc
        self.a[:, of_run] = np.float32(self.block.unit) * d * (factor if self.block.subs > 1 else np.float32(1))

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """The blocks, uint8 [rows, row bytes], of codes int16 [rows, columns]: values of the table."""
        numbers = np.zeros(self.high - self.low + 1, np.uint8)
        for q, value in reversed(list(enumerate(values_of_codes(self.block)))):  # of two zeros, the first
            numbers[value - self.low] = q
        sc, mn, dmin = self.sc.astype(np.int8), np.zeros_like(self.sc, np.uint8), np.zeros_like(self.d)
        return self._pack(lambda r: numbers[codes[r] - self.low], sc, mn, self.d, dmin)


def _unit_blocks(matrix: torch.Tensor, unit: int) -> torch.Tensor:
    """[n / unit, unit, unit]: the blocks about the diagonal."""
    count = len(matrix) // unit
    index = torch.arange(count)
    return matrix.reshape(count, unit, count, unit)[index, :, index]


def _unit_inverses(upper: torch.Tensor, unit: int) -> torch.Tensor:
    """The inverses of an upper triangular matrix's blocks about the diagonal."""
    blocks = _unit_blocks(upper, unit)
    eye = torch.eye(unit, dtype=upper.dtype).expand_as(blocks)
    return torch.linalg.solve_triangular(blocks, eye, upper=True)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.numpy(), np.float32, order="C")

"""GPTQ (Frantar et al. 2022): round a weight matrix column by column; later columns compensate for each error.

`textbook` does the same in one page, without blocks and lazy updates.

The solver needs W, H and a *grid*: the values that weights may take. A grid is divided into runs of columns whose
parameters are fitted together (a group, a superblock), and each run into sub-runs with one line a * q + c per row:

    fit_columns, sub   columns in a run and in a sub-run
    low, high          range of codes q
    a, c               float32 [rows, columns / sub], the lines; valid for runs that were fitted
    ternary            codes 0, 1, 2 mean c, 0, a: the line bends
    vectors            the grid rounds whole runs and chooses their lines meanwhile (`CodebookGrid.round_run`)
    fit(run, weights, importance, quick)
    copy_rows(rows, source, source_rows)

Rows are independent, so a column's step is a compiled loop over rows (`_leaf`). Its effect on later columns is
applied later, as matrix products: the columns are halved recursively, and once the left half is rounded, its errors
move the right half at once. With few codes, error feedback can push a row outside its grid; such rows are rounded to
nearest instead.

Columns may be rounded in any order that keeps a run's columns together; in any order at all if the runs are fitted
beforehand. The usual act-order (groups cut from the order) permutes the columns first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch

from bridge.errors import BridgeError
from bridge.quantize.solve.hessian import Factored, damped_factor
from bridge.system.cpu.row_threads import over_rows, tiles
from bridge.system.kernels.jit import inner, kernel

_LEAF = 256  # columns that are rounded without a matrix product between them
_ROWS = 64  # that are worth a thread, where a row takes microseconds
_SAMPLE = 128  # rows sampled to see whether rounding to nearest is ever better


class Grid(Protocol):
    """The values that weights may take; see the module's docstring."""

    fit_columns: int
    sub: int
    low: int
    high: int
    a: np.ndarray
    c: np.ndarray
    ternary: bool
    vectors: ClassVar[bool]

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        """Fit a run to weights [rows, fit_columns]; importance [fit_columns]: the cost of a squared error in each.

        quick  skip the thorough search: later columns compensate for its gain
        """

    def copy_rows(self, rows: np.ndarray, source: Self, source_rows: np.ndarray) -> None:
        """Set the parameters of rows to those of `source_rows` of another grid of the same kind."""


@dataclass(frozen=True)
class Solution:
    """Codes int16 [rows, columns], low..high of the grid, and how they were found."""

    codes: np.ndarray
    damping: float  # of H; infinity: no damping was enough, and weights were rounded to nearest


def solve(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    *,
    order: np.ndarray | None = None,
    fit: str = "reached",
    damping: float = 0.01,
    nearest: bool = True,
    factored: Factored | None = None,
) -> Solution:
    """Round weight float [rows, columns] on the grid against hessian [columns, columns].

    order       int [columns], the columns in the order in which they are rounded; None: from first to last
    fit         "reached": a run is fitted when the order reaches it; "first": all runs are fitted on the original
                weights (static groups); "none": the grid stays unchanged
    damping     added to the diagonal of H, as a fraction of its mean; tenfold until it is enough
    nearest     round rows to nearest where that is better
    factored    `damped_factor` of H in this order and its damping, where the caller has them

    Raises BridgeError if the order separates columns of a run that is fitted when reached.
    """
    columns = weight.shape[1]
    order = np.arange(columns) if order is None else np.asarray(order)
    permutation = torch.from_numpy(order).to(weight.device)
    hessian = hessian.to(weight)
    importance = hessian.diagonal().cpu().numpy()
    factored = factored or damped_factor(hessian, damping, permutation)
    if factored:
        factor = factored[0]
    elif grid.vectors and np.isfinite(importance).all():  # scales are chosen by what errors cost
        factor = torch.diag(hessian.diagonal()[permutation].clamp_min(torch.finfo(weight.dtype).tiny).rsqrt())
    else:
        factor = torch.eye(columns, dtype=weight.dtype, device=weight.device)
    if fit == "first":
        fit_all(weight, grid, importance)
    state = _State(weight[:, permutation].contiguous(), factor, grid, order)
    state.importance = importance if fit == "reached" else None
    state.quick = bool(factored)
    state.over(_runs(order, grid.fit_columns, fit != "reached"), state.run)
    codes = torch.from_numpy(state.codes)[:, _back(order)].numpy()
    damping = factored[1] if factored else float("inf")
    most = torch.linalg.vector_norm(state.weight, dim=1).square().cpu().numpy()  # of the damped H
    del factored, factor, state  # free their memory before more is needed
    if nearest and damping < float("inf") and not grid.vectors:
        _prefer_nearest(weight, hessian, grid, codes, importance if fit == "reached" else None, most)
    return Solution(codes, damping)


def _prefer_nearest(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    codes: np.ndarray,
    importance: np.ndarray | None,
    most: np.ndarray,
) -> None:
    """Round rows to nearest where that is better; with `importance`, their runs are fitted anew too.

    most  [rows]: upper bound of each row's error

    Few rows come near that bound: quick fits find them, and only they are fitted thoroughly. If no row of a sample
    comes near, the others are skipped.
    """

    def rounded(rows: np.ndarray, quick: bool = True) -> tuple[np.ndarray, Grid, np.ndarray]:
        part = weight if len(rows) == len(weight) else weight[torch.from_numpy(rows).to(weight.device)]
        other = replace(grid, rows=len(rows))  # type: ignore[type-var]
        if importance is None:
            other.copy_rows(np.arange(len(rows)), grid, rows)
        else:
            fit_all(part, other, importance, quick)
        nearest = _nearest_codes(part, other)
        return nearest, other, row_errors(part, nearest, other, hessian)

    rows = np.arange(len(codes))
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    if len(sample) < len(rows) and not (rounded(sample)[2] < 1.5 * most[sample]).any():
        return
    near = rows[rounded(rows)[2] < 1.2 * most]
    if not len(near):
        return
    nearest, other, theirs = rounded(near, quick=False)
    better = theirs < row_errors(weight[torch.from_numpy(near).to(weight.device)], codes[near], grid, hessian, near)
    codes[near[better]] = nearest[better]
    grid.copy_rows(near[better], other, better)


def row_errors(
    weight: torch.Tensor, codes: np.ndarray, grid: Grid, hessian: torch.Tensor, rows: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """diag(E H E^T) [rows], E = weight - values of the codes on these rows of a grid."""
    a, c = grid.a[rows], grid.c[rows]
    errors = [
        _errors(weight[r] - torch.from_numpy(values_of(codes[r], a[r], c[r], grid)).to(weight), hessian)
        for r in tiles(len(codes))
    ]
    return torch.cat(errors).cpu().numpy()


def _errors(lost: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """diag(E H E^T) of E, float64 [rows]; H is symmetric, so its lower half counts twice."""
    total = torch.zeros(len(lost), dtype=torch.float64, device=lost.device)
    for c in tiles(lost.shape[1]):
        tile, later = lost[:, c], lost[:, c.stop :]
        product = (tile @ hessian[c, c]).add_(later @ hessian[c.stop :, c], alpha=2)
        total += product.mul_(tile).sum(1, dtype=torch.float64)
    return total


def fit_all(weight: torch.Tensor, grid: Grid, importance: np.ndarray, quick: bool = False) -> None:
    """Fit every run on the original weights."""
    values = weight.cpu().numpy()
    for run in range(values.shape[1] // grid.fit_columns + (values.shape[1] % grid.fit_columns > 0)):
        span = slice(run * grid.fit_columns, (run + 1) * grid.fit_columns)
        grid.fit(run, np.ascontiguousarray(values[:, span]), importance[span], quick)


def round_to_nearest(weight: torch.Tensor, grid: Grid, importance: np.ndarray) -> np.ndarray:
    """RTN: fit every run and round each weight alone -> codes int16 [rows, columns]."""
    fit_all(weight, grid, importance)
    return _nearest_codes(weight, grid)


def _nearest_codes(weight: torch.Tensor, grid: Grid) -> np.ndarray:
    values = np.ascontiguousarray(weight.cpu().numpy())
    codes = np.empty(values.shape, np.int16)
    low, high, ternary, a, c = grid.low, grid.high, grid.ternary, grid.a, grid.c
    over_rows(len(codes), lambda r: _nearest(values[r], a[r], c[r], grid.sub, low, high, ternary, codes[r]), _ROWS)
    return codes


def dequantize(codes: np.ndarray, grid: Grid, rows: slice = slice(None)) -> np.ndarray:
    """The values a * q + c [rows, columns] of codes on a grid, or on some rows of one."""
    return values_of(codes, grid.a[rows], grid.c[rows], grid)


def values_of(codes: np.ndarray, a: np.ndarray, c: np.ndarray, grid: Grid) -> np.ndarray:
    """The values of codes [rows, columns] on lines a, c [rows, columns / sub]."""
    values = np.empty(codes.shape, a.dtype)
    a, c = np.ascontiguousarray(a), np.ascontiguousarray(c)
    over_rows(len(codes), lambda r: _dequantize(codes[r], a[r], c[r], grid.sub, grid.ternary, values[r]), _ROWS)
    return values


def error(weight: torch.Tensor, values: np.ndarray | torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E H E^T) of E = weight - values."""
    hessian, total = hessian.to(weight), 0.0
    for r in tiles(len(weight)):
        lost = weight[r] - torch.as_tensor(values[r], dtype=weight.dtype, device=weight.device)
        total += float(_errors(lost, hessian).sum())
    return total


def error_share(weight: torch.Tensor, values: np.ndarray | torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E H E^T) of E = weight - values, over tr(W H W^T); 0 where that is 0."""
    power = error(weight, torch.zeros(()).expand(weight.shape), hessian)
    return error(weight, values, hessian) / power if power else 0.0


def grouped_act_order(hessian: torch.Tensor, fit_columns: int, *parts: int) -> np.ndarray:
    """Act-order inside fixed groups: runs by falling sum of diag H, columns by falling diag H -> int [columns].

    parts  columns in a part of a run, then in a part of one, and so on, which are ordered likewise, in place of columns
    """
    diagonal = hessian.diagonal().double().cpu().numpy()
    keys: list[np.ndarray] = []
    for span in (fit_columns, *(parts or (1,))):
        runs = np.arange(len(diagonal)) // span
        keys += [-np.bincount(runs, diagonal)[runs], runs]
    return np.lexsort(keys[::-1])


def _runs(order: np.ndarray, fit_columns: int, fitted: bool) -> list[tuple[int, int]]:
    """Spans of the order that belong to one run; leaves if the runs are already fitted."""
    if fitted:
        starts = list(range(0, len(order), _LEAF))
    else:
        of_run = order // fit_columns
        starts = [0, *(np.flatnonzero(np.diff(of_run)) + 1).tolist()]
        if len(starts) != len(np.unique(of_run)):
            raise BridgeError("the order separates columns of one group; fit the grid first, or permute the columns")
    return list(zip(starts, [*starts[1:], len(order)], strict=True))


class _State:
    """Weights, which their errors overwrite, and codes of one solve, columns in the order in which they are rounded."""

    def __init__(self, weight: torch.Tensor, factor: torch.Tensor, grid: Grid, order: np.ndarray) -> None:
        self.weight, self.factor, self.grid, self.order = weight, factor, grid, order
        self.codes = np.empty(weight.shape, np.int16)
        self.importance: np.ndarray | None = None
        self.quick = False

    def over(self, spans: list[tuple[int, int]], visit: Callable[[int, int], None]) -> None:
        """Visit spans of columns in order, each after all earlier errors were applied to it."""
        if len(spans) == 1:
            visit(*spans[0])
            return
        half = len(spans) // 2
        self.over(spans[:half], visit)
        begin, middle, end = spans[0][0], spans[half][0], spans[-1][1]
        errors = self.weight[:, begin:middle]
        self.weight[:, middle:end].addmm_(errors, self.factor[begin:middle, middle:end], alpha=-1)
        self.over(spans[half:], visit)

    def run(self, begin: int, end: int) -> None:
        """Fit the run of these columns if it is to be fitted now, and round it."""
        if self.importance is not None:
            columns = self.order[begin:end]
            run = int(columns[0]) // self.grid.fit_columns
            values = self.weight[:, begin:end][:, _back(columns)].cpu().numpy().astype(self.grid.a.dtype, copy=False)
            self.grid.fit(run, values, self.importance[run * self.grid.fit_columns :][: end - begin], self.quick)
            if self.grid.vectors:
                self.vectors(begin, end)
                return
        starts = list(range(begin, end, _LEAF))
        self.over(list(zip(starts, [*starts[1:], end], strict=True)), self.leaf)

    def vectors(self, begin: int, end: int) -> None:
        """Leave a run to its grid."""
        grid: Any = self.grid
        run = int(self.order[begin]) // grid.fit_columns
        columns = self.order[begin:end] - run * grid.fit_columns
        codes, errors = grid.round_run(run, self.weight[:, begin:end], columns, self.factor[begin:end, begin:end])
        self.codes[:, begin:end] = codes
        self.weight[:, begin:end] = torch.from_numpy(errors).to(self.weight)

    def leaf(self, begin: int, end: int) -> None:
        """Round at most _LEAF columns one after the other."""
        lines = self.order[begin:end] // self.grid.sub
        parts = self.weight[:, begin:end], self.factor[begin:end, begin:end]
        weight, u = (np.array(part.cpu().numpy(), order="C") for part in parts)
        codes, a, c = self.codes[:, begin:end], self.grid.a, self.grid.c
        low, high, ternary = self.grid.low, self.grid.high, self.grid.ternary
        over_rows(len(codes), lambda r: _leaf(weight[r], u, a[r], c[r], lines, low, high, ternary, codes[r]), _ROWS)
        self.weight[:, begin:end] = torch.from_numpy(weight).to(self.weight.device)


def _back(order: np.ndarray) -> torch.Tensor:
    """int64 [columns]: the position of each column in `order`."""
    return torch.from_numpy(np.argsort(order))


@inner
def _code(w, a, c, low, high, ternary):
    """The code nearest to w on a line, as a float."""
    if ternary:
        return high if w + w > a else (low if w + w < c else low + type(w)(1))
    return min(max(np.rint(w / a - c / a) if a != 0 else a, low), high)


@inner
def _value(q, a, c, ternary):
    if ternary:
        return a if q > 1 else (c if q < 1 else type(a)(0))
    return a * q + c


@kernel
def _leaf(weight, factor, a, c, lines, low, high, ternary, codes):
    """weight [rows, n], overwritten by errors, which are divided by the diagonal of factor [n, n]; lines int [n] into
    a, c; codes [rows, n] are written."""
    n = weight.shape[1]
    least = weight.dtype.type(low)
    most = weight.dtype.type(high)
    for row in range(weight.shape[0]):
        w = weight[row]
        for i in range(n):
            slope = weight.dtype.type(a[row, lines[i]])
            base = weight.dtype.type(c[row, lines[i]])
            q = _code(w[i], slope, base, least, most, ternary)
            codes[row, i] = np.int16(q)
            e = (w[i] - _value(q, slope, base, ternary)) / factor[i, i]
            w[i] = e
            later = w[i + 1 :]  # loops from 0 on become vectors: no index can be negative
            by = factor[i, i + 1 :]
            for k in range(n - i - 1):
                later[k] -= e * by[k]


@kernel
def _nearest(weight, a, c, sub, low, high, ternary, codes):
    least = a.dtype.type(low)
    most = a.dtype.type(high)
    for row in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            w = a.dtype.type(weight[row, i])
            codes[row, i] = np.int16(_code(w, a[row, i // sub], c[row, i // sub], least, most, ternary))


@kernel
def _dequantize(codes, a, c, sub, ternary, values):
    for row in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            values[row, i] = _value(a.dtype.type(codes[row, i]), a[row, i // sub], c[row, i // sub], ternary)

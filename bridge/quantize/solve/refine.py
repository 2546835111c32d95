"""After GPTQ: move codes and scales, some at a time, wherever tr(E H E^T) falls.

With G = (W - W') H, moving a row's weights by v changes its error by  v H v^T - 2 G v^T. So a move inside a run of
columns needs only H's diagonal block and the run's columns of G: one matrix product before each run, with the errors
at that time. In turn, for each run of columns (`Refinable.refit` and `descend`):

    lines    each sub-run tries lines a * q + c near its own, each with codes found as GPTQ finds them, against the
             sub-run's block of H and the target that G implies: W' + G H^-1. Its error is the sum of squares of
             the errors that GPTQ feeds forward. Lines are tried side by side, see `try_lines`
    scales   the parameters that sub-runs share (d, dmin), by least squares in the metric of H, codes fixed
    codes    coordinate descent: code j moves by round(G_j / (H_jj a_j)). When no single code helps any more, chains
             (Lin-Kernighan): a code moves by one at a loss, then the one that now gains most, and so on; a chain is
             kept up to its best sum, if that is a gain

Costs, in operations per weight and sweep for a superblock of n = 256 columns in sub-blocks of 32: per try of d and
dmin 32 for the target, 16 per line and n to update G; chains n for each start, skipping starts that cost more than
half of a code's own step; for G, the number of columns. In layers of a real model chains gain 0.1 to 0.8% for a sixth
of the time, where few columns hold most of H 4 to 8%.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bridge.encode.rounding.round_loops import add, greater
from bridge.quantize.solve.gptq_solver import Grid, dequantize, values_of
from bridge.quantize.solve.hessian import factor_of
from bridge.system.cpu.row_threads import over_rows, tiles
from bridge.system.kernels.half import ZERO
from bridge.system.kernels.jit import inner, kernel

_TOGETHER = 256  # columns whose moves reach those beyond them in one product
_DESCENTS = 8  # passes of coordinate descent over a run at most
_CHAIN = 4  # codes in a chain
_START = np.float32(0.5)  # share of its cost that a chain's first move must bring
GAIN = np.float32(0.9999)  # a line is taken only if its error is below this share of the old one
_NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class Metric:
    """H of one run of columns, and what trying lines needs of each sub-run, its columns by falling diagonal.

    order    int64 [subs, sub]: the columns of a sub-run in rounding order, counted from the run's first
    push     float32 [subs, sub, sub]: U^T of H^-1 = U^T U, the diagonal inverted
    inverse  float32 [subs, sub, sub]: H^-1
    sums     float32 [subs, n]: rows of H summed over each sub-run
    """

    hessian: np.ndarray
    order: np.ndarray
    push: np.ndarray
    inverse: np.ndarray
    sums: np.ndarray


class Refinable(Grid, Protocol):
    """A grid whose parameters can be moved."""

    def refit(self, run: int, codes: np.ndarray, g: np.ndarray, metric: Metric, sweep: int) -> None:
        """Move lines of a run where the error falls; updates codes int16 [rows, n] and g float32 [rows, n]."""


def spans_of(columns: int, grid: Grid) -> list[slice]:
    """The columns of each run."""
    return [slice(start, min(start + grid.fit_columns, columns)) for start in range(0, columns, grid.fit_columns)]


def metrics_of(hessian: torch.Tensor, grid: Any) -> list[Any]:
    """The metric of each run: a `Metric`, or what a grid of vectors needs."""
    if grid.vectors:
        return [grid.metric(hessian[span, span]) for span in spans_of(len(hessian), grid)]
    return [metric_of(hessian[span, span], grid.sub) for span in spans_of(len(hessian), grid)]


def refine(weight: torch.Tensor, hessian: torch.Tensor, grid: Refinable, codes: np.ndarray, sweeps: int = 2) -> None:
    """Move codes int16 [rows, columns] and the grid's parameters in place; tr(E H E^T) never rises.

    weight float [rows, columns], hessian float [columns, columns] positive definite
    """
    move_all(product(weight, hessian, grid, codes), hessian, grid, codes, sweeps, metrics_of(hessian, grid))


def product(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, codes: np.ndarray) -> torch.Tensor:
    """G = (W - W') H, float [rows, columns]."""
    g = torch.empty_like(weight)
    for r in tiles(len(codes)):
        torch.mm(weight[r] - torch.from_numpy(dequantize(codes[r], grid, r)).to(weight), hessian, out=g[r])
    return g


def move_all(
    g: torch.Tensor,
    hessian: torch.Tensor,
    grid: Refinable,
    codes: np.ndarray,
    sweeps: int,
    metrics: list[Any],
    keep: bool = False,
) -> torch.Tensor:
    """`refine` from G, `product`, which is overwritten and returned, or freed unless `keep`; `metrics_of` H."""
    spans = spans_of(g.shape[1], grid)
    together = max(1, _TOGETHER // grid.fit_columns)
    for sweep in range(sweeps):
        for first in range(0, len(spans), together):
            runs = range(first, min(first + together, len(spans)))
            start, end = spans[first].start, spans[runs[-1]].stop
            part_g = g[:, start:end].to("cpu", torch.float32, copy=True)
            moved = torch.empty_like(part_g)
            for run in runs:
                span, columns = spans[run], slice(spans[run].start - start, spans[run].stop - start)
                values = _visit(grid, run, span, codes, part_g[:, columns], metrics[run], sweep)
                moved[:, columns] = torch.from_numpy(values)
                if run < runs[-1]:
                    near = slice(spans[run].stop, end)
                    part_g[:, columns.stop :].addmm_(moved[:, columns], hessian[span, near].to(part_g), alpha=-1)
            rest = slice(0 if keep or sweep + 1 < sweeps else end, None)
            g[:, rest].addmm_(moved.to(g), hessian[start:end, rest], alpha=-1)
    return g


def _visit(
    grid: Refinable, run: int, span: slice, codes: np.ndarray, g: torch.Tensor, metric: Any, sweep: int
) -> np.ndarray:
    """Move a run; by how much its values have changed, float32 [rows, n]."""
    run_codes = np.ascontiguousarray(codes[:, span])
    old = run_values(grid, run, run_codes)
    g = np.array(g.numpy(), order="C")
    grid.refit(run, run_codes, g, metric, sweep)
    if not grid.vectors:  # their units have moved already
        descend(grid, run, run_codes, g, metric)
    codes[:, span] = run_codes
    return run_values(grid, run, run_codes) - old


def descend(grid: Grid, run: int, codes: np.ndarray, g: np.ndarray, metric: Metric) -> None:
    """Coordinate descent and chains on the codes int16 [rows, n] of a run; updates g float32 [rows, n]."""
    a = _of_run(grid, run, grid.a)
    sub, low, high = grid.sub, grid.low, grid.high

    def work(r: slice) -> None:
        _descend(codes[r], g[r], metric.hessian, a[r], sub, low, high)
        _chains(codes[r], g[r], metric.hessian, a[r], sub, low, high)

    over_rows(len(codes), work)


def _of_run(grid: Grid, run: int, lines: np.ndarray) -> np.ndarray:
    subs = grid.fit_columns // grid.sub
    return np.ascontiguousarray(lines[:, run * subs : (run + 1) * subs], np.float32)


def run_values(grid: Grid, run: int, codes: np.ndarray) -> np.ndarray:
    """The values float32 [rows, n] of the codes of a run."""
    return values_of(codes, _of_run(grid, run, grid.a), _of_run(grid, run, grid.c), grid)


def metric_of(hessian: torch.Tensor, sub: int) -> Metric:
    h = np.array(hessian.cpu().numpy(), np.float32, order="C")
    orders, pushes, inverses = [], [], []
    for start in range(0, len(h), sub):
        order = start + np.argsort(-h.diagonal()[start : start + sub], kind="stable")
        part = torch.from_numpy(h[np.ix_(order, order)].astype(np.float64))
        factor = factor_of(part)
        inverses.append((factor.T @ factor).numpy())
        pushes.append((factor.T - torch.diag(factor.diagonal()) + torch.diag(1 / factor.diagonal())).numpy())
        orders.append(order)
    sums = np.add.reduceat(h, np.arange(0, len(h), sub))
    return Metric(h, np.array(orders), np.array(pushes, np.float32), np.array(inverses, np.float32), sums)


@kernel
def _descend(codes, g, hessian, a, sub, low, high):
    n = codes.shape[1]
    least = np.float32(low)
    most = np.float32(high)
    for row in range(codes.shape[0]):
        slope = g[row]
        for _ in range(_DESCENTS):
            changed = False
            for j in range(n):
                step = a[row, j // sub]
                curve = hessian[j, j] * step
                if curve == ZERO:
                    continue
                old = np.float32(codes[row, j])
                new = min(max(old + np.rint(slope[j] / curve * GAIN), least), most)
                if new == old:
                    continue
                changed = True
                codes[row, j] = np.int16(new)
                by = (new - old) * step
                for k in range(n):
                    slope[k] -= by * hessian[j, k]
            if not changed:
                break


@kernel
def _chains(codes, g, hessian, a, sub, low, high):
    n = codes.shape[1]
    least = np.float32(low)
    most = np.float32(high)
    step = np.empty(n, np.float32)  # the weight's move when its code moves by one
    cost = np.empty(n, np.float32)  # step^2 H_jj
    up = np.empty(n, np.float32)  # 0 where the code may rise, else -infinity
    down = np.empty(n, np.float32)
    gain, slope = np.empty(n, np.float32), np.empty(n, np.float32)
    chain, signs = np.empty(_CHAIN, np.int64), np.empty(_CHAIN, np.float32)
    for row in range(codes.shape[0]):
        total = ZERO
        for j in range(n):
            step[j] = a[row, j // sub]
            cost[j] = step[j] * step[j] * hessian[j, j]
            total += cost[j]
            up[j] = ZERO if codes[row, j] < most else _NEVER
            down[j] = ZERO if codes[row, j] > least else _NEVER
        if total == ZERO:
            continue
        for first in range(n):
            column = first
            # the cheaper direction
            sign = np.float32(1) if g[row, column] * step[column] > ZERO else np.float32(-1)
            if (up[column] if sign > ZERO else down[column]) == _NEVER:
                sign = -sign
            if np.float32(2) * sign * step[column] * g[row, column] < _START * cost[column]:
                continue
            for k in range(n):
                slope[k] = g[row, k]
            so_far = best = ZERO
            length = 0
            for depth in range(_CHAIN):
                by = sign * step[column]
                so_far += np.float32(2) * by * slope[column] - cost[column]
                chain[depth] = column
                signs[depth] = sign
                if so_far > best:
                    best = so_far
                    length = depth + 1
                if depth + 1 == _CHAIN:
                    break
                top = _NEVER
                for k in range(n):
                    slope[k] -= by * hessian[column, k]
                    v = np.float32(2) * slope[k] * step[k]
                    v = v + up[k] if v > ZERO else down[k] - v
                    v -= cost[k]
                    gain[k] = v
                for d in range(depth + 1):  # no code twice
                    gain[chain[d]] = _NEVER
                for k in range(n):
                    top = greater(top, gain[k])
                if not so_far + top > -cost[first]:  # or no code can move
                    break
                column = 0
                while gain[column] != top:
                    column += 1
                sign = np.float32(1) if slope[column] * step[column] > ZERO else np.float32(-1)
            if not best > np.float32(1e-4) * cost[first]:
                continue
            for d in range(length):
                column = chain[d]
                codes[row, column] += np.int16(signs[d])
                by = signs[d] * step[column]
                for k in range(n):
                    g[row, k] -= by * hessian[column, k]
                up[column] = ZERO if codes[row, column] < most else _NEVER
                down[column] = ZERO if codes[row, column] > least else _NEVER


@inner
def line_target(values, g, order, inverse, gathered, target):
    """Write the target W' + G H^-1 of a sub-run, in rounding order; returns its present error. `gathered`: scratch."""
    n = len(order)
    for k in range(n):
        gathered[k] = g[order[k]]
    left = ZERO
    for i in range(n):
        by = ZERO
        for k in range(n):
            by = add(by, inverse[i, k] * gathered[k])
        target[i] = values[order[i]] + by
        left += by * gathered[i]
    return left


@inner
def move(order, codes, a, c, row_codes, values, g, hessian):
    """Replace a sub-run's codes by float32 [n], in rounding order, on the line a * q + c; updates g."""
    for i in range(len(order)):
        j = order[i]
        row_codes[j] = np.int16(codes[i])
        value = a * codes[i] + c
        by = value - values[j]
        if by != ZERO:
            values[j] = value
            for k in range(len(g)):
                g[k] -= by * hessian[j, k]

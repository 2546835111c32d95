"""Two-sided rounding: what an error costs depends on the layer's inputs and on how the loss depends on its outputs.

To second order, errors E = W - W' of a layer's weights raise the loss by  mean (g^T E x)^2 / 2  a token, with its
inputs x, and g the gradient of the log-likelihood with respect to the layer's outputs, of a token drawn from the
model's own prediction (`forward_passes`). Here that is  tr(A E H E^T) / 2,  A [out, out] of g and H of x (`hessian`):
the Kronecker-factored Hessian of YAQA (Tseng et al. 2025, arXiv 2505.22988), whose A is mean g g^T. Here half of each
token's |g|^2 weighs its inputs (`token_weights`), so that g and x of a token stay tied (docs/quantize.md says why), and
A = mean g g^T / |g|  times mean |g|. With A = 1, rows do not matter to each other.

How much of A off its diagonal is chance, or of one kind of text, tokens show that are held back: `output_shrinkage`.

GPTQ moves the columns that are not rounded yet, to make up for the errors of those that are. The same is done here
with rows, in parts r, by falling diagonal of A. The target of a part, among the rows that are left, is

    W_r + (A_left,left^-1 A_left,done E_done)_r

and how it is rounded against H is up to the caller. Afterwards each part is refined against the errors of all others,
with the target  W_r + A_rr^-1 (A E)_r - E_r, and kept where the exact cost falls.

A of many rows is large and takes long to gather: beyond `ROWS`, it is kept in blocks about its diagonal, whose rows do
not matter to those of other blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bridge.quantize.solve.gptq_solver import dequantize
from bridge.quantize.solve.hessian import best_shrinkage, damp, inverse_factor, shrunk

ROWS = 2048
_HELD_ROWS = 1024  # of which the products of held-back tokens are kept
_PART = 16  # rows that are rounded side by side
_DAMPING = 0.05  # added to the diagonal of A, as a fraction of its mean
_WORTH = 0.97  # of what rows lose that are rounded one by one, at most, if others are to make up for them
_SWEEPS = 1  # over the parts; a second one gains a tenth of a percent


@dataclass(frozen=True)
class OutputHessian:
    """A of a layer.

    blocks     float32 [blocks, n, n]: those about its diagonal; the last one may have fewer rows than n
    held       A of the tokens held back, float32 [m, m], of `some_outputs` of the first block; None: there are none
    share      of all tokens that are held back
    scale      mean |g|^2 |x|^2 over (mean |g|)^2 mean |x|^2: how many times as much errors cost as A and H without
               weights say, which `budget` compares layers by
    """

    blocks: torch.Tensor
    held: torch.Tensor | None = None
    share: float = 0.0
    scale: float = 1.0


def summed(parts: Sequence[tuple[OutputHessian, float]]) -> OutputHessian | None:
    """A of several parts of the tokens, with their shares of all; None: of no part."""
    if not parts:
        return None
    blocks = sum(outputs.blocks * share for outputs, share in parts)
    held = sum(outputs.held * (share * outputs.share) for outputs, share in parts if outputs.held is not None)
    of_held = sum(outputs.share * share for outputs, share in parts)
    return OutputHessian(blocks, held / of_held if of_held else None, of_held)  # type: ignore[arg-type, operator]


def some_outputs(rows: int) -> slice:
    """The rows of a block of A of which `OutputHessian.held` is kept."""
    return slice(None, None, -(-rows // _HELD_ROWS))


def output_shrinkage(outputs: OutputHessian) -> float:
    """The share of A's off-diagonals to take away that serves the tokens held back best; 1: rows are independent.

    As `hessian.shrinkage_of`: fitted to the other tokens, for independent rounding errors of equal power.
    """
    held, share = outputs.held, outputs.share
    if held is None or not 0 < share < 1:
        return 0.0
    some = some_outputs(len(outputs.blocks[0]))
    rest = torch.sub(outputs.blocks[0][some, some], held, alpha=share).div_(1 - share)
    shrinkage, least = best_shrinkage(rest, held, _DAMPING)
    return shrinkage if least < _WORTH * float(held.diagonal().sum()) else 1.0


@dataclass(frozen=True)
class RowSolver:
    """How rows are rounded against H alone.

    hessian      H [columns, columns] of the inputs
    round_rows   (target of some rows, their grid) -> their codes
    refine_rows  (G of some rows' target, their grid, codes): moves codes that are there; -> G afterwards. G = E H
    """

    hessian: torch.Tensor
    round_rows: Callable[[torch.Tensor, Any], np.ndarray]
    refine_rows: Callable[[torch.Tensor, Any, np.ndarray], torch.Tensor]


def round_two_sided(
    weight: torch.Tensor, outputs: torch.Tensor, grid: Any, solver: RowSolver, shrinkage: float = 0.0
) -> np.ndarray:
    """Codes int16 [rows, columns] of weight float [rows, columns], and the grid's parameters.

    outputs    `OutputHessian.blocks`
    shrinkage  of A, see `output_shrinkage`
    """
    codes = np.empty(weight.shape, np.int16)
    for i, block in enumerate(outputs):
        rows = np.arange(i * len(block), min((i + 1) * len(block), len(weight)))
        among = shrunk(block[: len(rows), : len(rows)].to(weight), shrinkage)
        damp(among, _DAMPING)
        order = torch.argsort(among.diagonal(), descending=True)
        rows, part_grid = rows[order.cpu().numpy()], replace(grid, rows=len(rows))
        codes[rows] = _Block(weight[i * len(block) + order], among[order[:, None], order], part_grid, solver).codes
        grid.copy_rows(rows, part_grid, np.arange(len(rows)))
    return codes


def row_costs(outputs: torch.Tensor, rows: int) -> torch.Tensor:
    """What a squared error of each row costs when the rows rounded after it make up for it, float64 [rows].

    That is the variance of the row's gradient, given those of these rows: 1 / U_ii^2, A^-1 = U^T U, in the order in
    which `round_two_sided` takes them. `outputs` as there; a block that has no factor keeps the diagonal of A.
    """
    costs = []
    for i, block in enumerate(outputs):
        n = min(len(block), rows - i * len(block))
        among = block[:n, :n].clone()
        damp(among, _DAMPING)
        block_costs, order = among.diagonal().double(), torch.argsort(among.diagonal(), descending=True)
        factor = inverse_factor(among[order[:, None], order])
        if factor is not None:
            block_costs[order] = factor.diagonal().double().square().reciprocal()
        costs.append(block_costs)
    return torch.cat(costs)


class _Block:
    """Rows that one block of A [rows, rows], damped, is of, by falling diagonal; made with their codes found."""

    def __init__(self, weight: torch.Tensor, outputs: torch.Tensor, grid: Any, solver: RowSolver) -> None:
        self.outputs, self.grid, self.solver = outputs, grid, solver
        self.codes = np.empty(weight.shape, np.int16)
        parts = [slice(start, min(start + _PART, len(weight))) for start in range(0, len(weight), _PART)]
        factor = inverse_factor(outputs.clone())
        lost = weight.clone()  # the targets of rows that are not rounded yet, E of the others
        for rows in parts:
            self._round(weight, lost, rows, factor)
        g = lost @ solver.hessian
        del lost
        for _ in range(_SWEEPS):
            for rows in parts:
                self._refine(rows, g)

    def _round(self, weight: torch.Tensor, lost: torch.Tensor, rows: slice, factor: torch.Tensor | None) -> None:
        """Round some rows, and shift the targets of those after them."""
        target, part_grid = lost[rows], replace(self.grid, rows=rows.stop - rows.start)
        codes = self.solver.round_rows(target, part_grid)
        self._keep(rows, part_grid, codes)
        values = torch.from_numpy(dequantize(codes, part_grid)).to(weight)
        if factor is not None:
            moved = torch.linalg.solve_triangular(factor[rows, rows].T, target - values, upper=False)
            lost[rows.stop :].addmm_(factor[rows, rows.stop :].T, moved, alpha=-1)
        lost[rows] = weight[rows] - values

    def _refine(self, rows: slice, g: torch.Tensor) -> None:
        """Refine these rows given the errors of all rows, g = E H; keep the result only where the cost decreases."""
        product, among = self.outputs[rows] @ g, self.outputs[rows, rows]
        part_grid, codes = replace(self.grid, rows=len(product)), self.codes[rows].copy()
        part_grid.copy_rows(np.arange(len(product)), self.grid, np.arange(rows.start, rows.stop))
        old = torch.from_numpy(dequantize(codes, part_grid)).to(g)
        before = torch.linalg.solve(among, product)
        cost = before - self.solver.refine_rows(before.clone(), part_grid, codes)  # (new - old) H
        by = torch.from_numpy(dequantize(codes, part_grid)).to(g) - old
        if float((by * (among @ cost - 2 * product)).sum(dtype=torch.float64)) < 0:
            self._keep(rows, part_grid, codes)
            g[rows] -= cost

    def _keep(self, rows: slice, part_grid: Any, codes: np.ndarray) -> None:
        self.codes[rows] = codes
        self.grid.copy_rows(np.arange(rows.start, rows.stop), part_grid, np.arange(len(codes)))

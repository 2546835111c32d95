"""Two-sided rounding: what an error costs depends on the layer's inputs and on how the loss depends on its outputs.

To second order, errors E = W - W' of a layer's weights raise the loss by  tr(A E H E^T) / 2  a token, with H of the
inputs (`hessian`) and  A = mean g g^T,  [out, out], g the gradient of the log-likelihood with respect to the layer's
outputs, of a token drawn from the model's own prediction (`forward_passes`). This is the Kronecker-factored
Hessian of YAQA (Tseng et al. 2025, arXiv 2505.22988). With A = 1, rows do not matter to each other.

GPTQ moves the columns that are not rounded yet, to make up for the errors of those that are. The same is done here
with rows, in parts r, by falling diagonal of A. The target of a part, among the rows that are left, is

    W_r + (A_left,left^-1 A_left,done E_done)_r

and how it is rounded against H is up to the caller. Afterwards each part is refined against the errors of all others,
with the target  W_r + A_rr^-1 (A E)_r - E_r, and kept where the exact cost falls.

A of many rows is large and takes long to gather: beyond `ROWS`, it is kept in blocks about its diagonal, whose rows do
not matter to those of other blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bridge.quantize.gptq_solver import dequantize
from bridge.quantize.hessian import damp, inverse_factor

ROWS = 2048
_PART = 16  # rows that are rounded side by side
_DAMPING = 0.05  # added to the diagonal of A, as a fraction of its mean
_SWEEPS = 1  # over the parts; a second one gains a tenth of a percent

# (target of some rows, their grid) -> their codes; the second one moves codes that are there
RoundRows = Callable[[torch.Tensor, Any], np.ndarray]
RefineRows = Callable[[torch.Tensor, Any, np.ndarray], None]


def round_two_sided(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    outputs: torch.Tensor,
    grid: Any,
    round_rows: RoundRows,
    refine_rows: RefineRows,
) -> np.ndarray:
    """Codes int16 [rows, columns] of weight float [rows, columns], and the grid's parameters.

    hessian  H [columns, columns] of the inputs
    outputs  A, float [blocks, n, n]: those about its diagonal; the last one may have fewer rows than n
    """
    codes = np.empty(weight.shape, np.int16)
    for i, block in enumerate(outputs):
        rows = np.arange(i * len(block), min((i + 1) * len(block), len(weight)))
        own, target = replace(grid, rows=len(rows)), weight[rows[0] : rows[-1] + 1]
        among = block[: len(rows), : len(rows)].to(weight, copy=True)
        codes[rows] = _round_block(target, hessian, among, own, round_rows, refine_rows)
        grid.copy_rows(rows, own, np.arange(len(rows)))
    return codes


def _round_block(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    outputs: torch.Tensor,
    grid: Any,
    round_rows: RoundRows,
    refine_rows: RefineRows,
) -> np.ndarray:
    """As `round_two_sided`, with A [rows, rows], which is damped in place."""
    damp(outputs, _DAMPING)
    order = torch.argsort(outputs.diagonal(), descending=True)
    codes = np.empty(weight.shape, np.int16)
    left = weight.clone()  # the targets of rows that are not rounded yet, then E of all
    factor = inverse_factor(outputs[order[:, None], order])
    parts = [slice(at, min(at + _PART, len(order))) for at in range(0, len(order), _PART)]
    for part in parts:
        rows = order[part]
        target, own = left[rows], replace(grid, rows=len(rows))
        found = round_rows(target, own)
        at = rows.cpu().numpy()
        codes[at] = found
        grid.copy_rows(at, own, np.arange(len(at)))
        values = torch.from_numpy(dequantize(found, own)).to(weight)
        if factor is not None:
            later = order[part.stop :]
            moved = torch.linalg.solve_triangular(factor[part, part].T, target - values, upper=False)
            left[later] -= factor[part, part.stop :].T @ moved
        left[rows] = weight[rows] - values
    for _ in range(_SWEEPS):
        for part in parts:
            _refine_part(order[part], left, hessian, outputs, grid, codes, refine_rows)
    return codes


def _refine_part(
    rows: torch.Tensor,
    lost: torch.Tensor,
    hessian: torch.Tensor,
    outputs: torch.Tensor,
    grid: Any,
    codes: np.ndarray,
    refine_rows: RefineRows,
) -> None:
    """Refine some rows against the errors of all, `lost`, where the cost falls."""
    at = rows.cpu().numpy()
    felt = outputs[rows] @ lost
    among = outputs[rows[:, None], rows]
    own = replace(grid, rows=len(at))
    own.copy_rows(np.arange(len(at)), grid, at)
    old = torch.from_numpy(dequantize(codes[at], own)).to(lost)
    found = codes[at]
    refine_rows(old + torch.linalg.solve(among, felt), own, found)
    by = torch.from_numpy(dequantize(found, own)).to(lost) - old
    cost = by @ hessian
    if float(((among @ by - 2 * felt) * cost).sum(dtype=torch.float64)) < 0:
        codes[at] = found
        grid.copy_rows(at, own, np.arange(len(at)))
        lost[rows] -= by

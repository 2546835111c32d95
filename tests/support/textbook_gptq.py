"""GPTQ as the paper writes it (Frantar et al. 2022, algorithm 1), in plain float64 numpy: no blocks, no lazy updates.

`bridge.quantize.gptq_solver` must agree with it. Groups are fitted from the least to the greatest weight when their
first column is reached; the inverse is downdated column by column, so the solver's Cholesky factor is not used either.
"""

from __future__ import annotations

import numpy as np


def gptq(
    weight: np.ndarray,
    hessian: np.ndarray,
    bits: int,
    group_size: int,
    symmetric: bool,
    ties: np.ndarray,
    damping: float = 0.01,
    order: np.ndarray | None = None,
    cross: np.ndarray | None = None,
    alpha: float = 0.0,
) -> np.ndarray:
    """weight [rows, columns] -> the rounded values, float64. A `group_size` of -1 is the whole row.

    ties  int [rows, columns]: the code to choose when two are equally near. A symmetric group's least weight, if it is
          the largest in size, is such a tie, decided by noise in the last bit
    order  int [columns]: static groups, fitted on the original weights, and columns rounded in this order
    cross  float [columns, columns]: GPTAQ (arXiv 2504.02692). Rounding a column j moves the columns after it, F, by
           alpha w_j C[j, F] H_FF^-1
    """
    work = weight.astype(np.float64)
    rows, columns = work.shape
    group_size = columns if group_size == -1 else group_size
    high = 2**bits - 1
    hessian = hessian.astype(np.float64)
    dead = hessian.diagonal() == 0
    work[:, dead] = 0
    static = [_range(work[:, j : j + group_size], high, symmetric) for j in range(0, columns, group_size)]
    steps = np.arange(columns) if order is None else order
    hessian = hessian + np.diag(damping * hessian.diagonal().mean() + dead)
    inverse = np.linalg.inv(hessian)
    done = np.empty_like(work)
    scale = zero = np.zeros(rows)
    left = np.ones(columns, bool)
    for j in steps:
        left[j] = False
        if order is not None:
            scale, zero = static[j // group_size]
        elif j % group_size == 0:
            scale, zero = _range(work[:, j : j + group_size], high, symmetric)
        exact = work[:, j] / scale + zero
        tied = np.abs(exact - np.floor(exact) - 0.5) < 1e-9
        assert (np.abs(ties[:, j] - exact)[tied & (exact > 0) & (exact < high)] < 0.51).all()
        q = np.clip(np.where(tied, ties[:, j], np.rint(exact)), 0, high)
        done[:, j] = scale * (q - zero)
        error = (work[:, j] - done[:, j]) / inverse[j, j]
        work[:, left] -= np.outer(error, inverse[j, left])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        if cross is not None:  # the rest of the inverse is H_FF^-1
            work[:, left] += alpha * np.outer(work[:, j], cross[j, left] @ inverse[np.ix_(left, left)])
    return done


def _range(group: np.ndarray, high: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    low, top = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
    if symmetric:
        top = np.maximum(-low, top)
        low = np.where(low < 0, -top, low)
    empty = (low == 0) & (top == 0)
    low, top = np.where(empty, -1.0, low), np.where(empty, 1.0, top)
    scale = (top - low) / high
    zero = np.full(len(group), (high + 1) / 2) if symmetric else np.rint(-low / scale)
    return scale, zero

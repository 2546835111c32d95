"""GPTQ in one page, the algorithm to read first: as the paper writes it (Frantar et al. 2022, algorithm 1), and slow.

Columns are rounded one after the other. The error of each, over the diagonal of H^-1, is spread over the columns that
are not rounded yet; then the rounded column is taken out of H^-1. Groups are fitted from the least to the greatest
weight when their first column is reached. Plain float64 NumPy, without blocks, lazy updates or a Cholesky factor:
`gptq_solver` does the same fast, and the tests compare the two.
"""

from __future__ import annotations

import numpy as np


def gptq(
    weight: np.ndarray,
    hessian: np.ndarray,
    bits: int,
    group_size: int,
    symmetric: bool,
    damping: float = 0.01,
    order: np.ndarray | None = None,
    ties: np.ndarray | None = None,
) -> np.ndarray:
    """The rounded values of a layer's weights, float64 [rows, columns].

    weight      float [rows, columns]
    hessian     H of the layer's inputs, float [columns, columns]
    bits        of a code
    group_size  columns that share a scale and a zero point; -1: all
    symmetric   the middle code stands for 0
    damping     added to the diagonal of H, as a fraction of its mean
    order       int [columns]: static groups, fitted on the original weights, and columns rounded in this order
    ties        int [rows, columns]: the code to choose where two are equally near; None: the even one. A symmetric
                group's least weight, if it is the largest in size, is such a tie, decided by noise in the last bit
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
        codes = np.rint(exact)
        if ties is not None:
            tied = np.abs(exact - np.floor(exact) - 0.5) < 1e-9
            assert (np.abs(ties[:, j] - exact)[tied & (exact > 0) & (exact < high)] < 0.51).all()
            codes = np.where(tied, ties[:, j], codes)
        done[:, j] = scale * (np.clip(codes, 0, high) - zero)
        error = (work[:, j] - done[:, j]) / inverse[j, j]
        work[:, left] -= np.outer(error, inverse[j, left])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return done


def _range(group: np.ndarray, high: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the zero point of each row's group, whose codes go from 0 to `high`."""
    low, top = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
    if symmetric:
        top = np.maximum(-low, top)
        low = np.where(low < 0, -top, low)
    empty = (low == 0) & (top == 0)
    low, top = np.where(empty, -1.0, low), np.where(empty, 1.0, top)
    scale = (top - low) / high
    zero = np.full(len(group), (high + 1) / 2) if symmetric else np.rint(-low / scale)
    return scale, zero

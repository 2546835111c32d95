"""The grid of K-quants: d and dmin per block, sc and m per sub-block, fitted as floats are rounded.

    affine types   a * q + c,  a = d * sc,  c = -dmin * mn
    scaled types   a * q,      a = d * sc                      q counted from the type's zero

The fit of a block weights a column by  h_j * sqrt(sigma^2 + w^2)  with h_j = diag H, as llama.cpp does with its
imatrix: the rounding error of a large weight counts for more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from bridge.blocks import BlockType
from bridge.encode.rounding.round_affine import affine_quantizer
from bridge.encode.rounding.round_scaled import scaled_quantizer
from bridge.quantize.grids.block_grid import BlockGrid
from bridge.quantize.grids.superblock_refit import refitter
from bridge.quantize.solve.refine import Metric, run_values
from bridge.system.cpu.row_threads import over_rows
from bridge.system.kernels.jit import specialize

# factors of d and dmin with which a refit starts a block over, one list per sweep in turn; without dmin always the
# first. Costs as much as three sweeps without and gains less than one more, so it starts after the first sweeps
_FIRST_SWEEPS = 2
_OFF = (0.97, 1.03)
_TRIES = [[(1.0, 1.0), *more] for more in (((f, f) for f in _OFF), ((f, 1.0) for f in _OFF), ((1.0, f) for f in _OFF))]

# a quick fit is near the best one if no column counts for more than this many times the mean of its block
_EVEN = 16

# set per type by `specialize`
search: Any = None
subs = sub = 0


def _fit_rows(x, h, spread, q, sc, mn, d, dmin, sums):
    """x float32 [rows, size], h [size] -> the fields of one block per row; codes are a by-product."""
    for row in range(x.shape[0]):
        square = np.float32(0)
        for i in range(x.shape[1]):
            square += x[row, i] * x[row, i]
        square /= np.float32(x.shape[1])
        w = np.empty((subs, sub), np.float32)
        total = np.float32(0)
        for j in range(subs):
            for i in range(sub):
                v = x[row, j * sub + i]
                w[j, i] = h[j * sub + i] * (np.sqrt(square + v * v) if spread else np.float32(1))
                total += w[j, i]
        scale = np.float32(x.shape[1]) / total if total > 0 else np.float32(1)
        for j in range(subs):
            for i in range(sub):
                w[j, i] = max(w[j, i] * scale, np.float32(1e-6))
        one = slice(row, row + 1)
        search(x[one].reshape(1, subs, sub), w, q[one], sc[one], mn[one], d[one], dmin[one], sums[one])


@cache
def _fitter(block: BlockType, quick: bool) -> Callable[..., None]:
    rows = affine_quantizer(block.name, quick) if block.has_min else scaled_quantizer(block.name)
    return row_fitter(block, rows, "_quick" if quick else "")


def row_fitter(block: BlockType, search: Callable[..., None], suffix: str = "") -> Callable[..., None]:
    """The compiled `_fit_rows` of a type, whose blocks `search` rounds."""
    return specialize(_fit_rows, f"{block.name}{suffix}", search=search, subs=block.subs, sub=block.sub)


@dataclass
class SuperblockGrid(BlockGrid):
    """Blocks of a K-quant over [rows, columns]."""

    spread: bool = True  # weight by sqrt(sigma^2 + w^2) too
    row_fields: ClassVar[tuple[str, ...]] = ("sc", "mn", "d", "dmin", "a", "c")
    vectors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = (self.rows, self.columns // self.fit_columns)
        self.sc, self.mn = np.ones(self.a.shape, np.int8), np.zeros(self.a.shape, np.uint8)
        self.d, self.dmin = (np.zeros(blocks, np.float32) for _ in range(2))

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        """Fit block `run` of every row to weights float32 [rows, size], columns of importance float32 [size]."""
        h = importance.astype(np.float32)
        q = np.empty((self.rows, self.block.subs, self.sub), np.uint8)
        sums = np.zeros((self.rows, 3))
        even = bool(h.max() <= _EVEN * h.mean())
        fit = _fitter(self.block, quick and even and self.block.has_min)
        with self._fields(run) as (sc, mn, d, dmin):
            over_rows(self.rows, lambda r: fit(weights[r], h, self.spread, q[r], sc[r], mn[r], d[r], dmin[r], sums[r]))

    def refit(self, run: int, codes: np.ndarray, g: np.ndarray, metric: Metric, sweep: int) -> None:
        """Move d, dmin, sc and m of block `run`; see `refine.Refinable`."""
        fit = refitter(self.block)
        tries = np.array(_TRIES[sweep % len(_TRIES) if self.block.has_min else 0], np.float32)
        if sweep < _FIRST_SWEEPS:
            tries = tries[:1]
        hessian, sums, order = metric.hessian, metric.sums, metric.order
        push, inverse = metric.push, metric.inverse
        # by PyTorch: NumPy's BLAS has threads of its own, which spin beside those that work on rows
        hw = torch.mm(torch.from_numpy(run_values(self, run, codes)), torch.from_numpy(hessian)).numpy()
        with self._fields(run) as (sc, mn, d, dmin):
            over_rows(
                self.rows,
                lambda r: fit(
                    codes[r], g[r], hw[r], hessian, sums, order, push, inverse, sc[r], mn[r], d[r], dmin[r], tries
                ),
            )

    @contextmanager
    def _fields(self, run: int) -> Iterator[list[np.ndarray]]:
        """Contiguous copies of a block's sc, mn, d, dmin in every row, written back at the end; updates the lines."""
        subs = self.block.subs
        of_run = slice(run * subs, (run + 1) * subs)
        block = slice(run, run + 1)
        fields: list[np.ndarray] = [self.sc[:, of_run], self.mn[:, of_run], self.d[:, block], self.dmin[:, block]]
        copies = [np.ascontiguousarray(f) for f in fields]
        yield copies
        for original, changed in zip(fields, copies, strict=True):
            np.copyto(original, changed)
        self._set_lines(run)

    def _set_lines(self, run: int) -> None:
        """Update the lines of a block after a change of its fields, rounded as dequantizing rounds them."""
        subs = self.block.subs
        of_run = slice(run * subs, (run + 1) * subs)
        self.a[:, of_run] = self.d[:, run : run + 1] * self.sc[:, of_run].astype(np.float32)
        if not self.block.has_min:
            return
        self.c[:, of_run] = -(self.dmin[:, run : run + 1] * self.mn[:, of_run].astype(np.float32))

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """The blocks, uint8 [rows, row bytes], of codes int16 [rows, columns] in low..high."""
        return self._pack((codes - self.low).astype(np.uint8).__getitem__, self.sc, self.mn, self.d, self.dmin)

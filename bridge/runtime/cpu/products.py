"""A tensor's products by kernels of row groups: x becomes records, the pool runs a kernel, y is cut to size.

All of it happens in one compiled call, because from Python every step would cost a microsecond or more.
"""

from functools import cache
from itertools import count
from typing import Any

import numpy as np

from bridge.blocks import TYPES
from bridge.runtime.cpu.activations import copier, float_record, quantizer, record_of
from bridge.runtime.cpu.layout import InterleavedLayout
from bridge.runtime.cpu.portable import Dequantizing, RawMatrix
from bridge.system import targets
from bridge.system.jit import inner, specialize
from bridge.system.pool import MIN_BYTES_TO_SHARE, run, share

_NEAR = 1 << 23  # bytes of weights that stay in the cache from one product to the next

_numbers = count(1)
_last = 0  # the number of the engine that ran last

# set by `specialize`
fill: Any = None


def _product(state, threads, x, y, columns, record, blocks, lanes, function, weights, stride):
    """y[tokens, rows] = x W^T with a kernel of `columns` columns; y may have fewer rows than the row groups have."""
    tokens, rows = y.shape
    groups = -(-rows // lanes)
    turns = -(-tokens // columns)
    records = np.empty(turns * columns * blocks * record, np.uint8)
    if turns * columns != tokens:
        for i in range(tokens // columns * columns * blocks * record, records.size):
            records[i] = 0
    fill(x, columns, records)
    if groups * lanes == rows and turns * columns == tokens:
        address = y.ctypes.data
        run(state, threads, function, weights, records.ctypes.data, address, blocks, stride, turns, 4 * rows, groups)
        return
    padded = np.empty((turns * columns, groups * lanes), np.float32)
    address = padded.ctypes.data
    width = 4 * groups * lanes
    run(state, threads, function, weights, records.ctypes.data, address, blocks, stride, turns, width, groups)
    for t in range(tokens):  # a slice assignment would take seconds to compile
        for row in range(rows):
            y[t, row] = padded[t, row]


@cache
def _compiled(name: str, integer: bool) -> Any:
    block = TYPES[name]
    kind = f"{'int8' if integer else 'f32'}_{block.size}_{block.sum_span}_{block.lift}_{int(block.has_min)}"
    return specialize(_product, kind, fill=(quantizer if integer else copier)(name, inner))


class Interleaved:
    """An engine whose kernels work on row groups in the repacked form, wherever these come from."""

    name: str

    def __init__(self, matrix: RawMatrix, target: str):
        block = TYPES[matrix.type]
        module = targets.module(target)
        self.matrix = matrix
        self.block = block
        self.target = target
        self.widths: tuple[int, ...] = module.WIDTHS
        self.lanes: int = module.LANES
        self.layout = InterleavedLayout(block, self.lanes)
        rows, columns = matrix.shape
        self.blocks = columns // block.size
        self.groups = -(-rows // self.lanes)
        self.stride = self.layout.stride(self.blocks)
        self.float_fallback = Dequantizing(matrix)
        self._number = next(_numbers)
        self._plans: dict[tuple[int, bool, bool], tuple[Any, ...]] = {}

    def kernel(self, columns: int, integer: bool, near: bool) -> tuple[int, int]:
        """Addresses of the kernel for `width` columns of x, and of its weights.

        `near`: this tensor was multiplied just before, and is small enough to be in the cache still.
        """
        raise NotImplementedError

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        """y = x W^T, see portable.py."""
        if x.shape[0] == 1 or integer:
            first = 0
            for tokens, columns in self.passes(x.shape[0]):
                self._pass(x[first : first + tokens], y[first : first + tokens], columns, integer)
                first += tokens
        else:
            self.float_fallback.run(x, y, False)

    def passes(self, tokens: int) -> list[tuple[int, int]]:
        """(tokens, columns of the kernel) of each pass over the weights."""
        widest = self.widths[-1]
        whole = tokens // widest * widest
        rest = [(tokens - whole, self._width(tokens - whole))] if whole < tokens else []
        return [(whole, widest), *rest] if whole else rest

    def columns(self, tokens: int, integer: bool) -> int:
        """Columns of the kernel for so many tokens in a table of calls."""
        return self._width(tokens) if integer else 1

    def _width(self, tokens: int) -> int:
        return next((width for width in self.widths if width >= tokens), self.widths[-1])

    def _pass(self, x: np.ndarray, y: np.ndarray, columns: int, integer: bool) -> None:
        global _last
        near = columns == 1 and _last == self._number and self.groups * self.stride <= _NEAR
        _last = self._number
        plan = self._plans.get((columns, integer, near))
        if plan is None:
            record = record_of(self.block).nbytes if integer else float_record(self.block)
            plan = (_compiled(self.block.name, integer), record, *self.kernel(columns, integer, near))
            self._plans[columns, integer, near] = plan
        product, record, function, weights = plan
        worth = self.groups * self.stride * x.shape[0] >= MIN_BYTES_TO_SHARE
        share(worth, product, x, y, columns, record, self.blocks, self.lanes, function, weights, self.stride)

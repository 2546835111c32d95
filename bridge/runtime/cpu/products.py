"""A tensor's products by kernels of row groups: x becomes records, the pool runs a kernel, y is cut to size.

All of it happens in one compiled call, because from Python every step would cost a microsecond or more.
"""

from itertools import count

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu import interleaved
from bridge.runtime.cpu.activations import quantize_function, record_bytes
from bridge.runtime.cpu.layout import InterleavedLayout
from bridge.runtime.cpu.portable import Dequantizing, RawMatrix
from bridge.system import targets
from bridge.system.jit import kernel
from bridge.system.memory import floats
from bridge.system.pool import MIN_BYTES_TO_SHARE, call, run, share

_NEAR = 1 << 23  # bytes of weights that stay in the cache from one product to the next

_numbers = count(1)
_last = 0  # the number of the engine that ran last


@kernel
def _product(state, threads, x, y, columns, record, blocks, lanes, function, weights, stride, quantize):
    """y[tokens, rows] = x W^T with a kernel of `columns` columns; y may have fewer rows than the row groups have.

    One function serves all types: record, the bytes of a token's records, and the addresses of `quantize`, which makes
    them, and of the kernel are arguments.
    """
    tokens, rows = y.shape
    groups = -(-rows // lanes)
    turns = -(-tokens // columns)
    records = np.empty(turns * columns * record, np.uint8)
    for i in range(tokens // columns * columns * record, records.size if turns * columns != tokens else 0):
        records[i] = 0
    r = np.int64(records.ctypes.data)
    call(quantize, x.ctypes.data, r, x.shape[1], columns, 0, 0, 0, 0, tokens)
    padded = groups * lanes != rows or turns * columns != tokens
    width = groups * lanes
    memory = np.empty(4 * turns * columns * width if padded else 1, np.uint8)
    address = np.int64(memory.ctypes.data) if padded else np.int64(y.ctypes.data)
    wide = floats(address, turns * columns * width)
    run(state, threads, function, weights, r, address, blocks, stride, turns, 4 * width, groups)
    for t in range(tokens if padded else 0):  # a slice assignment would take seconds to compile
        for row in range(rows):
            y[t, row] = wide[t * width + row]
    records[0] = memory[0] = 0  # numba frees an array after its last use, and taking its address is not a use


class Interleaved:
    """An engine whose kernels work on row groups in the repacked form, wherever these come from."""

    name: str

    def __init__(self, matrix: RawMatrix, target: str):
        block = READ[matrix.type]
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
        self._plans: dict[tuple[int, bool, bool], tuple[int, int, int, int]] = {}

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

    def form(self, columns: int, integer: bool) -> str:
        """The form of the records that the kernel of so many columns reads, see activations.py."""
        return interleaved.form(self.block.name, self.target, columns, integer)

    def _width(self, tokens: int) -> int:
        return next((width for width in self.widths if width >= tokens), self.widths[-1])

    def _pass(self, x: np.ndarray, y: np.ndarray, columns: int, integer: bool) -> None:
        global _last
        near = columns == 1 and _last == self._number and self.groups * self.stride <= _NEAR
        _last = self._number
        plan = self._plans.get((columns, integer, near))
        if plan is None:
            form = self.form(columns, integer)
            record = record_bytes(self.block.name, self.matrix.shape[1], integer)
            quantize = quantize_function(self.block.name, integer, form).address
            plan = (record, quantize, *self.kernel(columns, integer, near))
            self._plans[columns, integer, near] = plan
        record, quantize, function, weights = plan
        worth = self.groups * self.stride * x.shape[0] >= MIN_BYTES_TO_SHARE
        share(worth, _product, x, y, columns, record, self.blocks, self.lanes, function, weights, self.stride, quantize)

"""A tensor's products by kernels of row groups: x becomes records, the pool runs a kernel, y is cut to size.

All of it happens in one compiled call, because from Python every step would cost a microsecond or more.
"""

from itertools import count

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu.engines import interleaved
from bridge.runtime.cpu.engines.portable import Dequantizing, RawMatrix
from bridge.runtime.cpu.engines.turns import split
from bridge.runtime.cpu.forms.activations import quantize_function, record_bytes
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.system.cpu import targets
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import allocate, array_at, floats, free, next_line
from bridge.system.threads.jobs import run
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, MIN_VALUES_TO_SHARE, share

_LEAST_OF_SEVERAL = 1 << 20  # bytes of weights, times tokens, to share: between a prompt's products other threads sleep
_NEAR = 1 << 23  # bytes of weights that stay in the cache from one product to the next

_numbers = count(1)
_last = 0  # the number of the engine that ran last


# words of what is the same for all products of a matrix with kernels of some columns: sizes, then addresses of the
# kernel, the weights, what makes records and what `narrow_function` makes
(COLUMNS, RECORD, BLOCKS, LANES, IN, ROWS, FUNCTION, WEIGHTS, STRIDE, QUANTIZE, NARROW, WORDS) = range(12)


def _product(state, threads, plan, x, y, tokens, _0, _1, _2):
    """y[tokens, rows] = x W^T with a kernel of `columns` columns; y may have fewer rows than the row groups have.

    x, y: addresses of float32 [tokens, in] and [tokens, rows]. One function serves all types.
    """
    p = array_at(plan, WORDS, np.int64)
    columns, record, lanes, rows = p[COLUMNS], p[RECORD], p[LANES], p[ROWS]
    groups = -(-rows // lanes)
    turns = -(-tokens // columns)
    nbytes = turns * columns * record
    record_memory = allocate(nbytes + 64)
    r = next_line(record_memory)
    records = array_at(r, nbytes, np.uint8)
    for i in range(tokens // columns * columns * record, nbytes if turns * columns != tokens else 0):
        records[i] = 0
    several = state if tokens * max(p[IN], rows) > MIN_VALUES_TO_SHARE else 0
    run(several, threads, p[QUANTIZE], x, r, p[IN], columns, 0, 0, 0, tokens)
    padded = groups * lanes != rows or turns * columns != tokens
    width = groups * lanes
    memory = allocate(4 * turns * columns * width + 64) if padded else 0
    address = next_line(memory) if padded else y
    run(state, threads, p[FUNCTION], p[WEIGHTS], r, address, p[BLOCKS], p[STRIDE], turns, 4 * width, groups)
    if padded:
        run(several, threads, p[NARROW], address, width, y, rows, 0, 0, 0, tokens)
        free(memory)
    free(record_memory)


@maker
def _product_function() -> CFunction:
    return c_function(_product)


def _narrow(wide, width, y, rows, _0, _1, _2, first, last):
    """y[t] = the first values of wide[t] for tokens first..last, float32 [tokens, rows] and [tokens, width]."""
    for t in range(first, last):
        source, out = floats(wide + 4 * width * t, rows), floats(y + 4 * rows * t, rows)
        for row in range(rows):
            out[row] = source[row]


@maker
def narrow_function() -> CFunction:
    """The C function that leaves out what the last row group has beyond a matrix's rows."""
    return c_function(_narrow)


def _address(array: np.ndarray) -> int:
    """Where an array begins, in a third of the time that `array.ctypes` takes."""
    return array.__array_interface__["data"][0]


class Interleaved:
    """An engine whose kernels work on row groups in the repacked form, wherever these come from.

    repacks  whether every pass over the weights does
    """

    name: str
    repacks = False

    def __init__(self, matrix: RawMatrix, target: str):
        block = READ[matrix.type]
        isa = targets.isa(target)
        self.matrix, self.block, self.target = matrix, block, target
        self._kinds = interleaved.kinds(matrix.type, target)
        self.lanes: int = isa.lanes
        self.layout = InterleavedLayout(block, self.lanes)
        rows, columns = matrix.shape
        self.blocks = columns // block.size
        self.groups = -(-rows // self.lanes)
        self.stride = self.layout.stride(self.blocks)
        self.float_fallback = Dequantizing(matrix)
        self._number = next(_numbers)
        self._plans: dict[tuple[int, bool, bool], tuple[np.ndarray, int]] = {}

    def kernel(self, columns: int, integer: bool, near: bool) -> tuple[int, int]:
        """Addresses of the kernel for `width` columns of x, and of its weights.

        `near`: this tensor was multiplied just before, and is small enough to be in the cache still.
        """
        raise NotImplementedError

    def functions(self, tokens: int, integer: bool) -> list[CFunction]:
        """The C functions that a product of so many tokens calls."""
        if tokens > 1 and not integer:
            return self.float_fallback.functions(tokens, integer)
        functions = [_product_function(), narrow_function()]
        for _, columns in self.passes(tokens, integer):
            functions.append(quantize_function(self.block.name, integer, self.form(columns, integer)))
            functions += self.kernels(columns, integer)
        return functions

    def kernels(self, columns: int, integer: bool) -> list[CFunction]:
        """The C functions behind `kernel`."""
        raise NotImplementedError

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        """y = x W^T, see portable.py."""
        if x.shape[0] == 1 or integer:
            first = 0
            for tokens, columns in self.passes(x.shape[0], integer):
                self._pass(x[first : first + tokens], y[first : first + tokens], columns, integer)
                first += tokens
            self.check()
        else:
            self.float_fallback.run(x, y, False)

    def check(self) -> None:
        """Raises BridgeError where a scale that a product has met is not finite."""

    def passes(self, tokens: int, integer: bool) -> tuple[tuple[int, int], ...]:
        """(tokens, columns of the kernel) of each pass over the weights; there are float kernels of one column."""
        return split(self.kinds(integer), tokens, self.repacks)

    def kinds(self, integer: bool) -> tuple[tuple[int, bool], ...]:
        """The columns of each of its kernels, and whether it unpacks its weights first; the widest last."""
        return self._kinds if integer else ((1, False),)

    def form(self, columns: int, integer: bool) -> str:
        """The form of the records that the kernel of so many columns reads, see activations.py."""
        return interleaved.form(self.block.name, self.target, columns, integer)

    def _pass(self, x: np.ndarray, y: np.ndarray, columns: int, integer: bool) -> None:
        global _last
        near = columns == 1 and _last == self._number and self.groups * self.stride <= _NEAR
        _last = self._number
        plan = self._plans.get((columns, integer, near))
        if plan is None:
            form = self.form(columns, integer)
            record = record_bytes(self.block.name, self.matrix.shape[1], integer)
            quantize = quantize_function(self.block.name, integer, form).address
            rows, inputs = self.matrix.shape
            sizes = columns, record, self.blocks, self.lanes, inputs, rows
            functions = self.stride, quantize, narrow_function().address
            words = np.array([*sizes, *self.kernel(columns, integer, near), *functions], np.int64)
            self._plans[columns, integer, near] = plan = words, words.ctypes.data
        tokens = x.shape[0]
        worth = self.groups * self.stride * tokens >= (MIN_BYTES_TO_SHARE if tokens == 1 else _LEAST_OF_SEVERAL)
        share(worth, _product_function(), plan[1], _address(x), _address(y), x.shape[0])

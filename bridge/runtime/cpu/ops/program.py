"""A token's computation as a table of calls.

Every row is a C function's address, its seven arguments, the number of items (tokens, row groups, ...) that
its range covers, and whether threads share them. One compiled loop walks the table: from Python, the 300
calls of a small model would cost as much as a quarter of its arithmetic.

Products of the same vector are one row (`Products`): threads meet once for all of them. They take ranges of
row groups that shrink, so that few begin with memory that nobody fetched ahead, and the last are too small
to be waited for: 5% faster from memory than the pool's own even chunks.
"""

from typing import Any, NamedTuple

import numpy as np

from bridge.runtime.cpu.forms import activations
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import array_at
from bridge.system.threads import pool
from bridge.system.threads.pool import ITEMS, WORDS

_LEAST = 1 << 16  # bytes of weights that a range has at least
_COLUMNS = 8, 16  # of the widest kernels: for so many tokens, and for more; buffers have rows for all of them


class Program:
    """Calls in order; what they point to is kept alive by `keep`."""

    def __init__(self) -> None:
        self._rows: list[list[Any]] = []  # a function, then words
        self._table: np.ndarray | None = None
        self._referenced: list[Any] = []

    def add(self, function: Any, *arguments: int, items: int, shared: bool = False) -> int:
        """One call of a C function, an address, or what makes a C function once there are items; its number."""
        row = [function, *arguments]
        self._rows.append([*row, *[0] * (ITEMS - len(row)), items, int(shared)])
        self._table = None
        return len(self._rows) - 1

    def records(
        self, known: dict[Any, np.ndarray], type: str, x: np.ndarray, columns: int, integer: bool, form: str
    ) -> np.ndarray:
        """The records uint8 [tokens, bytes] of x for a type: those of `known`, or new ones, which the program fills."""
        kind = activations.record_kind(type, integer)
        if kind not in known:
            nbytes = activations.record_bytes(type, x.shape[1], integer)
            x_records = known[kind] = np.zeros((-(-len(x) // columns) * columns, nbytes), np.uint8)
            quantize = activations.quantize_function(type, integer, form)
            arguments = address(x), address(x_records), x.shape[1], columns
            self.add(quantize, *arguments, items=len(x), shared=x.size > pool.MIN_VALUES_TO_SHARE)
            self.keep(x_records)
        return known[kind]

    def resize(self, call: int, items: int, shared: bool) -> None:
        """Give a call another number of items."""
        self._rows[call][ITEMS:] = items, int(shared)
        self._table = None

    def _call(self, row: list[Any]) -> list[int]:
        """A row of the table that is run: its function's address, then its other words."""
        function = self._function(row)
        return row if function is None else [function.address, *row[1:]]

    @staticmethod
    def _function(row: list[Any]) -> CFunction | None:
        """The C function of a row, made where it is not yet; None where there is its address."""
        if not isinstance(row[0], int | CFunction):
            row[0] = row[0]()
        return None if isinstance(row[0], int) else row[0]

    def functions(self) -> list[CFunction]:
        """The C functions of all calls."""
        functions = (self._function(row) for row in self._rows if row[ITEMS])
        return [function for function in functions if function is not None]

    def keep(self, *objects: Any) -> None:
        self._referenced += objects

    def run(self) -> None:
        """Make the calls, on the pool's threads if they are free."""
        if self._table is None:
            self._table = np.array([self._call(row) for row in self._rows if row[ITEMS]], np.int64).reshape(-1, WORDS)
        pool.make_calls(self._table)


class Product(NamedTuple):
    """One matrix times the records of tokens in `turns` of the kernel's columns, see interleaved.py."""

    kernel: int
    weights: int
    records: int
    y: int
    blocks: int
    stride: int
    turns: int
    y_stride: int
    groups: int


FIELDS = len(Product._fields)


def _several(block, parts, ranges, _0, _1, _2, _3, first, last):
    """Ranges first..last-1 of the row groups of several products, numbered through all of them.

    block: the fields of each Product, then ranges + 1 bounds.
    """
    fields = array_at(block, (parts, FIELDS), np.int64)
    bounds = array_at(block + 8 * FIELDS * parts, ranges + 1, np.int64)
    for item in range(first, last):
        begin = bounds[item]
        end = bounds[item + 1]
        for i in range(parts):
            f = fields[i]
            start = max(begin, 0)
            groups = f[FIELDS - 1]
            stop = min(end, groups)
            if start < stop:
                pool.call(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], start, stop)
            begin -= groups
            end -= groups


@maker
def _several_function() -> CFunction:
    return c_function(_several)


def add_products(program: Program, products: list[Product]) -> np.ndarray:
    """Add products that do not depend on each other; their fields, one after another, as they may be changed."""
    groups = sum(p.groups for p in products)
    size = sum(p.groups * p.stride for p in products)
    bounds = _shrinking(groups, max(1, _LEAST * groups // size), pool.get_num_threads())
    block = np.array([*[word for p in products for word in p], *bounds], np.int64)
    program.keep(block)
    ranges = len(bounds) - 1
    worth = size >= pool.MIN_BYTES_TO_SHARE
    program.add(_several_function(), block.ctypes.data, len(products), ranges, items=ranges, shared=worth)
    return block


def _shrinking(count: int, least: int, threads: int) -> list[int]:
    """Bounds of ranges, in rounds of one per thread: each round is four fifths of what is left ("factoring", Hummel et
    al. 1992). The largest come last: threads take the last first.
    """
    sizes: list[int] = []
    left = count
    while left:
        size = max(least, left * 4 // (5 * threads))
        for _ in range(threads):
            if left:
                sizes.append(min(left, size))
                left -= sizes[-1]
    return [0, *np.cumsum(sizes[::-1]).tolist()]


def product(engine: Any, records: np.ndarray, y: np.ndarray, turns: int, columns: int, integer: bool) -> Product:
    """A matrix times records, into a buffer's rows."""
    if y.base is None or (turns * columns - 1) * y.shape[-1] + engine.groups * engine.lanes > y.base.size:
        raise AssertionError(f"{engine.matrix.name}: rows beyond the buffer")
    function, weights = engine.kernel(columns, integer, False)
    addresses = address(records), address(y)
    return Product(function, weights, *addresses, engine.blocks, engine.stride, turns, 4 * y.shape[-1], engine.groups)


class KernelSlots:
    """The words of tables that hold a matrix's kernel and weights: they change when it is prepared."""

    def __init__(self, integer: bool):
        self.integer = integer
        self._slots: dict[int, list[tuple[np.ndarray, int]]] = {}

    def register(self, matrix: Any, words: np.ndarray, columns: int) -> None:
        """Remember int64 [2] that a matrix's kernel of so many columns fills."""
        self._slots.setdefault(id(matrix), []).append((words, columns))

    def refresh(self, matrix: Any) -> None:
        """Let the tables use the matrix's present engine."""
        engine: Any = matrix._get_engine()
        for words, columns in self._slots.get(id(matrix), ()):
            words[:] = engine.kernel(columns, self.integer, False)


def buffer(n: int, columns: int) -> np.ndarray:
    """float32 [n, columns], with room after it for a kernel's unused columns, or a last row group beyond the rows."""
    columns_of_kernel = _COLUMNS[n > _COLUMNS[0]]
    padded = -(-n // columns_of_kernel) * columns_of_kernel if n > 1 else 1
    return np.zeros(padded * columns + 16, np.float32)[: n * columns].reshape(n, columns)


def bits(value: float) -> int:
    """The bits of a float64, as an argument of a call."""
    return int(np.array(value, np.float64).view(np.int64))


def address(array: np.ndarray | None) -> int:
    """Where an array begins; 0 for None."""
    return 0 if array is None else array.ctypes.data

"""A token's computation as a table of calls.

Every row is a C function's address, its seven arguments, the number of items (tokens, row groups, ...) that
its range covers, and whether threads share them. One compiled loop walks the table: from Python, the 300
calls of a small model would cost as much as a quarter of its arithmetic.

Products of the same vector are one row (`add_products`): threads meet once for all of them. Each thread has the same
part of every matrix that it has where the matrix is multiplied by itself, see threads/jobs.py.
"""

from typing import Any, NamedTuple

import numpy as np

from bridge.runtime.cpu.forms import activations
from bridge.system.kernels.jit import CFunction, c_function, maker
from bridge.system.kernels.memory import array_at
from bridge.system.threads import pool
from bridge.system.threads.pool import ITEMS, WORDS
from bridge.system.threads.words import call

_LEAST = 1 << 16  # bytes of weights of an item
_WIDE = 8192  # values: 6 to 8 us of one thread; 64 threads meet in some 3
_PIECE = 256  # values, the longest block
_COLUMNS = 8  # of the widest kernel: buffers have rows for all of them


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
            rows, width, shared = pieces(x)
            self.add(quantize, address(x), address(x_records), width, columns, items=rows, shared=shared)
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


def _several(block, parts, threads, each, _0, _1, _2, first, last):
    """Items first..last-1 of several products, the fields of each Product at `block`: `each` items for every thread.

    A thread's items are equal ranges of its row groups, numbered through its parts of all products.
    """
    fields = array_at(block, (parts, FIELDS), np.int64)
    while first < last:
        thread = first // each
        stop = min(last, each * (thread + 1))
        total = 0
        for i in range(parts):
            groups = fields[i, FIELDS - 1]
            total += groups * (thread + 1) // threads - groups * thread // threads
        begin = total * (first - each * thread) // each
        end = total * (stop - each * thread) // each
        for i in range(parts):
            f = fields[i]
            groups = f[FIELDS - 1]
            at = groups * thread // threads
            length = groups * (thread + 1) // threads - at
            if max(begin, 0) < min(end, length):
                start, rest = at + max(begin, 0), at + min(end, length)
                call(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], start, rest)
            begin -= length
            end -= length
        first = stop


@maker
def _several_function() -> CFunction:
    return c_function(_several)


def add_products(program: Program, products: list[Product]) -> np.ndarray:
    """Add products that do not depend on each other; their fields, one after another, as they may be changed."""
    size = sum(p.groups * p.stride for p in products)
    threads = pool.get_num_threads()
    each = max(1, size // (_LEAST * threads))
    block = np.array([word for p in products for word in p], np.int64)
    program.keep(block)
    worth = size >= pool.MIN_BYTES_TO_SHARE
    arguments = block.ctypes.data, len(products), threads, each
    program.add(_several_function(), *arguments, items=threads * each, shared=worth)
    return block


def product(engine: Any, records: np.ndarray, y: np.ndarray, turns: int, columns: int, integer: bool) -> Product:
    """A matrix times records, into a buffer's rows."""
    if y.base is None or (turns * columns - 1) * y.shape[-1] + engine.groups * engine.lanes > y.base.size:
        raise AssertionError(f"{engine.matrix.name}: rows beyond the buffer")
    function, weights = engine.kernel(columns, integer, False)
    addresses = address(records), address(y)
    return Product(function, weights, *addresses, engine.blocks, engine.stride, turns, 4 * y.shape[-1], engine.groups)


def pieces(x: np.ndarray) -> tuple[int, int, bool]:
    """Rows and their width as which x [tokens, width] is rounded or activated, and whether threads share them.

    Blocks of a wide token are as good as tokens: its records, of a kernel of one column, follow one another.
    """
    tokens, width = x.shape
    if tokens == 1 and width >= _WIDE and width % _PIECE == 0:
        return width // _PIECE, _PIECE, True
    return tokens, width, x.size > pool.MIN_VALUES_TO_SHARE


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
    padded = -(-n // _COLUMNS) * _COLUMNS if n > 1 else 1
    return np.zeros(padded * columns + 16, np.float32)[: n * columns].reshape(n, columns)


def bits(value: float) -> int:
    """The bits of a float64, as an argument of a call."""
    return int(np.array(value, np.float64).view(np.int64))


def address(array: np.ndarray | None) -> int:
    """Where an array begins; 0 for None."""
    return 0 if array is None else array.ctypes.data

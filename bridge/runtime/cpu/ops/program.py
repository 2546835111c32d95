"""A token's computation as a table of calls.

Every row is a C function's address, its seven arguments, the number of items (tokens, row groups, ...) that
its range covers, and whether threads share them. One compiled loop walks the table: from Python, the 300
calls of a small model would cost as much as a quarter of its arithmetic. A table for some tokens serves
any smaller number of them too: few words depend on it. Products are rows as well, see passes.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.system.kernels.jit import CFunction
from bridge.system.threads import pool
from bridge.system.threads.pool import ITEMS, WORDS

_WIDE = 8192  # values: 6 to 8 us of one thread; 64 threads meet in some 3
_PIECE = 256  # values, the longest block
_COLUMNS = 8, 16  # of the widest kernels: for so many tokens, and for more; buffers have rows for all of them
_LINE = 64  # bytes

Word = int | Callable[[int], int]  # of a call; or what makes it of the number of tokens


class Program:
    """Calls in order; what they point to is kept alive by `keep`.

    tokens  how many the next run is for
    """

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self._rows: list[list[Any]] = []  # a function, then words
        self._table: np.ndarray | None = None
        self._varying: list[tuple[int, int, Callable[[int], int]]] = []  # row and word of the table, what makes it
        self._tabled = 0  # tokens that the table is for
        self._referenced: list[Any] = []

    def add(self, function: Any, *arguments: Word, items: Word, shared: bool = False) -> int:
        """One call of a C function, an address, or what makes a C function once there are items; its number."""
        row = [function, *arguments]
        self._rows.append([*row, *[0] * (ITEMS - len(row)), items, int(shared)])
        self._table = None
        return len(self._rows) - 1

    def resize(self, call: int, items: Word, shared: bool) -> None:
        """Give a call another number of items."""
        self._rows[call][ITEMS:] = items, int(shared)
        self._table = None

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

    def run(self, at_once: int = 0) -> None:
        """Make the calls, on the pool's threads if they are free.

        at_once  calls, before others may take the threads, and Python handles signals; 0: all
        """
        table = self._made() if self._table is None else self._table
        if self._tabled != self.tokens:
            for row, word, make in self._varying:
                table[row, word] = make(self.tokens)
            self._tabled = self.tokens
        step = at_once or max(1, len(table))
        for start in range(0, len(table), step):
            pool.make_calls(table[start : start + step])

    def _made(self) -> np.ndarray:
        """The table, int64 [calls, WORDS], but for what depends on the tokens."""
        rows = [row for row in self._rows if row[ITEMS]]
        self._table = np.zeros((len(rows), WORDS), np.int64)
        self._varying, self._tabled = [], 0
        for i, row in enumerate(rows):
            function = self._function(row)
            self._varying += [(i, word, make) for word, make in enumerate(row) if word and callable(make)]
            words = [row[0] if function is None else function.address, *row[1:]]
            self._table[i] = [0 if callable(word) else word for word in words]
        return self._table


class Scratch:
    """Memory for what the next rows of a table read, and none after them: later ones write there again."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], np.ndarray] = {}

    def memory(self, name: str, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] that begins on a cache line: the same for the same name and size."""
        if (name, nbytes) not in self._memory:
            whole = np.zeros(nbytes + _LINE, np.uint8)
            self._memory[name, nbytes] = whole[-whole.ctypes.data % _LINE :][:nbytes]
        return self._memory[name, nbytes]

    def rows(self, name: str, n: int, columns: int) -> np.ndarray:
        """float32 [n, columns], with the room after it that those of `buffer` have."""
        padded = _padded(n)
        return self.memory(name, 4 * padded * columns).view(np.float32).reshape(padded, columns)[:n]


def in_pieces(x: np.ndarray) -> tuple[int, int, bool]:
    """Rows and their width as which x [tokens, width] is rounded or activated, and whether threads share them.

    Blocks of a wide token are as good as tokens: its records, of a kernel of one column, follow one another.
    """
    tokens, width = x.shape
    if tokens == 1 and width >= _WIDE and width % _PIECE == 0:
        return width // _PIECE, _PIECE, True
    return tokens, width, x.size > pool.MIN_VALUES_TO_SHARE


def _padded(n: int) -> int:
    """So many tokens, and the columns that a kernel's last turn has to spare."""
    columns = _COLUMNS[n > _COLUMNS[0]]
    return -(-n // columns) * columns


def buffer(n: int, columns: int) -> np.ndarray:
    """float32 [n, columns], with room after it for a kernel's unused columns, or a last row group beyond the rows."""
    return np.zeros((_padded(n) if n > 1 else 1) * columns + 16, np.float32)[: n * columns].reshape(n, columns)


def bits(value: float) -> int:
    """The bits of a float64, as an argument of a call."""
    return int(np.array(value, np.float64).view(np.int64))


def address(array: np.ndarray | None) -> int:
    """Where an array begins; 0 for None."""
    return 0 if array is None else array.ctypes.data


def every_token(tokens: int) -> int:
    """A word of a call: the number of tokens."""
    return tokens

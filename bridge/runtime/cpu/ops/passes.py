"""Products in a table of calls: matrices times tokens, in passes of the widths that their kernels have.

A kernel multiplies so many tokens at once, its columns. Which kernels take how many turns (engines/turns.py) depends on
the number of tokens, which may be another each time that the table is run; so it is decided in compiled code, for
records and products alike.

Which tokens there are says a place, int64 [PLACE]:

    FIRST     the row of the first, in buffers and among records
    TOKENS    how many there are, in rows that follow one another; those after them are free up to a multiple of columns
    ONE_PASS  whether they take one pass

Records of a turn are those of its columns together, see activations.py; the first of row r is `r * RECORD` bytes behind
that of row 0, whatever passes the rows before it took.

Products that do not depend on each other are one row of the table: threads meet once for all of them. Each thread has
the same part of every matrix that it has where the matrix is multiplied by itself, see threads/jobs.py. A row group
weighs as much as the turns it takes.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from bridge.runtime.cpu.engines.turns import FEW, next_turns, split
from bridge.runtime.cpu.forms.activations import quantize_function, record_bytes
from bridge.runtime.cpu.ops.program import Program, address, every_token, in_pieces
from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import array_at
from bridge.system.threads import pool
from bridge.system.threads.words import call

_LEAST = 1 << 16  # bytes of weights of an item, each time that they are read

FIRST, TOKENS, ONE_PASS, PLACE = range(4)
# words of a kernel: its columns and whether it unpacks, addresses of it, its weights and what makes its records, bytes
# of a token's records, and how many kernels its matrix has
COLUMNS, UNPACKS, KERNEL, WEIGHTS, QUANTIZE, RECORD, KINDS, WORDS = range(8)


class Product(NamedTuple):
    """One matrix times the tokens of a place; addresses of records and y are those of row 0."""

    kernels: int
    kinds: int  # of kernels
    place: int
    records: int
    y: int
    y_stride: int
    blocks: int
    stride: int
    groups: int


FIELDS = len(Product._fields)


@inner
def turns_and_rows(kernels, tokens, one_pass):
    """How many turns tokens take, and how many rows, those to spare among them."""
    turns = rows = 0
    while rows < tokens:
        kind, count = next_turns(kernels, tokens - rows, one_pass)
        turns += count
        rows += count * kernels[kind, COLUMNS]
    return turns, rows


@inner
def make_records(kernels, place, x, x_stride, out, count, first, last):
    """The records of tokens first..last of a place; x: where the float32 [count] of its token 0 would be."""
    tokens, done = place[TOKENS], 0
    while done < tokens:
        kind, turns = next_turns(kernels, tokens - done, place[ONE_PASS])
        k = kernels[kind]
        stop = min(tokens, done + turns * k[COLUMNS])
        begin, end = max(first, done), min(last, stop)
        if begin < end:
            source, target = x + x_stride * done, out + k[RECORD] * (place[FIRST] + done)
            call(k[QUANTIZE], source, target, count, k[COLUMNS], 0, 0, 0, begin - done, end - done)
        done = stop


def _records(x, out, count, kernels, kinds, place, _0, first, last):
    """The records of tokens first..last of x float32 [tokens, count] at a place."""
    at = array_at(place, PLACE, np.int64)
    rows = x + 4 * count * at[FIRST]
    make_records(array_at(kernels, (kinds, WORDS), np.int64), at, rows, 4 * count, out, count, first, last)


@inner
def _turns(fields):
    place = array_at(fields[2], PLACE, np.int64)
    if place[TOKENS] == 0:
        return 0
    kernels = array_at(fields[0], (fields[1], WORDS), np.int64)
    return turns_and_rows(kernels, place[TOKENS], place[ONE_PASS])[0]


@inner
def _multiply(fields, start, stop):
    """Row groups start..stop of a Product."""
    kernels, place = array_at(fields[0], (fields[1], WORDS), np.int64), array_at(fields[2], PLACE, np.int64)
    records, y, y_stride, blocks, stride = fields[3], fields[4], fields[5], fields[6], fields[7]
    tokens, done = place[TOKENS], 0
    while done < tokens:
        kind, turns = next_turns(kernels, tokens - done, place[ONE_PASS])
        k, row = kernels[kind], place[FIRST] + done
        x, out = records + k[RECORD] * row, y + y_stride * row
        call(k[KERNEL], k[WEIGHTS], x, out, blocks, stride, turns, y_stride, start, stop)
        done += turns * k[COLUMNS]


def _several(block, parts, threads, each, _0, _1, _2, first, last):
    """Items first..last-1 of several products, the fields of each Product at `block`: `each` items for every thread.

    A thread's items are equal ranges of the turns of its row groups, numbered through its parts of all products. A row
    group belongs to the item that its first turn is in.
    """
    fields = array_at(block, (parts, FIELDS), np.int64)
    while first < last:
        thread = first // each
        stop = min(last, each * (thread + 1))
        work = 0
        for i in range(parts):
            groups = fields[i, FIELDS - 1]
            work += _turns(fields[i]) * (groups * (thread + 1) // threads - groups * thread // threads)
        begin = work * (first - each * thread) // each
        end = work * (stop - each * thread) // each
        for i in range(parts):
            turns, groups = _turns(fields[i]), fields[i, FIELDS - 1]
            if turns == 0:
                continue
            part = groups * thread // threads
            length = groups * (thread + 1) // threads - part
            start, beyond = max(begin, 0), min(end, length * turns)
            if turns > 1:  # a division takes longer than all the rest
                start, beyond = (start + turns - 1) // turns, (beyond + turns - 1) // turns
            if start < beyond:
                _multiply(fields[i], part + start, part + beyond)
            begin -= length * turns
            end -= length * turns
            if end <= 0:
                break
        first = stop


FUNCTIONS = {"records": _records, "several": _several}


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name])


def add_records(program: Program, x: np.ndarray, out: np.ndarray, kernels: np.ndarray, place: np.ndarray) -> None:
    """Add the records uint8 of x float32 [n, in] at a place, for kernels int64 [kinds, WORDS]."""
    tokens, count = x.shape
    pieces, width, shared = in_pieces(x)
    if pieces > tokens:
        program.add(  # a kernel's words may be filled later
            lambda: int(kernels[0, QUANTIZE]), address(x), address(out), width, 1, items=pieces, shared=shared
        )
        return
    arguments = address(x), address(out), count, address(kernels), len(kernels), address(place)
    program.add(function("records"), *arguments, items=every_token, shared=shared)


def add_products(program: Program, products: list[Product], turns: int) -> None:
    """Add products that do not depend on each other, whose row groups take so many turns in all, more or less."""
    size = turns * sum(p.groups * p.stride for p in products) // sum(p.groups for p in products)
    threads = pool.get_num_threads()
    each = max(1, size // (_LEAST * threads))
    block = np.array([word for p in products for word in p], np.int64)
    program.keep(block)
    worth = size >= pool.MIN_BYTES_TO_SHARE
    arguments = block.ctypes.data, len(products), threads, each
    program.add(function("several"), *arguments, items=threads * each, shared=worth)


class Kernels:
    """The kernels of matrices, for all tables of a decoder: int64 [kinds, WORDS] of each, which change when a matrix is
    prepared.

    Kernels of so many columns are found, and compiled, when they are first needed.
    """

    def __init__(self, integer: bool):
        self.integer = integer
        self._words: dict[int, tuple[Any, Any, np.ndarray]] = {}  # by id: a matrix, its engine, its kernels
        self._repacked: set[int] = set()  # ids of matrices that are, in every pass
        self.needed: set[int] = set()  # columns

    def words(self, matrix: Any) -> np.ndarray:
        """The kernels of a matrix whose engine is `Interleaved`."""
        if id(matrix) not in self._words:
            engine: Any = matrix._get_engine()
            words = np.zeros((len(engine.kinds(self.integer)), WORDS), np.int64)
            words[:, [COLUMNS, UNPACKS]], words[:, KINDS] = engine.kinds(self.integer), len(words)
            words[:, RECORD] = record_bytes(matrix.type, matrix.shape[1], self.integer)
            self._use(matrix, words)
        return self._words[id(matrix)][2]

    def refresh(self, matrix: Any) -> None:
        """Use the present engine of a matrix."""
        if id(matrix) in self._words:
            self._use(matrix, self._words[id(matrix)][2])

    def _use(self, matrix: Any, words: np.ndarray) -> None:
        engine: Any = matrix._get_engine()
        self._fill(engine, words, self.needed)
        self._words[id(matrix)] = matrix, engine, words  # once they are whole: an interrupt may come any time
        (self._repacked.add if engine.repacks else self._repacked.discard)(id(matrix))

    def columns(self, tokens: int, gathered: bool) -> set[int]:
        """Columns of the kernels that so many tokens need now; `gathered`: that any fewer need, too."""
        every = {engine.kinds(self.integer) for _, engine, _ in self._words.values()}
        return {
            columns
            for kinds in every
            for count in (range(1, min(tokens, max(FEW, kinds[-1][0])) + 1) if gathered else (tokens,))
            for _, columns in split(kinds, count, self.one_pass)
        }

    def need(self, columns: Iterable[int]) -> None:
        """Find the kernels of so many columns, of all matrices."""
        new = set(columns) - self.needed
        for _, engine, words in self._words.values() if new else ():
            self._fill(engine, words, new)
        self.needed |= new

    def _fill(self, engine: Any, words: np.ndarray, columns: set[int]) -> None:
        """The kernels of so many columns into a matrix's words."""
        for kernel in words:
            count = int(kernel[COLUMNS])
            if count in columns:
                form = engine.form(count, self.integer)
                kernel[QUANTIZE] = quantize_function(engine.block.name, self.integer, form).address
                kernel[[KERNEL, WEIGHTS]] = engine.kernel(count, self.integer, False)

    @property
    def one_pass(self) -> bool:
        """Whether there are matrices that are repacked in every pass."""
        return bool(self._repacked)

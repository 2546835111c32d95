"""What the rows of a matrix, or of a stack of matrices, hold: counted piece by piece, judged when all are counted.

Which zeros are damage:

    a matrix whose weights are all 0        always: a trained matrix is not 0
    rows of zeros, or of one value          always, but for those of tables (embeddings), which may have a few, and for
                                            rows of zeros at the end that pad a side to a multiple of 32
    1024 zeros in a row, within other rows  always: a page of 4 KB of fp32 that was not written
    all of these                            never in a pruned matrix, of which 30% and more are zeros everywhere: that
                                            is a note. Rounding a trained matrix to halves makes less than 1%

Vectors (norms, biases) may be all zeros or ones.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from bridge.conversion.weight_check.finding import Finding, are, first_of, longest_run, share

NARROW = 16  # columns: rows of fewer may well be constant
PRUNED = 0.3
_RUN = 1024  # zeros in a row
_PADDING = 256  # rows at the end, at most
_PIECE = 1 << 17  # weights that are looked at while they are in the cache
FEW, IN_A_ROW = 0.01, 64  # rows of zeros that a table may have: less than that share, fewer in a row
_TABLE = re.compile(r"emb|wte|wpe|pos|token|types")
_ROUTER = re.compile(r"(router|\.gate|gate_inp|wg)(\.weight)?$")


def is_table(name: str) -> bool:
    """Whether a tensor of this name has a row for each token, position or type: some of them are never used."""
    return bool(_TABLE.search(name))


@dataclass
class RowCounts:
    """Counts of a tensor [matrices, rows, columns]; a vector is a matrix of one row.

    zero, constant  bool [matrices * rows]: rows of zeros; rows of another value
    bad             bool [matrices * rows]: rows with NaN or infinite weights
    not_finite      such weights
    zeros           weights that are 0
    squares         sum of squares
    runs            runs of 1024 zeros that end in no row of zeros
    """

    matrices: int
    rows: int
    columns: int
    zero: np.ndarray = field(init=False)
    constant: np.ndarray = field(init=False)
    bad: np.ndarray = field(init=False)
    not_finite: int = 0
    zeros: int = 0
    squares: float = 0.0
    runs: int = 0
    _next: int = 0

    def __post_init__(self) -> None:
        self.zero, self.constant, self.bad = (np.zeros(self.matrices * self.rows, bool) for _ in range(3))

    @property
    def size(self) -> int:
        return self.matrices * self.rows * self.columns

    @property
    def rms(self) -> float:
        """Root mean square of the weights outside of rows of zeros."""
        live = int(np.count_nonzero(~self.zero)) * self.columns
        return float(np.sqrt(self.squares / live)) if live else 0.0

    @property
    def pruned(self) -> bool:
        """Whether many weights are 0 outside of rows of zeros."""
        empty = int(np.count_nonzero(self.zero)) * self.columns
        return self.zeros - empty >= PRUNED * max(1, self.size - empty)

    def add(self, values: np.ndarray) -> None:
        """Count the next rows, float32 [n, columns]."""
        step = max(1, _PIECE // self.columns)
        for start in range(0, len(values), step):
            self._count(values[start : start + step])

    def _count(self, values: np.ndarray) -> None:
        span = slice(self._next, self._next + len(values))
        self._next = span.stop
        low, high = values.min(axis=1), values.max(axis=1)
        self.bad[span] = bad = ~(np.isfinite(low) & np.isfinite(high))
        self.zero[span] = zero = (low == 0) & (high == 0)
        self.constant[span] = (low == high) & ~zero & ~bad
        if bad.any():
            finite = np.isfinite(values)
            self.not_finite += values.size - int(np.count_nonzero(finite))
            values = np.where(finite, values, np.float32(1))
        zeros = values.size - int(np.count_nonzero(values))
        self.zeros += zeros
        flat = values.reshape(-1)
        with np.errstate(over="ignore"):
            self.squares += float(np.dot(flat, flat))
        if zeros - np.count_nonzero(zero) * self.columns >= _RUN:
            live = values[~zero].reshape(-1)
            self.runs += int(np.count_nonzero(~live[: len(live) // _RUN * _RUN].reshape(-1, _RUN).any(axis=1)))


def row_findings(name: str, counts: RowCounts, matrix: bool = True, stack: str = "matrices") -> list[Finding]:
    """What is wrong with a tensor's rows.

    matrix  whether its rows may be judged: not those of norms, biases, masks
    stack   what the matrices of a stack are, a plural
    """
    findings = []
    if count := counts.not_finite:
        first = first_of(counts.bad)
        text = f"{share(count, counts.size)} weights are NaN or infinite, the first in {_where(counts, first)}"
        findings.append(Finding(name, "not finite", text, {"count": count, "of": counts.size, "first_row": first}))
    if not matrix or counts.rows < 2 or counts.columns < NARROW:
        return findings
    empty: np.ndarray = np.logical_and.reduce(counts.zero.reshape(counts.matrices, -1), axis=1)
    if count := int(empty.sum()):
        text = f"{count} of {counts.matrices} {stack} {are(count)} all 0, the first is {first_of(empty)}"
        text = f"all {counts.size} weights are 0" if counts.matrices == 1 else text
        numbers = {"count": count, "of": counts.matrices, "first": first_of(empty)}
        findings.append(Finding(name, "zeros", text, numbers))
    zero = counts.zero & ~np.repeat(empty, counts.rows)
    if counts.matrices == 1:
        _leave_padding(zero)
    few = np.count_nonzero(zero) < FEW * len(zero) and longest_run(zero) < IN_A_ROW
    if counts.pruned or (is_table(name) and few):
        zero[:] = False
    if zero.any() or counts.constant.any():
        findings.append(_rows(name, counts, zero))
    if counts.runs and not counts.pruned:
        text = f"{counts.runs} runs of {_RUN} zeros lie within rows that are not 0, as if parts had not been written"
        findings.append(Finding(name, "unwritten", text, {"runs": counts.runs, "length": _RUN}))
    return findings


def _rows(name: str, counts: RowCounts, zero: np.ndarray) -> Finding:
    texts, numbers = [], {"of": len(zero)}
    for mask, kind, what in ((zero, "zero", "0"), (counts.constant, "constant", "constant")):
        if count := int(np.count_nonzero(mask)):
            first = _where(counts, first_of(mask))
            texts.append(f"{share(count, len(mask))} rows {are(count)} {what}, the first is {first}")
            numbers |= {kind: count, f"first_{kind}": first_of(mask)}
    if _ROUTER.search(name):
        texts.append("a row is an expert's")
    return Finding(name, "rows", "; ".join(texts), numbers)


def _leave_padding(zero: np.ndarray) -> None:
    """Clear rows of zeros at the end that pad the matrix to a multiple of 32."""
    live = np.flatnonzero(~zero)
    end = int(live[-1]) + 1 if len(live) else 0
    if len(zero) % 32 == 0 and 0 < len(zero) - end <= min(_PADDING, len(zero) // 4):
        zero[end:] = False


def _where(counts: RowCounts, row: int) -> str:
    matrix, row = divmod(row, counts.rows)
    return f"row {row}" if counts.matrices == 1 else f"row {row} of matrix {matrix}"

"""Whether a matrix of the checkpoint is one of the template, and the order of its rows.

A template made from this checkpoint differs only by the rounding of its type. One made from the unquantized model also
differs by the checkpoint's quantization: sum(s^2 / 12) is expected, and error-compensating quantizers cost a few times
that. Another model's weights differ by more than their sum of squares.

If the rows are not in order, permutations of known converters are tried first, then the nearest row by cosine over
some columns. AWQ multiplies columns by factors by which it divides the layer before; for such checkpoints one factor
per row and column is fitted before the comparison.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import READ

# as `BlockType.noise`, of a template's floats
_FLOAT_ROUNDING = {"F64": 1e-6, "F32": 1e-6, "F16": 1e-6, "BF16": 1e-5}
_NOISES = 16  # a checkpoint's error may be this many times its expected noise
_LARGEST = 0.4  # share of the squared weights, whatever the noise
_CHUNK_WEIGHTS = 1 << 22
_SAMPLE_ROWS = 64
_SEARCH_COLUMNS = 256
_SEARCH_ROWS = 1 << 15  # no converter permutes more, and the search is quadratic
_SIMILAR = 0.7  # cosine of a row and its quantized self; 0.9 for 2 bits


@dataclass(frozen=True)
class LazyMatrix:
    """Rows of float32, read on demand.

    read      (start, stop) -> float32 [stop - start, columns]
    pick      int64 [n] -> float32 [n, columns]: rows in any order; None: `read` is used
    noise     expected squared error of one weight due to quantization
    rounding  squared error over squared weights due to its stored type
    """

    shape: tuple[int, int]
    read: Callable[[int, int], np.ndarray]
    pick: Callable[[np.ndarray], np.ndarray] | None = None
    noise: float = 0.0
    rounding: float = 1e-6

    def chunks(self) -> Iterator[tuple[int, int]]:
        step = max(1, _CHUNK_WEIGHTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """float32 [n, columns] of rows in any order."""
        if rows.size and np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size)):
            return self.read(int(rows[0]), int(rows[0]) + rows.size)
        if self.pick is not None:
            return self.pick(rows)
        out = np.empty((rows.size, self.shape[1]), np.float32)
        for start, stop in self.chunks():
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                out[inside] = self.read(start, stop)[rows[inside] - start]
        return out


def rounding_of(type_: str) -> float:
    """Squared error over squared weights due to rounding to a GGUF type."""
    return READ[type_].noise if type_ in READ else _FLOAT_ROUNDING.get(type_, BlockType.noise)


def alike(template: LazyMatrix, checkpoint: LazyMatrix, t: np.ndarray, w: np.ndarray) -> bool:
    """Whether rows of the two differ only by rounding and noise."""
    return _sum_of_squares(t - w) <= allowed(template, checkpoint, _sum_of_squares(t), t.size)


def allowed(template: LazyMatrix, checkpoint: LazyMatrix, signal: float, weights: int) -> float:
    """The largest squared error at which so many weights count as equal."""
    rounding = (template.rounding + checkpoint.rounding) * signal
    return min(rounding + _NOISES * checkpoint.noise * weights, max(rounding, _LARGEST * signal))


@dataclass(frozen=True)
class RowMatch:
    """The places of a matrix's rows, or columns, in the checkpoint, int64, and whether the two differ by factors."""

    order: np.ndarray
    scaled: bool = False


def find_rows(template: LazyMatrix, checkpoint: LazyMatrix, known: Iterable[np.ndarray] = ()) -> RowMatch | None:
    """The checkpoint's row for each of the template's; None if the two are different matrices.

    known  orders that converters use, int64 [rows]: tried after the checkpoint's own, before any other
    """
    rows = template.shape[0]
    if rows > checkpoint.shape[0] or template.shape[1] != checkpoint.shape[1]:
        return None
    orders = [np.arange(rows), *known]
    sample = np.unique(np.linspace(0, rows - 1, _SAMPLE_ROWS).astype(np.int64))
    t = template.take(sample)
    for scaled in (False, True):
        for order in orders:
            w = checkpoint.take(order[sample])
            near = alike(template, checkpoint, t, _fitted(t, w) if scaled else w)
            if near and same(template, checkpoint, order, scaled):
                return RowMatch(order, scaled)
    searched = _most_similar_rows(template, [checkpoint])
    if searched is None or np.unique(searched).size < rows:
        return None
    return next((RowMatch(searched, s) for s in (False, True) if same(template, checkpoint, searched, s)), None)


def find_columns(template: LazyMatrix, checkpoint: LazyMatrix) -> RowMatch | None:
    """The checkpoint's column for each of the template's, whose rows are in order; None if the two are different."""
    if template.shape != checkpoint.shape:
        return None
    rows, columns = template.shape
    sample = np.unique(np.linspace(0, rows - 1, _SEARCH_COLUMNS).astype(np.int64))
    t, w = (np.ascontiguousarray(matrix.take(sample).T) for matrix in (template, checkpoint))
    order = _most_similar_rows(_in_memory(t), [_in_memory(w)])
    if order is None or np.unique(order).size < columns:
        return None
    permuted = replace(checkpoint, read=lambda a, b: checkpoint.read(a, b)[:, order], pick=None)
    return next((RowMatch(order, s) for s in (False, True) if same(template, permuted, np.arange(rows), s)), None)


def same(template: LazyMatrix, checkpoint: LazyMatrix, order: np.ndarray, scaled: bool = False) -> bool:
    """Whether all rows are the same, the checkpoint's in `order`; `scaled`: up to factors."""
    error = signal = 0.0
    for start, stop in template.chunks():
        t, w = template.read(start, stop), checkpoint.take(order[start:stop])
        w = _fitted(t, w) if scaled else w
        error += _sum_of_squares(t - w)
        signal += _sum_of_squares(t)
    return error <= allowed(template, checkpoint, signal, template.shape[0] * template.shape[1])


def find_in_several(template: LazyMatrix, pool: Sequence[LazyMatrix]) -> list[tuple[int, np.ndarray]] | None:
    """The template's rows as runs of rows of several matrices: (which, int64 rows) one after another, or None."""
    order = _most_similar_rows(template, pool)
    if order is None or np.unique(order).size < template.shape[0]:
        return None
    starts = np.cumsum([0, *(m.shape[0] for m in pool)])
    which = np.searchsorted(starts, order, side="right") - 1
    cuts = np.flatnonzero(np.diff(which)) + 1
    runs = []
    for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True):
        owner = int(which[start])
        rows = order[start:stop] - starts[owner]
        part = LazyMatrix(
            (stop - start, template.shape[1]), lambda a, b, first=start: template.read(first + a, first + b),  # type: ignore[misc]
            rounding=template.rounding,
        )  # fmt: skip
        if not same(part, pool[owner], rows):
            return None
        runs.append((owner, rows))
    return runs


def _in_memory(x: np.ndarray) -> LazyMatrix:
    """A matrix that is in memory."""
    return LazyMatrix(x.shape, lambda a, b: x[a:b])


def _most_similar_rows(template: LazyMatrix, pool: Sequence[LazyMatrix]) -> np.ndarray | None:
    """int64 [rows]: the most similar row of the whole pool; None if some row has no similar one."""
    rows = template.shape[0]
    total = sum(m.shape[0] for m in pool)
    if max(rows, total) > _SEARCH_ROWS or rows > total:
        return None
    columns = np.unique(np.linspace(0, template.shape[1] - 1, _SEARCH_COLUMNS).astype(np.int64))
    wanted = _unit(template, columns)
    offered = np.concatenate([_unit(m, columns) for m in pool])
    order = np.empty(rows, np.int64)
    for start in range(0, rows, 1024):
        similar = wanted[start : start + 1024] @ offered.T
        order[start : start + 1024] = similar.argmax(1)
        if similar.max(1).min() < _SIMILAR:
            return None
    return order


def _unit(matrix: LazyMatrix, columns: np.ndarray) -> np.ndarray:
    """Some columns of all rows, each row of length 1."""
    out = np.concatenate([matrix.read(start, stop)[:, columns] for start, stop in matrix.chunks()])
    return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-30)


def _sum_of_squares(x: np.ndarray) -> float:
    flat = x.reshape(-1)
    return float(np.dot(flat, flat))


def fit_factors(t: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows] and [columns]: factors of w's rows and columns that minimize its distance to t, by turns."""
    products, powers = t * w, np.square(w)
    r, c = np.ones(len(w), w.dtype), np.ones(w.shape[1], w.dtype)
    for _ in range(4):
        c = (r @ products) / np.maximum(np.square(r) @ powers, 1e-30)
        r = (products @ c) / np.maximum(powers @ np.square(c), 1e-30)
    return r, c


def _fitted(t: np.ndarray, w: np.ndarray) -> np.ndarray:
    """w times those factors; w itself if one is not positive, since quantizers only use positive ones."""
    r, c = fit_factors(t, w)
    return w * r[:, None] * c if (r > 0).all() and (c > 0).all() else w

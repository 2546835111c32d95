"""The Hessian of a layer's error: H = 2/n sum x x^T over its inputs, and the triangular factor that GPTQ uses.

The error of quantized weights W' on the calibration text is  tr(E H E^T) / 2  with E = W - W', per token. H is
kept as a running mean in float32: a batch of m tokens after n others moves it by m / (n + m) of the difference. Its
upper half is accumulated and mirrored, since a BLAS need not return a symmetric x^T x.

GPTAQ (`target`) also needs to know how the inputs, which come from quantized layers, differ from the float model's:
the cross term  C = 2/n sum (x_float - x) x^T,  or of the layer W the products  R = 2/n sum W x_float x^T,  which give
W C = R - W H. An eighth of the tokens is held back to show how much of that is chance: their H and C are also kept
separately. Held-back tokens come in short spans, since neighbours' inputs are alike, spread over the positions of all
sequences; or they are whole sequences of other kinds of text than the rest (`mixture`). `shrinkage_of` chooses on them
too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from bridge.errors import BridgeError
from bridge.system.cpu.row_threads import tiles

_HELD_BACK = 8  # one span of so many
_SPAN = 32  # tokens
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly and never repeat
_HEAVIEST = 0.999  # tokens beyond this share of all, by |g|, count as the one there
_TILE = 256
_ROWS = 128  # of H that are accumulated together, from the diagonal on
_OUTLIER = 1000  # times the median power
_SHRINKAGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
_COLUMNS = 2048  # of which a shrinkage is found
_SOME_ROWS = 128  # of a layer, of which the products with held-back inputs are kept
LEAST_DAMPING = 1e-6  # if a damping of 0 is not enough
Factored = tuple[torch.Tensor, float]  # U of a damped H, see `damped_factor`, and its damping
MOST_DAMPING = 1.0  # times the mean of diag H; beyond it, little of the Hessian is left


@dataclass
class FloatProducts:
    """The products R = 2/n sum W x_float x^T of a layer's float outputs and its inputs, float32 [rows, columns].

    total  over all tokens
    held   over those that are held back, of `some_rows`
    """

    total: torch.Tensor
    held: torch.Tensor


class Hessian:
    """H of one layer, float32 [columns, columns], accumulated batch by batch; with float inputs also `cross`.

    squares    mean squares of the inputs float32 [columns], whatever the tokens' weights; None: without weights
    products   of the layers, by name, whose float outputs were given; of these there is no `cross`
    held       the Hessian of the tokens held back: whole batches of them, or with float inputs spans (`held_back`)
    shrinkage  of H in its factors, see `shrunk`; None: `shrinkage_of` has not been asked
    first      how many tokens of the text come before these: where the spans that are held back start

    Each token is added once: to `held`, or to what is merged with it when `matrix` or `cross` is asked for.
    """

    def __init__(self, name: str, columns: int, device: torch.device | str = "cpu", first: int = 0) -> None:
        self.name = name
        self.first = first
        self.tokens = 0
        self.borrowed_tokens = 0  # included in `tokens`, see `experts`
        self.squares: torch.Tensor | None = None
        self.products: dict[str, FloatProducts] = {}
        self.held: Hessian | None = None
        self.shrinkage: float | None = None
        self._matrix = torch.zeros(columns, columns, device=device)
        self._cross: torch.Tensor | None = None
        self._merged = True  # with the held-back tokens, and mirrored
        self._factor: tuple[object, Factored] | None = None
        self._rest: tuple[object, torch.Tensor] | None = None

    @property
    def columns(self) -> int:
        return len(self._matrix)

    @property
    def matrix(self) -> torch.Tensor:
        self._merge()
        return self._matrix

    @matrix.setter
    def matrix(self, values: torch.Tensor) -> None:
        self._matrix, self._merged, self._factor, self._rest, self.shrinkage = values, True, None, None, None

    @property
    def cross(self) -> torch.Tensor | None:
        """C; None without float inputs."""
        self._merge()
        return self._cross

    @cross.setter
    def cross(self, values: torch.Tensor | None) -> None:
        self._merge()
        self._cross = values

    def add(
        self,
        x: torch.Tensor,
        x_float: torch.Tensor | None = None,
        held: bool | None = None,
        outputs: Mapping[str, torch.Tensor] | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add tokens: x [tokens, columns] of the quantized model, x_float of the float model.

        held     whether all of them are held back; None: with float inputs or outputs, spans of them are
        outputs  in place of x_float: W x_float [tokens, rows] of layers, by name, without biases
        weights  how much each token counts, float [tokens], see `token_weights`; None: 1

        Raises BridgeError if an activation is NaN or infinite.
        """
        device = self._matrix.device
        x = x.reshape(-1, x.shape[-1]).to(device, torch.float32)
        self._unmerge()
        x_float = None if x_float is None else x_float.reshape(x.shape).to(x)
        if weights is not None:
            mean, share = x.square().mean(0), len(x) / max(self.tokens + len(x), 1)
            self.squares = mean if self.squares is None else self.squares.lerp(mean, share)
            roots = weights.to(x).sqrt()[:, None]
            x, x_float = x * roots, None if x_float is None else x_float * roots
            outputs = {name: y.reshape(len(x), -1).to(x) * roots for name, y in (outputs or {}).items()}
        if x_float is None and held is None and not outputs:
            self._add(x, None, self.tokens)
        else:
            if self.held is None:
                self.held = Hessian(self.name, x.shape[1], device)
            is_held = held_back(self.first + self.tokens, len(x)) if held is None else torch.full((len(x),), held)
            is_held, before = is_held.to(device), self.tokens - self.held.tokens
            held_hessian, others = self.held, ~is_held
            self._multiply(outputs or {}, x, is_held)
            held_hessian._add(x[is_held], None if x_float is None else x_float[is_held], held_hessian.tokens)
            held_hessian.tokens += int(is_held.sum())
            held_hessian._merged = False
            self._add(x[others], None if x_float is None else x_float[others], before)
        self.tokens += len(x)

    def _multiply(self, outputs: Mapping[str, torch.Tensor], x: torch.Tensor, is_held: torch.Tensor) -> None:
        """Add tokens to the products; `is_held` bool [tokens] tells which are held back."""
        assert self.held is not None
        for name, y in outputs.items():
            y = y.reshape(len(x), -1).to(x)
            some = y[:, some_rows(y.shape[1])]
            if name not in self.products:
                self.products[name] = FloatProducts(*(x.new_zeros(z.shape[1], x.shape[1]) for z in (y, some)))
            sums = self.products[name]
            for total, left, right, before in (
                (sums.total, y, x, self.tokens),
                (sums.held, some[is_held], x[is_held], self.held.tokens),
            ):
                if len(left):
                    share = len(left) / (before + len(left))
                    total.addmm_(left.T, right, beta=1 - share, alpha=2 * share / len(left))

    def _add(self, x: torch.Tensor, x_float: torch.Tensor | None, before: int) -> None:
        """Add tokens to the upper half of H, and to C; `before`: how many are in them."""
        if not len(x):
            return
        share = len(x) / (before + len(x))
        each = 2 * share / len(x)
        for start in range(0, len(self._matrix), _ROWS):
            t = slice(start, start + _ROWS)
            self._matrix[t, start:].addmm_(x[:, t].T, x[:, start:], beta=1 - share, alpha=each)
        if not torch.isfinite(self._matrix.diagonal()).all():
            raise BridgeError(
                f"{self.name}: its inputs hold NaN or infinity on the calibration text; "
                "earlier layers overflow, or the checkpoint is damaged"
            )
        if x_float is not None:
            if self._cross is None:
                self._cross = torch.zeros_like(self._matrix)
            self._cross.mul_(1 - share)
            for t in tiles(len(x)):
                self._cross.addmm_((x_float[t] - x[t]).T, x[t], alpha=each)

    def _merge(self) -> None:
        """Make H symmetric and, with C, of all tokens."""
        if self._merged:
            return
        self._merged = True
        for t in tiles(len(self._matrix)):
            square = self._matrix[t, t]
            square.copy_(square.triu() + square.triu(1).T)
            self._matrix[t.stop :, t] = self._matrix[t, t.stop :].T
        if self.held is not None and self.held.tokens:
            self._mix(self.held, self.held.tokens / self.tokens)

    def _unmerge(self) -> None:
        """Undo `_merge` before tokens are added."""
        if self._merged and self.held is not None and self.held.tokens:
            share = self.held.tokens / self.tokens
            if share < 1:
                self._mix(self.held, -share / (1 - share))
            else:
                self._matrix.zero_()
                self._cross = None
        self._merged, self._factor, self._rest, self.shrinkage = False, None, None, None

    def include(self, other: "Hessian") -> None:
        """Add the tokens of another Hessian of the same layer's inputs."""
        self._unmerge()
        other._unmerge()
        held, theirs = self.held, other.held
        rest = other.tokens - (theirs.tokens if theirs else 0)
        both_rests = rest + self.tokens - (held.tokens if held else 0)
        if rest:
            self._matrix.lerp_(other._matrix, rest / both_rests)
            if other._cross is not None:
                self._cross = torch.zeros_like(self._matrix) if self._cross is None else self._cross
                self._cross.lerp_(other._cross, rest / both_rests)
        if other.squares is not None:
            share = other.tokens / max(self.tokens + other.tokens, 1)
            self.squares = other.squares if self.squares is None else self.squares.lerp(other.squares, share)
        for name, sums in other.products.items():
            products = self.products.setdefault(name, FloatProducts(*map(torch.zeros_like, (sums.total, sums.held))))
            products.total.lerp_(sums.total, other.tokens / (self.tokens + other.tokens))
            if theirs is not None and theirs.tokens:
                products.held.lerp_(sums.held, theirs.tokens / (theirs.tokens + (held.tokens if held else 0)))
        if theirs is not None:
            self.held = held or Hessian(self.name, len(self._matrix), self._matrix.device)
            self.held.include(theirs)
        self.tokens += other.tokens

    def __getstate__(self) -> dict[str, Any]:
        """Without the factors that layers share, which are found again."""
        return self.__dict__ | {"_factor": None, "_rest": None}

    def _mix(self, held: "Hessian", share: float) -> None:
        self._matrix.lerp_(held.matrix, share)
        if held.cross is not None:
            self._cross = torch.zeros_like(self._matrix) if self._cross is None else self._cross
            self._cross.lerp_(held.cross, share)

    def factor(self, damping: float, order: torch.Tensor | None = None, keep: bool = True) -> Factored | None:
        """`damped_factor` of H, shrunk, which layers with the same inputs share; `keep`: it is needed again."""
        key = damping, self.shrinkage, None if order is None else tuple(order.cpu().tolist())
        factored = self._factor[1] if self._factor and self._factor[0] == key else None
        self._factor = None
        h = shrunk(self.matrix, self.shrinkage) if self.shrinkage and not factored else self.matrix
        factored = factored or damped_factor(h, damping, order)
        if keep and factored:
            self._factor = key, factored
        return factored

    def rest_factor(self, damping: float, keep: bool = True) -> torch.Tensor | None:
        """The Cholesky factor, lower, of the damped H of the tokens not held back, or None; `keep` as of `factor`."""
        key = damping, self.shrinkage
        if self._rest and self._rest[0] == key:
            return self._rest[1]
        held = self.held
        if held is None or not 0 < held.tokens < self.tokens:
            return None
        share = held.tokens / self.tokens
        rest = torch.sub(self.matrix, held.matrix, alpha=share).div_(1 - share)
        if self.shrinkage:
            diagonal = rest.diagonal().clone()
            rest.mul_(1 - self.shrinkage).diagonal().copy_(diagonal)
        damp(rest, damping)
        lower, failed = rest.mT, torch.empty((), dtype=torch.int32, device=rest.device)  # columns follow each other
        torch.linalg.cholesky_ex(lower, out=(lower, failed))  # in place: for 28,672 columns, rest takes 3.3 GB
        if failed or not torch.isfinite(lower.diagonal()).all():
            return None
        if keep:
            self._rest = key, lower
        return lower

    def mean_squares(self) -> np.ndarray:
        """float32 [columns]: the mean square of each input over the tokens."""
        return (self.matrix.diagonal() / 2 if self.squares is None else self.squares).cpu().numpy()


def token_weights(norms: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """How much each token counts in H of layers with the same inputs, float32 [tokens], 1 on average.

    norms  |g| of each token, g the gradient of the loss at a layer's outputs, by layer; None: it is not known

    An error e of a token's outputs costs (g e)^2, so g^2 ties what it costs to this token's inputs. Half of that,
    |g|, weighs the inputs here, and half is left in A of the outputs (`two_sided`): with all of it here or there, a
    handful of tokens would decide alone. The largest 0.1% count as the least of them.
    """
    weights = []
    for norm in norms:
        if norm is None or not (mean := float(norm.mean())) > 0:
            return None
        most = norm.kthvalue(max(1, int(len(norm) * _HEAVIEST))).values
        capped = norm.clamp(max=most)
        weights.append(capped / capped.mean() if mean > 0 and float(most) > 0 else torch.ones_like(norm))
    return torch.stack(weights).mean(0) if weights else None


def held_back(first: int, count: int) -> torch.Tensor:
    """bool [count]: which of `count` tokens are held back, `first` others having come before them."""
    spans = torch.arange(first, first + count) // _SPAN
    return (spans.double() * _GOLDEN) % 1 >= 1 - 1 / _HELD_BACK


def some_rows(rows: int) -> slice:
    """The rows of a layer of which `FloatProducts.held` is kept."""
    return slice(None, None, max(1, rows // _SOME_ROWS))


def damp(hessian: torch.Tensor, damping: float) -> None:
    """H + damping * mean(diag H) * I, in place.

    Columns of more than 1,000 times the median power count as those of 1,000 times: a single one of a million times it
    would otherwise damp all others until nothing of how they correlate is left. Without damping, dead columns, whose
    input is always 0, get the least that keeps H invertible.
    """
    hessian.diagonal().copy_(damped_diagonal(hessian, damping))


def damped_diagonal(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The diagonal that `damp` gives H."""
    diagonal = hessian.diagonal().clone()
    alive = diagonal[diagonal > 0]
    most = _OUTLIER * float(alive.median()) if len(alive) else 0.0
    mean = float(diagonal.clamp(max=most).mean())
    diagonal += damping * mean
    diagonal[diagonal == 0] = LEAST_DAMPING * mean or 1.0
    return diagonal


def shrinkage_of(hessian: Hessian, damping: float) -> float:
    """The shrinkage of H, see `shrunk`, that serves the tokens held back best; 0 without such tokens.

    Fitted to all other tokens. Each rounding error z of a column moves the later ones: E = Z T, with the rows of T
    those of the triangular factor of `inverse_factor` divided by its diagonal. So with errors of equal power,
    independent of each other, the held-back tokens lose  sum diag(T H T^T). Of more than 2,048
    columns, so many are taken.
    """
    held = hessian.held
    if hessian.shrinkage is None:
        hessian.shrinkage = 0.0
        if held is not None and 0 < held.tokens < hessian.tokens:
            share = held.tokens / hessian.tokens
            some = slice(None, None, -(-len(hessian.matrix) // _COLUMNS))
            held_matrix = held.matrix[some, some]
            rest = torch.sub(hessian.matrix[some, some], held_matrix, alpha=share).div_(1 - share)
            hessian.shrinkage = best_shrinkage(rest, held_matrix, damping)[0]
    return hessian.shrinkage


def best_shrinkage(fitted: torch.Tensor, held: torch.Tensor, damping: float) -> tuple[float, float]:
    """The shrinkage of a matrix with which `held`, of other tokens, loses least, and that loss; see `shrinkage_of`.

    The loss falls up to there and rises beyond it, so few of `_SHRINKAGES` are tried. It is infinite where the matrix
    has no factor.
    """
    lost = cache(lambda i: _lost(fitted, held, _SHRINKAGES[i], damping))
    first, last = 0, len(_SHRINKAGES) - 1
    while first < last:
        middle = (first + last) // 2
        if lost(middle + 1) < lost(middle) or lost(middle) == float("inf"):
            first = middle + 1
        else:
            last = middle
    return _SHRINKAGES[first], lost(first)


def _lost(fitted: torch.Tensor, held: torch.Tensor, shrinkage: float, damping: float) -> float:
    work = shrunk(fitted, shrinkage)
    damp(work, damping)
    factor = inverse_factor(work)
    if factor is None:
        return float("inf")
    factor /= factor.diagonal()[:, None].clone()
    lost = 0.0
    for t in tiles(len(factor)):  # below the diagonal, the factor is 0
        rows = factor[t, t.start :]
        lost += float((rows @ held[t.start :, t.start :]).mul_(rows).sum(dtype=torch.float64))
    return lost


def shrunk(hessian: torch.Tensor, shrinkage: float) -> torch.Tensor:
    """A copy of H, or of several [.., n, n], whose off-diagonals are 1 - shrinkage times as large."""
    result = hessian * (1 - shrinkage)
    result.diagonal(dim1=-2, dim2=-1).copy_(hessian.diagonal(dim1=-2, dim2=-1))
    return result


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor | None:
    """U, upper triangular, with H^-1 = U^T U, written over H; None if H is not positive definite.

    With H = R R^T, R upper (the Cholesky factor of H read backwards), U is R^-1: one factorization and one
    triangular inverse; inverting H and factoring again would take three times as long. Both go by tiles, in place.
    float64 is for the tiles on the diagonal, where H all but cancels, and what they are multiplied with: n^2 operations
    a tile. The others, n^3, are in H's own precision, in which R is stored. Only H's upper half is read.
    """
    n = len(hessian)
    spans = [slice(start, min(start + _TILE, n)) for start in range(0, n, _TILE)]
    for column in reversed(spans):  # R
        done = hessian[column, column.stop :].double()
        tile = hessian[column, column].double().addmm_(done, done.T, alpha=-1)
        backwards, failed = torch.linalg.cholesky_ex(tile.flip(0, 1), upper=True)
        tile = backwards.T.flip(0, 1)
        if failed or not torch.isfinite(tile.diagonal()).all():
            return None
        hessian[column, column] = tile
        for row in spans[: column.start // _TILE]:
            left = hessian[row, column].addmm_(hessian[row, column.stop :], hessian[column, column.stop :].T, alpha=-1)
            hessian[row, column] = torch.linalg.solve_triangular(tile.T, left.double(), upper=False, left=False)
    for column in spans:  # R^-1
        eye = torch.eye(column.stop - column.start, dtype=torch.float64, device=hessian.device)
        inverse = torch.linalg.solve_triangular(hessian[column, column].double(), eye, upper=True)
        above = (hessian[: column.start, column].double() @ -inverse).to(hessian.dtype)
        for row in spans[: column.start // _TILE]:
            hessian[row, column] = hessian[row, row.start : column.start] @ above[row.start :]
        hessian[column, column] = inverse
    return hessian.triu_()


def damped_factor(hessian: torch.Tensor, damping: float, order: torch.Tensor | None = None) -> Factored | None:
    """(U of the damped H, its damping): tenfold until it is positive definite; None beyond MOST_DAMPING.

    order  int64 [columns], the order of U's columns; None: unchanged
    """
    while damping <= MOST_DAMPING:
        work = hessian.clone() if order is None else hessian[order[:, None], order]
        damp(work, damping)
        factor = inverse_factor(work)
        if factor is not None:
            return factor, damping
        damping = max(damping * 10, LEAST_DAMPING)
    return None


def factor_of(hessian: torch.Tensor) -> torch.Tensor:
    """U of a damped H; where float32 has lost the damping, of H damped again, or the identity."""
    factor = inverse_factor(hessian.clone())
    factored = damped_factor(hessian, 1e-6) if factor is None else (factor, 0.0)
    return torch.eye(len(hessian), dtype=hessian.dtype) if factored is None else factored[0]

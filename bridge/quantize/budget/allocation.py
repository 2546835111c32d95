"""A type for every tensor under a limit of bytes: the multiple-choice knapsack, solved exactly.

Each item (a tensor) has options (types) with a size and a loss; the least sum of losses is wanted whose sum of sizes
is within the limit.

    hull       at a price p per byte, each item takes the option of least loss + p * size: with falling p, the corners
               of its lower convex hull. The steps between corners, sorted over all items by the loss saved per byte,
               are taken as long as they fit. The first that does not fit sets the price
    fill       smaller steps that still fit use the bytes left: a solution near the optimum
    search     at that price no solution is better than the bound  sum(min(loss + p * size)) - p * limit. The cost of
               options above their items' minima, plus the price of unused bytes, must be below the gap between
               solution and bound. Few options remain; they are enumerated as states of size and loss without the
               dominated ones (Dyer, Zemel; Pisinger 1995). For 30 tensors and 734 limits this lowered the loss
               that hull and fill reach by 0.3% on average and 41% at most, in a millisecond each
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

_STATES = 1 << 17  # at a time; of more, the cheapest are kept, and the result is only near the optimum


def allocate(sizes: Sequence[np.ndarray], losses: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """The option of each item, int [items]: the least sum of losses whose sum of sizes is at most `limit`.

    sizes   int [options] of each item, in any order
    losses  float [options] of each item

    Raises ValueError if the smallest options exceed the limit.
    """
    if (least := sum(int(s.min()) for s in sizes)) > limit:
        raise ValueError(f"the smallest options take {least} bytes, over the limit of {limit}")
    if not len(sizes):
        return np.empty(0, np.int64)
    price, chosen = _fill(sizes, losses, limit)
    reduced = _reduced(sizes, losses, price)
    left = limit - sum(int(s[t]) for s, t in zip(sizes, chosen, strict=True))
    gap = sum(float(r[t]) for r, t in zip(reduced, chosen, strict=True)) + price * left
    better = _search(sizes, reduced, price, limit, gap * (1 - 1e-12))
    return chosen if better is None else better


def least_increases(sizes: Sequence[np.ndarray], losses: Sequence[np.ndarray], limit: int) -> list[np.ndarray]:
    """How far above its bound the sum of losses is at least if an item takes an option: float [options] of each."""
    return _reduced(sizes, losses, _fill(sizes, losses, limit)[0])


def _reduced(sizes: Sequence[np.ndarray], losses: Sequence[np.ndarray], price: float) -> list[np.ndarray]:
    """loss + price * size of each option, above the item's least."""
    reduced = [loss + price * size for size, loss in zip(sizes, losses, strict=True)]
    return [r - r.min() for r in reduced]


def hull(sizes: np.ndarray, losses: np.ndarray) -> list[int]:
    """The options at the corners of the lower convex hull, by rising size and falling loss."""
    corners: list[int] = []
    slope = partial(_slope, sizes, losses)
    for i in np.lexsort((losses, sizes)).tolist():
        if corners and (losses[i] >= losses[corners[-1]]):
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) <= slope(corners[-1], i):
            corners.pop()
        corners.append(i)
    return corners


def _slope(sizes: np.ndarray, losses: np.ndarray, a: int, b: int) -> float:
    """Loss saved per byte from option a to the larger b."""
    return float(losses[a] - losses[b]) / max(int(sizes[b] - sizes[a]), 1)


def _fill(sizes: Sequence[np.ndarray], losses: Sequence[np.ndarray], limit: int) -> tuple[float, np.ndarray]:
    """The price of a byte at the limit, and a solution: the hull's steps while they fit, then those that still do."""
    corners = [hull(s, loss) for s, loss in zip(sizes, losses, strict=True)]
    steps = sorted(
        (-_slope(sizes[i], losses[i], a, b), i, n)
        for i, item_corners in enumerate(corners)
        for n, (a, b) in enumerate(pairwise(item_corners))
    )
    positions = [0] * len(sizes)
    left = limit - sum(int(s[item_corners[0]]) for s, item_corners in zip(sizes, corners, strict=True))
    price = 0.0
    for negative, i, n in steps:
        if n != positions[i]:
            continue
        more = int(sizes[i][corners[i][n + 1]] - sizes[i][corners[i][n]])
        if more <= left:
            positions[i] += 1
            left -= more
        elif not price:
            price = -negative
    return price, np.array([item_corners[n] for item_corners, n in zip(corners, positions, strict=True)])


def _search(
    sizes: Sequence[np.ndarray], reduced: Sequence[np.ndarray], price: float, limit: int, gap: float
) -> np.ndarray | None:
    """The options with the least sum of reduced losses and price of unused bytes; None if that is not below `gap`."""
    candidates = [np.flatnonzero(r < gap) for r in reduced]
    if any(not len(k) for k in candidates):
        return None
    order = sorted(range(len(sizes)), key=lambda i: len(candidates[i]))
    least = np.array([int(sizes[i][candidates[i]].min()) for i in order])
    most = np.array([int(sizes[i][candidates[i]].max()) for i in order])
    size, cost = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for step, i in enumerate(order):
        options = candidates[i]
        sums = (size[:, None] + sizes[i][options].astype(np.int64)).ravel()
        costs = (cost[:, None] + reduced[i][options]).ravel()
        unused = np.maximum(limit - sums - int(most[step + 1 :].sum()), 0)
        ok = np.flatnonzero((sums + int(least[step + 1 :].sum()) <= limit) & (costs + price * unused < gap))
        # the smaller of two states dominates if it is not dearer even with its spare bytes unused
        ok = ok[np.lexsort((costs[ok], sums[ok]))]
        total = costs[ok] - price * sums[ok]
        before = np.minimum.accumulate(np.concatenate([[np.inf], total]))[:-1]
        ok = ok[total < before]
        if len(ok) > _STATES:
            ok = np.sort(ok[np.argpartition(costs[ok], _STATES)[:_STATES]])
            ok = ok[np.lexsort((costs[ok], sums[ok]))]
        if not len(ok):
            return None
        trail.append((ok // len(options), options[ok % len(options)]))
        size, cost = sums[ok], costs[ok]
    state = int(np.argmin(cost + price * (limit - size)))
    chosen = np.empty(len(sizes), np.int64)
    for i, (parent, option) in zip(reversed(order), reversed(trail), strict=True):
        chosen[i] = option[state]
        state = int(parent[state])
    return chosen

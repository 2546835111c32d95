"""Types under a limit of bytes, found with estimated losses and checked by measuring whole models.

    1. the exact best allocation of the estimates (`allocation`) is taken apart: each group of tensors (a tensor, or
       those of a kind in a range of layers) is measured as it is in there, all others as floats. The ratio of measured
       and estimated loss corrects the group's estimates, and the best allocation of the corrected ones is the second.
       Few tokens are enough: near the best allocation, the loss hardly feels that a ratio is off by some percent;
    2. both are measured as a whole;
    3. swaps: for each tensor and each other type of it, the best allocation in which it has that type. The most
       promising by the estimates are measured, until six in a row measure no lower.

Steps 2 and 3 are kept only if they measure lower. Losses of single tensors do not simply add up, since other layers may
amplify or hide the loss of one; swaps find that. A group is not measured by what the whole model gains without it: that
holds the products of its errors with those of all others, which are chance, and another in the file that is made.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from bridge.quantize.budget.allocation import allocate, least_increases

FLOAT = -1  # an option without loss, for trials only
_MISSES = 6  # swaps in a row that measure no lower: the search ends
_MOST = 4.0  # the largest factor by which a measured loss corrects an estimated one, up or down

# (the option of each item, whether later calls will differ little from this) -> loss
Measure = Callable[[np.ndarray, bool], float]


@dataclass
class SearchResult:
    """The result of `search`.

    taken     int [items], the option of each
    losses    float [options] of each item, corrected
    measured  losses of the allocation after each step that was kept, falling
    trials    number of models measured
    estimated, alone   losses of the groups in the first allocation, estimated and measured
    """

    taken: np.ndarray
    losses: list[np.ndarray]
    measured: list[float] = field(default_factory=list)
    trials: int = 0
    estimated: np.ndarray = field(default_factory=lambda: np.empty(0))
    alone: np.ndarray = field(default_factory=lambda: np.empty(0))

    def agreement(self) -> float:
        """Spearman's rank correlation of the groups' estimated and measured losses."""
        ranks: list[np.ndarray] = [np.argsort(np.argsort(x)) for x in (self.estimated, self.alone)]
        return float(np.corrcoef(ranks[0], ranks[1]).flat[1])


def search(
    sizes: Sequence[np.ndarray],
    losses: Sequence[np.ndarray],
    limit: int,
    measure: Measure,
    measure_alone: Callable[[np.ndarray], float],
    groups: Sequence[Sequence[int]],
    swaps: int,
) -> SearchResult:
    """Allocate by estimates, correct them, swap; see the module's docstring.

    sizes, losses, limit  see `allocate`; losses are estimates
    measure_alone         (the option of each item) -> loss of a group whose others are floats, within some percent
    groups                items whose estimates are corrected together
    swaps                 maximum number of swaps to measure
    """
    found = SearchResult(allocate(sizes, losses, limit), [np.asarray(x, float) for x in losses])
    _correct(found, measure_alone, groups)
    found.measured.append(measure(found.taken, True))
    found.trials += 1
    seen = {found.taken.tobytes()}

    def attempt(taken: np.ndarray) -> bool:
        seen.add(taken.tobytes())
        found.trials += 1
        loss = measure(taken, False)
        if loss >= found.measured[-1]:
            return False
        found.taken = taken
        found.measured.append(loss)
        measure(taken, True)
        return True

    better = allocate(sizes, found.losses, limit)
    if better.tobytes() not in seen:
        attempt(better)
    while swaps:
        for taken in _neighbours(sizes, found, limit, min(swaps, _MISSES), seen):
            swaps -= 1
            if attempt(taken):
                break
        else:
            break
    return found


def _correct(
    found: SearchResult, measure_alone: Callable[[np.ndarray], float], groups: Sequence[Sequence[int]]
) -> None:
    """Scale the losses of each group by the ratio of its measured and estimated loss."""
    found.estimated, found.alone = np.empty(len(groups)), np.empty(len(groups))
    for i, group in enumerate(groups):
        only = np.full_like(found.taken, FLOAT)
        only[list(group)] = found.taken[list(group)]
        found.alone[i] = measure_alone(only)
        found.estimated[i] = sum(float(found.losses[k][found.taken[k]]) for k in group)
        found.trials += 1
    for group, own, guess in zip(groups, found.alone, found.estimated, strict=True):
        if guess > 0:
            factor = min(max(own / guess, 1 / _MOST), _MOST)
            for i in group:
                found.losses[i] = found.losses[i] * factor


def _neighbours(
    sizes: Sequence[np.ndarray], found: SearchResult, limit: int, count: int, seen: Container[bytes]
) -> list[np.ndarray]:
    """The best allocations in which one item has another option, the lowest estimate first, without those seen.

    count  how many are wanted. Options are looked at by what they cost at least, so that few allocations are solved
    """
    least = least_increases(sizes, found.losses, limit)
    options = [(float(x), i, option) for i, own in enumerate(least) for option, x in enumerate(own)]
    ranked: dict[bytes, tuple[float, np.ndarray]] = {}
    for _, i, option in sorted(options):
        if len(ranked) >= 2 * count:
            break
        one = np.array([option])
        some = [s[one] if k == i else s for k, s in enumerate(sizes)]
        if option == found.taken[i] or sum(int(s.min()) for s in some) > limit:
            continue
        some_losses = [x[one] if k == i else x for k, x in enumerate(found.losses)]
        taken = allocate(some, some_losses, limit)
        loss = sum(float(x[t]) for x, t in zip(some_losses, taken, strict=True))
        taken[i] = option
        if taken.tobytes() not in seen:
            ranked[taken.tobytes()] = loss, taken
    return [taken for _, taken in sorted(ranked.values(), key=lambda r: r[0])[:count]]

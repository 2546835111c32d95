"""Types under a limit of bytes: allocated by estimated losses, and improved by measuring whole models.

    1. the exact best allocation of the estimates (`allocation`);
    2. each group of tensors (a tensor, or those of a kind in a range of layers) is measured as it is in there, all
       others as floats. The ratio of estimated and measured loss scales the group's errors in later trials, whose
       errors are of another kind than the file's: the estimates are nearer to what the file loses (`divergence`);
    3. swaps: for each tensor and each other type of it, the best allocation in which it has that type. The most
       promising by the estimates are measured, until six in a row measure no lower.

Step 3 is kept only if it measures lower. Losses of single tensors do not simply add up, since other layers may amplify
or hide the loss of one; swaps find that. A group is not measured by what the whole model gains without it: that holds
the products of its errors with those of all others, which are chance, and another in the file that is made.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from bridge.quantize.budget.allocation import allocate, least_increases

FLOAT = -1  # an option without loss, for trials only
_MISSES = 6  # swaps in a row that measure no lower: the search ends
_MOST = 4.0  # the largest factor that scales a trial's squared errors, up or down

# (the option of each item, what scales its squared errors, whether later calls will differ little from this) -> loss
Measure = Callable[[np.ndarray, np.ndarray, bool], float]


@dataclass
class SearchResult:
    """The result of `search`.

    taken     int [items], the option of each
    scales    float [items], what scales the squared errors of each in trials
    measured  losses of the allocation after each step that was kept, falling
    trials    number of models measured
    estimated, alone   losses of the groups in the first allocation, estimated and measured
    """

    taken: np.ndarray
    scales: np.ndarray
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
    """Allocate by estimates, scale the trials' errors by them, swap; see the module's docstring.

    sizes, losses, limit  see `allocate`; losses are estimates
    measure_alone         (the option of each item) -> loss of a group whose others are floats, within some percent
    groups                items whose errors are scaled together
    swaps                 maximum number of swaps to measure
    """
    taken = allocate(sizes, losses, limit)
    found = SearchResult(taken, np.ones(len(taken)))
    _scale(found, losses, measure_alone, groups)
    found.measured.append(measure(taken, found.scales, True))
    found.trials += 1
    seen = {taken.tobytes()}
    while swaps:
        for taken in _neighbours(sizes, losses, found.taken, limit, min(swaps, _MISSES), seen):
            swaps -= 1
            seen.add(taken.tobytes())
            found.trials += 1
            loss = measure(taken, found.scales, False)
            if loss < found.measured[-1]:
                found.taken = taken
                found.measured.append(loss)
                measure(taken, found.scales, True)
                break
        else:
            break
    return found


def _scale(
    found: SearchResult,
    losses: Sequence[np.ndarray],
    measure_alone: Callable[[np.ndarray], float],
    groups: Sequence[Sequence[int]],
) -> None:
    """Find what brings each group's measured loss to the estimated one."""
    found.estimated, found.alone = np.empty(len(groups)), np.empty(len(groups))
    for i, group in enumerate(groups):
        own = list(group)
        only = np.full_like(found.taken, FLOAT)
        only[own] = found.taken[own]
        found.alone[i] = measure_alone(only)
        found.estimated[i] = sum(float(losses[k][found.taken[k]]) for k in own)
        found.trials += 1
        if found.alone[i] > 0:
            found.scales[own] = min(max(found.estimated[i] / found.alone[i], 1 / _MOST), _MOST)


def _neighbours(
    sizes: Sequence[np.ndarray],
    losses: Sequence[np.ndarray],
    now: np.ndarray,
    limit: int,
    count: int,
    seen: Container[bytes],
) -> list[np.ndarray]:
    """The best allocations in which one item has another option than now, the lowest estimate first.

    seen   those that are left out
    count  how many are wanted. Options are looked at by what they cost at least, so that few allocations are solved
    """
    least = least_increases(sizes, losses, limit)
    options = [(float(x), i, option) for i, own in enumerate(least) for option, x in enumerate(own)]
    ranked: dict[bytes, tuple[float, np.ndarray]] = {}
    for _, i, option in sorted(options):
        if len(ranked) >= 2 * count:
            break
        one = np.array([option])
        some = [s[one] if k == i else s for k, s in enumerate(sizes)]
        if option == now[i] or sum(int(s.min()) for s in some) > limit:
            continue
        some_losses = [x[one] if k == i else x for k, x in enumerate(losses)]
        taken = allocate(some, some_losses, limit)
        loss = sum(float(x[t]) for x, t in zip(some_losses, taken, strict=True))
        taken[i] = option
        if taken.tobytes() not in seen:
            ranked[taken.tobytes()] = loss, taken
    return [taken for _, taken in sorted(ranked.values(), key=lambda r: r[0])[:count]]

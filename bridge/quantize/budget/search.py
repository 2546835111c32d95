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

    chosen    int [items], the option of each
    scales    float [items], what scales the squared errors of each in trials
    measured  losses of the allocation after each step that was kept, falling
    trials    number of models measured
    estimated, alone   losses of the groups in the first allocation, estimated and measured
    """

    chosen: np.ndarray
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
    chosen = allocate(sizes, losses, limit)
    result = SearchResult(chosen, np.ones(len(chosen)))
    _scale(result, losses, measure_alone, groups)
    result.measured.append(measure(chosen, result.scales, True))
    result.trials += 1
    seen = {chosen.tobytes()}
    while swaps:
        for chosen in _neighbours(sizes, losses, result.chosen, limit, min(swaps, _MISSES), seen):
            swaps -= 1
            seen.add(chosen.tobytes())
            result.trials += 1
            loss = measure(chosen, result.scales, False)
            if loss < result.measured[-1]:
                result.chosen = chosen
                result.measured.append(loss)
                measure(chosen, result.scales, True)
                break
        else:
            break
    return result


def _scale(
    result: SearchResult,
    losses: Sequence[np.ndarray],
    measure_alone: Callable[[np.ndarray], float],
    groups: Sequence[Sequence[int]],
) -> None:
    """Find what brings each group's measured loss to the estimated one."""
    result.estimated, result.alone = np.empty(len(groups)), np.empty(len(groups))
    for i, group in enumerate(groups):
        items = list(group)
        only = np.full_like(result.chosen, FLOAT)
        only[items] = result.chosen[items]
        result.alone[i] = measure_alone(only)
        result.estimated[i] = sum(float(losses[k][result.chosen[k]]) for k in items)
        result.trials += 1
        if result.alone[i] > 0:
            result.scales[items] = min(max(result.estimated[i] / result.alone[i], 1 / _MOST), _MOST)


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
    options = [(float(x), i, option) for i, increases in enumerate(least) for option, x in enumerate(increases)]
    ranked: dict[bytes, tuple[float, np.ndarray]] = {}
    for _, i, option in sorted(options):
        if len(ranked) >= 2 * count:
            break
        one = np.array([option])
        some = [s[one] if k == i else s for k, s in enumerate(sizes)]
        if option == now[i] or sum(int(s.min()) for s in some) > limit:
            continue
        some_losses = [x[one] if k == i else x for k, x in enumerate(losses)]
        chosen = allocate(some, some_losses, limit)
        loss = sum(float(x[t]) for x, t in zip(some_losses, chosen, strict=True))
        chosen[i] = option
        if chosen.tobytes() not in seen:
            ranked[chosen.tobytes()] = loss, chosen
    return [chosen for _, chosen in sorted(ranked.values(), key=lambda r: r[0])[:count]]

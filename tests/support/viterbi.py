"""The search for the path through a bitshift trellis that codes a sequence best, as trellis encoders need it.

A state has L bits; from one to the next, `step` new bits come in at the right and as many go out at the left. States
that end in the same L - step bits go to the same states, so a step takes the least of their costs. Those minimums are
all that is kept: the way back finds again which state each came from. 2^L additions of a squared error a value.
"""

import numba
import numpy as np


def viterbi(sequences: np.ndarray, table: np.ndarray, step: int) -> np.ndarray:
    """The states int32 [sequences, n] of tail-biting paths that code float sequences [sequences, n, V] well.

    table  float32 [2^L, V]: the values of each state

    As Tseng et al. 2024 do it: freely on the sequence turned by half, then with the bits fixed that the ends share.
    """
    count, values = table.shape
    branches = 1 << step
    groups = count >> step
    # a state is (bits that go out, bits between, new bits); states with other new bits are far apart here
    parts = np.ascontiguousarray(table.T.reshape(values, branches, groups // branches, branches).swapaxes(2, 3))
    states = np.empty(sequences.shape[:2], np.int32)
    half = sequences.shape[1] // 2
    path = np.empty(sequences.shape[1], np.int32)
    for own, sequence in zip(states, np.ascontiguousarray(sequences, np.float32), strict=True):
        _search(np.roll(sequence, half, 0), parts, -1, path)
        _search(sequence, parts, path[half] >> step, own)
    return states


@numba.njit(nogil=True)
def _search(sequence, parts, fixed, path):
    """Write the cheapest path [n] of a sequence [n, V]; fixed >= 0: the L - step bits that begin and end it alike."""
    n = len(sequence)
    values, branches, _, span = parts.shape
    groups = branches * span
    least = np.empty((n + 1, groups), np.float32)  # by the L - step bits that a step keeps
    for g in range(groups):
        least[0, g] = np.float32(0) if fixed < 0 or g == fixed else np.float32(1e30)
    costs = np.empty(span, np.float32)
    best = np.empty(span, np.float32)
    for i in range(n):
        for new in range(branches):
            best[:] = np.inf
            for out in range(branches):
                before = least[i, out * span : (out + 1) * span]
                for v in range(values):
                    w = sequence[i, v]
                    of = parts[v, out, new]
                    for h in range(span):
                        costs[h] = (before[h] if v == 0 else costs[h]) + (w - of[h]) * (w - of[h])
                for h in range(span):
                    best[h] = min(best[h], costs[h])
            after = least[i + 1]
            for h in range(span):
                after[h * branches + new] = best[h]
    end = np.int64(fixed) if fixed >= 0 else np.argmin(least[n])
    for i in range(n - 1, -1, -1):
        new = end % branches
        h = end // branches
        cheapest = np.float32(np.inf)
        chosen = 0
        for out in range(branches):
            cost = least[i, out * span + h]
            for v in range(values):
                d = sequence[i, v] - parts[v, out, new, h]
                cost += d * d
            if cost < cheapest:
                cheapest = cost
                chosen = out
        path[i] = chosen * groups + end
        end = path[i] // branches

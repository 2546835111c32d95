"""What a mixture of experts does between its products; C functions as those of decoder_ops.py."""

from functools import cache
from typing import Any

import numpy as np

from bridge.runtime.cpu.decoder_ops import exp
from bridge.runtime.cpu.program import FIELDS
from bridge.system.memory import array_at, c_function, floats

# words of the block that `choose` works on, all addresses
LOGITS, CHOSEN, WEIGHTS, FIRST, SECOND, WORDS = range(6)


def _choose(block, experts, used, normalized, table, _0, _1, first, last):
    """For tokens first..last the experts of the largest logits, and softmax of these, or their shares of it.

    table  int64 [experts, 3, 2]: kernel and weights of gate, up and down
    block  LOGITS float32 [tokens, experts]; CHOSEN int64 [tokens, used]; WEIGHTS float32 of that shape; FIRST and
           SECOND the fields of products [tokens * used, 2] and [tokens * used], of which the first two are set
    """
    words = array_at(block, WORDS, np.int64)
    places = array_at(table, (experts, 3, 2), np.int64)
    taken = np.empty(experts, np.bool_)
    for t in range(first, last):
        logits = floats(words[LOGITS] + 4 * experts * t, experts)
        chosen = array_at(words[CHOSEN] + 8 * used * t, used, np.int64)
        weights = floats(words[WEIGHTS] + 4 * used * t, used)
        taken[:] = False
        for j in range(used):
            best = -1
            for e in range(experts):
                if not taken[e] and (best < 0 or logits[e] > logits[best]):
                    best = e
            taken[best] = True
            chosen[j] = best
        top = logits[chosen[0]]
        total = np.float32(0)
        for e in range(experts):
            if taken[e] or not normalized:
                total += exp(logits[e] - top)
        for j in range(used):
            e = chosen[j]
            weights[j] = exp(logits[e] - top) / total
            pair = array_at(words[FIRST] + 16 * FIELDS * (t * used + j), (2, FIELDS), np.int64)
            pair[0, :2] = places[e, 0]
            pair[1, :2] = places[e, 1]
            one = array_at(words[SECOND] + 8 * FIELDS * (t * used + j), FIELDS, np.int64)
            one[:2] = places[e, 2]


def _gated(gate, up, inner, chosen, factors, _0, _1, first, last):
    """gate = silu(gate) * up for rows first..last, with the factors [experts, 3] of the experts that are `chosen`."""
    for j in range(first, last):
        e = array_at(chosen + 8 * j, 1, np.int64)[0]
        own = floats(factors + 12 * e, 3)
        scale_g, scale_u = own[0], own[1]
        g = floats(gate + 4 * inner * j, inner)
        u = floats(up + 4 * inner * j, inner)
        for i in range(inner):
            value = g[i] * scale_g
            g[i] = value * (u[i] * scale_u) / (np.float32(1.0) + exp(-value))


def _mixed(down, weights, chosen, factors, used, hidden, y, first, last):
    """y[t] = sum over the chosen experts of weight * factor * down, for tokens first..last."""
    for t in range(first, last):
        out = floats(y + 4 * hidden * t, hidden)
        for i in range(hidden):
            out[i] = 0
        for j in range(t * used, (t + 1) * used):
            e = array_at(chosen + 8 * j, 1, np.int64)[0]
            weight = floats(weights + 4 * j, 1)[0] * floats(factors + 12 * e, 3)[2]
            part = floats(down + 4 * hidden * j, hidden)
            for i in range(hidden):
                out[i] += weight * part[i]


def _add_weighed(x, gate, added, y, hidden, _0, _1, first, last):
    """y[t] += sigmoid(gate . x[t]) * added[t] for tokens first..last."""
    weights = floats(gate, hidden)
    for t in range(first, last):
        values = floats(x + 4 * hidden * t, hidden)
        part = floats(added + 4 * hidden * t, hidden)
        out = floats(y + 4 * hidden * t, hidden)
        dot = np.float32(0)
        for i in range(hidden):
            dot += weights[i] * values[i]
        share = np.float32(1) / (np.float32(1) + exp(-dot))
        for i in range(hidden):
            out[i] += share * part[i]


@cache
def function(name: str) -> Any:
    """choose, gated, mixed or add_weighed as a numba CFunc, whose `.address` is callable."""
    return c_function({"choose": _choose, "gated": _gated, "mixed": _mixed, "add_weighed": _add_weighed}[name])

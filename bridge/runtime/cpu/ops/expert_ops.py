"""What a mixture of experts does between its products; C functions as those of decoder_ops.py."""

from typing import Any

import numpy as np

from bridge.runtime.cpu.ops import passes
from bridge.runtime.cpu.ops.decoder_ops import (
    clamp,
    erf_times,
    exp,
    gelu_times,
    limited_times,
    relu2_times,
    silu_times,
    situ_times,
)
from bridge.runtime.cpu.ops.passes import FIRST, ONE_PASS, PLACE, TOKENS, make_records, turns_and_rows
from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import allocate, array_at, floats, free

# words of a layer's block: addresses, then numbers. Biases may be 0
(LOGITS, CHOSEN, WEIGHTS, PLACES, PAIR_OF_ROW, ROW_OF_PAIR, TOKENS_PLACE, KERNELS, FACTORS, ROUTER_BIAS, CHOICE_BIAS,
 GATE_BIAS, UP_BIAS, DOWN_BIAS, KINDS, ROWS, EXPERTS, USED, SIGMOID, NORMALIZED, GROUPS, GROUPS_USED, SCALE, MIXER,
 BEFORE, WORDS) = range(26)  # fmt: skip

activate: Any = None  # set by `function`


def _choose(block, _0, _1, _2, _3, _4, _5, first, last):
    """For tokens first..last the experts to use, and their weights; experts.py has the formulas.

    block  LOGITS float32 [tokens, experts]; CHOSEN int64 [tokens, used]; WEIGHTS float32 of that shape; biases
           float32 [experts]
    """
    words = array_at(block, WORDS, np.int64)
    experts, used, sigmoid, groups = words[EXPERTS], words[USED], words[SIGMOID], words[GROUPS]
    scale = np.float32(array_at(block, WORDS, np.float64)[SCALE])
    mixer = np.float32(array_at(block, WORDS, np.float64)[MIXER])
    memory = allocate(4 * (experts + groups))
    choice, scores = floats(memory, experts), floats(memory + 4 * experts, groups)
    for t in range(first, last):
        p = floats(words[LOGITS] + 4 * experts * t, experts)
        chosen = array_at(words[CHOSEN] + 8 * used * t, used, np.int64)
        weights = floats(words[WEIGHTS] + 4 * used * t, used)
        if words[ROUTER_BIAS]:
            bias = floats(words[ROUTER_BIAS], experts)
            for e in range(experts):
                p[e] += bias[e]
        if mixer > 0:
            _choose_in_turn(p, choice, chosen, weights, mixer)
            continue
        top = p[0]
        for e in range(1, experts):
            top = max(top, p[e])
        total = np.float32(0)
        for e in range(experts):
            p[e] = np.float32(1) / (np.float32(1) + exp(-p[e])) if sigmoid else exp(p[e] - top)
            total += p[e]
        for e in range(experts):
            p[e] = p[e] if sigmoid else p[e] / total
            choice[e] = p[e]
        if words[CHOICE_BIAS]:
            bias = floats(words[CHOICE_BIAS], experts)
            for e in range(experts):
                choice[e] += bias[e]
        if groups > 1:
            _leave_groups(choice, scores, words[GROUPS_USED], sigmoid)
        _choose_largest(choice, chosen)
        total = np.float32(0)
        for j in range(used):
            total += p[chosen[j]]
        for j in range(used):
            e = chosen[j]
            weights[j] = scale * (p[e] / total if words[NORMALIZED] else p[e])
    free(memory)


@inner
def _choose_largest(choice, chosen):
    """The numbers of the largest values, the largest first; of equal ones the first."""
    for e in range(choice.size):
        if e >= chosen.size and not choice[e] > choice[chosen[chosen.size - 1]]:
            continue
        j = min(e, chosen.size - 1)
        while j > 0 and choice[e] > choice[chosen[j - 1]]:
            chosen[j] = chosen[j - 1]
            j -= 1
        chosen[j] = e


def _gather(block, _0, _1, _2, _3, _4, _5, first, last):
    """The rows of each expert: those of the tokens that chose it, in their order.

    A pair is a token and one of the experts that it chose, in the order of CHOSEN.

    block  PLACES int64 [experts, PLACE]; PAIR_OF_ROW int64 [ROWS], -1 of rows that no token has; ROW_OF_PAIR int64
           [tokens * used]; TOKENS_PLACE the tokens' place; KERNELS those of an expert's matrix that take most rows
    """
    words = array_at(block, WORDS, np.int64)
    experts, used = words[EXPERTS], words[USED]
    tokens = array_at(words[TOKENS_PLACE], PLACE, np.int64)
    pairs = tokens[TOKENS] * used
    kernels = array_at(words[KERNELS], (words[KINDS], passes.WORDS), np.int64)
    places = array_at(words[PLACES], (experts, PLACE), np.int64)
    chosen, rows = array_at(words[CHOSEN], pairs, np.int64), array_at(words[ROW_OF_PAIR], pairs, np.int64)
    for e in range(experts):
        places[e, TOKENS], places[e, ONE_PASS] = 0, tokens[ONE_PASS]
    for pair in range(pairs):
        rows[pair] = places[chosen[pair], TOKENS]  # among those of its expert
        places[chosen[pair], TOKENS] += 1
    row = 0
    for e in range(experts):
        places[e, FIRST] = row
        if places[e, TOKENS]:
            row += turns_and_rows(kernels, places[e, TOKENS], tokens[ONE_PASS])[1]
    pair_of_row = array_at(words[PAIR_OF_ROW], words[ROWS], np.int64)
    for row in range(words[ROWS]):
        pair_of_row[row] = -1
    for pair in range(pairs):
        rows[pair] += places[chosen[pair], FIRST]
        pair_of_row[rows[pair]] = pair


def _records(block, x, x_stride, out, count, kernels, by_token, first, last):
    """The records of rows first..last, of x float32 [., count]: of each row's token, or of row after row of x.

    x_stride: bytes from a row to the next
    """
    words = array_at(block, WORDS, np.int64)
    chosen = array_at(words[CHOSEN], 1, np.int64)
    pair_of_row = array_at(words[PAIR_OF_ROW], last, np.int64)
    places = array_at(words[PLACES], (words[EXPERTS], PLACE), np.int64)
    kinds = array_at(kernels, passes.WORDS, np.int64)[passes.KINDS]
    k = array_at(kernels, (kinds, passes.WORDS), np.int64)
    for row in range(first, last):
        pair = pair_of_row[row]
        if pair >= 0:
            place = places[chosen[pair]]
            at = row - place[FIRST]
            source = x + x_stride * ((pair // words[USED] if by_token else row) - at)
            make_records(k, place, source, x_stride, out, count, at, at + 1)


@inner
def _choose_in_turn(logits, left, chosen, weights, mixer):
    """Phi-MoE's experts and weights, see experts.py; `left` is memory for as many numbers as logits."""
    for e in range(logits.size):
        left[e] = logits[e]
    for j in range(chosen.size):
        best = 0
        for e in range(1, logits.size):
            if left[e] > left[best]:
                best = e
        top = left[best]
        total = np.float32(0)
        for e in range(logits.size):
            if top - logits[e] <= mixer * max(abs(logits[e]), top) and left[e] > -np.inf:
                total += exp(left[e] - top)
        left[best] = -np.inf
        chosen[j] = best
        weights[j] = np.float32(1) / total


@inner
def _leave_groups(choice, scores, used, sigmoid):
    """-inf for the experts of all groups but the best: of the largest choice, or sum of the two largest.

    scores  memory for a number for each group
    """
    groups = scores.size
    size = choice.size // groups
    for g in range(groups):
        top = second = np.float32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            if choice[e] > top:
                second = top
                top = choice[e]
            elif choice[e] > second:
                second = choice[e]
        scores[g] = top + second if sigmoid and size > 1 else top
    for _ in range(groups - used):
        worst = -1
        for g in range(groups):
            if scores[g] > -np.inf and (worst < 0 or scores[g] <= scores[worst]):
                worst = g
        scores[worst] = -np.inf
        for e in range(worst * size, (worst + 1) * size):
            choice[e] = -np.inf


def _gated(block, gate, up, inner, stride, _0, _1, first, last):
    """gate = activate(gate, up) for rows first..last, with the factors and biases of their experts.

    stride: bytes from a row to the next
    """
    for row in range(first, last):
        if not _bias_row(block, row, gate, up, inner, stride):
            continue
        g = floats(gate + stride * row, inner)
        u = floats(up + stride * row, inner)
        for i in range(inner):
            g[i] = activate(g[i], u[i])


def _numbered(block, gate, up, inner, stride, first_number, second_number, first, last):
    """gate = activate(gate, up, two numbers), otherwise as `_gated`. The numbers: the bits of float64."""
    b = np.float32(np.int64(first_number).view(np.float64))
    c = np.float32(np.int64(second_number).view(np.float64))
    for row in range(first, last):
        if not _bias_row(block, row, gate, up, inner, stride):
            continue
        g = floats(gate + stride * row, inner)
        u = floats(up + stride * row, inner)
        for i in range(inner):
            g[i] = activate(g[i], u[i], b, c)


def _ungated(block, gate, up, inner, stride, _0, _1, first, last):
    """gate = activate(gate, 1), otherwise as `_gated`; there is no up."""
    for row in range(first, last):
        if not _bias_row(block, row, gate, up, inner, stride):
            continue
        g = floats(gate + stride * row, inner)
        for i in range(inner):
            g[i] = activate(g[i], np.float32(1.0))


@inner
def _bias_row(block, row, gate, up, inner, stride):
    """A row of gate and up times the factors of its expert, plus its biases; False where it is no token's.

    up may be 0. BEFORE: times the expert's weight too, which then weighs what it reads, not what it makes.
    """
    words = array_at(block, WORDS, np.int64)
    j = array_at(words[PAIR_OF_ROW], row + 1, np.int64)[row]
    if j < 0:
        return False
    e = array_at(words[CHOSEN] + 8 * j, 1, np.int64)[0]
    factors = floats(words[FACTORS] + 12 * e, 3)
    scale_g, scale_u = factors[0], factors[1]
    if words[BEFORE]:
        share = floats(words[WEIGHTS] + 4 * j, 1)[0]
        scale_g *= share
        scale_u *= share
    g = floats(gate + stride * row, inner)
    u = floats((up if up else gate) + stride * row, inner if up else 0)
    if scale_g != np.float32(1) or scale_u != np.float32(1):
        for i in range(inner):
            g[i] *= scale_g
        for i in range(u.size):
            u[i] *= scale_u
    if words[GATE_BIAS]:
        b = floats(words[GATE_BIAS] + 4 * inner * e, inner)
        for i in range(inner):
            g[i] += b[i]
    if words[UP_BIAS]:
        b = floats(words[UP_BIAS] + 4 * inner * e, inner)
        for i in range(inner):
            u[i] += b[i]
    return True


def _mixed(block, down, used, hidden, stride, y, _0, first, last):
    """y[t] = sum over the chosen experts of weight * (factor * down + bias), for tokens first..last.

    stride: bytes from a row of down to the next
    """
    words = array_at(block, WORDS, np.int64)
    rows = array_at(words[ROW_OF_PAIR], used * last, np.int64)
    for t in range(first, last):
        out = floats(y + 4 * hidden * t, hidden)
        for i in range(hidden):
            out[i] = 0
        for j in range(t * used, (t + 1) * used):
            e = array_at(words[CHOSEN] + 8 * j, 1, np.int64)[0]
            share = np.float32(1) if words[BEFORE] else floats(words[WEIGHTS] + 4 * j, 1)[0]
            weight = share * floats(words[FACTORS] + 12 * e, 3)[2]
            part = floats(down + stride * rows[j], hidden)
            for i in range(hidden):
                out[i] += weight * part[i]
            if words[DOWN_BIAS]:
                b = floats(words[DOWN_BIAS] + 4 * hidden * e, hidden)
                for i in range(hidden):
                    out[i] += share * b[i]


def _add_weighed(x, gate, added, y, hidden, _0, _1, first, last):
    """y[t] += sigmoid(gate . x[t]) * added[t] for tokens first..last; without the factor where gate is 0."""
    weights = floats(gate, hidden)
    for t in range(first, last):
        values = floats(x + 4 * hidden * t, hidden)
        part = floats(added + 4 * hidden * t, hidden)
        out = floats(y + 4 * hidden * t, hidden)
        share = np.float32(1)
        if gate:
            dot = np.float32(0)
            for i in range(hidden):
                dot += weights[i] * values[i]
            share = np.float32(1) / (np.float32(1) + exp(-dot))
        for i in range(hidden):
            out[i] += share * part[i]


FUNCTIONS: dict[str, Any] = {
    "choose": _choose, "gather": _gather, "records": _records, "silu": _gated, "gelu": _gated, "relu2": _ungated,
    "clamped": _gated, "situ": _numbered, "limited": _numbered, "erf": _ungated, "mixed": _mixed,
    "add_weighed": _add_weighed,
}  # fmt: skip
_ACTIVATIONS = {
    "silu": silu_times, "gelu": gelu_times, "relu2": relu2_times, "clamped": clamp, "erf": erf_times,
    "situ": situ_times, "limited": limited_times,
}  # fmt: skip


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name], name, activate=_ACTIVATIONS.get(name))

"""The draw of a token from a row of logits, and the probabilities of the most likely tokens, without sorting the row.

    maxima   the largest logit of every BLOCK tokens, in one pass: at least k tokens reach the k-th largest of these, so
             that only blocks that reach it are read again
    cut      where a sum over tokens, most likely first, exceeds a target: sums of BUCKETS ranges of logits, then the
             range in which it does is divided in the same way, until a few tokens are left, which are sorted

Tokens of equal logits are in the order of their ids. Weights, e^(-distance from the largest logit), and their sums are
float64. Tokens are given as (logits, list, count, maxima): the address of float32, that of uint32 ids in which those of
equal logits ascend, or 0 for all from 0 on, how many there are, and the address of all tokens' maxima, or 0.

With 262,000 tokens and the default settings a draw takes 0.06 ms, of which the one pass is 0.04; a sum over all weights
takes 0.15 ms more, one by ranges 0.15 to 0.26, the longer the more tokens are likely.
"""

from functools import partial

import numpy as np

from bridge.system.kernels.jit import CFunction, c_function, inner, maker
from bridge.system.kernels.memory import allocate, array_at, array_on_stack, floats, free
from bridge.system.threads import pool

# words of what is asked about a row: addresses, numbers and the bits of float64; `_sample` says more
(LOGITS, VOCAB, TOP, LISTED, LIST, SUM, DRAWN, TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM, TOKEN, ADJUSTED, ADJUSTED_TOP,
 BIASED, BIASES, BIASED_COUNT, SEEN, SEEN_COUNT, PENALTY, REPLY, REPLY_COUNT, FREQUENCY, PRESENCE, ALLOWED,
 ALLOWED_COUNT, WORDS) = range(28)  # fmt: skip

BLOCK = 64  # tokens
BUCKETS = 1024
_PER_UNIT = 64.0  # buckets for a factor of e between weights
_FEW = 32  # tokens that are sorted
_MOST = 708.0  # e^-708 is a float64, and weighs nothing
_STEEPEST = 1e300  # a rate that leaves the largest logits alone
_NOTHING = 1e-290  # more than all tokens of that weight
_BEFORE = 1 - 2.0**-53  # times a float64: the next smaller one
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
_ROUNDING = 1.5 * 2.0**52  # a sum with it ends in an integer


@partial(inner, fastmath={"contract"})
def _exp_minus(x):
    """e^-x of a float64 between 0 and 708, within (2 + x) 1e-16 of its size, in instructions that vectorize."""
    shifted = _ROUNDING - x * _LOG2_E
    r = (_ROUNDING - shifted) * _LN_2 - x
    p = 2.5100375832561234e-08  # equal to e^r in Chebyshev's points, within 2e-17
    p = p * r + 2.7620075879983367e-07
    p = p * r + 2.7557268480310024e-06
    p = p * r + 2.4801521322368692e-05
    p = p * r + 1.9841269863040545e-04
    p = p * r + 1.3888888917196719e-03
    p = p * r + 8.3333333333300650e-03
    p = p * r + 4.1666666666624164e-02
    p = p * r + 1.6666666666666669e-01
    p = (p * r + 0.5) * r
    p = (p + 1.0) * r + 1.0
    power = np.float64(shifted).view(np.int64) << 52
    return np.int64(np.float64(p).view(np.int64) + power).view(np.float64)


@inner
def _weight(distance, rate):
    """e^(-rate distance); of an infinite distance, whatever the rate, as good as nothing."""
    return _exp_minus(min(_MOST, rate * distance))


@inner
def _bucket(distance, scale):
    """The number of the range that a logit so far below the largest is in."""
    return np.int32(min(BUCKETS - 1.0, scale * distance))


@inner
def _ordered(bits):
    """The bits of a float32 as an int32 that is the larger, the larger the number; and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def _maxima(logits, count, maxima):
    """The largest logit of each block to `maxima`; returns the largest of all, or NaN where there is one."""
    top = np.int32(-0x80000000)
    magnitude = np.int32(0)
    padded = array_on_stack(64, np.int32)
    for first in range(0, count, BLOCK):
        bits = array_at(logits + 4 * first, BLOCK, np.int32)
        if count - first < BLOCK:
            for j in range(BLOCK):
                padded[j] = bits[j] if j < count - first else np.int32(-0x800000)  # -inf
            bits = padded
        best = np.int32(-0x80000000)
        for j in range(BLOCK):
            magnitude = max(magnitude, np.int32(bits[j] & np.int32(0x7FFFFFFF)))
            best = max(best, _ordered(bits[j]))
        floats(maxima + first // BLOCK * 4, 1)[0] = np.int32(_ordered(best)).view(np.float32)
        top = max(top, best)
    if magnitude > np.int32(0x7F800000):  # infinity's
        return np.float32(np.nan)
    return np.int32(_ordered(top)).view(np.float32)


@inner
def _read(tokens, first, x, ids):
    """x float32 and ids uint32 [BLOCK]: logits and ids of tokens from number `first` on; -inf after the last."""
    logits, listed, count, _ = tokens
    n = min(BLOCK, count - first)
    if listed:
        row, some = floats(logits, 1), array_at(listed + 4 * first, BLOCK, np.uint32)
        for j in range(n):
            ids[j] = some[j]
            x[j] = row[some[j]]
    else:
        row = floats(logits + 4 * first, BLOCK)
        for j in range(n):
            ids[j] = first + j
            x[j] = row[j]
    for j in range(n, BLOCK):
        x[j] = -np.inf


@partial(inner, fastmath={"reassoc"})
def _sum(values):
    total = 0.0
    for i in range(values.size):
        total += values[i]
    return total


@inner
def _weigh(tokens, top, rate, scale, sums):
    """Sums of the weights e^(-rate (top - logit)) of each bucket's tokens; returns that of all.

    scale  buckets of a unit of the logits; infinity: for the sum of all alone
    sums   float64 [BUCKETS + BLOCK]; to the last bucket each of the BLOCK tokens adds in a place of its own, as one
           addition to the same place waits for the other
    """
    maxima = tokens[3]
    x = array_on_stack(64, np.float32)
    ids = array_on_stack(64, np.uint32)
    weights = array_on_stack(64, np.float64)
    rest = array_on_stack(64, np.float64)
    buckets = array_on_stack(64, np.int32)
    for i in range(sums.size):
        sums[i] = 0.0
    for j in range(BLOCK):
        rest[j] = 0.0
    for first in range(0, tokens[2], BLOCK):
        _read(tokens, first, x, ids)
        beyond = scale == np.inf
        if maxima:
            most = np.float64(floats(maxima + first // BLOCK * 4, 1)[0])
            beyond |= _bucket(top - most, scale) == BUCKETS - 1
        if beyond:
            for j in range(BLOCK):
                rest[j] += _weight(top - np.float64(x[j]), rate)
            continue
        for j in range(BLOCK):
            distance = top - np.float64(x[j])
            weights[j] = _weight(distance, rate)
            buckets[j] = np.int32(min(np.float64(BUCKETS - 1 + j), scale * distance))
        for j in range(BLOCK):
            sums[np.uint32(buckets[j])] += weights[j]
    for j in range(BLOCK):
        rest[j] += sums[BUCKETS - 1 + j]
        sums[BUCKETS - 1 + j] = 0.0
    sums[BUCKETS - 1] = _sum(rest)
    return _sum(sums)


@inner
def _append(ids, hits, count, place):
    """Those of BLOCK ids that are hits to number `count` of the list at `place`, and on; returns how many there are."""
    for j in range(BLOCK):  # without branches, which no one could foresee
        array_at(place + 4 * count, 1, np.uint32)[0] = ids[j]
        count += hits[j]
    return count


@inner
def _pick(tokens, top, scale, bucket, picked):
    """List the tokens of a bucket, but those of -inf; returns how many, the least and the largest logit."""
    maxima = tokens[3]
    x = array_on_stack(64, np.float32)
    ids = array_on_stack(64, np.uint32)
    hits = array_on_stack(64, np.int32)
    n, least, most = 0, np.float32(np.inf), np.float32(-np.inf)
    for first in range(0, tokens[2], BLOCK):
        if maxima and _bucket(top - np.float64(floats(maxima + first // BLOCK * 4, 1)[0]), scale) > bucket:
            continue
        _read(tokens, first, x, ids)
        found = np.int32(0)
        for j in range(BLOCK):
            inside = _bucket(top - np.float64(x[j]), scale) == bucket
            hits[j] = np.int32(1) if inside and x[j] > -np.inf else np.int32(0)
            found = np.int32(found + hits[j])
        if found:
            for j in range(BLOCK):
                least = min(least, x[j] if hits[j] else np.float32(np.inf))
                most = max(most, x[j] if hits[j] else np.float32(-np.inf))
            n = _append(ids, hits, n, picked)
    return n, least, most


@inner
def _sort(logits, ids, count):
    """Sort a short list, the largest logit first, and of equals the one that was first."""
    row, some = floats(logits, 1), array_at(ids, count, np.uint32)
    for i in range(1, count):
        token = some[np.uint64(i)]
        j = i
        while j > 0 and row[some[np.uint64(j - 1)]] < row[token]:
            some[np.uint64(j)] = some[np.uint64(j - 1)]
            j -= 1
        some[np.uint64(j)] = token


@inner
def _cut(tokens, top, rate, scale, target, sums, picked):
    """The token with which the sum of weights, most likely first, exceeds a target, or the last.

    top, rate, scale, sums: those of `_weigh`, which has left the sums
    """
    logits = tokens[0]
    row = floats(logits, 1)
    while True:
        bucket, before, total = 0, 0.0, 0.0
        for i in range(BUCKETS):
            if sums[i] > _NOTHING:
                bucket, before = i, total
                total += sums[i]
                if total > target:
                    break
        count, least, most = _pick(tokens, top, scale, bucket, picked)
        some = array_at(picked, count, np.uint32)
        target = (target - before) / _weight(top - np.float64(most), rate)
        top = np.float64(most)
        if least == most:
            return some[np.uint64(min(target, count - 1.0))]
        if count <= _FEW:
            _sort(logits, picked, count)
            total = 0.0
            for i in range(count):
                total += _weight(top - np.float64(row[some[i]]), rate)
                if total > target:
                    return some[i]
            return some[count - 1]
        tokens = logits, picked, np.int64(count), np.int64(0)
        scale = (BUCKETS - 1) / (top - np.float64(least))
        _weigh(tokens, top, rate, scale, sums)


@inner
def _keep(tokens, least, last, kept):
    """List the tokens whose logits are above `least`, or equal and their ids at most `last`; returns how many."""
    maxima = tokens[3]
    x = array_on_stack(64, np.float32)
    ids = array_on_stack(64, np.uint32)
    hits = array_on_stack(64, np.int32)
    n = 0
    for first in range(0, tokens[2], BLOCK):
        if maxima:
            most = floats(maxima + first // BLOCK * 4, 1)[0]
            if most < least or (most == least and first > last):
                continue
        _read(tokens, first, x, ids)
        for j in range(BLOCK):
            before = x[j] > least or (x[j] == least and ids[j] <= last)
            hits[j] = np.int32(1) if before else np.int32(0)
        n = _append(ids, hits, n, kept)
    return n


@inner
def _largest(tokens, top, k, sums, picked, kept):
    """List the k most likely tokens of a row, but those of -inf; returns how many."""
    logits, _, count, maxima = tokens
    blocks = (count + BLOCK - 1) // BLOCK
    if k < blocks:
        bounds = maxima, np.int64(0), blocks, np.int64(0)
        _weigh(bounds, top, 0.0, _PER_UNIT, sums)
        block = _cut(bounds, top, 0.0, _PER_UNIT, k - 0.5, sums, picked)
        last = np.uint32(BLOCK * block + BLOCK - 1)
        tokens = logits, kept, _keep(tokens, floats(maxima, 1)[block], last, kept), np.int64(0)
    _weigh(tokens, top, 0.0, _PER_UNIT, sums)
    last = _cut(tokens, top, 0.0, _PER_UNIT, k - 0.5, sums, picked)
    return _keep(tokens, floats(logits, 1)[last], last, kept)


@inner
def _least(top, share):
    """The least float32 whose weight e^(logit - top) is at least a share."""
    low = np.int64(_ordered(np.int32(-0x800000)))  # -inf
    high = np.int64(_ordered(np.int32(np.float32(top).view(np.int32))))
    while high - low > 1:
        middle = (low + high) // 2
        logit = np.int32(_ordered(np.int32(middle))).view(np.float32)
        if _weight(top - np.float64(logit), 1.0) >= share:
            high = middle
        else:
            low = middle
    return np.int32(_ordered(np.int32(high))).view(np.float32)


@inner
def _first(tokens, top):
    """The first token of a row with its largest logit."""
    logits, _, _, maxima = tokens
    block = 0
    while floats(maxima + 4 * block, 1)[0] < top:
        block += 1
    token = BLOCK * block
    while floats(logits + 4 * token, 1)[0] < top:
        token += 1
    return token


@inner
def _drawn(words, numbers, tokens, top, sums, picked, kept):
    """A token of a row for the settings and the uniform number that are asked for."""
    if numbers[TEMPERATURE] == 0.0:
        return _first(tokens, top)
    logits, _, count, _ = tokens
    top_p, min_p = numbers[TOP_P], numbers[MIN_P]
    if 0 < words[TOP_K] < count:
        tokens = logits, kept, _largest(tokens, top, words[TOP_K], sums, picked, kept), np.int64(0)
    whole = _weigh(tokens, top, 1.0, np.inf, sums) if top_p < 1.0 and min_p > 0.0 else 0.0
    if min_p > 0.0:
        tokens = logits, kept, _keep(tokens, _least(top, min_p), np.uint32(count), kept), np.int64(0)
    if top_p < 1.0:
        whole = max(whole, _weigh(tokens, top, 1.0, _PER_UNIT, sums))
        last = _cut(tokens, top, 1.0, _PER_UNIT, top_p * whole * _BEFORE, sums, picked)
        tokens = logits, kept, _keep(tokens, floats(logits, 1)[last], last, kept), np.int64(0)
    rate = min(1.0 / numbers[TEMPERATURE], _STEEPEST)
    total = _weigh(tokens, top, rate, _PER_UNIT * rate, sums)
    return np.int64(_cut(tokens, top, rate, _PER_UNIT * rate, numbers[UNIFORM] * total, sums, picked))


@inner
def _adjust(words, numbers, adjusted, marks):
    """A copy of the logits with biases, penalties, and -inf for tokens that are not allowed."""
    count = words[VOCAB]
    source, row = floats(words[LOGITS], count), floats(adjusted, count)
    for i in range(count):
        row[i] = source[i]
    biased = array_at(words[BIASED], words[BIASED_COUNT], np.int64)
    biases = floats(words[BIASES], words[BIASED_COUNT])
    for i in range(words[BIASED_COUNT]):
        row[np.uint64(biased[i])] += biases[i]
    if words[SEEN_COUNT]:
        seen, penalty = array_at(words[SEEN], words[SEEN_COUNT], np.int64), np.float32(numbers[PENALTY])
        marked = array_at(marks, count, np.uint8)
        for i in range(count):
            marked[i] = 0
        for i in range(words[SEEN_COUNT]):
            token = np.uint64(seen[i])
            if token < count and not marked[token]:
                marked[token] = 1
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    if words[REPLY_COUNT]:
        reply = array_at(words[REPLY], words[REPLY_COUNT], np.int64)
        frequency, presence = np.float32(numbers[FREQUENCY]), np.float32(numbers[PRESENCE])
        counts = array_at(marks, count, np.int32)
        for i in range(count):
            counts[i] = 0
        for i in range(words[REPLY_COUNT]):
            if np.uint64(reply[i]) < count:
                counts[np.uint64(reply[i])] += 1
        for i in range(words[REPLY_COUNT]):
            token = np.uint64(reply[i])
            if token < count and counts[token]:
                row[token] -= np.float32(counts[token]) * frequency + presence
                counts[token] = 0
    if words[ALLOWED]:
        allowed = min(count, words[ALLOWED_COUNT])
        for first in range(0, allowed, 32):
            bits = array_at(words[ALLOWED] + first // 8, 1, np.uint32)[0]
            part = floats(adjusted + 4 * first, 32)
            for j in range(min(32, allowed - first)):
                part[j] = part[j] if np.uint32(bits >> np.uint32(j)) & np.uint32(1) else np.float32(-np.inf)
        for i in range(allowed, count):
            row[np.uint64(i)] = -np.inf


def _sample(rows, _0, _1, _2, _3, _4, _5, first, last):
    """What is asked about rows first..last-1 of a table int64 [rows, WORDS].

    LOGITS  float32 [VOCAB]; their largest is left in TOP, and if it is not finite, nothing else
    LISTED  -1, or the number of the most likely tokens to list, but those of -inf, at LIST, by their ids: memory for
            uint32 [VOCAB + BLOCK]; their number is left here, and the sum of all e^(logit - TOP) in SUM
    DRAWN   whether to draw a TOKEN, with these settings (TOP_K 0: all) and a UNIFORM number in [0, 1)
    ADJUSTED  whether to draw from a copy of the logits: BIASES float32 are added to those of BIASED int64
            [BIASED_COUNT]; those of SEEN int64 [SEEN_COUNT] are divided by PENALTY, or multiplied if they are not above
            0; those of REPLY int64 [REPLY_COUNT] get less by FREQUENCY for each time that they are in it, and once by
            PRESENCE; and where ALLOWED is not 0, only those of the first ALLOWED_COUNT tokens are left whose bit is set
            there. The largest of what is drawn from is left in ADJUSTED_TOP, and if it is not finite, no TOKEN
    """
    for i in range(first, last):
        words = array_at(rows + 8 * WORDS * i, WORDS, np.int64)
        numbers = array_at(rows + 8 * WORDS * i, WORDS, np.float64)
        count = words[VOCAB]
        row = 4 * (count + BLOCK)  # bytes of a copy, or of a list and what is written after it
        memory = allocate(8 * (BUCKETS + BLOCK) + 4 * row)
        sums = array_at(memory, BUCKETS + BLOCK, np.float64)
        picked = memory + 8 * (BUCKETS + BLOCK)
        kept, adjusted, maxima = picked + row, picked + 2 * row, picked + 3 * row
        logits = words[LOGITS]
        top = _maxima(logits, count, maxima)
        numbers[TOP] = top
        if abs(top) < np.inf and words[LISTED] >= 0:
            tokens = logits, np.int64(0), count, maxima
            numbers[SUM] = _weigh(tokens, np.float64(top), 1.0, np.inf, sums)
            if words[LISTED] > 0:
                words[LISTED] = _largest(tokens, np.float64(top), words[LISTED], sums, picked, words[LIST])
        if abs(top) < np.inf and words[DRAWN]:
            if words[ADJUSTED]:
                _adjust(words, numbers, adjusted, picked)
                logits, top = adjusted, _maxima(adjusted, count, maxima)
            numbers[ADJUSTED_TOP] = top
            if abs(top) < np.inf:
                tokens = logits, np.int64(0), count, maxima
                words[TOKEN] = _drawn(words, numbers, tokens, np.float64(top), sums, picked, kept)
        free(memory)


@maker
def function() -> CFunction:
    """`_sample` as a C function."""
    return c_function(_sample)


def sample(table: np.ndarray) -> None:
    """Answer what a table int64 [rows, WORDS] asks (`_sample`), several rows on the pool's threads."""
    if len(table) == 1:
        function().ctypes(table.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 1)
    else:
        worth = int(table[:, VOCAB].sum()) >= pool.MIN_VALUES_TO_SHARE
        pool.share_items(worth, function(), table.ctypes.data, items=len(table))

"""The states of a layer, changed by one token after the other, and what each token reads of them.

With q, k of a group of heads and v of a head, for each head a state S [value_dim, key_dim]:

    S   <- S a + u k^T          out = S q
    u = beta (v - a S k)        the gated delta net, a = exp(decay softplus(alpha + bias)), beta of sigmoid(beta)
    u = step v                  Mamba-2 and Mamba, a = exp(decay step), step = softplus(step + bias);
                                out = (S q + skip v) silu(z)

Mamba is one head, but each value has a step of its own, and each element of the state a decay.

Rows of S do not depend on each other. A block takes up to 256 / LANES of a head through all tokens, in registers: LANES
threads have a row, each some 16 elements of it, by fours. So a state is loaded and stored once, 16 bytes at a time, and
a layer of 32 heads of 128 x 128 is 128 blocks. Keys, queries, values and gates of the next 16 tokens are loaded
into shared memory together: then a token waits for nothing but sums over the LANES.

A token is some 150 instructions of a warp in such a delta net, 130 in Mamba-2 (machine code for 9.0).
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.recurrent.functions import element, silu, softplus
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    ALIGNED,
    bits_float,
    device_function,
    float_bits,
    launch_dependents,
    launches_wait,
    load_16f,
    mad,
    prefetch_4,
    put_4,
    shared_4,
    shared_16_further,
    store_4,
    store_16,
    sub,
)
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.runtime.config import recurrent_config as kinds
from bridge.runtime.config.recurrent_config import RecurrentConfig

# set by `recur_kernel`: threads of a row of a state, a power of two, and fours of elements that each has; rows of a
# block; elements of a key with those that are added to fill the fours; tokens that are loaded together
LANES = LEVELS = ROUNDS = ROWS = THREADS = PADDED = TOKENS = 0
KEY_DIM = VALUE_DIM = HEADS = GROUPS = Q_AT = K_AT = V_AT = RUN = GATES = 0
DELTA = SCAN = TILED = DEPENDENT = False
four: Any = None
keep_four: Any = None
lanes_sum: Any = None

float32 = np.float32
int32: Any = np.int32
_ALL_LANES = 0xFFFFFFFF
_THREADS = 256
_REGISTERS = 128
_SHARED = 8192  # floats of keys and queries


def _lanes_sum(value):
    """The sum over the threads of a row."""
    for level in unroll(LEVELS):
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 1 << level)
    return value


def _aligned_four(array, row, i):
    """Elements i to i + 4 of the row of KEY_DIM that begins there; zeros beyond its end."""
    if i < KEY_DIM:
        return load_16f(array, (row + i) >> 2)
    return float32(0), float32(0), float32(0), float32(0)


def _any_four(array, row, i):
    """The same, where rows do not begin at 16 bytes."""
    return (
        array[row + i] if i < KEY_DIM else float32(0),
        array[row + i + 1] if i + 1 < KEY_DIM else float32(0),
        array[row + i + 2] if i + 2 < KEY_DIM else float32(0),
        array[row + i + 3] if i + 3 < KEY_DIM else float32(0),
    )


def _keep_aligned_four(array, row, i, values):
    """Store what `four` loads."""
    if i < KEY_DIM:
        words = float_bits(values[0]), float_bits(values[1]), float_bits(values[2]), float_bits(values[3])
        store_16(array, (row + i) >> 2, words)


def _keep_any_four(array, row, i, values):
    for m in unroll(4):
        if i + m < KEY_DIM:
            array[row + i + m] = values[m]


def _recur(keys, values, steps, gates, z, decay, dt_bias, skip, state, y):
    thread = int32(cuda.threadIdx.x)
    first_row = int32(int32(cuda.blockIdx.x) * ROWS)
    head = int32(cuda.blockIdx.y)
    lane = thread & (LANES - 1)
    row = thread >> LEVELS
    start = (head * VALUE_DIM + min(first_row + row, VALUE_DIM - 1)) * KEY_DIM
    if DEPENDENT:
        launch_dependents()
        for r in unroll(ROUNDS):  # of a step's memory this comes from farthest away
            prefetch_4(state, start + min(4 * (lane + LANES * r), KEY_DIM - 1))
        launches_wait()
    group = int32(head % GROUPS if TILED else head // (HEADS // GROUPS))
    gate = head // RUN * (2 * RUN) + head % RUN
    tokens = int32(values.shape[0])
    # of each token, its query, then its key
    both = cuda.shared.array(TOKENS * 2 * PADDED, float32, ALIGNED)
    v = cuda.shared.array(TOKENS * ROWS, float32)
    out = cuda.shared.array(TOKENS * ROWS, float32)
    # of each token, what stays of a state and the factor of what comes; or a step for each row
    factors = cuda.shared.array(TOKENS * GATES, float32)
    s = registers()
    k = registers()
    rates = registers()
    known = registers()
    total = registers()
    for r in unroll(ROUNDS):
        loaded = four(state, start, 4 * (lane + LANES * r))
        for m in unroll(4):
            s[r, m] = loaded[m]
        if SCAN:
            loaded = four(decay, start, 4 * (lane + LANES * r))
            for m in unroll(4):
                rates[r, m] = loaded[m]
    # where a thread loads values from and stores results: of every LANES-th token
    column = thread % int32(ROWS)
    first_token = thread // int32(ROWS)
    place = mad(head, VALUE_DIM, int32(first_row + column))
    inside = first_row + column < VALUE_DIM
    for first in range(int32(0), tokens, int32(TOKENS)):
        count = min(int32(TOKENS), sub(tokens, first))
        for i in range(thread, int32(2 * PADDED), int32(THREADS)):
            at = i % int32(PADDED)
            channel = mad(group, KEY_DIM, int32((Q_AT if i < PADDED else K_AT) + at))
            for t in range(count):
                key = element(keys, int32(first + t), channel) if at < KEY_DIM else float32(0)
                put_4(both, mad(t, 2 * PADDED, i), float_bits(key))
        for t in range(first_token, count, int32(LANES)):
            token, i = int32(first + t), mad(t, ROWS, column)
            value = element(values, token, int32(V_AT + place)) if inside else float32(0)
            put_4(v, i, float_bits(value))
            if SCAN:
                step = element(steps, token, place) + dt_bias[place] if inside else float32(0)
                put_4(factors, i, float_bits(softplus(step)))
        if not SCAN and thread < count:
            step = softplus(steps[first + thread, gate] + dt_bias[head])
            factors[2 * thread] = math.exp(decay[head] * step)
            if DELTA:
                step = float32(1) / (float32(1) + math.exp(-gates[first + thread, gate]))
            factors[2 * thread + 1] = step
        cuda.syncthreads()
        for t in range(count):
            query = mad(t, PADDED // 2, lane)
            value = bits_float(shared_4(v, mad(t, ROWS, row)))
            if SCAN:
                factor = bits_float(shared_4(factors, mad(t, ROWS, row)))
            else:
                stays = bits_float(shared_4(factors, mad(t, 2, 0)))
                factor = bits_float(shared_4(factors, mad(t, 2, 1)))
            for m in unroll(4):
                known[m] = float32(0)
                total[m] = float32(0)
            for r in unroll(ROUNDS):
                words = shared_16_further(both, query, int32(PADDED // 4 + LANES * r))
                for m in unroll(4):
                    k[r, m] = bits_float(words[m])
                    if DELTA:
                        known[m] += k[r, m] * s[r, m]
            if DELTA:
                value -= stays * lanes_sum((known[0] + known[1]) + (known[2] + known[3]))
            u = factor * value
            for r in unroll(ROUNDS):
                words = shared_16_further(both, query, int32(LANES * r))
                for m in unroll(4):
                    if SCAN:
                        stays = math.exp(factor * rates[r, m])
                    s[r, m] = stays * s[r, m] + u * k[r, m]
                    total[m] += s[r, m] * bits_float(words[m])
            result = lanes_sum((total[0] + total[1]) + (total[2] + total[3]))
            if lane == 0:
                put_4(out, mad(t, ROWS, row), float_bits(result))
        cuda.syncthreads()
        # a thread takes what it has put into v itself, and puts into it again only after that
        if inside:
            for t in range(first_token, count, int32(LANES)):
                token, i = int32(first + t), mad(t, ROWS, column)
                result = bits_float(shared_4(out, i))
                if not DELTA:
                    result += skip[place if SCAN else head] * bits_float(shared_4(v, i))
                    result *= silu(element(z, token, place))
                store_4(y, mad(token, HEADS * VALUE_DIM, place), float_bits(result))
    if first_row + row < VALUE_DIM:
        for r in unroll(ROUNDS):
            keep_four(state, start, 4 * (lane + LANES * r), (s[r, 0], s[r, 1], s[r, 2], s[r, 3]))


def _shape(c: RecurrentConfig) -> tuple[int, int]:
    """Threads of a row of a state, and rows of a block."""
    elements = 4 if c.kind == kinds.MAMBA1 else 16  # of a thread: Mamba has few, and decays as well
    lanes = min(32, 1 << (-(-c.key_dim // elements) - 1).bit_length())
    per_warp = 32 // lanes
    return lanes, min(_THREADS // lanes, -(-c.value_dim // per_warp) * per_warp)


@recipe
def recur_kernel(c: RecurrentConfig, dependent: bool = False) -> Kernel:
    """recur(keys, values, steps, gates, z, decay, dt_bias, skip, state, y) -> y f32 [n, values], and the state changed.

    keys, values  f32 [n, channels]: what was convolved; Mamba's keys f32 [n, rank + 2 * key_dim] are apart
    steps, gates  f32 [n, heads]: alpha and beta, where they are joined each of a group beside the other of the next
                  one; Mamba-2 has steps alone, Mamba those of all values
    z             f32 [n, values], but for a delta net
    decay         f32 [heads], Mamba's [values, key_dim]; dt_bias, skip f32 [heads], Mamba's [values]
    state         f32 [heads, value_dim, key_dim]

    Those that a kind of layer does not have are ignored.
    """
    (lanes, rows), kind = _shape(c), c.kind
    rounds = -(-c.key_dim // (4 * lanes))
    padded = 4 * lanes * rounds
    tokens = max(1, min(16, _SHARED // (2 * padded)))
    group_keys = c.groups * c.key_dim
    if kind == kinds.MAMBA1:
        places = {"Q_AT": c.rank + c.key_dim, "K_AT": c.rank, "V_AT": 0}
    elif kind == kinds.DELTA:
        places = {"Q_AT": 0, "K_AT": group_keys, "V_AT": 2 * group_keys}
    else:
        places = {"Q_AT": c.values + group_keys, "K_AT": c.values, "V_AT": 0}
    joined = c.heads // c.groups if c.joined else c.heads
    numbers = c.heads, c.groups, c.key_dim, c.value_dim, c.rank, int(c.tiled), int(c.joined)
    name = f"{kind.replace('-', '')}_{'_'.join(map(str, numbers))}{'_dependent' * dependent}"
    sizes = {"KEY_DIM": c.key_dim, "LEVELS": lanes.bit_length() - 1}
    load, store = (_any_four, _keep_any_four) if c.key_dim % 4 else (_aligned_four, _keep_aligned_four)
    function = expand(
        _recur, name, **sizes, **places, LANES=lanes, ROUNDS=rounds, ROWS=rows, THREADS=lanes * rows, PADDED=padded,
        TOKENS=tokens, VALUE_DIM=c.value_dim, HEADS=c.heads, GROUPS=c.groups, RUN=joined,
        GATES=rows if kind == kinds.MAMBA1 else 2, DELTA=kind == kinds.DELTA, SCAN=kind == kinds.MAMBA1, TILED=c.tiled,
        DEPENDENT=dependent, four=device_function(expand(load, name, **sizes)),
        keep_four=device_function(expand(store, name, **sizes)),
        lanes_sum=device_function(expand(_lanes_sum, name, **sizes)),
    )  # fmt: skip
    arrays = ["float32[:,::1]"] * 5 + ["float32[::1]"] * 5
    return Kernel(function, f"void({', '.join(arrays)})", _REGISTERS, dependent=dependent)


def recur_grid(c: RecurrentConfig) -> tuple[tuple[int, int], int]:
    """Blocks and threads."""
    lanes, rows = _shape(c)
    return (-(-c.value_dim // rows), c.heads), lanes * rows

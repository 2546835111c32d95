"""What a layer of experts does beside its products, on a GPU: `route` and the sum of bridge/runtime/decoder/experts.py.

    choose    logits of a token's experts -> the chosen ones and their weights      a block of threads for a token
    weigh     y = sum of weight * what the chosen made, and the shared expert       a thread for a value

For a few tokens `choose` makes the logits too: a block of threads for each, of which the token's last one chooses. An
expert is chosen by its rank, the number of those with a larger choice, or an equal one and a lower number: all ranks
are counted at once. Experts whose logit is NaN come first, with weights of NaN.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.product.gates import sigmoid
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import (
    ALIGNED,
    bits_float,
    block_x,
    block_y,
    cached_16f,
    launch_dependents,
    launches_wait,
    load_16f,
    prefetch_16,
    shared_16,
    thread_x,
    warp_max,
    warp_sum,
)
from bridge.cuda.toolchain.last_block import last_block
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.runtime.config.decoder_config import Routing

MULTIPLIED = 8  # tokens whose logits `choose` makes, at most
THREADS, WARPS = 256, 8  # of a block

# set per kernel by `expand`
ROUNDS = HIDDEN = EXPERTS = PADDED = WIDTH = USED = GROUPS = GROUPS_USED = GROUP = 0
SCALE = MIXER = 0.0
DEPENDENT = PRODUCT = ROUTER_BIAS = CHOICE_BIAS = SIGMOID = NORMALIZED = BEFORE = SHARED = GATED = False

float32 = np.float32
int32: Any = np.int32
int64: Any = np.int64


def _choose(x, router, logits, router_bias, choice_bias, counters, chosen, weights):
    thread = thread_x()
    lane = int32(thread & 31)
    token = block_x()
    if DEPENDENT:
        launch_dependents()
        if PRODUCT:
            for i in range(int32(8 * thread), HIDDEN // 4, 8 * THREADS):
                prefetch_16(router, int32(block_y() * (HIDDEN // 4) + i))
        launches_wait()
    if PRODUCT:
        total = float32(0)
        for i in range(thread, HIDDEN // 4, THREADS):
            row = cached_16f(router, int32(block_y() * (HIDDEN // 4) + i))
            values = load_16f(x, int32(token * (HIDDEN // 4) + i))
            for k in unroll(4):
                total += row[k] * values[k]
        part = cuda.shared.array(WARPS, np.float32)
        total = warp_sum(total)
        if lane == 0:
            part[thread >> 5] = total
        cuda.syncthreads()
        if thread == 0:
            for i in unroll(1, WARPS):
                total += part[i]
            logits[token * WIDTH + block_y()] = total
        if not last_block(counters, token, WIDTH):
            return
    logit = cuda.shared.array(PADDED, np.float32)
    choice = cuda.shared.array(PADDED, np.float32, alignment=ALIGNED)
    ranks = cuda.shared.array(PADDED, np.int32)
    picked = cuda.shared.array(USED, np.int32)
    taken = cuda.shared.array(USED, np.float32)  # what the weights are made of
    best = cuda.shared.array(GROUPS, np.float32)
    for e in range(thread, PADDED, THREADS):
        value = float32(-np.inf)
        if e < EXPERTS:
            value = logits[token * WIDTH + e]
            if ROUTER_BIAS:
                value += router_bias[e]
        logit[e] = value
    cuda.syncthreads()
    if not MIXER and not SIGMOID:
        top = float32(-np.inf)
        for e in range(lane, EXPERTS, 32):
            top = max(top, logit[e])
        top = warp_max(top)
        total = float32(0)
        for e in range(lane, EXPERTS, 32):
            total += math.exp(logit[e] - top)
        total = warp_sum(total)
    p = registers()
    for r in unroll(ROUNDS):
        e = int32(thread + r * THREADS)
        p[r] = float32(-np.inf)
        if e < EXPERTS:
            if MIXER:
                p[r] = logit[e]
            elif SIGMOID:
                p[r] = float32(1) / (float32(1) + math.exp(-logit[e]))
            else:
                p[r] = math.exp(logit[e] - top) / total
        value = p[r]
        if CHOICE_BIAS and e < EXPERTS:
            value += choice_bias[e]
        if not value < float32(np.inf):  # or NaN, which has no rank
            value = float32(np.inf)
        if e < PADDED:
            choice[e] = value
    cuda.syncthreads()
    if GROUPS > 1:
        if thread < GROUPS:
            first = float32(-np.inf)
            second = float32(-np.inf)
            for i in range(GROUP):
                value = choice[thread * GROUP + i]
                second = max(second, min(first, value))
                first = max(first, value)
            best[thread] = first + second if SIGMOID and GROUP > 1 else first
        cuda.syncthreads()
        for e in range(thread, EXPERTS, THREADS):
            own = int32(e // GROUP)
            better = int32(0)
            for g in range(GROUPS):
                if best[g] > best[own] or (best[g] == best[own] and g < own):
                    better += int32(1)
            if better >= GROUPS_USED:
                choice[e] = float32(-np.inf)
        cuda.syncthreads()
    for r in unroll(ROUNDS):
        e = int32(thread + r * THREADS)
        if e < EXPERTS:
            own_choice = choice[e]
            rank = int32(0)
            for i in range(PADDED // 4):
                quad = shared_16(choice, int32(i))
                for k in unroll(4):
                    other = bits_float(quad[k])
                    if other > own_choice or (other == own_choice and 4 * i + k < e):
                        rank += int32(1)
            if MIXER:
                ranks[e] = rank
            if rank < USED:
                picked[rank] = e
                taken[rank] = p[r]
    cuda.syncthreads()
    if thread < USED:
        value = taken[thread]
        total = float32(0)
        if MIXER:
            for e in range(EXPERTS):
                if ranks[e] >= thread and value - logit[e] <= float32(MIXER) * max(abs(logit[e]), value):
                    total += math.exp(logit[e] - value)
            value = float32(1) / total
        else:
            for j in unroll(USED):
                total += taken[j]
            value = (value / total if NORMALIZED else value) * float32(SCALE)
        chosen[token * USED + thread] = int64(picked[thread])
        weights[token * USED + thread] = value


def _weigh(made, weights, shared, logits, y):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    token = block_x()
    i = int32(block_y() * THREADS + thread_x())
    if i < HIDDEN:
        total = float32(0)
        for j in unroll(USED):
            value = made[(token * USED + j) * HIDDEN + i]
            total += value if BEFORE else weights[token * USED + j] * value
        if SHARED:
            value = shared[token * HIDDEN + i]
            total += value * sigmoid(logits[token * WIDTH + EXPERTS]) if GATED else value
        y[token * HIDDEN + i] = total


@recipe
def choose_kernel(
    how: Routing, experts: int, width: int, hidden: int, product: bool, biases: tuple[bool, bool],
    dependent: bool = False,
) -> Kernel:  # fmt: skip
    """choose(x, router, logits, router_bias, choice_bias, counters, chosen, weights): x f32 [n, hidden], router f32
    [width, hidden], logits f32 [n, width], the experts' first, counters int32 [n], zeros before and after -> chosen
    int64 [n, used] and weights f32 [n, used]. Where it makes the `product` of x and router, the logits are its result,
    and the grid is n by width, otherwise n. `biases`: whether the router has one, and the choice, f32 [experts]."""
    name = f"{experts}_{how.used}" + "_sigmoid" * how.sigmoid + f"_{how.groups}_groups" * (how.groups > 1)
    name += "_mixer" * (how.mixer > 0) + "_product" * product + "_dependent" * dependent
    function = expand(
        _choose, name, HIDDEN=hidden, EXPERTS=experts, PADDED=-(-experts // 4) * 4, WIDTH=width,
        ROUNDS=-(-experts // THREADS), USED=how.used, GROUPS=how.groups,
        GROUPS_USED=how.groups_used, GROUP=experts // how.groups, SCALE=how.scale, MIXER=how.mixer, SIGMOID=how.sigmoid,
        NORMALIZED=how.normalized, PRODUCT=product, ROUTER_BIAS=biases[0], CHOICE_BIAS=biases[1], DEPENDENT=dependent,
    )  # fmt: skip
    floats = ", ".join(["float32[::1]"] * 5)
    return Kernel(function, f"void({floats}, int32[::1], int64[::1], float32[::1])", dependent=dependent)


@recipe
def weigh_kernel(
    used: int, hidden: int, before: bool, shared: bool = False, gate: tuple[int, int] | None = None,
    dependent: bool = False,
) -> Kernel:  # fmt: skip
    """weigh(made, weights, shared, logits, y): made f32 [n, used, hidden], weights f32 [n, used], 1 if they were used
    `before`; shared f32 [n, hidden] where there is a `shared` expert -> y f32 [n, hidden]. `gate`: (width, column) of
    logits f32 [n, width] whose sigmoid weighs that, or None. A grid of n by hidden / 256."""
    name = f"{used}_{hidden}" + "_before" * before + "_shared" * shared + "_gated" * (gate is not None)
    width, column = gate or (0, 0)
    function = expand(
        _weigh, name + "_dependent" * dependent, USED=used, HIDDEN=hidden, BEFORE=before,
        SHARED=shared, GATED=gate is not None, WIDTH=width, EXPERTS=column, DEPENDENT=dependent,
    )  # fmt: skip
    return Kernel(function, f"void({', '.join(['float32[::1]'] * 5)})", dependent=dependent)

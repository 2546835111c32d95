"""The next token on the device: greedily, or drawn as bridge/runtime/sampling.py draws, from the same numbers.

    greedy   the largest logit, the first of equals                      one launch over the whole vocabulary
    draw     the sorted logits and their tokens -> one token             one block; torch sorts before it

Both end a decode step: the token becomes state[TOKEN], which the next step's embedding reads, and goes to
`drawn_ids`, where the host finds it; position and step move on by one.

`draw` works on scores in descending order (all of them, or the top_k): each thread holds a stretch of them, and
sums over stretches say in which one a bound lies. Weights and sums are float64, as on the CPU, and the uniform
numbers come from the host's generator, so that equal logits and seeds give equal tokens.

A NaN or an infinity among the logits gives token -1, which the host takes for an error; torch sorts NaN before all.
"""

import math
from collections.abc import Callable

import numpy as np
from bridge.cuda.attention.attention import POSITION, STEP, TOKEN
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import launch_dependents, launches_wait
from bridge.cuda.toolchain.last_block import last_block
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

TEMPERATURE, TOP_P, MIN_P = 0, 1, 2  # words of `how`, float64
GREEDY_THREADS = 256
GREEDY_BLOCKS = 128  # at most
DRAW_THREADS = 256


# set per kernel by `expand`
THREADS = 0
DEPENDENT = False

float32 = np.float32
float64 = np.float64
int32 = np.int32


def _finish(token, best, state, drawn_ids):
    """One thread ends the step. If the best logit is not finite, the token is -1, and the next step reads token 0."""
    if not abs(best) < float32(np.inf):
        token = int32(-1)
    state[TOKEN] = max(token, int32(0))
    drawn_ids[state[STEP]] = token
    state[STEP] += int32(1)
    state[POSITION] += int32(1)


def _reduce(top, index, thread, threads):
    """Move the largest of `top`, the first of equals, and its index to word 0. Threads must be a power of two."""
    width = threads >> 1
    while width > 0:
        if thread < width:
            other = top[thread + width]
            if other > top[thread] or (other == top[thread] and index[thread + width] < index[thread]):
                top[thread] = other
                index[thread] = index[thread + width]
        cuda.syncthreads()
        width >>= 1


def _shared_sums(part, sums, thread, threads):
    """Prefix sums of every thread's `part` in `sums`: over the threads before this one, and over all, in order."""
    sums[thread] = part
    cuda.syncthreads()
    below = float64(0)
    total = float64(0)
    for i in range(threads):
        if i < thread:
            below += sums[i]
        total += sums[i]
    return below, total


finish = cuda.jit(device=True)(_finish)
reduce = cuda.jit(device=True)(_reduce)
shared_sums = cuda.jit(device=True)(_shared_sums)


def _greedy(logits, vocab, tops, indices, counter, state, drawn_ids):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    top = cuda.shared.array(THREADS, float32)
    index = cuda.shared.array(THREADS, int32)
    thread = int32(cuda.threadIdx.x)
    blocks = int32(cuda.gridDim.x)
    best = float32(-np.inf)
    best_index = int32(0)
    for i in range(int32(cuda.blockIdx.x) * THREADS + thread, vocab, blocks * THREADS):
        value = logits[i]
        if not value < float32(np.inf):  # infinite, or NaN, which is larger than nothing
            value = float32(np.inf)
        if value > best:
            best = value
            best_index = int32(i)
    top[thread] = best
    index[thread] = best_index
    cuda.syncthreads()
    reduce(top, index, thread, THREADS)
    if thread == 0:
        tops[cuda.blockIdx.x] = top[0]
        indices[cuda.blockIdx.x] = index[0]
    if not last_block(counter, 0, blocks):
        return
    top[thread] = tops[thread] if thread < blocks else float32(-np.inf)
    index[thread] = indices[thread] if thread < blocks else int32(0)
    cuda.syncthreads()
    reduce(top, index, thread, THREADS)
    if thread == 0:
        finish(index[0], top[0], state, drawn_ids)


def _draw(scores, tokens, count, how, uniform, state, drawn_ids):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    sums = cuda.shared.array(THREADS, float64)
    shared_index = cuda.shared.array(1, int32)
    thread = int32(cuda.threadIdx.x)
    span = (count + THREADS - 1) // THREADS
    first = min(thread * span, count)
    last = min(first + span, count)
    high = float64(scores[0])

    # top_p: up to where the sum of weights reaches its share; min_p: up to where weights, which descend, pass it
    if thread == 0:
        shared_index[0] = int32(count)
    part = float64(0)
    for i in range(first, last):
        part += math.exp(float64(scores[i]) - high)
    below, total = shared_sums(part, sums, thread, THREADS)
    bound = how[TOP_P] * total
    candidates = int32(count)
    for i in range(first, last):
        weight = math.exp(float64(scores[i]) - high)
        below += weight
        if weight < how[MIN_P]:
            candidates = min(candidates, int32(i))
        elif how[TOP_P] < 1.0 and below >= bound:
            candidates = min(candidates, int32(i + 1))
    cuda.atomic.min(shared_index, 0, candidates)
    cuda.syncthreads()
    candidates = max(shared_index[0], int32(1))
    cuda.syncthreads()

    # the draw, among what is left: the first index where the sum of weights passes a share of it
    if thread == 0:
        shared_index[0] = candidates - int32(1)
    part = float64(0)
    for i in range(first, min(last, candidates)):
        part += math.exp((float64(scores[i]) - high) / how[TEMPERATURE])
    below, total = shared_sums(part, sums, thread, THREADS)
    bound = uniform[state[STEP]] * total
    drawn = candidates - int32(1)
    for i in range(first, min(last, candidates)):
        below += math.exp((float64(scores[i]) - high) / how[TEMPERATURE])
        if below > bound:
            drawn = min(drawn, int32(i))
    cuda.atomic.min(shared_index, 0, drawn)
    cuda.syncthreads()
    if thread == 0:
        finish(int32(tokens[shared_index[0]]), scores[0], state, drawn_ids)


def greedy_blocks(vocab: int) -> int:
    """Blocks of the greedy kernel."""
    return min(GREEDY_BLOCKS, -(-vocab // (4 * GREEDY_THREADS)))


@recipe
def greedy_kernel(threads: int, dependent: bool = False) -> Kernel:
    """greedy(logits f32 [vocab], vocab, tops f32 and indices int32, a word per block, counter int32 [1], 0 before and
    after, state, drawn_ids)."""
    words = "int32[::1]"
    signature = f"void(float32[::1], int32, float32[::1], {words}, {words}, {words}, {words})"
    return _kernel(_greedy, threads, signature, dependent)


@recipe
def draw_kernel(threads: int, dependent: bool = False) -> Kernel:
    """draw(scores f32 [count], descending, tokens int64, count, how f64 [3], uniform f64 [steps], state, drawn_ids)."""
    signature = "void(float32[::1], int64[::1], int32, float64[::1], float64[::1], int32[::1], int32[::1])"
    return _kernel(_draw, threads, signature, dependent)


def _kernel(function: Callable[..., None], threads: int, signature: str, dependent: bool) -> Kernel:
    name = f"{threads}{'_dependent' * dependent}"
    return Kernel(expand(function, name, THREADS=threads, DEPENDENT=dependent), signature, dependent=dependent)

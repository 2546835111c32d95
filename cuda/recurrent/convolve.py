"""The convolution of a layer with a state, over a token and those before it, each channel by itself.

    y[t, c] = sum over i < kernel of w[i, c] * in[t - kernel + 1 + i, c], + bias, silu

A warp takes 32 channels through up to `_TOKENS` tokens, with the last inputs in registers. In a delta net it takes
a head of keys or queries, or as many values, and normalizes the head: nothing has to be read again for that. The warps
of the first tokens, which alone read the tail, replace it by the inputs of the last ones.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.recurrent.functions import element, silu
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.intrinsics import device_function, launch_dependents, launches_wait, warp_sum
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand, registers, unroll
from numba import cuda

from bridge.runtime.config.recurrent_config import CONVOLUTION, DELTA, MAMBA, MAMBA1, RecurrentConfig

# set by `convolve_kernel`: channels of a warp, of them those of a lane; pieces of channels, those that are queries, and
# those that are normalized; whether all lanes have channels
CHANNELS = KERNEL = PIECE = PER_LANE = PIECES = QUERIES = NORMED = TOKENS = 0
WHOLE = GATED = BIASED = DEPENDENT = False
source: Any = None

float32 = np.float32
int32: Any = np.int32
_WARPS = 4  # in a block
_TOKENS = 16  # of a block
_REGISTERS = 128  # there are few warps: of a token, one for a head


def _source(x, tail, token, channel):
    """What is convolved: of a token, or of one before the first, which has a negative number."""
    if token < 0:
        return tail[(token + KERNEL - 1) * CHANNELS + channel]
    if GATED:
        return element(x, token, channel) * element(x, token, int32(2 * CHANNELS + channel))
    return element(x, token, channel)


def _convolve(x, tail, weight, bias, y):
    if DEPENDENT:
        launch_dependents()
        launches_wait()
    thread = int32(cuda.threadIdx.x)
    lane = thread & 31
    piece = int32(int32(cuda.blockIdx.x) * _WARPS + (thread >> 5))
    tokens = int32(x.shape[0])
    first = int32(int32(cuda.blockIdx.y) * TOKENS)
    inside = registers()
    channel = registers()
    weights = registers()
    inputs = registers()
    value = registers()
    if piece < PIECES:
        for p in unroll(PER_LANE):
            channel[p] = int32(piece * PIECE + p * 32 + lane)
            inside[p] = True if WHOLE else p * 32 + lane < PIECE and channel[p] < CHANNELS
            for i in unroll(KERNEL):
                weights[p, i] = weight[i * CHANNELS + channel[p]] if inside[p] else float32(0)
            for i in unroll(KERNEL - 1):
                inputs[p, i] = source(x, tail, int32(first - (KERNEL - 1) + i), channel[p]) if inside[p] else float32(0)
        for token in range(first, min(tokens, int32(first + TOKENS))):
            squares = float32(0)
            for p in unroll(PER_LANE):
                newest = source(x, tail, token, channel[p]) if inside[p] else float32(0)
                total = newest * weights[p, KERNEL - 1]
                if BIASED:
                    total += bias[channel[p]] if inside[p] else float32(0)
                for i in unroll(KERNEL - 1):
                    total += inputs[p, i] * weights[p, i]
                for i in unroll(KERNEL - 2):
                    inputs[p, i] = inputs[p, i + 1]
                inputs[p, KERNEL - 2] = newest
                value[p] = total if GATED else silu(total)
                squares += value[p] * value[p]
            if NORMED:
                factor = float32(1) / math.sqrt(warp_sum(squares) + float32(1e-6))
                factor = factor * float32(PIECE**-0.5) if piece < QUERIES else factor
                factor = factor if piece < NORMED else float32(1)
                for p in unroll(PER_LANE):
                    value[p] *= factor
            for p in unroll(PER_LANE):
                if inside[p]:
                    if GATED:
                        value[p] *= element(x, token, int32(CHANNELS + channel[p]))
                    y[token * CHANNELS + channel[p]] = value[p]
        if first == 0:
            for p in unroll(PER_LANE):
                for i in range(KERNEL - 1):
                    if inside[p]:
                        kept = source(x, tail, int32(tokens - (KERNEL - 1) + i), channel[p])
                        tail[i * CHANNELS + channel[p]] = kept


def _pieces(c: RecurrentConfig) -> tuple[int, int]:
    """Channels of a warp, and how many warps' there are."""
    piece = c.key_dim if c.kind == DELTA else 32
    return piece, -(-c.channels // piece)


@recipe
def convolve_kernel(c: RecurrentConfig, dependent: bool = False) -> Kernel:
    """convolve(x, tail, weight, bias, y) of x f32 [n, inputs] -> y f32 [n, channels], and the tail changed.

    x     begins with the channels, or has b, c and x for a short convolution, whose end is y, too
    tail  f32 [kernel - 1, channels]; weight f32 [kernel, channels], the newest token's last
    bias  f32 [channels], that of Mamba and Mamba-2; ignored otherwise
    """
    piece, pieces = _pieces(c)
    sizes = {"CHANNELS": c.channels, "KERNEL": c.kernel, "GATED": c.kind == CONVOLUTION}
    name = f"{c.kind.replace('-', '')}_{c.channels}_{c.kernel}_{c.groups * c.key_dim}{'_dependent' * dependent}"
    groups = c.groups if c.kind == DELTA else 0
    function = expand(
        _convolve, name, **sizes, PIECE=piece, PER_LANE=-(-piece // 32), PIECES=pieces, QUERIES=groups,
        NORMED=2 * groups, WHOLE=piece % 32 == 0 and c.channels % piece == 0, BIASED=c.kind in (MAMBA, MAMBA1),
        TOKENS=_tokens(c), DEPENDENT=dependent, source=device_function(expand(_source, name, **sizes)),
    )  # fmt: skip
    arrays = ["float32[:,::1]", *["float32[::1]"] * 4]
    return Kernel(function, f"void({', '.join(arrays)})", _REGISTERS, dependent=dependent)


def _tokens(c: RecurrentConfig) -> int:
    """Tokens of a block: not fewer than a convolution looks back, so that only the first block reads the tail."""
    return max(_TOKENS, c.kernel - 1)


def convolve_grid(c: RecurrentConfig, n: int) -> tuple[tuple[int, int], int]:
    """Blocks and threads for n tokens."""
    return (-(-_pieces(c)[1] // _WARPS), -(-n // _tokens(c))), 32 * _WARPS

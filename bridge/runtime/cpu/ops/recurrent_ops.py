"""Layers with a state: what they do between their matrix products; C functions as those of decoder_ops.py.

    convolve   x[t, c] = sum over i < kernel of w[i, c] * in[t - kernel + 1 + i, c], + bias, silu where there is one
    recur      with q, k of a group of heads, and v of a head:
                   S   <- a S + k u^T           a: how much of the state stays
                   out  = S^T q
               u = dt v in Mamba-2 (Dao and Gu 2024, arXiv:2405.21060); in the gated delta net (Yang et al. 2024,
               arXiv:2412.06464) u = beta (v - a S^T k): what the state does not say of k already. In KDA (Kimi
               Linear, arXiv:2510.26692) a is a number for each row of S

    scan       Mamba (Gu and Dao 2023, arXiv:2312.00752): as Mamba-2 with heads of one value, but each row of a state
               has a measure of its own

A state's columns do not depend on each other. So a call takes 16 of them through some tokens of a batch: 8 KB for heads
of 128, which stay in the first cache. Token by token that takes 0.3 us for 16 columns: a sixth of a prompt's time in a
model of half a billion weights, and less in larger ones.

S is read once: out = a S^T q + (q . k) u.

A layer's arguments are a block of int64 words, named below: one for the tokens of a batch, or one for each token of a
step. There the first token of a sequence has a block for all of its tokens, and the others' have none for what goes
from token to token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.runtime.cpu.engines.floats import dot_function
from bridge.runtime.cpu.ops.decoder_ops import exp, square_sum
from bridge.system.kernels import ir
from bridge.system.kernels.jit import CFunction, c_function, cgutils, inner, intrinsic, maker, types
from bridge.system.kernels.memory import LANES, array_at, array_on_stack, floats, fma, spread

# words of a layer's block. Addresses; biases and what a kind of layer does not have may be 0
(IN, MIXED, Z, B, A, GATES, KEYS, OUT, TAIL, TAIL_OUT, TAIL_COPY, STATE, STATE_OUT, STATE_COPY,
 WEIGHT, BIAS, DECAY, DT_BIAS, SKIP, NORM,
 # bytes from one token to the next, of what is read
 IN_STRIDE, Z_STRIDE, GATE_STRIDE,
 # bytes from one group's keys to the next
 KEYS_STRIDE,
 # sizes
 TOKENS, COPY_AFTER, CHANNELS, KERNEL, SILU, HEADS, GROUPS, KEY_DIM, VALUE_DIM, Q_AT, K_AT, V_AT,
 # kinds: see `_gates` and `_recur`
 DELTA, TILED, RUN, EPS,
 # Mamba's, see `_split_steps`
 RANK, K_NORM, Q_NORM,
 # KDA's: a state decays by channel, and z's gate is a sigmoid
 BY_CHANNEL, BOUND,
 WORDS) = range(46)  # fmt: skip

CHANNELS_AT_ONCE = 512
TOKENS_AT_ONCE = 16  # whose keys and queries, 1 KB each for heads of 128, stay in the first cache with 16 columns
BLOCKS_AT_ONCE = 4  # of 16 columns
_PARTS = 4  # independent sums, to hide the latency of additions
_dot: Any = dot_function("F32")


def _vector() -> ir.VectorType:
    return ir.VectorType(ir.F32, LANES)


def _load(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """The float32, or vector of them, number `index` at an address."""
    is_vector = isinstance(kind, ir.VectorType)
    item = builder.add(address, builder.mul(index, ir.I64(LANES * 4 if is_vector else 4)))
    value = builder.load(builder.inttoptr(item, kind.as_pointer()), align=4)
    return value if is_vector else spread(builder, value, _vector())


@intrinsic
def read(typingctx, state, q, k, count, of_q, of_k):
    """of_q[:] = sum over i < count of q[i] * state[i, :], of_k the same with k; rows of 16 float32, all addresses."""

    def emit(context, builder, signature, arguments):
        state, q, k, count, of_q, of_k = arguments
        zero = ir.Constant(_vector(), [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(_PARTS)]

        def row(index, totals):
            values = _load(builder, state, index, _vector())
            for total, factors in zip(totals, (q, k), strict=True):
                factor = _load(builder, factors, index, ir.F32)
                builder.store(fma(builder, factor, values, builder.load(total)), total)

        turns = builder.udiv(count, ir.I64(_PARTS))
        with cgutils.for_range(builder, turns) as loop:
            first = builder.mul(loop.index, ir.I64(_PARTS))
            for p, totals in enumerate(sums):
                row(builder.add(first, ir.I64(p)), totals)
        with cgutils.for_range_slice(builder, builder.mul(turns, ir.I64(_PARTS)), count, ir.I64(1), inc=True) as (i, _):
            row(i, sums[0])
        for out, parts in zip((of_q, of_k), zip(*sums, strict=True), strict=True):
            total = builder.load(parts[0])
            for other in parts[1:]:
                total = builder.fadd(total, builder.load(other))
            builder.store(total, builder.inttoptr(out, _vector().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


@intrinsic
def write(typingctx, state, decay, k, u, count):
    """state[i, :] = decay * state[i, :] + k[i] * u[:] for i < count; rows of 16 float32, all but `decay` addresses."""

    def emit(context, builder, signature, arguments):
        state, decay, k, u, count = arguments
        factor = spread(builder, decay, _vector())
        added = builder.load(builder.inttoptr(u, _vector().as_pointer()), align=4)
        with cgutils.for_range(builder, count) as loop:
            values = builder.fmul(_load(builder, state, loop.index, _vector()), factor)
            changed = fma(builder, _load(builder, k, loop.index, ir.F32), added, values)
            row = builder.add(state, builder.mul(loop.index, ir.I64(4 * LANES)))
            builder.store(changed, builder.inttoptr(row, _vector().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), emit


@intrinsic
def write_by_channel(typingctx, state, decays, k, u, count):
    """state[i, :] = decays[i] * state[i, :] + k[i] * u[:] for i < count; rows of 16 float32, all addresses."""

    def emit(context, builder, signature, arguments):
        state, decays, k, u, count = arguments
        added = builder.load(builder.inttoptr(u, _vector().as_pointer()), align=4)
        with cgutils.for_range(builder, count) as loop:
            factor = _load(builder, decays, loop.index, ir.F32)
            values = builder.fmul(_load(builder, state, loop.index, _vector()), factor)
            changed = fma(builder, _load(builder, k, loop.index, ir.F32), added, values)
            row = builder.add(state, builder.mul(loop.index, ir.I64(4 * LANES)))
            builder.store(changed, builder.inttoptr(row, _vector().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@inner
def _block_of(blocks, item, count):
    """The block of an item, and its token: there are `count` blocks, one for each item, or one for all."""
    if count > 1:
        return blocks + 8 * WORDS * item, 0
    return blocks, item


def _multiply(x, x_stride, y, y_stride, size, _0, _1, first, last):
    """x *= y for rows first..last of `size` float32; strides in bytes."""
    for t in range(first, last):
        values = floats(x + x_stride * t, size)
        factors = floats(y + y_stride * t, size)
        for i in range(size):
            values[i] *= factors[i]


def _convolve(blocks, count, parts, _0, _1, _2, _3, first, last):
    """MIXED [tokens, channels] from IN and TAIL, for items of 16 tokens and 512 channels.

    There are `parts` items of channels for each item of tokens; `count` blocks have one of these each.
    """
    for item in range(first, last):
        block, t0 = _block_of(blocks, item // parts, count)
        p = array_at(block, WORDS, np.int64)
        channels, kernel = p[CHANNELS], p[KERNEL]
        start = item % parts * CHANNELS_AT_ONCE
        size = min(CHANNELS_AT_ONCE, channels - start)
        before = kernel - 1
        tail = p[TAIL] + 4 * start
        for t in range(t0 * TOKENS_AT_ONCE, min(p[TOKENS], (t0 + 1) * TOKENS_AT_ONCE)):
            x = floats(p[MIXED] + 4 * (channels * t + start), size)
            if p[BIAS]:
                bias = floats(p[BIAS] + 4 * start, size)
                for c in range(size):
                    x[c] = bias[c]
            else:
                for c in range(size):
                    x[c] = 0
            for i in range(kernel):
                back = t - before + i
                source = p[IN] + p[IN_STRIDE] * back + 4 * start if back >= 0 else tail + 4 * channels * (back + before)
                values = floats(source, size)
                w = floats(p[WEIGHT] + 4 * (channels * i + start), size)
                for c in range(size):
                    x[c] += w[c] * values[c]
            if p[SILU]:
                for c in range(size):
                    x[c] = x[c] / (np.float32(1) + exp(-x[c]))


def _keep_tail(blocks, _0, _1, _2, _3, _4, _5, first, last):
    """TAIL_OUT, and where there is one TAIL_COPY, from TAIL and IN, for blocks first..last, when all is convolved."""
    for item in range(first, last):
        p = array_at(blocks + 8 * WORDS * item, WORDS, np.int64)
        if p[COPY_AFTER]:
            _tail_at(p, p[TAIL_COPY], p[COPY_AFTER])
        if p[TOKENS]:
            _tail_at(p, p[TAIL_OUT], p[TOKENS])


@inner
def _tail_at(p, out, after):
    """out = the rows of TAIL and IN that the convolution of token `after` looks back at; out may be TAIL."""
    channels, before = p[CHANNELS], p[KERNEL] - 1
    for i in range(before):
        back = after - before + i
        values = floats(
            p[IN] + p[IN_STRIDE] * back if back >= 0 else p[TAIL] + 4 * channels * (back + before), channels
        )
        row = floats(out + 4 * channels * i, channels)
        for c in range(channels):
            row[c] = values[c]


@inner
def _softplus(x):
    """ln(1 + e^x); x itself where e^x is beyond float32's precision."""
    return x if x > np.float32(20) else np.float32(np.log1p(np.exp(np.float64(x))))


def _gates(blocks, count, _0, _1, _2, _3, _4, first, last):
    """GATES [tokens, heads, 2]: how much of a state stays, and the factor of what comes. KEYS: q and k, together.

    Delta net: exp(a softplus(alpha + dt_bias)) and sigmoid(beta); q and k are normalized, q scaled.
    Mamba-2: exp(a dt) and dt = softplus(dt + dt_bias).
    B, A: beta and alpha, or dt twice; RUN heads of each follow one another, with as many bytes between as they have.
    """
    for item in range(first, last):
        block, t = _block_of(blocks, item, count)
        p = array_at(block, WORDS, np.int64)
        heads, d = p[HEADS], p[KEY_DIM]
        decay, bias = floats(p[DECAY], heads), floats(p[DT_BIAS], heads)
        gates = floats(p[GATES] + 8 * heads * t, 2 * heads)
        for h in range(heads):
            index = h // p[RUN] * 2 * p[RUN] + h % p[RUN]
            step = _softplus(floats(p[A] + p[GATE_STRIDE] * t + 4 * index, 1)[0] + bias[h])
            gates[2 * h] = exp(decay[h] * step)
            if p[DELTA]:
                beta = floats(p[B] + p[GATE_STRIDE] * t + 4 * index, 1)[0]
                gates[2 * h + 1] = np.float32(1) / (np.float32(1) + exp(-beta))
            else:
                gates[2 * h + 1] = step
        row = p[MIXED] + 4 * p[CHANNELS] * t
        for g in range(p[GROUPS]):
            keys = p[KEYS] + p[KEYS_STRIDE] * g + 8 * d * t
            _copied(floats(row + p[Q_AT] + 4 * d * g, d), floats(keys, d), 1.0 / np.sqrt(np.float64(d)), p[DELTA])
            _copied(floats(row + p[K_AT] + 4 * d * g, d), floats(keys + 4 * d, d), 1.0, p[DELTA])


def _gates_by_channel(blocks, count, _0, _1, _2, _3, _4, first, last):
    """KDA: A [tokens, heads, key_dim] becomes how much of each row of a state stays, exp(a softplus(A + dt_bias)), or
    with a BOUND (below 0) exp(BOUND sigmoid(a (A + dt_bias))).

    GATES [tokens, heads, 2]: one, and sigmoid(beta). KEYS: q and k, normalized, and both times A.
    """
    for item in range(first, last):
        block, t = _block_of(blocks, item, count)
        p = array_at(block, WORDS, np.int64)
        heads, d, bound = p[HEADS], p[KEY_DIM], np.float32(array_at(block, WORDS, np.float64)[BOUND])
        decay, betas = floats(p[DECAY], heads), floats(p[B] + 4 * heads * t, heads)
        gates = floats(p[GATES] + 8 * heads * t, 2 * heads)
        row = p[MIXED] + 4 * p[CHANNELS] * t
        for h in range(heads):
            gates[2 * h] = 1
            gates[2 * h + 1] = np.float32(1) / (np.float32(1) + exp(-betas[h]))
            stays = floats(p[A] + p[GATE_STRIDE] * t + 4 * d * h, d)
            bias = floats(p[DT_BIAS] + 4 * d * h, d)
            for i in range(d):
                step = stays[i] + bias[i]
                if bound < np.float32(0):
                    stays[i] = exp(bound / (np.float32(1) + exp(-decay[h] * step)))
                else:
                    stays[i] = exp(decay[h] * _softplus(step))
            keys = p[KEYS] + p[KEYS_STRIDE] * h + 16 * d * t
            _copied(floats(row + p[Q_AT] + 4 * d * h, d), floats(keys, d), 1.0 / np.sqrt(np.float64(d)), 1)
            _copied(floats(row + p[K_AT] + 4 * d * h, d), floats(keys + 4 * d, d), 1.0, 1)
            both, decayed = floats(keys, 2 * d), floats(keys + 8 * d, 2 * d)
            for i in range(d):
                decayed[i] = both[i] * stays[i]
                decayed[d + i] = both[d + i] * stays[i]


def _put(x, x_stride, y, y_stride, size, _0, _1, first, last):
    """y = x for rows first..last of `size` float32; strides in bytes."""
    for t in range(first, last):
        _move(x + x_stride * t, y + y_stride * t, size)


@inner
def _copied(x, y, length, normalized):
    """y = x, or x brought to a length."""
    factor = np.float32(1)
    if normalized:
        factor = np.float32(length / np.sqrt(square_sum(x) + 1e-6))
    for i in range(x.size):
        y[i] = x[i] * factor


def _recur(blocks, count, parts, _0, _1, _2, _3, first, last):
    """OUT [tokens, heads, value_dim] from MIXED, KEYS, GATES and STATE, for items of 64 columns of a head; STATE_OUT.

    There are heads * `parts` items for each of `count` blocks.
    """
    for item in range(first, last):
        heads = array_at(blocks, WORDS, np.int64)[HEADS]
        p = array_at(blocks + 8 * WORDS * (item // (heads * parts)), WORDS, np.int64)
        h = item // parts % heads
        columns = (p[VALUE_DIM] + LANES - 1) // LANES
        start = item % parts * BLOCKS_AT_ONCE
        for t in range(0, p[TOKENS], TOKENS_AT_ONCE):
            for j in range(start, min(columns, start + BLOCKS_AT_ONCE)):
                _recur_columns(p, h, columns, j, t, min(p[TOKENS], t + TOKENS_AT_ONCE))


@inner
def _recur_columns(p, h, columns, j, first, last):
    """Tokens first..last in block j of `columns` of head h."""
    of_q = array_on_stack(16, np.float32)
    of_k = array_on_stack(16, np.float32)
    u = array_on_stack(16, np.float32)
    heads, d, width = p[HEADS], p[KEY_DIM], p[VALUE_DIM]
    size = min(LANES, width - LANES * j)
    group = h % p[GROUPS] if p[TILED] else h // (heads // p[GROUPS])
    offset = 4 * LANES * d * (h * columns + j)
    state = p[STATE_OUT] + offset
    if first == 0 and p[STATE_OUT] != p[STATE]:
        _move(p[STATE] + offset, state, LANES * d)
    for i in range(LANES):
        u[i] = 0
    decayed = 8 * d if p[BY_CHANNEL] else 0  # from q and k to those times the decay of each channel
    for t in range(first, last):
        q = p[KEYS] + p[KEYS_STRIDE] * group + (8 * d + decayed) * t
        k = q + 4 * d
        v = floats(p[MIXED] + 4 * p[CHANNELS] * t + p[V_AT] + 4 * (width * h + LANES * j), size)
        gate = floats(p[GATES] + 8 * (heads * t + h), 2)
        decay, factor = gate[0], gate[1]
        read(state, q + decayed, k + decayed, d, of_q.ctypes.data, of_k.ctypes.data)
        for i in range(size):
            u[i] = factor * (v[i] - decay * of_k[i]) if p[DELTA] else factor * v[i]
        both = _dot(q, k, d)
        out = floats(p[OUT] + 4 * (width * (heads * t + h) + LANES * j), size)
        for i in range(size):
            out[i] = decay * of_q[i] + both * u[i]
        if p[BY_CHANNEL]:
            write_by_channel(state, p[A] + p[GATE_STRIDE] * t + 4 * d * h, k, u.ctypes.data, d)
        else:
            write(state, decay, k, u.ctypes.data, d)
        if t + 1 == p[COPY_AFTER]:
            _move(state, p[STATE_COPY] + offset, LANES * d)


@inner
def _move(source, target, count):
    """`count` float32 from one address to another."""
    values, copy = floats(source, count), floats(target, count)
    for i in range(count):
        copy[i] = values[i]


def _split_steps(blocks, count, _0, _1, _2, _3, _4, first, last):
    """GATES [tokens, rank] and KEYS of B [tokens, rank + 2 key_dim]: steps, keys and queries, normalized."""
    for item in range(first, last):
        block, t = _block_of(blocks, item, count)
        p = array_at(block, WORDS, np.int64)
        eps = array_at(block, WORDS, np.float64)[EPS]
        rank, d = p[RANK], p[KEY_DIM]
        row = p[B] + 4 * (rank + 2 * d) * t
        keys = p[KEYS] + 8 * d * t
        _normed(floats(row, rank), floats(p[NORM], rank), eps, floats(p[GATES] + 4 * rank * t, rank))
        _normed(floats(row + 4 * rank, d), floats(p[K_NORM], d), eps, floats(keys + 4 * d, d))
        _normed(floats(row + 4 * (rank + d), d), floats(p[Q_NORM], d), eps, floats(keys, d))


@inner
def _normed(x, weight, eps, y):
    size = np.float32(1.0 / np.sqrt(square_sum(x) / x.size + eps))
    for i in range(x.size):
        y[i] = x[i] * size * weight[i]


def _scan(blocks, count, parts, _0, _1, _2, _3, first, last):
    """OUT [tokens, values] = (S q + D x) silu(z), with x in MIXED and steps in A; items and states as `_recur` has."""
    for item in range(first, last):
        p = array_at(blocks + 8 * WORDS * (item // parts), WORDS, np.int64)
        columns = (p[VALUE_DIM] + LANES - 1) // LANES
        start = item % parts * BLOCKS_AT_ONCE
        for j in range(start, min(columns, start + BLOCKS_AT_ONCE)):
            _scan_columns(p, j)


@inner
def _scan_columns(p, j):
    """All tokens in block j."""
    step = array_on_stack(16, np.float32)
    u = array_on_stack(16, np.float32)
    y = array_on_stack(16, np.float32)
    d, width = p[KEY_DIM], p[VALUE_DIM]
    size, offset = min(LANES, width - LANES * j), 4 * LANES * j
    state_out = p[STATE_OUT] + offset * d
    if p[TOKENS] and p[STATE_OUT] != p[STATE]:
        _move(p[STATE] + offset * d, state_out, LANES * d)
    state = floats(state_out, LANES * d)
    decay = floats(p[DECAY] + offset * d, LANES * d)
    bias, skip = floats(p[DT_BIAS] + offset, size), floats(p[SKIP] + offset, size)
    for i in range(LANES):
        step[i], u[i] = 0, 0
    for t in range(p[TOKENS]):
        steps = floats(p[A] + 4 * width * t + offset, size)
        x = floats(p[MIXED] + 4 * width * t + offset, size)
        q = floats(p[KEYS] + 8 * d * t, d)
        k = floats(p[KEYS] + 8 * d * t + 4 * d, d)
        for i in range(size):
            step[i] = _softplus(steps[i] + bias[i])
            u[i] = step[i] * x[i]
        for i in range(LANES):
            y[i] = 0
        for r in range(d):
            row, rates = state[LANES * r : LANES * (r + 1)], decay[LANES * r : LANES * (r + 1)]
            for i in range(LANES):
                row[i] = exp(step[i] * rates[i]) * row[i] + k[r] * u[i]
                y[i] += q[r] * row[i]
        z = floats(p[Z] + p[Z_STRIDE] * t + offset, size)
        out = floats(p[OUT] + 4 * width * t + offset, size)
        for i in range(size):
            out[i] = (y[i] + skip[i] * x[i]) * z[i] / (np.float32(1) + exp(-z[i]))
        if t + 1 == p[COPY_AFTER]:
            _move(state_out, p[STATE_COPY] + offset * d, LANES * d)


def _gated_norm(blocks, count, _0, _1, _2, _3, _4, first, last):
    """The delta net's end: each head of OUT normalized, weighted, times silu(z); KDA's times sigmoid(z)."""
    for item in range(first, last):
        block, t = _block_of(blocks, item, count)
        p = array_at(block, WORDS, np.int64)
        d = p[VALUE_DIM]
        eps = array_at(block, WORDS, np.float64)[EPS]
        weight = floats(p[NORM], d)
        for h in range(p[HEADS]):
            out = floats(p[OUT] + 4 * d * (p[HEADS] * t + h), d)
            z = floats(p[Z] + p[Z_STRIDE] * t + 4 * d * h, d)
            size = np.float32(1.0 / np.sqrt(square_sum(out) / d + eps))
            for i in range(d):
                factor = np.float32(1) if p[BY_CHANNEL] else z[i]
                out[i] = out[i] * size * weight[i] * factor / (np.float32(1) + exp(-z[i]))


def _norm_of_gated(blocks, count, _0, _1, _2, _3, _4, first, last):
    """Mamba-2's end: OUT plus its input times SKIP, times silu(z), normalized by groups if there is a NORM."""
    for item in range(first, last):
        block, t = _block_of(blocks, item, count)
        p = array_at(block, WORDS, np.int64)
        heads, d = p[HEADS], p[VALUE_DIM]
        eps = array_at(block, WORDS, np.float64)[EPS]
        out = p[OUT] + 4 * heads * d * t
        skip = floats(p[SKIP], heads)
        for h in range(heads):
            y = floats(out + 4 * d * h, d)
            x = floats(p[MIXED] + 4 * p[CHANNELS] * t + p[V_AT] + 4 * d * h, d)
            z = floats(p[Z] + p[Z_STRIDE] * t + 4 * d * h, d)
            share = skip[h]
            for i in range(d):
                y[i] = (y[i] + share * x[i]) * z[i] / (np.float32(1) + exp(-z[i]))
        width = heads * d // p[GROUPS]
        for g in range(p[GROUPS] if p[NORM] else 0):
            y = floats(out + 4 * width * g, width)
            weight = floats(p[NORM] + 4 * width * g, width)
            size = np.float32(1.0 / np.sqrt(square_sum(y) / width + eps))
            for i in range(width):
                y[i] = y[i] * size * weight[i]


FUNCTIONS: dict[str, Any] = {
    "multiply": _multiply, "convolve": _convolve, "keep_tail": _keep_tail, "gates": _gates, "recur": _recur,
    "gates_by_channel": _gates_by_channel, "put": _put, "split_steps": _split_steps, "scan": _scan,
    "gated_norm": _gated_norm, "norm_of_gated": _norm_of_gated,
}  # fmt: skip


@maker
def function(name: str) -> CFunction:
    """One of FUNCTIONS as a C function."""
    return c_function(FUNCTIONS[name])

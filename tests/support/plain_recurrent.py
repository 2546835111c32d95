"""Layers with a state token by token and head by head, in float64, and random layers to try it with."""

from __future__ import annotations

import numpy as np

from bridge.gguf_file.architectures import CONVOLUTION, DELTA, KDA, MAMBA, MAMBA1
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.layers.layers import Recurrent
from bridge.runtime.quant_tensor import QuantTensor

SHAPES = {
    "a short convolution": RecurrentConfig(CONVOLUTION, (True,), 3, 80),
    "a delta net": RecurrentConfig(DELTA, (True,), 4, 2 * 2 * 10 + 4 * 24, 4, 2, 10, 24, tiled=True),
    "a delta net, joined": RecurrentConfig(DELTA, (True,), 2, 2 * 2 * 16 + 4 * 8, 4, 2, 16, 8, joined=True),
    "Mamba-2": RecurrentConfig(MAMBA, (True,), 4, 2 * 2 * 10 + 6 * 20, 6, 2, 10, 20),
    "Mamba-2, large heads": RecurrentConfig(MAMBA, (True,), 4, 2 * 32 + 2 * 64, 2, 1, 32, 64),
}

# with matrices that read what others made
DEEPER = {
    "delta attention": RecurrentConfig(KDA, (True,), 3, 3 * 2 * 24, 2, 2, 24, 24),
    "delta attention of bounded decays": RecurrentConfig(
        KDA, (True,), 3, 3 * 2 * 24, 2, 2, 24, 24, full_gate="ssm_g", least=-5.0
    ),
    "delta attention of full rank": RecurrentConfig(
        KDA, (True,), 4, 3 * 3 * 10, 3, 3, 10, 10, full_decay="ssm_f_a", full_gate="ssm_g_a", least=-2.0
    ),
}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def plain_layer(c: RecurrentConfig, layer: Recurrent, inputs: list[np.ndarray], eps: float) -> np.ndarray:
    """What a layer gives its output matrix for the results of its input matrices, from an empty state."""
    first = inputs[0].astype(np.float64)
    if c.kind == CONVOLUTION:
        b, gate, x = np.split(first, 3, 1)
        x = b * x
    elif c.kind == DELTA:
        x = first
    elif c.kind == KDA:
        x = np.concatenate([array.astype(np.float64) for array in inputs[:3]], 1)
    elif c.kind == MAMBA1:
        x, z = np.split(first, 2, 1)
    else:
        z, x, dt = np.split(first, [c.values, c.values + c.channels], 1)
    padded = np.concatenate([np.zeros((c.kernel - 1, c.channels)), x])
    x = sum(padded[i : i + len(x)] * layer.convolution[i] for i in range(c.kernel))
    if c.kind == CONVOLUTION:
        return gate * x
    if c.kind == MAMBA1:
        return _plain_mamba1(c, layer, silu(x + layer.convolution_bias), z, eps)
    keys = c.groups * c.key_dim
    if c.kind == KDA:
        return _plain_kda(c, layer, silu(x), inputs[3:], eps)
    if c.kind == DELTA:
        x = silu(x)
        q, k, v = np.split(x, [keys, 2 * keys], 1)
        z, *gates = (array.astype(np.float64) for array in inputs[1:])
        if c.joined:
            gates = np.split(gates[0].reshape(len(x), c.groups, -1), 2, 2)
        beta, dt = (gate.reshape(len(x), c.heads) for gate in gates)
    else:
        v, k, q = np.split(silu(x + layer.convolution_bias), [c.values, c.values + keys], 1)
    step = np.log1p(np.exp(dt + layer.dt_bias))
    rows = []
    state = np.zeros((c.heads, c.key_dim, c.value_dim))
    for t in range(len(x)):
        row = []
        for h in range(c.heads):
            group = h % c.groups if c.tiled else h // (c.heads // c.groups)
            q_t, k_t = (array[t].reshape(c.groups, -1)[group] for array in (q, k))
            v_t = v[t].reshape(c.heads, -1)[h]
            state[h] *= np.exp(layer.decay[h] * step[t, h])
            if c.kind == DELTA:
                q_t, k_t = (array / np.sqrt(array @ array + 1e-6) for array in (q_t / 1, k_t))
                u = (v_t - k_t @ state[h]) / (1 + np.exp(-beta[t, h]))
                q_t = q_t / np.sqrt(c.key_dim)
            else:
                u = step[t, h] * v_t
            state[h] += np.outer(k_t, u)
            row.append(q_t @ state[h] + (0 if c.kind == DELTA else layer.skip[h] * v_t))
        rows.append(np.concatenate(row))
    y = np.array(rows)
    parts = c.heads if c.kind == DELTA else c.groups
    y = y if c.kind == DELTA else y * silu(z)
    if layer.norm is None:
        return y
    weight = layer.norm if c.kind == DELTA else layer.norm.reshape(parts, -1)
    y = _normed(y.reshape(len(y), parts, -1), weight, eps).reshape(y.shape)
    return y * silu(z) if c.kind == DELTA else y


def _plain_kda(
    c: RecurrentConfig, layer: Recurrent, x: np.ndarray, inputs: list[np.ndarray], eps: float
) -> np.ndarray:  # fmt: skip
    step, beta, z = (array.astype(np.float64) for array in inputs)
    second = [matrix.dequantize().astype(np.float64).T for matrix in layer.second]
    step = (step if c.full_decay else step @ second[0]) + layer.dt_bias
    z = z if c.full_gate else z @ second[-1]
    step = step.reshape(len(x), c.heads, -1)
    rates = layer.decay[:, None]
    decays = np.exp(c.least / (1 + np.exp(rates * step)) if c.least else rates * np.log1p(np.exp(step)))
    state, rows = np.zeros((c.heads, c.key_dim, c.value_dim)), []
    for t, row in enumerate(x.reshape(len(x), 3, c.heads, -1)):
        for h, (q, k, v) in enumerate(row.transpose(1, 0, 2)):
            q, k = (array / np.sqrt(array @ array + 1e-6) for array in (q, k))
            state[h] *= decays[t, h][:, None]
            state[h] += np.outer(k, (v - k @ state[h]) / (1 + np.exp(-beta[t, h])))
            rows.append(_normed(q @ state[h] / np.sqrt(c.key_dim), layer.norm, eps))
    return np.array(rows).reshape(len(x), -1) / (1 + np.exp(-z))


def _plain_mamba1(c: RecurrentConfig, layer: Recurrent, x: np.ndarray, z: np.ndarray, eps: float) -> np.ndarray:
    into, out = (matrix.dequantize().astype(np.float64) for matrix in layer.second)
    dt, k, q = np.split(x @ into.T, [c.rank, c.rank + c.key_dim], 1)
    dt, k, q = (_normed(part, weight, eps) for part, weight in zip((dt, k, q), layer.norms, strict=True))
    step = np.log1p(np.exp(dt @ out.T + layer.dt_bias))
    decay = layer.decay.transpose(0, 2, 1).reshape(-1, c.key_dim)[: c.values]
    state = np.zeros((c.values, c.key_dim))
    rows = []
    for t in range(len(x)):
        state = np.exp(decay * step[t][:, None]) * state + np.outer(step[t] * x[t], k[t])
        rows.append((state @ q[t] + layer.skip * x[t]) * silu(z[t]))
    return np.array(rows)


def random_layer(c: RecurrentConfig, n: int) -> tuple[Recurrent, list[np.ndarray]]:
    """A layer, and what its input matrices give for n tokens."""
    rng = np.random.default_rng(3)

    def draw(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32)

    def matrix(rows: int, columns: int) -> QuantTensor:
        values = draw(rows, columns) / np.float32(columns**0.5)
        return QuantTensor("w", "F32", (rows, columns), values.reshape(-1).view(np.uint8))

    bias = draw(c.channels) if c.kind in (MAMBA, MAMBA1) else None
    if c.kind == MAMBA1:
        layer = Recurrent(
            (), None, draw(c.kernel, c.channels), bias, -np.exp(draw(-(-c.values // 16), c.key_dim, 16)),
            draw(c.values), draw(c.values), second=(matrix(c.rank + 2 * c.key_dim, c.values), matrix(c.values, c.rank)),
            norms=(draw(c.rank), draw(c.key_dim), draw(c.key_dim)),
        )  # fmt: skip
    elif c.kind == KDA:
        layer = Recurrent(
            (), None, draw(c.kernel, c.channels), None, -np.exp(draw(c.heads)), draw(c.values), norm=draw(c.value_dim),
            second=tuple(matrix(c.values, c.key_dim) for _ in c.second),
        )  # fmt: skip
    else:
        layer = Recurrent(
            (), None, draw(c.kernel, c.channels), bias, -np.exp(draw(c.heads)), draw(c.heads), draw(c.heads),
            draw(c.values if c.kind == MAMBA else c.value_dim),
        )  # fmt: skip
    return layer, [draw(n, rows) for rows in c.inputs.values()]

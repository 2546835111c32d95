"""A decoder in plain NumPy: what the verbs mean, for every architecture, in float32 without rounding anything.

Slow, and made to be read: what other machines compute is held against it.

    machine = NumpyMachine(read_weights(file, config), config)
    logits = machine.logits(machine.read(tokens))
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.gguf_file.architectures import CONVOLUTION, DELTA, KDA, MAMBA, MAMBA1
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.decoder.experts import ACTIVATIONS, activation, mix
from bridge.runtime.decoder.machine import Linear
from bridge.runtime.decoder.walk import embed, walk
from bridge.runtime.layers.layers import Experts, Layer, LayerStreams, Recurrent, Weights
from bridge.runtime.quant_tensor import QuantTensor

_LEAST = 1e-5  # of the mean square that lengths are divided by
_UNIT = 1e-6  # added to the square of a length that becomes one


class NumpyMachine:
    """Reads tokens one after another in one context; keys, values and states grow with them."""

    def __init__(self, weights: Weights, config: DecoderConfig, context: int = 0):
        """`context`: tokens that may come, as LongRoPE wants to know."""
        self.weights, self.config, self.length = weights, config, 0
        self._factors = weights.factors(context, config.rope_original_context)
        self._tokens: Sequence[int] = ()
        self._dense: dict[int, np.ndarray] = {}
        self._stored: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # keys and values [tokens, heads, size] of a slot
        self._tails: dict[
            int, np.ndarray
        ] = {}  # of a layer: the last inputs of its convolution, [kernel - 1, channels]
        self._states: dict[int, np.ndarray] = {}  # [heads, key_dim, value_dim]; Mamba's [values, key_dim]

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """The normalized states of the next tokens, [n, hidden]."""
        self._tokens = tokens
        states: np.ndarray = walk(self, self.weights, self.config, embed(self, self.weights, self.config))
        self.length += len(tokens)
        return states

    def logits(self, states: np.ndarray) -> np.ndarray:
        """[n, vocab] of normalized states."""
        (scores,) = self.products(states, scores=(self.weights.output, self.weights.output_bias))
        cap = self.config.logit_cap
        return cap * np.tanh(scores / cap) if cap else scores

    @property
    def _positions(self) -> np.ndarray:
        return np.arange(self.length, self.length + len(self._tokens))

    def _matrix(self, matrix: QuantTensor) -> np.ndarray:
        if id(matrix) not in self._dense:
            self._dense[id(matrix)] = matrix.dequantize()
        return self._dense[id(matrix)]

    def _product(self, matrix: QuantTensor, x: np.ndarray) -> np.ndarray:
        return x @ self._matrix(matrix).T

    # verbs

    def look_up(self, table: QuantTensor, name: str) -> np.ndarray:
        return self._matrix(table)[list(self._tokens)]

    def add_positions(self, x: np.ndarray, table: np.ndarray) -> None:
        x += table[self._positions]

    def products(self, x: np.ndarray, **linears: Linear) -> list[Any]:
        return [
            None if matrix is None else self._product(matrix, x) + (0 if bias is None else bias)
            for matrix, bias in linears.values()
        ]

    def gated(self, x: np.ndarray, gate: Linear, up: Linear, index: int) -> np.ndarray:
        c = self.config
        gates, ups = self.products(x, gate=gate, up=up)
        if c.sparsity and math.isfinite(c.sparsity[index]):
            gates = np.maximum(0, gates - (gates.mean(1) + c.sparsity[index] * gates.std(1))[:, None])
        if c.xielu:
            below, above, share, most = c.xielu[index]
            bent = below * (np.expm1(np.minimum(gates, most)) - gates)
            return np.where(gates > 0, above * gates * gates, bent) + share * gates
        return activation(c, c.limits_of(index)[1])(gates, np.float32(1) if ups is None else ups)

    def gelu_times(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return ACTIVATIONS["gelu"](gate, up)

    def norm(
        self, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None = None, added: np.ndarray | None = None
    ) -> np.ndarray:
        if added is not None:
            x += np.float32(self.config.residual_scale) * added
        if weight is None:
            return x.copy()
        if self.config.graph.layer_norm:
            return rms(x - x.mean(1, keepdims=True), weight, self.config.norm_eps) + (0 if bias is None else bias)
        return rms(x, weight, self.config.norm_eps)

    def normalize(
        self, x: np.ndarray, weight: np.ndarray | None, name: str = "", eps: float = 0.0
    ) -> np.ndarray:  # fmt: skip
        if weight is None:
            return x
        out = rms(x.reshape(len(x), -1, weight.size), weight, eps or self.config.norm_eps).reshape(x.shape)
        if name:
            return out
        x[:] = out
        return x

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        x += y

    def scale(self, x: np.ndarray, factor: float) -> None:
        x *= np.float32(factor)

    def copy(self, x: np.ndarray, name: str) -> np.ndarray:
        return x.copy()

    def blend(self, states: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
        stack = np.stack(states, 1)
        scores = rms(stack, weight, self.config.norm_eps).sum(2)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        return np.einsum("ns,nsw->nw", shares / shares.sum(1, keepdims=True), stack)

    def split_gate(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        both = q.reshape(len(q), self.config.heads, 2, -1)
        return both[:, :, 0].reshape(len(q), -1), both[:, :, 1].reshape(len(q), -1)

    def gate_heads(self, x: np.ndarray, gate: np.ndarray, heads: int) -> None:
        factors = np.logaddexp(0, gate) if self.config.graph.softplus else _sigmoid(gate)
        x[:] = (x.reshape(len(x), heads, -1) * factors.reshape(len(x), heads, -1)).reshape(x.shape)

    def fit_heads(self, x: np.ndarray, heads: int, size: int, name: str) -> np.ndarray:
        each = x.reshape(len(x), heads, -1)
        fitted = np.zeros((len(x), heads, size), np.float32)
        fitted[:, :, : each.shape[2]] = each[:, :, :size]
        return fitted.reshape(len(x), -1)

    def attend(self, layer: Layer, index: int, q: np.ndarray, k: np.ndarray | None, v: np.ndarray | None) -> np.ndarray:
        c, heads, n = self.config, self.config.heads_of(index), len(q)
        queries = q.reshape(n, c.query_heads_of(index), -1)
        if c.latent is not None and layer.latent_k is not None and k is not None:
            queries = self._turned(queries, None, index, c.latent.plain)
            plain, turned = queries[:, :, : c.latent.plain], queries[:, :, c.latent.plain :]
            absorbed = np.einsum("nhp,hrp->nhr", plain, self._matrix(layer.latent_k))
            queries = np.concatenate([absorbed, turned], axis=2)
            k = np.concatenate([rms(k[:, : c.latent.rank], layer.k_norm, c.norm_eps), k[:, c.latent.rank :]], axis=1)
            keys = self._turned(k[:, None], None, index, c.latent.rank)
            made = keys, keys[:, :, : c.latent.rank]
        else:
            queries = self._turned(queries, layer.q_norm, index)
            if k is not None and v is not None:
                made = self._turned(k.reshape(n, heads.kv, -1), layer.k_norm, index), v.reshape(n, heads.kv, -1)
        if k is not None:
            before = self._stored.get(c.stored[index], tuple(part[:0] for part in made))
            keys, values = (np.concatenate(pair) for pair in zip(before, made, strict=True))
            self._stored[c.stored[index]] = keys, values
        out = self._attended(queries, *self._stored[c.stored[index]], layer, index)
        if layer.latent_v is not None:
            out = np.einsum("nhr,hvr->nhv", out, self._matrix(layer.latent_v))
        return out.reshape(n, -1)

    def _turned(self, x: np.ndarray, norm: np.ndarray | None, index: int, first: int = 0) -> np.ndarray:
        """x [n, heads, size] normalized head by head, and turned from element `first` on."""
        c, rotated = self.config, self.config.heads_of(index).rotated
        norm = None if c.graph.normed_together else norm
        if norm is not None and not c.graph.norms_rotated:
            x = rms(x, norm, c.norm_eps)
        if rotated:
            angles = c.local_angles if c.windowed(index) else c.angles
            cos, sin = (part[:, None] for part in angles(self._positions[-1] + 1, self._factors, self.length))
            x = turned(x, cos, sin, c.graph.neighbours, first)
        return rms(x, norm, c.norm_eps) if norm is not None and c.graph.norms_rotated else x

    def _attended(
        self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, layer: Layer, index: int
    ) -> np.ndarray:
        """softmax(scale q k^T) v, [n, heads, size of a value]."""
        c, positions = self.config, self._positions
        count = queries.shape[1]
        share = count // keys.shape[1]
        scores = np.float32(c.attention_scale) * np.einsum("nhd,phd->nhp", queries, np.repeat(keys, share, 1))
        temperatures = c.temperatures(positions[-1] + 1) if c.tempered(index) else None
        if temperatures is not None:
            scores *= temperatures[positions][:, None, None]
        if c.score_cap:
            scores = c.score_cap * np.tanh(scores / c.score_cap)
        places = np.arange(len(keys))
        if c.slopes is not None:
            scores -= c.slopes[:, None] * np.abs(positions[:, None] - places)[:, None]
        window, ahead = c.reach(index)
        first = positions + 1 - window if window else np.zeros_like(positions)
        if window and c.graph.chunked:
            first = positions // window * window
        seen = (places <= positions[:, None] + ahead) & (places >= first[:, None])
        scores = np.where(seen[:, None], scores, -np.inf)
        sinks = np.full(count, -np.inf) if layer.sinks is None else layer.sinks
        top = np.maximum(scores.max(2), sinks)
        shares = np.exp(scores - top[:, :, None])
        total = shares.sum(2) + np.exp(sinks - top)
        return np.einsum("nhp,phd->nhd", shares / total[:, :, None], np.repeat(values, share, 1)).astype(np.float32)

    def experts(
        self, experts: Experts, x: np.ndarray, name: str, routed: np.ndarray | None = None
    ) -> np.ndarray:  # fmt: skip
        return mix(experts, x, self.config, self._product, routed)

    def recur(self, layer: Recurrent, index: int, x: np.ndarray) -> np.ndarray:
        c = self.config.recurrent
        assert c is not None
        inputs = [self._product(matrix, x) for matrix in layer.inputs]
        first = inputs[0]
        if c.kind == CONVOLUTION:
            b, gate, values = np.split(first, 3, axis=1)
            return gate * self._convolved(layer, index, b * values, c)
        if c.kind in (DELTA, KDA):
            z = inputs[1] if c.kind == DELTA else inputs[5]
            if c.kind == KDA and not c.full_gate:
                z = self._product(layer.second[-1], z)
            gate = z * _sigmoid(z) if c.kind == DELTA else _sigmoid(z)
            out = rms(self._delta(layer, index, inputs, c), layer.norm, self.config.norm_eps)
            return out.reshape(len(x), -1) * gate
        z = first[:, c.values :] if c.kind == MAMBA1 else first[:, : c.values]
        out = self._mamba1(layer, index, first, c) if c.kind == MAMBA1 else self._mamba2(layer, index, first, c)
        out = out * z * _sigmoid(z)
        if c.kind == MAMBA and layer.norm is not None:
            groups = layer.norm.reshape(c.groups, -1)
            out = rms(out.reshape(len(x), *groups.shape), groups, self.config.norm_eps).reshape(out.shape)
        return out

    def _convolved(self, layer: Recurrent, index: int, x: np.ndarray, c: RecurrentConfig) -> np.ndarray:
        """Each channel's sum over the last `kernel` tokens."""
        tail = self._tails.get(index, np.zeros((c.kernel - 1, c.channels), np.float32))
        rows = np.concatenate([tail, x])
        self._tails[index] = rows[len(x) :]
        out = sum(layer.convolution[i] * rows[i : i + len(x)] for i in range(c.kernel))
        out = out if layer.convolution_bias is None else out + layer.convolution_bias
        return out if c.kind == CONVOLUTION else out * _sigmoid(out)

    def _delta(self, layer: Recurrent, index: int, inputs: list[np.ndarray], c: RecurrentConfig) -> np.ndarray:
        n, keys = len(inputs[0]), c.groups * c.key_dim
        mixed = self._convolved(layer, index, inputs[0] if c.kind == DELTA else np.concatenate(inputs[:3], axis=1), c)
        q, k = (_unit(mixed[:, first : first + keys].reshape(n, c.groups, -1)) for first in (0, keys))
        if c.kind == KDA:
            beta, alpha = inputs[4], inputs[3] if c.full_decay else self._product(layer.second[0], inputs[3])
        elif c.joined:  # group by group
            beta, alpha = (part.reshape(n, -1) for part in np.split(inputs[2].reshape(n, c.groups, -1), 2, axis=2))
        else:
            beta, alpha = inputs[2], inputs[3]
        assert layer.decay is not None
        steps = (alpha + layer.dt_bias).reshape(n, c.heads, -1)  # one for each head, or channel
        rates, beta = layer.decay[:, None], _sigmoid(beta)
        if c.least:
            decays = np.exp(np.float32(c.least) * _sigmoid(-rates * steps))
        else:
            decays = np.exp(rates * np.logaddexp(0, steps))

        def change(state: np.ndarray, t: int, key: np.ndarray, v: np.ndarray) -> np.ndarray:
            known = np.einsum("hkv,hk->hv", decays[t][:, :, None] * state, key)
            return beta[t][:, None] * (v - known)

        return self._recurred(index, q / c.key_dim**0.5, k, mixed[:, 2 * keys :], decays, change, c)

    def _mamba2(self, layer: Recurrent, index: int, first: np.ndarray, c: RecurrentConfig) -> np.ndarray:
        n, keys = len(first), c.groups * c.key_dim
        mixed = self._convolved(layer, index, first[:, c.values : c.values + c.channels], c)
        v, k, q = np.split(mixed, [c.values, c.values + keys], axis=1)
        steps = np.logaddexp(0, first[:, c.values + c.channels :] + layer.dt_bias)

        def change(state: np.ndarray, t: int, key: np.ndarray, v: np.ndarray) -> np.ndarray:
            return steps[t][:, None] * v

        k, q = k.reshape(n, c.groups, -1), q.reshape(n, c.groups, -1)
        out = self._recurred(index, q, k, v, np.exp(layer.decay * steps)[:, :, None], change, c)
        skip = np.zeros(c.heads) if layer.skip is None else layer.skip
        return (out + skip[:, None] * v.reshape(out.shape)).reshape(n, -1).astype(np.float32)

    def _recurred(
        self, index: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, decays: np.ndarray,
        change: Callable[[np.ndarray, int, np.ndarray, np.ndarray], np.ndarray], c: RecurrentConfig,
    ) -> np.ndarray:  # fmt: skip
        """S <- decay S + k u^T and out = S^T q, token by token: [n, heads, value_dim]; `change` says what u is."""
        heads = np.arange(c.heads)
        group = heads % c.groups if c.tiled else heads // (c.heads // c.groups)
        state = self._states.get(index, np.zeros((c.heads, c.key_dim, c.value_dim), np.float32))
        out = np.empty((len(q), c.heads, c.value_dim), np.float32)
        for t, row in enumerate(v.reshape(out.shape)):
            u = change(state, t, k[t, group], row)
            state = decays[t][:, :, None] * state + k[t, group][:, :, None] * u[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t, group])
        self._states[index] = state
        return out

    def _mamba1(self, layer: Recurrent, index: int, first: np.ndarray, c: RecurrentConfig) -> np.ndarray:
        x = self._convolved(layer, index, first[:, : c.values], c)
        into, out_of = layer.second
        parts = np.split(self._product(into, x), [c.rank, c.rank + c.key_dim], axis=1)
        low, k, q = (rms(part, norm, self.config.norm_eps) for part, norm in zip(parts, layer.norms, strict=True))
        steps = np.logaddexp(0, self._product(out_of, low) + layer.dt_bias)
        assert layer.decay is not None
        decay = layer.decay.transpose(0, 2, 1).reshape(-1, c.key_dim)[: c.values]
        state = self._states.get(index, np.zeros((c.values, c.key_dim), np.float32))
        out = np.empty_like(x)
        for t, step in enumerate(steps):
            state = np.exp(step[:, None] * decay) * state + (step * x[t])[:, None] * k[t]
            out[t] = state @ q[t] + layer.skip * x[t]
        self._states[index] = state
        return out

    def as_long(self, y: np.ndarray, x: np.ndarray) -> None:
        y *= np.sqrt((x * x).mean(1) / np.maximum((y * y).mean(1), _LEAST))[:, None]

    def predict(self, streams: list[np.ndarray], x: np.ndarray, layer: LayerStreams) -> None:
        factors = self._modality(streams[0], layer) @ layer.predict.T
        factors = factors.reshape(len(x), len(streams), len(streams))
        new = np.stack(streams, 1) + factors @ np.stack(streams, 1)
        for i, stream in enumerate(streams):
            stream[:] = new[:, i]
        x[:] = streams[0]

    def correct(self, streams: list[np.ndarray], x: np.ndarray, layer: LayerStreams) -> np.ndarray:
        factors = self._modality(x, layer) @ layer.correct.T
        new = x - streams[0]
        for i, stream in enumerate(streams):
            stream += (1 + factors[:, i : i + 1]) * new
        return layer.scale * streams[0]

    def _modality(self, x: np.ndarray, layer: LayerStreams) -> np.ndarray:
        """What the router says of the first stream, [n, streams]."""
        return np.tanh(rms(x, layer.router_norm, self.config.norm_eps) / x.shape[1] @ layer.router.T)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, neighbours: bool, first: int = 0) -> np.ndarray:
    """x [n, heads, size] with pairs of its elements from `first` on turned by the angles of cos and sin [n, 1, pairs].

    Pairs are neighbours, or halves apart.
    """
    rotated = 2 * cos.shape[-1]
    pairs = (slice(0, None, 2), slice(1, None, 2)) if neighbours else np.split(np.arange(rotated), 2)
    part, out = x[:, :, first : first + rotated], x.copy()
    a, b = part[:, :, pairs[0]], part[:, :, pairs[1]]
    changed = out[:, :, first : first + rotated]
    changed[:, :, pairs[0]], changed[:, :, pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out


def rms(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x / rms(x) * weight."""
    size = np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True) + eps)
    return (x / size * (1 if weight is None else weight)).astype(np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    """x with each last dimension of length one."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _UNIT)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))

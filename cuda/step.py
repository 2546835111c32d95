"""One token through a decoder's layers, as a list of launches.

A layer takes 5 if its matrices are of one type, or v of another one. None depends on the host:

    x  = embedding row of state[TOKEN]
    norm of x, with records                                                     norm.py
    for each layer:
        q, k, v                                                                 products.py
        rotation, cache, attention, records of the result                       attention.py
        x += W_o ..., with records of x * weight and sums of squares            matvec.py
        silu(W_gate ...) * (W_up ...) of x * weight / root of the mean square, with records
        x += W_down ..., as W_o
    logits = W_output norm(x);  state[TOKEN] = the next token                   sampling.py

From compute capability 9.0 on each may begin while the one before it ends: see launch.py.

A norm has a launch of its own where torch computes the product before or after it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from bridge.cuda import sampling
from bridge.cuda.attention import attention as attn
from bridge.cuda.attention.attention_shape import shape, spans
from bridge.cuda.attention.kv_cache import KVCache
from bridge.cuda.forms.dequantize import rows
from bridge.cuda.norm import norm_kernel, norm_threads
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.matvec import Normed, Recorded
from bridge.cuda.product.products import Call, Gated, Stack, Vector, device_bytes
from bridge.cuda.toolchain.device import Device, upload, view, zeros

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.layers import Layer, Weights
from bridge.runtime.sampling import Sampler


def matrix_bytes(w: Weights, precision: str) -> int:
    """Bytes that the matrices take on the device."""
    matrices = {id(t): t for t in (w.embedding, w.output, *(m for layer in w.layers for m in layer.matrices))}
    return sum(device_bytes(tensor, precision) for tensor in matrices.values())


class DeviceLayer:
    """A layer's matrices and vectors on the device."""

    def __init__(self, layer: Layer, multiplier: Multiplier):
        def vector(array: np.ndarray | None) -> Any:
            return None if array is None else upload(array, multiplier.device)

        self.attn_norm, self.ffn_norm = vector(layer.attn_norm), vector(layer.ffn_norm)
        self.q_norm, self.k_norm = vector(layer.q_norm), vector(layer.k_norm)
        attention = [layer.q, layer.k, layer.v]
        biases = vector(_joined(attention, [layer.q_bias, layer.k_bias, layer.v_bias]))
        self.qkv = Stack(attention, multiplier, biases)
        self.o = Stack([layer.o], multiplier, vector(layer.o_bias))
        biases = vector(_joined([layer.gate, layer.up], [layer.gate_bias, layer.up_bias]))
        self.gated = Gated(layer.gate, layer.up, multiplier, biases)
        self.down = Stack([layer.down], multiplier, vector(layer.down_bias))


class DeviceWeights:
    """All of a model's weights: layers, embedding, output and its norm, and angles f32 [rows, rotated / 2].

    The file's pages are released as layers are uploaded.
    """

    def __init__(self, w: Weights, c: DecoderConfig, cache: KVCache, device: Device, precision: str):
        multiplier = Multiplier(device, precision)
        self.layers = []
        for layer in w.layers:
            self.layers.append(DeviceLayer(layer, multiplier))
            for matrix in layer.matrices:
                matrix.release_raw()
        self.output_norm = upload(w.output_norm, device)
        self.output = Stack([w.output], multiplier)
        tied = w.output is w.embedding
        self.embedding = (self.output if tied else Stack([w.embedding], multiplier)).parts[0][1]
        self.cos, self.sin = (upload(angles, device) for angles in c.angles(cache.rows, w.rope_factors))


def _joined(matrices: Sequence[Any], biases: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One vector of all biases, zeros for those that are missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(matrices, biases, strict=True)
    return np.concatenate([np.zeros(m.shape[0], np.float32) if b is None else b for m, b in pairs])


class Step:
    """`launches`, all but the sampling, and what they work on: `state` (see attention.py), `logits` f32 [vocab], and
    `drawn` int32 [context + 1], the tokens drawn so far."""

    def __init__(
        self, weights: DeviceWeights, c: DecoderConfig, cache: KVCache, device: Device, precision: str, dependent: bool
    ):
        """`dependent`: launches may begin while the one before them ends (launch.py)."""
        import torch

        self.dependent = dependent
        self.config, self.weights, self.cache = c, weights, cache
        self.device, self.precision = device, precision
        self.vocab = weights.output.rows
        self.state = zeros(device, attn.STATE, torch.int32)
        self.drawn = zeros(device, self.cache.context + 1, torch.int32)
        self.uniform = zeros(device, self.cache.context + 1, torch.float64)
        self.how = zeros(device, 3, torch.float64)
        self.x = zeros(device, c.hidden)
        self.normed = Vector(c.hidden, device, precision)
        self.attended = Vector(c.heads * c.head_dim, device, precision)
        self.activated = Vector(c.inner, device, precision)
        self.logits = zeros(device, self.vocab)
        self._counters = view(zeros(device, c.hidden // 32, torch.int32))
        self._squares = view(zeros(device, Normed.length(c.hidden)))
        self.launches = self._token()

    def _token(self) -> list[Call]:
        """All launches of a token but the sampling."""
        c = self.config
        program = [self._embed()]
        qkv = zeros(self.device, (c.heads + 2 * c.kv_heads) * c.head_dim)
        attention = self._attention(qkv)
        layers = self.weights.layers
        program.append(self._norm(layers[0].attn_norm if layers else self.weights.output_norm))
        normed = None
        for i, layer in enumerate(layers):
            program += layer.qkv.bind(self.normed, qkv, normed=normed, dependent=self.dependent)
            program += attention(i, layer)
            added, normed = self._added(layer.o, self.attended, layer.ffn_norm, layer.gated)
            program += added + layer.gated.bind(self.normed, self.activated, normed, self.dependent)
            last = i + 1 == len(layers)
            weight = self.weights.output_norm if last else layers[i + 1].attn_norm
            added, normed = self._added(
                layer.down, self.activated, weight, self.weights.output if last else layers[i + 1].qkv
            )
            program += added
        return program + self.weights.output.bind(self.normed, self.logits, normed=normed, dependent=self.dependent)

    def _added(self, matrix: Stack, x: Vector, weight: Any, then: Stack | Gated) -> tuple[list[Call], Normed | None]:
        """x += W x' and the norm that follows; the second result is what `then` must still normalize by."""
        if not (matrix.records and then.fuses):
            return [*matrix.bind(x, self.x, accumulate=True, dependent=self.dependent), self._norm(weight)], None
        recorded = Recorded(self.normed.records, self._counters, view(weight), self._squares)
        added = matrix.bind(x, self.x, accumulate=True, recorded=recorded, dependent=self.dependent)
        return added, Normed(self._squares, self.config.norm_eps)

    def _embed(self) -> Call:
        ids, out = self.state[attn.TOKEN : attn.TOKEN + 1], self.x.reshape(1, -1)
        return lambda: rows(self.weights.embedding, ids, out, 1, self.device.stream(), self.dependent)

    def _norm(self, weight: Any) -> Call:
        kernel = norm_kernel(self.config.hidden, self.precision == "f32", self.dependent)
        arguments = [view(t) for t in (self.x, weight, self.normed.floats)]
        eps, threads = np.float32(self.config.norm_eps), norm_threads(self.config.hidden)
        return lambda: kernel.launch(1, threads, self.device.stream(), *arguments, self.normed.records.buffer, eps)

    def _attention(self, qkv: Any) -> Callable[[int, DeviceLayer], list[Call]]:
        """A function that makes a layer's launches: its norms and its part of the cache differ, the rest is shared."""
        import torch

        c, device = self.config, self.device
        group = c.heads // c.kv_heads
        blocks = spans(device.multiprocessors, c.kv_heads, self.cache.context)  # of a KV head
        parts = zeros(device, c.heads * blocks * c.head_dim)
        sums = zeros(device, 2 * c.heads * blocks)
        counters = zeros(device, c.kv_heads, torch.int32)
        shared = [view(t) for t in (self.state, parts, sums, counters, self.attended.floats)]
        angles = [view(self.weights.cos.reshape(-1)), view(self.weights.sin.reshape(-1))]
        vector, records = view(qkv), self.attended.records.buffer
        quantize = partial(self.attended.quantize, self.dependent)
        capability = device.capability
        grid, threads = (c.kv_heads, blocks), shape(self.cache.form, group, capability).threads
        numbers = np.int32(self.cache.rows), np.float32(c.norm_eps), np.float32(c.attention_scale)

        def launches(index: int, layer: DeviceLayer) -> list[Call]:
            normed = layer.q_norm is not None
            exact, kind = self.precision == "f32", self.cache.form.kind
            how = normed, exact, kind, self.dependent, capability
            kernel = attn.kernel(c.head_dim, group, c.rotated, c.graph.neighbours, *how)
            norms = [view(n) if normed else angles[0] for n in (layer.q_norm, layer.k_norm)]
            cache = [view(t[index]) for t in (self.cache.keys, self.cache.values)]
            arguments = [vector, *norms, *angles, *cache, *shared, records, *numbers]

            def run() -> None:
                kernel.launch(grid, threads, device.stream(), *arguments)

            return [run] if attn.recorded(c.head_dim) else [run, quantize]

        return launches

    def choose(self, count: int | None) -> list[Call]:
        """Turns logits into the next token: greedily, or drawn from the `count` best."""
        import torch

        device = self.device
        state, drawn = view(self.state), view(self.drawn)
        if count is None:
            blocks = sampling.greedy_blocks(self.vocab)
            best = [zeros(device, blocks), zeros(device, blocks, torch.int32), zeros(device, 1, torch.int32)]
            arguments = [view(self.logits), np.int32(self.vocab), *(view(t) for t in best), state, drawn]
            greedy = sampling.greedy_kernel(sampling.GREEDY_THREADS, self.dependent)
            return [lambda: greedy.launch(blocks, sampling.GREEDY_THREADS, device.stream(), *arguments)]
        scores, tokens = chosen = zeros(device, count), zeros(device, count, torch.int64)
        arguments = [view(scores), view(tokens), np.int32(count), view(self.how), view(self.uniform), state, drawn]
        draw = sampling.draw_kernel(sampling.DRAW_THREADS, self.dependent)

        def sort() -> None:
            if count < self.vocab:
                torch.topk(self.logits, count, out=chosen)
            else:
                torch.sort(self.logits, descending=True, stable=True, out=chosen)

        return [sort, lambda: draw.launch(1, sampling.DRAW_THREADS, device.stream(), *arguments)]

    def set_sampling(self, sampler: Sampler, steps: int) -> None:
        """Copy settings and uniform numbers to the device."""
        import torch

        how = sampler.how
        self.how.copy_(torch.tensor([how.temperature, how.top_p, how.min_p], dtype=torch.float64))
        self.uniform[:steps].copy_(torch.from_numpy(sampler.uniform(steps)))

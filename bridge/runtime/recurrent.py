"""The calls of layers with a state, for the tables of a decoder; their arithmetic is in cpu/recurrent_ops.py.

    a short convolution   b, c, x = W_in x^       y = c * convolve(b * x)
    a gated delta net     q, k, v = convolve(W_qkv x^)      z = W_z x^      beta, alpha = W_b x^, W_a x^
                          y = norm(recur(q, k, v)) * silu(z)
    Mamba-2               z, (v, k, q), dt = W_in x^, the middle convolved
                          y = norm((recur(q, k, v) + D v) * silu(z))
    Mamba                 x, z = W_in x^, x convolved      dt, k, q = norms of W_x x
                          y = (scan(q, k, x, W_dt dt) + D x) * silu(z)

after which y is multiplied by the layer's output matrix, as attention's result is.
"""

from collections.abc import Sequence

import numpy as np

from bridge.runtime.cpu import recurrent_ops as ops
from bridge.runtime.cpu.program import Program, address, bits, buffer
from bridge.runtime.kv_cache import KVCache
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.recurrent_config import CONVOLUTION, DELTA, MAMBA1, RecurrentConfig
from bridge.runtime.steps import Steps
from bridge.runtime.weights import Recurrent

_FLOAT = 4  # bytes


class RecurrentBuffers:
    """The buffers that all layers with a state share for n tokens, and a block of arguments for each layer and cache.

    layers  of each layer with a state
    caches  one for tokens that follow one another, or n: a token of each
    """

    def __init__(self, c: RecurrentConfig, layers: Sequence[Recurrent], n: int, caches: Sequence[KVCache], eps: float):
        self.config, self.n, self.count = c, n, len(caches)
        self.inputs = [buffer(n, rows) for rows in c.inputs.values()]
        self.mixed = buffer(n, c.channels)
        self.out = buffer(n, c.values) if c.heads else self.mixed
        self.gates = buffer(n, c.rank or 2 * c.heads)
        self.low, self.rates = buffer(n, c.rank and c.rank + 2 * c.key_dim), buffer(n, c.rank and c.values)  # Mamba's
        self.keys = np.zeros((c.groups, n, 2, c.key_dim), np.float32)  # and queries, the queries first
        self.block = np.zeros((len(layers), len(caches), ops.WORDS), np.int64)
        self._fill(layers, eps)
        for index, cache in enumerate(caches):
            self.store_in(index, cache)

    def _fill(self, layers: Sequence[Recurrent], eps: float) -> None:
        """The arguments that stay."""
        c = self.config
        keys = c.groups * c.key_dim
        q, k, v = (0, keys, 2 * keys) if c.kind == DELTA else (c.values + keys, c.values, 0)
        words = {
            ops.TOKENS: self.n // self.count, ops.CHANNELS: c.channels, ops.KERNEL: c.kernel,
            ops.SILU: int(c.kind != CONVOLUTION), ops.HEADS: c.heads, ops.GROUPS: c.groups, ops.KEY_DIM: c.key_dim,
            ops.VALUE_DIM: c.value_dim, ops.Q_AT: _FLOAT * q, ops.K_AT: _FLOAT * k, ops.V_AT: _FLOAT * v,
            ops.DELTA: int(c.kind == DELTA), ops.TILED: int(c.tiled), ops.EPS: bits(eps),
            ops.RANK: c.rank,
            ops.RUN: c.heads // c.groups if c.joined else c.heads,
        }  # fmt: skip
        for word, value in words.items():
            self.block[:, :, word] = value
        for block, layer in zip(self.block, layers, strict=True):
            arrays = {
                ops.WEIGHT: layer.convolution, ops.BIAS: layer.convolution_bias, ops.DECAY: layer.decay,
                ops.DT_BIAS: layer.dt_bias, ops.SKIP: layer.skip, ops.NORM: layer.norm,
            }  # fmt: skip
            if c.kind == MAMBA1:
                arrays |= dict(zip((ops.NORM, ops.K_NORM, ops.Q_NORM), layer.norms, strict=True))
            for word, array in arrays.items():
                block[:, word] = address(array)
        first, *others = self.inputs
        places = {ops.MIXED: self.mixed, ops.OUT: self.out, ops.GATES: self.gates, ops.IN: first}
        starts = {}
        if c.kind == CONVOLUTION:
            starts[ops.IN] = 2 * c.channels
        elif c.kind == DELTA:
            places |= {ops.Z: others[0], ops.B: others[1], ops.A: others[-1]}
            starts[ops.A] = c.heads // c.groups if c.joined else 0
        elif c.kind == MAMBA1:
            places |= {ops.Z: first, ops.B: self.low, ops.A: self.rates}
            starts |= {ops.Z: c.values}
        else:
            places |= {ops.Z: first, ops.A: first}
            starts |= {ops.IN: c.values, ops.A: c.values + c.channels}
        for word, array in places.items():
            self.block[:, :, word] = address(array) + _FLOAT * starts.get(word, 0)
            self.block[:, :, word] += array.strides[0] * np.arange(self.count)
        self.block[:, :, ops.KEYS] = address(self.keys) + self.keys.strides[1] * np.arange(self.count)
        self.block[:, :, ops.KEYS_STRIDE] = self.keys.strides[0]
        for stride, word in ((ops.IN_STRIDE, ops.IN), (ops.Z_STRIDE, ops.Z), (ops.GATE_STRIDE, ops.A)):
            self.block[:, :, stride] = places[word].strides[0] if word in places else 0

    def store_in(self, index: int, cache: KVCache) -> None:
        """Let the tokens of sequence `index` change the state of a cache."""
        assert cache.state is not None
        memory = cache.state.now
        layers = np.arange(len(self.block))
        self.block[:, index, ops.TAIL] = address(memory.tails) + memory.tails.strides[0] * layers
        self.block[:, index, ops.STATE] = address(memory.heads) + memory.heads.strides[0] * layers

    def begin(self, caches: Sequence[KVCache]) -> None:
        """Let the states leave the copies that their caches expect."""
        layers = np.arange(len(self.block))
        for index, cache in enumerate(caches):
            assert cache.state is not None
            after, memory = cache.state.expect(self.n // self.count)
            self.block[:, index, ops.COPY_AFTER] = after
            if memory is not None:
                self.block[:, index, ops.TAIL_COPY] = address(memory.tails) + memory.tails.strides[0] * layers
                self.block[:, index, ops.STATE_COPY] = address(memory.heads) + memory.heads.strides[0] * layers

    def products(self, layer: Recurrent) -> list[tuple[QuantTensor, np.ndarray]]:
        """The matrices that read a layer's input, and where their results go."""
        return list(zip(layer.inputs, self.inputs, strict=True))

    def add(self, steps: Steps, layer: Recurrent, place: int) -> None:
        """`out`, from the inputs' products, in layer number `place` of those with a state."""
        c, program, several = self.config, steps.program, self.n > 1
        block = address(self.block[place])

        def per_token(name: str) -> None:
            program.add(ops.function(name), block, self.count, items=self.n, shared=several)

        if c.kind == CONVOLUTION:
            self._multiply(program, self.inputs[0][:, 2 * c.channels :], self.inputs[0])
        parts = -(-c.channels // ops.CHANNELS_AT_ONCE)
        items = parts * (self.count if self.count > 1 else -(-self.n // ops.TOKENS_AT_ONCE))
        program.add(ops.function("convolve"), block, self.count, parts, items=items, shared=several)
        program.add(ops.function("keep_tail"), block, items=self.count, shared=several)
        if c.kind == CONVOLUTION:
            self._multiply(program, self.mixed, self.inputs[0][:, c.channels :])
            return
        if c.kind == MAMBA1:
            self._add_scan(steps, layer, place)
            return
        per_token("gates")
        parts = -(-c.value_dim // (ops.LANES * ops.BLOCKS_AT_ONCE))
        items = c.heads * parts * self.count
        program.add(ops.function("recur"), block, self.count, parts, items=items, shared=True)
        per_token("gated_norm" if c.kind == DELTA else "norm_of_gated")

    def _add_scan(self, steps: Steps, layer: Recurrent, place: int) -> None:
        into, out = layer.second
        block = address(self.block[place])
        steps.products(self.mixed, [(into, self.low)])
        split = ops.function("split_steps")
        steps.program.add(split, block, self.count, items=self.n, shared=self.n > 1)
        steps.products(self.gates, [(out, self.rates)])
        parts = -(-self.config.value_dim // (ops.LANES * ops.BLOCKS_AT_ONCE))
        steps.program.add(ops.function("scan"), block, self.count, parts, items=parts * self.count, shared=True)

    def _multiply(self, program: Program, x: np.ndarray, y: np.ndarray) -> None:
        arguments = address(x), x.strides[0], address(y), y.strides[0], self.config.channels
        program.add(ops.function("multiply"), *arguments, items=self.n, shared=self.n > 1)

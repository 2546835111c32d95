"""The calls of layers with a state, for the tables of a decoder; their arithmetic is in cpu/ops/recurrent_ops.py.

    a short convolution   b, c, x = W_in x^       y = c * convolve(b * x)
    a gated delta net     q, k, v = convolve(W_qkv x^)      z = W_z x^      beta, alpha = W_b x^, W_a x^
                          y = norm(recur(q, k, v)) * silu(z)
    KDA                   q, k, v = convolve(W_q x^), convolve(W_k x^), convolve(W_v x^)
                          alpha, z = W_fb W_fa x^, W_gb W_ga x^      beta = W_b x^
                          y = norm(recur(q, k, v)) * sigmoid(z)      in Kimi K3 z = W_g x^, in Ling 3 alpha = W_f x^ too
    Mamba-2               z, (v, k, q), dt = W_in x^, the middle convolved
                          y = norm((recur(q, k, v) + D v) * silu(z))
    Mamba                 x, z = W_in x^, x convolved      dt, k, q = norms of W_x x
                          y = (scan(q, k, x, W_dt dt) + D x) * silu(z)

after which y is multiplied by the layer's output matrix, as attention's result is.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np

from bridge.gguf_file.architectures import CONVOLUTION, DELTA, KDA, MAMBA1
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.cpu.ops import recurrent_ops as ops
from bridge.runtime.cpu.ops.program import Program, address, bits, buffer, every_token
from bridge.runtime.decoder.steps import Products, Steps
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.layers.layers import Recurrent
from bridge.runtime.layers.recurrent_state import Memory, RecurrentState

_FLOAT = 4  # bytes


class _Rows:
    """What a layer makes of n tokens before it changes its state."""

    def __init__(self, c: RecurrentConfig, n: int, out: np.ndarray):
        self.inputs = [buffer(n, rows) for rows in c.inputs.values()]
        self.mixed = buffer(n, c.channels) if c.heads else out
        self.gates = buffer(n, c.rank or 2 * c.heads)
        by_channel = c.kind == KDA
        self.keys = np.zeros((c.groups, n, 4 if by_channel else 2, c.key_dim), np.float32)  # after the queries
        self.low = buffer(n, c.rank and c.rank + 2 * c.key_dim)  # Mamba's
        self.rates = self.inputs[3] if c.full_decay else buffer(n, c.values if c.rank or by_channel else 0)
        self.joined = buffer(n, c.channels if by_channel else 0)
        self.z = self.inputs[-1] if c.full_gate else buffer(n, c.values if by_channel else 0)


class RecurrentBuffers:
    """The buffers of the layers with a state for n tokens, and a block of arguments for each layer and cache.

    layers  of each layer with a state
    caches  one for tokens that follow one another, or n for a step: a token of each. A cache that is there several
            times takes tokens that follow one another too, and can go back to any of them: each layer has rows of its
            own for that, which are otherwise one for all
    """

    def __init__(self, c: RecurrentConfig, layers: Sequence[Recurrent], n: int, caches: Sequence[KVCache], eps: float):
        self.config, self.n, self.count = c, n, len(caches)
        self.out = buffer(n, c.values)
        several = self._steps and n > 1
        rows = [_Rows(c, n, self.out) for _ in range(len(layers) if several else 1)]
        self.rows = rows if several else rows * len(layers)
        self.block = np.zeros((len(layers), len(caches), ops.WORDS), np.int64)
        self._undoable: list[RecurrentState] = []  # that may go back into the last step
        self._redoing: dict[int, Program] = {}
        self._fill(layers, eps)

    @property
    def _steps(self) -> bool:
        return self.n == self.count

    def _fill(self, layers: Sequence[Recurrent], eps: float) -> None:
        """The words of each layer's block that stay the same from step to step."""
        c = self.config
        keys = c.groups * c.key_dim
        delta = c.kind in (DELTA, KDA)
        q, k, v = (0, keys, 2 * keys) if delta else (c.values + keys, c.values, 0)
        words = {
            ops.CHANNELS: c.channels, ops.KERNEL: c.kernel,
            ops.SILU: int(c.kind != CONVOLUTION), ops.HEADS: c.heads, ops.GROUPS: c.groups, ops.KEY_DIM: c.key_dim,
            ops.VALUE_DIM: c.value_dim, ops.Q_AT: _FLOAT * q, ops.K_AT: _FLOAT * k, ops.V_AT: _FLOAT * v,
            ops.DELTA: int(delta), ops.BY_CHANNEL: int(c.kind == KDA), ops.TILED: int(c.tiled), ops.EPS: bits(eps),
            ops.RANK: c.rank, ops.LEAST: bits(c.least),
            ops.RUN: c.heads // c.groups if c.joined else c.heads,
        }  # fmt: skip
        for word, value in words.items():
            self.block[:, :, word] = value
        for block, layer, rows in zip(self.block, layers, self.rows, strict=True):
            arrays = {
                ops.WEIGHT: layer.convolution, ops.BIAS: layer.convolution_bias, ops.DECAY: layer.decay,
                ops.DT_BIAS: layer.dt_bias, ops.SKIP: layer.skip, ops.NORM: layer.norm,
            }  # fmt: skip
            if c.kind == MAMBA1:
                arrays |= dict(zip((ops.NORM, ops.K_NORM, ops.Q_NORM), layer.norms, strict=True))
            for word, array in arrays.items():
                block[:, word] = address(array)
            self._fill_rows(block, rows)

    def _fill_rows(self, block: np.ndarray, rows: _Rows) -> None:
        """Where a layer's rows are, for each cache."""
        c = self.config
        first, *others = rows.inputs
        places = {ops.MIXED: rows.mixed, ops.OUT: self.out, ops.GATES: rows.gates, ops.IN: first}
        starts = {}
        if c.kind == CONVOLUTION:
            starts[ops.IN] = 2 * c.channels
        elif c.kind == DELTA:
            places |= {ops.Z: others[0], ops.B: others[1], ops.A: others[-1]}
            starts[ops.A] = c.heads // c.groups if c.joined else 0
        elif c.kind == KDA:
            places |= {ops.IN: rows.joined, ops.Z: rows.z, ops.B: others[3], ops.A: rows.rates}
        elif c.kind == MAMBA1:
            places |= {ops.Z: first, ops.B: rows.low, ops.A: rows.rates}
            starts |= {ops.Z: c.values}
        else:
            places |= {ops.Z: first, ops.A: first}
            starts |= {ops.IN: c.values, ops.A: c.values + c.channels}
        for word, array in places.items():
            block[:, word] = address(array) + _FLOAT * starts.get(word, 0)
            block[:, word] += array.strides[0] * np.arange(self.count)
        block[:, ops.KEYS] = address(rows.keys) + rows.keys.strides[1] * np.arange(self.count)
        block[:, ops.KEYS_STRIDE] = rows.keys.strides[0]
        for stride, word in ((ops.IN_STRIDE, ops.IN), (ops.Z_STRIDE, ops.Z), (ops.GATE_STRIDE, ops.A)):
            block[:, stride] = places[word].strides[0] if word in places else 0

    def begin(self, caches: Sequence[KVCache], tokens: int) -> None:
        """Let so many tokens change the states of their caches, and leave the copies that these expect."""
        for state in self._undoable:
            state.settle()
        self._undoable.clear()
        self.block[:, :, ops.TOKENS] = 0
        index = 0
        for _, same in groupby(caches, key=id):
            first, *others = same
            assert first.state is not None
            new = 1 + len(others) if self._steps else tokens
            passage = first.state.begin(new, partial(self._redo, index) if self._steps else None)
            self.block[:, index, ops.TOKENS], self.block[:, index, ops.COPY_AFTER] = new, passage.after
            self._point(index, (ops.TAIL, ops.STATE), passage.source)
            self._point(index, (ops.TAIL_OUT, ops.STATE_OUT), passage.target)
            if passage.copy is not None:
                self._point(index, (ops.TAIL_COPY, ops.STATE_COPY), passage.copy)
            if new > 1 and self._steps:
                self._undoable.append(first.state)
            index += 1 + len(others)

    def _point(self, index: int, words: tuple[int, int], memory: Memory) -> None:
        """Let a sequence's words of all layers name their parts of a state."""
        layers = np.arange(len(self.block))
        for word, array in zip(words, (memory.tails, memory.heads), strict=True):
            self.block[:, index, word] = address(array) + array.strides[0] * layers

    def _redo(self, index: int, tokens: int) -> None:
        """Change the state again by the first tokens of a sequence of the last step, from what it was before."""
        self.block[:, index, ops.TOKENS], self.block[:, index, ops.COPY_AFTER] = tokens, 0
        if index not in self._redoing:
            self._redoing[index] = Program()
            for block in self.block[:, index]:
                self._change(self._redoing[index], address(block), 1)
        self._redoing[index].run()

    def _change(self, program: Program, block: int, count: int) -> None:
        """The state after the tokens, from their rows, and what the layer makes of it."""
        c = self.config
        several = self.n > 1
        program.add(ops.function("keep_tail"), block, items=count, shared=several)
        if c.heads:
            parts = -(-c.value_dim // (ops.LANES * ops.BLOCKS_AT_ONCE))
            change = ops.function("scan" if c.kind == MAMBA1 else "recur")
            program.add(change, block, count, parts, items=c.heads * parts * count, shared=True)

    def products(self, layer: Recurrent, index: int) -> Products:
        """The matrices that read a layer's input, and where their results go."""
        return list(zip(layer.inputs, self.rows[index].inputs, strict=True))

    def add(self, steps: Steps, layer: Recurrent, index: int) -> None:
        """`out`, from the inputs' products, in layer number `index` of those with a state."""
        c, program, rows, several = self.config, steps.program, self.rows[index], self.n > 1
        block = address(self.block[index])

        def per_token(name: str) -> None:
            steps.program.add(ops.function(name), block, self.count, items=every_token, shared=several)

        if c.kind == CONVOLUTION:
            self._multiply(program, rows.inputs[0][:, 2 * c.channels :], rows.inputs[0])
        if c.kind == KDA:
            f_a, _, g_a = rows.inputs[3:]
            if not c.full_decay:
                steps.products(f_a, [(layer.second[0], rows.rates)])
            if not c.full_gate:
                steps.products(g_a, [(layer.second[-1], rows.z)])
            for start, x in zip(range(0, c.channels, c.values), rows.inputs, strict=False):
                channels = address(rows.joined) + _FLOAT * start, rows.joined.strides[0], c.values
                steps.program.add(
                    ops.function("put"), address(x), x.strides[0], *channels, items=every_token, shared=several
                )
            program = steps.program
        parts = -(-c.channels // ops.CHANNELS_AT_ONCE)

        def convolved(tokens: int) -> int:
            return parts * (self.count if self.count > 1 else -(-tokens // ops.TOKENS_AT_ONCE))

        program.add(ops.function("convolve"), block, self.count, parts, items=convolved, shared=several)
        if c.kind == MAMBA1:
            into, out = layer.second
            steps.products(rows.mixed, [(into, rows.low)])
            per_token("split_steps")
            steps.products(rows.gates, [(out, rows.rates)])
        elif c.kind == KDA:
            per_token("gates_by_channel")
        elif c.kind != CONVOLUTION:
            per_token("gates")
        self._change(steps.program, block, self.count)
        if c.kind == CONVOLUTION:
            self._multiply(program, rows.mixed, rows.inputs[0][:, c.channels :])
        elif c.kind != MAMBA1:
            per_token("gated_norm" if c.kind in (DELTA, KDA) else "norm_of_gated")

    def _multiply(self, program: Program, x: np.ndarray, y: np.ndarray) -> None:
        arguments = address(x), x.strides[0], address(y), y.strides[0], self.config.channels
        program.add(ops.function("multiply"), *arguments, items=every_token, shared=self.n > 1)

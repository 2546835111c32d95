"""The verbs of a decoder on the CPU, as calls of a program that is built once and run for every token (or batch).

The tokens follow one another in one context, or there is one of each of several contexts. Values are buffers: float32
[n, width], the same for all layers that have a value of that name and width.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines.floats import SIZES
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops import decoder_ops as ops
from bridge.runtime.cpu.ops import latent_attention, stream_ops
from bridge.runtime.cpu.ops.passes import Kernels
from bridge.runtime.cpu.ops.program import Program, Word, address, bits, buffer, every_token, in_pieces
from bridge.runtime.decoder.machine import Linear
from bridge.runtime.decoder.positions import Positions
from bridge.runtime.decoder.recurrent import RecurrentBuffers
from bridge.runtime.decoder.steps import Steps
from bridge.runtime.decoder.walk import embed, tap_name, walk
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.layers.layers import Experts, Layer, LayerStreams, Recurrent, Weights
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, MIN_VALUES_TO_SHARE

_TURNED = "q", "k", "v"  # whose biases attention adds


class Attend(NamedTuple):
    """The calls of attend and of merge in a program of a step, for `begin` to adapt; `spread`: items of attend for a
    span; `heads`: of all contexts, items of merge."""

    program: Program
    attend: int
    merge: int
    spread: int
    heads: int


class CpuMachine:
    """A program for n tokens, and the buffers that it works on.

    caches   one for up to n tokens that follow one another, or n: a token of each
    count    how many tokens there are now
    program  through the layers; `build` fills it
    x        what the first layer reads, and
    states   the normalized states after the last, each [n, hidden]
    scores   [n, vocab], the logits; [n, 0] if the program does not compute them
    """

    def __init__(
        self, c: DecoderConfig, weights: Weights, n: int, caches: Sequence[KVCache], positions: Positions
    ):  # fmt: skip
        self.config, self.n, self.count, self.caches = c, n, n, list(caches)
        self._weights, self._positions = weights, positions
        self._buffers: dict[tuple[str, int], np.ndarray] = {}
        self.tokens = np.zeros(n, np.int64)
        self.starts = np.zeros(len(caches), np.int64)
        self.spans = np.ones(1, np.int64)
        most = -(-caches[0].rows // attn.SPAN) if self.one_token_each else 1
        widest = max((c.heads_of(layer).dim for layer in c.attending), default=0)
        self._parts = np.zeros((len(caches), c.heads, most, widest), np.float32)
        self._sums = np.zeros((len(caches), c.heads, most, 2), np.float32)
        self._block = np.zeros((c.layers, len(caches), attn.WORDS), np.int64)
        self._attending: list[Attend] = []
        self._recurrent: RecurrentBuffers | None = None
        if c.recurrent is not None:
            layers = [layer.recurrent for layer in weights.layers if layer.recurrent is not None]
            self._recurrent = RecurrentBuffers(c.recurrent, layers, n, caches, c.norm_eps)
        self._stored = c.stored
        self._from_rows: list[tuple[QuantTensor, np.ndarray]] = []  # tables that no program looks up
        self.scores = np.empty((n, 0), np.float32)
        self.embedding = Program()
        self.program: Steps | None = None
        self._steps: Steps | None = None  # the program while it is made
        self._embedded = embed(self, weights, c)
        self.x: np.ndarray = self._embedded[0]

    def build(self, kernels: Kernels) -> Steps:
        """Make the program.

        That of a step computes the logits too, if the output matrix multiplies by row groups: one of half floats does
        not.
        """
        c, n = self.config, self.n
        steps = self._steps = Steps(c, n, kernels, self.one_token_each)
        self._attending.clear()  # an attempt before may have failed
        self.states: np.ndarray = walk(self, self._weights, c, self._embedded)
        output = self._weights.output
        if self.one_token_each and steps.multiplies(output) and output.change is None:
            scores = buffer(n, steps.width(output))
            steps.products(self.states, [(output, scores)])
            self.scores = scores[:, : output.shape[0]]
        self.program = steps  # once it is whole: a child that is forked meanwhile makes its own
        return steps

    @property
    def tapped(self) -> list[np.ndarray]:
        """The states before each of the layers that `DecoderConfig.tapped` names, [n, hidden]."""
        return [self._buffer(tap_name(layer), self.config.hidden) for layer in self.config.tapped]

    @property
    def one_token_each(self) -> bool:
        """Whether each context has one token here."""
        return self.n == len(self.caches)

    def use(self, caches: Sequence[KVCache]) -> None:
        """Let the tokens go into these caches, as many as before."""
        for index, cache in enumerate(caches):
            if self.caches[index] is not cache:
                self.caches[index] = cache
                for layer in self._stored:
                    self._store_in(layer, index)

    def begin(self, tokens: Sequence[int]) -> None:
        """Set the tokens and their positions."""
        self.count = self.embedding.tokens = len(tokens)
        self.tokens[: self.count] = tokens
        self.starts[:] = [cache.length for cache in self.caches]
        if self.one_token_each:  # a cache that is there several times takes tokens that follow one another
            self.starts += [self.caches[:i].count(cache) for i, cache in enumerate(self.caches)]
        if self._recurrent is not None:
            self._recurrent.begin(self.caches, self.count)
        if not self.one_token_each:
            self._block[:, :, attn.TOKENS] = self.count
        spans = -(-(int(self.starts.max()) + 1) // attn.SPAN) if self.one_token_each else 1
        if spans != self.spans[0]:
            self.spans[0] = spans
            for call in self._attending:
                shared = call.heads * spans * self._parts.shape[3] > MIN_VALUES_TO_SHARE
                call.program.resize(call.attend, call.spread * spans, True)
                call.program.resize(call.merge, call.heads if spans > 1 else 0, shared)

    def look_up_tokens(self) -> None:
        """What the first layer reads, into `x`."""
        for table, rows in self._from_rows:
            rows[: self.count] = table.rows(self.tokens[: self.count].tolist())
        self.embedding.run()

    # verbs

    def look_up(self, table: QuantTensor, name: str) -> np.ndarray:
        rows = self._buffer(name, table.shape[1])
        if table.type not in READ or table.change is not None:
            self._from_rows.append((table, rows))
            return rows
        row_bytes = table.raw.nbytes // table.shape[0]
        arguments = address(table.raw), row_bytes, address(self.tokens), address(rows), rows.shape[1]
        self._for_each(ops.look_up_function(table.type), *arguments)
        self._now.keep(table.raw)
        self.scale(rows, table.factor)
        return rows

    def add_positions(self, x: np.ndarray, table: np.ndarray) -> None:
        each = 1 if self.one_token_each else every_token
        for m in range(len(self.caches)):
            arguments = address(x[m:]), address(table), address(self.starts[m:]), x.shape[1]
            self._add(ops.function("add_rows"), *arguments, items=each, shared=not self.one_token_each)

    def products(self, x: np.ndarray, **linears: Linear) -> list[np.ndarray | None]:
        assert self._steps is not None
        products: list[tuple[QuantTensor | None, Any]] = [
            (matrix, None if matrix is None else self._buffer(name, matrix.shape[0]))
            for name, (matrix, _) in linears.items()
        ]
        self._steps.products(x, products)
        for (name, (_, bias)), (_, y) in zip(linears.items(), products, strict=True):
            if bias is not None and name not in _TURNED:
                self._for_each(ops.function("add"), address(y), address(bias), bias.size)
        return [y for _, y in products]

    def gated(self, x: np.ndarray, gate: Linear, up: Linear, index: int) -> np.ndarray:
        c = self.config
        gates, ups = self.products(x, gate=gate, up=up)
        assert gates is not None
        if c.sparsity and math.isfinite(c.sparsity[index]):
            self._for_each(ops.function("sparsify"), address(gates), gates.shape[1], bits(c.sparsity[index]))
        if c.xielu:
            self._for_each(ops.function("xielu"), address(gates), gates.shape[1], *map(bits, c.xielu[index]))
        else:
            pieces, width, shared = in_pieces(gates)
            name, numbers = c.activation_within(c.limits_of(index)[1])
            function = ops.activation(name, ups is not None)
            arguments = function, address(gates), address(ups), width, 0, *map(bits, numbers)
            if pieces > self.n:
                self._add(*arguments, items=pieces, shared=shared)
            else:
                self._for_each(*arguments)
        return gates

    def gelu_times(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        self._for_each(ops.function("geglu"), address(gate), address(up), gate.shape[1], up.strides[0])
        return gate

    def norm(
        self, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None = None, added: np.ndarray | None = None
    ) -> np.ndarray:
        out, eps = self._buffer("normed", x.shape[1]), bits(self.config.norm_eps)
        first = address(x), address(added), address(weight)
        if self.config.graph.layer_norm and weight is not None:
            self._for_each(ops.function("layer_norm"), *first, address(bias), address(out), x.shape[1], eps)
        else:
            share = bits(self.config.residual_scale)
            self._for_each(ops.function("norm"), *first, address(out), x.shape[1], eps, share)
        return out

    def normalize(
        self, x: np.ndarray, weight: np.ndarray | None, name: str = "", eps: float = 0.0
    ) -> np.ndarray:  # fmt: skip
        if weight is None:
            return x
        out = self._buffer(name, x.shape[1]) if name else x
        numbers = bits(eps or self.config.norm_eps), bits(1.0)
        arguments = address(x), 0, address(weight), address(out), weight.size, *numbers
        parts = x.shape[1] // weight.size
        shared = x.size > MIN_VALUES_TO_SHARE
        self._add(ops.function("norm"), *arguments, items=lambda tokens: parts * tokens, shared=shared)
        return out

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        stride = y.strides[0] if y.ndim > 1 else 0
        self._for_each(ops.function("add"), address(x), address(y), x.shape[1], stride)

    def scale(self, x: np.ndarray, factor: float) -> None:
        if factor != 1:
            self._for_each(ops.function("scale"), address(x), x.shape[1], bits(factor))

    def copy(self, x: np.ndarray, name: str) -> np.ndarray:
        out = self._buffer(name, x.shape[1])
        self._for_each(ops.function("norm"), address(x), 0, 0, address(out), x.shape[1])  # without a weight
        return out

    def blend(self, states: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
        out = self._buffer("blended", weight.size)
        addresses = np.array([address(state) for state in states], np.int64)
        first = address(addresses), len(states), address(weight), address(out)
        self._for_each(stream_ops.function("blend"), *first, weight.size, bits(self.config.norm_eps))
        self._now.keep(addresses)
        return out

    def split_gate(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        queries = self._buffer("queries", q.shape[1] // 2)
        sizes = self.config.heads, queries.shape[1] // self.config.heads
        self._for_each(ops.function("split_gate"), address(q), address(queries), *sizes)
        return queries, q

    def gate_heads(self, x: np.ndarray, gate: np.ndarray, heads: int) -> None:
        head_dim, apart = x.shape[1] // heads, gate.shape[1] // heads
        each = min(apart, head_dim)  # gates of a head: one, or one for each element
        # of `split_gate` each head's gates follow its q
        first = address(gate) + 4 * (apart - each)
        name = "softplus_heads" if self.config.graph.softplus else "gate_heads"
        self._for_each(ops.function(name), first, address(x), heads, head_dim, apart, each)

    def fit_heads(self, x: np.ndarray, heads: int, size: int, name: str) -> np.ndarray:
        out = self._buffer(name, heads * size)
        self._for_each(ops.function("fit_heads"), address(x), address(out), heads, x.shape[1] // heads, size)
        return out

    def attend(self, layer: Layer, index: int, q: np.ndarray, k: np.ndarray | None, v: np.ndarray | None) -> np.ndarray:
        c, count, kind = self.config, len(self.caches), self.caches[0].kind
        heads, query_heads = c.heads_of(index), c.query_heads_of(index)
        attended = self._buffer("attended", c.attended(index))
        queries, results = q, attended
        module: Any = attn
        if c.latent is not None:
            width = -(-c.head_dim // attn.LANES) * attn.LANES  # as wide as a row of the cache
            queries, results = self._buffer("rows", c.heads * width), self._buffer("latents", c.heads * c.latent.rank)
            module = latent_attention
        self._fill_block(layer, index, queries, k, v, results)
        if c.latent is not None:
            for block, row in zip(self._block[index], q[:: self.n // count], strict=True):
                block[attn.PRODUCTS], block[attn.K_NORM] = address(row), address(layer.k_norm)
                block[attn.HEAD_DIM], block[attn.PLAIN] = c.latent.rank, c.latent.plain
        block = address(self._block[index])
        self._for_each(module.function("store", kind), block, count)
        if layer.latent_k is not None:  # each head's matrix of keys times the plain part of q
            self._multiply_heads(layer.latent_k, q, queries)
        spans, most = int(self.spans[0]), self._parts.shape[2]

        def spread(tokens: int) -> int:
            return -(-tokens // count * (query_heads // heads.kv) // attn.ROWS) * heads.kv * count

        arguments = block, count, address(self.spans), address(self._parts), address(self._sums), most
        items = spread(self.n) * spans if self.one_token_each else spread
        attend = self._add(module.function("attend", kind), *arguments, items=items, shared=True)
        merge = partial(attn.function, "merge", kind)  # short contexts do not wait until it is compiled
        merging = self._add(merge, *arguments, items=count * query_heads * (spans > 1))
        self._attending.append(Attend(self._now, attend, merging, spread(self.n), count * query_heads))
        if layer.latent_v is not None:
            self._multiply_heads(layer.latent_v, results, attended)
        return attended

    def _multiply_heads(self, stack: QuantTensor, x: np.ndarray, y: np.ndarray) -> None:
        """y[t, h] = stack[h] x[t, h], of the first elements of a head of x, and into those of one of y."""
        heads, rows, columns = stack.shape
        widths = x.shape[1], x.shape[1] // heads, y.shape[1], y.shape[1] // heads
        sizes = np.array([rows, columns, SIZES[stack.type] * columns, *widths], np.int64)
        arguments = address(stack.raw), address(x), address(y), address(sizes), every_token
        shared = stack.nbytes * self.n >= MIN_BYTES_TO_SHARE
        self._add(latent_attention.heads_function(stack.type), *arguments, items=heads * rows, shared=shared)
        self._now.keep(stack, sizes)

    def _fill_block(
        self, layer: Layer, index: int, q: np.ndarray, k: np.ndarray | None, v: np.ndarray | None, out: np.ndarray
    ) -> None:
        """attention.py's block of a layer, for every cache."""
        c, heads = self.config, self.config.heads_of(index)
        cos, sin = self._positions.local_angles if c.windowed(index) else self._positions.angles
        by_head, (window, ahead) = not c.graph.normed_together, c.reach(index)
        arrays = {
            attn.Q_BIAS: layer.q_bias, attn.K_BIAS: layer.k_bias, attn.V_BIAS: layer.v_bias,
            attn.Q_NORM: layer.q_norm if by_head else None, attn.K_NORM: layer.k_norm if by_head else None,
            attn.COS: cos, attn.SIN: sin, attn.SINKS: layer.sinks,
            attn.SLOPES: c.slopes,
            attn.TEMPERATURES: self._positions.temperatures if c.tempered(index) else None,
        }  # fmt: skip
        rows = {attn.Q: q, attn.K: k, attn.V: v, attn.OUT: out, attn.START: self.starts}
        numbers = {
            attn.HEADS: c.query_heads_of(index), attn.KV_HEADS: heads.kv, attn.HEAD_DIM: heads.dim,
            attn.ROTATED: heads.rotated, attn.NEIGHBOURS: int(c.graph.neighbours),
            attn.NORM_LAST: int(c.graph.norms_rotated), attn.TOKENS: 1 if self.one_token_each else self.count,
            attn.EPS: bits(c.norm_eps), attn.SCALE: bits(c.attention_scale), attn.CAP: bits(c.score_cap),
            attn.CHUNK if c.graph.chunked else attn.WINDOW: window, attn.AHEAD: ahead,
        }  # fmt: skip
        for word, number in numbers.items():
            self._block[index, :, word] = number
        for word, array in arrays.items():
            self._block[index, :, word] = address(array)
        for m, block in enumerate(self._block[index]):
            for word, array in rows.items():
                block[word] = 0 if array is None else address(array[m:])
            block[attn.CONTEXT] = self.caches[m].rows
            self._store_in(index, m)

    def _store_in(self, layer: int, m: int) -> None:
        """Let a layer use the memory of cache m."""
        cache, slot = self.caches[m], self._stored[layer]
        for word, arrays in (
            (attn.KEYS, cache.keys), (attn.VALUES, cache.values),
            (attn.KEY_SCALES, cache.key_scales), (attn.VALUE_SCALES, cache.value_scales),
        ):  # fmt: skip
            self._block[layer, m, word] = address(arrays[slot])

    def recur(self, layer: Recurrent, index: int, x: np.ndarray) -> np.ndarray:
        assert self._recurrent is not None
        assert self._steps is not None
        assert self.config.recurrent is not None
        number = self.config.recurrent.index_of(index)
        self._steps.products(x, self._recurrent.products(layer, number))
        self._recurrent.add(self._steps, layer, number)
        return self._recurrent.out

    def experts(
        self, experts: Experts, x: np.ndarray, name: str, routed: np.ndarray | None = None
    ) -> np.ndarray:  # fmt: skip
        assert self._steps is not None
        y = self._buffer(name, x.shape[1])
        self._steps.mix(experts, x, y, routed)
        return y

    def as_long(self, y: np.ndarray, x: np.ndarray) -> None:
        self._for_each(stream_ops.function("as_long"), address(y), address(x), y.shape[1])

    def predict(self, streams: list[np.ndarray], x: np.ndarray, layer: LayerStreams) -> None:
        block = self._stream_block(streams, x, layer)
        self._for_each(stream_ops.function("predict"), address(block))

    def correct(self, streams: list[np.ndarray], x: np.ndarray, layer: LayerStreams) -> np.ndarray:
        block = self._stream_block(streams, x, layer)
        self._for_each(stream_ops.function("correct"), address(block))
        return self._buffer("normed", x.shape[1])

    def _stream_block(self, streams: list[np.ndarray], x: np.ndarray, layer: LayerStreams) -> np.ndarray:
        """stream_ops.py's block of a layer, which the program keeps."""
        block = np.zeros(stream_ops.WORDS, np.int64)
        arrays = {
            stream_ops.X: x, stream_ops.OUT: self._buffer("normed", x.shape[1]), stream_ops.ROUTER: layer.router,
            stream_ops.ROUTER_NORM: layer.router_norm, stream_ops.PREDICT: layer.predict,
            stream_ops.CORRECT: layer.correct, stream_ops.SCALE: layer.scale,
            **{stream_ops.STREAM + i: stream for i, stream in enumerate(streams)},
        }  # fmt: skip
        for word, array in arrays.items():
            block[word] = address(array)
        block[stream_ops.HIDDEN], block[stream_ops.EPS] = x.shape[1], bits(self.config.norm_eps)
        self._now.keep(block)
        return block

    # programs

    @property
    def _now(self) -> Program:
        """The program that takes the next calls."""
        return self.embedding if self._steps is None else self._steps.program

    def _buffer(self, name: str, width: int) -> np.ndarray:
        if (name, width) not in self._buffers:
            self._buffers[name, width] = buffer(self.n, width)
        return self._buffers[name, width]

    def _add(self, function: Any, *arguments: Word, items: Word, shared: bool = False) -> int:
        return self._now.add(function, *arguments, items=items, shared=shared)

    def _for_each(self, function: Any, *arguments: int) -> None:
        """A call whose items are the tokens."""
        self._add(function, *arguments, items=every_token, shared=self.n > 1)


def unfit(weights: Weights) -> QuantTensor | None:
    """The first of the layers' matrices that a table of calls cannot multiply; None: all fit."""
    from bridge.runtime.cpu.engines.products import Interleaved

    matrices = [m for layer in weights.layers for m in layer.matrices]
    matrices += (m for m in weights.floating if m.type not in SIZES)
    for matrix in matrices:
        if matrix.change is not None or not isinstance(matrix._get_engine(), Interleaved):
            return matrix
    return None

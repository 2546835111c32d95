"""A decoder's computation as tables of calls (cpu/program.py): the steps between its products, or all of a token's.

`DecodeBuffers` holds the buffers and tables for n tokens: those that follow one another in one context, or one of each
of several contexts. The second kind, and a single token, has a table for the whole way through the layers, if there are
kernels for all matrices; in it, matrices that multiply the same vectors share their int8 records.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.cpu import activations, latent_attention
from bridge.runtime.cpu import attention as attn
from bridge.runtime.cpu import decoder_ops as ops
from bridge.runtime.cpu.program import FIELDS, KernelSlots, Program, add_products, address, bits, buffer, product
from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.experts import ExpertTables
from bridge.runtime.kv_cache import KVCache
from bridge.runtime.latent import LatentBuffers
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.recurrent import RecurrentBuffers
from bridge.runtime.weights import Layer, Weights

MIN_VALUES_TO_SHARE = 1 << 16  # values that a call reads before it is worth waking other threads


class Positions(NamedTuple):
    """What depends on a token's position: cos and sin, each [context, rotated / 2], and attention's temperatures."""

    angles: tuple[np.ndarray, np.ndarray]
    local_angles: tuple[np.ndarray, np.ndarray]  # of layers with a window
    temperatures: np.ndarray | None


class DecodeBuffers:
    """Buffers for n tokens, and the calls between the products.

    caches  one for tokens that follow one another, or n: a token of each
    """

    def __init__(self, c: DecoderConfig, layers: Sequence[Layer], n: int, caches: Sequence[KVCache]):
        self.n = n
        self.caches = list(caches)
        self.x, self.xn, self.delta = (buffer(n, c.hidden) for _ in range(3))
        self.q, self.attended = buffer(n, c.query_width), buffer(n, c.attended_width)
        self.with_gate = buffer(n, 2 * c.query_width if c.graph.output_gate else 0)  # q and its gate, head by head
        self.latent = LatentBuffers(c, n) if c.latent else None
        self.k, self.v = (buffer(n, c.kv_heads * c.head_dim) for _ in range(2))
        self.gate, self.up = (buffer(n, c.inner) for _ in range(2))
        self.tokens = np.zeros(n, np.int64)
        self.starts = np.zeros(len(caches), np.int64)
        self.spans = np.ones(1, np.int64)
        most = -(-caches[0].rows // attn.SPAN) if self.steps else 1
        self.parts = np.zeros((len(caches), c.heads, most, c.head_dim), np.float32)
        self.sums = np.zeros((len(caches), c.heads, most, 2), np.float32)
        self.block = np.zeros((c.layers, len(caches), attn.WORDS), np.int64)
        self.recurrent: RecurrentBuffers | None = None
        if c.recurrent is not None:
            own = [layer.recurrent for layer in layers if layer.recurrent is not None]
            self.recurrent = RecurrentBuffers(c.recurrent, own, n, caches, c.norm_eps)
        self._attending = c.attending
        self.programs: list[tuple[Program, ...]] = []
        self.embedding, self.final_norm = Program(), Program()
        self.full_program: Program | None = None
        self.full_program_tried = False
        self.slots: KernelSlots | None = None  # of the full program's matrices
        self.scores = np.empty((n, 0), np.float32)  # the logits, if the full program computes them
        self.attending: list[tuple[Program, int, int]] = []  # calls of attend and of merge, for `begin` to adapt

    @property
    def steps(self) -> bool:
        """Whether each context has one token here."""
        return self.n == len(self.caches)

    def mixing_products(self, layer: Layer) -> list[tuple[QuantTensor, np.ndarray]]:
        """The matrices that attention, or what takes its place, multiplies x with, and where the results go."""
        if self.recurrent is not None and layer.recurrent is not None:
            return self.recurrent.products(layer.recurrent)
        first: tuple[Any, np.ndarray] = (layer.q, self.with_gate if self.with_gate.size else self.q)
        if layer.q_a is not None and self.latent is not None:
            first = (layer.q_a, self.latent.q_a)
        pairs = first, (layer.k, self.k), (layer.v, self.v)
        return [(matrix, y) for matrix, y in pairs if matrix is not None]

    def mixed(self, layer: Layer) -> np.ndarray:
        """What the output matrix is multiplied by then."""
        return self.attended if self.recurrent is None or layer.recurrent is None else self.recurrent.out

    def network_products(self, layer: Layer) -> list[tuple[QuantTensor, np.ndarray]]:
        """The same for the network."""
        pairs = (layer.gate, self.gate), (layer.up, self.up)
        return [(matrix, y) for matrix, y in pairs if matrix is not None]

    def begin(self, tokens: Sequence[int], spread: int) -> None:
        """Set the tokens and their positions; `spread`: calls of attend for a span."""
        self.tokens[:] = tokens
        self.starts[:] = [cache.length for cache in self.caches]
        if self.steps:  # a cache that is there several times takes tokens that follow one another
            self.starts += [self.caches[:i].count(cache) for i, cache in enumerate(self.caches)]
        if self.recurrent is not None:
            self.recurrent.begin(self.caches)
        spans = -(-(int(self.starts.max()) + 1) // attn.SPAN) if self.steps else 1
        if spans != self.spans[0]:
            self.spans[0] = spans
            heads = self.parts.shape[0] * self.parts.shape[1]
            shared = heads * spans * self.parts.shape[3] > MIN_VALUES_TO_SHARE
            for program, attend, merge in self.attending:
                program.resize(attend, spread * spans, True)
                program.resize(merge, heads if spans > 1 else 0, shared)

    def use(self, caches: Sequence[KVCache]) -> None:
        """Let the tokens go into these caches, as many as before."""
        for index, cache in enumerate(caches):
            if self.caches[index] is not cache:
                self.caches[index] = cache
                self._store_in(index)

    def _store_in(self, index: int) -> None:
        cache = self.caches[index]
        for word, array in (
            (attn.KEYS, cache.keys), (attn.VALUES, cache.values),
            (attn.KEY_SCALES, cache.key_scales), (attn.VALUE_SCALES, cache.value_scales),
        ):  # fmt: skip
            self.block[self._attending, index, word] = address(array) + array.strides[0] * np.arange(len(array))
        if self.recurrent is not None:
            self.recurrent.store_in(index, cache)

    def fill_blocks(self, c: DecoderConfig, layers: Sequence[Layer], positions: Positions) -> None:
        """attention.py's block of every layer and cache."""
        for i, layer in enumerate(layers):
            cos, sin = positions.local_angles if c.windowed(i) else positions.angles
            by_head = _by_head(c, layer.q_norm)
            arrays = {
                attn.Q_BIAS: layer.q_bias, attn.K_BIAS: layer.k_bias, attn.V_BIAS: layer.v_bias,
                attn.Q_NORM: layer.q_norm if by_head else None, attn.K_NORM: layer.k_norm if by_head else None,
                attn.COS: cos, attn.SIN: sin, attn.SINKS: layer.sinks, attn.TEMPERATURES: positions.temperatures,
            }  # fmt: skip
            for m, block in enumerate(self.block[i]):
                own = {attn.Q: self.q, attn.K: self.k, attn.V: self.v, attn.OUT: self.attended, attn.START: self.starts}
                for word, array in arrays.items():
                    block[word] = address(array)
                for word, array in own.items():
                    block[word] = address(array[m:])
                block[attn.HEADS], block[attn.KV_HEADS], block[attn.HEAD_DIM] = c.heads, c.kv_heads, c.head_dim
                block[attn.ROTATED], block[attn.NEIGHBOURS] = c.rotated if c.rotates(i) else 0, int(c.graph.neighbours)
                block[attn.NORM_LAST] = int(c.graph.norms_rotated)
                block[attn.CONTEXT] = self.caches[m].rows
                block[attn.TOKENS], block[attn.EPS] = 1 if self.steps else self.n, bits(c.norm_eps)
                block[attn.SCALE], block[attn.CAP] = bits(c.attention_scale), bits(c.score_cap)
                block[attn.WINDOW] = c.window if c.windowed(i) else 0
                if self.latent is not None:
                    self.latent.fill(block, layer, self.q, m)
        for m in range(len(self.caches)):
            self._store_in(m)


class ProgramBuilder:
    """Builds the programs of a decoder."""

    def __init__(self, config: DecoderConfig, weights: Weights, precision: str, positions: Positions):
        self.config, self.precision = config, precision
        self.embedding, self.output, self.weights = weights.embedding, weights.output, weights
        self.layers = weights.layers
        self._positions = positions
        self._eps = bits(config.norm_eps)
        self._slots = KernelSlots(precision == "int8")

    def buffers(self, n: int, caches: Sequence[KVCache]) -> DecodeBuffers:
        """Buffers for n tokens, with the programs between a layer's products."""
        buffers = DecodeBuffers(self.config, self.layers, n, caches)
        buffers.fill_blocks(self.config, self.layers, self._positions)
        for i, layer in enumerate(self.layers):
            parts = tuple(Program() for _ in range(5))
            self._before(parts[0], buffers, i)
            self._queries(parts[1], buffers, layer)
            self._middle(parts[2], buffers, i)
            self._after(parts[3], buffers, layer)
            self._end(parts[4], buffers, layer)
            buffers.programs.append(parts)
        self._look_up(buffers.embedding, buffers)
        if self.weights.positions is not None:
            self._add_positions(buffers.embedding, buffers, self.weights.positions)
        self._final_norm(buffers.final_norm, buffers)
        return buffers

    def spread(self, buffers: DecodeBuffers) -> int:
        """Items of `attend` for one span."""
        tokens = 1 if buffers.steps else buffers.n
        rows = -(-tokens * (self.config.heads // self.config.kv_heads) // attn.ROWS)
        return rows * self.config.kv_heads * len(buffers.caches)

    def add_full_program(self, buffers: DecodeBuffers) -> None:
        """Set `full_program`, if all matrices of the layers multiply by row groups, prepared or not, without adapters.

        It includes the logits if the output matrix does so too: one of half floats does not.
        """
        from bridge.runtime.cpu.products import Interleaved

        if self.unfit(buffers.n) is not None:
            return
        program = Program()
        buffers.slots = self._slots = KernelSlots(self.precision == "int8")
        experts = ExpertTables(self.config, buffers.n, buffers.slots, self.products) if self.config.experts else None
        program.keep(experts)
        for i, layer in enumerate(self.layers):
            self._before(program, buffers, i)
            self.products(program, buffers.xn, buffers.mixing_products(layer))
            if buffers.latent is not None and layer.q_a is not None and layer.q is not None:
                self._queries(program, buffers, layer)
                self.products(program, buffers.latent.q_a, [(layer.q, buffers.q)])
            self._middle(program, buffers, i)
            self.products(program, buffers.mixed(layer), [(layer.o, buffers.delta)])
            self._after(program, buffers, layer)
            if experts is not None and layer.experts is not None:
                experts.add(program, layer.experts, buffers.xn, buffers.delta)
                continue
            self.products(program, buffers.xn, buffers.network_products(layer))
            self._end(program, buffers, layer)
            self.products(program, buffers.gate, [(layer.down, buffers.delta)])
        self._final_norm(program, buffers)
        engine: Any = self.output._get_engine()
        if isinstance(engine, Interleaved) and self.output.change is None:
            scores = buffer(buffers.n, engine.groups * engine.lanes)
            self.products(program, buffers.xn, [(self.output, scores)])
            buffers.scores = scores[:, : self.output.shape[0]]
        buffers.full_program = program

    def unfit(self, n: int) -> QuantTensor | None:
        """The first of the layers' matrices that a table of calls for n tokens cannot multiply; None: all fit."""
        from bridge.runtime.cpu.products import Interleaved

        several = n > 1 or self.config.experts > 0  # rows of y, into which the one before must not reach
        for matrix in (m for layer in self.layers for m in layer.matrices):
            engine: Any = matrix._get_engine()
            if matrix.change is not None or not isinstance(engine, Interleaved):
                return matrix
            if several and matrix.shape[0] % engine.lanes:
                return matrix
        return None

    def products(self, program: Program, x: np.ndarray, products: list[tuple[QuantTensor, np.ndarray]]) -> None:
        """y = W x for each pair, of buffers [n, in] and [n, rows]; types that read the same records share them."""
        integer = self.precision == "int8"
        records: dict[tuple[Any, ...], np.ndarray] = {}
        parts = []
        widths = []
        n = len(x)
        for matrix, y in products:
            engine: Any = matrix._get_engine()
            columns = engine.columns(n, integer)
            turns = -(-n // columns)
            widths.append(columns)
            form = engine.form(columns, integer)
            kind = activations.record_kind(matrix.type, integer, form)
            if kind not in records:
                size = activations.record_bytes(matrix.type, x.shape[1], integer, form)
                records[kind] = np.zeros(turns * columns * size, np.uint8)
                arguments = address(x), address(records[kind]), x.shape[1], columns
                program.add(
                    activations.quantize_function(matrix.type, integer, form),
                    *arguments,
                    items=n,
                    shared=x.size > MIN_VALUES_TO_SHARE,
                )
                program.keep(records[kind])
            parts.append(product(engine, records[kind], y, turns, columns, integer))
            program.keep(engine)
        fields = add_products(program, parts)
        for i, (matrix, y) in enumerate(products):
            self._slots.register(matrix, fields[i * FIELDS : i * FIELDS + 2], widths[i])
            if matrix.factor != 1:
                program.add(ops.function("scale"), address(y), y.size, bits(matrix.factor), items=1)

    def _look_up(self, program: Program, buffers: DecodeBuffers) -> None:
        """The tokens' rows of the embedding; the decoder looks them up where `looked_up_in_program` says no."""
        if looked_up_in_program(self.embedding):
            table = self.embedding.raw
            for t in range(buffers.n):
                place = address(buffers.tokens[t:]), address(buffers.x[t:]), self.config.hidden
                program.add(
                    ops.look_up_function(self.embedding.type), address(table), table.nbytes // self.embedding.shape[0],
                    *place, items=1,
                )  # fmt: skip
            program.keep(table)
        if self.config.embedding_scale != 1:
            arguments = address(buffers.x), buffers.x.size, bits(self.config.embedding_scale)
            program.add(ops.function("scale"), *arguments, items=1)

    def _add_positions(self, program: Program, buffers: DecodeBuffers, table: np.ndarray) -> None:
        """Embeddings of the tokens' positions."""
        each = buffers.n // len(buffers.caches)
        for m in range(len(buffers.caches)):
            place = address(buffers.x[m:]), address(table), address(buffers.starts[m:]), self.config.hidden
            program.add(ops.function("add_rows"), *place, items=each)

    def _before(self, program: Program, buffers: DecodeBuffers, index: int) -> None:
        """The last layer's result is added, x normalized."""
        if index:
            self._added(program, buffers, self.layers[index - 1])
        layer = self.layers[index]
        self._norm(program, buffers, buffers.delta if index else None, layer.attn_norm, layer.attn_norm_bias)

    def _added(self, program: Program, buffers: DecodeBuffers, layer: Layer) -> None:
        """Bias and norm of what a layer's network adds."""
        self._bias(program, layer.down_bias, buffers.delta)
        self._normalize(program, buffers.delta, layer.ffn_post_norm)

    def _normalize(self, program: Program, x: np.ndarray, weight: np.ndarray | None) -> None:
        """Normalize x in place, if there is a weight for it."""
        if weight is not None:
            arguments = address(x), 0, address(weight), address(x), x.shape[-1], self._eps, bits(1.0)
            program.add(ops.function("norm"), *arguments, items=len(x), shared=len(x) > 1)

    def _queries(self, program: Program, buffers: DecodeBuffers, layer: Layer) -> None:
        """The norm of what queries are made of, where that is not the state."""
        if buffers.latent is not None:
            self._normalize(program, buffers.latent.q_a, layer.q_a_norm)

    def _middle(self, program: Program, buffers: DecodeBuffers, index: int) -> None:
        """Rotation, storing, attention, its norm; or what takes its place in a layer with a state."""
        if buffers.recurrent is not None and self.config.recurrent and self.layers[index].recurrent is not None:
            buffers.recurrent.add(program, self.config.recurrent.place(index))
            return
        layer, block, kind = self.layers[index], address(buffers.block[index]), buffers.caches[0].kind
        heads = self.config.heads, self.config.head_dim
        if buffers.with_gate.size:
            place = address(buffers.with_gate), address(buffers.q)
            program.add(ops.function("split_gate"), *place, *heads, items=buffers.n, shared=buffers.n > 1)
        if self.config.graph.normed and not _by_head(self.config, layer.q_norm):
            self._normalize(program, buffers.q, layer.q_norm)
            self._normalize(program, buffers.k, layer.k_norm)
        count, latent = len(buffers.caches), buffers.latent
        attention = attn if latent is None else latent_attention
        program.add(attention.function("store", kind), block, count, items=buffers.n, shared=buffers.n > 1)
        if latent is not None and layer.latent_k is not None:
            latent.add_absorbed(program, layer.latent_k, buffers.q, self.config.heads)
        spans, most = int(buffers.spans[0]), buffers.parts.shape[2]
        arguments = block, count, address(buffers.spans), address(buffers.parts), address(buffers.sums), most
        items = self.spread(buffers) * spans
        attend = program.add(attention.function("attend", kind), *arguments, items=items, shared=True)
        function = partial(attn.function, "merge", kind)  # short contexts do not wait until it is compiled
        merge = program.add(function, *arguments, items=count * self.config.heads * (spans > 1))
        buffers.attending.append((program, attend, merge))
        if buffers.with_gate.size:
            place = address(buffers.with_gate), address(buffers.attended)
            program.add(ops.function("gate_heads"), *place, *heads, items=buffers.n, shared=buffers.n > 1)
        if latent is not None and layer.latent_v is not None:
            latent.add_values(program, layer.latent_v, buffers.attended)
        self._normalize(program, buffers.attended, layer.attn_sub_norm)

    def _after(self, program: Program, buffers: DecodeBuffers, layer: Layer) -> None:
        self._bias(program, layer.o_bias, buffers.delta)
        self._normalize(program, buffers.delta, layer.attn_post_norm)
        if self.config.graph.parallel:
            program.add(ops.function("add"), address(buffers.x), address(buffers.delta), buffers.x.size, items=1)
        else:
            self._norm(program, buffers, buffers.delta, layer.ffn_norm, layer.ffn_norm_bias)

    def _end(self, program: Program, buffers: DecodeBuffers, layer: Layer) -> None:
        self._bias(program, layer.gate_bias, buffers.gate)
        self._bias(program, layer.up_bias, buffers.up)
        inner, graph = self.config.inner, self.config.graph
        arguments = (address(buffers.up), inner) if graph.gated else (inner,)
        name = "geglu" if graph.gelu else "reglu2" if self.config.relu2 else "swiglu"
        function = ops.function(name if graph.gated else "gelu")
        program.add(function, address(buffers.gate), *arguments, items=buffers.n, shared=buffers.n > 1)
        self._normalize(program, buffers.gate, layer.ffn_sub_norm)

    def _final_norm(self, program: Program, buffers: DecodeBuffers) -> None:
        self._added(program, buffers, self.layers[-1])
        self._norm(program, buffers, buffers.delta, self.weights.output_norm, self.weights.output_norm_bias)

    def _norm(
        self,
        program: Program,
        buffers: DecodeBuffers,
        delta: np.ndarray | None,
        weight: np.ndarray | None,
        bias: np.ndarray | None = None,
    ) -> None:
        """x += delta, xn = x normalized."""
        x, out, hidden = address(buffers.x), address(buffers.xn), self.config.hidden
        if self.config.graph.layer_norm:
            function = ops.function("layer_norm")
            arguments = x, address(delta), address(weight), address(bias), out, hidden, self._eps
        else:
            function = ops.function("norm")
            scale = bits(self.config.residual_scale)
            arguments = x, address(delta), address(weight), out, hidden, self._eps, scale
        program.add(function, *arguments, items=buffers.n, shared=buffers.n > 1)

    def _bias(self, program: Program, bias: np.ndarray | None, y: np.ndarray) -> None:
        if bias is not None:
            program.add(ops.function("add"), address(y), address(bias), bias.size, items=len(y), shared=len(y) > 1)


def looked_up_in_program(embedding: QuantTensor) -> bool:
    """Whether the program finds the tokens' rows: not of types that are not block types, nor with an adapter."""
    return embedding.type in READ and embedding.change is None


def _by_head(c: DecoderConfig, norm: np.ndarray | None) -> bool:
    """Whether a weight is for each head, rather than for all of them together."""
    return norm is not None and norm.size == c.head_dim

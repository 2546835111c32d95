"""The way of tokens through a decoder's layers, written once, for both forms of steps (steps.py)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines.floats import SIZES
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops import decoder_ops as ops
from bridge.runtime.cpu.ops import latent_attention
from bridge.runtime.cpu.ops.program import Program, address, bits, buffer
from bridge.runtime.decoder.buffers import Attend, DecodeBuffers, Positions, is_by_head
from bridge.runtime.decoder.steps import Products, SingleProgram, SteppedProgram, Steps
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.layers.layers import Beside, Experts, Inputs, Laurel, Weights
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import MIN_VALUES_TO_SHARE


class ProgramBuilder:
    """Builds the ways of a decoder's tokens."""

    def __init__(self, config: DecoderConfig, weights: Weights, precision: str, positions: Positions):
        self.config, self.precision = config, precision
        self.embedding, self.output, self.weights = weights.embedding, weights.output, weights
        self.layers = weights.layers
        self._positions = positions
        self._eps = bits(config.norm_eps)
        self._ones = np.ones(config.hidden, np.float32)

    def buffers(self, n: int, caches: Sequence[KVCache]) -> DecodeBuffers:
        """Buffers for n tokens."""
        buffers = DecodeBuffers(self.config, self.layers, n, caches)
        buffers.fill_blocks(self.config, self.layers, self._positions)
        self._embed(buffers.embedding, buffers)
        return buffers

    def parts(self, buffers: DecodeBuffers) -> SteppedProgram:
        """The way with each product by itself."""
        parts = SteppedProgram(self.config, self.precision)
        self.walk(parts, buffers)
        return parts

    def table(self, buffers: DecodeBuffers) -> SingleProgram | None:
        """The way as one table; None if a matrix does not fit.

        It includes the logits, `buffers.scores`, if the output matrix multiplies by row groups: one of half floats does
        not.
        """
        from bridge.runtime.cpu.engines.products import Interleaved

        if self.unfit(buffers.n) is not None:
            return None
        table = SingleProgram(self.config, buffers.n, self.precision)
        self.walk(table, buffers)
        engine: Any = self.output._get_engine()
        if isinstance(engine, Interleaved) and self.output.change is None:
            scores = buffer(buffers.n, engine.groups * engine.lanes)
            table.products(buffers.xn, [(self.output, scores)])
            buffers.scores = scores[:, : self.output.shape[0]]
        return table

    def unfit(self, n: int) -> QuantTensor | None:
        """The first of the layers' matrices that a table of calls for n tokens cannot multiply; None: all fit."""
        from bridge.runtime.cpu.engines.products import Interleaved

        matrices = [m for layer in self.layers for m in layer.matrices]
        matrices += (m for m in self.weights.floating if m.type not in SIZES)
        several = n > 1 or self.config.experts > 0  # rows of y, into which the one before must not reach
        for matrix in matrices:
            engine: Any = matrix._get_engine()
            if matrix.change is not None or not isinstance(engine, Interleaved):
                return matrix
            if several and matrix.shape[0] % engine.lanes:
                return matrix
        return None

    def walk(self, steps: Steps, buffers: DecodeBuffers) -> None:
        """From the tokens' embeddings, `buffers.x`, to their normalized hidden states, `buffers.xn`."""
        if self.weights.inputs is not None:
            self._make_inputs(steps, buffers, self.weights.inputs)
        if self.weights.streams is not None and buffers.streams is not None:
            buffers.streams.begin(steps, self.weights.streams)
        added: np.ndarray | None = None  # to x, with the next norm
        for index, layer in enumerate(self.layers):
            if buffers.streams is not None:
                buffers.streams.predict(steps.program, index)
            self._norm(steps.program, buffers, added, layer.attn_norm, layer.attn_norm_bias)
            if layer.mixes:
                self._mix(steps, buffers, index)
            if layer.mixes and layer.down is not None:
                if self.config.graph.parallel:
                    self._add(steps.program, buffers.x, buffers.delta)
                elif layer.laurel is not None:
                    self._add_laurel(steps, buffers, layer.laurel)
                    self._norm(steps.program, buffers, None, layer.ffn_norm)
                else:
                    self._norm(steps.program, buffers, buffers.delta, layer.ffn_norm, layer.ffn_norm_bias)
            if layer.down is not None:
                self._feed(steps, buffers, index)
            added = self._finish(steps, buffers, index)
        if self.weights.streams is not None and buffers.streams is not None:
            buffers.streams.end(steps, self.weights.streams)
        self._norm(steps.program, buffers, added, self.weights.output_norm, self.weights.output_norm_bias)

    def look_up(self, buffers: DecodeBuffers) -> None:
        """The tokens' rows of tables that the program does not look up."""
        for table, rows in self._looked_up(buffers):
            if not _looked_up_in_program(table):
                rows[:] = table.rows(buffers.tokens.tolist())

    def _looked_up(self, buffers: DecodeBuffers) -> list[tuple[QuantTensor, np.ndarray]]:
        inputs = self.weights.inputs
        return [(self.embedding, buffers.x), *([] if inputs is None else [(inputs.embedding, buffers.inputs)])]

    def _embed(self, program: Program, buffers: DecodeBuffers) -> None:
        """The tokens' rows of the embedding, and of that of the layers' inputs."""
        for table, rows in self._looked_up(buffers):
            if _looked_up_in_program(table):
                function, row_bytes = ops.look_up_function(table.type), table.raw.nbytes // table.shape[0]
                for t in range(buffers.n):
                    arguments = address(buffers.tokens[t:]), address(rows[t:]), rows.shape[1]
                    program.add(function, address(table.raw), row_bytes, *arguments, items=1)
                program.keep(table.raw)
                self._scale(program, rows, table.factor)
        self._scale(program, buffers.x, self.config.embedding_scale)
        if self.weights.positions is not None:
            self._add_positions(program, buffers, self.weights.positions)

    def _add_positions(self, program: Program, buffers: DecodeBuffers, table: np.ndarray) -> None:
        """Embeddings of the tokens' positions."""
        each = buffers.n // len(buffers.caches)
        for m in range(len(buffers.caches)):
            arguments = address(buffers.x[m:]), address(table), address(buffers.starts[m:]), self.config.hidden
            program.add(ops.function("add_rows"), *arguments, items=each)

    def _make_inputs(self, steps: Steps, buffers: DecodeBuffers, inputs: Inputs) -> None:
        """What each layer gets: (rms(W x / sqrt(hidden)) * norm + sqrt(each) row) / sqrt(2)."""
        c, projected = self.config, buffers.projected
        steps.products(buffers.x, [(inputs.project, projected)])
        self._scale(steps.program, projected, c.hidden**-0.5)
        self._normalize(steps.program, projected.reshape(-1, c.each_input), inputs.norm)
        self._scale(steps.program, buffers.inputs, c.each_input**0.5)
        self._add(steps.program, buffers.inputs, projected)
        self._scale(steps.program, buffers.inputs, 0.5**0.5)

    def _finish(self, steps: Steps, buffers: DecodeBuffers, index: int) -> np.ndarray | None:
        """The layer's end; what is still to be added to x."""
        layer, c = self.layers[index], self.config
        if layer.input is None and layer.scale == 1:
            return buffers.delta
        self._add(steps.program, buffers.x, buffers.delta)
        state = buffers.x
        if buffers.streams is not None:
            buffers.streams.correct(steps.program, index)
            state = buffers.xn
        if layer.input is not None:
            steps.products(state, [(layer.input.gate, buffers.input)])
            layer_inputs = buffers.inputs[:, index * c.each_input :]
            arguments = address(buffers.input), address(layer_inputs), c.each_input, layer_inputs.strides[0]
            steps.program.add(ops.function("geglu"), *arguments, items=buffers.n, shared=buffers.n > 1)
            steps.products(buffers.input, [(layer.input.project, buffers.delta)])
            self._normalize(steps.program, buffers.delta, layer.input.norm)
            if buffers.streams is not None:
                buffers.streams.add(steps.program, buffers.delta)
            else:
                self._add(steps.program, buffers.x, buffers.delta)
        self._scale(steps.program, buffers.x, layer.scale)
        return None

    def _add_laurel(self, steps: Steps, buffers: DecodeBuffers, laurel: Laurel) -> None:
        """x = (x + attention's result + xn + what two matrices of low rank make of xn) / sqrt(2)."""
        low = buffers.low_rank[laurel.left.shape[0]]
        steps.products(buffers.xn, [(laurel.left, low)])
        steps.products(low, [(laurel.right, buffers.laurel)])
        self._normalize(steps.program, buffers.laurel, laurel.norm)
        for part in (buffers.delta, buffers.xn, buffers.laurel):
            self._add(steps.program, buffers.x, part)
        self._scale(steps.program, buffers.x, 0.5**0.5)

    def _mix(self, steps: Steps, buffers: DecodeBuffers, index: int) -> None:
        """delta = what attention makes of xn, what a layer with a state does, or the sum of the two."""
        layer, out = self.layers[index], buffers.delta
        if buffers.recurrent is not None and self.config.recurrent and layer.recurrent is not None:
            number = self.config.recurrent.index_of(index)
            steps.products(buffers.xn, buffers.recurrent.products(number, layer.recurrent))
            buffers.recurrent.add(steps, layer.recurrent, number)
            steps.products(buffers.recurrent.out, [(layer.recurrent.out, buffers.delta)])
            out = buffers.attention
        if layer.o is not None:
            self._queries(steps, buffers, index)
            self._attend(steps.program, buffers, index)
            steps.products(buffers.heads[index].attended, [(layer.o, out)])
            self._bias(steps.program, layer.o_bias, out)
            if out is not buffers.delta:
                self._add(steps.program, buffers.delta, out)
        self._normalize(steps.program, buffers.delta, layer.attn_post_norm)

    def _queries(self, steps: Steps, buffers: DecodeBuffers, index: int) -> None:
        """The products that make queries, keys and values."""
        layer, heads, latent = self.layers[index], buffers.heads[index], buffers.latent
        q = heads.with_gate if heads.with_gate.size else heads.q
        others: Products = [(layer.k, heads.k), (layer.v, heads.v)]
        if layer.q_a is None or latent is None:
            steps.products(buffers.xn, [(layer.q, q), *others])
            return
        steps.products(buffers.xn, [(layer.q_a, latent.q_a), *others])
        self._normalize(steps.program, latent.q_a, layer.q_a_norm)
        steps.products(latent.q_a, [(layer.q, q)])

    def _attend(self, program: Program, buffers: DecodeBuffers, index: int) -> None:
        """Rotation, storing, attention, its norm."""
        layer, block, kind = self.layers[index], address(buffers.block[index]), buffers.caches[0].kind
        c, heads, sizes = self.config, buffers.heads[index], self.config.heads_of(index)
        if heads.with_gate.size:
            gated = address(heads.with_gate), address(heads.q), c.heads, sizes.dim
            program.add(ops.function("split_gate"), *gated, items=buffers.n, shared=buffers.n > 1)
        if layer.v_norm is not None and layer.k is not None:
            source = heads.k if layer.v is None else heads.v
            self._normalize(program, source.reshape(-1, sizes.dim), layer.v_norm, heads.v)
        if c.graph.normed and not is_by_head(sizes, layer.q_norm):
            self._normalize(program, heads.q, layer.q_norm)
            self._normalize(program, heads.k, layer.k_norm)
        count, latent = len(buffers.caches), buffers.latent
        attention = attn if latent is None else latent_attention
        program.add(attention.function("store", kind), block, count, items=buffers.n, shared=buffers.n > 1)
        if latent is not None and layer.latent_k is not None:
            latent.add_absorbed(program, layer.latent_k, heads.q, c.heads)
        spans, most = int(buffers.spans[0]), buffers.parts.shape[2]
        tokens = buffers.n // count
        spread = -(-tokens * (c.heads // sizes.kv) // attn.ROWS) * sizes.kv * count
        arguments = block, count, address(buffers.spans), address(buffers.parts), address(buffers.sums), most
        attend = program.add(attention.function("attend", kind), *arguments, items=spread * spans, shared=True)
        function = partial(attn.function, "merge", kind)  # short contexts do not wait until it is compiled
        merge = program.add(function, *arguments, items=count * c.heads * (spans > 1))
        buffers.attending.append(Attend(program, attend, merge, spread))
        if heads.with_gate.size:
            gated = address(heads.with_gate), address(heads.attended), c.heads, sizes.dim
            program.add(ops.function("gate_heads"), *gated, items=buffers.n, shared=buffers.n > 1)
        if latent is not None and layer.latent_v is not None:
            latent.add_values(program, layer.latent_v, heads.attended)
        self._normalize(program, heads.attended, layer.attn_sub_norm)

    def _feed(self, steps: Steps, buffers: DecodeBuffers, index: int) -> None:
        """delta = what the network makes of xn."""
        layer = self.layers[index]
        if layer.experts is not None and layer.beside is None:
            steps.mix(layer.experts, buffers.xn, buffers.delta)
        else:
            gate, up = buffers.gated[index]
            steps.products(buffers.xn, [(layer.gate, gate), (layer.up, up)])
            self._bias(steps.program, layer.gate_bias, gate)
            self._bias(steps.program, layer.up_bias, up)
            if self.config.sparsity and math.isfinite(self.config.sparsity[index]):
                cut = address(gate), gate.shape[1], bits(self.config.sparsity[index])
                steps.program.add(ops.function("sparsify"), *cut, items=len(gate), shared=len(gate) > 1)
            self._activate(steps.program, index, gate, up if layer.up is not None else None)
            self._normalize(steps.program, gate, layer.ffn_sub_norm)
            steps.products(gate, [(layer.down, buffers.delta)])
        if layer.experts is not None and layer.beside is not None:
            self._mix_beside(steps, buffers, layer.experts, layer.beside)
        self._bias(steps.program, layer.down_bias, buffers.delta)
        self._normalize(steps.program, buffers.delta, layer.ffn_post_norm)

    def _mix_beside(self, steps: Steps, buffers: DecodeBuffers, experts: Experts, beside: Beside) -> None:
        """delta = what the network made, normalized, plus what experts make of x."""
        routed, read, added = buffers.beside
        self._normalize(steps.program, buffers.delta, beside.network)
        self._normalize(steps.program, buffers.x, self._ones, routed)
        self._normalize(steps.program, buffers.x, beside.before, read)
        steps.mix(experts, read, added, routed)
        self._normalize(steps.program, added, beside.after)
        self._add(steps.program, buffers.delta, added)

    def _activate(self, program: Program, index: int, gate: np.ndarray, up: np.ndarray | None) -> None:
        """gate = activation(gate), times up where there is one."""
        arguments: tuple[int, ...]
        if self.config.xielu:
            function = ops.function("xielu")
            arguments = address(gate), gate.shape[1], *map(bits, self.config.xielu[index])
        else:
            function = ops.activation(self.config.activation, up is not None)
            arguments = address(gate), address(up), gate.shape[1]
        program.add(function, *arguments, items=len(gate), shared=len(gate) > 1)

    def _norm(
        self, program: Program, buffers: DecodeBuffers, delta: np.ndarray | None, weight: np.ndarray | None,
        bias: np.ndarray | None = None,
    ) -> None:  # fmt: skip
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

    def _normalize(
        self, program: Program, x: np.ndarray, weight: np.ndarray | None, out: np.ndarray | None = None
    ) -> None:
        """Normalize x, in place or into another buffer, if there is a weight for it."""
        if weight is not None:
            target = address(x if out is None else out)
            arguments = address(x), 0, address(weight), target, x.shape[-1], self._eps, bits(1.0)
            program.add(ops.function("norm"), *arguments, items=len(x), shared=x.size > MIN_VALUES_TO_SHARE)

    def _bias(self, program: Program, bias: np.ndarray | None, y: np.ndarray) -> None:
        if bias is not None:
            program.add(ops.function("add"), address(y), address(bias), bias.size, items=len(y), shared=len(y) > 1)

    def _add(self, program: Program, x: np.ndarray, y: np.ndarray) -> None:
        """x += y."""
        program.add(ops.function("add"), address(x), address(y), x.size, items=1)

    def _scale(self, program: Program, x: np.ndarray, factor: float) -> None:
        """x *= factor."""
        if factor != 1:
            program.add(ops.function("scale"), address(x), x.size, bits(factor), items=1)


def _looked_up_in_program(embedding: QuantTensor) -> bool:
    """Whether the program finds the tokens' rows: not of types that are not block types, nor with an adapter."""
    return embedding.type in READ and embedding.change is None

"""A decoder's layers run on a GGUF's tensors: tokens in, hidden states out, the cache filled.

    x  = embedding rows
    for each layer:
        q, k, v = W x^        x^ = norm(x)
        a = attention(q, cache of k, v)                     see cpu/attention.py
        x = x + W_o a
        x = x + W_down (silu(W_gate x^) * W_up x^)          x^ = norm(x); of experts see experts.py
    logits = W_output norm(x)

Granite multiplies embeddings and what is added by factors; GLM-4, OLMo 2 and Gemma normalize what is added, OLMo 2 that
alone; Gemma caps scores and logits by tanh, and attends to a window in most layers (`DecoderConfig`).

A single token whose matrices are all prepared runs as one table of calls (`cpu/program.py`), in which
matrices that multiply the same vector share its int8 records. Everything else, prompts above all, goes
matrix by matrix through `QuantTensor.matmul`, with the same functions in between.

The first batch runs on the file's own blocks. Every later one has an eighth of the matrices repacked before it,
until all are: the first token comes at once, the next few a little slower, and who reads one prompt and no more
never pays for a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bridge.blocks import READ
from bridge.runtime.batches import last_states
from bridge.runtime.cpu import attention as attn
from bridge.runtime.cpu import decoder_ops as ops
from bridge.runtime.cpu.program import Product, Program, add_products
from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.experts import mix
from bridge.runtime.kv_cache import KVCache
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.sampling import Sampler, drawn_on_host
from bridge.runtime.weights import Layer, read_weights

BATCH = 512  # tokens that pass through the layers together
_PARTS = 8  # the weights are repacked in so many parts, one before each batch


class Decoder:
    """The layers of a GGUF with a cache of keys and values."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, context: int, kv: str, precision: str):
        self.config, self.precision = config, precision
        weights = read_weights(file, config, whole=True)  # checks what the cache takes memory for
        self.cache = KVCache(config, context, kv)
        self.embedding, self.output = weights.embedding, weights.output
        self.vocab = self.embedding.shape[0]
        self.output_norm, self.layers = weights.output_norm, weights.layers
        factors = weights.rope_factors
        if weights.long_factors is not None and context > config.rope_original_context:
            factors = weights.long_factors
        self._angles = config.angles(self.cache.rows, factors)
        self._local_angles = config.local().angles(self.cache.rows, None) if config.window else self._angles
        self._start = np.zeros(1, np.int64)
        self._last_token = np.zeros(1, np.int64)
        self._row = np.empty(0, np.float32)  # of logits, if the token's program writes them
        self._eps = _bits(config.norm_eps)
        self._work: dict[int, _Work] = {}
        self._token: Program | None = None
        self._matrices = [m for layer in self.layers for m in layer.matrices] + [self.output]
        self._prepared = 0  # so many of these matrices are repacked
        self._begun = False
        self.preparing = 0.0  # seconds that repacking has taken so far

    def begin(self) -> None:
        """Be ready for tokens: as it is."""

    def prepare(self) -> None:
        """Repack every matrix for this machine, and let go of the file's own pages."""
        self._prepare(sum(m.nbytes for m in self._matrices))

    def _prepare(self, nbytes: int) -> None:
        """Repack matrices of so many bytes, at least one."""
        start = time.perf_counter()
        while nbytes > 0 and self._prepared < len(self._matrices):
            matrix = self._matrices[self._prepared]
            if not matrix.prepared:
                matrix.prepare()
                matrix.release_raw()
            nbytes -= matrix.nbytes
            self._prepared += 1
        self.preparing += time.perf_counter() - start

    def run(self, tokens: Sequence[int], keep: int = 1) -> np.ndarray:
        """Append tokens to the cache; the last `keep` of their normalized hidden states, float32 [keep, hidden].

        The tokens must fit the cache, `Model` sees to that.
        """
        return np.concatenate([hidden.copy() for hidden in last_states(self._batch, tokens, BATCH, keep)])

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        return self._capped(self.output.matmul(hidden, precision=self.precision))

    def _capped(self, scores: np.ndarray) -> np.ndarray:
        cap = np.float32(self.config.logit_cap)
        return cap * np.tanh(scores / cap) if cap else scores

    def scores(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, vocab] of the last `keep` tokens, from an empty context."""
        self.cache.length = 0
        return self.logits(self.run(tokens, keep))

    @property
    def read(self) -> list[int]:
        """The tokens that the cache holds."""
        return self.cache.tokens[: self.cache.length]

    def draw(self, tokens: Sequence[int], sampler: Sampler, kept: int = 0) -> Iterator[int]:
        """What follows the tokens, drawn one by one, until the context is full; the cache holds the first `kept`."""
        self.cache.length = kept
        yield from drawn_on_host(self, self.logits(self.run(tokens[kept:]))[0], sampler)

    def next_scores(self, token: int) -> np.ndarray:
        """float32 [vocab] of what follows one more token; the next call may overwrite them."""
        hidden = self.run([token])
        return self._capped(self._row) if self._row.size else self.logits(hidden)[0]

    def _batch(self, tokens: Sequence[int]) -> np.ndarray:
        n = len(tokens)
        if self._begun and self._prepared < len(self._matrices):
            self._prepare(sum(m.nbytes for m in self._matrices) // _PARTS)
        self._begun = True
        self._start[0] = self.cache.length
        work = self._workspace(n)
        if n == 1 and (program := self._token_program(work)) is not None:
            self._last_token[0] = tokens[0]
            if self.embedding.type not in READ:
                work.x[:] = self.embedding.rows(tokens)
            program.run()
        else:
            work.x[:] = self.embedding.rows(tokens)
            work.x *= np.float32(self.config.embedding_scale)
            self._layer_by_layer(work)
        self.cache.tokens[self.cache.length :] = tokens
        self.cache.length += n
        return work.xn

    def _layer_by_layer(self, work: _Work) -> None:
        for layer, (before, middle, after, end) in zip(self.layers, work.programs, strict=True):
            before.run()
            for matrix, y in ((layer.q, work.q), (layer.k, work.k), (layer.v, work.v)):
                matrix.matmul(work.xn, y, self.precision)
            middle.run()
            layer.o.matmul(work.attended, work.delta, self.precision)
            after.run()
            if layer.experts is not None:
                work.delta[:] = mix(layer.experts, work.xn, self.config, self.precision)
                continue
            layer.gate.matmul(work.xn, work.gate, self.precision)
            layer.up.matmul(work.xn, work.up, self.precision)
            end.run()
            layer.down.matmul(work.gate, work.delta, self.precision)
        work.last.run()

    # tables of calls

    def _workspace(self, n: int) -> _Work:
        """Buffers and programs for batches of n tokens; besides those of one token, only the last size is kept."""
        if n not in self._work:
            self._work = {size: work for size, work in self._work.items() if size == 1}
            work = self._work[n] = _Work(self.config, n)
            work.block = self._blocks(work)
            for i, layer in enumerate(self.layers):
                parts = tuple(Program() for _ in range(4))
                self._before(parts[0], work, i)
                self._middle(parts[1], work, i)
                self._after(parts[2], work, layer)
                self._end(parts[3], work, layer)
                work.programs.append(parts)
            self._last(work.last, work)
        return self._work[n]

    def _token_program(self, work: _Work) -> Program | None:
        """One token through all layers, if their matrices are prepared for it and there are no experts to choose from.

        And on to the logits, if the output matrix is prepared too: one of halves never is.
        """
        if self._token is None and not self.config.experts:
            from bridge.runtime.cpu.prepared import Prepared

            if self._prepared < len(self._matrices):
                return None
            *inner, last = [isinstance(m._get_engine(), Prepared) for m in self._matrices]
            if not all(inner):
                return None
            program = Program()
            self._look_up(program, work.x)
            for i, layer in enumerate(self.layers):
                self._before(program, work, i)
                self._products(program, work.xn, [(layer.q, work.q), (layer.k, work.k), (layer.v, work.v)])
                self._middle(program, work, i)
                self._products(program, work.attended, [(layer.o, work.delta)])
                self._after(program, work, layer)
                self._products(program, work.xn, [(layer.gate, work.gate), (layer.up, work.up)])
                self._end(program, work, layer)
                self._products(program, work.gate, [(layer.down, work.delta)])
            self._last(program, work)
            if last:
                self._row = _buffer(1, self.vocab)[0]
                self._products(program, work.xn, [(self.output, self._row)])
            self._token = program
        return self._token

    def _look_up(self, program: Program, x: np.ndarray) -> None:
        """The last token's row of the embedding; `_batch` does it for types that are no blocks."""
        if self.embedding.type in READ:
            table = self.embedding.raw
            arguments = _address(table), table.nbytes // self.vocab, _address(self._last_token), _address(x), x.size
            program.add(ops.look_up_function(self.embedding.type), *arguments, items=1)
            program.keep(table)
        if self.config.embedding_scale != 1:
            program.add(ops.function("scale"), _address(x), x.size, _bits(self.config.embedding_scale), items=1)

    def _before(self, program: Program, work: _Work, index: int) -> None:
        """The last layer's result is added, x normalized."""
        if index:
            self._added(program, work, self.layers[index - 1])
        self._norm(program, work, work.delta if index else None, self.layers[index].attn_norm)

    def _added(self, program: Program, work: _Work, layer: Layer) -> None:
        """What a layer's network adds, made ready."""
        self._bias(program, layer.down_bias, work.delta)
        self._normalize(program, work.delta, layer.ffn_post_norm)

    def _normalize(self, program: Program, x: np.ndarray, weight: np.ndarray | None) -> None:
        """x normalized in place, if there is a weight for it."""
        if weight is not None:
            arguments = _address(x), 0, _address(weight), _address(x), x.shape[-1], self._eps, _bits(1.0)
            program.add(ops.function("norm"), *arguments, items=len(x), shared=len(x) > 1)

    def _middle(self, program: Program, work: _Work, index: int) -> None:
        """Rotation, storing, attention."""
        layer, block = self.layers[index], work.block[index].ctypes.data
        if self.config.graph.normed and not self._by_head(layer.q_norm):
            self._normalize(program, work.q, layer.q_norm)
            self._normalize(program, work.k, layer.k_norm)
        kind = self.cache.kind
        groups = -(-work.n * (self.config.heads // self.config.kv_heads) // attn.ROWS) * self.config.kv_heads
        program.add(attn.function("store", kind), block, items=work.n, shared=work.n > 1)
        program.add(attn.function("attend", kind), block, items=groups, shared=True)

    def _after(self, program: Program, work: _Work, layer: Layer) -> None:
        self._bias(program, layer.o_bias, work.delta)
        self._normalize(program, work.delta, layer.attn_post_norm)
        self._norm(program, work, work.delta, layer.ffn_norm)

    def _end(self, program: Program, work: _Work, layer: Layer) -> None:
        self._bias(program, layer.gate_bias, work.gate)
        self._bias(program, layer.up_bias, work.up)
        arguments = _address(work.gate), _address(work.up), self.config.inner
        program.add(
            ops.function("geglu" if self.config.graph.gelu else "swiglu"), *arguments, items=work.n, shared=work.n > 1
        )

    def _last(self, program: Program, work: _Work) -> None:
        self._added(program, work, self.layers[-1])
        self._norm(program, work, work.delta, self.output_norm)

    def _norm(self, program: Program, work: _Work, delta: np.ndarray | None, weight: Any) -> None:
        arguments = _address(work.x), _address(delta), _address(weight), _address(work.xn), self.config.hidden
        scale = _bits(self.config.residual_scale)
        program.add(ops.function("norm"), *arguments, self._eps, scale, items=work.n, shared=work.n > 1)

    def _bias(self, program: Program, bias: np.ndarray | None, y: np.ndarray) -> None:
        if bias is not None:
            arguments = _address(y), _address(bias), bias.size
            program.add(ops.function("add"), *arguments, items=len(y), shared=len(y) > 1)

    def _products(self, program: Program, x: np.ndarray, products: list[tuple[QuantTensor, np.ndarray]]) -> None:
        """y = W x for each pair; x becomes records once for all types that read the same ones."""
        from bridge.runtime.cpu import interleaved

        integer = self.precision == "int8"
        records: dict[tuple[Any, ...], np.ndarray] = {}
        parts = []
        for matrix, y in products:
            kind = ops.record_kind(matrix.type, integer)
            if kind not in records:
                records[kind] = np.empty(ops.record_bytes(matrix.type, x.size, integer), np.uint8)
                function = ops.quantize_function(matrix.type, integer)
                program.add(function, _address(x), _address(records[kind]), x.size, items=1)
                program.keep(records[kind])
            engine: Any = matrix._get_engine()
            if y.base is None or engine.groups * engine.lanes > y.base.size:
                raise AssertionError(f"{matrix.name}: rows beyond the buffer")
            product = interleaved.kernel(matrix.type, engine.target, 1, integer)
            program.keep(product, engine)
            part = Product(
                product.address, engine.address, _address(records[kind]), _address(y), engine.blocks, engine.stride,
                engine.groups,
            )  # fmt: skip
            parts.append(part)
        add_products(program, parts)
        for matrix, y in products:
            if matrix.factor != 1:
                program.add(ops.function("scale"), _address(y), y.size, _bits(matrix.factor), items=1)

    def _blocks(self, work: _Work) -> np.ndarray:
        """attention.py's block of every layer."""
        c, cache = self.config, self.cache
        blocks = np.zeros((c.layers, attn.WORDS), np.int64)
        for i, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            cos, sin = self._local_angles if c.windowed(i) else self._angles
            by_head = self._by_head(layer.q_norm)
            arrays = {
                attn.Q: work.q, attn.K: work.k, attn.V: work.v, attn.OUT: work.attended,
                attn.Q_BIAS: layer.q_bias, attn.K_BIAS: layer.k_bias, attn.V_BIAS: layer.v_bias,
                attn.Q_NORM: layer.q_norm if by_head else None, attn.K_NORM: layer.k_norm if by_head else None,
                attn.COS: cos, attn.SIN: sin,
                attn.KEYS: cache.keys[i], attn.VALUES: cache.values[i], attn.START: self._start,
                attn.KEY_SCALES: cache.key_scales[i], attn.VALUE_SCALES: cache.value_scales[i],
            }  # fmt: skip
            for word, array in arrays.items():
                block[word] = _address(array)
            block[attn.HEADS], block[attn.KV_HEADS], block[attn.HEAD_DIM] = c.heads, c.kv_heads, c.head_dim
            block[attn.ROTATED], block[attn.NEIGHBOURS] = c.rotated if c.rotates(i) else 0, int(c.neighbours)
            block[attn.CONTEXT], block[attn.TOKENS], block[attn.EPS] = cache.rows, work.n, self._eps
            block[attn.SCALE], block[attn.CAP] = _bits(c.attention_scale), _bits(c.score_cap)
            block[attn.WINDOW] = c.window if c.windowed(i) else 0
        return blocks

    def _by_head(self, norm: np.ndarray | None) -> bool:
        """Whether a weight is for each head, rather than for all of them together."""
        return norm is not None and norm.size == self.config.head_dim


class _Work:
    """Buffers for n tokens, and the calls that stand between the products."""

    def __init__(self, c: DecoderConfig, n: int):
        self.n = n
        self.x = _buffer(n, c.hidden)
        self.xn = _buffer(n, c.hidden)
        self.delta = _buffer(n, c.hidden)
        self.q = _buffer(n, c.heads * c.head_dim)
        self.k = _buffer(n, c.kv_heads * c.head_dim)
        self.v = _buffer(n, c.kv_heads * c.head_dim)
        self.attended = _buffer(n, c.heads * c.head_dim)
        self.gate = _buffer(n, c.inner)
        self.up = _buffer(n, c.inner)
        self.block = np.empty(0)
        self.programs: list[tuple[Program, ...]] = []
        self.last = Program()


def _buffer(n: int, columns: int) -> np.ndarray:
    """float32 [n, columns], with room behind it for a last row group that reaches beyond the rows."""
    return np.zeros(n * columns + 16, np.float32)[: n * columns].reshape(n, columns)


def _bits(value: float) -> int:
    return int(np.array(value, np.float64).view(np.int64))


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data

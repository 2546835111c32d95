"""The buffers of a decoder for n tokens, and the blocks of arguments that attention reads.

The tokens follow one another in one context, or there is one of each of several contexts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig, Heads
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops.program import Program, address, bits, buffer
from bridge.runtime.decoder.latent import LatentBuffers
from bridge.runtime.decoder.recurrent import RecurrentBuffers
from bridge.runtime.decoder.steps import SingleProgram, SteppedProgram
from bridge.runtime.decoder.streams import StreamBuffers
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.layers.layers import Layer
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.cpu.memory import zeros_filled_later
from bridge.system.threads.pool import MIN_VALUES_TO_SHARE

_FIRST = 256  # positions that are filled at least


class Positions:
    """What depends on a token's position, for the first ones alone: a long context's table takes seconds.

    angles        cos and sin, each float32 [context, rotated / 2], zeros beyond the positions that `reach` was given
    local_angles  the same of layers with a window
    temperatures  of attention, float32 [context], or None
    """

    def __init__(self, config: DecoderConfig, context: int, factors: np.ndarray | None):
        self._config, self._factors, self._filled = config, factors, 0
        self.temperatures = config.temperatures(context)
        self.angles = self._zeros(config.angles(0, factors), context)
        self.local_angles = self._zeros(config.local_angles(0, factors), context) if config.windows else self.angles

    @staticmethod
    def _zeros(empty: tuple[np.ndarray, np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = (zeros_filled_later((context, part.shape[1]), part.dtype) for part in empty)
        return cos, sin

    def reach(self, count: int) -> None:
        """Fill the tables of the first `count` positions at least."""
        if count <= self._filled:
            return
        start, stop = self._filled, min(len(self.angles[0]), max(count, 2 * self._filled, _FIRST))
        of_positions = [(self.angles, self._config.angles(stop, self._factors, start))]
        if self.local_angles is not self.angles:
            of_positions.append((self.local_angles, self._config.local_angles(stop, self._factors, start)))
        for tables, rows in of_positions:
            for table, part in zip(tables, rows, strict=True):
                table[start:stop] = part
        self._filled = stop


class HeadBuffers:
    """What attention reads and makes in layers whose heads are alike."""

    def __init__(self, c: DecoderConfig, heads: Heads, n: int):
        query, attended = c.widths(heads)
        self.q, self.attended = buffer(n, query), buffer(n, attended)
        self.with_gate = buffer(n, 2 * query if c.graph.output_gate else 0)  # q and its gate, head by head
        self.k, self.v = (buffer(n, heads.kv * heads.dim) for _ in range(2))


class Attend(NamedTuple):
    """The calls of attend and of merge in a program, for `begin` to adapt; `spread`: items of attend for a span."""

    program: Program
    attend: int
    merge: int
    spread: int


class DecodeBuffers:
    """Buffers for n tokens.

    caches  one for tokens that follow one another, or n: a token of each
    """

    def __init__(self, c: DecoderConfig, layers: Sequence[Layer], n: int, caches: Sequence[KVCache]):
        self.n = n
        self.caches = list(caches)
        self.x, self.xn, self.delta = (buffer(n, c.hidden) for _ in range(3))
        kinds = {heads: HeadBuffers(c, heads, n) for heads in {c.heads_of(i) for i in c.attending}}
        self.heads = {i: kinds[c.heads_of(i)] for i in c.attending}
        self.attention = buffer(n, c.hidden if c.graph.side_by_side else 0)  # what it adds to that of a state
        self.latent = LatentBuffers(c, n) if c.latent else None
        widths = {width: (buffer(n, width), buffer(n, width)) for width in {c.inner_of(i) for i in range(c.layers)}}
        self.gated = [widths[c.inner_of(i)] for i in range(c.layers)]  # gate and up
        self.beside = [buffer(n, c.hidden) for _ in range(3 if c.experts and c.graph.beside else 0)]
        self.inputs, self.projected = (buffer(n, c.layers * c.each_input) for _ in range(2))  # layer by layer
        self.input = buffer(n, c.each_input)
        self.streams: StreamBuffers | None = None
        streams = [layer.streams for layer in layers if layer.streams is not None]
        if streams:
            self.streams = StreamBuffers(streams, self.x, self.xn, c.norm_eps)
        ranks = {layer.laurel.left.shape[0] for layer in layers if layer.laurel is not None}
        self.low_rank = {rank: buffer(n, rank) for rank in ranks}
        self.laurel = buffer(n, c.hidden if ranks else 0)
        self.tokens = np.zeros(n, np.int64)
        self.starts = np.zeros(len(caches), np.int64)
        self.spans = np.ones(1, np.int64)
        most = -(-caches[0].rows // attn.SPAN) if self.one_token_each else 1
        widest = max((heads.dim for heads in kinds), default=0)
        self.parts = np.zeros((len(caches), c.heads, most, widest), np.float32)
        self.sums = np.zeros((len(caches), c.heads, most, 2), np.float32)
        self.block = np.zeros((c.layers, len(caches), attn.WORDS), np.int64)
        self.recurrent: RecurrentBuffers | None = None
        if c.recurrent is not None:
            recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
            self.recurrent = RecurrentBuffers(c.recurrent, recurrent, n, caches, c.norm_eps)
        self._stored = c.stored
        self.embedding = Program()
        self.program: SingleProgram | SteppedProgram | None = None  # through the layers
        self.scores = np.empty((n, 0), np.float32)  # the logits, if a single program computes them
        self.attending: list[Attend] = []

    @property
    def one_token_each(self) -> bool:
        """Whether each context has one token here."""
        return self.n == len(self.caches)

    def refresh(self, matrix: QuantTensor) -> None:
        """Use the present engine of a matrix."""
        if isinstance(self.program, SingleProgram):
            self.program.slots.refresh(matrix)

    def begin(self, tokens: Sequence[int]) -> None:
        """Set the tokens and their positions."""
        self.tokens[:] = tokens
        self.starts[:] = [cache.length for cache in self.caches]
        if self.one_token_each:  # a cache that is there several times takes tokens that follow one another
            self.starts += [self.caches[:i].count(cache) for i, cache in enumerate(self.caches)]
        if self.recurrent is not None:
            self.recurrent.begin(self.caches)
        spans = -(-(int(self.starts.max()) + 1) // attn.SPAN) if self.one_token_each else 1
        if spans != self.spans[0]:
            self.spans[0] = spans
            heads = self.parts.shape[0] * self.parts.shape[1]
            shared = heads * spans * self.parts.shape[3] > MIN_VALUES_TO_SHARE
            for call in self.attending:
                call.program.resize(call.attend, call.spread * spans, True)
                call.program.resize(call.merge, heads if spans > 1 else 0, shared)

    def use(self, caches: Sequence[KVCache]) -> None:
        """Let the tokens go into these caches, as many as before."""
        for index, cache in enumerate(caches):
            if self.caches[index] is not cache:
                self.caches[index] = cache
                self._store_in(index)

    def _store_in(self, index: int) -> None:
        cache = self.caches[index]
        for layer, slot in self._stored.items():
            for word, arrays in (
                (attn.KEYS, cache.keys), (attn.VALUES, cache.values),
                (attn.KEY_SCALES, cache.key_scales), (attn.VALUE_SCALES, cache.value_scales),
            ):  # fmt: skip
                self.block[layer, index, word] = address(arrays[slot])

    def fill_blocks(self, c: DecoderConfig, layers: Sequence[Layer], positions: Positions) -> None:
        """attention.py's block of every layer with attention, and cache."""
        for i in self.heads:
            layer = layers[i]
            cos, sin = positions.local_angles if c.windowed(i) else positions.angles
            heads = c.heads_of(i)
            by_head = is_by_head(heads, layer.q_norm)
            arrays = {
                attn.Q_BIAS: layer.q_bias, attn.K_BIAS: layer.k_bias, attn.V_BIAS: layer.v_bias,
                attn.Q_NORM: layer.q_norm if by_head else None, attn.K_NORM: layer.k_norm if by_head else None,
                attn.COS: cos, attn.SIN: sin, attn.SINKS: layer.sinks,
                attn.TEMPERATURES: positions.temperatures if c.tempered(i) else None,
            }  # fmt: skip
            b = self.heads[i]
            places = {attn.Q: b.q, attn.K: b.k, attn.V: b.v, attn.OUT: b.attended, attn.START: self.starts}
            for m, block in enumerate(self.block[i]):
                for word, array in arrays.items():
                    block[word] = address(array)
                for word, rows in places.items():
                    block[word] = address(rows[m:])
                if not c.makes_keys(i):
                    block[attn.K] = 0
                block[attn.HEADS], block[attn.KV_HEADS], block[attn.HEAD_DIM] = c.heads, heads.kv, heads.dim
                block[attn.ROTATED], block[attn.NEIGHBOURS] = heads.rotated, int(c.graph.neighbours)
                block[attn.NORM_LAST] = int(c.graph.norms_rotated)
                block[attn.CONTEXT] = self.caches[m].rows
                block[attn.TOKENS], block[attn.EPS] = 1 if self.one_token_each else self.n, bits(c.norm_eps)
                block[attn.SCALE], block[attn.CAP] = bits(c.attention_scale), bits(c.score_cap)
                block[attn.CHUNK if c.graph.chunked else attn.WINDOW] = c.window if c.windowed(i) else 0
                if self.latent is not None:
                    self.latent.fill(block, layer, b.q, m)
        for m in range(len(self.caches)):
            self._store_in(m)


def is_by_head(heads: Heads, norm: np.ndarray | None) -> bool:
    """Whether a weight is for each head, rather than for all of them together."""
    return norm is not None and norm.size == heads.dim

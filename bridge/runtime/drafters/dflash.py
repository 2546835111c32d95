"""DFlash: layers that guess a block of tokens at once, by filling in masked ones.

g  = norm(W_fc [states of token i before some layers])         keys and values of token i in every layer, turned
x  = embeddings of [last token, mask, mask, ...]
for each layer:
    x = x + W_o attention(q, k, v of norm(x)) to all g and to the whole block
    x = x + network(norm(x))
logits of the block's tokens = W_output norm(x)
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.decoder.numpy_machine import rms
from bridge.runtime.drafters.attention import KeysAndValues, Rotation, attended, headwise, within
from bridge.runtime.drafters.draft_file import DraftFile
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.drafters.network import Network
from bridge.runtime.tokenizer import common_prefix

_LONGEST_BLOCK = 1024  # tokens


class _Layer:
    """The matrices and norms of a layer."""

    def __init__(self, file: DraftFile, index: int):
        c, name = file.config, f"blk.{index}"
        self.index, self.heads = index, c.heads_of(index)
        q, kv = c.heads * self.heads.dim, self.heads.kv * self.heads.dim
        self.norm = file.vector(f"{name}.attn_norm", c.hidden)
        self.q, self.k, self.v = (
            file.matrix(f"{name}.attn_{part}", rows, c.hidden) for part, rows in (("q", q), ("k", kv), ("v", kv))
        )
        self.q_norm, self.k_norm = (file.vector(f"{name}.attn_{part}_norm", self.heads.dim) for part in "qk")
        self.o = file.matrix(f"{name}.attn_output", c.hidden, q)
        self.network = Network(file, index)


class DFlash:
    """The layers, embeddings and head."""

    def __init__(self, file: DraftFile):
        c, target = file.config, file.target
        self.file, self.config, self.precision = file, c, target.precision
        layers = file.target_layers()
        states = len(layers) * target.config.hidden
        if (fused := file.file["fc.weight"].shape[1]) != states:
            raise file.of_another(f"it reads states of {fused} elements, the model's have {states}")
        self.fuse, self.fuse_norm = file.matrix("fc", c.hidden, states), file.vector("enc.output_norm", c.hidden)
        self.layers = [_Layer(file, index) for index in range(c.layers)]
        self.embedding, self.output = file.embeddings(), file.head(tied=True)
        self.output_norm = file.vector("output_norm", c.hidden)
        self.mask = file.file.metadata.get("tokenizer.ggml.mask_token_id")
        self.block, self.causal = file.get("block_size", 16), bool(file.get("attention.causal", False))
        if not isinstance(self.mask, int) or not 0 <= self.mask < self.embedding.shape[0]:
            raise BridgeError(
                f"{file.path}: tokenizer.ggml.mask_token_id is {self.mask!r}; must be one of the "
                f"{self.embedding.shape[0]} tokens: set it in the drafter's config.json, and convert that again"
            )
        if not isinstance(self.block, int) or not 2 <= self.block <= _LONGEST_BLOCK:
            raise BridgeError(f"{file.path}: dflash.block_size is {self.block!r}; must be from 2 to {_LONGEST_BLOCK}")
        self.rotation = Rotation(c, file.context + self.block, file.factors())

    def read(self, states: np.ndarray, position: int, stored: list[KeysAndValues]) -> None:
        """Store what every layer makes of the model's states [n, layers * hidden] of tokens from a position on."""
        eps, positions = self.config.norm_eps, np.arange(position, position + len(states))
        g = rms(self.fuse.matmul(states, precision=self.precision), self.fuse_norm, eps)
        for layer, place in zip(self.layers, stored, strict=True):
            self._store(layer, g, positions, place)

    def _store(self, layer: _Layer, x: np.ndarray, positions: np.ndarray, place: KeysAndValues) -> None:
        k, v = (matrix.matmul(x, precision=self.precision) for matrix in (layer.k, layer.v))
        keys = headwise(k, layer.heads.dim, layer.k_norm, self.config.norm_eps)
        values = headwise(v, layer.heads.dim, None, 0.0)
        place.store(int(positions[0]), self.rotation(keys, positions, layer.index), values)

    def logits(self, token: int, length: int, stored: list[KeysAndValues]) -> np.ndarray:
        """float32 [block - 1, vocab] of the tokens after one that follows `length` others, whose states are stored."""
        c, eps, positions = self.config, self.config.norm_eps, np.arange(length, length + self.block)
        x = self.embedding.rows([token, *(self.block - 1) * [self.mask]]) * np.float32(c.embedding_scale)
        for layer, place in zip(self.layers, stored, strict=True):
            normed = rms(x, layer.norm, eps)
            self._store(layer, normed, positions, place)
            q = headwise(layer.q.matmul(normed, precision=self.precision), layer.heads.dim, layer.q_norm, eps)
            seen = within(positions, length + self.block, c.window if c.windowed(layer.index) else 0, self.causal)
            queries = self.rotation(q, positions, layer.index)
            out = attended(queries, place, length + self.block, c.attention_scale, seen)
            x = x + layer.o.matmul(out, precision=self.precision)
            x = x + layer.network(x, self.precision)
        return self.output.matmul(rms(x[1:], self.output_norm, eps), precision=self.precision)

    def drafter(self) -> "DFlashDrafter":
        """Guesses for one text at a time."""
        return DFlashDrafter(self)


class DFlashDrafter(Drafter):
    """The guesses of a DFlash drafter for one text, whose states it keeps for the next one that begins alike."""

    reads_states = True

    def __init__(self, head: DFlash):
        self._head, self.taps = head, head.file.target_layers()
        self.first = self.longest = min(head.block, type(self).longest + 1) - 1  # a block costs the same
        self._stored = [KeysAndValues(layer.heads, head.file.context + head.block) for layer in head.layers]
        self._text: list[int] = []  # of which states are stored, and then some that follow
        self._length = 0  # tokens whose states are

    def another(self) -> "DFlashDrafter":
        return DFlashDrafter(self._head)

    def take_over(self, other: Self, count: int) -> None:
        for own, stored in zip(self._stored, other._stored, strict=True):
            own.copy_prefix(stored, count)
        self._text, self._length = other._text[:count], count

    @property
    def known(self) -> int:
        return self._length

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        self._length = min(cached, self._length, common_prefix(self._text, tokens))
        self._text = list(tokens)
        return self._length

    def read(self, position: int, states: np.ndarray, tapped: np.ndarray | None) -> None:
        assert tapped is not None
        self._head.read(tapped, position, self._stored)
        self._length = position + len(tapped)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        length = len(tokens) - 1
        self._text, self._length = list(tokens), length
        return self._head.logits(tokens[-1], length, self._stored).argmax(1).tolist()[:most]

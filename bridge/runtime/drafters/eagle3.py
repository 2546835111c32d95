"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer that guesses from states of three of the model's layers.

    g  = W_fc [states of token i before three layers]
    x  = W_o attention([norm(embedding of token i + 1), norm(g)]) + g          attention to such pairs before
    h  = x + network(norm(x))
    logits of token i + 2 = W_output norm(h)

For a guess further on h takes the place of g. Where the head has fewer tokens than the model, d2t says which they are.
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

_AT_ONCE = 128  # pairs that pass through the layer together: their scores take memory


class Eagle3:
    """The layer and its head.

    hidden  elements of a state
    """

    def __init__(self, file: DraftFile):
        c = self.config = file.config
        self.file, self.hidden, self.precision = file, c.hidden, file.target.precision
        heads = self.heads = c.heads_of(0)
        q, kv, hidden = c.heads * heads.dim, heads.kv * heads.dim, c.hidden
        states = len(file.target_layers()) * file.target.config.hidden
        if (fused := file.file["fc.weight"].shape[1]) != states:
            raise file.of_another(f"it reads states of {fused} elements, the model's have {states}")
        self.fuse = file.matrix("fc", hidden, states)
        self.fuse_norm = file.vector("enc.output_norm", states) if file.get("norm_before_fc") else None
        self.residual_normed = bool(file.get("norm_before_residual"))
        self.embedding = file.embeddings()
        self.embedding_norm = file.vector("blk.0.attn_norm", hidden)
        self.state_norm = file.vector("blk.0.attn_norm_2", hidden)
        self.q, self.k, self.v = (
            file.matrix(f"blk.0.attn_{name}", rows, 2 * hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))
        )
        self.o = file.matrix("blk.0.attn_output", hidden, q)
        self.network = Network(file, 0)
        self.output_norm = file.vector("output_norm", hidden)
        self.output, self.tokens = self._head(file)
        self.rotation = Rotation(c, file.context, file.factors())

    @staticmethod
    def _head(file: DraftFile) -> tuple[Any, np.ndarray | None]:
        """The output matrix, its own or the model's, and the tokens of its rows where these are not all."""
        if "d2t" not in file.file:
            return file.head(tied=False), None
        output = file.file["output.weight"]
        tokens = file.file["d2t"].dequantize().astype(np.int64).reshape(-1)
        if output.shape != (len(tokens), file.config.hidden):
            raise BridgeError(
                f"{file.path}: output.weight has shape {list(output.shape)}, for {len(tokens)} tokens in d2t; convert "
                "the drafter again"
            )
        if tokens.min() < 0 or tokens.max() >= file.target.vocab:
            raise file.of_another(f"d2t names token {tokens.max()}, the model has {file.target.vocab}")
        return output, tokens

    def fused(self, states: np.ndarray) -> np.ndarray:
        """g float32 [n, hidden] of the model's states [n, layers * hidden]."""
        if self.fuse_norm is not None:
            states = rms(states, self.fuse_norm, self.config.norm_eps)
        return self.fuse.matmul(states, precision=self.precision)

    def states(self, g: np.ndarray, tokens: Sequence[int], position: int, stored: KeysAndValues) -> np.ndarray:
        """h float32 [n, hidden] of pairs of g and the token after it; their keys and values follow those before."""
        c, n, eps = self.config, len(tokens), self.config.norm_eps
        positions, dim = np.arange(position, position + n), self.heads.dim
        normed = rms(g, self.state_norm, eps)
        pairs = np.concatenate([rms(self.embedding.rows(tokens), self.embedding_norm, eps), normed], axis=1)
        q, k, v = (
            headwise(m.matmul(pairs, precision=self.precision), dim, None, eps) for m in (self.q, self.k, self.v)
        )
        stored.store(position, self.rotation(k, positions, 0), v)
        seen = within(positions, position + n) if n > 1 else None
        out = attended(self.rotation(q, positions, 0), stored, position + n, c.attention_scale, seen)
        x = self.o.matmul(out, precision=self.precision) + (normed if self.residual_normed else g)
        return x + self.network(x, self.precision)

    def logits(self, h: np.ndarray) -> np.ndarray:
        """float32 [n, tokens of the head] of what follows."""
        return self.output.matmul(rms(h, self.output_norm, self.config.norm_eps), precision=self.precision)

    def guess(self, h: np.ndarray) -> int:
        """The most likely token after the last state."""
        row = int(self.logits(h[-1:])[0].argmax())
        return row if self.tokens is None else int(self.tokens[row])

    def drafter(self) -> "Eagle3Drafter":
        """Guesses for one text at a time."""
        return Eagle3Drafter(self)


class Eagle3Drafter(Drafter):
    """The guesses of an EAGLE-3 head for one text, whose pairs it keeps for the next one that begins alike."""

    first, longest = 3, 5
    reads_states = True

    def __init__(self, head: Eagle3):
        self._head, self.taps = head, head.file.target_layers()
        self._stored = KeysAndValues(head.heads, head.file.context)
        self._text: list[int] = []  # whose pairs are stored: one fewer than tokens
        self._fused = np.zeros((0, head.hidden), np.float32)  # g of tokens that have no pair yet

    def another(self) -> "Eagle3Drafter":
        return Eagle3Drafter(self._head)

    def take_over(self, other: Self, count: int) -> None:
        self._stored.copy_prefix(other._stored, count)
        self._text = other._text[: count + 1]

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        pairs = min(cached, max(0, common_prefix(self._text, tokens) - 1))
        self._text, self._fused = list(tokens[: pairs + 1]), self._fused[:0]
        return pairs

    def read(self, position: int, states: np.ndarray, tapped: np.ndarray | None) -> None:
        assert tapped is not None
        self._fused = np.concatenate([self._fused[: position - self.known], self._head.fused(tapped)])

    @property
    def known(self) -> int:
        return max(0, len(self._text) - 1)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        head, pairs, count = self._head, self.known, len(tokens) - 1
        for start in range(pairs, count, _AT_ONCE):
            stop = min(start + _AT_ONCE, count)
            g = self._fused[start - pairs : stop - pairs]
            h = head.states(g, tokens[start + 1 : stop + 1], start, self._stored)[-1:]
        self._fused, self._text = self._fused[count - pairs :], list(tokens)
        guesses = [head.guess(h)]
        while len(guesses) < min(most, head.file.context - len(tokens) + 1):
            h = head.states(h, guesses[-1:], count + len(guesses) - 1, self._stored)
            guesses.append(head.guess(h))
        return guesses

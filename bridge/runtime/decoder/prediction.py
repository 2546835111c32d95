"""The layer that predicts a token further than the model does (MTP, "nextn"): DeepSeek-AI 2024, arXiv:2412.19437.

    x  = W_eh [norm(embedding of token i + 1), norm(state of token i)]        the model's normalized state
    h' = norm(layer(x))                                                       attention to such pairs before
    logits of token i + 2 = W_output h'

A pair has the place of its state's token in a cache of the layer's own. `HeadDrafter` guesses tokens with it,
`agreement` says how many it would have guessed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.decoder import BATCH
from bridge.runtime.layers.layer_reader import LayerReader, expect, vector
from bridge.runtime.layers.layers import Pairs, Weights
from bridge.runtime.layers.weights import read_shared
from bridge.runtime.reader import GGUFFile
from bridge.runtime.tokenizer import common_prefix


def read_prediction(file: GGUFFile, config: DecoderConfig) -> tuple[DecoderConfig, Weights]:
    """The first layer after the others, as a decoder of one layer.

    Without embeddings, norm or head of its own it shares the model's.

    Raises BridgeError where the file has none, or a tensor of it is missing.
    """
    name = f"blk.{config.layers}.nextn"
    if not config.predicting or f"{name}.eh_proj.weight" not in file:
        raise BridgeError(f"{file.path}: has no layer that predicts a further token (MTP)")
    unlike = config.experts > 0 and f"blk.{config.layers}.ffn_gate_inp.weight" not in file  # the other layers
    if config.graph.alone or unlike:  # of the former it has two layers in one, with a layer norm at the end
        problem = f"the layer of {config.arch} that predicts a further token (MTP) cannot run here"
        raise BridgeError(f"{file.path}: {problem}" + ("" if unlike else "; llama.cpp can run it"))
    shared = read_shared(file, config)
    attending = replace(
        config, layers=config.layers + 1, recurrent=None, inners=(), windows=(), query_heads=(),
        heads=config.query_heads_of(config.layers),
    )  # fmt: skip
    hidden, vocab = config.hidden, shared.embedding.shape[0]
    embedding = file.tensors.get(f"{name}.embed_tokens.weight", shared.embedding)
    output = file.tensors.get(f"{name}.shared_head_head.weight", shared.output)
    norms = f"{name}.shared_head_norm.weight", f"blk.{config.layers}.layer_output_norm.weight"
    weights = replace(
        shared,
        embedding=expect(embedding, vocab, hidden),
        layers=[LayerReader(file, attending, config.layers).layer()],
        output_norm=next((vector(file, norm, hidden) for norm in norms if norm in file), shared.output_norm),
        output=expect(output, vocab, hidden),
        pairs=Pairs(
            vector(file, f"{name}.enorm.weight", hidden, True),
            vector(file, f"{name}.hnorm.weight", hidden, True),
            expect(file[f"{name}.eh_proj.weight"], hidden, 2 * hidden),
        ),
    )
    return replace(attending, layers=1, leading=0), weights


class PredictionHead:
    """The layer as a decoder of one layer, on any device, whose cache holds pairs.

    pairs  those of the text; the cache may hold further ones, made of guesses
    """

    def __init__(self, decoder: Any):
        """`decoder`: of what `read_prediction` returns."""
        self.decoder, self.cache = decoder, decoder.cache
        self._first: list[int] = []  # the token whose state is in the first pair
        self.pairs = 0

    def another(self) -> "PredictionHead":
        """The same layer with a cache of its own."""
        return PredictionHead(self.decoder.beside(self.decoder.config, self.decoder.weights))

    def take_over(self, other: "PredictionHead", count: int) -> None:
        """Hold the first `count` pairs of another one's text."""
        self.cache.copy_prefix(other.cache, count)
        self._first, self.pairs = other._first, count

    def start(self, tokens: Sequence[int], cached: int) -> int:
        """Keep the pairs of the first tokens of another text, at most `cached` of them; how many there are."""
        self.decoder.begin()
        known = self._first + self.decoder.read[: self.pairs]
        self.pairs = min(cached, max(0, common_prefix(known, tokens) - 1))
        self._first = list(tokens[:1])
        return self.pairs

    def read_pairs(self, states: np.ndarray, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        """The text's next pairs: states float32 [n, hidden], and the token after each.

        Returns h' float32 [1, hidden] of the last, and the token that is most likely then.
        """
        self.cache.length = self.pairs
        self.pairs += len(tokens)
        return self._read(states, tokens)

    def read_guess(self, state: np.ndarray, token: int) -> tuple[np.ndarray, int]:
        """As `read_pairs`, for h' in place of a state, and a guessed token; the next call of it forgets the pair."""
        return self._read(state, [token])

    def guesses(self, states: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """As `read_pairs`: int [n], the most likely token after each pair."""
        self.pairs += len(tokens)
        self.decoder.given = states
        return np.asarray(self.decoder.logits(self.decoder.run(tokens, len(tokens)))).argmax(1)

    def _read(self, states: np.ndarray, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        self.decoder.given = states
        if len(tokens) > self.decoder.room():
            state = self.decoder.run(tokens)
            return state, int(self.decoder.logits(state)[0].argmax())
        rows = self.decoder.follow(tokens)
        return self.decoder.followed[-1:], int(rows[-1].argmax())


def agreement(decoder: Any, head: PredictionHead, tokens: Sequence[int]) -> tuple[int, int]:
    """How many tokens the layer guesses as the model chooses them, and of how many.

    At each place of a text, given what the text has up to there: the most likely token of both.
    """
    states = decoder.states(tokens, len(tokens))
    head.cache.length = head.start((), 0)
    right = 0
    for start in range(0, len(tokens) - 1, BATCH):
        guessed = head.guesses(states[start : start + BATCH], tokens[start + 1 : start + 1 + BATCH])
        right += int((guessed == decoder.logits(states[start + 1 : start + 1 + BATCH]).argmax(1)).sum())
    return right, len(tokens) - 1

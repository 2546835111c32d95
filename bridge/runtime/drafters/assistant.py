"""Gemma 4's assistants: layers that guess from the model's last state, and attend to the model's keys and values.

    x = W_pre [embedding of token i in the model, the model's normalized state of token i - 1]
    for each layer:
        x = x + norm(W_o attention(q of norm(x), the model's keys and values of the last layer of its kind))
        x = (x + norm(network(norm(x)))) * scale
    logits of token i + 1 = W_embedding norm(x)

For a guess further on W_post norm(x) takes the place of the model's state; the position stays that of token i, before
which the model's keys are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.runtime.decoder.numpy_machine import rms
from bridge.runtime.drafters.attention import KeysAndValues, Rotation, attended, headwise, within
from bridge.runtime.drafters.draft_file import DraftFile
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.drafters.network import Network
from bridge.runtime.layers.kv_cache import KVCache

_HALF = 16  # positions or elements side by side in a cache
_BLOCK = 32  # elements that share a scale in q8_0


class _Layer:
    """A layer without keys and values of its own."""

    def __init__(self, file: DraftFile, index: int):
        c, name = file.config, f"blk.{index}"
        self.index, self.heads, hidden = index, c.heads_of(index), c.hidden
        self.norm = file.vector(f"{name}.attn_norm", hidden)
        self.q = file.matrix(f"{name}.attn_q", c.heads * self.heads.dim, hidden)
        self.q_norm = file.vector(f"{name}.attn_q_norm", self.heads.dim)
        self.o = file.matrix(f"{name}.attn_output", hidden, c.heads * self.heads.dim)
        self.attn_post_norm = file.vector(f"{name}.post_attention_norm", hidden)
        self.network = Network(file, index)
        self.ffn_post_norm = file.vector(f"{name}.post_ffw_norm", hidden)
        self.scale = file.vector(f"{name}.layer_output_scale", 1)


class Assistant:
    """The layers, and which of the model's keys and values they read."""

    def __init__(self, file: DraftFile):
        c, target = file.config, file.target.config
        self.file, self.config, self.precision = file, c, file.target.precision
        width = file.get("embedding_length_out")
        if width != target.hidden:
            raise file.of_another(f"it reads states of {width} elements, the model's have {target.hidden}")
        self.before = file.matrix("nextn.pre_projection", c.hidden, 2 * target.hidden)
        self.after = file.matrix("nextn.post_projection", target.hidden, c.hidden)
        self.layers = [_Layer(file, index) for index in range(c.layers)]
        self.output_norm = file.vector("output_norm", c.hidden)
        self.output = file.matrix("token_embd", file.target.vocab, c.hidden)
        self.rotation = Rotation(c, file.context, file.factors())
        self.sources: dict[bool, int] = {}  # with a window or without -> the model's layer that made the keys
        for layer in target.attending:
            if target.makes_keys(layer):
                self.sources[target.windowed(layer)] = layer
        for own in self.layers:
            source = self.sources.get(c.windowed(own.index))
            heads = None if source is None else target.heads_of(source)
            if heads is None or target.latent is not None or heads.dim != own.heads.dim or c.heads % heads.kv:
                raise file.of_another(f"no layer of it has keys of {own.heads.dim} elements for layer {own.index}")

    def step(
        self, state: np.ndarray, token: int, stored: dict[bool, KeysAndValues], length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The model's next state as this takes it to be, float32 [1, hidden of the model], and logits [vocab].

        state   of the last token but one, normalized
        stored  the model's keys and values of the first `length` tokens, after which `token` is
        """
        c, target, at = self.config, self.file.target, np.array([length])
        embedded = target.embedding.rows([token]) * np.float32(target.config.embedding_scale)
        x = self.before.matmul(np.concatenate([embedded, state], axis=1), precision=self.precision)
        for layer in self.layers:
            q = layer.q.matmul(rms(x, layer.norm, c.norm_eps), precision=self.precision)
            queries = self.rotation(headwise(q, layer.heads.dim, layer.q_norm, c.norm_eps), at, layer.index)
            local = c.windowed(layer.index)
            seen = within(at, length, c.window) if local else None
            out = attended(queries, stored[local], length, c.attention_scale, seen)
            x = x + rms(layer.o.matmul(out, precision=self.precision), layer.attn_post_norm, c.norm_eps)
            x = (x + rms(layer.network(x, self.precision), layer.ffn_post_norm, c.norm_eps)) * layer.scale
        normed = rms(x, self.output_norm, c.norm_eps)
        logits = self.output.matmul(normed, precision=self.precision)[0]
        return self.after.matmul(normed, precision=self.precision), logits

    def drafter(self) -> "AssistantDrafter":
        """Guesses for one text at a time."""
        return AssistantDrafter(self)


class AssistantDrafter(Drafter):
    """The guesses of an assistant for one text."""

    first, longest = 3, 5

    def __init__(self, head: Assistant):
        self._head = head
        target = head.file.target.config
        self._stored = {
            local: KeysAndValues(target.heads_of(layer), head.file.context) for local, layer in head.sources.items()
        }
        self._copied = 0  # tokens whose keys and values are there
        self._cache: KVCache = head.file.target.cache
        self._states, self._first = np.zeros((0, target.hidden), np.float32), 0  # of tokens from `_first` on

    def another(self) -> "AssistantDrafter":
        return AssistantDrafter(self._head)

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        self._copied, self._cache = 0, cache
        return cached

    def read(self, position: int, states: np.ndarray, tapped: np.ndarray | None) -> None:
        self._copied = min(self._copied, position)
        self._states, self._first = states.copy(), position

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        head, length = self._head, len(tokens) - 1
        stored = head.file.target.config.stored
        for local, layer in head.sources.items():
            heads = head.file.target.config.heads_of(layer)
            self._stored[local].store(
                self._copied, *floats_of(self._cache, stored[layer], heads.dim, self._copied, length)
            )
        self._copied = length
        state = self._states[length - 1 - self._first :][:1]
        guesses: list[int] = []
        token = tokens[-1]
        while len(guesses) < most:
            state, logits = head.step(state, token, self._stored, length)
            token = int(logits.argmax())
            guesses.append(token)
        return guesses


def floats_of(cache: KVCache, slot: int, dim: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a cache, float32 [tokens, kv_heads, dim] each, of the tokens start..stop."""
    first, last = start // _HALF, -(-stop // _HALF)
    keys = _as_floats(cache.keys[slot][:, first:last])  # [kv, groups, dim, 16]
    values = _as_floats(cache.values[slot][:, :, start:stop])  # [kv, parts, tokens, 16]
    if cache.kind == "q8_0":
        blocks = -(-dim // _BLOCK)
        scales = cache.key_scales[slot].reshape(len(keys), -1, blocks, _HALF)[:, first:last]
        keys = keys * np.repeat(_as_floats(scales), _BLOCK, axis=2)[:, :, :dim]
    keys = keys.transpose(1, 3, 0, 2).reshape(-1, len(keys), dim)[start - first * _HALF :][: stop - start]
    values = values.transpose(2, 0, 1, 3).reshape(stop - start, len(values), -1)[:, :, :dim]
    if cache.kind == "q8_0":
        scales = cache.value_scales[slot].reshape(values.shape[1], -1, blocks)[:, start:stop].transpose(1, 0, 2)
        values = values * np.repeat(_as_floats(scales), _BLOCK, axis=2)[:, :, :dim]
    return keys, values


def _as_floats(numbers: np.ndarray) -> np.ndarray:
    """float32 of halves, integers or float32."""
    return (numbers.view(np.float16) if numbers.dtype == np.uint16 else numbers).astype(np.float32)

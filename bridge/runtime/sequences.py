"""Several sequences in one pass over the weights: a token of each goes through the layers together.

A decode step reads every weight once, however many tokens are in it; the kernels of 4 and 8 columns multiply a word of
weights with as many vectors while it is in a register. Prompts are read one after another, each into a context of its
own. Where there are more sequences than a step takes, the next one begins when another has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.runtime.decoder import Decoder
from bridge.runtime.kv_cache import KVCache
from bridge.runtime.replies import Reply
from bridge.runtime.sampling import Sampler

MOST = 8  # in a step: columns of the widest kernel


@dataclass
class Sequenced:
    """One of them: its prompt, and what is made of it."""

    prompt: list[int]
    sampler: Sampler
    reply: Reply
    most: int  # tokens
    made: int = 0
    token: int = -1  # the last one, which the context does not hold yet

    def take(self, token: int, cache: KVCache) -> bool:
        """Note the next token; whether another may follow."""
        self.made += 1
        self.token = token
        return self.reply.add(token) and self.made < self.most and cache.length < cache.context


class Together:
    """Runs sequences step by step."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequenced]):
        self._decoder = decoder
        self._waiting = deque(sequence for sequence in sequences if sequence.most)
        self._free = [decoder.new_cache() for _ in range(min(MOST, len(self._waiting)))]
        self._running: list[tuple[Sequenced, KVCache]] = []
        self.steps = 0  # so far
        self.tokens = 0  # that they made, without the first of each sequence

    def advance(self) -> bool:
        """Read a prompt, if one can begin, else make one more token of each; whether there is anything left to do."""
        if self._waiting and self._free:
            sequence, cache = self._waiting.popleft(), self._free.pop()
            cache.length = 0
            row = self._decoder.logits(self._decoder.run(sequence.prompt, cache=cache))[0]
            self._go_on([(sequence, cache)], [sequence.sampler(row)])
        elif self._running:
            running, self._running = self._running, []
            rows = self._decoder.step([cache for _, cache in running], [sequence.token for sequence, _ in running])
            self.steps += 1
            self.tokens += len(running)
            self._go_on(running, [sequence.sampler(row) for (sequence, _), row in zip(running, rows, strict=True)])
        return bool(self._waiting or self._running)

    def _go_on(self, running: list[tuple[Sequenced, KVCache]], tokens: list[int]) -> None:
        """Hand the tokens to their sequences; those that end leave their context to others."""
        for (sequence, cache), token in zip(running, tokens, strict=True):
            if sequence.take(token, cache):
                self._running.append((sequence, cache))
            else:
                self._free.append(cache)

"""Tokens that are guessed, and checked several at a time: the same reply from fewer passes over the weights.

    last token, guess, guess, guess  ->  one step of the decoder  ->  four rows of logits

The sampler draws from the rows in turn, as it would without guesses. As long as it draws what was guessed, the next
row is already there; at the first other token the rest is dropped, and its keys and values are cut off; a state is
computed again from before the step (recurrent_state.py), which takes no matrix. So the reply is
the one without guesses, token for token, whatever the sampler does, if a step computes each of its tokens as a step of
that token alone does: `Decoder.follow` sees to it, `check_decoder` refuses a model for which it cannot.

A step of 4 tokens takes about 1.25 times as long as one of a single token, a step of 8 about 1.7 times (`WIDEST`, the
columns of the widest kernel). So 3 tokens are guessed at first, 7 after guesses that were all right, and after guesses
that were all wrong none for as many tokens as this has happened in a row. A guess of the file's own layer costs that
layer and the head, so fewer are made (`HeadDrafter`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.decoder.decoder import BATCH, Decoder
from bridge.runtime.decoder.prediction import PredictionHead
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.sampling import Sampler
from bridge.runtime.tokenizer import common_prefix

_LONGEST_PAUSE = 16  # tokens without guesses
_ORDERS = (3, 2)  # tokens that must be the same for what followed them to be guessed; the first that is found


class NgramDrafter(Drafter):
    """Guesses that what followed the last tokens when they last came follows them again.

    Saxena 2023, prompt lookup decoding: costs nothing, and is right where a reply quotes the prompt or itself.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # of an n-gram -> the place after it, but for the text's end
        self._known = 0  # tokens whose n-grams are in it

    def another(self) -> "NgramDrafter":
        return NgramDrafter()

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        self._ends, self._known = {}, 0
        return cached

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for end in range(self._known, len(tokens)):
            for order in _ORDERS:
                if end >= order:
                    self._ends[tuple(tokens[end - order : end])] = end
        self._known = len(tokens)
        for order in _ORDERS:
            if start := self._ends.get(tuple(tokens[-order:])):
                period = len(tokens) - start  # where the text ends, what repeats goes on
                return [tokens[start + i % period] for i in range(most)]
        return []


class ModelDrafter(Drafter):
    """Guesses the tokens that another, smaller model finds most likely; its context is taken for that."""

    def __init__(self, model: Any):
        self._model = model

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`; none where the other model's context is full."""
        with self._model.taken() as decoder:
            most = min(most, decoder.cache.context - len(tokens) + 1)
            if most < 1:
                return []
            decoder.cache.length = decoder.kept(tokens[:-1])
            unread = list(tokens[decoder.cache.length :])
            follow = len(unread) <= decoder.room()
            row = decoder.follow(unread)[-1] if follow else decoder.logits(decoder.run(unread))[0]
            decoder.cache.come_back_to(decoder.cache.length)
            guesses = [int(row.argmax())]
            while len(guesses) < most:
                guesses.append(int(decoder.next_scores(guesses[-1]).argmax()))
            return guesses


class HeadDrafter(Drafter):
    """Guesses what the model's own layer for that predicts (MTP), from the model's states.

    A guess further on is made of the layer's own state in place of the model's.
    """

    first, longest = 2, 4
    reads_states = True

    def __init__(self, head: PredictionHead):
        self._head = head
        self._states = np.zeros((0, head.decoder.config.hidden), np.float32)  # of tokens that the head has not read

    def another(self) -> "HeadDrafter":
        return HeadDrafter(self._head.another())

    def take_over(self, other: Self, count: int) -> None:
        self._head.take_over(other._head, count)

    @property
    def known(self) -> int:
        return self._head.pairs

    def begin(self, tokens: Sequence[int], cached: int, cache: Any) -> int:
        return self._head.start(tokens, cached)

    def read(self, position: int, states: np.ndarray, tapped: np.ndarray | None) -> None:
        self._states = np.concatenate([self._states[: position - self._head.pairs], states])

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        head, new = self._head, len(tokens) - 1 - self._head.pairs
        state, guess = head.read_pairs(self._states[:new], tokens[-new:])
        self._states = self._states[new:]
        guesses = [guess]
        while len(guesses) < min(most, head.cache.context - len(tokens) + 1):
            state, guess = head.read_guess(state, guess)
            guesses.append(guess)
        return guesses


NAMES = "ngram", "mtp"  # of drafters


class Speculation:
    """The guesses for one text: how many, and how far they were right.

    drafted   tokens guessed so far
    accepted  those of them that were drawn
    """

    def __init__(self, drafter: Drafter, prompt: Sequence[int]):
        self.drafted = self.accepted = 0
        self.tokens = list(prompt)  # with the reply so far
        self.drafter = drafter
        self._guesses: list[int] = []
        self._checked = 0  # guesses that were drawn
        self._most = drafter.first
        self._pause = self._failures = 0  # tokens without guesses that are left; steps in a row without a right one

    def guesses(self, most: int) -> list[int]:
        """Tokens that may follow, to be checked together; `drew` must be told what does follow."""
        self._learn()
        most = 0 if self._pause else min(most, self._most)
        self._pause = max(0, self._pause - 1)
        self._guesses = self.drafter.propose(self.tokens, most)[:most] if most > 0 else []
        self._checked = 0
        self.drafted += len(self._guesses)
        return self._guesses

    def drew(self, token: int) -> bool:
        """Note the token that follows; whether it was guessed, so that the next row of the step is what comes next."""
        right = self._checked < len(self._guesses) and self._guesses[self._checked] == token
        self._checked += right
        self.accepted += right
        self.tokens.append(token)
        return right

    def _learn(self) -> None:
        """Guess more after guesses that were all right, and less often after such as were all wrong."""
        if self._guesses:
            right = self._checked == len(self._guesses)
            self._most = self.drafter.longest if right else self.drafter.first
            self._failures = 0 if self._checked else self._failures + 1
            self._pause = min(self._failures, _LONGEST_PAUSE)


def kept_by(drafter: Drafter, tokens: Sequence[int], cached: int, cache: Any) -> int:
    """Begin a prompt: how many of its first tokens, of `cached` that the cache has, need not be read again."""
    return drafter.begin(tokens, cache.reach(drafter.begin(tokens, cached, cache)), cache)


def tap(drafter: Drafter, decoder: Any) -> None:
    """Have a decoder keep what a drafter reads between its layers."""
    if drafter.taps:
        decoder.tap(drafter.taps)


def drawn_with(
    speculation: Speculation, decoder: Any, tokens: Sequence[int], sampler: Sampler, cached: int
) -> Iterator[int]:
    """As `Decoder.draw`, with guesses."""
    cache = decoder.cache
    cache.length = cached
    drafter = speculation.drafter
    parts = range(cached, len(tokens), BATCH if drafter.reads_states else len(tokens))
    for start in parts:  # what a drafter reads of a long prompt is not held together
        part = tokens[start : start + parts.step]
        tap(drafter, decoder)
        states = decoder.run(part, len(part) if drafter.reads_states else 1)
        drafter.read(start + len(part) - len(states), states, tapped_by(decoder))
    rows = decoder.logits(states[-1:])
    while True:
        for row in rows:
            token = sampler(row)
            right = speculation.drew(token)
            cache.length = len(speculation.tokens) - 1
            yield token
            if cache.length == cache.context:
                return
            if not right:
                break
        guesses, position = speculation.guesses(decoder.room() - 1), cache.length
        tap(drafter, decoder)
        rows = decoder.follow([token, *guesses])
        drafter.read(position, decoder.followed, tapped_by(decoder))


def tapped_by(decoder: Any) -> np.ndarray | None:
    """What a decoder's last pass kept of states between layers; None on CUDA."""
    return decoder.tapped if isinstance(decoder, Decoder) else None


def drafter_for(model: Any, draft: Any) -> Drafter:
    """What guesses tokens for a `Model`: a name, another model, or a drafter's file.

    Raises BridgeError where nothing can, or the sums would be others.
    """
    model.check_continues("draft")
    check_decoder(model._decoder)
    if hasattr(draft, "prediction_head"):  # another `Model`
        check_draft_model(model, draft)
        return ModelDrafter(draft)
    if isinstance(draft, str) and draft in NAMES:
        return NgramDrafter() if draft == "ngram" else HeadDrafter(model.prediction_head())
    if not isinstance(draft, str | Path) or not Path(draft).is_file():
        raise BridgeError(
            f"unknown {parameter('draft')} {draft!r}: choose {', '.join(NAMES)}, a drafter's GGUF, or another model"
        )
    drafter: Drafter = model.drafter(draft)
    return drafter


def check_decoder(decoder: Any) -> None:
    """Raise BridgeError where several tokens in a step do not become what each would alone, or cost as much."""
    if (matrix := decoder.multiplied_one_by_one()) is not None:
        raise BridgeError(
            f"{matrix.name}: {matrix.type} {list(matrix.shape)} has no kernel for several tokens with the sums of one: "
            f"{parameter('draft')} would be no faster, or change the reply; leave it out"
        )


def check_draft_model(model: Any, draft: Any) -> None:
    """Raise BridgeError if one `Model` cannot guess tokens for another."""
    if draft is model:
        raise BridgeError(f"{parameter('draft')}: a model cannot guess for itself; choose a smaller one")
    _ = draft._decoder.vocab  # raises if the model is closed
    draft.check_continues()
    main, other = model.tokenizer, draft.tokenizer
    if main.tokens != other.tokens:
        token = common_prefix(main.tokens, other.tokens)
        difference = (
            f"token {token} is {main.tokens[token]!r} here and {other.tokens[token]!r} there"
            if token < min(len(main), len(other))
            else f"{len(main)} tokens here, {len(other)} there"
        )
        raise BridgeError(
            f"{parameter('draft')}: the model has another vocabulary ({difference}); choose one of the same"
        )

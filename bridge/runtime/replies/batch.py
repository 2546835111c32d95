"""Several sequences that share each pass over the weights, and may come and go at any time.

    with model.batch() as batch:
        first = batch.add("KING RICHARD:", max_tokens=50)
        other = batch.add("GREMIO:", max_tokens=50, stop="\\n")
        for generation, text in batch:
            print(generation is first, text)

A decode step reads every weight once, however many tokens it computes: the kernels of 4 and 8 columns multiply a word
of weights with as many vectors while it is in a register. So a step takes a token of each sequence through the layers.
With `draft`, the columns of the kernels that sequences leave free are for tokens that are guessed (`speculation.py`).
Prompts are read between the steps, in parts, so that a long one delays the others by no more than `PART` tokens at a
time; prompts that are read at once take turns. A context that becomes free keeps what it holds: a prompt takes over,
or copies, the keys and values of the longest prefix that any context holds, also of prompts still being read.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self, Unpack

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.decoder.decoder import BATCH, WIDEST
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.replies.generation import Reply, ScoredToken, stop_texts
from bridge.runtime.replies.speculation import Speculation, kept_by, tap
from bridge.runtime.sampling import Draw, ReplyKeywords, Sampler, draws_ahead
from bridge.runtime.tokenizer import Tokenizer, common_prefix
from bridge.system.options import check_integer, checked

MAX_BATCH = WIDEST  # sequences in a step
PART = 128  # tokens of prompts that are read between two steps

# called with the position of the first of some tokens of a prompt, and their normalized states float32 [n, hidden]
Reader = Callable[[int, np.ndarray], None]


class Generation:
    """A prompt and the reply that a `Batch` makes to it.

    prompt  token ids
    kept    number of tokens of the prompt whose keys and values another sequence had left
    finish  "stop" (an end token, a stop text or the end of the schema), "length", "cancelled" or "error"; None: the
            reply is not finished
    error   why `finish` is "error"
    """

    prompt: list[int]
    kept: int
    finish: str | None
    error: BridgeError | None

    def __init__(self, prompt: list[int], max_tokens: int, sampler: Sampler, reply: Reply, reader: Reader | None):
        self.prompt, self.kept = prompt, 0
        self.finish, self.error = None, None
        self.read = 0  # tokens of the prompt that its context holds
        self.last = -1  # the last token drawn, which the context does not hold yet
        self.drawn = 0
        self.respell = False
        self.max_tokens, self.sampler, self.reader = max_tokens, sampler, reader
        self.speculation: Speculation | None = None
        self._reply = reply

    def __repr__(self) -> str:
        end = "unfinished" if self.finish is None else self.finish
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"Generation({text!r}, {len(self.tokens)} tokens, {end})"

    @property
    def text(self) -> str:
        """The reply so far; while it is not finished, without what may be the start of a stop text."""
        return self._reply.text

    @property
    def tokens(self) -> list[int]:
        """The reply's token ids so far, without the end token."""
        return self._reply.tokens

    def take(self) -> tuple[str, list[ScoredToken]]:
        """The text that came since the last call; with `logprobs`, its tokens and their probabilities too."""
        return self._reply.take()

    def draw(self, logits: np.ndarray, room: bool, draw: Draw | None = None) -> bool:
        """Add the next token, for float32 [vocab]; `room`: whether the context can take it; `draw`: see `Sampler`.

        Returns whether it is the token that was guessed, and another may be drawn.
        """
        try:
            token = self.sampler(logits, draw)
        except BridgeError as problem:
            self.end("error", problem)
            return False
        self.drawn += 1
        self.last = token
        more = self._reply.add(token, self.sampler.probabilities)
        if not more or self.sampler.complete:
            self.end("stop")
        elif self.drawn >= self.max_tokens or not room:
            self.end("length")
        right = self.speculation is not None and self.speculation.drew(token)
        return right and self.finish is None

    def guesses(self, most: int) -> list[int]:
        """Up to so many tokens that may follow the last one drawn."""
        return [] if self.speculation is None else self.speculation.guesses(most)

    def end(self, finish: str, error: BridgeError | None = None) -> None:
        """Nothing follows."""
        self._reply.close()
        self.finish, self.error = finish, error


class _Slot:
    """A context, what guesses tokens for it, and the sequence that has it."""

    def __init__(self, cache: KVCache, drafter: Drafter | None):
        self.cache, self.drafter = cache, drafter
        self.generation: Generation | None = None
        self.left = 0  # number of the sequence that left it last: larger is later


class Batch:
    """Sequences that share each pass over the weights; `Model.batch` makes one. Not for several threads at once.

    Iterating makes tokens until all sequences are finished, and gives (generation, new text) for each token.

    steps           number of passes over the weights
    step_tokens     number of tokens that these made
    prompt_tokens   number of tokens of prompts that were read
    guessed_tokens  number of guesses of sequences that have ended
    right_tokens    number of right ones among them
    """

    def __init__(
        self, decoder: Callable[[], Any], tokenizer: Tokenizer, lock: Any,
        start: Callable[[Any, int, Sampler], tuple[list[int], Sampler]], sequences: int, drafter: Drafter | None = None,
    ):  # fmt: skip
        check_integer("sequences", sequences, 1, MAX_BATCH)
        self._drafter = drafter  # of which each context gets another
        self.steps = 0  # passes over the weights for a token of each
        self.step_tokens = 0  # tokens that these made
        self.prompt_tokens = 0  # tokens of prompts that were read
        self.guessed_tokens = self.right_tokens = 0  # of sequences that have ended: guesses, and those that were right
        self._decoder, self._tokenizer, self._lock, self._start = decoder, tokenizer, lock, start
        self._most = sequences
        self._slots: list[_Slot] = []
        self._waiting: deque[Generation] = deque()
        self._reading: deque[_Slot] = deque()
        self._running: list[_Slot] = []
        self._budget = PART  # tokens of prompts that may be read before the next step
        self._left = 0
        self._gone: list[Generation] = []  # ended before it began

    def __repr__(self) -> str:
        counts = f"{len(self._running)} replying, {len(self._reading)} reading, {len(self._waiting)} waiting"
        return f"Batch({self._most} sequences: {counts})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all sequences and release their contexts."""
        for generation in [*self._waiting, *(slot.generation for slot in self._slots)]:
            if generation is not None:
                self.cancel(generation)
        self._slots = []

    @property
    def waiting(self) -> int:
        """Number of sequences that have no context yet."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of sequences that have a context."""
        return len(self._reading) + len(self._running)

    @checked
    def add(
        self, prompt: str | Sequence[int], max_tokens: int = 256, stop: str | Sequence[str] | None = (),
        logprobs: int | None = None, conversation: bool = False, reader: Reader | None = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> Generation:  # fmt: skip
        """Queue a sequence, which begins as soon as a context is free.

        prompt        a text or token ids
        max_tokens    the most tokens of the reply
        stop          texts that end the reply and are not part of it
        logprobs      number of the most likely tokens to list for each token; None: none
        conversation  whether the prompt is a conversation, whose earlier replies may be in a context already with other
                      tokens than the tokenizer would choose
        reader        called with the position of the first of some tokens of the prompt, and with their normalized
                      states float32 [n, hidden], until all tokens are read
        sampling      as in `Model.generate`

        Returns a `bridge.runtime.replies.batch.Generation`. Raises BridgeError where the prompt does not fit the
        context, or an option is out of range.
        """
        return self.add_with(Sampler.of(self._tokenizer, logprobs, **sampling), prompt, max_tokens, stop,
                             conversation, reader)  # fmt: skip

    def add_with(
        self, sampler: Sampler, prompt: str | Sequence[int], max_tokens: int, stop: str | Sequence[str] | None = (),
        conversation: bool = False, reader: Reader | None = None, shown: Collection[int] = (),
    ) -> Generation:  # fmt: skip
        """`add` with a sampler, which no other sequence may have; `shown`: see `Reply`."""
        ids, sampler = self._start(prompt, max_tokens, sampler)
        generation = Generation(ids, max_tokens, sampler, Reply(self._tokenizer, stop_texts(stop), shown), reader)
        generation.respell = conversation
        if max_tokens or reader:
            self._waiting.append(generation)
        else:
            generation.end("length")
            self._gone.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End the sequence of `generation` now. Its reply so far stays, and its context goes to the next one."""
        if generation.finish is None:
            generation.end("cancelled")
        if generation in self._waiting:
            self._waiting.remove(generation)
        self._leave()

    def advance(self) -> list[Generation]:
        """Read a part of a prompt, or make one more token of each; the sequences that got a token or ended."""
        changed, self._gone = self._gone, []
        with self._lock:
            decoder = self._decoder()
            while self._waiting and (slot := self._free_slot(decoder, self._waiting[0])):
                slot.generation = self._waiting.popleft()
                self._reading.append(slot)
            if self._reading and (self._budget > 0 or not self._running):
                changed += self._read(decoder, self._reading.popleft())
            elif self._running:
                changed += self._step(decoder)
        self._leave()
        return changed

    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._waiting or self._reading or self._running or self._gone)

    def __iter__(self) -> Iterator[tuple[Generation, str]]:
        """Advance until all sequences are finished; each with its text as it comes, "" where it has none new."""
        while self.busy():
            for generation in self.advance():
                yield generation, generation.take()[0]

    def _step(self, decoder: Any) -> list[Generation]:
        slots = self._running
        generations = [slot.generation for slot in slots if slot.generation is not None]
        share = MAX_BATCH // len(slots) - 1  # columns for guesses of each
        parts = [
            [generation.last, *generation.guesses(min(share, decoder.room(slot.cache) - 1))]
            for slot, generation in zip(slots, generations, strict=True)
        ]
        caches = [slot.cache for slot, part in zip(slots, parts, strict=True) for _ in part]
        before = [slot.cache.length for slot in slots]
        if self._drafter is not None:
            tap(self._drafter, decoder)
        rows = decoder.step(caches, [token for part in parts for token in part])
        samplers = [generation.sampler for generation in generations]
        draws = draws_ahead(list(zip(samplers, map(len, parts), strict=True)), rows)
        self.steps += 1
        self._budget = PART
        first = 0
        for slot, generation, part, length in zip(slots, generations, parts, before, strict=True):
            if slot.drafter is not None:
                rows_of_part = slice(first, first + len(part))
                slot.drafter.read(length, decoder.followed[rows_of_part], decoder.tapped[rows_of_part])
            for row in range(first, first + len(part)):
                length += 1
                self.step_tokens += 1
                if not generation.draw(rows[row], length < slot.cache.context, draws[row]):
                    break
            slot.cache.length = length
            first += len(part)
        return generations

    def _read(self, decoder: Any, slot: _Slot) -> list[Generation]:
        """Take over a longer prefix if there is one by now, and read the next part of a prompt."""
        generation, cache = slot.generation, slot.cache
        assert generation is not None
        self._take_over(slot, generation)
        drafter = slot.drafter if generation.max_tokens else None
        if drafter is not None:
            if generation.speculation is None:
                self._begin_guesses(drafter, cache, generation)
            tap(drafter, decoder)
        size = min(len(generation.prompt) - generation.read, self._budget if self._running else BATCH)
        if not decoder.config.causal:  # its tokens attend to those that follow
            size = len(generation.prompt)
        part = generation.prompt[generation.read : generation.read + size]
        cache.length = generation.read
        every = generation.reader is not None or (drafter is not None and drafter.reads_states)
        states = decoder.run(part, size if every else 1, cache)
        if generation.reader:
            generation.reader(generation.read, states)
        if drafter is not None:
            drafter.read(generation.read + size - len(states), states, decoder.tapped)
        generation.read += size
        self.prompt_tokens += size
        self._budget -= size
        if generation.read < len(generation.prompt):
            self._reading.append(slot)
            return []
        if generation.max_tokens:
            self._running.append(slot)
            generation.draw(decoder.logits(states[-1:])[0], cache.length < cache.context)
        else:
            self._reading.append(slot)  # from which `_leave` takes it
            generation.end("length")
        return [generation]

    @staticmethod
    def _begin_guesses(drafter: Drafter, cache: KVCache, generation: Generation) -> None:
        """Guess for a sequence, which reads again what the drafter does not know of a prefix."""
        known = kept_by(drafter, generation.prompt, generation.read, cache)
        generation.kept -= generation.read - known
        generation.read = known
        generation.speculation = Speculation(drafter, generation.prompt)

    def _leave(self) -> None:
        """Sequences that have ended give their contexts back."""
        for slot in self._slots:
            if slot.generation is not None and slot.generation.finish is not None:
                for places in (self._reading, self._running):
                    if slot in places:
                        places.remove(slot)
                if (speculation := slot.generation.speculation) is not None:
                    self.guessed_tokens += speculation.drafted
                    self.right_tokens += speculation.accepted
                slot.generation = None
                self._left += 1
                slot.left = self._left

    # contexts and their prefixes

    def _free_slot(self, decoder: Any, generation: Generation) -> _Slot | None:
        """A context for a sequence: the one whose whole content it continues, else a new one, else the one left first.

        Its own replies in a conversation get the tokens that the model chose, where a context has them.
        """
        free = [slot for slot in self._slots if slot.generation is None]
        if not free and len(self._slots) == self._most:
            return None
        if generation.respell:
            generation.prompt = self._respelled(generation.prompt, decoder.cache.context)
        for slot in free:
            held = _held(slot)
            # the last token drawn may be one that ends replies, which prompts spell in their own way
            if held and common_prefix(held, generation.prompt) >= len(held) - 1:
                return slot
        if len(self._slots) < self._most:
            self._slots.append(_Slot(decoder.new_cache(), self._drafter and self._drafter.another()))
            return self._slots[-1]
        return min(free, key=lambda slot: slot.left)

    def _respelled(self, prompt: list[int], most: int) -> list[int]:
        """The prompt with the tokens of the context that has most of its text, if it is no longer than `most` then."""
        contexts = [(common_prefix(held, prompt), held) for held in map(_held, self._slots)]
        longest = max((same for same, _ in contexts), default=0)
        candidates = [
            (common_prefix(held, spelled), spelled)
            for same, held in contexts
            if 2 * same >= longest and len(spelled := self._tokenizer.spelled_as(prompt, held)) <= most
        ]
        return max(candidates, default=(0, prompt))[1]

    def _take_over(self, slot: _Slot, generation: Generation) -> None:
        """Hold the longest prefix of a prompt, without its last token, that a context has, and its drafter knows."""
        read, wanted = generation.read, generation.prompt[:-1]
        drafter = slot.drafter if slot.drafter is not None and slot.drafter.reads_states else None
        if generation.reader or read >= len(wanted) or (drafter and read):
            return
        best, most = slot, read
        for other in self._slots:
            held = other.cache.tokens
            shorter = most == len(wanted) or other.cache.length <= most
            if shorter or held[most] != wanted[most] or (read and other is slot):
                continue
            same = common_prefix(_held(other), wanted)
            if drafter is not None and other.drafter is not None:
                same = min(same, other.drafter.known)
            same = other.cache.reach(same)
            if same > most:
                best, most = other, same
        if best is not slot:
            slot.cache.copy_prefix(best.cache, most)
            if drafter is not None and best.drafter is not None:
                drafter.take_over(best.drafter, most)
        generation.kept += most - read
        generation.read = most


def _held(slot: _Slot) -> list[int]:
    """The tokens that a context holds."""
    return slot.cache.tokens[: slot.cache.length]

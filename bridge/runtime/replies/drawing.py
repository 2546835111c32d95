"""One reply, or a batch of them, drawn and timed."""

from collections.abc import Iterator
from itertools import islice

from bridge.runtime.decoder.shared import SharedDecoder
from bridge.runtime.replies.batch import Batch
from bridge.runtime.replies.speculation import Drafter, Speculation, drawn_with, kept_by
from bridge.runtime.sampling import Sampler
from bridge.system.kernels import compiling
from bridge.system.records import record


@record(frozen=False)
class Timing:
    """Of a reply, without repacking: the first token counts with the prompt, which computes it."""

    prompt_tokens: int = 0
    kept_tokens: int = 0  # of these, those whose keys and values the call before left
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    speculation: Speculation | None = None  # tokens that were guessed, and those that were right
    full: bool = False  # whether the reply ended because the context was full


def reply_tokens(
    shared: SharedDecoder, timing: Timing, prompt: list[int], sampler: Sampler, drafter: Drafter | None,
    max_tokens: int, ends: frozenset[int],
) -> Iterator[int]:  # fmt: skip
    """The token ids drawn after a prompt's, up to one of `ends`, the sampler's own end or `max_tokens`."""
    with shared.taken() as decoder:
        cached = timing.kept_tokens = decoder.kept(prompt[:-1])
        if drafter is None:
            drawn = decoder.draw(prompt, sampler, cached)
        else:
            cached = timing.kept_tokens = kept_by(drafter, prompt, cached, decoder.cache)
            timing.speculation = Speculation(drafter, prompt)
            drawn = drawn_with(timing.speculation, decoder, prompt, sampler, cached)
        drawn = shared.in_turn(drawn)
    begun, count = compiling.clock() - decoder.preparing, -1
    for count, token in enumerate(islice(drawn, max_tokens)):
        now = compiling.clock() - decoder.preparing
        if count == 0:
            timing.prompt_seconds, begun = now - begun, now
        else:
            timing.tokens, timing.seconds = count, now - begun
        if token in ends:
            return
        yield token
        if sampler.complete:
            return
    timing.full = count + 1 < max_tokens


def run_batch(shared: SharedDecoder, timing: Timing, batch: Batch) -> None:
    """Advance a batch to its end."""
    while batch.busy():
        start, preparing, steps = compiling.clock(), shared.decoder.preparing, batch.steps
        batch.advance()
        seconds = compiling.clock() - start - (shared.decoder.preparing - preparing)
        if batch.steps == steps:
            timing.prompt_seconds += seconds
        else:
            timing.seconds += seconds
    timing.tokens, timing.kept_tokens = batch.step_tokens, timing.prompt_tokens - batch.prompt_tokens

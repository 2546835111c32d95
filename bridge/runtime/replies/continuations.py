"""How likely a model finds token ids after others: what choosing between answers is measured by.

The keys and values of a context are computed once for all of its continuations, and what it begins with as the context
before did is not computed again. One pass reads the context and its first continuation; what follows the context's last
token is the first token of every continuation, so those of one token need no pass of their own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.runtime.decoder.decoder import Decoder

_ROWS = 32  # positions whose logits are computed at a time: 20 MB for a vocabulary of 150,000

Score = tuple[float, bool]


def continuation_scores(decoder: Any, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
    """The log-probability of each continuation, and whether all of its tokens are the most likely ones.

    None of the sequences is empty. The decoder's context is overwritten.
    """
    if not isinstance(decoder, Decoder):  # on a GPU: each by itself
        rows = (decoder.scores([*context, *tokens[:-1]], len(tokens)) for tokens in continuations)
        return [_token_scores(*scored) for scored in zip(rows, continuations, strict=True)]
    first, *others = continuations
    cached = decoder.cache.length = decoder.kept(context[:-1])
    decoder.cache.come_back_to(len(context))
    states = decoder.run([*context[cached:], *first[:-1]], len(first))
    after = decoder.logits(states[:1])
    scores = [_joined([_token_scores(after, first[:1]), *_scores_of(decoder, states[1:], first[1:])])]
    for tokens in others:
        parts = [_token_scores(after, tokens[:1])]
        if len(tokens) > 1:
            decoder.cache.length = len(context)
            parts += _scores_of(decoder, decoder.run(tokens[:-1], len(tokens) - 1), tokens[1:])
        scores.append(_joined(parts))
    return scores


def _scores_of(decoder: Decoder, states: np.ndarray, tokens: Sequence[int]) -> list[Score]:
    starts = range(0, len(tokens), _ROWS)
    return [_token_scores(decoder.logits(states[i : i + _ROWS]), tokens[i : i + _ROWS]) for i in starts]


def _token_scores(rows: np.ndarray, tokens: Sequence[int]) -> Score:
    """Logits [n, vocab] of what follows, and what does."""
    rows = rows.astype(np.float64)
    targets, top = np.array(tokens), rows.max(-1)
    scores = rows[np.arange(len(targets)), targets] - top - np.log(np.exp(rows - top[:, None]).sum(-1))
    return float(scores.sum()), bool((rows.argmax(-1) == targets).all())


def _joined(parts: Sequence[Score]) -> Score:
    return sum(score for score, _ in parts), all(greedy for _, greedy in parts)

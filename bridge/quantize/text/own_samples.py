"""Text sampled from the model itself: a stand-in for its unknown training data.

Each row is filled with documents: an opening, then tokens drawn from the model's prediction at temperature 1 until it
draws an end, then the next opening. All rows go forward together, a token at a time, with a cache of keys and values;
where a row has an opening to read, its token is given instead of drawn. So rows need no padding.

A step reads all weights, however many rows there are, and attention's share grows with their length. So rows are short
and many, and a sequence is several rows, one after the other.

Costs a forward pass of the tokens, in products of 128 rows, and needs the whole model in memory.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.forward_passes import drawn

_ROWS = 128  # that go forward together
_LENGTH = 256  # tokens in a row, at most


def fits_in_memory(model: FloatModel, free: int | None) -> bool:
    """Whether the whole model takes less than two thirds of the free bytes; None: it is not known, and so it does."""
    weights = sum(p.numel() for p in model.model.parameters()) * model.dtype.itemsize
    return free is None or weights * 3 < free * 2


@torch.no_grad()
def own_samples(
    model: FloatModel,
    openings: Sequence[Sequence[int]],
    ends: Sequence[int],
    count: int,
    length: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> torch.Tensor | None:
    """Token ids int64 [count, length] that the model writes; None if it keeps no cache.

    openings  token ids that documents start with, taken one after the other
    ends      tokens after which a document is over
    progress  called with the tokens made, of how many
    """
    generator = torch.Generator().manual_seed(seed)
    rows_each = -(-length // _LENGTH)
    row_length, total_rows = -(-length // rows_each), count * rows_each
    model.load(None)
    for i in range(len(model.blocks)):
        model.load(i)
    model.load_head()
    try:
        queue = _Openings(openings)
        parts = []
        for first in range(0, total_rows, _ROWS):
            rows = min(_ROWS, total_rows - first)

            def tell(done: int, first: int = first, rows: int = rows) -> None:
                written = (first * row_length + rows * done) * count * length // (total_rows * row_length)
                progress(written, count * length)

            part = _rows(model.model, queue, frozenset(ends), rows, row_length, generator, tell)
            if part is None:
                return None
            parts.append(part)
        return torch.cat(parts).view(count, -1)[:, :length].clone()
    finally:
        for i in range(len(model.blocks)):
            model.drop(i)
        model.drop(None)
        model.drop_head()


class _Openings:
    """Openings one after the other, from the first again after the last."""

    def __init__(self, openings: Sequence[Sequence[int]]) -> None:
        self._openings, self._next = openings, 0

    def take(self) -> list[int]:
        """The next one, backwards: its first token is at the end."""
        opening = self._openings[self._next % len(self._openings)]
        self._next += 1
        return list(reversed(opening))


def _rows(
    network: Any,
    openings: _Openings,
    ends: frozenset[int],
    rows: int,
    length: int,
    generator: torch.Generator,
    tell: Callable[[int], None],
) -> torch.Tensor | None:
    tokens = torch.empty(rows, length, dtype=torch.int64)
    pending = [openings.take() for _ in range(rows)]
    cache = logits = None
    renamed = "cache" in signature(network.forward).parameters  # since transformers 5.24
    name = "cache" if renamed else "past_key_values"
    for position in range(length):
        chosen = [0] * rows
        if logits is not None:
            weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
            chosen = drawn(weights, generator)[:, 0].tolist()
        for row, token in enumerate(chosen):
            if pending[row]:
                token = pending[row].pop()
            elif token in ends:
                pending[row] = openings.take()
            tokens[row, position] = token
        device = network.get_input_embeddings().weight.device
        out = network(input_ids=tokens[:, position : position + 1].to(device), use_cache=True, **{name: cache})
        cache = getattr(out, name, None)
        if cache is None:
            return None
        logits = out.logits[:, -1].float().cpu()
        tell(position + 1)
    return tokens

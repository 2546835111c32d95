"""What the blocks of a model are called with: activations that go from block to block, and all else that stays.

The activations, [sequences, length, hidden] a batch, are kept in memory or in a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError


@dataclass
class Feed:
    """What one call of a block gets: the first positional argument goes from block to block, the rest stays.

    calls   the rest of it for each block of a model, in which a later block may see another mask than the first
    file    where the first argument is while no block needs it; None: in memory
    """

    x: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    named: bool = False  # there is no positional argument
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    file: Path | None = None

    def into(self, block: nn.Module) -> Any:
        """Call the block."""
        if self.named:
            return block(**self.kwargs)
        return block(self.value(), *self.args, **self.kwargs)

    def value(self) -> Any:
        """The first argument."""
        return self.x if self.file is None else torch.load(self.file, map_location=self.x.device, weights_only=True)

    def at(self, block: int) -> None:
        """From now on, the block of this number is called."""
        self.args, self.kwargs = self.calls[block]

    def pass_on(self, output: Any) -> None:
        """A block's output becomes the next one's input."""
        x = output[0] if isinstance(output, tuple) else output
        if self.file is None:
            self.x = x
            return
        try:
            torch.save(x.cpu(), self.file)
        except (OSError, RuntimeError) as problem:  # torch's writer raises the latter where a disk is full
            raise BridgeError(
                f"{self.file.parent}: activations cannot be written ({str(problem).splitlines()[0]}); "
                "free the disk, give another folder, or keep them in memory"
            ) from None
        self.x = torch.empty(0, device=x.device)

    def copy(self) -> Feed:
        """Another one for the same calls."""
        if self.file is None:
            return replace(self)
        twin = replace(self, file=self.file.with_suffix(".float"))
        twin.pass_on(torch.load(self.file, map_location=self.x.device, weights_only=True))
        return twin


class Folder:
    """A temporary folder for activations inside a given one; None: they stay in memory."""

    def __init__(self, inside: str | Path | None) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None
        if inside is not None:
            try:
                self._made = tempfile.TemporaryDirectory(prefix="activations-", dir=inside)
            except OSError as problem:
                raise BridgeError(
                    f"{inside}: no folder for activations can be made there ({problem.strerror})"
                ) from None

    def file(self, number: int) -> Path | None:
        """Where the activations of a batch go."""
        return Path(self._made.name) / f"{number}.pt" if self._made else None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made:
            with suppress(OSError):
                self._made.cleanup()


class StopForward(Exception):
    """What is wanted of a forward pass has been seen."""


def first_feeds(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Iterable[torch.Tensor], folder: Folder
) -> list[Feed]:
    """What the blocks are called with, batch by batch. No block runs: each hands on what the first one got."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    first: list[torch.Tensor] = []
    feeds: list[Feed] = []

    def stand_in(number: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = args[0] if args else kwargs.pop("hidden_states")
            if not number:
                first.append(x)
            known = feeds[0].calls[number][1] if feeds else calls[-1][1] if calls else {}
            kwargs = {k: _one(v, known.get(k)) for k, v in kwargs.items() if "past_key_value" not in k}
            calls.append((args[1:], kwargs | {"use_cache": False} if "use_cache" in kwargs else kwargs))
            if number + 1 == len(blocks):
                raise StopForward
            return first[0]

        return forward

    for number, block in enumerate(blocks):
        block.forward = stand_in(number)
    try:
        device = next(p.device for p in model.parameters() if p.device.type != "meta")
        for tokens in batches:
            with suppress(StopForward):
                model(tokens.to(device), use_cache=False)
            feed = Feed(None, calls=calls, file=folder.file(len(feeds)))
            feed.pass_on(first[0])
            feeds.append(feed)
            calls, first = [], []
    finally:
        for block in blocks:
            del block.forward
    return feeds


def after_blocks(model: Any, blocks: Sequence[nn.Module], tokens: torch.Tensor, x: torch.Tensor) -> Any:
    """The model's output where the last block's is x [sequences, length, hidden]. No block runs; gradients pass."""
    for block in blocks:
        block.forward = lambda *args, **kwargs: x  # type: ignore[method-assign]
    try:
        return model(tokens.to(x.device), use_cache=False)
    finally:
        for block in blocks:
            del block.forward


def _one(value: Any, known: Any) -> Any:
    """The one that is known already where two arguments are equal: a mask is kept once, not for every batch."""
    if isinstance(value, tuple) and isinstance(known, tuple) and len(value) == len(known):
        return tuple(map(_one, value, known))
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.dtype == known.dtype:
        return known if torch.equal(value, known) else value
    return value

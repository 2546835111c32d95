"""A `transformers` decoder as calibration passes through it: its blocks, one loaded at a time, and its output head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from bridge.errors import BridgeError, parameter
from bridge.quantize.model.block_inputs import head_of, matrix_shape
from bridge.quantize.model.experts import restore_experts, split_experts


class StreamedModel(Protocol):
    """A model whose weights are loaded when they are needed.

    model, prefix, blocks   a `transformers` decoder, the name of its list of blocks, and the list
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def prefix(self) -> str: ...
    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    def load(self, block: int | None) -> None:
        """Load a block's weights; None: those of everything outside the blocks except the head."""

    def drop(self, block: int | None) -> None:
        """Free what `load` has loaded."""

    def untied_head(self) -> tuple[str, tuple[int, int]] | None:
        """The output head's name and (out, columns); None if it is tied to the embeddings."""

    def head_rows(self, rows: slice) -> torch.Tensor:
        """Some rows of the output head's weights, float32 [rows, columns], a copy."""

    def set_head_rows(self, rows: slice, values: torch.Tensor) -> None:
        """Replace them."""

    def name(self, layer: str) -> str:
        """A layer's name in the checkpoint, given its name in the model."""


@contextmanager
def loaded(model: StreamedModel, *blocks: int | None) -> Iterator[None]:
    """Have blocks loaded meanwhile; None: everything outside the blocks except the head."""
    try:
        for block in blocks:
            model.load(block)
        yield
    finally:
        for block in reversed(blocks):
            model.drop(block)


class InMemory:
    """A model that is completely in memory; its experts are split while their block is calibrated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefix, blocks = decoder_blocks(model)
        self.blocks: Sequence[nn.Module] = list(blocks)
        self._split: list[tuple[nn.Module, str, nn.Module]] = []

    def load(self, block: int | None) -> None:
        if block is not None:
            self._split = split_experts(self.blocks[block])

    def drop(self, block: int | None) -> None:
        restore_experts(self._split)
        self._split = []

    def untied_head(self) -> tuple[str, tuple[int, int]] | None:
        name, head = head_of(self.model)
        tied = head.weight is self.model.get_input_embeddings().weight  # type: ignore[operator]
        return None if tied else (name, matrix_shape(head))

    def head_rows(self, rows: slice) -> torch.Tensor:
        _, head = head_of(self.model)
        return head.weight.data[rows].to(torch.float32, copy=True)  # type: ignore[index, union-attr]

    def set_head_rows(self, rows: slice, values: torch.Tensor) -> None:
        _, head = head_of(self.model)
        head.weight.data[rows] = values.to(head.weight.data)  # type: ignore[index, union-attr, operator]

    def name(self, layer: str) -> str:
        return layer


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of a `transformers` model's decoder blocks. Raises BridgeError if there is none."""
    count = getattr(text_config(model), "num_hidden_layers", None)
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    if not lists:
        raise BridgeError(f"{type(model).__name__}: no list of {count} decoder layers found; use bridge.quantize.gptq")
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    inside = next(n for n, m in model.named_modules() if m is embeddings).rpartition(".")[0]
    # a model that sees may have as many layers for images
    return next(((n, m) for n, m in lists.items() if n.startswith(f"{inside}.")), next(iter(lists.items())))


def positions_of(config: Any) -> int | None:
    """The most tokens that a model of this `transformers` config takes at once; None where there is no limit."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # the latter: MPT


def check_length(length: int, positions: int | None) -> None:
    """BridgeError where sequences are longer than the model has positions; None: it has no limit."""
    if positions is not None and length > positions:
        raise BridgeError(
            f"calibration sequences have {length} tokens, but the model has {positions} positions; "
            f"use shorter ones: {parameter('length', positions)}"
        )


def check_sequences(model: nn.Module, length: int) -> None:
    """`check_length` for sequences of a model."""
    check_length(length, positions_of(text_config(model)))


def text_config(model: nn.Module) -> Any:
    """The config of a model, or of the language model in one of several parts."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config

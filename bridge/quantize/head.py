"""The output head of a `transformers` decoder, and what its inputs say about its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from bridge.quantize.block_inputs import StopForward, after_blocks
from bridge.quantize.hessian import Hessian


def head_of(model: Any) -> tuple[str, nn.Module]:
    """Its name and the module."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head), head


def head_hessian(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Iterable[torch.Tensor],
    outputs: Iterable[torch.Tensor],
    float_outputs: Iterable[torch.Tensor] | None = None,
) -> Hessian:
    """The Hessian of the head's inputs.

    batches        tokens int [sequences, length]
    outputs        of the last block for each batch
    float_outputs  those of the float model's, for the cross term
    """
    name, head = head_of(model)
    hessian = Hessian(name, head.weight.shape[1], head.weight.device)  # type: ignore[index, union-attr, arg-type]
    floats = None if float_outputs is None else iter(float_outputs)
    for tokens, x in zip(batches, outputs, strict=True):
        own = _inputs(model, blocks, head, tokens, x)
        hessian.add(own, None if floats is None else _inputs(model, blocks, head, tokens, next(floats)))
    return hessian


def _inputs(
    model: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, tokens: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """What the head gets, [sequences, length, hidden]; it does not run."""
    seen: list[torch.Tensor] = []

    def note(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append(args[0])
        raise StopForward

    hook = head.register_forward_pre_hook(note)
    try:
        with suppress(StopForward):
            after_blocks(model, blocks, tokens, x)
    finally:
        hook.remove()
    return seen[0]

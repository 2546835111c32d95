"""The mean squares of each layer's inputs, which are llama.cpp's importance of its columns, from one forward pass.

Costs a forward pass of the tokens without the output head. Memory holds one block, and the activations between blocks,
[tokens, hidden], as far as they do not go to disk.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.block_inputs import first_inputs, head_hessian, is_layer, matrix_shape, vectors
from bridge.quantize.model.streamed_model import InMemory, StreamedModel, check_sequences, loaded


@torch.no_grad()
def mean_input_squares(
    model: nn.Module | StreamedModel,
    tokens: torch.Tensor,
    *,
    batch: int = 8,
    offload: str | Path | None = None,
    memory: int | None = None,
    done: Callable[[int, int], None] = lambda blocks, total: None,
) -> dict[str, tuple[np.ndarray, int]]:
    """Mean squares float32 [columns] of the inputs of each layer of the blocks, and of the untied output head, by name,
    and how many tokens reached it.

    tokens           int [sequences, length]
    batch            sequences in a forward pass
    offload, memory  see `quantize_model`
    done             called with the number of finished blocks, of how many

    An expert without tokens has zeros. Raises BridgeError where inputs are not finite.
    """
    source: StreamedModel = InMemory(model) if isinstance(model, nn.Module) else model
    check_sequences(source.model, tokens.shape[1])
    source.model.eval()
    parts = tokens.split(batch)
    squares: dict[str, tuple[np.ndarray, int]] = {}
    with ActivationStore(offload, memory) as store:
        with loaded(source, None, 0):
            batches = first_inputs(source.model, source.blocks, parts, store)
        for i, block in enumerate(source.blocks):
            with ExitStack() as stack:
                stack.enter_context(loaded(source, i))
                modules = {source.name(f"{source.prefix}.{i}.{n}"): m for n, m in block.named_modules() if is_layer(m)}
                layers = {name: _InputSquares(module) for name, module in modules.items()}
                for layer in layers.values():
                    stack.enter_context(layer.module.register_forward_pre_hook(layer.add))
                for b in batches:
                    b.select_block(i)
                    b.advance(b.run(block))
            squares |= {name: layer.mean(name) for name, layer in layers.items()}
            done(i + 1, len(source.blocks))
        head = source.untied_head()
        if head is not None:
            with loaded(source, None):
                outputs = (b.value() for b in batches)
                hessian = head_hessian(source.model, source.blocks, parts, batches[0].items, outputs)
            squares[head[0]] = hessian.mean_squares(), hessian.tokens
    return squares


class _InputSquares:
    """Sum of squares of a layer's inputs."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.tokens = module, 0
        self.sum = torch.zeros(matrix_shape(module)[1], dtype=torch.float64, device=next(module.parameters()).device)

    def add(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        x = vectors(self.module, args[0])
        self.sum += x.float().square().sum(0)
        self.tokens += len(x)

    def mean(self, name: str) -> tuple[np.ndarray, int]:
        if not torch.isfinite(self.sum).all():
            raise BridgeError(
                f"{name}: its inputs hold NaN or infinity on the calibration text; layers before it overflow, or the "
                "checkpoint is damaged"
            )
        return (self.sum / max(self.tokens, 1)).float().cpu().numpy(), self.tokens

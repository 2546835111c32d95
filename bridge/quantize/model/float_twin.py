"""The float block beside the one that is quantized: it shares all tensors but those that have been replaced."""

import copy

import torch
from torch import nn

from bridge.quantize.model.block_inputs import set_matrix


def float_twin(block: nn.Module) -> nn.Module:
    """A copy of a block that shares its tensors until `replace_layer` changes them."""
    return copy.deepcopy(block, {id(t): t for t in (*block.parameters(), *block.buffers())})


def replace_layer(layer: nn.Module, values: torch.Tensor, original: nn.Module | None) -> None:
    """Set a layer's quantized weights; the same layer of the float block, which shared them, gets a copy first."""
    if original is not None:
        weight: torch.Tensor = original.weight  # type: ignore[assignment]
        original.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    set_matrix(layer, values)

"""What a quantizer gets of a layer, and what calibration asks its caller for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.quantize.block_inputs import BlockInputs
from bridge.quantize.hessian import Hessian
from bridge.quantize.two_sided import OutputHessian


@dataclass(frozen=True)
class LayerInput:
    """What a quantizer gets: one layer, not yet quantized."""

    name: str
    weight: torch.Tensor  # float32 [out, columns], the float model's
    hessian: Hessian
    outputs: OutputHessian | None = None
    last: bool = False  # no other layer has this Hessian, and no later rows
    rows: tuple[int, int, int] | None = None  # first, end and number of all: a part of the output head


# a layer -> its quantized weights as floats [out, columns], and anything that the caller wants to have of it
Quantizer = Callable[[LayerInput], tuple[torch.Tensor, Any]]
Known = Callable[[str], torch.Tensor | None]
Outputs = Callable[[str], OutputHessian | None]
# layers with the same inputs -> how much each of the text's tokens counts in their H, float32 [tokens]; None: all alike
Weights = Callable[[Sequence[str]], torch.Tensor | None]
Spans = Callable[[str, int, int], Iterable[slice]]
# (block, its layers, its inputs, name in the block -> name in the checkpoint); may change floats in place
Prepare = Callable[[nn.Module, Mapping[str, nn.Module], Sequence[BlockInputs], Callable[[str], str]], None]

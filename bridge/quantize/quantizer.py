"""What a quantizer gets of a layer, and what calibration asks its caller for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.quantize.model.block_inputs import BlockInputs
from bridge.quantize.solve.hessian import Hessian
from bridge.quantize.solve.two_sided import OutputHessian


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
# layers with the same inputs -> how much each of the text's tokens counts in their H, float32 [tokens]; None: all alike
TokenWeights = Callable[[Sequence[str]], torch.Tensor | None]
# (block, its layers, its inputs, name in the block -> name in the checkpoint); may change floats in place
Prepare = Callable[[nn.Module, Mapping[str, nn.Module], Sequence[BlockInputs], Callable[[str], str]], None]


@dataclass(frozen=True)
class LayerHooks:
    """What calibration asks about a layer, by its name; a `LayerStore` answers the same questions.

    finished        float [out, columns]: the weights of a layer that was quantized before; None: quantize it
    outputs         A of the layer; None: all outputs count the same
    weights         see `TokenWeights` and `two_sided.token_weights`
    values_by_rows  finished weights, some rows after the others; of the embeddings: none where they stay float
    missing         (layer, rows, at most so many at a time) -> the rows of the head to quantize, which is the largest
                    matrix: as a whole it takes several times its size in memory. None: it is not quantized
    """

    finished: Callable[[str], torch.Tensor | None] = lambda name: None
    outputs: Callable[[str], OutputHessian | None] = lambda name: None
    weights: TokenWeights = lambda names: None
    values_by_rows: Callable[[str], Iterable[torch.Tensor]] = lambda name: ()
    missing: Callable[[str, int, int], Iterable[slice]] = lambda name, rows, step: [slice(0, rows)]

"""What each layer of a plan loses in each type that it may get, measured with a text.

A forward and backward pass of a few tokens finds how outputs affect the prediction (`Passes.mean_square_gradients`),
one of all tokens the layers' Hessians; with both, types are tried on some rows of each layer
(`bridge.quantize.budget.sensitivity`). Memory holds one block, as when it is quantized, and of the few tokens what each
block gets. On top of those passes come, for each layer and type, a factorization of its Hessian and 32 rows of its
quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.blocks import BLOCKS
from bridge.models.outline import Part
from bridge.quantize.settings import Calibration

if TYPE_CHECKING:
    import torch

    from bridge.quantize.budget.sensitivity import Cost
    from bridge.quantize.forward_passes import Passes
    from bridge.quantize.walk import LayerInput

_TOKENS_AT_ONCE = 4096


@dataclass
class LayerCosts:
    """Measures layers.

    carries             whether a layer keeps its codes in a type, and so loses nothing
    settings            how the layers will be quantized
    parts               by layer: where it is in the GGUF
    types               by layer: those that it may get
    embedding_and_head  their names; the same name twice where the GGUF has one tensor for both
    step                called with the name of each layer when it is done
    costs               by layer and type, filled by `measure`
    squares             by layer, filled by `measure`: the mean square of each input, float32 [columns]
    """

    carries: Callable[[str, str], bool]
    settings: Calibration
    parts: Mapping[str, Part]
    types: Mapping[str, list[str]]
    embedding_and_head: tuple[str, str]
    step: Callable[[str], None]
    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    squares: dict[str, np.ndarray] = field(default_factory=dict)

    def measure(self, passes: Passes, tokens: torch.Tensor) -> None:
        """Fill `costs` and `squares`.

        passes  of a few tokens
        tokens  int64 [sequences, length], all
        """
        from bridge.quantize import quantize_model

        gradients = dict(passes.mean_square_gradients())
        embeddings, head = self.embedding_and_head
        gradients[head] = passes.head_gradients()
        if embeddings in self.types:
            self.costs[embeddings] = self._embedding_costs(passes, gradients)
            self.step(embeddings)

        def measure(layer: LayerInput) -> tuple[torch.Tensor, None]:
            self.costs[layer.name] = self._layer_costs(layer, gradients.get(layer.name))
            self.squares[layer.name] = layer.hessian.mean_squares()
            self.step(layer.name)
            return layer.weight, None

        walk = quantize_model(
            passes.model, tokens, measure, batch=max(1, _TOKENS_AT_ONCE // tokens.shape[1]),
            wanted=(self.types.keys() - {embeddings}).__contains__, offload=self.settings.offload, head=True,
        )  # fmt: skip
        for _ in walk:
            pass
        passes.load_embedding_and_head()

    def _embedding_costs(self, passes: Passes, gradients: Mapping[str, Any]) -> dict[str, Cost]:
        """Of the embeddings, rounded to nearest; as the head too, where they are that."""
        from bridge.quantize.budget.sensitivity import embedding_costs, layer_costs

        embeddings, head = self.embedding_and_head
        types = self.types[embeddings]
        weight = passes.model.model.get_input_embeddings().weight
        costs = embedding_costs(weight, passes.tokens, gradients["embeddings"], types)
        if head != embeddings:
            return costs
        found = layer_costs(weight, passes.head_hessian(), gradients[head], dict.fromkeys(types))
        return {type: cost + found[type] for type, cost in costs.items()}

    def _layer_costs(self, layer: LayerInput, gradients: torch.Tensor | None) -> dict[str, Cost]:
        from bridge.quantize import superblocks
        from bridge.quantize.budget.sensitivity import Cost, layer_costs
        from bridge.quantize.walk import LayerInput

        types = self.types[layer.name]
        if gradients is None or not layer.hessian.tokens:  # an expert that no token reached
            return dict.fromkeys(types, Cost(0.0))
        columns = self.parts[layer.name].columns

        def rounded(rows: torch.Tensor, type: str) -> torch.Tensor:
            method = self.settings.quantizer(superblocks(type))
            return method.layer(LayerInput(layer.name, rows, layer.hessian), columns)[0]

        def calibrated(type: str) -> bool:
            return type in BLOCKS and not (layer.name == self.embedding_and_head[1] and type == "Q8_0")

        methods = {type: rounded if calibrated(type) else None for type in types}
        costs = layer_costs(layer.weight, layer.hessian, gradients, methods, layer.hessian.mean_squares())
        return costs | {type: Cost(0.0, 0.0) for type in types if self.carries(layer.name, type)}

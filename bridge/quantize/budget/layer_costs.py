"""What each layer of a plan loses in each type that it may get, measured with a text.

A forward and backward pass of a few tokens finds how outputs affect the prediction (`Passes.output_products`),
one of all tokens the layers' Hessians; with both, types are tried on some rows of each layer
(`bridge.quantize.budget.sensitivity`). Memory holds one block, as when it is quantized, and of the few tokens what each
block gets. On top of those passes comes, for each layer and type, the quantization of 32 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bridge.quantize.settings import Calibration

if TYPE_CHECKING:
    import torch

    from bridge.quantize.budget.sensitivity import Cost, Rounding
    from bridge.quantize.model.forward_passes import Passes
    from bridge.quantize.quantizer import LayerInput
    from bridge.quantize.solve.hessian import Hessian


@dataclass
class LayerCosts:
    """Measures layers.

    carries             whether a layer keeps its codes in a type, and so loses nothing
    calibrates          whether a layer is quantized to a type with the text, else rounded to nearest
    settings            how the layers will be quantized
    columns             by layer: int [columns], their order in the GGUF; None: the checkpoint's
    types               by layer: those that it may get
    scales              by layer: what multiplies it in NVFP4
    embedding_and_head  their names; the same name twice where the GGUF has one tensor for both
    step                called with the name of each layer when it is done
    costs               by layer and type, filled by `measure`
    squares             by layer, filled by `measure`: the mean square of each input, float32 [columns]
    """

    carries: Callable[[str, str], bool]
    calibrates: Callable[[str, str], bool]
    settings: Calibration
    columns: Mapping[str, np.ndarray | None]
    types: Mapping[str, list[str]]
    scales: Mapping[str, float]
    embedding_and_head: tuple[str, str]
    step: Callable[[str], None]
    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    squares: dict[str, np.ndarray] = field(default_factory=dict)

    def measure(self, passes: Passes, tokens: torch.Tensor) -> None:
        """Fill `costs` and `squares`; `passes` are of a few tokens, `tokens` int64 [sequences, length] are all."""
        from bridge.quantize import quantize_model
        from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
        from bridge.quantize.run.walk import sequences_together
        from bridge.quantize.solve.two_sided import ROWS

        embeddings, head = self.embedding_and_head
        predicted = passes.head_gradients()
        as_head = (passes.head_hessian(), predicted) if head == embeddings else None
        rows = {head: (predicted, predicted)}
        for name, products in passes.output_products(ROWS):
            if name != embeddings:
                rows[name] = self._of_rows(products.blocks * products.scale, passes.model.linears()[name][0])
            elif name in self.types:
                passes.load_embedding_and_head()
                self._measure_embeddings(passes, tokens, products.blocks[0] * products.scale, as_head)
                self.step(name)

        def measure(layer: LayerInput) -> tuple[torch.Tensor, None]:
            self.costs[layer.name] = self._layer_costs(layer, rows.get(layer.name))
            self.squares[layer.name] = layer.hessian.mean_squares()
            self.step(layer.name)
            return layer.weight, None

        passes.model.drop(None)
        passes.model.drop_head()
        ckpt, device = passes.model.ckpt, passes.model.device
        model = FloatModel(ckpt, fast_arithmetic(device), device)  # estimates need no more precision
        walk = quantize_model(
            model, tokens, measure, batch=sequences_together(tokens.shape[1]),
            wanted=(self.types.keys() - {embeddings}).__contains__, offload=self.settings.offload, head=True,
        )  # fmt: skip
        for _ in walk:
            pass
        passes.load_embedding_and_head()

    def _of_rows(self, products: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`OutputMetric.squares` and `OutputMetric.left` of a layer of so many rows, from A."""
        from bridge.quantize.solve.two_sided import row_costs

        squares = products.diagonal(dim1=1, dim2=2).flatten()[:count].double()
        return squares, row_costs(products, count) if self.settings.two_sided and squares.any() else squares

    def _measure_embeddings(
        self, passes: Passes, tokens: torch.Tensor, products: torch.Tensor, as_head: tuple[Hessian, torch.Tensor] | None
    ) -> None:
        """Costs of the embeddings, which are rounded two-sided with a Hessian of their own, else to nearest."""
        from bridge.quantize.budget.sensitivity import OutputMetric, layer_costs
        from bridge.quantize.model.embeddings import embeddings_hessian, embeddings_matrix

        name = self.embedding_and_head[0]
        weight = passes.model.model.get_input_embeddings().weight
        counts = tokens.flatten().bincount(minlength=len(weight)).double()
        share = counts / counts.sum()
        metrics = [OutputMetric(2 * products, share, share)]
        if as_head is not None:
            metrics.append(OutputMetric(as_head[0].matrix, as_head[1], as_head[1]))
        hessian = embeddings_hessian(name, embeddings_matrix(products, as_head), tokens.numel())
        if self.settings.two_sided:
            self.squares[name] = hessian.mean_squares()
        self.costs[name] = layer_costs(weight, metrics, self._methods(hessian), self.squares.get(name))

    def _layer_costs(self, layer: LayerInput, rows: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, Cost]:
        """rows: `OutputMetric.squares` and `OutputMetric.left`."""
        from bridge.quantize.budget.sensitivity import Cost, OutputMetric, layer_costs

        types = self.types[layer.name]
        if rows is None or not layer.hessian.tokens:  # an expert that no token reached
            return dict.fromkeys(types, Cost(0.0))
        metrics = [OutputMetric(layer.hessian.matrix, *rows)]
        costs = layer_costs(
            layer.weight, metrics, self._methods(layer.hessian), layer.hessian.mean_squares(),
            scale=self.scales[layer.name],
        )  # fmt: skip
        return costs | {type: Cost(0.0, 0.0) for type in types if self.carries(layer.name, type)}

    def _methods(self, hessian: Hessian) -> dict[str, Rounding | None]:
        """How rows of the layer of this H are rounded to each type that it may get; None: to nearest."""
        from bridge.quantize import superblocks
        from bridge.quantize.quantizer import LayerInput

        name = hessian.name

        def rounded(rows: torch.Tensor, type: str) -> torch.Tensor:
            method = self.settings.quantizer(superblocks(type, self.scales[name]))
            return method.layer(LayerInput(name, rows, hessian), self.columns[name])[0]

        return {type: rounded if self.calibrates(name, type) else None for type in self.types[name]}

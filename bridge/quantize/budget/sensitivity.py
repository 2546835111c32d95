"""The cost of rounding a layer to each type, for the model's prediction; estimated for one layer at a time.

With E = W - W' and a layer's inputs x, the error of its outputs is E x. To second order, and with row i's mean squared
gradient g_i (`Passes.mean_square_gradients`) assumed to be independent of x, the mean KL divergence from the float
model is

    sum_i g_i e_i H e_i^T / 4        nats a token, H = 2/n sum x x^T

Measured one layer at a time, KL divergences of a small Llama, its first two blocks, were 0.97 to 1.46 times that from 2
to 6 bits; over all its layers the rank correlation was 0.87 to 0.90.

Rows are rounded independently, so a few give an estimate for all. They are drawn in proportion to their weight,
g_i sum_j H_jj w_ij^2, and rounded by the method that the layer will be rounded by. The ratio of its error to that of
rounding to nearest is kept too: a trial model (`divergence`) rounds to nearest and scales the error down.

Cost: for each layer and type that of quantizing 32 rows, most of it the factorization of H.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from bridge.blocks import BLOCKS
from bridge.checkpoint.files.dtypes import torch_dtype
from bridge.encode.block_bytes import row_bytes
from bridge.encode.round_rows import quantize_rows
from bridge.quantize.hessian import Hessian
from bridge.system.row_threads import over_rows, tiles

# float [rows, columns] and a type -> what they become in it
Rounding = Callable[[torch.Tensor, str], torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """The cost of a layer in a type.

    loss         nats per token
    error_ratio  the method's error divided by that of rounding to nearest, in the metric of H
    """

    loss: float
    error_ratio: float = 1.0

    def __add__(self, other: Self) -> Self:
        return replace(self, loss=self.loss + other.loss)


def nearest(weight: torch.Tensor, type: str, importance: np.ndarray | None = None) -> torch.Tensor:
    """float32 [rows, columns] rounded to a type; importance float32 [columns]: what a squared error of each costs."""
    if type not in BLOCKS:
        return weight.to(torch_dtype(type)).float()
    return torch.from_numpy(block_values(nearest_blocks(weight, type, importance), type)).to(weight.device)


def nearest_blocks(weight: torch.Tensor, type: str, importance: np.ndarray | None = None) -> np.ndarray:
    """The same for a block type, as its blocks uint8 [rows, row bytes]."""
    block, values = BLOCKS[type], weight.detach().cpu().numpy()
    blocks = np.empty((len(values), row_bytes(block, values.shape[1])), np.uint8)
    over_rows(len(values), lambda r: quantize_rows(values[r], block, importance, blocks[r]))
    return blocks


def block_values(blocks: np.ndarray, type: str) -> np.ndarray:
    """float32 [rows, columns] of blocks uint8 [rows, row bytes]."""
    block = BLOCKS[type]
    values = np.empty((len(blocks), blocks.shape[1] // block.nbytes * block.size), np.float32)

    def work(rows: slice) -> None:
        values[rows] = dequantize(blocks[rows], GGMLQuantizationType[type])

    over_rows(len(blocks), work)
    return values


def layer_costs(
    weight: torch.Tensor,
    hessian: Hessian,
    gradients: torch.Tensor,
    methods: Mapping[str, Rounding | None],
    importance: np.ndarray | None = None,
    samples: int = 32,
) -> dict[str, Cost]:
    """The cost of each type.

    weight      float32 [out, columns], columns in the GGUF's order, as in `hessian`
    gradients   float64 [out], mean squares
    methods     by type: rounds rows; None: to nearest, with `importance`
    samples     number of rows drawn; one may be drawn several times
    """
    h = hessian.matrix
    diagonal = h.diagonal().double()
    squares = torch.cat([weight[r].double().square() @ diagonal for r in tiles(len(weight))]) * gradients.to(h.device)
    total = float(squares.sum())
    if not total > 0:  # this layer does not affect the prediction on this text
        return dict.fromkeys(methods, Cost(0.0))
    rows, counts = draw(squares, samples)
    own = weight[rows]
    factor = (gradients.to(h.device)[rows] / squares[rows] * counts).double() * (total / samples / 4)
    costs = {}
    for type, method in methods.items():
        plain = _loss(own, nearest(own, type, importance), h, factor)
        if method is None:
            costs[type] = Cost(plain)
            continue
        loss = _loss(own, method(own, type), h, factor)
        costs[type] = Cost(loss, loss / plain if plain > 0 else 1.0)
    return costs


def _loss(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor, factor: torch.Tensor) -> float:
    errors = weight - values
    loss = float(((errors @ hessian) * errors).double().sum(1) @ factor)
    return loss if math.isfinite(loss) else math.inf  # too large for half precision


def embedding_costs(
    weight: torch.Tensor, tokens: torch.Tensor, gradients: torch.Tensor, types: Iterable[str], samples: int = 1024
) -> dict[str, Cost]:
    """The cost of each type of the embeddings float32 [vocabulary, hidden]: sum_i g_i e_vi^2 / 2, mean over tokens v.

    tokens     int, of a text
    gradients  float64 [hidden], mean squares at the embeddings
    """
    flat = tokens.flatten()
    step = max(1, len(flat) // samples)
    rows, counts = flat[::step].unique(return_counts=True)
    own = weight[rows.to(weight.device)]
    share = (counts / counts.sum()).double().to(weight.device)
    costs = {}
    for type in types:
        errors = (own - nearest(own, type)).double().square() @ gradients.to(weight.device)
        loss = float(errors @ share) / 2
        costs[type] = Cost(loss if math.isfinite(loss) else math.inf)
    return costs


def draw(weights: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices drawn in proportion to weights float64 [n], evenly spaced on the running sum, and each one's count."""
    sums = weights.cumsum(0)
    at = (torch.arange(samples, dtype=sums.dtype, device=sums.device) + 0.5) * (sums[-1] / samples)
    return torch.searchsorted(sums, at).clamp(max=len(weights) - 1).unique(return_counts=True)

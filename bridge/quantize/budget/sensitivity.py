"""The cost of rounding a layer to each type, for the model's prediction; estimated for one layer at a time.

With E = W - W', H = 2/n sum x x^T of a layer's inputs x, and A the mean of g g^T, g the gradients of its outputs
(`Passes.output_products`), the mean KL divergence from the float model is to second order, x and g independent,

    tr(A E H E^T) / 4        nats a token

If rows are rounded independently, only A's diagonal matters, and errors cost  sum_i A_ii e_i H e_i^T / 4. Two-sided
rounding lets later rows make up for earlier ones: then A_ii is replaced by `two_sided.row_costs`. For the embeddings,
g of the first block's inputs is what x is of other layers, and a row costs as often as its token occurs.

So a few rows give an estimate for all. They are drawn by what they weigh, half of it A_ii sum_j H_jj w_ij^2 and half
A_ii sum_j w_ij^2, and rounded by the method that the layer will be rounded by. The second half is for layers some of
whose inputs are a million times as large at a sequence's first token: the row that multiplies them has nearly all of
the first weight, and says nothing about what other tokens lose by the other rows. The ratio of its error to that of
rounding to nearest is kept too: a trial model (`divergence`) rounds to nearest and scales the error down.

Cost: for each layer and type that of quantizing 32 rows; the factorization of H is shared by types with the same order
of columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from bridge.blocks import FP4
from bridge.blocks.read import WRITTEN
from bridge.checkpoint.files.dtypes import torch_dtype
from bridge.encode.block_bytes import row_bytes
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.quantize.method import Method, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.hessian import Hessian
from bridge.runtime.cpu.engines import dequantize
from bridge.system.cpu.row_threads import over_rows, tiles

# float [rows, columns] and a type -> what they become in it
Rounding = Callable[[torch.Tensor, str], torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """A layer's cost in a type: nats per token, and its error in H's metric over that of rounding to nearest."""

    loss: float
    error_ratio: float = 1.0

    def __add__(self, other: Self) -> Self:
        return replace(self, loss=self.loss + other.loss)


@dataclass(frozen=True)
class OutputMetric:
    """What errors of a layer's outputs cost.

    hessian  H, [columns, columns]
    squares  A's diagonal, float64 [out]: what e H e^T costs of a row that is rounded by itself
    left     the same of a row that later rows make up for
    """

    hessian: torch.Tensor
    squares: torch.Tensor
    left: torch.Tensor


def nearest(weight: torch.Tensor, type: str, importance: np.ndarray | None = None, scale: float = 1.0) -> torch.Tensor:
    """float32 [rows, columns] rounded to a type.

    importance  float32 [columns], what a squared error of each costs; MXFP4 and NVFP4 go without
    scale       of NVFP4, what multiplies the whole matrix
    """
    if type not in WRITTEN:
        return weight.to(torch_dtype(type)).float()
    blocks = nearest_blocks(weight, type, importance, scale)
    return torch.from_numpy(block_values(blocks, type, scale)).to(weight.device)


def nearest_blocks(weight: torch.Tensor, type: str, importance: np.ndarray | None, scale: float) -> np.ndarray:
    """Blocks uint8 [rows, row bytes] of float32 [rows, columns] rounded to a block type; arguments as of `nearest`."""
    if type in FP4:
        method = Method(superblocks(type, scale), "none", math.inf, sweeps=0)
        return method.layer(LayerInput("", weight, Hessian("", weight.shape[1], weight.device)))[1].blocks()
    block, values = WRITTEN[type], weight.detach().cpu().numpy()
    blocks = np.empty((len(values), row_bytes(block, values.shape[1])), np.uint8)
    over_rows(len(values), lambda r: quantize_rows(values[r], block, importance, blocks[r]))
    return blocks


def block_values(blocks: np.ndarray, type: str, scale: float = 1.0) -> np.ndarray:
    """float32 [rows, columns] of blocks uint8 [rows, row bytes]; scale of NVFP4 as `nearest` has it."""
    block = WRITTEN[type]
    values = np.empty((len(blocks), blocks.shape[1] // block.nbytes * block.size), np.float32)

    def work(rows: slice) -> None:
        values[rows] = dequantize.rows(type, blocks[rows])

    over_rows(len(blocks), work)
    return values * np.float32(scale) if block.matrix_scale else values


def layer_costs(
    weight: torch.Tensor,
    metrics: Sequence[OutputMetric],
    methods: Mapping[str, Rounding | None],
    importance: np.ndarray | None = None,
    samples: int = 32,
    scale: float = 1.0,
) -> dict[str, Cost]:
    """The cost of each type.

    weight      float32 [out, columns], columns in the GGUF's order, as in H
    metrics     what errors of its outputs cost; of tied embeddings there are two
    methods     by type: rounds rows; None: to nearest, with `importance`
    samples     number of rows drawn; one may be drawn several times
    scale       of NVFP4, what multiplies the whole matrix
    """
    metrics = [replace(m, squares=m.squares.to(weight.device), left=m.left.to(weight.device)) for m in metrics]
    powers = torch.zeros(len(weight), 2, dtype=torch.float64, device=weight.device)  # of rows: by H, and without it
    for m in metrics:
        diagonal = m.hessian.diagonal().double()
        each = torch.stack([diagonal, torch.ones_like(diagonal)], 1)
        powers += torch.cat([weight[r].double().square() @ each for r in tiles(len(weight))]) * m.left[:, None]
    if not float(powers[:, 0].sum()) > 0:  # this layer does not affect the prediction on this text
        return dict.fromkeys(methods, Cost(0.0))
    likely = (powers / powers.sum(0)).mean(1)
    rows, counts = draw(likely, samples)
    sampled = weight[rows]
    share = counts / likely[rows] / (4 * samples)
    costs = {}
    for type, method in methods.items():
        errors = sampled - nearest(sampled, type, importance, scale)
        plain = sum(_loss(errors, m.hessian, m.squares[rows] * share) for m in metrics)
        if method is None:
            costs[type] = Cost(plain)
            continue
        errors = sampled - method(sampled, type)
        loss = sum(_loss(errors, m.hessian, m.left[rows] * share) for m in metrics)
        costs[type] = Cost(loss, loss / plain if plain > 0 else 1.0)
    return costs


def _loss(errors: torch.Tensor, hessian: torch.Tensor, costs: torch.Tensor) -> float:
    loss = float(((errors @ hessian) * errors).double().sum(1) @ costs)
    return loss if math.isfinite(loss) else math.inf  # too large for half precision


def draw(weights: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices drawn in proportion to weights float64 [n], evenly spaced on the running sum, and each one's count."""
    sums = weights.cumsum(0)
    points = (torch.arange(samples, dtype=sums.dtype, device=sums.device) + 0.5) * (sums[-1] / samples)
    return torch.searchsorted(sums, points).clamp(max=len(weights) - 1).unique(return_counts=True)

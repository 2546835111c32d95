"""What GPTAQ (arXiv 2504.02692) quantizes instead of W: the weights W* whose outputs, with the quantized model's inputs
x, come closest to the float model's,  W x_float.

    W* = W + alpha W C H^-1,    C = 2/n sum (x_float - x) x^T

For alpha 1, sum |W x_float - W' x|^2 is  tr(E H E^T) of E = W* - W' plus a constant. So any method that minimizes the
error under H minimizes this one too. Tokens that are held back show how much of C is chance: they choose alpha.

C takes 2 n^2 operations a token for n inputs. A layer of m <= n outputs needs W C alone, and from the outputs that
the float model computes anyway, R = 2/n sum W x_float x^T takes 2 m n: W C = R - W H.

If a layer's output is added to the residual h, and to nothing else (`replay.End`), their sum is what has to come close:
R = 2/n sum (W x_float + h_float - h) x^T,  so that the layer also makes up for what h has lost before it.
"""

from collections.abc import Sequence

import torch

from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.hessian import damped_diagonal, some_rows
from bridge.system.cpu.row_threads import tiles


def takes_products(rows: Sequence[int], columns: int, at_hand: bool) -> bool:
    """Whether R of layers with the same inputs takes less work than C.

    rows     outputs of each layer
    at_hand  whether their float outputs are computed anyway
    """
    return sum(rows) * (1 if at_hand else 2) <= columns


def target_of(layer: LayerInput, damping: float, alpha: float, order: torch.Tensor | None = None) -> torch.Tensor:
    """W* of a layer, float [rows, columns], with the alpha of `alpha_of`, at most `alpha`.

    order  of the columns in the factor of H that the solver will use, which is shared

    If no other layer needs C and the held-back tokens' Hessian, their memory is freed.
    """
    weight, hessian = layer.weight, layer.hessian
    alpha = min(alpha, alpha_of(layer, damping))
    sums, cross = hessian.products.get(layer.name), hessian.cross
    if layer.last:
        hessian.products, hessian.held, hessian.cross = {}, None, None
    product = None
    if alpha:
        product = sums.total if sums is not None else None if cross is None else weight @ cross.to(weight)
    del cross
    factored = None if product is None else hessian.factor(damping, order)
    if product is None or factored is None or factored[1] != damping:
        return weight
    remaining = 1 - (hessian.shrinkage or 0.0)
    if sums is None:
        return retarget(weight, factored[0], product, alpha, order)
    del sums
    if not remaining:
        return retarget(weight, factored[0], product - weight @ hessian.matrix, alpha, order)
    # the factor is that of  remaining H + diag(full - remaining h),  h = diag(H), so  W H  need not be computed
    full = damped_diagonal(hessian.matrix, damping)
    product = torch.addcmul(product, weight, full / remaining - hessian.matrix.diagonal())
    return retarget(weight * (1 - alpha / remaining), factored[0], product, alpha, order)


def retarget(
    weight: torch.Tensor, factor: torch.Tensor, product: torch.Tensor, alpha: float, order: torch.Tensor | None = None
) -> torch.Tensor:
    """W + alpha P H^-1, with P = W C the target.

    factor   U, H^-1 = U^T U, its columns in `order`; None: unchanged
    product  P
    """
    product = product if order is None else product[:, order]
    factor = factor.to(product)
    half = torch.empty_like(product)
    for t in tiles(len(factor)):
        torch.mm(product[:, t.start :], factor[t, t.start :].T, out=half[:, t])
    moved = product if order is not None else torch.empty_like(product)
    for t in tiles(len(factor)):
        torch.mm(half[:, : t.stop], factor[: t.stop, t], out=moved[:, t])
    del half
    if order is not None:
        moved = moved[:, torch.argsort(order)]
    return moved.mul_(alpha).add_(weight)


def alpha_of(layer: LayerInput, damping: float) -> float:
    """The alpha, 0..1, with the least error on the held-back tokens, by `some_rows`; 0 without such tokens.

    With D from all other tokens, the error sum |W x_float - W' x|^2 of W' = W + alpha D on the held-back ones is a
    parabola,  alpha^2 tr(D H D^T) - 2 alpha tr(D (W C)^T)  plus a constant, with their H and C.
    """
    hessian, held, sums = layer.hessian, layer.hessian.held, layer.hessian.products.get(layer.name)
    expected = _expected(layer)
    if held is None or expected is None:
        return 0.0
    lower = hessian.rest_factor(damping, keep=not layer.last)
    if lower is None:
        return 0.0
    rows = some_rows(len(layer.weight))
    some, share = layer.weight[rows], held.tokens / hessian.tokens
    if sums is not None:
        product = sums.total[rows].to(some) - some @ hessian.matrix.to(some)
    else:
        assert hessian.cross is not None
        product = some @ hessian.cross.to(some)
    of_rest = product.sub_(expected, alpha=share).div_(1 - share)
    d = torch.cholesky_solve(of_rest.T, lower.to(some)).T
    gain = float((d * expected).sum(dtype=torch.float64))
    cost = float((d @ held.matrix.to(d)).mul_(d).sum(dtype=torch.float64))
    return min(max(gain / cost, 0.0), 1.0) if cost > 0 else 0.0


def _expected(layer: LayerInput) -> torch.Tensor | None:
    """W C of `some_rows` over the held-back tokens, float [rows, columns]; None without those or float inputs."""
    held, sums = layer.hessian.held, layer.hessian.products.get(layer.name)
    some = layer.weight[some_rows(len(layer.weight))]
    if held is None:
        return None
    if sums is not None:
        return sums.held.to(some) - some @ held.matrix.to(some)
    return None if layer.hessian.cross is None or held.cross is None else some @ held.cross.to(some)


class HeldError:
    """What weights lose on the tokens held back, by `some_rows`; made before `target_of` frees what it takes.

    Up to a constant, sum |W x_float - W' x|^2 is  tr(D H D^T) - 2 tr(D (W C)^T),  D = W' - W, H and C of these tokens.

    cross  whether C counts; else x_float = x
    costs  of a squared error in each row's output, float [rows]; None: all alike
    """

    def __init__(self, layer: LayerInput, cross: bool) -> None:
        held = layer.hessian.held
        assert held is not None
        self.rows = some_rows(len(layer.weight))
        self.weight = layer.weight[self.rows]
        self.hessian = held.matrix
        self.expected = _expected(layer) if cross else None
        self.costs: torch.Tensor | None = None
        if layer.outputs is not None:
            self.costs = layer.outputs.blocks.diagonal(dim1=1, dim2=2).flatten()[: len(layer.weight)][self.rows]

    def of(self, values: torch.Tensor) -> float:
        """What weights W' lose, float32 [rows, columns] of the layer's `rows`."""
        moved = values.to(self.weight) - self.weight
        change = moved @ self.hessian.to(moved)
        lost = (change if self.expected is None else change - 2 * self.expected).mul_(moved).sum(1, dtype=torch.float64)
        return float((lost if self.costs is None else lost * self.costs.to(lost)).sum())

"""AWQ (Lin et al. 2023): weights that see large inputs are scaled up before rounding, their inputs scaled down.

For a norm (or linear) and the linears that read its output:  W x = (W diag(s)) (diag(s)^-1 x), with

    s = mean|x|^alpha / sqrt(max * min)     of 20 alphas in 0..1, the one of least output error

then each group's range is clipped where that lessens the output error. Pure functions of weights and what is known
of the inputs: who folds s into the module before, and who writes the layout, is another's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]  # float [rows, columns] -> what it is rounded to

ALPHAS = 20
_LEAST = 1e-4  # of mean|x|
_CLIPS, _MOST_CLIPPED = 20, 0.5  # tries of a range: 1 - k / 20 while at least a half is left


def smoothing(
    weights: Sequence[torch.Tensor], size: torch.Tensor, hessian: torch.Tensor, rounding: Rounding
) -> tuple[torch.Tensor, float, list[float]]:
    """The scales s float32 [columns] for linears float [rows, columns] that share inputs x.

    size     float [columns], mean|x|
    hessian  [columns, columns], a multiple of sum x x^T

    Returns s, its alpha, and the output errors tr(E H E^T) of all alphas, summed over the linears. Alpha 0 is s = 1:
    plain rounding.
    """
    size = size.float().clamp(min=_LEAST)
    best, best_alpha, best_error = torch.ones_like(size), 0.0, float("inf")
    errors = []
    for step in range(ALPHAS):
        alpha = step / ALPHAS
        s = size**alpha
        s = s / (s.max() * s.min()).sqrt()
        lost = 0.0
        for weight in weights:
            difference = weight - rounding(weight * s) / s
            lost += float(((difference @ hessian).double() * difference).sum())
        errors.append(lost)
        if lost < best_error:
            best, best_alpha, best_error = s, alpha, lost
    return best, best_alpha, errors


def clipped(weight: torch.Tensor, hessian: torch.Tensor, group_size: int, rounding: Rounding) -> torch.Tensor:
    """The weights with each group's range clipped to the share of least output error of that group by itself.

    weight    float [rows, columns], already scaled by s; hessian of the inputs, already divided by it
    rounding  of one group's columns [rows, group_size]
    """
    done = weight.clone()
    for at in range(0, weight.shape[1], group_size):
        span = slice(at, at + group_size)
        group, own = weight[:, span], hessian[span, span]
        most = group.abs().amax(1, keepdim=True)
        best = torch.full((len(group),), float("inf"), device=weight.device)
        for k in range(int(_CLIPS * _MOST_CLIPPED)):
            limit = most * (1 - k / _CLIPS)
            narrow = group.clamp(-limit, limit)
            difference = group - rounding(narrow)
            lost = ((difference @ own) * difference).sum(1)
            better = lost < best
            best = torch.where(better, lost, best)
            done[:, span][better] = narrow[better]
    return done


def fold(before: torch.nn.Module, linears: Sequence[torch.nn.Module], s: torch.Tensor) -> None:
    """Scale in place: the linears' columns by s, and what feeds them (a norm, or a linear's rows) by 1 / s."""
    weight: torch.Tensor = before.weight.data  # type: ignore[assignment]
    weight.div_(s if weight.ndim == 1 else s[:, None])
    bias = getattr(before, "bias", None)
    if bias is not None:
        bias.data.div_(s)
    for linear in linears:
        columns: torch.Tensor = linear.weight.data  # type: ignore[assignment]
        columns.mul_(s)

"""AWQ (Lin et al. 2023): weights that see large inputs are scaled up before rounding, their inputs scaled down.

For a norm (or linear) and the linears that read its output:  W x = (W diag(s)) (diag(s)^-1 x), with

    s = mean|x|^alpha / sqrt(max * min)     of 20 alphas in 0..1, the one of least output error

then each group's range is clipped where that lessens the output error. Pure functions of weights and inputs: who
folds s into the module before, and who writes the layout, is another's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]  # float [rows, columns] -> what it is rounded to

ALPHAS = 20
_LEAST = 1e-4  # of mean|x|
_CLIPS, _MOST_CLIPPED = 20, 0.5  # tries of a range: 1 - k / 20 while at least a half is left
_ROWS = 64  # rows whose clips are searched at a time
_TOKENS = 512  # tokens that the clip search looks at


def smoothing(
    weights: Sequence[torch.Tensor], x: torch.Tensor, rounding: Rounding
) -> tuple[torch.Tensor, float, list[float]]:
    """The scales s float32 [columns] for linears float [rows, columns] that share inputs x [tokens, columns].

    Returns s, its alpha, and the output errors sum |W x - W' x|^2 of all alphas, summed over the linears. Alpha 0 is
    s = 1: plain rounding.
    """
    size = x.abs().mean(0).float().clamp(min=_LEAST)
    gram = x.float().T @ x.float()  # |E x|^2 summed over tokens is tr(E X^T X E^T)
    best, best_alpha, best_error = torch.ones_like(size), 0.0, float("inf")
    errors = []
    for step in range(ALPHAS):
        alpha = step / ALPHAS
        s = size**alpha
        s = s / (s.max() * s.min()).sqrt()
        lost = 0.0
        for weight in weights:
            difference = weight - rounding(weight * s) / s
            lost += float(((difference @ gram).double() * difference).sum())
        errors.append(lost)
        if lost < best_error:
            best, best_alpha, best_error = s, alpha, lost
    return best, best_alpha, errors


def clipped(weight: torch.Tensor, x: torch.Tensor, group_size: int, rounding: Rounding) -> torch.Tensor:
    """The weights with each group's range clipped to the share of least output error of that group by itself.

    weight    float [rows, columns], already scaled by s; x [tokens, columns], already divided by it
    rounding  of one group's columns [rows, group_size]
    """
    step = max(1, len(x) // _TOKENS)
    x = x[::step].float()
    done = weight.clone()
    for at in range(0, weight.shape[1], group_size):
        part = x[:, at : at + group_size]
        gram = part.T @ part
        for row in range(0, len(weight), _ROWS):
            group = weight[row : row + _ROWS, at : at + group_size]
            most = group.abs().amax(1, keepdim=True)
            best = torch.full((len(group),), float("inf"))
            for k in range(int(_CLIPS * _MOST_CLIPPED)):
                limit = most * (1 - k / _CLIPS)
                narrow = group.clamp(-limit, limit)
                difference = group - rounding(narrow)
                lost = ((difference @ gram) * difference).sum(1)
                better = lost < best
                best = torch.where(better, lost, best)
                done[row : row + _ROWS, at : at + group_size][better] = narrow[better]
    return done


def fold(before: torch.nn.Module, linears: Sequence[torch.nn.Linear], s: torch.Tensor) -> None:
    """Scale in place: the linears' columns by s, and what feeds them (a norm, or a linear's rows) by 1 / s."""
    weight: torch.Tensor = before.weight.data  # type: ignore[assignment]
    weight.div_(s if weight.ndim == 1 else s[:, None])
    bias = getattr(before, "bias", None)
    if bias is not None:
        bias.data.div_(s)
    for linear in linears:
        linear.weight.data.mul_(s)

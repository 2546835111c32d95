"""What a layer's inputs say about its weights: H = 2/n sum x x^T, and the triangular factor that GPTQ walks along.

The error of quantized weights W' on the calibration text is  tr(E H E^T) / 2  with E = W - W', per token. H is
kept as a running mean in float32: a batch of m tokens after n others moves it by m / (n + m) of the difference.

For GPTAQ (arXiv 2504.02692) there is also the cross term  C = 2/n sum (x_float - x) x^T: how the inputs that the
quantized layers before deliver differ from the float model's. How much of that is chance shows on an eighth of the
tokens, whose share of H and C is kept apart as well (`alpha_of`).
"""

from __future__ import annotations

import numpy as np
import torch

from bridge.errors import BridgeError

_HELD_BACK = 8  # one token of so many
MOST_DAMPING = 1.0  # times the mean of diag H; beyond it, the Hessian says nothing any more


class Hessian:
    """H of one layer, float32 [columns, columns], accumulated batch by batch; `cross` where float inputs are given.

    held  that of the last eighth of each batch alone, where float inputs are given
    """

    def __init__(self, name: str, columns: int, device: torch.device | str = "cpu") -> None:
        self.name = name
        self.tokens = 0
        self.lent = 0  # of these tokens, the share of fellow experts (see `mixture`)
        self.matrix = torch.zeros(columns, columns, device=device)
        self.cross: torch.Tensor | None = None
        self.held: Hessian | None = None

    def add(self, x: torch.Tensor, x_float: torch.Tensor | None = None, weight: torch.Tensor | None = None) -> None:
        """Add tokens: x [tokens, columns] as the quantized model has them, x_float the float model's.

        weight  float [tokens], how much each token counts (mean 1); None: alike

        Raises BridgeError where an activation is NaN or infinite.
        """
        x = x.reshape(-1, x.shape[-1]).to(self.matrix.device, torch.float32)
        weight = None if weight is None else weight.to(x)
        last = len(x) - len(x) // _HELD_BACK
        if x_float is None:
            self._add(x, None, weight)
            return
        mismatch = x_float.reshape(x.shape).to(x) - x
        if self.held is None:
            self.held = Hessian(self.name, x.shape[1], x.device)
        self._add(x, mismatch, weight)
        self.held._add(x[last:], mismatch[last:], None if weight is None else weight[last:])

    def _add(self, x: torch.Tensor, mismatch: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        if not len(x):
            return
        self.tokens += len(x)
        share = len(x) / self.tokens
        weighted = x if weight is None else x * weight[:, None]
        _blend(self.matrix, weighted.T @ x, share, len(x))
        if not torch.isfinite(self.matrix.diagonal()).all():
            raise BridgeError(
                f"{self.name}: its inputs hold NaN or infinity on the calibration text; "
                "the layers before it overflow, or the checkpoint is damaged"
            )
        if mismatch is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.matrix)
            _blend(self.cross, mismatch.T @ weighted, share, len(x))

    def mean_squares(self) -> np.ndarray:
        """float32 [columns]: the mean square of each input over the tokens."""
        return (self.matrix.diagonal() / 2).cpu().numpy()


def _blend(mean: torch.Tensor, total: torch.Tensor, share: float, tokens: int) -> None:
    """mean becomes the mean of itself and 2 / tokens * total, which has `share` of all tokens."""
    mean.mul_(1 - share).add_(total, alpha=2 * share / tokens)


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """H + damping * mean(diag H) * I; columns that no input ever reached get 1 on the diagonal."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    extra = damping * diagonal.mean() + dead.to(hessian.dtype)
    return hessian + torch.diag(extra)


def retarget(weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, alpha: float) -> torch.Tensor:
    """The weights that, on the inputs as they are, come closest to the float layer's outputs: W + alpha W C H^-1.

    GPTAQ's objective in closed form: for alpha 1, sum |W x_float - W' x|^2 is  tr(E H E^T) of E = W* - W' and a
    constant. All that quantizes against H can so quantize against both. Where hessian (`damped`) is not positive
    definite, or not finite, the weights stay as they are.
    """
    factor, failed = torch.linalg.cholesky_ex(hessian.double())
    if not alpha or failed or not torch.isfinite(factor.diagonal()).all():
        return weight
    moved = torch.cholesky_solve((weight @ cross.to(weight)).double().T, factor).T
    return weight + alpha * moved.to(weight)


def alpha_of(weight: torch.Tensor, hessian: Hessian, damping: float) -> float:
    """The alpha of `retarget` that serves the held-back tokens best, 0 where none does: 0..1.

    With W + alpha D from all other tokens, the error sum |W x_float - W' x|^2 of W' = W + alpha D on the held-back
    ones is  alpha^2 tr(D H D^T) - 2 alpha tr(D (W C)^T)  and a constant, H and C being theirs: a parabola.
    """
    held = hessian.held
    if held is None or held.cross is None or hessian.cross is None or not 0 < held.tokens < hessian.tokens:
        return 0.0
    share = held.tokens / hessian.tokens
    rest, cross = (
        (a - share * b) / (1 - share) for a, b in ((hessian.matrix, held.matrix), (hessian.cross, held.cross))
    )
    d = retarget(weight, damped(rest, damping), cross, 1.0) - weight
    gain = float((d * (weight @ held.cross.to(d))).sum(dtype=torch.float64))
    cost = float(((d @ held.matrix.to(d)) * d).sum(dtype=torch.float64))
    return min(max(gain / cost, 0.0), 1.0) if cost > 0 else 0.0


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor | None:
    """U, upper triangular, with H^-1 = U^T U; None where H is not positive definite. Computed in float64.

    With H = R R^T, R upper (the Cholesky factor of H read backwards), U is R^-1: one factorization and one
    triangular inverse, where inverting H and factoring again takes three times as long.
    """
    backwards, failed = torch.linalg.cholesky_ex(hessian.double().flip(0, 1))
    if failed or not torch.isfinite(backwards.diagonal()).all():
        return None
    upper = backwards.flip(0, 1)
    identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True).to(hessian.dtype)


def damped_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, float] | None:
    """(U of the damped H, the damping it took): tenfold until it is positive definite, or None past MOST_DAMPING."""
    while damping <= MOST_DAMPING:
        factor = inverse_factor(damped(hessian, damping))
        if factor is not None:
            return factor, damping
        damping = max(damping * 10, 1e-6)
    return None

"""Experts that `transformers` holds in two 3-D tensors, split into linear layers that see their own tokens.

    experts.gate_up_proj [experts, 2 inner, hidden]  ->  experts.3.gate_proj, experts.3.up_proj   [inner, hidden]
    experts.down_proj    [experts, hidden, inner]    ->  experts.3.down_proj                      [hidden, inner]

The layers' weights are views of the 3-D tensors: a change of one changes the other.

An expert that saw fewer tokens than its matrix has columns borrows the rest from the other experts: its H becomes the
mean over its own tokens and as many copies of the mean token of all experts as are missing. An expert without tokens
gets that mean alone. So a rare expert is still rounded for inputs of its kind, and one that is never chosen for the
inputs of the others. Neither can hold tokens back, so neither uses GPTAQ's term (`alpha_of`).

Where the experts' Hessians do not fit in memory together, that mean takes a pass of its own (`walk`).
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bridge.quantize.hessian import Hessian

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def expert_of(name: str) -> tuple[str, str] | None:
    """The name of an expert's layer with its number replaced by *, and the number; None for other layers."""
    found = _EXPERT.search(f".{name}")
    return (_EXPERT.sub("*", f".{name}", count=1)[1:], found[0]) if found else None


class SeparateExperts(nn.Module):
    """One module for each expert; called like the fused module, with the same results.

    routing  int [tokens, chosen]: the experts of the tokens in the last call
    imposed  experts for the tokens of the next calls, instead of those that the router chooses
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        self.routing: torch.Tensor | None = None
        self.imposed: torch.Tensor | None = None
        for number, (both, down) in enumerate(zip(fused.gate_up_proj, fused.down_proj, strict=True)):
            gate, up = both.chunk(2)
            expert = nn.Module()
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                with torch.device("meta"):
                    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
                expert.add_module(name, linear)
            self.add_module(str(number), expert)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden]; chosen int [tokens, k], the experts of each token, and their shares in its output."""
        chosen = chosen if self.imposed is None else self.imposed
        self.routing = chosen
        output = torch.zeros_like(x)
        for name, expert in self.named_children():
            if name.isdigit():
                token, place = (chosen == int(name)).nonzero(as_tuple=True)
                if len(token):
                    own: Any = expert
                    seen = x[token]
                    inner = self.act_fn(own.gate_proj(seen)) * own.up_proj(seen)
                    output.index_add_(0, token, (own.down_proj(inner) * shares[token, place, None]).to(output.dtype))
        return output


def split_experts(block: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace a block's fused experts by SeparateExperts; returns the argument of `restore_experts`.

    Experts of another kind (transposed, with biases, with another gate) stay as they are.
    """
    found = [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
        if _is_known(child)
    ]
    for parent, name, child in found:
        parent.add_module(name, SeparateExperts(child))
    return found


def restore_experts(split: Sequence[tuple[nn.Module, str, nn.Module]]) -> None:
    """Put the fused modules back; they have the weights that the layers have now."""
    for parent, name, child in split:
        parent.add_module(name, child)


def _is_known(module: Any) -> bool:
    tensors = dict(module.named_parameters(recurse=False))
    if set(tensors) != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    both, down = tensors["gate_up_proj"], tensors["down_proj"]
    gate = getattr(type(module), "_apply_gate", None)
    return (
        both.ndim == 3
        and both.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
        and (gate is None or gate.__name__ == "_default_apply_gate")
        and not getattr(module, "is_transposed", False)
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "has_post_expert_norm", False)
    )


def is_short(hessian: Hessian) -> bool:
    """Whether an expert saw fewer tokens than it has columns."""
    return hessian.tokens < len(hessian.matrix)


def merged(hessians: Sequence[Hessian]) -> Hessian:
    """H of the tokens of all these experts."""
    everyone = Hessian(hessians[0].name, len(hessians[0].matrix), hessians[0].matrix.device)
    everyone.tokens = sum(h.tokens for h in hessians)
    for h in hessians:
        everyone.matrix.add_(h.matrix, alpha=h.tokens / max(everyone.tokens, 1))
    return everyone


def lend(hessians: Sequence[Hessian], everyone: Hessian) -> None:
    """Fill up experts' Hessians to as many tokens as columns; see the module's docstring.

    everyone  H of the tokens of all experts of the mixture
    """
    for h in filter(is_short, hessians if everyone.tokens else ()):
        wanted = len(h.matrix)
        h.matrix = everyone.matrix.lerp(h.matrix, h.tokens / wanted)
        h.borrowed_tokens, h.tokens = wanted - h.tokens, wanted
        h.cross = h.held = None

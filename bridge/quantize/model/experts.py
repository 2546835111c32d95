"""Experts that `transformers` holds in two 3-D tensors, split into linear layers that see their own tokens.

    experts.gate_up_proj [experts, 2 inner, hidden]  ->  experts.3.gate_proj, experts.3.up_proj   [inner, hidden]
    experts.down_proj    [experts, hidden, inner]    ->  experts.3.down_proj                      [hidden, inner]

The layers' weights are views of the 3-D tensors: a change of one changes the other. Some models hold them transposed,
gate and up row by row in turn, or with biases (gpt-oss); Llama 4's experts are called with every token for each of
them, and with zeros for those that the router did not choose.

An expert that saw fewer tokens than its matrix has columns borrows the rest from the other experts: its H becomes the
mean over its own tokens and as many copies of the mean token of all experts as are missing. An expert without tokens
gets that mean alone. So a rare expert is still rounded for inputs of its kind, and one that is never chosen for the
inputs of the others. Neither can hold tokens back, so neither uses GPTAQ's term (`alpha_of`).

Where the experts' Hessians do not fit in memory together, that mean takes a pass of its own (`walk`).
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bridge.checkpoint import tensor_names
from bridge.quantize.solve.hessian import Hessian


def expert_of(name: str) -> tuple[str, str] | None:
    """The name of an expert's layer with its number replaced by *, and the number; None for other layers."""
    expert = tensor_names.expert_of(name)
    return (expert.pattern, str(expert.number)) if expert else None


def expert_pattern(name: str) -> str:
    """A layer's name, an expert's number replaced by *."""
    return (expert_of(name) or (name,))[0]


def halves(both: Any, interleaved: bool) -> tuple[Any, Any]:
    """Gate and up, in two halves of the rows or in turn."""
    middle = len(both) // 2
    return (both[::2], both[1::2]) if interleaved else (both[:middle], both[middle:])


class SeparateExperts(nn.Module):
    """One module for each expert; called like the fused module, with the same results.

    interleaved  the rows of gate and up are in turn in the fused tensor
    routing      the experts of the tokens in the last call, int [tokens, chosen]; of Llama 4 bool [experts, tokens]
    imposed      experts for the tokens of the next calls, instead of those that the router chooses
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.act_fn = getattr(fused, "act_fn", None)
        self.interleaved = not getattr(fused, "is_concatenated", True)
        self.own_gate = _own_gate(fused)
        self.routing: torch.Tensor | None = None
        self.imposed: torch.Tensor | None = None
        for number, (both, down) in enumerate(zip(fused.gate_up_proj, fused.down_proj, strict=True)):
            if _is_transposed(fused):
                both, down = both.T, down.T
            gate, up = halves(both, self.interleaved)
            biases = [None] * 3
            if hasattr(fused, "gate_up_proj_bias"):
                biases = [*halves(fused.gate_up_proj_bias[number], self.interleaved), fused.down_proj_bias[number]]
            expert = _Expert(self.act_fn, self.own_gate, self.interleaved)
            for name, weight, bias in zip(("gate_proj", "up_proj", "down_proj"), (gate, up, down), biases, strict=True):
                with torch.device("meta"):
                    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
                linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
                if bias is not None:
                    linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
                expert.add_module(name, linear)
            self.add_module(str(number), expert)

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor | None = None, shares: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden]; chosen int [tokens, k], the experts of each token, and their shares in its output.

        Without these (Llama 4) x is [experts * tokens, hidden].
        """
        if chosen is None or shares is None:
            return self._of_all(x)
        chosen = chosen if self.imposed is None else self.imposed
        self.routing = chosen
        output = torch.zeros_like(x)
        for number, expert in self._experts():
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                weighted = expert(x[token]) * shares[token, slot, None]
                output.index_add_(0, token, weighted.to(output.dtype))
        return output

    def _of_all(self, x: torch.Tensor) -> torch.Tensor:
        experts = list(self._experts())
        by_expert = x.view(len(experts), -1, x.shape[-1])
        self.routing = (by_expert != 0).any(-1) if self.imposed is None else self.imposed
        output = torch.zeros_like(by_expert)
        for number, expert in experts:
            token = self.routing[number].nonzero()[:, 0]
            if len(token):
                output[number, token] = expert(by_expert[number, token])
        return output.view_as(x)

    def tokens_of(self, expert: int) -> torch.Tensor:
        """The numbers of the tokens that an expert got in the last call, int64 [tokens], in its inputs' order."""
        assert self.routing is not None
        chosen = self.routing[expert] if self.routing.dtype == torch.bool else (self.routing == expert).any(-1)
        return chosen.nonzero()[:, 0]

    def _experts(self) -> Iterator[tuple[int, Any]]:
        return ((int(name), expert) for name, expert in self.named_children() if name.isdigit())


class _Expert(nn.Module):
    """One expert; returns what its down_proj does."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, act_fn: Any, own_gate: Any, interleaved: bool) -> None:
        super().__init__()
        self._gate = act_fn, own_gate, interleaved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act_fn, own_gate, interleaved = self._gate
        gate, up = self.gate_proj(x), self.up_proj(x)
        if own_gate is None:
            return self.down_proj(act_fn(gate) * up)  # type: ignore[no-any-return]
        both = torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)
        return self.down_proj(own_gate(both))  # type: ignore[no-any-return]


def _own_gate(fused: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a fused module does with gate and up, if not act_fn(gate) * up. It does not hold the weights."""
    gate = getattr(type(fused), "_apply_gate", None)
    if gate is None or gate.__name__ == "_default_apply_gate":
        return None
    shell = copy.copy(fused)
    shell._parameters = {}
    return shell._apply_gate


def _is_transposed(fused: Any) -> bool:
    """Whether the 3-D tensors are [experts, in, out]: transformers tells, except of Llama 4's, which are."""
    inputs_alone = len(inspect.signature(type(fused).forward).parameters) == 2  # as Llama 4's are called
    return getattr(fused, "is_transposed", inputs_alone)


def split_experts(block: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace a block's fused experts by SeparateExperts; returns the argument of `restore_experts`.

    Experts of another kind (without a gate, with norms of their own) stay as they are.
    """
    fused = [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
        if _is_known(child)
    ]
    for parent, name, child in fused:
        parent.add_module(name, SeparateExperts(child))
    return fused


def restore_experts(split: Sequence[tuple[nn.Module, str, nn.Module]]) -> None:
    """Put the fused modules back; they have the weights that the layers have now."""
    for parent, name, child in split:
        parent.add_module(name, child)


def _is_known(module: Any) -> bool:
    tensors = dict(module.named_parameters(recurse=False))
    matrices = {"gate_up_proj", "down_proj"}
    biases = {f"{name}_bias" for name in matrices} if getattr(module, "has_bias", False) else set()
    if set(tensors) != matrices | biases or getattr(module, "has_post_expert_norm", False):
        return False
    if not hasattr(module, "act_fn") and _own_gate(module) is None:
        return False
    both, down = tensors["gate_up_proj"], tensors["down_proj"]
    if both.ndim != 3 or down.ndim != 3:
        return False
    if _is_transposed(module):
        both, down = both.mT, down.mT
    return both.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])


def has_too_few_tokens(hessian: Hessian) -> bool:
    """Whether an expert saw fewer tokens than it has columns."""
    return hessian.tokens < hessian.columns


def merged(hessians: Sequence[Hessian]) -> Hessian:
    """H of the tokens of all these experts."""
    everyone = Hessian(hessians[0].name, len(hessians[0].matrix), hessians[0].matrix.device)
    everyone.tokens = sum(h.tokens for h in hessians)
    for h in hessians:
        everyone.matrix.add_(h.matrix, alpha=h.tokens / max(everyone.tokens, 1))
    if any(h.squares is not None for h in hessians):
        squares = (torch.from_numpy(h.mean_squares()) * (h.tokens / max(everyone.tokens, 1)) for h in hessians)
        everyone.squares = sum(squares)
    return everyone


def complete_from_all_experts(hessians: Sequence[Hessian], everyone: Hessian) -> None:
    """Fill up experts' Hessians to as many tokens as columns from that of all experts' tokens, see the module."""
    for h in filter(has_too_few_tokens, hessians if everyone.tokens else ()):
        wanted = len(h.matrix)
        squares, all_squares = (torch.from_numpy(hessian.mean_squares()) for hessian in (h, everyone))
        h.squares = all_squares.lerp(squares, h.tokens / wanted)
        h.matrix = everyone.matrix.lerp(h.matrix, h.tokens / wanted)
        h.borrowed_tokens, h.tokens = wanted - h.tokens, wanted
        h.cross = h.held = None

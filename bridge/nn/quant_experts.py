"""A layer's experts on the stacks of a GGUF: each token goes through the networks that the model's router chose.

    y = sum over the chosen of  weight * (W_down act(W_gate x, W_up x))

The tokens that chose the same expert go through it together. Routers and shared experts are the model's own modules.
"""

from collections.abc import Callable
from typing import Any, Self

import torch

from bridge.nn.quant_linear import Placed
from bridge.nn.torch_ops import experts, multiply_on
from bridge.runtime import QuantTensor

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Gated:
    """act(gate) * up."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self.function = function

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.function(gate) * up


class ClampedSwiglu:
    """gpt-oss': (up + 1) * gate * sigmoid(alpha * gate), gate up to the limit, up between minus and plus the limit."""

    def __init__(self, alpha: float, limit: float):
        self.alpha, self.limit = alpha, limit

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class ExpertStack:
    """Gate, up and down of each expert, as tensors that multiply on one device.

    networks    QuantTensors, or CudaTensors
    biases      of gate, up and down, float32 [experts, out] each, where the model has them
    """

    def __init__(
        self, networks: list[tuple[Any, Any, Any]], activation: Activation,
        biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ):  # fmt: skip
        self.networks, self.activation, self.biases = networks, activation, biases
        self.device = getattr(networks[0][0], "device", "cpu")

    @classmethod
    def of(
        cls, gate: QuantTensor, up: QuantTensor, down: QuantTensor, activation: Activation, biases: Any = None
    ) -> Self:
        """Made of three stacks [experts, out, in]."""
        networks = [(gate[e], up[e], down[e]) for e in range(gate.shape[0])]
        return cls(networks, activation, biases)

    @property
    def prepared(self) -> bool:
        return all(getattr(matrix, "prepared", False) for matrix in self.networks[0])

    @property
    def type(self) -> str:
        """Block types of gate, up and down."""
        return ", ".join(dict.fromkeys(matrix.type for matrix in self.networks[0]))

    def prepare(self, release: bool = False) -> Self:
        """Repack all matrices for this CPU, as `QuantTensor.prepare` does."""
        for network in self.networks:
            for matrix in network:
                matrix.prepare(release)
        return self

    def unprepare(self) -> None:
        for network in self.networks:
            for matrix in network:
                matrix.unprepare()

    def release_raw(self) -> None:
        for network in self.networks:
            for matrix in network:
                matrix.release_raw()

    def to(self, device: Any) -> "ExpertStack":
        """The stack on another device; on the CPU it is the one that was moved from there."""
        if str(device) == str(self.device):
            return self
        if str(device) == "cpu":
            return self.origin
        networks = [tuple(matrix.to(device) for matrix in network) for network in self.networks]
        biases = None if self.biases is None else tuple(bias.to(device) for bias in self.biases)
        moved = ExpertStack(networks, self.activation, biases)  # type: ignore[arg-type]
        moved.origin = self
        return moved

    origin: "ExpertStack"

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, precision: str) -> torch.Tensor:
        """x [n, hidden]; chosen, of integers, and weights [n, used]: float32 [n, hidden]."""
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        given = x if x.is_cuda else x.float()
        one = len(x) == 1
        for expert in chosen[0].tolist() if one else chosen.unique().tolist():
            if expert >= len(self.networks):  # of another process
                continue
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            out = self._network(expert, given if one else given[tokens], precision)
            y.index_add_(0, tokens, out * weights[tokens, places, None].float())
        return y

    def _network(self, expert: int, x: torch.Tensor, precision: str) -> torch.Tensor:
        gate, up, down = (
            lambda x, matrix=matrix, part=part: self._affine(matrix, x, part, expert, precision)
            for part, matrix in enumerate(self.networks[expert])
        )
        y: torch.Tensor = down(self.activation(gate(x), up(x)))
        return y

    def _affine(self, matrix: Any, x: torch.Tensor, part: int, expert: int, precision: str) -> torch.Tensor:
        return multiply_on(matrix, x, precision, None if self.biases is None else self.biases[part][expert])


class QuantExperts(Placed):
    """In place of a model's module of all experts of a layer; the call has transformers' arguments."""

    def __init__(self, stack: ExpertStack, precision: str = "int8"):
        super().__init__(stack)
        self.precision = precision
        self.num_experts = len(stack.networks)

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, used] -> as hidden_states."""
        y: Any = experts(hidden_states.contiguous(), top_k_index, top_k_weights, self.number, self.precision)
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, types={self.tensor.type}"

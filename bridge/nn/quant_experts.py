"""A layer's experts on the stacks of a GGUF: each token goes through the networks that the model's router chose.

    y = sum over the chosen of  weight * (W_down act(W_gate x, W_up x))

The tokens that chose the same expert go through it together. On a GPU few tokens go through all their experts at once:
see cuda/product/experts.py. Routers and shared experts are the model's own modules.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Self

import numpy as np
import torch

from bridge.errors import BridgeError
from bridge.nn.quant_linear import Placed
from bridge.nn.torch_ops import experts, few_experts, multiply_on
from bridge.runtime import QuantTensor
from bridge.runtime.cpu.ops.decoder_ops import LIMIT, SLOPE
from bridge.system.devices import cuda

Activation = Callable[..., torch.Tensor]  # of what the matrices before the last give
_KERNELS = {
    "silu": "silu", "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu", "PytorchGELUTanh": "gelu",
}  # fmt: skip


class Gated:
    """act(gate) * up; with a limit, gate is at most that, and up between minus and plus the limit."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], limit: float | None = None):
        self.function, self.limit = function, limit

    @property
    def kernel(self) -> str | None:
        """Its name where a product on a GPU can end with it, see cuda/product/gates.py."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return None if self.limit is not None else _KERNELS.get(name)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.function(gate) * up


class Fused:
    """An activation of gate and up on what one matrix gives: its halves, or columns that alternate (`in_turn`)."""

    def __init__(self, activation: Activation, in_turn: bool = False):
        self.activation, self.in_turn = activation, in_turn

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        return self.activation(*((both[:, ::2], both[:, 1::2]) if self.in_turn else both.chunk(2, -1)))


class ClampedSwiglu:
    """gpt-oss': (up + 1) * gate * sigmoid(alpha * gate), gate up to the limit, up between minus and plus the limit."""

    def __init__(self, alpha: float, limit: float):
        self.alpha, self.limit = alpha, limit

    @property
    def kernel(self) -> str | None:
        """As that of Gated."""
        return "clamped" if (np.float32(self.alpha), self.limit) == (SLOPE, LIMIT) else None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class ExpertStack:
    """The matrices of each expert, as tensors that multiply on one device.

    networks    QuantTensors, or what multiplies on a GPU: gate, up and down; both in one, and down; or up and down
    activation  of what all but the last give
    biases      of the matrices, float32 [experts, out] each, where the model has them
    """

    def __init__(
        self, networks: list[tuple[Any, ...]], activation: Activation, biases: tuple[torch.Tensor, ...] | None = None
    ):
        self.networks, self.activation, self.biases = networks, activation, biases
        self.device = getattr(networks[0][0], "device", "cpu")

    @classmethod
    def of(cls, stacks: Sequence[QuantTensor], activation: Activation, biases: Any = None) -> Self:
        """Made of stacks [experts, out, in], of the last matrix at last."""
        networks = [tuple(stack[e] for stack in stacks) for e in range(stacks[0].shape[0])]
        return cls(networks, activation, biases)

    @property
    def prepared(self) -> bool:
        return all(getattr(matrix, "prepared", False) for matrix in self.networks[0])

    @property
    def type(self) -> str:
        """Block types of the matrices."""
        return ", ".join(dict.fromkeys(matrix.type for matrix in self.networks[0]))

    def prepare(self, release: bool = False) -> Self:
        """Repack all matrices for this CPU, as `QuantTensor.prepare` does."""
        for matrix in chain.from_iterable(self.networks):
            matrix.prepare(release)
        return self

    def unprepare(self) -> None:
        for matrix in chain.from_iterable(self.networks):
            matrix.unprepare()

    def release_raw(self) -> None:
        for matrix in chain.from_iterable(self.networks):
            matrix.release_raw()

    def to(self, device: Any) -> "ExpertStack":
        """The stack on another device; on the CPU it is the one that was moved from there."""
        if str(device) == str(self.device):
            return self
        if str(device) == "cpu":
            return self.origin
        return _moved().get(self, device)

    origin: "ExpertStack"

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing changes the weights, so copies share them

    def takes(self, pairs: int) -> bool:
        """Whether so many pairs of a token and an expert go through all experts at once, and the host reads nothing."""
        return False

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, precision: str) -> torch.Tensor:
        """x [n, hidden]; chosen, of integers, and weights [n, used]: float32 [n, hidden]."""
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        values = x if x.is_cuda else x.float()
        one = len(x) == 1
        for expert in dict.fromkeys((chosen[0] if one else chosen.unique()).cpu().tolist()):
            if expert >= len(self.networks):  # of another process
                continue
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            out = self.network(expert, values if one else values[tokens], precision)
            y.index_add_(0, tokens, out * weights[tokens, places, None].float())
        return y

    def network(self, expert: int, x: torch.Tensor, precision: str) -> torch.Tensor:
        """What one expert makes of x [n, hidden]: float32 [n, hidden]."""
        *inner, down = (
            lambda x, matrix=matrix, part=part: self._affine(matrix, x, part, expert, precision)
            for part, matrix in enumerate(self.networks[expert])
        )
        return down(self.activation(*(matrix(x) for matrix in inner)))

    def _affine(self, matrix: Any, x: torch.Tensor, part: int, expert: int, precision: str) -> torch.Tensor:
        return multiply_on(matrix, x, precision, None if self.biases is None else self.biases[part][expert])


class StackOnDevice(ExpertStack):
    """The stack on a GPU; one that is there already is shared, see `devices.Moved`.

    stacks  ExpertMatrices: gate and up with their rows in turn, and down; or each matrix's, where there is no gate or
            its type is another; None where a kernel cannot find the experts by number, and each is by itself
    """

    def __init__(self, origin: ExpertStack, device: Any):
        self.origin, name = origin, str(device)
        networks, activation = origin.networks, origin.activation
        biases = None if origin.biases is None else tuple(bias.to(name) for bias in origin.biases)
        if isinstance(activation, Fused) and biases is None:
            networks, activation = [_halved(*network) for network in networks], activation.activation
        parts = list(zip(*networks, strict=True))
        self.stacks: list[Any] | None = None
        self.kernel: str | None = None  # the activation that a product ends with
        if all(map(cuda("product.experts").alike, parts)):
            groups = [[part] for part in parts]
            if len(parts) == 3 and parts[0][0].type == parts[1][0].type:
                groups = [parts[:2], parts[2:]]
                self.kernel = getattr(activation, "kernel", None)
                activation = Fused(activation, in_turn=True)
                if biases is not None:
                    biases = torch.stack(biases[:2], -1).flatten(1), biases[2]
            self.stacks = [
                cuda("product.experts").ExpertMatrices(list(zip(*group, strict=True)), device) for group in groups
            ]
            networks = [tuple(stack[e] for stack in self.stacks) for e in range(len(networks))]
        else:
            activation = origin.activation
            networks = [tuple(m.to(name) for m in network) for network in origin.networks]
        super().__init__(networks, activation, biases)
        self.device, self._place = name, device.place
        self._biases = cuda("toolchain.device").Memory(device, *(biases or ()))

    def takes(self, pairs: int) -> bool:
        return self.stacks is not None and bool(self.stacks[-1].takes(pairs))

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, precision: str) -> torch.Tensor:
        """As on the CPU. Raises BridgeError where x is elsewhere."""
        if str(x.device) != self._place:
            raise BridgeError(f"{self.networks[0][0].name}: x is on {x.device}, the experts on {self._place}")
        self._biases.stream()
        if self.stacks is None or not self.takes(chosen.numel()):
            return self._by_expert(x, chosen, weights, precision)
        *inner, down = self.stacks
        *inner_biases, down_bias = [None] * len(self.stacks) if self.biases is None else self.biases
        numbers, records = chosen.to(torch.int64).reshape(-1), inner[0].records(x, precision)
        if self.kernel is not None:
            y = inner[0].multiply(records, numbers, inner_biases[0], self.kernel)
        else:
            pairs = zip(inner, inner_biases, strict=True)
            y = self.activation(*(m.multiply(records, numbers, bias) for m, bias in pairs))
        y = down.multiply(down.records(y, precision), numbers, down_bias)
        return (y.view(*chosen.shape, -1) * weights.float()[..., None]).sum(1)

    def _by_expert(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, precision: str) -> torch.Tensor:
        """`mix` of any number of tokens, for which the host waits once."""
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order, parts = cuda("product.experts").grouped(chosen.to(torch.int64).reshape(-1), len(self.networks))
        shares = weights.float().reshape(-1)[order]
        for expert, first, stop in parts:
            tokens = order[first:stop] // chosen.shape[1]
            y.index_add_(0, tokens, self.network(expert, x[tokens], precision) * shares[first:stop, None])
        return y


def _halved(both: QuantTensor, down: QuantTensor) -> tuple[QuantTensor, ...]:
    """Gate, up and down of an expert whose gate and up are the halves of one matrix."""
    rows = both.shape[0]
    return both.slice_rows(0, rows // 2), both.slice_rows(rows // 2, rows), down


@cache
def _moved() -> Any:
    """Stacks on GPUs, by those that they came from."""
    return cuda("toolchain.device").Moved(StackOnDevice)


class QuantExperts(Placed):
    """In place of a model's module of all experts of a layer; the call has transformers' arguments."""

    def __init__(self, stack: ExpertStack, precision: str = "int8"):
        super().__init__(stack)
        self.precision = precision
        self.num_experts = len(stack.networks)

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, used] -> as hidden_states."""
        operator = few_experts if self.tensor.takes(top_k_index.numel()) else experts
        y: Any = operator(hidden_states.contiguous(), top_k_index, top_k_weights, self.number, self.precision)
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, types={self.tensor.type}"


class WeightedExperts(QuantExperts):
    """Llama 4's: each expert is given every token, times the router's weight, which is 0 where it was not chosen."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None) -> torch.Tensor:
        """hidden_states [experts * tokens, hidden], expert after expert -> as hidden_states."""
        count = len(hidden_states) // self.num_experts
        numbers = torch.arange(self.num_experts, device=hidden_states.device).repeat_interleave(count)
        chosen = torch.where(hidden_states.any(-1), numbers, self.num_experts)  # zeros give zeros: no product is needed
        return super().forward(hidden_states, chosen[:, None], hidden_states.new_ones(len(chosen), 1))

"""The verbs of a decoder on a GPU: what a step of one token (step.py) and a prompt (prompt.py) have in common.

Values are tensors of torch, f32 [n, width], or one of

    Vector      values with the records that a kernel made of them (products.py)
    Sum         a product that is still to be launched: it may end with the norm that follows
    Normalized, Activation    still to be computed too: in the form that the product wants which reads it

One launch waits at most, so launches come in the order of the walk. What no kernel of ours does, torch does, which a
CUDA graph captures as well. Memory has names, as values have: it is the same for all layers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from bridge.cuda.context_memory import ContextMemory
from bridge.cuda.norm import rms
from bridge.cuda.product.gates import by_torch, limited
from bridge.cuda.product.products import Gated, Stack, Vector
from bridge.cuda.recurrent.layer import DeviceRecurrent
from bridge.cuda.routed_experts import DeviceExperts
from bridge.cuda.weights import DeviceWeights

from bridge.runtime.decoder.machine import Linear, Value
from bridge.runtime.decoder.walk import Embedded
from bridge.runtime.layers.layers import Experts, Layer, LayerStreams, Recurrent

_LEAST = 1e-5  # of the mean square that lengths are divided by


class Later:
    """A value that is computed once somebody reads it."""

    values: Any = None


class Sum(Later):
    """A product of one matrix with an operand; `post` f32 [rows]: its result is normalized by that, with `post_eps`."""

    def __init__(self, stack: Stack, x: Any, name: str):
        self.stack, self.x, self.name = stack, x, name
        self.post: Any = None
        self.post_eps = 0.0


class Activation(Later):
    """What the first matrices of a network make of an operand."""

    def __init__(self, gated: Gated, x: Any):
        self.gated, self.x = gated, x


class Normalized(Later):
    """x normalized, after `added` (a value or None) was added to it."""

    def __init__(self, x: Any, weight: Any, bias: Any, added: Value | None):
        self.x, self.weight, self.bias, self.added = x, weight, bias, added


class CudaMachine:
    """`n` tokens pass at once."""

    _waiting: Later | None = None

    def __init__(self, weights: DeviceWeights, memory: ContextMemory, n: int):
        self.weights, self.memory, self.config, self.n = weights, memory, weights.config, n
        self.device = weights.device
        self.exact = weights.precision == "f32"
        self.dependent = False
        graph = self.config.graph
        # a norm's result, by several products
        self._read_twice = graph.parallel or graph.gate_matrix or self.config.streams > 0

    # what the two do in ways of their own

    def _multiply(self, stack: Stack, x: Any, name: str, onto: Any = None) -> Any:
        """W x + bias of an operand, as a value f32 [n, rows] of that name, or added to `onto`."""
        raise NotImplementedError

    def _operand(self, x: Value, then: Stack | Gated) -> Any:
        """x in the form that `then` multiplies."""
        raise NotImplementedError

    def _normalize(self, x: Normalized) -> Any:
        """The values of x, computed now."""
        raise NotImplementedError

    def _activate(self, x: Activation) -> Any:
        """The values of x, computed now."""
        raise NotImplementedError

    def joined(self, embedded: Embedded, given: Any) -> Embedded:
        """What the first layer reads; `given` f32 [n, hidden]: states, where tokens come with some (Weights.pairs)."""
        (x, inputs), pairs, eps = embedded, self.weights.model.pairs, self.config.norm_eps
        if pairs is None:
            return embedded
        parts = (self.rows(x), pairs.embedding_norm), (given, pairs.state_norm)
        both = _cat([rms(part, self.weights.vector(weight), eps) for part, weight in parts])
        (x,) = self.products(both, joined=(pairs.joined, None))
        return self.rows(x), inputs

    # values

    def values(self, x: Value) -> Any:
        """A value as it is in memory: a Vector or f32 [n, width]."""
        self._take(x)
        if not isinstance(x, Later):
            return x
        if x.values is None and isinstance(x, Normalized):
            x.values = self._normalize(x)
        elif x.values is None and isinstance(x, Activation):
            x.values = self._activate(x)
        elif x.values is None and isinstance(x, Sum):
            x.values = self._multiply(x.stack, x.x, x.name)
            if x.post is not None:
                x.values.copy_(self._each(lambda rows: rms(rows, x.post, x.post_eps), x.values))
        return x.values

    def rows(self, x: Value) -> Any:
        """A value as f32 [n, width]."""
        values = self.values(x)
        return values.floats if isinstance(values, Vector) else values

    def _changing(self, x: Value) -> Any:
        """A value's rows, which are going to be changed."""
        values = self.values(x)
        if isinstance(values, Vector):
            values.recorded = False
        return self.rows(x)

    def _take(self, x: Value) -> None:
        """Let x be computed now: what else waits is launched before."""
        if self._waiting is not x and self._waiting is not None:
            self.values(self._waiting)
        self._waiting = None

    def _each(self, made: Callable[[Any], Any], x: Any) -> Any:
        """made(x [n, ...]), whose sums may depend on how many rows there are."""
        return made(x)

    def _only_adds(self, x: Any) -> bool:
        """Whether x is a product that can be added to the state as it is computed."""
        return isinstance(x, Sum) and x.values is None and x.post is None and self.config.residual_scale == 1

    def _normalized_by_torch(self, x: Any, weight: Any, bias: Any) -> Any:
        if weight is None:
            return x.clone()
        if self.config.graph.layer_norm:
            x = x - x.mean(1, keepdim=True)
        y = rms(x, weight, self.config.norm_eps)
        return y if bias is None else y.add_(bias)

    # verbs

    def products(self, x: Value, **linears: Linear) -> list[Any]:
        present = {name: (matrix, bias) for name, (matrix, bias) in linears.items() if matrix is not None}
        stack = self.weights.stack(list(present.values()))
        operand = self._operand(x, stack)
        if len(linears) == 1:
            self._waiting = product = Sum(stack, operand, *linears)
            return [product]
        rows = self._multiply(stack, operand, " ".join(present))
        parts = iter(rows.split([matrix.shape[0] for matrix, _ in present.values()], dim=1))
        return [next(parts) if name in present else None for name in linears]

    def gated(self, x: Value, gate: Linear, up: Linear, index: int) -> Any:
        c = self.config
        cut = c.sparsity[index] if c.sparsity else -math.inf
        if not c.xielu and not math.isfinite(cut):
            gated = self.weights.gated(gate, up, limited(c.activation, c.limits_of(index)[1]))
            self._waiting = activation = Activation(gated, self._operand(x, gated))
            return activation
        first, second = self.products(x, gate=gate, up=up)
        gates = self.rows(first)
        if c.xielu:
            below, above, share, most = c.xielu[index]
            bent = below * (gates.clamp_max(most).expm1() - gates)
            return (above * gates * gates).where(gates > 0, bent) + share * gates

        def least(rows: Any) -> Any:
            return rows.mean(1, keepdim=True) + cut * rows.std(1, correction=0, keepdim=True)

        return by_torch("gelu", (gates - self._each(least, gates)).clamp_min(0), self.rows(second))

    def gelu_times(self, gate: Value, up: Value) -> Any:
        return by_torch("gelu", self.rows(gate), up)

    def norm(
        self, x: Value, weight: np.ndarray | None, bias: np.ndarray | None = None, added: Value | None = None
    ) -> Any:
        self._take(added)
        self._waiting = normalized = Normalized(x, self.weights.vector(weight), self.weights.vector(bias), added)
        if self._read_twice:
            self.values(normalized)
        return normalized

    def normalize(self, x: Value, weight: np.ndarray | None, name: str = "", eps: float = 0.0) -> Any:
        if weight is None:
            return x
        eps = eps or self.config.norm_eps
        if isinstance(x, Sum) and x is self._waiting:
            x.post, x.post_eps = self.weights.vector(weight), eps
            return x
        rows = self.rows(x) if name else self._changing(x)
        parts = rows.reshape(self.n, -1, weight.size)
        parts = self._each(lambda part: rms(part, self.weights.vector(weight), eps), parts)
        return parts.reshape(rows.shape) if name else rows.copy_(parts.reshape(rows.shape))

    def add(self, x: Value, y: Value) -> None:
        if self._only_adds(y):
            self._take(y)
            self._multiply(y.stack, y.x, y.name, onto=self._changing(x))
        else:
            added = self.rows(y)
            self._changing(x).add_(added)

    def scale(self, x: Value, factor: float) -> None:
        if factor != 1:
            self._changing(x).mul_(factor)

    def copy(self, x: Value, name: str) -> Any:
        return self.rows(x).clone()

    def _together(self, *values: Value | None) -> Any:
        """Values side by side, f32 [n, ...]: as they are in memory, if they lie so."""
        parts = [self.rows(value) for value in values if value is not None]
        first, width = parts[0], sum(part.shape[1] for part in parts)
        ends = [part.data_ptr() + 4 * part.shape[1] for part in parts]
        one = len({part.untyped_storage().data_ptr() for part in parts}) == 1  # others may lie next to it by chance
        if one and all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False)):
            return first.as_strided((self.n, width), first.stride()) if len(parts) > 1 else first
        return _cat(parts)

    def _head_norms(self, layer: Layer) -> tuple[Any, Any]:
        """Weights of q and k, by which each head is normalized."""
        if self.config.graph.normed_together or layer.q_norm is None:
            return None, None
        return self.weights.vector(layer.q_norm), self.weights.vector(layer.k_norm)

    def recur(self, layer: Recurrent, index: int, x: Value) -> Any:
        inputs = self.products(x, **{f"input{i}": (matrix, None) for i, matrix in enumerate(layer.inputs)})
        return self._advance(self.weights.recurrent(layer), index, [self.rows(part) for part in inputs])

    def _advance(self, layer: DeviceRecurrent, index: int, inputs: list[Any]) -> Any:
        return layer.advance(inputs, *self.memory.recurrent(index), self.dependent)

    def blend(self, states: list[Value], weight: np.ndarray) -> Any:
        import torch

        def mixed(rows: Any) -> Any:  # [n, states, hidden]
            scores = rms(rows, self.weights.vector(weight), self.config.norm_eps).sum(2, keepdim=True)
            return (scores.softmax(1) * rows).sum(1)

        return self._each(mixed, torch.stack([self.rows(state) for state in states], 1))

    def split_gate(self, q: Value) -> tuple[Any, Any]:
        both = self.rows(q).reshape(self.n, self.config.heads, 2, -1)
        return both[:, :, 0].reshape(self.n, -1), both[:, :, 1].reshape(self.n, -1)

    def gate_heads(self, x: Value, gate: Value, heads: int) -> None:
        import torch

        gates = self.rows(gate).unflatten(1, (heads, -1))
        factors = torch.nn.functional.softplus(gates) if self.config.graph.softplus else gates.sigmoid()
        self._changing(x).unflatten(1, (heads, -1)).mul_(factors)

    def fit_heads(self, x: Value, heads: int, size: int, name: str) -> Any:
        import torch

        each = self.rows(x).reshape(self.n, heads, -1)
        return torch.nn.functional.pad(each, (0, size - each.shape[2])).reshape(self.n, -1)

    def experts(self, experts: Experts, x: Value, name: str, routed: Value | None = None) -> Any:
        values, read = None if routed is None else self.rows(routed), self.values(x)
        records = read.records if isinstance(read, Vector) and read.recorded else None
        return self._experts(self.weights.experts(experts), self.rows(x), values, records)

    def _experts(self, experts: DeviceExperts, x: Any, routed: Any, records: Any) -> Any:
        return experts.mix(x, routed, self.dependent, records)

    def as_long(self, y: Value, x: Value) -> None:
        def squares(rows: Any) -> Any:
            return rows.square().mean(1, keepdim=True)

        rows = self._changing(y)
        rows.mul_((self._each(squares, self.rows(x)) / self._each(squares, rows).clamp_min(_LEAST)).sqrt())

    def predict(self, streams: list[Value], x: Value, layer: LayerStreams) -> None:
        import torch

        all_streams = torch.stack([self.rows(stream) for stream in streams], 1)

        def predicted(rows: Any) -> Any:  # [n, streams, hidden]
            factors = self._modality(rows[:, 0], layer) @ self.weights.vector(layer.predict).T
            return rows + factors.reshape(len(rows), len(streams), len(streams)) @ rows

        new = self._each(predicted, all_streams)
        for i, stream in enumerate(streams):
            self._changing(stream).copy_(new[:, i])
        self._changing(x).copy_(new[:, 0])

    def correct(self, streams: list[Value], x: Value, layer: LayerStreams) -> Any:
        state = self.rows(x)
        correct = self.weights.vector(layer.correct).T
        factors = 1 + self._each(lambda rows: self._modality(rows, layer) @ correct, state)
        new = state - self.rows(streams[0])
        for i, stream in enumerate(streams):
            self._changing(stream).add_(factors[:, i : i + 1] * new)
        return self.weights.vector(layer.scale) * self.rows(streams[0])

    def _modality(self, x: Any, layer: LayerStreams) -> Any:
        """What the router says of the first stream, f32 [n, streams]."""
        normalized = rms(x, self.weights.vector(layer.router_norm), self.config.norm_eps) / x.shape[1]
        return (normalized @ self.weights.vector(layer.router).T).tanh()


def _cat(parts: list[Any]) -> Any:
    import torch

    return torch.cat(parts, 1)

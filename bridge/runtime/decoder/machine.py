"""What a machine does for `walk`: the verbs of a decoder.

A value is float32 [n, width], a row for each of n tokens: an array, a tensor, or something that a machine computes
later. It is sliced by columns as an array is. A value with a name takes the place of the last one of that name and
width, so that a machine may keep memory for each name; `x` alone stays through all layers, and changes in place.
"""

from typing import Any, Protocol

import numpy as np

from bridge.runtime.layers.layers import Experts, Layer, LayerStreams, Recurrent
from bridge.runtime.quant_tensor import QuantTensor

Value = Any
Linear = tuple[QuantTensor | None, np.ndarray | None]  # a matrix [out, in] and its bias, either of which may be missing


class Machine(Protocol):
    """It is implemented by tables of calls on the CPU (cpu_machine.py), by NumPy, and by CUDA."""

    def look_up(self, table: QuantTensor, name: str) -> Value:
        """The tokens' rows of a table."""

    def add_positions(self, x: Value, table: np.ndarray) -> None:
        """x += the rows of the tokens' positions of float32 [context, width]."""

    def products(self, x: Value, **linears: Linear) -> list[Value | None]:
        """W x + bias for each; None where there is no matrix. Those of q, k and v may get their biases in `attend`."""

    def gated(self, x: Value, gate: Linear, up: Linear, index: int) -> Value:
        """What a network's first matrices make of x: activation(gate), times up where there is one, of layer `index`.

        The gate's values are cut off first where `DecoderConfig.sparsity` says so, and both factors where `limits` do.
        """

    def gelu_times(self, gate: Value, up: Value) -> Value:
        """gelu(gate) * up; gate changes."""

    def norm(
        self, x: Value, weight: np.ndarray | None, bias: np.ndarray | None = None, added: Value | None = None
    ) -> Value:
        """x += residual scale * added; then x normalized, as the model's norms are; as it is without a weight."""

    def normalize(self, x: Value, weight: np.ndarray | None, name: str = "", eps: float = 0.0) -> Value:
        """x / rms(x) * weight of each part of x that is as wide as the weight, in place or as another value.

        x itself without a weight. `eps`: 0 for the model's.
        """

    def add(self, x: Value, y: Value) -> None:
        """x += y, of each token, or [width] for all of them."""

    def scale(self, x: Value, factor: float) -> None:
        """x *= factor."""

    def blend(self, states: list[Value], weight: np.ndarray) -> Value:
        """The sum of the states, each times its share of softmax over their scores: sums of state / rms * weight."""

    def split_gate(self, q: Value) -> tuple[Value, Value]:
        """Queries, and what `gate_heads` takes, of q [n, heads, 2, head_dim]."""

    def fit_heads(self, x: Value, heads: int, size: int, name: str) -> Value:
        """x [n, heads, any] with each head cut off, or filled with zeros, to `size` elements."""

    def attend(self, layer: Layer, index: int, q: Value, k: Value | None, v: Value | None) -> Value:
        """Rotates q and k, stores k and v, and attends: the heads' results.

        Heads are normalized where the layer's norm is as wide as one. Without k the keys of another layer are read.
        """

    def gate_heads(self, x: Value, gate: Value, heads: int) -> None:
        """x *= sigmoid or softplus of gates: those of `split_gate`, as many values as x has, or one for each head."""

    def recur(self, layer: Recurrent, index: int, x: Value) -> Value:
        """What a layer with a state makes of x before its output matrix; the state changes."""

    def experts(self, experts: Experts, x: Value, name: str, routed: Value | None = None) -> Value:
        """What the experts make of x; `routed`: what the router reads, if that is not x."""

    def copy(self, x: Value, name: str) -> Value:
        """Another value, equal to x."""

    def as_long(self, y: Value, x: Value) -> None:
        """y brought to the length of x, token by token."""

    def predict(self, streams: list[Value], x: Value, layer: LayerStreams) -> None:
        """The streams before a layer, and x, the first of them: cpu/ops/stream_ops.py."""

    def correct(self, streams: list[Value], x: Value, layer: LayerStreams) -> Value:
        """The streams after a layer, of x; what the layer's input goes on with."""

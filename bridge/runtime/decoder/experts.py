"""Mixtures of experts: each token through the networks that a router chooses for it.

    p = softmax(W_router x), or sigmoid of each
    y = sum over the k largest of p + bias of  w_e * W_down,e (silu(W_gate,e x) * W_up,e x)
    w = p, or p over the sum of the chosen, times a factor
    y = y + the shared expert's network, times sigmoid(g x) in Qwen2

`Routing` says which. Llama 4 multiplies what an expert reads by w_e, not what it makes; Nemotron-H's have no gate, but
relu(W_up,e x)^2, and in Nemotron 3 Super they read W_shorten x, and y is W_lengthen times their sum. Where experts are
in groups, the k largest are those of the best groups: by their largest expert, or of sigmoids by the sum of their two
largest. gpt-oss has biases everywhere, and clamps what it multiplies. Phi-MoE (SparseMixer, Liu et al. 2023,
arXiv:2310.00811) chooses one after another: w is softmax over those logits l of the experts left for which
l_max - l <= m max(|l|, l_max).

The tokens of a batch that chose the same expert go through it together.

`ExpertTables` writes this as rows of a table of calls, whose `choose` picks the matrices to multiply:

    logits = W_router x                  float32
    choose                               the largest of softmax(logits): their matrices' addresses go into the products
    gate, up of the chosen               one row of the table for all
    silu(gate) * up
    down of the chosen                   one row
    y = sum of weight * down, and the shared expert

From Python a token of Qwen3-30B-A3B would make 1,150 calls, one for each matrix of each expert used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig, Routing
from bridge.runtime.cpu.engines.floats import rows_function
from bridge.runtime.cpu.forms.activations import PLAIN
from bridge.runtime.cpu.ops import decoder_ops, expert_ops
from bridge.runtime.cpu.ops.program import KernelSlots, Program, add_products, address, bits, buffer, product
from bridge.runtime.layers.layers import Experts, Network
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, MIN_VALUES_TO_SHARE

_MIN_GATED_TO_SHARE = MIN_VALUES_TO_SHARE // 2  # a gate's exponential takes longer than rounding a value
Product = Callable[[QuantTensor, np.ndarray], np.ndarray]
Products = Callable[[Program, np.ndarray, Sequence[tuple[QuantTensor | None, np.ndarray]]], None]


def mix(
    experts: Experts, x: np.ndarray, config: DecoderConfig, product: Product, routed: np.ndarray | None = None
) -> np.ndarray:
    """float32 [tokens, hidden] -> the same: what the experts add.

    product  W x of a matrix and [n, in]: [n, out]
    routed   what the router reads, if that is not x
    """
    logits = (x if routed is None else routed) @ experts.router.T
    if experts.router_bias is not None:
        logits += experts.router_bias
    chosen, weights = route(logits, config.routing, experts.choice_bias)
    act = ACTIVATIONS[config.activation]
    hidden, x = x, x if experts.shorten is None else product(experts.shorten, x)
    y = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, rank = np.nonzero(chosen == expert)
        biases = [bias[expert] for bias in experts.biases] if experts.biases else None
        share = weights[tokens, rank, None]
        if config.routing.before:
            y[tokens] += _network(experts.networks[expert], share * x[tokens], product, act, biases)
        else:
            y[tokens] += share * _network(experts.networks[expert], x[tokens], product, act, biases)
    if experts.lengthen is not None:
        y = product(experts.lengthen, y)
    if experts.shared is not None:
        added = _network(experts.shared, hidden, product, act)
        y += added if experts.shared_gate is None else _sigmoid(hidden @ experts.shared_gate)[:, None] * added
    return y


def route(logits: np.ndarray, how: Routing, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, experts] -> the experts of each token, int [tokens, used], and float32 weights of that shape."""
    if how.mixer:
        return _mixed(logits, how.used, how.mixer)
    if how.sigmoid:
        p = _sigmoid(logits)
    else:
        p = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float32)
        p /= p.sum(1, keepdims=True)
    choice = p if bias is None else p + bias
    if how.groups > 1:
        parts = choice.reshape(len(p), how.groups, -1)
        best = np.sort(parts, axis=2)[:, :, -2 if how.sigmoid else -1 :].sum(2)
        left = np.argsort(-best, axis=1, kind="stable")[:, how.groups_used :]
        masked = parts.copy()
        np.put_along_axis(masked, left[:, :, None], -np.inf, 1)
        choice = masked.reshape(p.shape)
    chosen = np.argsort(-choice, axis=1, kind="stable")[:, : how.used]
    weights = np.take_along_axis(p, chosen, 1)
    if how.normalized:
        weights = weights / weights.sum(1, keepdims=True)
    return chosen, weights * np.float32(how.scale)


def _mixed(logits: np.ndarray, used: int, mixer: float) -> tuple[np.ndarray, np.ndarray]:
    """`route` of Phi-MoE: each expert's weight is its softmax among those near it that are left."""
    left = logits.copy()
    chosen = np.empty((len(left), used), np.int64)
    weights = np.empty(chosen.shape, np.float32)
    for j in range(used):
        best = left.argmax(1)[:, None]
        top = np.take_along_axis(left, best, 1)
        near = (top - logits) <= mixer * np.maximum(np.abs(logits), top)
        weights[:, j] = 1 / np.where(near, np.exp(left - top), 0).sum(1)
        chosen[:, j] = best[:, 0]
        np.put_along_axis(left, best, -np.inf, 1)
    return chosen, weights


def _network(
    matrices: Network, x: np.ndarray, product: Product, act: Callable[[np.ndarray, Any], np.ndarray],
    biases: Sequence[np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    gate, up, down = matrices
    g, u = product(gate, x), up and product(up, x)
    if biases is not None:
        g, u = g + biases[0], u + biases[1]
    y = product(down, act(g, u))
    return y if biases is None else y + biases[2]


def _gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    bent = gate * (1 + np.float32(0.044715) * gate * gate)
    return gate * _sigmoid(np.float32(1.5957691216) * bent) * up


def _clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The twin of decoder_ops.py's `clamp`."""
    limit, slope = decoder_ops.LIMIT, decoder_ops.SLOPE
    x = np.minimum(gate, limit)
    return x * _sigmoid(slope * x) * (np.clip(up, -limit, limit) + np.float32(1))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


ACTIVATIONS: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "silu": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu": _gelu,
    "relu2": lambda gate, _: np.square(np.maximum(gate, 0)),
    "clamped": _clamped,
}


class ExpertTables:
    """The buffers that all layers share for n tokens, with `routing.used` rows a token."""

    def __init__(self, config: DecoderConfig, n: int, slots: KernelSlots, products: Products):
        self.config, self.n, self.integer = config, n, slots.integer
        self._slots, self._products = slots, products
        chosen = n * config.routing.used
        self.logits = np.zeros((n, config.experts), np.float32)
        self.chosen = np.zeros(chosen, np.int64)
        self.weights = np.zeros(chosen, np.float32)
        self.gate, self.up = (buffer(chosen, config.expert_inner) for _ in range(2))
        self.down = buffer(chosen, config.expert_outer)
        self.short = [buffer(n, config.expert_latent) for _ in range(2)]  # what experts read, and their sum
        self.shared = [buffer(n, width) for width in (config.shared_inner, config.shared_inner, config.hidden)]

    def add(
        self, program: Program, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None
    ) -> None:
        """y = the experts' result for x, both buffers [n, hidden]; `routed` as in `mix`."""
        c, n = self.config, self.n
        router, read = experts.router, x if routed is None else routed
        program.add(
            rows_function("F32"), address(router), address(read), address(self.logits), c.hidden, 4 * c.hidden, n,
            4 * c.experts, items=c.experts, shared=router.nbytes >= MIN_BYTES_TO_SHARE,
        )  # fmt: skip
        hidden, summed = x, y
        if experts.shorten is not None:
            x, summed = self.short
            self._products(program, hidden, [(experts.shorten, x)])
        gate, up, down = (matrix and matrix._get_engine() for matrix in experts.networks[0])  # all are alike
        table = np.zeros((c.experts, 3, 2), np.int64)
        for network, row in zip(experts.networks, table, strict=True):
            for matrix, words in zip(network, row, strict=True):
                if matrix is not None:
                    self._slots.register(matrix, words, 1)
                    self._slots.refresh(matrix)
        factors = np.array([[m.factor if m else 1 for m in network] for network in experts.networks], np.float32)
        how = c.routing
        block = np.zeros(expert_ops.WORDS, np.int64)
        numbers = {
            expert_ops.EXPERTS: c.experts, expert_ops.USED: how.used, expert_ops.SIGMOID: int(how.sigmoid),
            expert_ops.NORMALIZED: int(how.normalized), expert_ops.GROUPS: how.groups,
            expert_ops.GROUPS_USED: how.groups_used, expert_ops.SCALE: bits(how.scale),
            expert_ops.MIXER: bits(how.mixer), expert_ops.PRODUCTS: 2 if up else 1,
            expert_ops.BEFORE: int(how.before),
        }  # fmt: skip
        for word, number in numbers.items():
            block[word] = number
        program.add(expert_ops.function("choose"), address(block), items=n)
        engines, results = ([gate, up], [self.gate, self.up]) if up else ([gate], [self.gate])
        first = self._several(program, x, engines, results, how.used)
        gated = address(block), address(self.gate), address(self.up if up else None), c.expert_inner
        shared = self.gate.size > _MIN_GATED_TO_SHARE
        program.add(expert_ops.function(c.activation), *gated, items=len(self.chosen), shared=shared)
        second = self._several(program, self.gate, [down], [self.down], 1)
        gate_bias, up_bias, down_bias = experts.biases or (None, None, None)
        arrays: dict[int, np.ndarray | None] = {
            expert_ops.LOGITS: self.logits, expert_ops.CHOSEN: self.chosen, expert_ops.WEIGHTS: self.weights,
            expert_ops.FIRST: first, expert_ops.SECOND: second, expert_ops.TABLE: table, expert_ops.FACTORS: factors,
            expert_ops.ROUTER_BIAS: experts.router_bias, expert_ops.CHOICE_BIAS: experts.choice_bias,
            expert_ops.GATE_BIAS: gate_bias, expert_ops.UP_BIAS: up_bias, expert_ops.DOWN_BIAS: down_bias,
        }  # fmt: skip
        for word, array in arrays.items():
            block[word] = address(array)
        mixed = address(block), address(self.down), how.used, c.expert_outer, address(summed)
        program.add(expert_ops.function("mixed"), *mixed, items=n, shared=n > 1)
        program.keep(experts, table, factors, block, gate, up, down)
        if experts.lengthen is not None:
            self._products(program, summed, [(experts.lengthen, y)])
        if experts.shared is not None:
            self._add_shared(program, experts, hidden, y)

    def _several(
        self, program: Program, x: np.ndarray, engines: list[Any], ys: list[np.ndarray], used: int
    ) -> np.ndarray:
        """Products of the chosen experts, whose fields `choose` fills in: `used` rows of each y read one row of x."""
        known: dict[Any, np.ndarray] = {}
        records = [program.records(known, engine.block.name, x, 1, self.integer, PLAIN) for engine in engines]
        products = [
            product(engine, made[j // used], y[j : j + 1], 1, 1, self.integer)
            for j in range(len(x) * used)
            for engine, made, y in zip(engines, records, ys, strict=True)
        ]
        return add_products(program, products)

    def _add_shared(self, program: Program, experts: Experts, x: np.ndarray, y: np.ndarray) -> None:
        """y += the shared expert's result for x."""
        assert experts.shared is not None
        gate, up, down = experts.shared
        hidden, between, result = self.shared
        self._products(program, x, [(gate, hidden), (up, between)])
        arguments = address(hidden), address(between if up else None), self.config.shared_inner
        function = decoder_ops.activation(self.config.activation, up is not None)
        program.add(function, *arguments, items=self.n, shared=self.n > 1)
        self._products(program, hidden, [(down, result)])
        weighed = address(x), address(experts.shared_gate), address(result), address(y), self.config.hidden
        program.add(expert_ops.function("add_weighed"), *weighed, items=self.n, shared=self.n > 1)

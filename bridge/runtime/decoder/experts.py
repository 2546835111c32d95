"""Mixtures of experts: each token through the networks that a router chooses for it.

    p = softmax(W_router x), or sigmoid of each
    y = sum over the k largest of p + bias of  w_e * W_down,e (silu(W_gate,e x) * W_up,e x)
    w = p, or p over the sum of the chosen, times a factor
    y = y + the shared expert's network, times sigmoid(g x) in Qwen2

`Routing` says which. Llama 4 multiplies what an expert reads by w_e, not what it makes; Nemotron-H's have no gate, but
relu(W_up,e x)^2, and in Nemotron 3 Super they read W_shorten x, and y is W_lengthen times their sum, which Kimi K3
normalizes before. Where experts are in groups, the k largest are those of the best groups: by their largest expert, or
of sigmoids by the sum of their two largest. gpt-oss has biases everywhere, and clamps what it multiplies. Ling 3 and
Step 3.5 bound silu(gate) from above by a limit of the layer's experts, and up by it and its negative; the shared expert
has another limit. Phi-MoE (SparseMixer, Liu et al. 2023, arXiv:2310.00811) chooses one after another: w is softmax over
those logits l of the experts left for which l_max - l <= m max(|l|, l_max).

`mix` says so in NumPy. `ExpertTables` writes it as rows of a table of calls, for a token or a prompt:

    logits = W_router x                  float32
    choose                               the largest of softmax(logits)
    gather                               each expert gets the tokens that chose it, in rows that follow one another
    records of x for each row
    gate, up of all experts              one row of the table
    silu(gate) * up, its records
    down of all experts                  one row
    y = sum of weight * down, and the shared expert

Each token's sum is in the order of its own experts, so that threads and other tokens change nothing. From Python a
token of Qwen3-30B-A3B would make 1,150 calls, one for each matrix of each expert used.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig, Routing
from bridge.runtime.cpu.engines.floats import rows_function
from bridge.runtime.cpu.ops import decoder_ops, expert_ops, passes
from bridge.runtime.cpu.ops.passes import Kernels, Product
from bridge.runtime.cpu.ops.program import Program, Scratch, address, bits, buffer, every_token
from bridge.runtime.layers.layers import Experts, Network
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, MIN_VALUES_TO_SHARE

_MIN_GATED_TO_SHARE = MIN_VALUES_TO_SHARE // 2  # a gate's exponential takes longer than rounding a value
Multiply = Callable[[QuantTensor, np.ndarray], np.ndarray]


class Steps(Protocol):
    """What `ExpertTables` adds calls and products to, see steps.py."""

    program: Program
    kernels: Kernels
    scratch: Scratch
    place: np.ndarray

    def products(self, x: np.ndarray, products: Sequence[tuple[QuantTensor | None, np.ndarray]]) -> None: ...

    def product(self, matrix: QuantTensor, place: np.ndarray, records: np.ndarray, y: np.ndarray) -> Product: ...

    def record_memory(self, matrix: QuantTensor, number: int, rows: int) -> np.ndarray: ...

    def record_kind(self, matrix: QuantTensor) -> Any: ...

    def width(self, matrix: QuantTensor) -> int: ...


def mix(
    experts: Experts, x: np.ndarray, config: DecoderConfig, product: Multiply, routed: np.ndarray | None = None
) -> np.ndarray:
    """float32 [tokens, hidden] -> the same: what the experts add.

    product  W x of a matrix and [n, in]: [n, out]
    routed   what the router reads, if that is not x
    """
    logits = (x if routed is None else routed) @ experts.router.T
    if experts.router_bias is not None:
        logits += experts.router_bias
    chosen, weights = route(logits, config.routing, experts.choice_bias)
    act, of_shared = (activation(config, limit) for limit in experts.limits)
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
        if experts.summed_norm is not None:
            y *= experts.summed_norm / np.sqrt(np.square(y).mean(1, keepdims=True) + np.float32(config.norm_eps))
        y = product(experts.lengthen, y)
    if experts.shared is not None:
        added = _network(experts.shared, hidden, product, of_shared)
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
    matrices: Network, x: np.ndarray, product: Multiply, act: Callable[[np.ndarray, Any], np.ndarray],
    biases: Sequence[np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    gate, up, down = matrices
    g, u = product(gate, x), up and product(up, x)
    if biases is not None:
        g, u = g + biases[0], u + biases[1]
    y = product(down, act(g, np.float32(1) if u is None else u))
    return y if biases is None else y + biases[2]


def _gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    bent = gate * (1 + np.float32(0.044715) * gate * gate)
    return gate * _sigmoid(np.float32(1.5957691216) * bent) * up


def _clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The twin of decoder_ops.py's `clamp`."""
    limit, slope = decoder_ops.LIMIT, decoder_ops.SLOPE
    x = np.minimum(gate, limit)
    return x * _sigmoid(slope * x) * (np.clip(up, -limit, limit) + np.float32(1))


def _situ(numbers: Sequence[float], gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The twin of decoder_ops.py's `situ_times`."""
    b, c = map(np.float32, numbers)
    return b * np.tanh(gate / b) * _sigmoid(gate) * (c * np.tanh(up / c) if c else up)


def _limited(numbers: Sequence[float], gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The twin of decoder_ops.py's `limited_times`."""
    (limit,) = map(np.float32, numbers)
    return np.minimum(gate * _sigmoid(gate), limit) * np.clip(up, -limit, limit)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


_erf = np.vectorize(math.erf, [np.float32])
ACTIVATIONS: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "silu": lambda gate, up: gate * _sigmoid(gate) * up,
    "gelu": _gelu,
    "erf": lambda gate, up: gate * (1 + _erf(gate * 0.5**0.5)) / 2 * up,
    "relu2": lambda gate, _: np.square(np.maximum(gate, 0)),
    "clamped": _clamped,
}


_NUMBERED = {"situ": _situ, "limited": _limited}


def activation(config: DecoderConfig, limit: float) -> Callable[[np.ndarray, Any], np.ndarray]:
    """(gate, up) -> what a decoder's networks with that limit make of them; 0: there is none."""
    name, numbers = config.activation_within(limit)
    return partial(_NUMBERED[name], numbers) if numbers else ACTIVATIONS[name]


class ExpertTables:
    """The buffers that all layers share for up to n tokens, with a row for each expert that a token chooses.

    Rows of an expert that none has are behind those of its tokens, up to a multiple of the columns of a kernel.
    """

    def __init__(self, config: DecoderConfig, n: int, steps: Steps):
        self.config, self.n = config, n
        self._steps = steps
        chosen = n * config.routing.used
        self.logits = np.zeros((n, config.experts), np.float32)
        self.chosen, self.rows = (np.zeros(chosen, np.int64) for _ in range(2))
        self.weights = np.zeros(chosen, np.float32)
        self.short = [buffer(n, config.expert_latent) for _ in range(2)]  # what experts read, and their sum
        self.shared = [buffer(n, width) for width in (config.shared_inner, config.shared_inner, config.hidden)]

    def add(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None) -> None:
        """y = the experts' result for x, both buffers [n, hidden]; `routed` as in `mix`."""
        c, steps = self.config, self._steps
        router, read = experts.router, x if routed is None else routed
        steps.program.add(
            rows_function("F32"), address(router), address(read), address(self.logits), c.hidden, 4 * c.hidden,
            every_token, 4 * c.experts, items=c.experts, shared=router.nbytes * self.n >= MIN_BYTES_TO_SHARE,
        )  # fmt: skip
        hidden, summed = x, y
        if experts.shorten is not None:
            x, summed = self.short
            steps.products(hidden, [(experts.shorten, x)])
        self._add_chosen(experts, x, summed)
        if experts.summed_norm is not None:
            norm = address(summed), 0, address(experts.summed_norm), address(summed), c.expert_latent, bits(c.norm_eps)
            steps.program.add(decoder_ops.function("norm"), *norm, items=every_token, shared=self.n > 1)
        if experts.lengthen is not None:
            steps.products(summed, [(experts.lengthen, y)])
        if experts.shared is not None:
            self._add_shared(experts, hidden, y)

    def _add_chosen(self, experts: Experts, x: np.ndarray, y: np.ndarray) -> None:
        """y = the sum of what each token's experts make of x."""
        c, program, scratch = self.config, self._steps.program, self._steps.scratch
        firsts, lasts = [network[:2] for network in experts.networks], [network[2:] for network in experts.networks]
        some = [matrix for matrix in firsts[0] if matrix is not None]  # of the first expert: all are alike
        (last,) = lasts[0]
        columns = self._widest(experts)[:, passes.COLUMNS]
        rows = partial(_most_rows, c, columns.tolist())
        gates = [scratch.rows(f"experts {i}", rows(self.n), self._steps.width(matrix)) for i, matrix in enumerate(some)]
        outs = scratch.rows("experts' results", rows(self.n), self._steps.width(last))
        block, places = np.zeros(expert_ops.WORDS, np.int64), np.zeros((c.experts, passes.PLACE), np.int64)
        self._fill_block(block, experts, places, rows(self.n))
        program.keep(experts, block, places)
        program.add(expert_ops.function("choose"), address(block), items=every_token, shared=self.n > 1)
        program.add(expert_ops.function("gather"), address(block), items=1)
        self._multiply(firsts, x, gates, block, places, True)
        gate, up = gates[0], gates[1] if len(gates) > 1 else None
        name, numbers = c.activation_within(experts.limits[0])
        gated = address(block), address(gate), address(up), c.expert_inner, gate.strides[0], *map(bits, numbers)
        shared = gate.size > _MIN_GATED_TO_SHARE
        program.add(expert_ops.function(name), *gated, items=rows, shared=shared)
        self._multiply(lasts, gate[:, : c.expert_inner], [outs], block, places, False)
        mixed = address(block), address(outs), c.routing.used, c.expert_outer, outs.strides[0], address(y)
        program.add(expert_ops.function("mixed"), *mixed, items=every_token, shared=self.n > 1)

    def _fill_block(self, block: np.ndarray, experts: Experts, places: np.ndarray, rows: int) -> None:
        """expert_ops.py's block of a layer."""
        c, how = self.config, self.config.routing
        factors = np.array([[m.factor if m else 1 for m in network] for network in experts.networks], np.float32)
        pairs = np.zeros(rows, np.int64)
        self._steps.program.keep(factors, pairs)
        words = self._widest(experts)
        gate_bias, up_bias, down_bias = experts.biases or (None, None, None)
        numbers = {
            expert_ops.EXPERTS: c.experts, expert_ops.USED: how.used, expert_ops.SIGMOID: int(how.sigmoid),
            expert_ops.NORMALIZED: int(how.normalized), expert_ops.GROUPS: how.groups,
            expert_ops.GROUPS_USED: how.groups_used, expert_ops.SCALE: bits(how.scale),
            expert_ops.MIXER: bits(how.mixer), expert_ops.BEFORE: int(how.before), expert_ops.KINDS: len(words),
            expert_ops.ROWS: rows,
        }  # fmt: skip
        arrays: dict[int, np.ndarray | None] = {
            expert_ops.LOGITS: self.logits, expert_ops.CHOSEN: self.chosen, expert_ops.WEIGHTS: self.weights,
            expert_ops.PLACES: places, expert_ops.PAIR_OF_ROW: pairs, expert_ops.ROW_OF_PAIR: self.rows,
            expert_ops.TOKENS_PLACE: self._steps.place, expert_ops.KERNELS: words, expert_ops.FACTORS: factors,
            expert_ops.ROUTER_BIAS: experts.router_bias, expert_ops.CHOICE_BIAS: experts.choice_bias,
            expert_ops.GATE_BIAS: gate_bias, expert_ops.UP_BIAS: up_bias, expert_ops.DOWN_BIAS: down_bias,
        }  # fmt: skip
        for word, number in numbers.items():
            block[word] = number
        for word, array in arrays.items():
            block[word] = address(array)

    def _widest(self, experts: Experts) -> np.ndarray:
        """The kernels of an expert's matrix whose tokens may take most rows: all of its matrices have these rows."""
        kernels = [self._steps.kernels.words(matrix) for matrix in experts.networks[0] if matrix is not None]
        return max(kernels, key=lambda words: int(words[-1, passes.COLUMNS]))

    def _multiply(
        self, networks: Sequence[tuple[QuantTensor | None, ...]], x: np.ndarray, ys: list[np.ndarray],
        block: np.ndarray, places: np.ndarray, by_token: bool,
    ) -> None:  # fmt: skip
        """Products of each expert's matrices with its rows of x, or with its tokens' rows; into rows of ys."""
        steps, rows = self._steps, len(ys[0])
        records: dict[Any, np.ndarray] = {}
        for matrix in networks[0]:
            if matrix is not None and (kind := steps.record_kind(matrix)) not in records:
                records[kind] = steps.record_memory(matrix, len(records), rows)
                sources = address(x), x.strides[0], address(records[kind]), x.shape[1]
                words = address(steps.kernels.words(matrix)), int(by_token)
                shared = rows * x.shape[1] > MIN_VALUES_TO_SHARE
                steps.program.add(
                    expert_ops.function("records"), address(block), *sources, *words, items=rows, shared=shared
                )
        products = [
            steps.product(matrix, place, records[steps.record_kind(matrix)], y)
            for network, place in zip(networks, places, strict=True)
            for matrix, y in zip((matrix for matrix in network if matrix is not None), ys, strict=True)
        ]
        groups = sum(product.groups for product in products) // len(networks)
        passes.add_products(steps.program, products, self.n * self.config.routing.used * groups)

    def _add_shared(self, experts: Experts, x: np.ndarray, y: np.ndarray) -> None:
        """y += the shared expert's result for x."""
        assert experts.shared is not None
        steps = self._steps
        gate, up, down = experts.shared
        hidden, between, result = self.shared
        steps.products(x, [(gate, hidden), (up, between)])
        name, numbers = self.config.activation_within(experts.limits[1])
        arguments = address(hidden), address(between if up else None), self.config.shared_inner, 0, *map(bits, numbers)
        function = decoder_ops.activation(name, up is not None)
        steps.program.add(function, *arguments, items=every_token, shared=self.n > 1)
        steps.products(hidden, [(down, result)])
        weighed = address(x), address(experts.shared_gate), address(result), address(y), self.config.hidden
        steps.program.add(expert_ops.function("add_weighed"), *weighed, items=every_token, shared=self.n > 1)


def _most_rows(c: DecoderConfig, columns: list[int], tokens: int) -> int:
    """The most rows that tokens take, with those that none has."""
    chosen = tokens * c.routing.used
    most = next((count for count in columns if count >= tokens), columns[-1])  # columns that an expert's tokens take
    return chosen + min(c.experts, chosen) * (most - 1)

"""Mixtures of experts: each token through the networks that a router chooses for it.

    p = softmax(W_router x)
    y = sum over the k largest p of  w_e * W_down,e (silu(W_gate,e x) * W_up,e x)
    w = p, or p over the sum of the chosen (all but Qwen2)
    y = y + sigmoid(g x) * the shared expert's network (Qwen2)

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

from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.runtime.cpu import activations, decoder_ops, expert_ops
from bridge.runtime.cpu.floats import rows_function
from bridge.runtime.cpu.program import KernelSlots, Program, add_products, address, buffer, product
from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.weights import Experts
from bridge.system.pool import MIN_BYTES_TO_SHARE

MIN_VALUES_TO_SHARE = 1 << 15  # values that a call reads before it is worth waking other threads
Products = Callable[[Program, np.ndarray, list[tuple[QuantTensor, np.ndarray]]], None]


def mix(experts: Experts, x: np.ndarray, config: DecoderConfig, precision: str) -> np.ndarray:
    """float32 [tokens, hidden] -> the same: what the experts add."""
    chosen, weights = route(x @ experts.router.T, config.experts_used, config.normalized)
    y = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, place = np.nonzero(chosen == expert)
        y[tokens] += weights[tokens, place, None] * _network(experts.networks[expert], x[tokens], precision)
    if experts.shared is not None and experts.shared_gate is not None:
        y += _sigmoid(x @ experts.shared_gate)[:, None] * _network(experts.shared, x, precision)
    return y


def route(logits: np.ndarray, used: int, normalized: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, experts] -> the experts of each token, int [tokens, used], and float32 weights of that shape."""
    p = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float32)
    p /= p.sum(1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, chosen, 1)
    return chosen, weights / weights.sum(1, keepdims=True) if normalized else weights


def _network(matrices: tuple[QuantTensor, QuantTensor, QuantTensor], x: np.ndarray, precision: str) -> np.ndarray:
    gate, up, down = matrices
    g, u = gate.matmul(x, precision=precision), up.matmul(x, precision=precision)
    y: np.ndarray = down.matmul(g * _sigmoid(g) * u, precision=precision)
    return y


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


class ExpertTables:
    """The buffers that all layers share for n tokens, with `experts_used` rows a token."""

    def __init__(self, config: DecoderConfig, n: int, slots: KernelSlots, products: Products):
        self.config, self.n, self.integer = config, n, slots.integer
        self._slots, self._products = slots, products
        chosen = n * config.experts_used
        self.logits = np.zeros((n, config.experts), np.float32)
        self.chosen = np.zeros(chosen, np.int64)
        self.weights = np.zeros(chosen, np.float32)
        self.gate, self.up = (buffer(chosen, config.inner) for _ in range(2))
        self.down = buffer(chosen, config.hidden)
        self.shared = [buffer(n, width) for width in (config.shared_inner, config.shared_inner, config.hidden)]

    def add(self, program: Program, experts: Experts, x: np.ndarray, y: np.ndarray) -> None:
        """y = the experts' result for x, both buffers [n, hidden]."""
        c, n = self.config, self.n
        router = experts.router
        program.add(
            rows_function("F32"), address(router), address(x), address(self.logits), c.hidden, 4 * c.hidden, n,
            4 * c.experts, items=c.experts, shared=router.nbytes >= MIN_BYTES_TO_SHARE,
        )  # fmt: skip
        engines: list[Any] = [matrix._get_engine() for matrix in experts.networks[0]]  # all are alike
        table = np.zeros((c.experts, 3, 2), np.int64)
        for network, row in zip(experts.networks, table, strict=True):
            for matrix, words in zip(network, row, strict=True):
                self._slots.register(matrix, words, 1)
                self._slots.refresh(matrix)
        factors = np.array([[matrix.factor for matrix in network] for network in experts.networks], np.float32)
        block = np.zeros(expert_ops.WORDS, np.int64)
        choose = address(block), c.experts, c.experts_used, int(c.normalized), address(table)
        program.add(expert_ops.function("choose"), *choose, items=n)
        first = self._several(program, x, engines[:2], [self.gate, self.up], c.experts_used)
        gated = address(self.gate), address(self.up), c.inner, address(self.chosen), address(factors)
        shared = self.gate.size > MIN_VALUES_TO_SHARE
        program.add(expert_ops.function("gated"), *gated, items=len(self.chosen), shared=shared)
        second = self._several(program, self.gate, engines[2:], [self.down], 1)
        arrays: dict[int, np.ndarray] = {
            expert_ops.LOGITS: self.logits, expert_ops.CHOSEN: self.chosen, expert_ops.WEIGHTS: self.weights,
            expert_ops.FIRST: first, expert_ops.SECOND: second,
        }  # fmt: skip
        for word, array in arrays.items():
            block[word] = address(array)
        mixed = address(self.down), address(self.weights), address(self.chosen), address(factors), c.experts_used
        program.add(expert_ops.function("mixed"), *mixed, c.hidden, address(y), items=n, shared=n > 1)
        program.keep(router, table, factors, block, engines)
        if experts.shared is not None and experts.shared_gate is not None:
            self._add_shared(program, experts, x, y)

    def _several(
        self, program: Program, x: np.ndarray, engines: list[Any], ys: list[np.ndarray], used: int
    ) -> np.ndarray:
        """Products of the chosen experts, whose fields `choose` fills in: `used` rows of each y read one row of x."""
        records: dict[tuple[Any, ...], np.ndarray] = {}
        for engine in engines:
            name = engine.block.name
            kind = activations.record_kind(name, self.integer)
            if kind not in records:
                size = activations.record_bytes(name, x.shape[1], self.integer)
                records[kind] = np.zeros((len(x), size), np.uint8)
                arguments = address(x), address(records[kind]), x.shape[1], 1
                shared = x.size > MIN_VALUES_TO_SHARE
                quantize = activations.quantize_function(name, self.integer)
                program.add(quantize, *arguments, items=len(x), shared=shared)
        program.keep(records)
        products = [
            product(
                engine, records[activations.record_kind(engine.block.name, self.integer)][j // used], y[j : j + 1], 1,
                1, self.integer,
            )
            for j in range(len(x) * used)
            for engine, y in zip(engines, ys, strict=True)
        ]  # fmt: skip
        return add_products(program, products)

    def _add_shared(self, program: Program, experts: Experts, x: np.ndarray, y: np.ndarray) -> None:
        """y += the shared expert's result for x."""
        assert experts.shared is not None
        gate, up, down = experts.shared
        hidden, between, result = self.shared
        self._products(program, x, [(gate, hidden), (up, between)])
        arguments = address(hidden), address(between), self.config.shared_inner
        program.add(decoder_ops.function("swiglu"), *arguments, items=self.n, shared=self.n > 1)
        self._products(program, hidden, [(down, result)])
        weighed = address(x), address(experts.shared_gate), address(result), address(y), self.config.hidden
        program.add(expert_ops.function("add_weighed"), *weighed, items=self.n, shared=self.n > 1)

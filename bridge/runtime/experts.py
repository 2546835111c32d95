"""Mixtures of experts: each token through the networks that a router chooses for it.

    p = softmax(W_router x)
    y = sum over the k largest p of  w_e * W_down,e (silu(W_gate,e x) * W_up,e x)
    w = p, or p over the sum of the chosen (all but Qwen2)
    y = y + sigmoid(g x) * the shared expert's network (Qwen2)

The tokens of a batch that chose the same expert go through it together.
"""

from __future__ import annotations

import numpy as np

from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.weights import Experts


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

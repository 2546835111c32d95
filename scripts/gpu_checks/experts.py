"""Layers of experts of bridge.nn on the device: few tokens through all chosen experts at once, and expert by expert."""

from typing import Any

import numpy as np
import torch
from bridge.cuda import bench
from bridge.cuda.toolchain.device import require
from bridge.cuda.toolchain.launch import captured

from bridge.nn.quant_experts import ExpertStack, Gated
from gpu_checks import costs
from gpu_checks.products import Judge, random_matrix

CHECKED = (16, 1280, 768)  # experts, hidden, inner
TIMED = (128, 2048, 768)  # a layer of Qwen3-30B-A3B
USED = 8  # experts of a token
TOKENS = (1, 2, 40)  # 8 and 16 pairs at once, and more than there are experts
_LIMITS = {"f32": 1e-5, "int8": 0.05}  # relative


class Layer:
    """The experts of a layer, each of other rows of the same matrices, and their weights in float64."""

    def __init__(self, type: str, count: int, hidden: int, inner: int):
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        # rows of an expert begin one further than those of the one before; gate and up differ, too
        matrices = [random_matrix(type, rows + 2 * count, columns) for rows, columns in shapes]
        first = [[e + part % 2 * count for part in range(3)] for e in range(count)]
        sizes = [rows for rows, _ in shapes]
        self.weights = [
            [w[f : f + rows] for (_, w), f, rows in zip(matrices, starts, sizes, strict=True)] for starts in first
        ]
        networks = [
            tuple(t.slice_rows(f, f + rows) for (t, _), f, rows in zip(matrices, starts, sizes, strict=True))
            for starts in first
        ]
        self.stack: Any = ExpertStack(networks, Gated(torch.nn.functional.silu)).to(require("cuda"))

    def exact(self, x: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """What experts add, in float64; a number that is no expert's adds nothing."""
        y = np.zeros(x.shape)
        for token, pair in np.argwhere(chosen < len(self.weights)):
            gate, up, down = self.weights[chosen[token, pair]]
            inner = gate @ x[token]
            y[token] += weights[token, pair] * (down @ (inner / (1 + np.exp(-inner)) * (up @ x[token])))
        return y


def check(type: str) -> dict[str, Any]:
    """Few and many tokens against float64, and few in a captured graph, which is replayed for other experts."""
    judge, rng, device = Judge(), np.random.default_rng(0), require("cuda").place
    count, hidden, _ = CHECKED
    layer = Layer(type, *CHECKED)

    def routed(n: int) -> tuple[Any, ...]:
        chosen = np.stack([rng.permutation(count + 1)[:USED] for _ in range(n)])  # the last is of another process
        return rng.standard_normal((n, hidden)).astype(np.float32) / 8, chosen, rng.random((n, USED), np.float32)

    for precision, limit in _LIMITS.items():
        for n in TOKENS:
            routing = routed(n)
            wide = n * USED > count and precision == "f32"  # torch's products of many tokens may be TF32
            y = layer.stack.mix(*[torch.from_numpy(part).to(device) for part in routing], precision)
            judge(f"experts of {type}, {n} tokens, {precision}", y, layer.exact(*routing), 2e-3 if wide else limit)
    held = [torch.from_numpy(part).to(device) for part in routed(1)]
    y = torch.zeros((1, hidden), device=device)
    graph = captured(lambda: y.copy_(layer.stack.mix(*held, "f32")))
    for _ in range(2):
        routing = routed(1)
        for part, value in zip(held, routing, strict=True):
            part.copy_(torch.from_numpy(value))
        graph.replay()
        judge(f"captured experts of {type}", y, layer.exact(*routing), _LIMITS["f32"])
    return {"wrong": judge.wrong, "notes": f"largest relative error of floats {judge.worst:.1e}"}


def time(type: str) -> dict[str, Any]:
    """Seconds of a token in a layer, replayed, of other experts each time, and of the host to launch it: all chosen at
    once, and expert by expert."""
    count, hidden, _ = TIMED
    stack, device = Layer(type, *TIMED).stack, require("cuda").place
    x, weights = torch.randn((1, hidden), device=device), torch.full((1, USED), 1 / USED, device=device)
    sets = torch.randperm(count).to(device).view(-1, 1, USED)
    nbytes = sum(part.nbytes for part in stack.stacks) // count * USED

    def make(number: int) -> Any:
        return lambda: stack.mix(x, sets[number % len(sets)], weights, "int8")

    return {
        "nbytes": nbytes,
        "seconds": bench.seconds_from_memory(make, nbytes),
        "host": costs.host_seconds(make(0)),
        "host, expert by expert": costs.host_seconds(lambda: ExpertStack.mix(stack, x, sets[0], weights, "int8")),
    }

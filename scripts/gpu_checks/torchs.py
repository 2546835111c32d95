"""Correctness with what torch does around tensors on a device: captured graphs, copies, its compiler, a second GPU."""

import copy
import importlib.util
import io
import pickle
from typing import Any

import numpy as np
import torch
from bridge.cuda.toolchain.device import require
from bridge.cuda.toolchain.launch import captured

from bridge.nn import QuantLinear
from gpu_checks.products import Judge, random_matrix

SHAPE = (1000, 2304)
TOKENS = (1, 5, 40)
_LIMITS = {"f32": 1e-5, "int8": 0.02}  # relative
_OTHER_CONTEXT = 64 << 20  # bytes: less than a context takes


def check_graphs() -> dict[str, Any]:
    """Products and look-ups that are captured, and replayed for other values of what they read."""
    judge, rng, device = Judge(), np.random.default_rng(0), require("cuda").place
    tensor, weights = random_matrix("Q4_K", *SHAPE)
    moved = tensor.to("cuda")
    for n in TOKENS:
        for precision, limit in _LIMITS.items():
            x, y = torch.zeros((n, SHAPE[1]), device=device), torch.zeros((n, SHAPE[0]), device=device)

            def step(x: Any = x, y: Any = y, precision: str = precision) -> None:
                moved.matmul(x, out=y, precision=precision)

            graph = captured(step)
            for _ in range(2):
                x.copy_(torch.from_numpy(rng.standard_normal(x.shape).astype(np.float32)))
                graph.replay()
                expected = x.double().cpu().numpy() @ weights.T
                judge(f"captured product of {n} tokens, {precision}", y, expected, limit)
    ids, out = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros((3, SHAPE[1]), device=device)
    graph = captured(lambda: out.copy_(moved.rows(ids)))
    ids.copy_(torch.tensor([SHAPE[0] - 1, 7 % SHAPE[0], 0]))
    graph.replay()
    judge("captured look-up", out, weights[ids.cpu().numpy()], 1e-6)
    return {"wrong": judge.wrong, "notes": f"largest relative error of floats {judge.worst:.1e}"}


def check_copies() -> dict[str, Any]:
    """A module on the device: copied, pickled, and saved by torch."""
    judge = Judge()
    layer, x, expected = _layer()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
    for name, other in copies.items():
        judge(f"QuantLinear after {name}", other(x).detach(), expected, _LIMITS["f32"])
        if (where := getattr(other.tensor, "device", "cpu")) != str(x.device):
            judge.fail(f"QuantLinear after {name}: its tensor is on {where}")
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def check_inductor() -> dict[str, Any]:
    """A module compiled by torch's own compiler, whose steps it captures in graphs by itself."""
    if importlib.util.find_spec("triton") is None:
        return {"wrong": [], "notes": "triton is not installed"}
    judge = Judge()
    layer, x, expected = _layer()
    bias = layer.bias.double().cpu().numpy()
    torch._dynamo.reset()
    compiled = torch.compile(lambda inputs: layer(inputs) * 2, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for run in range(4):  # of which the first compiles, and a later one is a replay
            wanted = 2 * ((run + 1) * (expected - bias) + bias)
            judge(f"QuantLinear by inductor, run {run}", compiled(x * (run + 1)), wanted, 1e-5)
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def check_second() -> dict[str, Any]:
    """A tensor on another GPU than torch's current one, and no context of a GPU that does nothing."""
    if torch.cuda.device_count() < 2:
        return {"wrong": [], "notes": "there is one GPU"}
    judge = Judge()
    tensor, weights = random_matrix("Q4_K", *SHAPE)
    free = torch.cuda.mem_get_info(0)[0]
    moved = tensor.to("cuda:1")
    for n in TOKENS:
        x = torch.randn((n, SHAPE[1]), device="cuda:1")
        for _ in range(2):  # the second time, launches are packed already
            expected = x.double().cpu().numpy() @ weights.T
            judge(f"cuda:1, {n} tokens", moved.matmul(x, precision="f32"), expected, _LIMITS["f32"])
    used = free - torch.cuda.mem_get_info(0)[0]
    if used > _OTHER_CONTEXT:
        judge.fail(f"products on cuda:1 took {used >> 20} MB of cuda:0")
    return {"wrong": judge.wrong, "notes": f"largest relative error {judge.worst:.1e}"}


def _layer() -> tuple[Any, Any, np.ndarray]:
    """A module on the device, x, and the product in float64."""
    rng, device = np.random.default_rng(1), require("cuda").place
    tensor, weights = random_matrix("Q4_K", *SHAPE)
    bias = rng.standard_normal(SHAPE[0]).astype(np.float32)
    x = rng.standard_normal((3, SHAPE[1])).astype(np.float32)
    layer = QuantLinear(tensor, torch.from_numpy(bias), None, "f32").to(device)
    return layer, torch.from_numpy(x).to(device), x @ weights.T + bias

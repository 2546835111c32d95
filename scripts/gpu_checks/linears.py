"""Correctness of bridge.nn on the device: QuantLinear, its gradient and torch.compile, and a model on a GGUF."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bridge.cuda.toolchain.device import require

import bridge
from bridge.nn import QuantLinear
from gpu_checks.model import CHECKPOINT
from gpu_checks.products import Judge, random_matrix

SHAPE = (1000, 2304)
FEW, MANY = (3, 5), (40, 2)  # [batch, tokens] of x: 9 to 64 columns, and more
PROMPT = 24  # tokens
_LIMITS = {"f32": 1e-5, "int8": 0.02}  # relative
_LOGITS = 1e-3


def check(type: str) -> dict[str, Any]:
    """QuantLinear with a bias and an order of its rows: forward, backward, and both in one compiled graph."""
    judge, device, rng = Judge(), require("cuda").place, np.random.default_rng(0)
    rows, columns = SHAPE
    tensor, weights = random_matrix(type, rows, columns)
    order, bias = rng.permutation(rows), rng.standard_normal(rows).astype(np.float32)
    ordered = weights[order]
    for precision, limit in _LIMITS.items():
        layer = QuantLinear(tensor, torch.from_numpy(bias), order, precision).to(device)
        if (where := getattr(layer.tensor, "device", "cpu")) != device:
            judge.fail(f"QuantLinear of {type}: its tensor is on {where}")
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
        for shape in ((), FEW, MANY):
            x = torch.from_numpy(rng.standard_normal((*shape, columns)).astype(np.float32)).to(device)
            exact = x.double().cpu().numpy() @ ordered.T + bias
            out = torch.from_numpy(rng.standard_normal(exact.shape).astype(np.float32)).to(device)
            for name, function in (("", layer), (", compiled", compiled)):
                inputs = x.clone().requires_grad_()
                y = function(inputs)
                what = f"QuantLinear of {type}, x {list(x.shape)}, {precision}{name}"
                judge(what, y.detach(), exact, limit)
                y.backward(out)
                judge(f"{what}, its gradient", inputs.grad, out.double().cpu().numpy() @ ordered, 1e-5)
        half = layer(x.half())
        if half.dtype != torch.float16:
            judge.fail(f"QuantLinear of {type}: {half.dtype} of float16")
        judge(f"QuantLinear of {type}, float16, {precision}", half.detach(), exact, 0.02)
    return {"wrong": judge.wrong, "notes": f"largest relative error of floats {judge.worst:.1e}"}


def check_load() -> dict[str, Any]:
    """bridge.nn.load of the checkpoint in tests/data, moved to the device, against the same model on the CPU."""
    if importlib.util.find_spec("transformers") is None:
        return {"wrong": [], "notes": "transformers is not installed"}
    judge, device = Judge(), require("cuda").place
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.gguf"
        bridge.convert(CHECKPOINT, path)
        tokens = torch.arange(PROMPT)[None] * 7 % 100
        model = bridge.nn.load(CHECKPOINT, path, precision="f32")
        expected = model(tokens).logits.double().numpy()
        moved = model.to(device)
        places = {str(t.device) for t in (*moved.parameters(), *moved.buffers())}
        if places != {device}:
            judge.fail(f"bridge.nn.load: parts of the model are on {', '.join(sorted(places))}")
        judge("bridge.nn.load, logits", moved(tokens.to(device)).logits, expected, _LOGITS)
        torch._dynamo.reset()
        graph = torch.compile(lambda ids: moved(ids, use_cache=False).logits, backend="aot_eager", dynamic=False)
        judge("bridge.nn.load, compiled, logits", graph(tokens.to(device)), expected, _LOGITS)
    return {"wrong": judge.wrong, "notes": ""}

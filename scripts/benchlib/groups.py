"""GPTQ and AWQ on groups, compared with llm-compressor on the same tokens: `bench_quantize.py --groups`.

llm-compressor runs in a Python of its own (see `peers/llm_compressor.py`), since it needs other versions of
transformers.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from bridge.quantize import Method, groups, quantize_model
from bridge.quantize.awq import Awq
from scripts.peers import llm_compressor

from . import head, run_peer
from .divergence import FloatModel, save_tokens

# method, bits, group size, symmetric
ROWS = [("gptq", 4, 128, True), ("gptq", 3, 128, True), ("gptq", 2, 64, False), ("awq", 4, 128, False)]
RTN: dict[str, Any] = {"act_order": "none", "damping": float("inf"), "sweeps": 0}


def print_groups(float_model: FloatModel, python: Path) -> None:
    """A markdown table; `python` has llm-compressor."""
    print(f"\n{head('groups', 'KL', 'llm-compressor', 'ratio', 'seconds', 'its seconds')}")
    for method, bits, size, symmetric in ROWS:
        begun = time.perf_counter()
        peer = float_model.divergence(by_peer(python, float_model, method, bits, size, symmetric))
        theirs = time.perf_counter() - begun
        for name, how in own_ways(method, bits, size, symmetric).items():
            model = float_model.with_weights(float_model.weights)
            begun = time.perf_counter()
            more: dict[str, Any] = {"cross": "GPTAQ" in name}
            if isinstance(how, Awq):
                more["prepare"] = how.prepare
            for _ in quantize_model(model, torch.from_numpy(float_model.calibration), how.layer, **more):
                pass
            seconds = time.perf_counter() - begun
            own = float_model.divergence(model)
            what = f"{name} {bits}-bit g{size} {'sym' if symmetric else 'asym'}"
            print(f"| {what} | {own:.3e} | {peer:.3e} | {own / peer:.3f} | {seconds:.0f} | {theirs:.0f} |", flush=True)


def own_ways(method: str, bits: int, size: int, symmetric: bool) -> dict[str, Method | Awq]:
    """What is compared with the peer's method: ours as published, and with everything it can do."""
    grid = groups(bits, size, symmetric)
    if method == "awq":
        return {"AWQ": Awq(Method(grid, **RTN)), "AWQ, GPTAQ": Awq(Method(grid), clip=False)}
    return {"GPTQ": Method(grid, act_order="static", sweeps=0), "GPTAQ": Method(grid)}


def by_peer(
    python: Path, model: FloatModel, method: str, bits: int, size: int, symmetric: bool
) -> dict[str, np.ndarray]:
    """llm-compressor's weights of the whole model, float32."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = save_tokens(model.calibration, folder), Path(folder) / "weights.safetensors"
        options = ["--method", method, "--bits", bits, "--group-size", size, *([] if symmetric else ["--asym"])]
        run_peer(python, llm_compressor.__file__, model.folder.resolve(), given, made, *options, cwd=folder)
        return load_file(made)

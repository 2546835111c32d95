"""The rows of `bench_quantize.py --groups`: GPTQ and AWQ on groups, beside llm-compressor on the same tokens.

llm-compressor runs in a Python of its own (see `peers/llm_compressor.py`): it asks for other versions of transformers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from bridge.quantize import Method, groups, quantize_model
from bridge.quantize.awq import Awq
from scripts.peers import llm_compressor, reference

# method, bits, group size, symmetric
ROWS = [("gptq", 4, 128, True), ("gptq", 3, 128, True), ("gptq", 2, 64, False), ("awq", 4, 128, False)]
RTN: dict[str, Any] = {"act_order": "none", "damping": float("inf"), "sweeps": 0}


def print_rows(
    folder: Path,
    weights: reference.Weights,
    tokens: np.ndarray,
    divergence: Callable[[torch.nn.Module], float],
    python: Path,
) -> None:
    """A markdown table; `divergence` measures a model, `python` has llm-compressor."""
    print("\n| groups | KL | llm-compressor | ratio | seconds | its seconds |\n|---|---|---|---|---|---|")
    for method, bits, size, symmetric in ROWS:
        begun = time.perf_counter()
        peer = divergence(reference.hf_model(folder, by_peer(python, folder, tokens, method, bits, size, symmetric)))
        theirs = time.perf_counter() - begun
        for name, how in own_ways(method, bits, size, symmetric).items():
            model = reference.hf_model(folder, weights)
            begun = time.perf_counter()
            quantizer: Any = how.layer
            more: dict[str, Any] = {"prepare": how.prepare} if isinstance(how, Awq) else {}
            for _ in quantize_model(model, torch.from_numpy(tokens), quantizer, cross="GPTAQ" in name, **more):
                pass
            seconds = time.perf_counter() - begun
            own = divergence(model)
            what = f"{name} {bits}-bit g{size} {'sym' if symmetric else 'asym'}"
            print(f"| {what} | {own:.3e} | {peer:.3e} | {own / peer:.3f} | {seconds:.0f} | {theirs:.0f} |", flush=True)


def own_ways(method: str, bits: int, size: int, symmetric: bool) -> dict[str, Method | Awq]:
    """What is compared with the peer's method: ours as published, and with all that it can."""
    grid = groups(bits, size, symmetric)
    if method == "awq":
        return {"AWQ": Awq(Method(grid, **RTN)), "AWQ, GPTAQ": Awq(Method(grid), clip=False)}
    return {"GPTQ": Method(grid, act_order="static", sweeps=0), "GPTAQ": Method(grid)}


def by_peer(
    python: Path, folder: Path, tokens: np.ndarray, method: str, bits: int, size: int, symmetric: bool
) -> dict[str, np.ndarray]:
    """llm-compressor's weights of the whole model, float32."""
    with tempfile.TemporaryDirectory() as temporary:
        given, made = Path(temporary) / "tokens.npy", Path(temporary) / "weights.safetensors"
        np.save(given, tokens)
        command = [
            str(python), llm_compressor.__file__, str(folder.resolve()), str(given), str(made), "--method", method,
            "--bits", str(bits), "--group-size", str(size), *([] if symmetric else ["--asym"]),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{python}: llm-compressor failed:\n{done.stderr[-2000:]}")
        return load_file(made)

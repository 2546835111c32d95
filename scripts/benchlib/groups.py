"""GPTQ and AWQ on groups, compared with llm-compressor on the same tokens: `bench_quantize.py --groups`.

llm-compressor runs in a Python of its own (see `peers/llm_compressor.py`), since it needs other versions of
transformers.
"""

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from bridge.quantize import Method, groups
from bridge.quantize.awq import Awq
from bridge.quantize.quantizer import LayerHooks
from scripts.peers import llm_compressor

from . import Lines, head
from .divergence import FloatModel

# method, bits, group size, symmetric
ROWS = [("gptq", 4, 128, True), ("gptq", 3, 128, True), ("gptq", 2, 64, False), ("awq", 4, 128, False)]
TWO_SIDED = "two-sided"
RTN: dict[str, Any] = {"act_order": "none", "damping": float("inf"), "sweeps": 0}


def groups_table(float_model: FloatModel, gradients: LayerHooks, python: Path) -> Lines:
    """A markdown table; `python` has llm-compressor, `gradients` are for two-sided rounding."""
    yield head("groups", "KL", "llm-compressor", "ratio", "seconds", "its seconds")
    for method, bits, size, symmetric in ROWS:
        options = ["--method", method, "--bits", bits, "--group-size", size, *([] if symmetric else ["--asym"])]
        made, theirs = float_model.by_peer(load_file, python, llm_compressor.__file__, *options)
        peer = float_model.divergence(made)
        for name, how in own_ways(method, bits, size, symmetric).items():
            settings: dict[str, Any] = {"prepare": how.prepare} if isinstance(how, Awq) else {}
            if name == TWO_SIDED:
                settings["layers"] = gradients
            own, seconds = float_model.quantized(how.layer, cross="GPTAQ" in name or name == TWO_SIDED, **settings)
            what = f"{name} {bits}-bit g{size} {'sym' if symmetric else 'asym'}"
            yield what, own, peer, own.over(peer), f"{seconds:.0f}", f"{theirs:.0f}"


def own_ways(method: str, bits: int, size: int, symmetric: bool) -> dict[str, Method | Awq]:
    """What is compared with the peer's method: ours as published, and with everything it can do."""
    grid = groups(bits, size, symmetric)
    if method == "awq":
        return {"AWQ": Awq(Method(grid, **RTN)), "AWQ, GPTAQ": Awq(Method(grid), clip=False)}
    return {"GPTQ": Method(grid, act_order="static", sweeps=0), "GPTAQ": Method(grid), TWO_SIDED: Method(grid)}

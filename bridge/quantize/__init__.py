"""Quantizing from floats: a model and a text go in, codes chosen with each layer's Hessian come out.

    gptq(module, batches)              any torch module, in place
    quantize_model(model, tokens, ..)  a `transformers` decoder, layer by layer, in place
    Method(superblocks("Q4_K"))        how each layer is quantized; `groups(bits, size, symmetric)` for checkpoints
    write_checkpoint(ckpt, path, ..)   GPTQ or AWQ checkpoints of the result

Needs PyTorch, and for whole models transformers (the `quantize` extra).
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Calibration": "settings",
    "CheckpointWriter": "checkpoint_writer",
    "FloatModel": "float_model",
    "Groups": "checkpoint_writer",
    "Method": "method",
    "Quantized": "method",
    "gptq": "method",
    "groups": "method",
    "quantize_block": "walk",
    "quantize_model": "walk",
    "superblocks": "method",
    "write_checkpoint": "checkpoint_writer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bridge.quantize' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"bridge.quantize.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])

"""Quantizing from floats: a model and a calibration text -> codes, chosen with the Hessian of each layer's inputs.

    gptq(module, batches)              any torch module, in place
    quantize_model(model, tokens, ..)  a `transformers` decoder, layer by layer, in place
    Method(superblocks("Q4_K"))        how each layer is quantized; `groups(bits, size, symmetric)` for checkpoints

Read `textbook` first, GPTQ in one page, with which the solver agrees. Then, in the data's order:

    settings, texts                    the options; a text becomes tokens
    float_model, block_inputs          the model, one block in memory at a time, and what its blocks are called with
    stages, experts, replay            a block's layers, stage by stage
    hessian, target                    H of these inputs; what is quantized in place of W
    method, gptq_solver, refine, awq   a layer's weights and H -> codes
    two_sided, embeddings              the same, with the gradients of the layer's outputs; the embeddings
    grids/                             the values that codes may have: groups, GGUF blocks
    layer_store                        finished layers on disk
    run/                               all of this for a text: block by block, in this process or on a cluster
    budget/                            a type for each tensor under a size limit

Needs PyTorch, and for whole models transformers (the `quantize` extra). Names are imported when first used.
"""

import importlib
from typing import Any

from bridge.system.threads.openmp import sleep_when_idle

sleep_when_idle()

_LAZY = {
    "Calibration": "settings",
    "FloatModel": "model.float_model",
    "Method": "method",
    "Quantized": "method",
    "gptq": "run.module",
    "groups": "method",
    "quantize_block": "run.layer_by_layer",
    "quantize_model": "run.layer_by_layer",
    "superblocks": "method",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bridge.quantize' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"bridge.quantize.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])

"""Quantizing from floats: a model and a calibration text -> codes, chosen with the Hessian of each layer's inputs.

    gptq(module, batches)              any torch module, in place
    quantize_model(model, tokens, ..)  a `transformers` decoder, layer by layer, in place
    Method(superblocks("Q4_K"))        how each layer is quantized; `groups(bits, size, symmetric)` for checkpoints
    write_checkpoint(ckpt, path, ..)   writes the result as a GPTQ or AWQ checkpoint (`bridge.checkpoint.write`)

Read `textbook` first, GPTQ in one page, with which the solver agrees. Then, in the data's order:

    settings, text/    the options; a text becomes tokens
    model/             the float model, one block in memory at a time: what its blocks and layers are called with
    solve/             the Hessian of a layer's inputs, and its weights to codes; `method` and `awq` put it together
    grids/             the values that codes may have: groups, GGUF blocks
    layer_store        finished layers on disk
    run/               all of this for a text: block by block, in this process or on a cluster
    budget/            a type for each tensor under a size limit

Needs PyTorch, and for whole models transformers (the `quantize` extra). Names are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bridge.system.cpu.row_threads import sleep_when_idle

if TYPE_CHECKING:  # where the names come from, for editors and type checkers
    from bridge.checkpoint.formats.written import Groups
    from bridge.checkpoint.write.writer import CheckpointWriter, write_checkpoint
    from bridge.quantize.method import Method, Quantized, groups, superblocks
    from bridge.quantize.model.float_model import FloatModel
    from bridge.quantize.run.layer_by_layer import gptq, quantize_block, quantize_model
    from bridge.quantize.settings import Calibration

__all__ = [
    "Calibration",
    "CheckpointWriter",
    "FloatModel",
    "Groups",
    "Method",
    "Quantized",
    "gptq",
    "groups",
    "quantize_block",
    "quantize_model",
    "superblocks",
    "write_checkpoint",
]

sleep_when_idle()

_LAZY = {
    "Calibration": "bridge.quantize.settings",
    "CheckpointWriter": "bridge.checkpoint.write.writer",
    "FloatModel": "bridge.quantize.model.float_model",
    "Groups": "bridge.checkpoint.formats.written",
    "Method": "bridge.quantize.method",
    "Quantized": "bridge.quantize.method",
    "gptq": "bridge.quantize.run.layer_by_layer",
    "groups": "bridge.quantize.method",
    "quantize_block": "bridge.quantize.run.layer_by_layer",
    "quantize_model": "bridge.quantize.run.layer_by_layer",
    "superblocks": "bridge.quantize.method",
    "write_checkpoint": "bridge.checkpoint.write.writer",
}


if not TYPE_CHECKING:  # for whom this would be a module with any name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'bridge.quantize' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__

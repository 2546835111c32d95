"""Quantizing from floats: a model and a text go in, codes chosen with each layer's Hessian come out.

    gptq(module, batches)              any torch module, in place
    quantize_model(model, tokens, ..)  a `transformers` decoder, layer by layer, in place
    Method(superblocks("Q4_K"))        how each layer is quantized; `groups(bits, size, symmetric)` for checkpoints
    write_checkpoint(ckpt, path, ..)   GPTQ or AWQ checkpoints of the result

Needs PyTorch, and for whole models transformers (the `quantize` extra).
"""

from __future__ import annotations

from bridge.quantize.checkpoint_writer import CheckpointWriter, Groups, write_checkpoint
from bridge.quantize.float_model import FloatModel
from bridge.quantize.method import Method, Quantized, gptq, groups, superblocks
from bridge.quantize.walk import quantize_block, quantize_model

__all__ = [
    "CheckpointWriter", "FloatModel", "Groups", "Method", "Quantized", "gptq", "groups", "quantize_block",
    "quantize_model", "superblocks", "write_checkpoint",
]  # fmt: skip

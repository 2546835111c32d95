"""Quantized weights under a `transformers` model: a GGUF's tensors, or a checkpoint's trellis codes.

    load("org/model", "model.gguf")           a model on a GGUF, without floats of its own
    replace_linears(model, "model.gguf")      linears, embedding and norms of a GGUF, in an existing model
    replace_trellis(model, "folder")          linears of a QTIP or EXL3 checkpoint, which stay coded
    register_quantizers()                     afterwards `from_pretrained` reads EXL3 and QTIP itself

A torch model and a file go in; the same model with quantized modules comes out. Read `quant_linear.py` first.
QTIP's config.json has no label that transformers knows: pass quantization_config=QtipConfig() too.
"""

import importlib
from typing import Any

from bridge.nn.hf_model import load
from bridge.nn.quant_linear import QuantEmbedding, QuantLinear, replace_linears
from bridge.nn.trellis_linear import replace_trellis

__all__ = ["QuantEmbedding", "QuantLinear", "load", "replace_linears", "replace_trellis"]

_OF_TRANSFORMERS = ("Exl3Config", "QtipConfig", "register_quantizers")  # imports it, which the others do not need


def __getattr__(name: str) -> Any:
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module 'bridge.nn' has no attribute {name!r}")
    return getattr(importlib.import_module("bridge.nn.transformers_quantizer"), name)

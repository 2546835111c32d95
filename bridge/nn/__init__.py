"""Quantized weights under a `transformers` model: a GGUF's tensors, or a checkpoint's trellis codes.

    load("org/model", "model.gguf")           a model on a GGUF, whose own floats never exist
    replace_linears(model, "model.gguf")      linears, embedding and norms of a GGUF, in a model that is there
    replace_trellis(model, "folder")          linears of a QTIP or EXL3 checkpoint, multiplied as they are
    register_quantizers()                     from then on `from_pretrained` reads EXL3 and QTIP itself

QTIP's config.json does not say in transformers' way what it is: pass quantization_config=QtipConfig() too.
"""

from __future__ import annotations

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

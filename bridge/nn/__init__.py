"""Quantized weights under a `transformers` model: a GGUF's tensors, or a checkpoint's trellis codes.

    load("org/model", "model.gguf")           a model on a GGUF, without floats of its own
    replace_linears(model, "model.gguf")      linears, embedding and norms of a GGUF, in an existing model
    replace_trellis(model, "folder")          linears of a QTIP or EXL3 checkpoint, which stay coded
    prepare(model)                            compile for a GPU, or repack for the CPU, before the first use
    register_quantizers()                     afterwards `from_pretrained` reads EXL3 and QTIP itself
    register_gguf()                           afterwards it keeps GGUFs packed: `import bridge.transformers`

A torch model and a file go in; the same model with quantized modules comes out. Read `quant_linear.py` first.
QTIP's config.json has no label that transformers knows: pass quantization_config=QtipConfig() too.

Names are imported when first used: PyTorch, and what needs transformers only then.
"""

import importlib
from typing import Any

from bridge.system.cpu.row_threads import sleep_when_idle

sleep_when_idle()

_LAZY = {
    "Exl3Config": "transformers_quantizer", "PackedConfig": "gguf_quantizer", "QtipConfig": "transformers_quantizer",
    "QuantExperts": "quant_experts", "QuantEmbedding": "quant_linear", "QuantLinear": "quant_linear",
    "load": "hf_model", "prepare": "preparation", "register_gguf": "gguf_quantizer",
    "register_quantizers": "transformers_quantizer", "replace_linears": "placement",
    "replace_trellis": "trellis_linear",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bridge.nn' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"bridge.nn.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])

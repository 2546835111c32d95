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
from typing import TYPE_CHECKING, Any

from bridge.system.cpu.row_threads import sleep_when_idle

if TYPE_CHECKING:  # where the names come from, for editors and type checkers
    from bridge.nn.gguf_quantizer import PackedConfig, register_gguf
    from bridge.nn.hf_model import load
    from bridge.nn.placement import replace_linears
    from bridge.nn.preparation import prepare
    from bridge.nn.quant_experts import QuantExperts
    from bridge.nn.quant_linear import QuantEmbedding, QuantLinear
    from bridge.nn.transformers_quantizer import Exl3Config, QtipConfig, register_quantizers
    from bridge.nn.trellis_linear import replace_trellis

__all__ = [
    "Exl3Config",
    "PackedConfig",
    "QtipConfig",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "load",
    "prepare",
    "register_gguf",
    "register_quantizers",
    "replace_linears",
    "replace_trellis",
]

sleep_when_idle()

_LAZY = {
    "Exl3Config": "transformers_quantizer", "PackedConfig": "gguf_quantizer", "QtipConfig": "transformers_quantizer",
    "QuantExperts": "quant_experts", "QuantEmbedding": "quant_linear", "QuantLinear": "quant_linear",
    "load": "hf_model", "prepare": "preparation", "register_gguf": "gguf_quantizer",
    "register_quantizers": "transformers_quantizer", "replace_linears": "placement",
    "replace_trellis": "trellis_linear",
}  # fmt: skip


if not TYPE_CHECKING:  # for whom this would be a module with any name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'bridge.nn' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"bridge.nn.{_LAZY[name]}"), name)
        return value


def __dir__() -> list[str]:
    return __all__

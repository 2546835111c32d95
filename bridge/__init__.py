"""gguf-bridge: GPTQ and AWQ checkpoints become GGUF files without quantizing twice.

    bridge.convert("org/model-gptq", "model.gguf")        checkpoint -> GGUF; see bridge.convert
    bridge.convert_lora("adapter", "lora.gguf", base=...) a PEFT adapter -> GGUF
    bridge.open_checkpoint("folder")                      what is in a checkpoint, module by module
    bridge.open_gguf("model.gguf")                        a GGUF's tensors, ready to multiply
    bridge.Model.load("model.gguf")                       a language model, ready to generate text
    bridge.nn.replace_linears(model, "model.gguf")        a GGUF's weights under a transformers model
    bridge.nn.replace_trellis(model, "folder")            the same for a trellis-coded checkpoint
    bridge.verify("model.gguf", "folder")                 how close a GGUF on disk is to its checkpoint
    bridge.check_weights("model.gguf")                    zeroed, damaged and copied weights of any model
    bridge.quantize_gguf("org/model", "q4.gguf", "Q4_K")  a float model -> GGUF, with a calibration text
    bridge.quantize.gptq(module, batches)                 any torch module, quantized in place
    bridge.repack("model-gptq", "model-v2", "gptq_v2")    GPTQ v1 <-> v2, labels mended
    bridge.export("model.gguf", "folder", config="model") GGUF -> checkpoint, with its codes
    bridge.edit("model.gguf", metadata={"general.name": "New"}) a GGUF's keys, chat template and names
    bridge.upload(report, "org/name")                     what these made, with a model card, to the Hub

Everything is imported when first used, so `import bridge` costs nothing.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # where the names come from, for editors and type checkers
    from bridge import nn, quantize, trellis
    from bridge.checkpoint import open_checkpoint
    from bridge.conversion.checkpoints.export import export
    from bridge.conversion.checkpoints.repack import repack
    from bridge.conversion.converter import convert
    from bridge.conversion.edit import edit
    from bridge.conversion.lora import convert_lora
    from bridge.conversion.model import Model
    from bridge.conversion.planning.options import Budget
    from bridge.conversion.publish.upload import upload
    from bridge.conversion.quantize_gguf import quantize_gguf
    from bridge.conversion.weight_check.check import check_weights
    from bridge.conversion.writing.report import Report
    from bridge.conversion.writing.verify import verify
    from bridge.errors import BridgeError
    from bridge.quantize.settings import Calibration
    from bridge.runtime import open_gguf
    from bridge.runtime.quant_tensor import QuantTensor

__all__ = [
    "BridgeError",
    "Budget",
    "Calibration",
    "Model",
    "QuantTensor",
    "Report",
    "__version__",
    "check_weights",
    "convert",
    "convert_lora",
    "edit",
    "export",
    "nn",
    "open_checkpoint",
    "open_gguf",
    "quantize",
    "quantize_gguf",
    "repack",
    "trellis",
    "upload",
    "verify",
]
__version__ = "0.3.0"

_LAZY = {
    "BridgeError": "bridge.errors",
    "Budget": "bridge.conversion.planning.options",
    "Calibration": "bridge.quantize.settings",
    "QuantTensor": "bridge.runtime.quant_tensor",
    "Report": "bridge.conversion.writing.report",
    "check_weights": "bridge.conversion.weight_check.check",
    "convert": "bridge.conversion.converter",
    "convert_lora": "bridge.conversion.lora",
    "edit": "bridge.conversion.edit",
    "export": "bridge.conversion.checkpoints.export",
    "open_checkpoint": "bridge.checkpoint",
    "quantize_gguf": "bridge.conversion.quantize_gguf",
    "repack": "bridge.conversion.checkpoints.repack",
    "open_gguf": "bridge.runtime",
    "Model": "bridge.conversion.model",
    "upload": "bridge.conversion.publish.upload",
    "verify": "bridge.conversion.writing.verify",
}
_LAZY_MODULES = {"nn": "bridge.nn", "quantize": "bridge.quantize", "trellis": "bridge.trellis"}

# In a checkout, cuda/ stands beside bridge/ and is imported as bridge.cuda; beside an installed bridge/ it is NVIDIA's
if (Path(__file__).parent.parent / "cuda" / "decoder.py").is_file():
    __path__.append(str(Path(__file__).parent.parent))


if not TYPE_CHECKING:  # for whom this would be a module with any name

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            value = getattr(importlib.import_module(_LAZY[name]), name)
        elif name in _LAZY_MODULES:
            value = importlib.import_module(_LAZY_MODULES[name])
        else:
            raise AttributeError(f"module 'bridge' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__

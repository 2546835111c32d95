"""A `transformers` model with a GGUF's weights; the floats that the file replaces are never allocated.

model = bridge.nn.load("org/model", "model.gguf")
"""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.nn.preparation import prepare
from bridge.nn.quant_linear import replace_linears
from bridge.runtime import GGUFFile
from bridge.system.options import checked


@checked
def load(
    model_id_or_config: str | Path | Any, gguf: str | Path | GGUFFile, precision: str = "int8",
    dtype: torch.dtype = torch.float32, device: Any = "cpu",
) -> Any:  # fmt: skip
    """A transformers model for inference with a GGUF's weights: a Llama, Mistral, Qwen2 or Qwen3.

    model_id_or_config  a repository on the Hub, a folder with config.json, or a transformers config
    precision           of activations in products: see QuantLinear
    dtype               of everything between the products
    device              "cpu", "cuda", "cuda:1" ...; for a GPU, kernels are compiled

    Raises:
        BridgeError: there is no such config, the file is of another architecture or shape, or lacks a tensor.
    """
    import transformers

    config: Any = model_id_or_config
    source = str(config) if isinstance(config, str | Path) else None
    if source is not None:
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as problem:
            raise BridgeError(f"{source}: not a transformers config: {' '.join(str(problem).split())[:200]}") from None
    if getattr(config, "quantization_config", None) is not None:
        config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(dtype)
    except ValueError as problem:  # not one that transformers includes; code of a repository is never run
        raise BridgeError(
            f"{source or type(config).__name__}: transformers cannot build the model without running code from "
            f"elsewhere ({' '.join(str(problem).split())[:200]}); use a model that it includes"
        ) from None
    replace_linears(model, gguf, precision, prepare=device == "cpu")
    _make_rotary(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise BridgeError(
                f"{name}: {type(model).__name__} has it, but the GGUF does not; it belongs to another model"
            )
    if source is not None:
        with suppress(OSError):  # the end tokens may be listed only there
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    moved = model.to(device).eval()
    return moved if device == "cpu" else prepare(moved, dtype)


def _make_rotary(model: nn.Module) -> None:
    """The angles of rotary embeddings, which are in no file but follow from the config."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)) and hasattr(module, "config"):
            model.set_submodule(name, type(module)(config=module.config))

"""A `transformers` model with a GGUF's weights; the floats that the file replaces are never allocated.

model = bridge.nn.load("model.gguf")                    the config is made of the file's metadata
model = bridge.nn.load("org/model", "model.gguf")       or it is a checkpoint's
"""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.gguf_file.purpose import is_encoder
from bridge.models.gguf_config import add_rope_factors, config_of_gguf
from bridge.nn.decoder_cache import attach
from bridge.nn.placement import float32_names, replace_linears, rope_factors
from bridge.nn.preparation import prepare
from bridge.runtime import GGUFFile, open_gguf
from bridge.runtime.tokenizer import stop_tokens
from bridge.system.options import checked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.generation.utils import GenerateOutput

    class LanguageModel(PreTrainedModel):
        """A transformers model that generates, whatever its class."""

        def generate(self, *args: Any, **options: Any) -> GenerateOutput | torch.LongTensor: ...


@checked
def load(
    model_id_or_config: "str | Path | PretrainedConfig", gguf: str | Path | GGUFFile | None = None,
    precision: str = "int8", dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
) -> "LanguageModel":  # fmt: skip
    """Make a transformers model for inference with a GGUF's packed weights.

    model_id_or_config  a repository on the Hub, a folder with config.json, or a transformers config; or the GGUF
                        itself, whose metadata becomes the config
    gguf                the file, or an open one; None: the first argument is the GGUF
    precision           "int8" rounds the inputs of products to 8 bits in blocks, as ggml does; "f32" does not
    dtype               torch's dtype of activations between the products
    device              "cpu", "cuda", "cuda:1" ...; for a GPU, kernels are compiled

    Returns the model. Raises BridgeError where there is no such config, or the file is of another architecture or
    shape, or lacks a tensor.
    """
    import transformers

    config: Any = model_id_or_config
    of_file = config if gguf is None else gguf
    file = of_file if isinstance(of_file, GGUFFile) else open_gguf(of_file)
    if is_encoder(file.metadata):
        raise BridgeError(
            f"{file.path}: {file.arch} is an encoder, of which transformers makes no model that continues a text; "
            "bridge.Model.load makes vectors with it"
        )
    if gguf is None:
        config = _config_from(file)
    source = str(config) if isinstance(config, str | Path) else None
    if source is not None:
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as problem:
            raise BridgeError(f"{source}: not a transformers config: {' '.join(str(problem).split())[:200]}") from None
    if getattr(config, "quantization_config", None) is not None:
        config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    know_all_models()
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(dtype)
        _keep_float32(model)
    except ValueError as problem:  # not one that transformers includes; code of a repository is never run
        raise BridgeError(
            f"{source or type(config).__name__}: transformers cannot build the model without running code from "
            f"elsewhere ({' '.join(str(problem).split())[:200]}); use a model that it includes"
        ) from None
    _make_buffers(model)
    replace_linears(model, file, precision, prepare=device == "cpu")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise BridgeError(
                f"{name}: {type(model).__name__} has it, but the GGUF does not; give the config of the GGUF's own model"
            )
    if gguf is None:
        set_ends(model, file)
    if source is not None:
        with suppress(OSError):  # the end tokens may be listed only there
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    moved = model.to(device).eval()
    if device != "cpu":
        return prepare(moved, dtype)
    attach(moved, file, precision)
    return moved


def know_all_models() -> None:
    """Tell transformers (5.23) what it has but does not list.

    Mistral 4's language model for AutoModelForCausalLM; and the names of the tensors of MiniMax M3's, which are those
    of the whole model without the prefixes of its parts.
    """
    import transformers

    if hasattr(transformers, "MiniMaxM3VLForCausalLM"):
        from transformers import conversion_mapping as names

        conversions = names.get_checkpoint_conversion_mapping("minimax_m3_vl") or []
        inner = [entry for entry in conversions if not entry.source_patterns[0].startswith("^")]
        names.register_checkpoint_conversion_mapping("MiniMaxM3VLForCausalLM", inner, overwrite=True)
    if hasattr(transformers, "Mistral4ForCausalLM"):
        auto = transformers.AutoModelForCausalLM
        auto.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)


def _keep_float32(model: nn.Module) -> None:
    """Make those weights float32 again that transformers keeps so, such as biases that choose experts."""
    stays_float32 = float32_names(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if stays_float32(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def set_ends(model: Any, file: GGUFFile) -> None:
    """Let replies end where the file's tokenizer says."""
    model.generation_config.eos_token_id = stop_tokens(file.metadata) or None


def _config_from(file: GGUFFile) -> Any:
    import transformers

    values = config_of_gguf(file.metadata, file)
    add_rope_factors(values, rope_factors(file))
    model_type = values.pop("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise BridgeError(f"{file.path}: this version of transformers has no {model_type}; pip install -U transformers")
    return transformers.AutoConfig.for_model(model_type, **values)


def _make_buffers(model: nn.Module) -> None:
    """The angles of rotary embeddings and factors of embeddings, which are in no file but follow from the config.

    The weights are still on the meta device, where `_init_weights` leaves them.
    """
    waiting: list[tuple[nn.Module, str, torch.Tensor]] = []
    for name, module in list(model.named_modules()):
        buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        buffers = {key: buffer for key, buffer in buffers.items() if key in module._non_persistent_buffers_set}
        if buffers and hasattr(module, "config") and next(module.parameters(), None) is None:
            model.set_submodule(name, type(module)(config=module.config))
        elif hasattr(module, "scalar_embed_scale") and hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        elif buffers:
            for key, buffer in buffers.items():
                setattr(module, key, torch.full_like(buffer, torch.nan, device="cpu"))
            waiting += [(module, key, buffer) for key, buffer in buffers.items()]
    modules = {module for module, _, _ in waiting}
    for module in modules:
        owner: Any = module if hasattr(module, "_init_weights") else model
        owner._init_weights(module)
    if any(_is_unset(module, key) for module, key, _ in waiting):  # a model may make those of all its layers
        for inner in model.modules():
            if hasattr(inner, "_init_weights") and inner not in modules:
                inner._init_weights(inner)
    for module, key, buffer in waiting:
        if _is_unset(module, key):  # `load` refuses the model
            setattr(module, key, buffer)


def _is_unset(module: nn.Module, key: str) -> bool:
    return bool(torch.isnan(getattr(module, key)).any())

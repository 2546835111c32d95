"""GGUF files in `transformers`: `from_pretrained(folder, gguf_file=...)` keeps the weights packed and multiplies here.

transformers asks a quantizer for its part of `from_pretrained`; ours takes the place of its own for the architectures
that `bridge.models` knows, and leaves all others to it. Configs come from the same metadata that `convert` writes, so
architectures work that transformers does not map by itself, and the scaling of rotary embeddings is not lost.

    config       GGUF_CONFIG_ARCHS: `config_of_gguf` for each architecture
    tokenizer    transformers', with llama.cpp's cutting rules for every pre-tokenizer that `bridge.gguf_file` knows
    weights      `placement.Placement`: reserved in the skeleton, put in when all else is loaded
    saving       config, generation config and the GGUF itself, from which the folder is loaded again
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import GgufConfig

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import RULES
from bridge.gguf_file.reader import shards
from bridge.models.families import ALL
from bridge.models.gguf_config import add_rope_factors, config_of_gguf
from bridge.nn.decoder_cache import attach
from bridge.nn.hf_model import know_all_models, set_ends
from bridge.nn.placement import Placement, rope_factors
from bridge.nn.preparation import prepare
from bridge.runtime import GGUFFile, open_gguf
from bridge.runtime.tokenizer.bpe import pre_tokenizer
from bridge.system.operands import check_precision

try:
    from transformers.integrations.gguf import gguf_config_mapping, gguf_tokenizer_mapping
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
except ImportError as problem:
    raise BridgeError(
        "this version of transformers has no quantizer of GGUF files; pip install -U transformers"
    ) from problem

_ARCHITECTURES = {family.arch for family in ALL}


class PackedConfig(GgufConfig):
    """How a GGUF is loaded: `from_pretrained(folder, gguf_file=..., quantization_config=PackedConfig("f32"))`.

    precision  of activations in products: "int8" rounds them to 8 bits in blocks, as ggml does; "f32" does not
    """

    def __init__(self, precision: str = "int8", gguf_file: str | None = None, dequantize: bool = False, **more: Any):
        check_precision(precision)
        super().__init__(gguf_file, dequantize, **more)
        self.precision = precision


class PackedQuantizer(GgufHfQuantizer):
    """transformers' own, but for the architectures of `bridge.models` and unless floats are asked for."""

    file: GGUFFile | None = None  # ours to place
    placement: Placement

    def read_header(self, gguf_file: str) -> None:
        if self.quantization_config.dequantize:
            super().read_header(gguf_file)
            return
        file = open_gguf(gguf_file)
        if file.arch in _ARCHITECTURES:
            self.file = file
        else:
            super().read_header(gguf_file)

    def update_dtype(self, dtype: Any) -> Any:
        if self.file is None:
            return super().update_dtype(dtype)
        self.dtype = dtype or torch.float32
        return self.dtype

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        if self.file is None:
            return super()._process_model_before_weight_loading(model, **options)
        complete_rope(model, self.file)
        self.placement = Placement(model, self.file, getattr(self.quantization_config, "precision", "int8"))
        self.placement.reserve()
        return model

    def get_state_dict(self, checkpoint_file: str, model: Any) -> Any:
        if self.file is None:
            return super().get_state_dict(checkpoint_file, model)
        return self.placement.floats()

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        if self.file is None:
            return super().update_weight_conversions(weight_conversions, model)
        return []  # names are the model's already

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        return dtype if self.file is not None else super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if self.file is None:
            return super()._process_model_after_weight_loading(model, **options)
        self.placement.fill()
        prepare(model)
        set_ends(model, self.file)
        attach(model, self.file, self.placement.precision)
        model.save_pretrained = partial(save, model, self.file.path)
        return model


def complete_rope(model: Any, file: GGUFFile) -> None:
    """Put the frequencies' divisors, which are tensors of the file, into a skeleton's config and rotary embeddings."""
    factors = rope_factors(file)
    config = model.config.get_text_config()
    rules = getattr(config, "rope_parameters", None)
    if not factors or not rules or rules.get("rope_type", "default") != "default":
        return
    values = {"rope_parameters": dict(rules)}
    add_rope_factors(values, factors)
    config.rope_parameters = values["rope_parameters"]
    for name, module in list(model.named_modules()):
        if hasattr(module, "rope_type") and hasattr(module, "config"):
            model.set_submodule(name, type(module)(config=config))


def save(model: Any, file: Path, save_directory: str | Path, **options: Any) -> None:
    """config.json, generation_config.json and the GGUF that the model was loaded from, all shards of it.

    The folder is loaded by `from_pretrained(folder, gguf_file=<its name>)`. `options` are transformers', of which a
    packed model knows none but defaults.

    Raises BridgeError where the folder cannot be written, or for push_to_hub.
    """
    if options.get("push_to_hub"):
        raise BridgeError(f"{file}: push_to_hub does not take GGUF files; use bridge.upload")
    folder = Path(save_directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards(file):
            if not (folder / shard.name).exists() or not (folder / shard.name).samefile(shard):
                shutil.copyfile(shard, folder / shard.name)
    except OSError as problem:
        raise BridgeError(f"{folder}: cannot be written ({problem.strerror})") from problem
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _byte_level(original: Any, tokenizer: dict[str, Any]) -> Any:
    """transformers' tokenizer with the cutting rules that tokenizer.ggml.pre names."""
    converted = original(tokenizer)
    rules = RULES.get(str(tokenizer.get("pre_tokenizer_type")))
    if rules is not None and rules.byte_level:
        converted.backend_tokenizer.pre_tokenizer = pre_tokenizer(rules.of_tokenizer_json)
        converted.backend_tokenizer.model.ignore_merges = rules.ignore_merges
    return converted


def register_gguf() -> None:
    """Make transformers load GGUF files as this module does; a second call changes nothing."""
    if AUTO_QUANTIZER_MAPPING.get("gguf") is PackedQuantizer:
        return
    AUTO_QUANTIZER_MAPPING["gguf"] = PackedQuantizer
    know_all_models()
    gguf_config_mapping.GGUF_CONFIG_ARCHS.update(dict.fromkeys(_ARCHITECTURES, config_of_gguf))
    builders = gguf_tokenizer_mapping.GGUF_TOKENIZER_TYPES
    builders["gpt2"] = partial(_byte_level, builders["gpt2"])

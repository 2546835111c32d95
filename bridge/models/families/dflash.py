"""DFlash drafters: layers of Qwen3 that guess a block of a model's next tokens at once.

They read states of some of the model's layers, which `fc` fuses, as keys and values of the text, and masked tokens as
queries. Embeddings and head are the model's, unless the file has its own.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.eagle3 import listed_target_layers, target_of
from bridge.models.family import (
    EMBEDDINGS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    decoder,
    gated_mlp,
    pre_norm_attention,
)

_WINDOWED = "sliding_attention"


def _dflash_keys(config: Config) -> dict[str, Any]:
    """The keys of dflash_config."""
    dflash_keys = config.get("dflash_config") or {}
    if not isinstance(dflash_keys, dict):
        raise BridgeError(f"{config.path}: dflash_config is {dflash_keys!r:.80}, must be an object")
    return dflash_keys


def _target_layers(config: Config) -> list[int]:
    """The layers whose inputs are read; config.json names those before, whose outputs they are."""
    key = "target_layer_ids"
    layers = listed_target_layers(config, _dflash_keys(config).get(key, config.get(key)), key)
    count = target_of(config).integer("num_hidden_layers")
    if not layers or max(layers) >= count - 1:
        raise BridgeError(f"{config.path}: {key} is {layers}; llama.cpp reads states after layers 0 to {count - 2}")
    return [layer + 1 for layer in layers]


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    if (config.path.parent / "mask_embedding.pt").is_file():
        raise BridgeError(f"{config.path.parent}: an embedding of the mask in a file of its own cannot be carried")
    return {"fused": len(_target_layers(config)) * args.hidden}


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    dflash_keys, keys = _dflash_keys(config), dict[str, Any]()
    layers = Config({**config.values, **dflash_keys}, config.path)  # dflash_config comes first
    keys["block_size"] = layers.integer("block_size", 16)
    keys["target_layers"] = _target_layers(config)
    if (mask := dflash_keys.get("mask_token_id")) is not None:
        keys["tokenizer.ggml.mask_token_id"] = layers.count("mask_token_id", mask)
        if mask >= args.vocab:
            raise BridgeError(f"{config.path}: mask_token_id is {mask}; must be one of the {args.vocab} tokens")
    for key, name in (
        ("logit_scale", "output_multiplier"), ("final_logit_softcapping", "final_logit_softcapping"),
        ("embedding_scale", "input_embedding_scale"),
    ):  # fmt: skip
        if layers.get(name):
            keys[key] = layers.number(name)
    if (window := dflash_keys.get("swa_window_size") or config.get("sliding_window")) and (
        config.get("use_sliding_window") or dflash_keys.get("use_swa")
    ):
        kinds = config.get("layer_types") or ()
        keys["attention.sliding_window"] = layers.integer("swa_window_size", window)
        keys["attention.sliding_window_pattern"] = (
            [True] * args.layers if dflash_keys.get("use_swa") else [kind == _WINDOWED for kind in kinds]
        )
    causal = config.get("is_causal", dflash_keys.get("causal"))
    if causal is not None:
        keys["attention.causal"] = bool(causal)
    if "mrope_section" in rope_rules(target_of(config)):  # its tokens have three positions; those of text are equal
        keys["rope.dimension_sections"] = [args.head_dim // 2, 0, 0, 0]
    return keys


DFLASH = Family(
    titles=("DFlash drafters",), arch="dflash", named_as="qwen3", drafter=True, needs_target=True,
    architectures=("DFlashDraftModel",), model_type="dflash",
    keys={"max_position_embeddings": 32768},
    expects=(
        SILU, NO_BIASES,
        Expected("rope_is_neox_style", (True,), "llama.cpp's graph for this architecture turns halves of heads"),
    ),
    sizes=_sizes,
    metadata=(Computed(_metadata),),
    bare=True,
    divided=True,
    table=(
        *decoder(
            *pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
            *gated_mlp("mlp", "inner"),
            first=(replace(EMBEDDINGS, optional=True),),
            head=Row("lm_head", "vocab hidden", optional=True),
        ),
        Row("model.fc", "hidden fused", name="fc.weight"),
        Row("model.hidden_norm", "hidden", name="enc.output_norm.weight"),
    ),
)  # fmt: skip

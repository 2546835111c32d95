"""A family's keys both ways: the config.json of its small model, as GGUF metadata, and as a config.json again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.errors import BridgeError
from bridge.models import describe_model
from bridge.models.gguf_config import ROPE_FACTORS, add_rope_factors, add_told, config_of_gguf
from bridge.models.outline import Outline
from tests.models.test_families import CASES, CONFIG, TENSOR_NAME
from tests.support.drafter_models import DRAFTERS
from tests.support.family_models import copy_tokenizer
from tests.support.make_families import GOLDENS

GOLDEN = {
    path.stem: json.loads(path.read_text()) for path in sorted(GOLDENS.glob("*.json")) if path.stem not in DRAFTERS
}
# config.json, and the names of the tensors with their shapes, if these are known
MODELS = {name: (golden["config"], golden["checkpoint"]) for name, golden in GOLDEN.items()} | {
    title: (
        {key: value for key, value in (CONFIG | config).items() if value is not None},
        sorted({*TENSOR_NAME.findall("\n".join(lines))}),
    )
    for title, config, lines in CASES
}
# keys that come back with another value: the tokenizer knows it, or several values make the same GGUF
KIND = {"model_type", "architectures"}
LAYERS = {"layers_block_type", "intermediate_size", "max_position_embeddings"}
OTHERS: dict[str, set[str]] = {
    "apertus": {"original_max_position_embeddings"},  # no frequency is between the two factors
    "gemma3n": {"intermediate_size"},  # a list of equal ones
    "gemma4-dense": {"vocab_size_per_layer_input"}, "gemma4-moe": {"vocab_size_per_layer_input"},  # they have none
    "glm4-moe-lite": KIND, "glm4-moe-lite-mtp": {*KIND, "num_nextn_predict_layers"}, "solar-open": KIND,
    "gpt2": {"n_inner"},  # null
    "granite-4": {"max_position_embeddings"}, "mamba2": {"max_position_embeddings"},
    "hunyuan": {"max_position_embeddings", "rope_theta", "rope_type"}, "hunyuan-moe": {"moe_topk", "num_shared_expert"},
    "hy-v4": {"num_key_value_heads"},  # which its attention does not have
    "lfm2": {"intermediate_size", "block_auto_adjust_ff_dim"},
    "nemotron-3-super": LAYERS, "nemotron-3-super-mtp": LAYERS, "nemotron-h-moe": LAYERS,
    "qwen4exp": {"ngram_vocab_size_base", "split_ngram_parts"},  # the first prime; by the size of the table
    "phimoe": {"architectures"}, "Gemma 4 12B, whose layers have heads of one size": {"architectures"},
    "qwen2_moe, tied": {"tie_word_embeddings"},  # llama.cpp wants a head of its own
}  # fmt: skip
OF_PARTS = {"tie_word_embeddings", "model_type"}  # the whole model's, and that of a language model alone
REPEATED = {"deepseek2.nextn_predict_layers", "deepseek2.block_count"}  # DeepSeek V3's are dropped, GLM-4.7-Flash's not
UNSCALED = "hunyuan-dense.rope.scaling."  # of type none


def told_otherwise(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """The keys with different values in two configs that have both; of floats as a GGUF has them."""
    keys: set[str] = set()
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict) and isinstance(second[key], dict):
            keys |= told_otherwise(first[key], second[key])
        elif first[key] != (pytest.approx(second[key]) if isinstance(second[key], float) else second[key]):
            keys.add(key)
    return keys


def own_keys(outline: Outline) -> dict[str, Any]:
    arch = outline.metadata["general.architecture"].value
    keys = {key: field.value for key, field in outline.metadata.items() if key.startswith(f"{arch}.")}
    return {key: value for key, value in keys.items() if key not in REPEATED and not key.startswith(UNSCALED)}


def config_of(outline: Outline) -> dict[str, Any]:
    tensors = {tensor.name: tensor for tensor in outline.tensors}
    metadata = {key: field.value for key, field in outline.metadata.items()}
    config = config_of_gguf(metadata, tensors)
    add_told(config, metadata, lambda name: tensors[name].data)
    factors = {name: tensors[f"{name}.weight"].data for name in ROPE_FACTORS if f"{name}.weight" in tensors}
    add_rope_factors(config, {name: data for name, data in factors.items() if data is not None})
    return config


def test_a_vector_of_several_values_is_no_number_of_a_config() -> None:
    metadata = {"general.architecture": "muse-glimmer"}
    with pytest.raises(BridgeError, match=r"blk\.0\.attn_q_norm\.weight: has several values, but .* qk_scale_factor"):
        add_told({}, metadata, lambda _name: np.array([1, 2], np.float32))


def test_the_bounds_of_ling_3s_experts_come_back_layer_by_layer(tmp_path: Path) -> None:
    config, names = MODELS["ling3-mtp"]
    limits = {"expert_swiglu_limit_list": [None, 7.0, 7, None], "share_expert_swiglu_limit_list": [0.0, 5.5]}
    outline = describe_model({**config, **limits}, copy_tokenizer(tmp_path), names)
    keys = own_keys(outline)
    assert keys["bailingmoe3.swiglu_clamp_exp"] == [0.0, 7.0, 7.0, 0.0, 0.0]
    assert keys["bailingmoe3.swiglu_clamp_shexp"] == [0.0, 5.5, 0.0, 0.0, 0.0]
    back = config_of(outline)
    assert back["expert_swiglu_limit_list"] == [None, 7.0, 7.0, None, None]
    assert own_keys(describe_model(back, tmp_path, names)) == keys


@pytest.mark.parametrize("name", MODELS)
def test_a_config_comes_back_from_the_metadata_that_is_made_of_it(name: str, tmp_path: Path) -> None:
    """What it says, and what is made of it again, of a language model alone."""
    config, names = MODELS[name]
    if isinstance(names, dict):  # without DeepSeek V4's scales
        fp4 = {key for key in names if f"{key.removesuffix('.scale')}.weight" in names}
        names = {key: shape for key, shape in names.items() if key.endswith(".weight") or key not in fp4}
    outline = describe_model(config, copy_tokenizer(tmp_path), names)
    back = config_of(outline)
    inner = config.get("text_config", config)
    others = OTHERS.get(name, set()) | {"pad_token_id"} | (OF_PARTS if inner is not config else set())
    assert told_otherwise(inner, back) <= others
    if inner is config and "tie_word_embeddings" not in others:
        assert own_keys(describe_model(back, tmp_path, names)) == own_keys(outline)

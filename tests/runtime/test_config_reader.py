"""The numbers of a decoder, read from a GGUF's metadata."""

from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import DecoderConfig

KEYS = {
    "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64, "expert_count": 4,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "expert_used_count": 2,
}  # fmt: skip


def read(**changes: Any) -> DecoderConfig:
    metadata = {f"qwen3moe.{key}": value for key, value in KEYS.items()}
    return read_config({"general.architecture": "qwen3moe", **metadata, **changes}, Path("model.gguf"))


@pytest.mark.parametrize(("key", "value"), [
    ("tokenizer.ggml.tokens", 300), ("qwen3moe.attention.head_count_kv", [[1]]), ("qwen3moe.feed_forward_length", "x"),
    ("qwen3moe.feed_forward_length", ["a", "b"]), ("qwen3moe.expert_gating_func", [1]),
    ("qwen3moe.leading_dense_block_count", float("inf")), ("qwen3moe.nextn_predict_layers", -(10**9)),
    ("qwen3moe.nextn_predict_layers", 2), ("qwen3moe.rope.freq_base", [1]),
    ("qwen3moe.attention.shared_kv_layers", 2), ("qwen3moe.attention.shared_kv_layers", 10**9),
    ("qwen3moe.attention.shared_kv_layers", "x"), ("qwen3moe.swiglu_clamp_exp", [0.5]),
    ("qwen3moe.swiglu_clamp_shexp", ["a", "b"]),
])  # fmt: skip
def test_values_of_the_wrong_kind_are_refused(key: str, value: Any) -> None:
    read()
    with pytest.raises(BridgeError, match=r"model\.gguf: .*; convert the model again"):
        read(**{key: value})


def test_limits_that_are_nearly_zero_are_none_as_in_llama_cpp() -> None:
    config = read(**{"qwen3moe.swiglu_clamp_exp": [1e-6, 0.5], "qwen3moe.swiglu_clamp_shexp": 0.0})
    assert config.limits == ((0.0, 0.0), (0.5, 0.0))


def test_layers_of_one_kind_with_other_heads_of_keys_are_refused() -> None:
    with pytest.raises(BridgeError, match=r"head_count_kv is \[4, 2\]; attention must be alike in all layers"):
        read(**{"qwen3moe.attention.head_count_kv": [4, 2]})


def test_heads_of_queries_are_read_of_layers_that_predict_too() -> None:
    config = read(**{
        "qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1, "qwen3moe.attention.head_count": [4, 8, 2],
        "qwen3moe.attention.head_count_kv": 2,
    })  # fmt: skip
    assert [config.query_heads_of(layer) for layer in range(3)] == [4, 8, 2]

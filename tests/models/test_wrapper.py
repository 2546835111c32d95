"""The language model inside a model of several parts: names of the whole model, given a GGUF of the language model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import BridgeError
from bridge.models import tensors_of_gguf
from bridge.models.wrapper import name_in_parts, text_names

CONFIG = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {},
    "text_config": {
        "model_type": "mistral", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip
STORED = {
    "token_embd.weight": (96, 32), "output.weight": (96, 32), "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (64, 32), "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (
            "Qwen2_5_VLForConditionalGeneration",
            ["model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.visual.merger.mlp.0.weight"],
        ),
        (
            "Llama4ForConditionalGeneration",
            [
                "language_model.model.layers.0.mlp.up_proj.weight", "language_model.lm_head.weight",
                "visual.merger.mlp.0.weight",
            ],
        ),
    ],
)  # fmt: skip
def test_names_of_a_whole_model_are_those_that_transformers_writes(architecture: str, names: list[str]) -> None:
    config = {"architectures": [architecture]}
    own = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "visual.merger.mlp.0.weight"]
    assert [name_in_parts(name, config) for name in own] == names
    found, others = text_names(names)
    assert [*found.values(), *others] == names
    assert list(found) == own[:2]


@pytest.mark.parametrize("arch", ["mistral3", "llama"])
def test_a_gguf_may_have_the_architecture_of_the_language_model_inside(arch: str) -> None:
    """Mistral Small 3.1 was a Llama to llama.cpp before it was a Mistral 3."""
    found = {tensor.name: tensor.parts[0] for tensor in tensors_of_gguf(CONFIG, Path("folder"), STORED, arch)}
    assert found.keys() == STORED.keys()
    assert found["blk.0.attn_q.weight"].source == "model.language_model.layers.0.self_attn.q_proj.weight"
    assert found["blk.0.attn_q.weight"].rows is not None  # llama.cpp's order of rotated rows
    assert found["output.weight"].source == "lm_head.weight"


def test_a_gguf_of_another_architecture_than_the_config_is_refused() -> None:
    with pytest.raises(BridgeError, match=r"is of a mistral3 model, but the GGUF's architecture is qwen2"):
        tensors_of_gguf(CONFIG, Path("folder"), STORED, "qwen2")

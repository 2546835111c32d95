"""Small float checkpoints with a layer that predicts a further token, of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.encode import load_floats
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.make_families import add_prediction, as_ling3

# sides of whole groups of 32
GROUPS_OF_32: dict[str, dict[str, Any]] = {
    "glm4-moe": {"moe_intermediate_size": 32},
    "glm4-moe-lite": {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{name: {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16} for name in ("glm5", "deepseek3.2")},
    "exaone-moe": {"moe_intermediate_size": 32}, "cohere2-moe": {}, "hy3": {"moe_intermediate_size": 32},
    "glm5-next": {},
    "ling3": {"moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16},
    "nemotron-h-moe": {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    "nemotron-3-super": {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32},
    "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}  # fmt: skip


def save_predicting(name: str, folder: Path, **fields: Any) -> Path:
    """A checkpoint of one of GROUPS_OF_32."""
    model = randomized(new_model(name, **GROUPS_OF_32[name], **fields))
    model.save_pretrained(folder, save_original_format=True)
    copy_tokenizer(folder)
    weights = load_floats(folder)
    if name == "ling3":
        weights = {published: weights[key] for key, published in as_ling3(weights).items()}
    shapes = {key: weight.shape for key, weight in weights.items()}
    add_prediction(name, folder, shapes)
    rng = np.random.default_rng(0)
    for key in sorted(shapes.keys() - weights.keys()):
        shape = shapes[key]
        values = rng.normal(1, 0.1, shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)
        weights[key] = values.astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder

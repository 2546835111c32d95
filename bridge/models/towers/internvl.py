"""InternVL's tower: InternViT, whose patches are shuffled and projected.

Names are those of InternVLChatModel, with q, k and v in one matrix, or of transformers.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.towers.tower import Row, Tower, Vision, qkv

_LAYER, _CHAT = "vision_tower.encoder.layer.{}", "vision_model.encoder.layers.{}"
_EMBEDDINGS, _CHAT_EMBEDDINGS = "vision_tower.embeddings", "vision_model.embeddings"


def _intern_vit(vision: Vision) -> dict[str, Any]:
    tower, model = vision.tower, vision.model
    act = tower.get("hidden_act", "gelu")
    tower.expect("hidden_act", ("gelu", "silu"), "gelu", "llama.cpp's graph has no other")
    tower.expect("use_qk_norm", (False,), False, "norms of q and k are not in the table")
    ratio = model.get("downsample_ratio")
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise BridgeError(f"{model.path}: downsample_ratio is {ratio!r}, must be above 0 and at most 1")
    keys = {
        "vision.attention.layer_norm_epsilon": tower.number("layer_norm_eps"),
        f"use_{act}": True,
        "vision.projector.scale_factor": int(1 / ratio),
    }
    for end in ("min", "max"):
        if type(count := model.get(f"{end}_dynamic_patch", 0)) is int and count > 0:
            keys[f"vision.preproc_{end}_tiles"] = count
    return keys


INTERNVL = Tower(
    architectures=("InternVLChatModel", "InternVLForConditionalGeneration"), projector="internvl",
    metadata=_intern_vit,
    table=(
        Row(
            f"{_EMBEDDINGS}.cls_token", "v.class_embd", (f"{_CHAT_EMBEDDINGS}.class_embedding",), kind="F32", exact=True
        ),
        Row(
            f"{_EMBEDDINGS}.patch_embeddings.projection", "v.patch_embd.weight",
            (f"{_CHAT_EMBEDDINGS}.patch_embedding",), bias=True, kind="patches",
        ),
        Row(
            f"{_EMBEDDINGS}.position_embeddings", "v.position_embd.weight", (f"{_CHAT_EMBEDDINGS}.position_embedding",),
            kind="F32", exact=True,
        ),
        Row(f"{_LAYER}.layernorm_before", "v.blk.{}.ln1.weight", (f"{_CHAT}.norm1",), bias=True),
        *qkv(f"{_CHAT}.attn.qkv", f"{_LAYER}.attention.*_proj", bias=None),
        Row(f"{_LAYER}.attention.projection_layer", "v.blk.{}.attn_out.weight", (f"{_CHAT}.attn.proj",), bias=True),
        Row(f"{_LAYER}.lambda_1", "v.blk.{}.ls1.weight", (f"{_CHAT}.ls1",), exact=True),
        Row(f"{_LAYER}.layernorm_after", "v.blk.{}.ln2.weight", (f"{_CHAT}.norm2",), bias=True),
        Row(f"{_LAYER}.mlp.fc1", "v.blk.{}.ffn_up.weight", (f"{_CHAT}.mlp.fc1",), bias=True),
        Row(f"{_LAYER}.mlp.fc2", "v.blk.{}.ffn_down.weight", (f"{_CHAT}.mlp.fc2",), bias=True),
        Row(f"{_LAYER}.lambda_2", "v.blk.{}.ls2.weight", (f"{_CHAT}.ls2",), exact=True),
        Row("multi_modal_projector.layer_norm", "mm.model.mlp.0.weight", ("mlp1.0",), bias=True),
        Row("multi_modal_projector.linear_1", "mm.model.mlp.1.weight", ("mlp1.1",), bias=True),
        Row("multi_modal_projector.linear_2", "mm.model.mlp.3.weight", ("mlp1.3",), bias=True),
    ),
)  # fmt: skip

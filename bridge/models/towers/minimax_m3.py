"""The tower of MiniMax M3: patches of two frames, a projector, and an MLP that merges patches.

A third of a head's rotated elements turns with the time, one with the height and one with the width of a patch. The
model has the first halves of all three and then the second halves, llama.cpp both halves of each together.
"""

from typing import Any

import numpy as np

from bridge.models.towers.tower import Row, Tower, Vision


def _by_axis(heads: int, size: int) -> np.ndarray:
    """The rows of q or k of `heads` heads, `size` elements each, in llama.cpp's order."""
    half = size // 6  # of what an axis rotates
    rotated = np.arange(6 * half).reshape(2, 3, half).transpose(1, 0, 2).reshape(-1)
    each = np.concatenate([rotated, np.arange(6 * half, size)])
    return (size * np.arange(heads)[:, None] + each).reshape(-1)


def _metadata(vision: Vision) -> dict[str, Any]:
    compression = vision.tower.get("img_token_compression_config", {})
    return {
        "use_gelu": True, "vision.attention.layer_norm_epsilon": vision.tower.number("layer_norm_eps", 1e-5),
        "vision.spatial_merge_size": vision.tower.integer(
            "spatial_merge_size", compression.get("spatial_merge_size", 2)
        ),
    }  # fmt: skip


_MODEL = "vision_tower.vision_model"
_LAYER = f"{_MODEL}.encoder.layers.{{}}"

MINIMAX_M3 = Tower(
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration"),
    projector="minimax_m3",
    metadata=_metadata,
    table=(
        Row(f"{_MODEL}.embeddings.patch_embedding", "v.patch_embd.weight", kind="patches", change="frame 0"),
        Row(f"{_MODEL}.embeddings.patch_embedding", "v.patch_embd.weight.1", kind="patches", change="frame 1"),
        Row(f"{_MODEL}.pre_layrnorm", "v.pre_ln.weight", bias=True),
        Row(f"{_LAYER}.layer_norm1", "v.blk.{}.ln1.weight", bias=True),
        Row(f"{_LAYER}.self_attn.q_proj", "v.blk.{}.attn_q.weight", bias=True, order=_by_axis),
        Row(f"{_LAYER}.self_attn.k_proj", "v.blk.{}.attn_k.weight", bias=True, order=_by_axis),
        Row(f"{_LAYER}.self_attn.v_proj", "v.blk.{}.attn_v.weight", bias=True),
        Row(f"{_LAYER}.self_attn.out_proj", "v.blk.{}.attn_out.weight", bias=True),
        Row(f"{_LAYER}.layer_norm2", "v.blk.{}.ln2.weight", bias=True),
        Row(f"{_LAYER}.mlp.fc1", "v.blk.{}.ffn_up.weight", bias=True),
        Row(f"{_LAYER}.mlp.fc2", "v.blk.{}.ffn_down.weight", bias=True),
        Row("multi_modal_projector.linear_1", "mm.1.weight", bias=True),
        Row("multi_modal_projector.linear_2", "mm.2.weight", bias=True),
        Row("patch_merge_mlp.linear_1", "mm.merger.fc1.weight", bias=True),
        Row("patch_merge_mlp.linear_2", "mm.merger.fc2.weight", bias=True),
    ),
)  # fmt: skip

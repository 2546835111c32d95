"""The tower of GLM-4.1V to 4.6V: RMS norms and gated networks, a convolution that merges patches, a projector.

That of GLM-5.3 Flash normalizes heads of q and k instead of embedded patches, has no table of positions, and clamps
what its networks multiply.
"""

from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.models.towers.tower import Row, Tower, Vision

_BLOCK = "visual.blocks.{}"


def _metadata(vision: Vision) -> dict[str, Any]:
    activation = vision.tower.get("hidden_act", "silu")
    return {
        **({f"use_{activation}": True} if activation in ("silu", "gelu") else {}),
        "vision.attention.layer_norm_epsilon": vision.tower.number("rms_norm_eps", 1e-5),
    }


def _clamped_metadata(vision: Vision) -> dict[str, Any]:
    side, merge = vision.tower.integer("patch_size"), vision.tower.integer("spatial_merge_size", 2)
    keys = {
        **_metadata(vision), "vision.spatial_merge_size": merge,
        "vision.swiglu_clamp": vision.tower.number("swiglu_limit", 10.0),
    }  # fmt: skip
    for key, name in (("min_image_tokens", "image_min_pixels"), ("max_image_tokens", "image_max_pixels")):
        tokens = vision.processor.get(key)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise BridgeError(
                f"{vision.folder / 'preprocessor_config.json'}: {key} is {tokens!r}, must be a number of tokens; take "
                f"the original model's, or {parameter('mmproj_type', 'none')} to convert the language model alone"
            )
        keys[f"vision.{name}"] = tokens * (side * merge) ** 2
    return keys


_PATCHES = (
    Row("visual.patch_embed.proj", "v.patch_embd.weight", bias=None, kind="patches", change="frame 0"),
    Row("visual.patch_embed.proj", "v.patch_embd.weight.1", kind="patches", change="frame 1"),
)
_ATTENTION = (
    Row(f"{_BLOCK}.norm1", "v.blk.{}.ln1.weight"),
    Row(f"{_BLOCK}.attn.qkv", "v.blk.{}.attn_qkv.weight", bias=None),
    Row(f"{_BLOCK}.attn.proj", "v.blk.{}.attn_out.weight", bias=None),
    Row(f"{_BLOCK}.norm2", "v.blk.{}.ln2.weight"),
)
_NETWORK = tuple(
    Row(f"{_BLOCK}.mlp.{part}_proj", f"v.blk.{{}}.ffn_{part}.weight", bias=None) for part in ("gate", "up", "down")
)
_MERGER = (
    Row("visual.post_layernorm", "v.post_ln.weight"),
    Row("visual.downsample", "mm.patch_merger.weight", bias=True, kind="patches"),
    Row("visual.merger.proj", "mm.model.fc.weight"),
    Row("visual.merger.post_projection_norm", "mm.post_norm.weight", bias=True),
    *(Row(f"visual.merger.{part}_proj", f"mm.{part}.weight") for part in ("gate", "up", "down")),
)

GLM4V = Tower(
    architectures=("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"), projector="glm4v",
    names={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    metadata=_metadata,
    table=(
        *_PATCHES,
        Row("visual.post_conv_layernorm", "v.norm_embd.weight"),
        Row("visual.embeddings.position_embedding", "v.position_embd.weight", kind="F32"),
        *_ATTENTION,
        *_NETWORK,
        *_MERGER,
    ),
)  # fmt: skip

GLM5V = Tower(
    architectures=("Glm5NextForConditionalGeneration",), projector="glm5v", names=GLM4V.names,
    metadata=_clamped_metadata,
    table=(
        *_PATCHES,
        *_ATTENTION,
        Row(f"{_BLOCK}.attn.q_norm", "v.blk.{}.attn_q_norm.weight"),
        Row(f"{_BLOCK}.attn.k_norm", "v.blk.{}.attn_k_norm.weight"),
        *_NETWORK,
        *_MERGER,
    ),
)  # fmt: skip

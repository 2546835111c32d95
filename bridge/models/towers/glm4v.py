"""The tower of GLM-4.1V to 4.6V: RMS norms and gated networks, a convolution that merges patches, a projector."""

from typing import Any

from bridge.models.towers.tower import Row, Tower, Vision

_BLOCK = "visual.blocks.{}"


def _metadata(vision: Vision) -> dict[str, Any]:
    activation = vision.tower.get("hidden_act", "silu")
    return {
        **({f"use_{activation}": True} if activation in ("silu", "gelu") else {}),
        "vision.attention.layer_norm_epsilon": vision.tower.number("rms_norm_eps", 1e-5),
    }


GLM4V = Tower(
    architectures=("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"), projector="glm4v",
    names={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    metadata=_metadata,
    table=(
        Row("visual.patch_embed.proj", "v.patch_embd.weight", bias=None, kind="patches", change="frame 0"),
        Row("visual.patch_embed.proj", "v.patch_embd.weight.1", kind="patches", change="frame 1"),
        Row("visual.post_conv_layernorm", "v.norm_embd.weight"),
        Row("visual.embeddings.position_embedding", "v.position_embd.weight", kind="F32"),
        Row(f"{_BLOCK}.norm1", "v.blk.{}.ln1.weight"),
        Row(f"{_BLOCK}.attn.qkv", "v.blk.{}.attn_qkv.weight", bias=None),
        Row(f"{_BLOCK}.attn.proj", "v.blk.{}.attn_out.weight", bias=None),
        Row(f"{_BLOCK}.norm2", "v.blk.{}.ln2.weight"),
        Row(f"{_BLOCK}.mlp.gate_proj", "v.blk.{}.ffn_gate.weight"),
        Row(f"{_BLOCK}.mlp.up_proj", "v.blk.{}.ffn_up.weight"),
        Row(f"{_BLOCK}.mlp.down_proj", "v.blk.{}.ffn_down.weight"),
        Row("visual.post_layernorm", "v.post_ln.weight"),
        Row("visual.downsample", "mm.patch_merger.weight", bias=True, kind="patches"),
        Row("visual.merger.proj", "mm.model.fc.weight"),
        Row("visual.merger.post_projection_norm", "mm.post_norm.weight", bias=True),
        Row("visual.merger.gate_proj", "mm.gate.weight"),
        Row("visual.merger.up_proj", "mm.up.weight"),
        Row("visual.merger.down_proj", "mm.down.weight"),
    ),
)  # fmt: skip

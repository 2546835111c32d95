"""The towers of Qwen2-VL, Qwen2.5-VL, and of Qwen3-VL, which Qwen3.5 has too; of EXAONE 4.5, which is Qwen2.5-VL's with
fewer heads of keys.

A patch is two frames of a video, of one image twice: a Conv3d, which llama.cpp has as two Conv2d. Qwen3-VL adds the
outputs of some layers (deepstack) to the language model's first layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.models.config.model_config import Config
from bridge.models.towers.tower import Row, Tower, Vision, qkv
from bridge.system.fields import table

_PATCHES = (
    Row("visual.patch_embed.proj", "v.patch_embd.weight", bias=None, kind="patches", change="frame 0"),
    Row("visual.patch_embed.proj", "v.patch_embd.weight.1", kind="patches", change="frame 1"),
)
_BLOCK = "visual.blocks.{}"


def _merged_sizes(vision: Vision) -> dict[str, Any]:
    return {
        "vision.image_size": vision.tower.integer("image_size", 560),
        "vision.attention.layer_norm_epsilon": vision.model.number("rms_norm_eps", 1e-6),
    }


def _windows(vision: Vision) -> dict[str, Any]:
    """Every n-th layer sees the whole image, the others windows of it."""
    full = vision.tower.get("fullatt_block_indexes")
    if not isinstance(full, list) or not full or not all(type(n) is int for n in full):
        raise BridgeError(f"{vision.tower.path}: fullatt_block_indexes is {full!r}, must be a list of layers")
    every = full[0] + 1
    if full != list(range(every - 1, full[-1] + 1, every)):
        raise BridgeError(f"{vision.tower.path}: fullatt_block_indexes is {full}; llama.cpp has every n-th layer only")
    return {**_merged_sizes(vision), "use_silu": True, "vision.n_wa_pattern": every}


def _exaone(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    keys = {
        **_windows(vision),
        "vision.attention.head_count_kv": tower.integer("num_key_value_heads", 8),
        "vision.attention.layer_norm_epsilon": tower.number("rms_norm_eps", vision.model.number("rms_norm_eps", 1e-6)),
        "vision.window_size": tower.integer("window_size", 112),
    }
    sides = table(vision.processor.get("size"))
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):  # as transformers 5 names them
        pixels = vision.processor.get(key) or sides.get(edge)
        if type(pixels) is not int or pixels < 1:
            raise BridgeError(
                f"{vision.folder / 'preprocessor_config.json'}: {key} is {pixels!r}, must be a number of pixels; take "
                f"the file of the original model, or {parameter('mmproj_type', 'none')} to convert the language model "
                "alone"
            )
        keys[f"vision.image_{key}"] = pixels
    return keys


def _deepstack(config: Config) -> list[int]:
    layers = config.get("deepstack_visual_indexes", [])
    count = config.repeats("num_hidden_layers")
    if not isinstance(layers, list) or not all(type(n) is int and 0 <= n < count for n in layers):
        raise BridgeError(f"{config.path}: deepstack_visual_indexes is {layers!r}, must be a list of layers")
    return layers


def _deepstack_layers(config: Config) -> Sequence[tuple[int, int]]:
    return list(enumerate(_deepstack(config)))


def _qwen3(vision: Vision) -> dict[str, Any]:
    tower, text = vision.tower, vision.model.get("text_config", {})
    side = int(tower.integer("num_position_embeddings", 2304) ** 0.5)
    layers = _deepstack(tower)
    return {
        "vision.image_size": tower.integer("image_size", side * tower.integer("patch_size", 16)),
        "vision.attention.layer_norm_epsilon": float(text.get("rms_norm_eps", 1e-6)),
        "vision.spatial_merge_size": tower.integer("spatial_merge_size", 2),
        "vision.is_deepstack_layers": [i in layers for i in range(tower.repeats("num_hidden_layers"))],
        "use_gelu": True,
    }


QWEN2_VL = Tower(
    architectures=("Qwen2VLForConditionalGeneration",), projector="qwen2vl_merger",
    names={
        "hidden_size": "embed_dim", "intermediate_size": "hidden_size", "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
    },
    metadata=_merged_sizes,
    table=(
        *_PATCHES,
        Row(f"{_BLOCK}.norm1", "v.blk.{}.ln1.weight", bias=True),
        *qkv(f"{_BLOCK}.attn.qkv"),
        Row(f"{_BLOCK}.attn.proj", "v.blk.{}.attn_out.weight", bias=True),
        Row(f"{_BLOCK}.norm2", "v.blk.{}.ln2.weight", bias=True),
        Row(f"{_BLOCK}.mlp.fc1", "v.blk.{}.ffn_up.weight", bias=True),
        Row(f"{_BLOCK}.mlp.fc2", "v.blk.{}.ffn_down.weight", bias=True),
        Row("visual.merger.ln_q", "v.post_ln.weight", bias=True),
        Row("visual.merger.mlp.0", "mm.0.weight", bias=True),
        Row("visual.merger.mlp.2", "mm.2.weight", bias=True),
    ),
)  # fmt: skip

QWEN2_5_VL = Tower(
    architectures=("Qwen2_5_VLForConditionalGeneration",), projector="qwen2.5vl_merger",
    names={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    metadata=_windows,
    table=(
        *_PATCHES,
        Row(f"{_BLOCK}.norm1", "v.blk.{}.ln1.weight"),
        *qkv(f"{_BLOCK}.attn.qkv"),
        Row(f"{_BLOCK}.attn.proj", "v.blk.{}.attn_out.weight", bias=True),
        Row(f"{_BLOCK}.norm2", "v.blk.{}.ln2.weight"),
        Row(f"{_BLOCK}.mlp.gate_proj", "v.blk.{}.ffn_gate.weight", bias=True),
        Row(f"{_BLOCK}.mlp.up_proj", "v.blk.{}.ffn_up.weight", bias=True),
        Row(f"{_BLOCK}.mlp.down_proj", "v.blk.{}.ffn_down.weight", bias=True),
        Row("visual.merger.ln_q", "v.post_ln.weight"),
        Row("visual.merger.mlp.0", "mm.0.weight", bias=True),
        Row("visual.merger.mlp.2", "mm.2.weight", bias=True),
    ),
)  # fmt: skip

EXAONE4_5 = replace(
    QWEN2_5_VL,
    architectures=("Exaone4_5_ForConditionalGeneration",), projector="exaone4_5", metadata=_exaone,
    table=(
        *(row for row in QWEN2_5_VL.table if row.share is None),
        Row(f"{_BLOCK}.attn.qkv", "v.blk.{}.attn_qkv.weight", bias=True),
    ),
)  # fmt: skip

_STACKED = "visual.deepstack_merger_list.{}"
QWEN3_VL = Tower(
    architectures=(
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
    ),
    projector="qwen3vl_merger",
    names={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    metadata=_qwen3,
    table=(
        *_PATCHES,
        Row("visual.pos_embed", "v.position_embd.weight", kind="F32"),
        Row(f"{_BLOCK}.norm1", "v.blk.{}.ln1.weight", bias=True),
        Row(f"{_BLOCK}.attn.qkv", "v.blk.{}.attn_qkv.weight", bias=True),
        Row(f"{_BLOCK}.attn.proj", "v.blk.{}.attn_out.weight", bias=True),
        Row(f"{_BLOCK}.norm2", "v.blk.{}.ln2.weight", bias=True),
        Row(f"{_BLOCK}.mlp.linear_fc1", "v.blk.{}.ffn_up.weight", bias=True),
        Row(f"{_BLOCK}.mlp.linear_fc2", "v.blk.{}.ffn_down.weight", bias=True),
        Row(f"{_STACKED}.norm", "v.deepstack.{}.norm.weight", bias=True, layers=_deepstack_layers),
        Row(f"{_STACKED}.linear_fc1", "v.deepstack.{}.fc1.weight", bias=True, layers=_deepstack_layers),
        Row(f"{_STACKED}.linear_fc2", "v.deepstack.{}.fc2.weight", bias=True, layers=_deepstack_layers),
        Row("visual.merger.norm", "v.post_ln.weight", bias=True),
        Row("visual.merger.linear_fc1", "mm.0.weight", bias=True),
        Row("visual.merger.linear_fc2", "mm.2.weight", bias=True),
    ),
)  # fmt: skip

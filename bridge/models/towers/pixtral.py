"""Pixtral's tower, which Mistral Small 3 has too: patches in rows that end with the embedding of [IMG_BREAK].

llama.cpp's loader demands that embedding; its converter looks for it among the tower's names and does not find it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.checkpoint.tensor_names import TEXT_PREFIXES
from bridge.errors import BridgeError
from bridge.models.config.rope import interleaved_rows
from bridge.models.outline import OutlineTensor, Part
from bridge.models.towers.tower import Row, Tower, Vision
from bridge.system.storage.files import read_json

_LAYER = "vision_tower.transformer.layers.{}"
_BREAK = "[IMG_BREAK]"


def _pixtral(vision: Vision) -> dict[str, Any]:
    tower, model = vision.tower, vision.model
    tower.expect("model_type", ("pixtral",), None, "this vision tower is not in the table")
    act = tower.get("hidden_act", "gelu")
    tower.expect("hidden_act", ("gelu", "silu"), "gelu", "llama.cpp's graph has no other")
    keys = {"vision.attention.layer_norm_epsilon": tower.number("layer_norm_eps", 1e-5), f"use_{act}": True}
    merged = model.get("spatial_merge_size")
    return keys if merged is None else {**keys, "vision.spatial_merge_size": model.integer("spatial_merge_size")}


def _row_break(vision: Vision, names: Mapping[str, Sequence[int]]) -> list[OutlineTensor]:
    """The row of the language model's embeddings that ends a row of patches."""
    added = read_json(vision.folder / "tokenizer.json", optional=True).get("added_tokens") or []
    token = next((entry.get("id") for entry in added if entry.get("content") == _BREAK), None)
    if type(token) is not int:
        raise BridgeError(f"{vision.folder / 'tokenizer.json'}: has no token {_BREAK}, which ends a row of patches")
    embeddings = ["model.embed_tokens.weight", *(f"{before}embed_tokens.weight" for before, _ in TEXT_PREFIXES)]
    source = next((name for name in embeddings if name in names), None)
    if source is None or token >= names[source][0]:
        raise BridgeError(f"{embeddings[0]}: the checkpoint has no embedding of token {token}, {_BREAK}")
    part = Part(source, (names[source][1],), np.array([token]), stored=tuple(names[source]))
    return [OutlineTensor("v.token_embd.img_break", part.shape, (part,), fixed_type="F32")]


PIXTRAL = Tower(
    architectures=("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"), projector="pixtral",
    metadata=_pixtral,
    extra=_row_break,
    table=(
        Row("vision_tower.patch_conv", "v.patch_embd.weight", kind="patches"),
        Row("vision_tower.ln_pre", "v.pre_ln.weight"),
        Row(f"{_LAYER}.attention_norm", "v.blk.{}.ln1.weight"),
        Row(f"{_LAYER}.attention.q_proj", "v.blk.{}.attn_q.weight", order=interleaved_rows),
        Row(f"{_LAYER}.attention.k_proj", "v.blk.{}.attn_k.weight", order=interleaved_rows),
        Row(f"{_LAYER}.attention.v_proj", "v.blk.{}.attn_v.weight"),
        Row(f"{_LAYER}.attention.o_proj", "v.blk.{}.attn_out.weight"),
        Row(f"{_LAYER}.ffn_norm", "v.blk.{}.ln2.weight"),
        Row(f"{_LAYER}.feed_forward.gate_proj", "v.blk.{}.ffn_gate.weight"),
        Row(f"{_LAYER}.feed_forward.up_proj", "v.blk.{}.ffn_up.weight"),
        Row(f"{_LAYER}.feed_forward.down_proj", "v.blk.{}.ffn_down.weight"),
        Row("multi_modal_projector.norm", "mm.input_norm.weight", optional=True),
        Row(
            "multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger.weight", kind="patches", optional=True
        ),
        Row("multi_modal_projector.linear_1", "mm.1.weight", bias=None),
        Row("multi_modal_projector.linear_2", "mm.2.weight", bias=None),
    ),
)  # fmt: skip

"""Gemma 3's tower: SigLIP, whose patches are averaged and projected."""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.towers.tower import Row, Tower, Vision

_EMBEDDINGS = "vision_tower.vision_model.embeddings"
_LAYER = "vision_tower.vision_model.encoder.layers.{}"
_USUAL_SCALE = 4  # patches a side that are averaged


def _siglip(vision: Vision) -> dict[str, Any]:
    tower, tokens = vision.tower, vision.processor.get("image_seq_length", 256)
    if type(tokens) is not int or tokens < 1:
        raise BridgeError(f"{vision.folder}: image_seq_length is {tokens!r}, must be the tokens of an image")
    scale = tower.integer("image_size") // tower.integer("patch_size") // int(tokens**0.5)
    keys = {"vision.attention.layer_norm_epsilon": tower.number("layer_norm_eps", 1e-6), "use_gelu": True}
    return keys if scale in (0, _USUAL_SCALE) else {**keys, "vision.projector.scale_factor": scale}


def _siglip_row(source: str, name: str, **how: Any) -> Row:
    """A row of the encoder, which transformers 5 names without vision_model."""
    return Row(source, name, also=(source.replace(".vision_model", "", 1),), **how)


GEMMA3 = Tower(
    architectures=("Gemma3ForConditionalGeneration",), projector="gemma3",
    metadata=_siglip,
    skipped=r"vision_model\.head\.|vision_tower\.head\.",  # SigLIP's own classification
    table=(
        _siglip_row(f"{_EMBEDDINGS}.patch_embedding", "v.patch_embd.weight", bias=True, kind="F32"),
        _siglip_row(f"{_EMBEDDINGS}.position_embedding", "v.position_embd.weight", kind="F32"),
        _siglip_row(f"{_LAYER}.layer_norm1", "v.blk.{}.ln1.weight", bias=True),
        *(
            _siglip_row(f"{_LAYER}.self_attn.{part}_proj", f"v.blk.{{}}.attn_{part}.weight", bias=True)
            for part in ("q", "k", "v", "out")
        ),
        _siglip_row(f"{_LAYER}.layer_norm2", "v.blk.{}.ln2.weight", bias=True),
        _siglip_row(f"{_LAYER}.mlp.fc1", "v.blk.{}.ffn_up.weight", bias=True),
        _siglip_row(f"{_LAYER}.mlp.fc2", "v.blk.{}.ffn_down.weight", bias=True),
        _siglip_row("vision_tower.vision_model.post_layernorm", "v.post_ln.weight", bias=True),
        Row("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm.weight", change="+1"),
        Row(
            "multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight", kind="F16", exact=True
        ),
    ),
)  # fmt: skip

"""Gemma's towers. Gemma 3's is SigLIP, whose patches are averaged and projected.

Gemma 4 has patches of images with learned positions of two axes, and a Conformer of sound where it has one. Its linear
layers may clip what they take and give: four numbers each, which llama.cpp has beside the matrix.

Gemma 4 12B has no layers for images and sound: patches and pieces of a wave are multiplied by a matrix.
"""

from collections.abc import Sequence
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.model_config import Config
from bridge.models.towers.tower import Row, Sound, Tower, Vision

_SIGLIP_EMBEDDINGS = "vision_tower.vision_model.embeddings"
_SIGLIP = "vision_tower.vision_model.encoder.layers.{}"
_LAYER = "vision_tower.encoder.layers.{}"
_HEARD = "audio_tower.layers.{}"
_BEFORE = "audio_tower.subsample_conv_projection"
_SIGLIP_SCALE, _USUAL_SCALE = 4, 3  # patches a side that are averaged
_MEL_BINS = 128
_WAVE = 640  # samples of Gemma 4 12B's pieces of sound
_BASE = 100.0  # of rotary positions


def _siglip(vision: Vision) -> dict[str, Any]:
    tower, tokens = vision.tower, vision.processor.get("image_seq_length", 256)
    if type(tokens) is not int or tokens < 1:
        raise BridgeError(f"{vision.folder}: image_seq_length is {tokens!r}, must be the tokens of an image")
    scale = tower.integer("image_size") // tower.integer("patch_size") // int(tokens**0.5)
    keys = {"vision.attention.layer_norm_epsilon": tower.number("layer_norm_eps", 1e-6), "use_gelu": True}
    return keys if scale in (0, _SIGLIP_SCALE) else {**keys, "vision.projector.scale_factor": scale}


def _siglip_row(source: str, name: str, **how: Any) -> Row:
    """A row of the encoder, which transformers 5 names without vision_model."""
    return Row(source, name, also=(source.replace(".vision_model", "", 1),), **how)


GEMMA3 = Tower(
    architectures=("Gemma3ForConditionalGeneration",), projector="gemma3",
    metadata=_siglip,
    skipped=r"vision_model\.head\.|vision_tower\.head\.",  # SigLIP's own classification
    table=(
        _siglip_row(f"{_SIGLIP_EMBEDDINGS}.patch_embedding", "v.patch_embd.weight", bias=True, kind="F32"),
        _siglip_row(f"{_SIGLIP_EMBEDDINGS}.position_embedding", "v.position_embd.weight", kind="F32"),
        _siglip_row(f"{_SIGLIP}.layer_norm1", "v.blk.{}.ln1.weight", bias=True),
        *(
            _siglip_row(f"{_SIGLIP}.self_attn.{part}_proj", f"v.blk.{{}}.attn_{part}.weight", bias=True)
            for part in ("q", "k", "v", "out")
        ),
        _siglip_row(f"{_SIGLIP}.layer_norm2", "v.blk.{}.ln2.weight", bias=True),
        _siglip_row(f"{_SIGLIP}.mlp.fc1", "v.blk.{}.ffn_up.weight", bias=True),
        _siglip_row(f"{_SIGLIP}.mlp.fc2", "v.blk.{}.ffn_down.weight", bias=True),
        _siglip_row("vision_tower.vision_model.post_layernorm", "v.post_ln.weight", bias=True),
        Row("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm.weight", change="+1"),
        Row(
            "multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight", kind="F16", exact=True
        ),
    ),
)  # fmt: skip


def _seen(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    rope = tower.get("rope_parameters") or {}
    if rope.get("rope_theta", _BASE) != _BASE:
        raise BridgeError(f"{tower.path}: rope_theta is {rope['rope_theta']}; llama.cpp has {_BASE} in this tower")
    scale = tower.integer("pooling_kernel_size", _USUAL_SCALE)
    keys = {
        "vision.image_size": 224,  # images keep their own
        "vision.attention.layer_norm_epsilon": tower.number("layer_norm_eps", 1e-6),
    }
    return keys if scale == _USUAL_SCALE else {**keys, "vision.projector.scale_factor": scale}


def _heard(sound: Config) -> dict[str, Any]:
    width = sound.integer("hidden_size")
    return {"embedding_length": width, "feed_forward_length": 4 * width, **_sound(sound)}


def _sound(sound: Config) -> dict[str, Any]:
    return {
        "num_mel_bins": sound.integer("input_feat_size", _MEL_BINS),
        "attention.layer_norm_epsilon": sound.number("layer_norm_eps", 1e-6),
    }


def _clipped(source: str, name: str) -> Sequence[Row]:
    limits = ("input_min", "input_max", "output_min", "output_max")
    return (
        Row(f"{source}.linear", f"{name}.weight", also=(source,)),
        *(Row(f"{source}.{limit}", f"{name}.{limit}", exact=True, optional=True, change="scalar") for limit in limits),
    )


GEMMA4 = Tower(
    architectures=("Gemma4ForConditionalGeneration",), projector="gemma4v",
    metadata=_seen,
    table=(
        Row("vision_tower.patch_embedder.input_proj", "v.patch_embd.weight", kind="patches", change="patches"),
        Row(
            "vision_tower.patch_embedder.position_embedding_table", "v.position_embd.weight", kind="F32", exact=True
        ),
        Row(f"{_LAYER}.input_layernorm", "v.blk.{}.ln1.weight"),
        *(
            row
            for part, name in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out"))
            for row in _clipped(f"{_LAYER}.self_attn.{part}", f"v.blk.{{}}.attn_{name}")
        ),
        Row(f"{_LAYER}.self_attn.q_norm", "v.blk.{}.attn_q_norm.weight"),
        Row(f"{_LAYER}.self_attn.k_norm", "v.blk.{}.attn_k_norm.weight"),
        Row(f"{_LAYER}.post_attention_layernorm", "v.blk.{}.attn_post_norm.weight"),
        Row(f"{_LAYER}.pre_feedforward_layernorm", "v.blk.{}.ln2.weight"),
        *(
            row
            for part in ("gate", "up", "down")
            for row in _clipped(f"{_LAYER}.mlp.{part}_proj", f"v.blk.{{}}.ffn_{part}")
        ),
        Row(f"{_LAYER}.post_feedforward_layernorm", "v.blk.{}.ffn_post_norm.weight"),
        Row("vision_tower.std_bias", "v.std_bias", exact=True, optional=True),
        Row("vision_tower.std_scale", "v.std_scale", exact=True, optional=True),
        Row("embed_vision.embedding_projection", "mm.input_projection.weight"),
    ),
    sound=Sound(
        projector="gemma4a",
        metadata=_heard,
        table=(
            *(
                row
                for i in (0, 1)
                for row in (
                    Row(f"{_BEFORE}.layer{i}.conv", f"a.conv1d.{i}.weight", kind="F32"),
                    Row(f"{_BEFORE}.layer{i}.norm", f"a.conv1d.{i}.norm.weight"),
                )
            ),
            Row(f"{_BEFORE}.input_proj_linear", "a.input_projection.weight", kind="F32"),
            *(
                row
                for block, end in (("feed_forward1", ""), ("feed_forward2", "_1"))
                for row in (
                    Row(f"{_HEARD}.{block}.pre_layer_norm", f"a.blk.{{}}.ffn_norm{end}.weight"),
                    *_clipped(f"{_HEARD}.{block}.ffw_layer_1", f"a.blk.{{}}.ffn_up{end}"),
                    *_clipped(f"{_HEARD}.{block}.ffw_layer_2", f"a.blk.{{}}.ffn_down{end}"),
                    Row(f"{_HEARD}.{block}.post_layer_norm", f"a.blk.{{}}.ffn_post_norm{end}.weight"),
                )
            ),
            Row(f"{_HEARD}.norm_pre_attn", "a.blk.{}.attn_pre_norm.weight"),
            *(
                row
                for part, name in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("post", "out"))
                for row in _clipped(f"{_HEARD}.self_attn.{part}", f"a.blk.{{}}.attn_{name}")
            ),
            Row(f"{_HEARD}.self_attn.relative_k_proj", "a.blk.{}.attn_k_rel.weight"),
            Row(
                f"{_HEARD}.self_attn.per_dim_scale", "a.blk.{}.per_dim_scale.weight", exact=True, change="softplus"
            ),
            Row(f"{_HEARD}.norm_post_attn", "a.blk.{}.attn_post_norm.weight"),
            Row(f"{_HEARD}.lconv1d.pre_layer_norm", "a.blk.{}.conv_norm.weight"),
            *_clipped(f"{_HEARD}.lconv1d.linear_start", "a.blk.{}.conv_pw1"),
            Row(f"{_HEARD}.lconv1d.depthwise_conv1d", "a.blk.{}.conv_dw.weight", kind="F32", change="squeezed"),
            Row(f"{_HEARD}.lconv1d.conv_norm", "a.blk.{}.norm_conv.weight"),
            *_clipped(f"{_HEARD}.lconv1d.linear_end", "a.blk.{}.conv_pw2"),
            Row(f"{_HEARD}.norm_out", "a.blk.{}.ln2.weight"),
            Row("audio_tower.output_proj", "a.pre_encode.out.weight", bias=True),
            Row("embed_audio.embedding_projection", "mm.a.input_projection.weight"),
        ),
    ),
)  # fmt: skip


def _heard_at_once(sound: Config) -> dict[str, Any]:
    width = sound.integer("audio_embed_dim", _WAVE)
    if width != _WAVE:
        raise BridgeError(
            f"{sound.path}: audio_embed_dim is {width}; llama.cpp has {_WAVE} samples of sound in a piece"
        )
    return {"embedding_length": width, "feed_forward_length": 0, **_sound(sound)}


_EMBEDDER = "vision_embedder"


def _embedder(source: str, name: str, *, change: str | None = None, kind: str = "matrix") -> Sequence[Row]:
    """A matrix or vector with its bias, whose elements go by the same change where it is a vector of patches."""
    short, changed = f"embed_vision.{source}", change if kind == "matrix" else None
    return (
        Row(f"{_EMBEDDER}.{source}", f"{name}.weight", also=(short,), kind=kind, change=change),
        Row(f"{_EMBEDDER}.{source}.bias", f"{name}.bias", also=(f"{short}.bias",), exact=True, change=changed),
    )


_PROJECTION = "embedding_projection"

GEMMA4_UNIFIED = Tower(
    architectures=("Gemma4UnifiedForConditionalGeneration",), projector="gemma4uv", layered=False,
    names={"hidden_size": "mm_embed_dim"},
    metadata=_seen,
    table=(
        *_embedder("patch_ln1", "v.patch_norm.1", change="colours first"),
        *_embedder("patch_dense", "v.patch_embd", change="colours first", kind="patches"),
        *_embedder("patch_ln2", "v.patch_norm.2"),
        Row(
            f"{_EMBEDDER}.pos_embedding", "v.position_embd.weight", also=("embed_vision.pos_embedding",), kind="F32",
            exact=True, change="swapped",
        ),
        *_embedder("pos_norm", "v.patch_norm.3"),
        Row(
            f"embed_vision.{_PROJECTION}", "mm.input_projection.weight",
            also=(f"embed_vision.multimodal_embedder.{_PROJECTION}",),
        ),
    ),
    sound=Sound(
        projector="gemma4ua",
        metadata=_heard_at_once,
        table=(Row(f"embed_audio.{_PROJECTION}", "mm.a.input_projection.weight"),),
    ),
)  # fmt: skip

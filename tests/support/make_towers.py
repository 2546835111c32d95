"""Writes tests/data/towers: what `convert_hf_to_gguf.py --mmproj` of llama.cpp makes of small vision models.

    python -m tests.support.make_towers LLAMA_CPP [NAME ...]

LLAMA_CPP is a checkout of llama.cpp with its conversion/ and gguf-py/. Weights are `values_of` each tensor's name, so
that a golden needs their checksums alone: of F16 values, and of the bytes of Q8_0.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.support.family_models import DELTA, GEMMA4, M3, MROPE, NEXT, copy_tokenizer, wrapped
from tests.support.make_families import ROOT, plain, values_of

GOLDENS = ROOT / "tests/data/towers"
QWEN = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 32, "rope_theta": 10000.0}
GEMMA4_SEEN = wrapped("gemma4_text", {"model_type": "gemma4_vision", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "position_embedding_size": 64}, **GEMMA4)  # fmt: skip

# name -> (config class of transformers, its fields)
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VLConfig", wrapped("qwen2_vl_text", {"depth": 4, "embed_dim": 64, "hidden_size": 32,
        "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}, rope_parameters=MROPE)),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", wrapped("qwen2_5_vl_text", {**QWEN, "fullatt_block_indexes": [1, 3]},
        rope_parameters=MROPE)),
    "exaone4.5": ("Exaone4_5_Config", wrapped("exaone4", {**QWEN, "hidden_size": 128, "num_heads": 4,
        "num_key_value_heads": 2, "fullatt_block_indexes": [1, 3]}, sliding_window=None,
        layer_types=2 * ["full_attention"])),
    "qwen3-vl": ("Qwen3VLConfig", wrapped("qwen3_vl_text", {**QWEN, "patch_size": 16, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1, 2]}, head_dim=8, rope_parameters=MROPE)),
    "qwen3.5": ("Qwen3_5Config", wrapped("qwen3_5_text", {**QWEN, "patch_size": 16, "num_position_embeddings": 16},
        **DELTA)),
    "gemma3": ("Gemma3Config", {**wrapped("gemma3_text", {**SIGLIP, "model_type": "siglip_vision_model"}, head_dim=16,
        query_pre_attn_scalar=16, sliding_window=32, num_hidden_layers=7), "mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4Config", {**GEMMA4_SEEN, "vision_config": {**GEMMA4_SEEN["vision_config"], "standardize": True}}),
    "gemma4-audio": ("Gemma4Config", {**GEMMA4_SEEN, "vision_config": {**GEMMA4_SEEN["vision_config"],
        "use_clipped_linears": True}, "audio_config": {"hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "output_proj_dims": 48, "subsampling_conv_channels": [128, 4]}}),
    "gemma4-unified": ("Gemma4UnifiedConfig", {**wrapped("gemma4_unified_text", {"patch_size": 4, "mm_embed_dim": 64,
        "mm_posemb_size": 16, "output_proj_dims": 64}, **GEMMA4), "audio_config": {"audio_embed_dim": 640}}),
    "mistral3": ("Mistral3Config", {**wrapped("mistral", PIXTRAL, head_dim=16), "spatial_merge_size": 2}),
    "pixtral": ("LlavaConfig", {**wrapped("mistral", PIXTRAL, head_dim=16, architectures=["MistralForCausalLM"]),
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "minimax-m3": ("MiniMaxM3VLConfig", {**wrapped("minimax_m3_vl_text", {"hidden_size": 160, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56}, **M3), "projector_hidden_size": 64}),
    "glm4v-moe": ("Glm4vMoeConfig", wrapped("glm4v_moe_text", {**QWEN, "image_size": 84}, head_dim=8,
        attention_bias=True, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
        topk_group=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5})),
    "glm5-next": ("Glm5NextConfig", wrapped("glm5_next_text", {**QWEN, "image_size": 84, "swiglu_limit": 1.0,
        "projection_intermediate_size": 48}, **NEXT)),
    "internvl": ("InternVLConfig", {**wrapped("qwen2", {**SIGLIP, "image_size": [56, 56], "patch_size": [14, 14],
        "architectures": ["InternVisionModel"]}, architectures=["Qwen2ForCausalLM"]), "downsample_ratio": 0.5}),
    "internvl-chat": ("InternVLConfig", {**wrapped("qwen2", {**SIGLIP, "architectures": ["InternVisionModel"],
        "attention_bias": True}, architectures=["Qwen2ForCausalLM"]), "downsample_ratio": 0.5}),
}  # fmt: skip
PROCESSOR = {
    "image_mean": [0.5, 0.25, 0.75], "image_std": [0.25, 0.5, 0.125], "size": {"height": 56, "width": 56},
    "image_seq_length": 4, "min_image_tokens": 4, "max_image_tokens": 64, "min_pixels": 3136, "max_pixels": 50176,
}  # fmt: skip

# names in published repositories that transformers 5 writes otherwise
_PUBLISHED = {
    "gemma3": (("^vision_tower[.](?!vision_model)", "vision_tower.vision_model."),),
    "internvl": (
        ("^language_model[.]model[.]", "model.language_model."),
        ("^language_model[.]lm_head[.]", "lm_head."),
        ("^(vision_tower|multi_modal_projector)[.]", r"model.\1."),
    ),
}
# InternVLChatModel's names, which its repositories had before transformers knew it
_CHAT = (
    (r"^model\.language_model\.|^language_model\.model\.", "language_model.model."),
    (r"^(model\.)?vision_tower\.", "vision_model."),
    (r"^(model\.)?multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^(model\.)?multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^(model\.)?multi_modal_projector\.linear_2", "mlp1.3"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"embeddings\.cls_token", "embeddings.class_embedding"),
    (r"embeddings\.position_embeddings", "embeddings.position_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"attention\.projection_layer", "attn.proj"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_(\d)", r"ls\1"),
)


def new_model(name: str) -> Any:
    """A model of several parts in transformers."""
    import torch
    import transformers

    kind, fields = TOWERS[name]
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    return model.eval()


def save_checkpoint(name: str, folder: Path, model: Any = None) -> dict[str, tuple[int, ...]]:
    """A checkpoint of a model's names and shapes, as published; returns the shapes.

    model  the one whose weights are saved; None: a new one with made-up values
    """
    made = new_model(name) if model is None else model
    made.save_pretrained(folder, save_original_format=True)
    if name == "internvl-chat":
        _as_chat(folder)
    for pattern, new in _PUBLISHED.get(name, ()):
        _rename(folder, pattern, new)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if model is None:
        save_file({key: values_of(key, shape) for key, shape in shapes.items()}, folder / "model.safetensors")
    add_processor(folder)
    return shapes


def _as_chat(folder: Path) -> None:
    """Give a saved InternVL the names of InternVLChatModel: q, k and v in one, llm_config."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["InternVLChatModel"], "llm_config": config.pop("text_config"), "max_dynamic_patch": 12}
    config["model_type"] = "internvl_chat"
    config["vision_config"] |= {"image_size": 56, "patch_size": 14, "layer_norm_eps": 1e-6, "qkv_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    for pattern, new in _CHAT:
        _rename(folder, pattern, new)
    renamed = load_file(folder / "model.safetensors")
    for key in [key for key in renamed if "attention.q_proj" in key]:
        three = [renamed.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        renamed[key.replace("attention.q_proj", "attn.qkv")] = np.concatenate(three)
    save_file(renamed, folder / "model.safetensors")


def _rename(folder: Path, pattern: str, new: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({re.sub(pattern, new, key): values for key, values in weights.items()}, folder / "model.safetensors")


def digest_of(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def digest(tensor: Any) -> int:
    """Of the bytes of a tensor of a GGUF."""
    return digest_of(tensor.data)


def add_processor(folder: Path) -> Path:
    """The files of a vision model besides config and weights: tokenizer, and what is done to images."""
    copy_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 2047, "content": "[IMG_BREAK]"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def main(llama_cpp: Path, names: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    GOLDENS.mkdir(exist_ok=True)
    for name in names or TOWERS:
        golden: dict[str, Any] = {}
        for type in ("F16", "Q8_0"):
            with tempfile.TemporaryDirectory() as where, torch.inference_mode():
                folder, out = Path(where) / "model", Path(where) / "out.gguf"
                shapes = save_checkpoint(name, folder)
                arch = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.MMPROJ)
                kind = get_model_class(arch, mmproj=True)
                kind(folder, getattr(gguf.LlamaFileType, f"MOSTLY_{type}"), out).write()
                reader = gguf.GGUFReader(out)
                keys = {
                    key: plain(field.contents())
                    for key, field in reader.fields.items()
                    if key.startswith("clip.") or key in ("general.architecture", "general.type", "general.file_type")
                }
                tensors = {
                    t.name: [[int(n) for n in reversed(t.shape)], t.tensor_type.name, digest(t)] for t in reader.tensors
                }
                config = json.loads((folder / "config.json").read_text())
            golden |= {"config": config, "checkpoint": shapes, f"{type} keys": keys, f"{type} tensors": tensors}
        text = ",\n".join(f'"{part}": {_lines(value)}' for part, value in golden.items())
        (GOLDENS / f"{name}.json").write_text("{\n" + text + "\n}\n")
        print(name, arch, len(tensors))


def _lines(value: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Writes tests/data/converter: what llama.cpp's own converter makes of small models of the families.

    python -m tests.support.make_families LLAMA_CPP [NAME ...]

LLAMA_CPP is a checkout of llama.cpp with its conversion/ and gguf-py/. Weights are `values_of` each tensor's name, so
that a golden needs their checksums alone. Those of encoders, which have tokenizers of their own, are in
tests/data/encoders. Of families that go by a template the whole F16 GGUF is kept, of weights
that compress (`coarse_values_of`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.drafter_models import DRAFTERS, write_config
from tests.support.encoder_models import CONVERTED, PUBLISHED, new_encoder
from tests.support.family_models import MODELS, PUBLISHED_AS, TEMPLATES, copy_tokenizer, new_model
from tests.support.remote_models import REMOTE

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests/data/converter"
ENCODER_GOLDENS = ROOT / "tests/data/encoders"
DEEPSEEK4S_EXPERT = re.compile(r"ffn\.experts\.\d+\.w[123]\.weight$")
_LARGEST = 2.0**62  # a checksum of integers
# under names of transformers that the converter does not know; with transformers 5 it takes each Nemotron-H for a MoE
UNKNOWN = {"bitnet", "nemotron-h"}

# integers of up to 45 bits; primes, and their sums
QWEN4S_HASH = {
    "layer_multipliers": [23703575012345, 1234567891, 35184372088831], "ngram_heads_vocab_sizes": [53, 59, 61, 67],
    "ngram_heads_offsets": [0, 53, 112, 173],
}  # fmt: skip

# whose config.json the converter reads by transformers 5, which drops keys that it needs
UNREADABLE = {
    "minimax-m3", "dots3-note", "mimo2", "qwen4exp", "kimi-linear", "kimi-k3", "glm5-next", "ling3", "step35",
}  # fmt: skip
KIMIS = {"kimi-linear", "kimi-k3"}
# which transformers does not have -> the model whose checkpoint becomes theirs
DERIVED = {"kimi-k3": "kimi-linear"}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of small multiples of 1/64, other ones for each name: sums with small numbers are exact."""
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 + zlib.crc32(name.encode())
    return ((numbers % 251 - 125) / 64).astype(np.float32).reshape(shape)


def stored_values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """`values_of`; of DeepSeek V4 also its experts of 4-bit floats and its table of experts, of EAGLE-3 the tokens
    of the head."""
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 + zlib.crc32(name.encode())
    if name == "d2t":  # every third token
        return 2 * np.arange(shape[0])
    if name.endswith("token_ordering"):
        return np.arange(shape[0])
    if name == "t2d":
        return np.arange(shape[0]) % 3 == 0
    if name.rpartition(".")[2] in QWEN4S_HASH:
        return np.array(QWEN4S_HASH[name.rpartition(".")[2]])
    if name.endswith("tid2eid"):
        return (numbers % 4).reshape(shape)
    if name.endswith(".scale") and DEEPSEEK4S_EXPERT.search(f"{name.removesuffix('scale')}weight"):
        return (120 + numbers % 8).astype(np.uint8).reshape(shape)
    if DEEPSEEK4S_EXPERT.search(name):
        return (numbers % 251).astype(np.uint8).view(np.int8).reshape(shape)
    return values_of(name, shape)


def coarse_values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of few values, as good as random: bits that are set in a byte of a hash; around one for norms."""
    data = np.frombuffer(hashlib.shake_128(name.encode()).digest(int(np.prod(shape))), np.uint8)
    values = (np.bitwise_count(data).astype(np.float32) - 4) / 8
    return (1 + values / 2 if len(shape) == 1 and name.endswith("weight") else values).reshape(shape)


def checksum(values: np.ndarray) -> int:
    """Of values rounded to 1/1024: exponentials differ in their last bits between libraries."""
    whole = np.round(values.astype(np.float64) * 1024)
    return zlib.crc32(np.clip(whole, -_LARGEST, _LARGEST).astype("<i8").tobytes())


# models with a layer that predicts a further token, which transformers drops -> how its config counts such layers
PREDICTING = {
    "glm4-moe": "num_nextn_predict_layers", "glm4-moe-lite": "num_nextn_predict_layers", "qwen3-next": None,
    "exaone4.5": "num_nextn_predict_layers", "qwen3.5": "mtp_num_hidden_layers", "qwen3.5-moe": "mtp_num_hidden_layers",
    **dict.fromkeys(("glm5", "deepseek3.2", "nemotron-h-moe", "nemotron-3-super"), "num_nextn_predict_layers"),
    **dict.fromkeys(("exaone-moe", "cohere2-moe", "hy3"), "num_nextn_predict_layers"), "mimo2": None,
    "glm5-next": "num_nextn_predict_layers", "ling3": "num_nextn_predict_layers",
    "step35": None,
}  # fmt: skip
MTP = "-mtp"  # at the end of their goldens' names


def add_prediction(name: str, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A layer more, of the last one's shapes (K-EXAONE: the first's), named as the family's checkpoints do."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if (key := PREDICTING[name]) is not None:
        text[key] = 1
        (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    if name.startswith("nemotron"):
        add_nemotrons(shapes, hidden)
        return
    layers, qwen = text["num_hidden_layers"], name.startswith(("qwen", "exaone"))
    block = "model.layers" if text is config else "model.language_model.layers"
    if name == "mimo2":
        add_mimos(shapes, hidden)
        return
    if name == "step35":
        add_steps(shapes, hidden, vocab, layers)
        return
    of = layers - 1
    if name == "exaone-moe":  # a layer without experts, with Qwen's names
        of = 0
    last, before = f"{block}.{of}.", "mtp.layers.0." if qwen else f"{block}.{layers}."
    own = {key.removeprefix(last): shape for key, shape in shapes.items() if key.startswith(last)}
    shapes |= {before + key: shape for key, shape in own.items() if not key.startswith("hc_")}  # of streams
    if qwen:
        shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
        shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        return
    shapes |= {f"{before}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")}
    if name == "ling3":
        shapes |= {f"{before}eh_proj.weight": (hidden, 2 * hidden), f"{before}final_layernorm.weight": (hidden,)}
        return
    shapes |= {f"{before}eh_proj.weight": (hidden, 2 * hidden), f"{before}shared_head.head.weight": (vocab, hidden)}
    shapes |= {f"{before}embed_tokens.weight": (vocab, hidden)}
    last_norm = "final_layernorm" if name == "hy3" else "shared_head.norm"
    shapes[f"{before}{last_norm}.weight"] = (hidden,)


def add_mimos(shapes: dict[str, tuple[int, ...]], hidden: int) -> None:
    """Three layers with the attention of the second, which has a window, and the network of the first."""
    parts = [("model.layers.1.", ("self_attn", "layernorm")), ("model.layers.0.", ("mlp",))]
    of_layers = [(of, key, shape) for of, words in parts for key, shape in shapes.items()
                 if key.startswith(of) and any(word in key for word in words)]  # fmt: skip
    for layer in range(3):
        before = f"model.mtp.layers.{layer}."
        shapes |= {before + key.removeprefix(of): shape for of, key, shape in of_layers}
        shapes |= {f"{before}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm")}
        shapes |= {f"{before}eh_proj.weight": (hidden, 2 * hidden)}


def add_steps(shapes: dict[str, tuple[int, ...]], hidden: int, vocab: int, layers: int) -> None:
    """Two layers like the second, which has a window and no experts; their heads are named otherwise than usual."""
    for layer in range(layers, layers + 2):
        before, of = f"model.layers.{layer}.", "model.layers.1."
        shapes |= {before + key.removeprefix(of): shape for key, shape in shapes.items() if key.startswith(of)}
        shapes |= {f"{before}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "transformer.shared_head.norm")}
        shapes |= {f"{before}eh_proj.weight": (hidden, 2 * hidden)}
        shapes |= {f"{before}transformer.shared_head.output.weight": (vocab, hidden)}


def add_nemotrons(shapes: dict[str, tuple[int, ...]], hidden: int) -> None:
    """mtp.layers.0 like the third layer, which has attention, and mtp.layers.1 like the fourth, which has experts."""
    for layer, of in enumerate(("backbone.layers.2.", "backbone.layers.3.")):
        own = {key.removeprefix(of): shape for key, shape in shapes.items() if key.startswith(of)}
        shapes |= {f"mtp.layers.{layer}.{key}": shape for key, shape in own.items()}
    shapes |= {f"mtp.layers.0.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")}
    shapes |= {"mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden), "mtp.layers.1.final_layernorm.weight": (hidden,)}


def as_deepseek4(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """DeepSeek V4 with the keys and names of its repository, and experts of 4-bit floats with their scales."""
    config = json.loads((folder / "config.json").read_text())
    rules = config.pop("rope_parameters")["compress"]
    kinds = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config["compress_ratios"] = [kinds[kind] for kind in config.pop("layer_types")]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    config["rope_scaling"] = {"type": "yarn", **{name: rules[name] for name in names}}
    block = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    for key in ("compress_rates", "partial_rotary_factor"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        own = key.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
        own = own.replace("embed_tokens.", "embed.")
        found[own] = shape
        if DEEPSEEK4S_EXPERT.search(own):
            found |= {own: (shape[0], shape[1] // 2), own.replace(".weight", ".scale"): (shape[0], shape[1] // 32)}
    return found


def as_mimo2(folder: Path) -> None:
    """MiMo V2's config.json with the keys of its repository."""
    config = json.loads((folder / "config.json").read_text())
    both, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    config |= {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "rope_theta": both["full_attention"]["rope_theta"], "swa_rope_theta": both["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334, "layernorm_epsilon": config.pop("rms_norm_eps"),
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"], "swa_head_dim": config["head_dim"],
        "swa_num_attention_heads": config["num_attention_heads"], "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": config["sliding_window"], "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "routed_scaling_factor": None, "n_shared_experts": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def as_step35(folder: Path, predicting: int) -> None:
    """Step 3.7's config.json with the keys of its repository."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    both, kinds = text.pop("rope_parameters"), [*text.pop("layer_types"), *predicting * ["sliding_attention"]]
    full = both["full_attention"]
    sparse = [str(layer) for layer, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    names = ("rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    for key in ("per_layer_config", "mtp_layer_types", "mtp_mlp_layer_types", "num_local_experts"):
        text.pop(key, None)
    text |= {
        "layer_types": kinds, "moe_layers_enum": ",".join(sparse), "moe_every_n_layer": 1, "norm_expert_weight": True,
        "rope_theta": [both[kind]["rope_theta"] for kind in kinds], "moe_router_activation": "sigmoid",
        "partial_rotary_factors": [both[kind]["partial_rotary_factor"] for kind in kinds], "zero_centered": True,
        "rope_scaling": {name: full[name] for name in names}, "num_attention_groups": text.pop("num_key_value_heads"),
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_groups": 2,
            "num_attention_heads": text.pop("num_sliding_attention_heads"), "head_dim": text["head_dim"]},
        "moe_num_experts": text.pop("n_routed_experts"), "moe_top_k": text.pop("num_experts_per_tok"),
        "num_nextn_predict_layers": predicting,
    }  # fmt: skip
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        text[key] += predicting * [0.0]
    (folder / "config.json").write_text(json.dumps(config))


def as_dots3_note(folder: Path) -> None:
    """dots3-note's config.json with the keys of its repository."""
    config = json.loads((folder / "config.json").read_text())
    both, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    config |= {f"swa_{key}": value for key, value in config.pop("per_layer_config")["1"].items()}
    config |= {
        "layer_types": ["sliding_attention" if "sliding" in kind else "full_attention" for kind in kinds],
        "first_k_dense_replace": config.pop("mlp_layer_types").count("dense"), "use_dsa": True,
        "rope_theta": both["indexed_attention"]["rope_theta"],
        "swa_rope_theta": both["sliding_attention"]["rope_theta"],
        "swa_q_lora_rank": config["q_lora_rank"], "swa_qk_rope_head_dim": config["qk_rope_head_dim"],
        "sliding_window_size": config.pop("sliding_window"), "apply_mla_qkv_lora_rescale": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def as_hy4(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Hunyuan 4 with the names of its repository, and heads of keys that its attention does not have."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "first_k_dense_replace": 1}))
    published: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        name = re.sub(r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre.", key).replace("model.hc_pre.", "model.")
        published[name.replace("linear_gate", "gate_proj") if ".mlp." in name else name] = shape
    return published


def as_ling3(names: Iterable[str]) -> dict[str, str]:
    """Ling 3's names -> those of its repository: transformers saves both kinds of attention by the names of one."""
    names = set(names)
    linear = {name.removesuffix("A_log") for name in names if name.endswith(".attention.A_log")}
    dense = {f"{module}dense.weight": f"{module}o_proj.weight" for module in linear}
    return {name: dense.get(name, name) for name in names}


def as_kimi_k3(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Kimi Linear with the keys and tensors that K3 has more."""
    config = json.loads((folder / "config.json").read_text())
    hidden, heads, value = config["hidden_size"], config["num_attention_heads"], config["v_head_dim"]
    latent, inner = 32, 64  # in whole groups of 4-bit floats
    config["linear_attn_config"]["gate_lower_bound"] = -5.0
    del config["architectures"], config["head_dim"]
    config |= {
        "q_lora_rank": 16, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2, "routed_expert_hidden_size": latent, "moe_intermediate_size": inner,
    }  # fmt: skip
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {}}))
    made: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        layer, _, part = key.rpartition(".self_attn.")
        if part == "A_log":
            shape = (heads,)
        elif part == "q_proj.weight" and f"{layer}.self_attn.kv_a_layernorm.weight" in shapes:
            rank = config["q_lora_rank"]
            made |= {
                f"{layer}.self_attn.q_a_proj.weight": (rank, hidden),
                f"{layer}.self_attn.g_proj.weight": (heads * value, hidden),
            }
            made[f"{layer}.self_attn.q_a_layernorm.weight"] = (rank,)
            key, shape = f"{layer}.self_attn.q_b_proj.weight", (shape[0], rank)
        elif part == "g_a_proj.weight":
            continue
        elif part == "g_b_proj.weight":
            key, shape = f"{layer}.self_attn.g_proj.weight", (shape[0], hidden)
        elif ".experts." in key or ".shared_experts." in key:
            read = latent if ".experts." in key else hidden
            shape = (read, inner) if key.endswith(("w2.weight", "down_proj.weight")) else (inner, read)
        elif key.endswith("block_sparse_moe.gate.weight"):
            routed = f"{key.removesuffix('.gate.weight')}.routed_expert_"
            made |= {f"{routed}down_proj.weight": (latent, hidden), f"{routed}up_proj.weight": (hidden, latent)}
            made[f"{routed}norm.weight"] = (latent,)
        elif key.endswith("input_layernorm.weight"):
            for res in ("self_attention_res", "mlp_res"):
                prefix = f"{key.removesuffix('input_layernorm.weight')}{res}"
                made |= {f"{prefix}_norm.weight": (hidden,), f"{prefix}_proj.weight": (1, hidden)}
        made[key] = shape
    made |= {"model.output_attn_res_norm.weight": (hidden,), "model.output_attn_res_proj.weight": (1, hidden)}
    return {f"language_model.{key}": shape for key, shape in made.items()}


def save_checkpoint(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """A checkpoint of a family's names and shapes with made-up values; returns the shapes."""
    if name in DRAFTERS:
        model = DRAFTERS[name]
        write_config(folder, model.config)
        weights = {key: stored_values_of(key, shape) for key, shape in model.shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        copy_tokenizer(folder)
        return model.shapes
    name, with_mtp = name.removesuffix(MTP), name.endswith(MTP)
    derived, name = name, DERIVED.get(name, name)
    new_model(name).save_pretrained(folder, save_original_format=True)
    text = (folder / "config.json").read_text()
    for own, published in PUBLISHED_AS.get(name, {}).items():
        text = text.replace(own, published)
    (folder / "config.json").write_text(text)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for key, shape in shapes.items():
        if name == "qwen3-vl-moe" and ".mlp.experts." in key:  # so it is published; transformers keeps it otherwise
            shapes[key] = (shape[0], shape[2], shape[1])
    if name in KIMIS:  # so it is published; transformers saves networks without experts by the name of those that have
        dense = re.compile(r"block_sparse_moe\.(\w+_proj\.weight)")
        shapes = {dense.sub(r"mlp.\1", key): shape for key, shape in shapes.items()}
    if name == "ling3":
        published = as_ling3(shapes)
        shapes = {published[key]: shape for key, shape in shapes.items()}
    if with_mtp:
        add_prediction(name, folder, shapes)
    if name == "mimo2":
        as_mimo2(folder)
    if name == "step35":
        as_step35(folder, 2 if with_mtp else 0)
    if name == "dots3-note":
        as_dots3_note(folder)
    if derived == "kimi-k3":
        shapes = as_kimi_k3(folder, shapes)
    if name == "deepseek4":
        shapes = as_deepseek4(folder, shapes)
    if name == "hy-v4":
        shapes = as_hy4(folder, shapes)
    made = coarse_values_of if name in TEMPLATES else stored_values_of
    save_file({key: made(key, shape) for key, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    copy_tokenizer(folder, 320 if name in TEMPLATES else None)
    return shapes


def save_encoder(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """A checkpoint of an encoder with made-up values; returns the shapes, those of dense layers with their folder's
    name before theirs."""
    new_encoder(CONVERTED[name], folder)
    return write_values(folder)


def write_values(folder: Path) -> dict[str, tuple[int, ...]]:
    """Made-up values in place of those of a model and its dense layers; returns the shapes, by names as above."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in [folder / "model.safetensors", *sorted(folder.glob("*_Dense/model.safetensors"))]:
        before = "" if file.parent == folder else f"{file.parent.name}."
        with safe_open(file, "numpy") as tensors:
            own = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        save_file({key: values_of(before + key, shape) for key, shape in own.items()}, file, {"format": "pt"})
        shapes |= {before + key: shape for key, shape in own.items()}
    return shapes


def plain(value: Any) -> Any:
    """A key's value; of a long list its checksum."""
    if isinstance(value, list) and len(value) > 64:
        return {"items": len(value), "checksum": zlib.crc32(json.dumps(value).encode())}
    return round(value, 7) if isinstance(value, float) else value


def main(llama_cpp: Path, names: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class

    load_hparams = ModelBase.load_hparams
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
    for goldens in (GOLDENS, ENCODER_GOLDENS):
        goldens.mkdir(exist_ok=True)
    models = (MODELS | TEMPLATES | CONVERTED | DRAFTERS | DERIVED).keys() - UNKNOWN
    for name in names or [*models, *(f"{name}{MTP}" for name in PREDICTING)]:
        with tempfile.TemporaryDirectory() as where, torch.inference_mode():
            folder, out = Path(where) / (name if name in CONVERTED else "model"), Path(where) / "out.gguf"
            shapes = save_encoder(name, folder) if name in CONVERTED else save_checkpoint(name, folder)
            ModelBase.load_hparams = staticmethod(load_hparams)
            if name.removesuffix(MTP) in UNREADABLE | PUBLISHED:
                config = json.loads((folder / "config.json").read_text())
                config |= config.get("text_config", {})
                ModelBase.load_hparams = staticmethod(lambda *_, config=config, **__: dict(config))
            kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
            kind.no_mtp = not name.endswith(MTP)  # layers that predict further tokens at once
            if name not in CONVERTED:
                kind.set_vocab = TextModel._set_vocab_gpt2  # what the tokenizer is, whatever the family usually has
            floats = gguf.LlamaFileType.MOSTLY_F16 if name in TEMPLATES else gguf.LlamaFileType.ALL_F32
            more: dict[str, Any] = {"sentence_transformers_dense_modules": name in CONVERTED}
            if name in DRAFTERS and (target := DRAFTERS[name].target) is not None:
                more["target_model_dir"] = write_config(Path(where) / "target", target)
            converter = kind(folder, floats, out, **more)
            published = (folder / "config.json").read_text() if (folder / "config.json").exists() else ""
            if name in REMOTE:  # transformers would read it for the tokenizer, as of a model without sizes
                (folder / "config.json").unlink()
            converter.write()
            if name in TEMPLATES:
                (GOLDENS / f"{name}.gguf.xz").write_bytes(lzma.compress(out.read_bytes()))
                continue
            reader = gguf.GGUFReader(out)
            arch = reader.fields["general.architecture"].contents()
            own = (f"{arch}.", "tokenizer.", "xielu.")
            keys = {k: plain(f.contents()) for k, f in reader.fields.items() if k.startswith(own)}
            del keys["tokenizer.ggml.pre"]
            if name in ("deepseek4", "kimi-k3"):  # a text of the converter's own, for checkpoints have none
                keys.pop("tokenizer.chat_template", None)
            tensors = {
                t.name: [[int(n) for n in reversed(t.shape)], checksum(np.array(t.data).reshape(-1))]
                for t in reader.tensors
            }
            config = json.loads(published)
        golden = {"config": config, "checkpoint": shapes, "arch": arch, "keys": keys, "tensors": tensors}
        text = ",\n".join(f'"{part}": {_lines(value)}' for part, value in golden.items())
        goldens = ENCODER_GOLDENS if name in CONVERTED else GOLDENS
        (goldens / f"{name}.json").write_text("{\n" + text + "\n}\n")
        print(name, arch, len(tensors))


def _lines(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

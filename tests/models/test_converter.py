"""Small models of the families, against what llama.cpp's own converter makes of them (tests/data/converter).

A golden has config.json, the checkpoint's names and shapes, and of the converter's GGUF the keys and every tensor with
its shape and a checksum. `tests.support.make_families` wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from bridge.models import describe_model
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.drafter_models import DRAFTERS
from tests.support.encode import load_floats, write_gptq
from tests.support.encode_compressed import write_experts, write_packed
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized
from tests.support.make_families import GOLDENS, checksum, plain, stored_values_of, values_of
from tests.support.remote_models import REMOTE

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.support.tiny_models import dequantized, predict

# what llama.cpp takes for granted where it is not said, or never reads
MORE = {
    "vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "attention.sliding_window", "rope.scaling.attn_factor", "attention.head_count_kv",
    "expert_gating_func", "leading_dense_block_count", "expert_weights_scale", "expert_weights_norm",
    "rope.scaling.original_context_length", "attention.temperature_scale", "attention.temperature_length",
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, 2048, 48).tolist()


def write_checkpoint(golden: dict, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    weights = {name: stored_values_of(name, tuple(shape)) for name, shape in golden["checkpoint"].items()}
    save_file(weights, folder / "model.safetensors")
    return copy_tokenizer(folder)


@pytest.mark.parametrize("name", sorted({path.stem for path in GOLDENS.glob("*.json")} - {*DRAFTERS}))
def test_a_familys_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    checkpoint = write_checkpoint(golden, tmp_path / name)
    types = [("_exps", "MXFP4")] if "quantization_config" in golden["config"] else []
    bridge.convert(checkpoint, tmp_path / "m.gguf", tensor_types=[(".*", "F32"), *types], mmproj_type="none")
    assert_is_golden(tmp_path / "m.gguf", golden)


def assert_is_golden(file: Path, golden: dict) -> None:
    """A GGUF has the keys and tensors of a golden."""
    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    assert arch == golden["arch"]
    keys = {key: plain(field.contents()) for key, field in reader.fields.items()}
    assert {key: keys.get(key) for key in golden["keys"]} == golden["keys"]
    own = {key.removeprefix(f"{arch}.") for key in keys if key.startswith(f"{arch}.")}
    assert own - {key.removeprefix(f"{arch}.") for key in golden["keys"]} <= MORE
    tensors = {t.name: [[int(n) for n in reversed(t.shape) if n > 1], checksum(_floats(t))] for t in reader.tensors}
    assert tensors == {name: [[n for n in shape if n > 1], sum_] for name, (shape, sum_) in golden["tensors"].items()}


def old_rope(config: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """rope_theta and rope_scaling, as configs had them before transformers 5."""
    rules = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rules.pop("rope_theta")
    rules.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rules} if kind else None
    return config


def old_gemma3(config: dict[str, Any]) -> dict[str, Any]:
    rules = config.pop("rope_parameters")
    config["rope_local_base_freq"] = rules["sliding_attention"]["rope_theta"]
    config["rope_theta"] = rules["full_attention"]["rope_theta"]
    return {**config, "layer_types": None, "sliding_window_pattern": 6}


def as_saved_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """MiniMax M3's, whose published keys transformers renames."""
    text = dict(config["text_config"])
    sparse = text.pop("sparse_attention_config")
    names = {
        "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
        "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
        "index_local_blocks": "sparse_local_block",
    }  # fmt: skip
    text |= {key: sparse[published] for key, published in names.items()}
    return {**config, "text_config": text | {"moe_layer_freq": None, "hidden_act": "silu"}}


def deepseek4_of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    rules = {"rope_type": "yarn", **config["rope_scaling"], "rope_theta": config["compress_rope_theta"]}
    main = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    return {
        **config, "rope_scaling": None, "rope_parameters": {"main": main, "compress": rules}, "compress_ratios": None,
        "layer_types": [kinds[ratio] for ratio in config["compress_ratios"]], "num_hash_layers": None,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    }  # fmt: skip


def ling3_of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Ling 3's, which it saves by other names, with the size of another part as head_dim."""
    names = {
        "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token",
    }  # fmt: skip
    config = {names.get(key, key): value for key, value in config.items()}
    for key in ("no_kda_lora", "gated_attention_proj_granularity_type", "score_function"):
        del config[key]
    del config["moe_shared_expert_intermediate_size"]
    return {**config, "architectures": ["BailingHybridForCausalLM"], "head_dim": 8, "linear_head_dim": 16}


def step35_of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """A model of transformers 5, and the key of its rotation back from the list of each layer's."""
    text = dict(config["text_config"])
    other, sparse = text.pop("attention_other_setting"), text.pop("moe_layers_enum").split(",")
    thetas, shares = text.pop("rope_theta"), text.pop("partial_rotary_factors")
    full = {**text.pop("rope_scaling"), "rope_theta": thetas[0], "partial_rotary_factor": shares[0]}
    local = {"rope_type": "default", "rope_theta": thetas[1], "partial_rotary_factor": shares[1]}
    text |= {
        "mlp_layer_types": ["sparse" if str(layer) in sparse else "dense" for layer in range(5)],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "num_sliding_attention_heads": other["num_attention_heads"],
        "n_routed_experts": text.pop("moe_num_experts"), "num_experts_per_tok": text.pop("moe_top_k"),
        "num_key_value_heads": text.pop("num_attention_groups"),
    }  # fmt: skip
    return {**config, "text_config": text}


# what repositories have of before transformers 5: config.json, and the beginnings of names
PUBLISHED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[tuple[str, str], ...]]] = {
    "qwen2.5-vl": (
        lambda config: old_rope(config.pop("text_config") | {"architectures": config["architectures"]}, "mrope"),
        (("model.language_model.", "model."), ("model.visual.", "visual.")),
    ),
    "gemma3": (old_gemma3, ()),
    "gemma3 in a larger model": (
        lambda config: {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": old_gemma3(config)},
        (("model.", "language_model.model."),),
    ),
    "phi3-longrope": (lambda config: old_rope(config, "su"), ()),
    "deepseek3": (lambda config: old_rope(config | {"scoring_func": "sigmoid"}, "yarn"), ()),
    "deepseek3 in Kimi K2.5": (
        lambda config: {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": config},
        (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    "gemma4": (lambda config: {**config, "per_layer_config": None, "global_head_dim": 32}, ()),
    "gemma4-dense": (
        lambda config: {**config, "per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}, ()
    ),
    "gpt2": (dict, (("transformer.", ""),)),
    "gpt-oss": (lambda config: old_rope(config, "yarn"), ()),
    "exaone-moe": (
        lambda config: {**config, "mlp_layer_types": None, "first_k_dense_replace": None, "layer_types": None,
            "first_last_k_dense_replace": 1, "sliding_window_pattern": "LLLG"}, ()
    ),
    "hy3": (
        lambda config: {**config, "mlp_layer_types": None, "first_k_dense_replace": 1, "route_norm": True},
        tuple((f"model.layers.{n}.mlp.expert_bias", f"model.layers.{n}.mlp.e_score_correction_bias") for n in (1, 2)),
    ),
    "nemotron-h-moe": (
        lambda config: {**config, "layers_block_type": None, "hybrid_override_pattern": "ME*E"}, ()
    ),
    "step35": (step35_of_transformers, (("model.", "model.language_model."),)),
    "step35 in 3.5": (lambda config: {**config.pop("text_config"), "architectures": ["Step3p5ForCausalLM"]}, ()),
    "minimax-m2": (lambda config: {**config, "rope_parameters": None, "rope_theta": 5000000.0}, ()),
    "minimax-m3": (as_saved_by_transformers, (("language_model.model.", "model.language_model."),)),
    "ling3": (ling3_of_transformers, ()),
    "ling3 without a list of layers": (lambda config: {**config, "layer_types": None}, ()),
    "ling3 in memory": (
        dict,
        (
            ("model.word_embeddings.", "model.embed_tokens."),
            *(
                (f"model.layers.{layer}.{old}", f"model.layers.{layer}.{new}")
                for layer in range(4)
                for old, new in (
                    *((f"attention.{own}", f"self_attn.forget_gate.{own}") for own in ("A_log", "dt_bias", "f_proj")),
                    ("attention.dense.", "self_attn.o_proj."), ("attention.", "self_attn."),
                    ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
                )
            ),
        ),
    ),
    "glm4-moe": (lambda config: {**config, "num_nextn_predict_layers": 1}, ()),
    "deepseek4": (
        deepseek4_of_transformers,
        (("layers.", "model.layers."), ("embed.", "model.embed_tokens."), ("hc_head_", "model.hc_head.hc_")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_older_configs_and_names_give_the_same_file(name: str, tmp_path: Path) -> None:
    change, renamed = PUBLISHED[name]
    golden = json.loads((GOLDENS / f"{name.partition(' ')[0]}.json").read_text())

    def made(config: dict[str, Any], names: dict[str, list[int]]) -> tuple[dict[str, Any], list[Any]]:
        outline = describe_model(
            config, write_checkpoint({**golden, "checkpoint": {}}, tmp_path / str(len(names))), names, no_mtp=True
        )
        keys = {key: entry.value for key, entry in outline.metadata.items() if key.startswith(golden["arch"])}
        return keys, [(t.name, t.shape, t.fixed_type, [p.shape for p in t.parts]) for t in outline.tensors]

    names = {key: shape for key, shape in golden["checkpoint"].items() if not key.endswith(".scale")}
    older: dict[str, list[int]] = {"rotary_emb.inv_freq": [2]}
    if name == "glm4-moe":
        older |= {"model.layers.3.eh_proj.weight": [1, 1]}  # a layer that predicts a second token
    if name.endswith("Kimi K2.5"):
        older |= {"mm_projector.proj.0.weight": [1, 1], "vision_tower.patch_embed.proj.weight": [1, 1]}
    if name == "deepseek4":
        older |= {"mtp.0.e_proj.weight": [1, 1]}
    for key, shape in names.items():
        old, new = next((pair for pair in renamed if key.startswith(pair[0])), ("", ""))
        older[new + key.removeprefix(old)] = shape
    expected = made(golden["config"], names)
    assert made(change(golden["config"]), older) == expected


# act-order, and sides of whole groups of 32
QUANTIZED: dict[str, tuple[bool, dict[str, Any]]] = {
    "phi3": (True, {}), "glm4": (True, {}), "gpt2": (False, {}), "gemma2": (False, {}),
    "qwen3-next": (False, {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "deepseek3": (False, {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
    "glm4-moe": (False, {"moe_intermediate_size": 32}),
    "qwen3.5": (False, {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    "qwen3.5-moe": (False, {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32}),
    "arcee": (True, {}), "jais2": (True, {}), "olmoe": (False, {}), "mellum2": (False, {"moe_intermediate_size": 32}),
    "minicpm": (True, {}), "minicpm4": (False, {}),
    "afmoe": (True, {"moe_intermediate_size": 32}),
    "youtu": (False, {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}),
    "granite-swa": (True, {}), "granite-moe-swa": (False, {"shared_intermediate_size": 64}),
    "seed-oss": (True, {}), "olmo3": (True, {}), "exaone4": (True, {}), "exaone4.5": (True, {}),
    "ministral3": (True, {}),
    "ernie4.5": (True, {}), "hunyuan": (True, {}), "lfm2": (False, {"intermediate_size": 96, "block_multiple_of": 32}),
    "ernie4.5-moe": (False, {"moe_intermediate_size": 32, "intermediate_size": 128}),
    "lfm2-moe": (False, {"moe_intermediate_size": 32}), "granite-moe-shared": (False, {}),
    "qwen4exp": (False, {"text_config": MODELS["qwen4exp"][1]["text_config"] | {"linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "hc_lowrank": 32}}),
    "ling3": (False, {"kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
    "kimi-linear": (False, {"kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32, "linear_head_dim": 32}),
    "glm4-moe-lite": (False, {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
    "exaone-moe": (False, {"moe_intermediate_size": 32}),
    "cohere2": (True, {}), "cohere2-moe": (False, {}), "hy3": (False, {"moe_intermediate_size": 32}),
    "laguna": (False, {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "step35": (False, {"text_config": MODELS["step35"][1]["text_config"] | {"share_expert_dim": 32}}),
    "mimo2": (False, {"moe_intermediate_size": 32}), "ling": (False, {}),
    "ling2": (False, {"moe_intermediate_size": 32}),
    "solar-open": (False, {"moe_intermediate_size": 32}), "dots1": (False, {"moe_intermediate_size": 32}),
    "hunyuan-moe": (False, {}), "hy-v4": (False, {}), "minimax-m2": (False, {}), "minimax-m3": (False, {}),
    "granite-4": (False, {}), "gemma4": (False, {"hidden_size_per_layer_input": 32}),
    "gemma4-dense": (True, {}), "gemma4-unified": (True, {}), "llama4": (False, {"intermediate_size": 64}),
    "phimoe": (False, {}), "nemotron-h": (False, {"intermediate_size": 96}),
    "nemotron-h-moe": (False, {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}),
    "nemotron-3-super": (
        False, {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32}
    ),
    "gemma3n": (False, {"intermediate_size": 4096}), "mamba2": (False, {}), "jamba": (False, {"mamba_dt_rank": 32}),
    "falcon-h1": (True, {}), "apertus": (True, {}), "deepseek4": (False, {}),
    "glm5": (False, {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
    "glm5-next": (False, {}), "muse-glimmer": (True, {}),
    "deepseek3.2": (False, {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32}),
}  # fmt: skip


def transpose_layers(folder: Path) -> None:
    weights = {name: v.T if v.ndim == 2 and ".h." in name else v for name, v in load_floats(folder).items()}
    contiguous = {name: np.ascontiguousarray(v) for name, v in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_familys_codes_are_carried_and_its_weights_are_the_checkpoints(name: str, tmp_path: Path) -> None:
    """Fused matrices fold with act-order; rows of several tensors and heads keep their codes; k_b is dequantized."""
    act_order, fields = QUANTIZED[name]
    randomized(new_model(name, **fields)).save_pretrained(tmp_path / "float", save_original_format=True)
    copy_tokenizer(tmp_path / "float")
    if name == "gpt2":  # a quantizer makes linear layers of its Conv1D
        transpose_layers(tmp_path / "float")
    stored = write_gptq(tmp_path / "gptq", tmp_path / "float", group_size=32, desc_act=act_order)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="exact", mmproj_type="none")
    assert verify(tmp_path / "m.gguf", tmp_path / "gptq").total() is not None
    of_codes = {t.name: t for t in report.tensors if str(t.source).removesuffix(".weight").replace("*", "0") in stored}
    carried = {
        n: t.outcome for n, t in of_codes.items() if t.kind != "attn_k_b" and (t.kind == "ffn_down" or not act_order)
    }
    assert {*carried.values()} == {"codes carried"}
    assert len(carried) > 3 or act_order
    if name in ("phimoe", "hy-v4") or name in REMOTE:  # which llama.cpp computes otherwise, or transformers lacks
        return
    bridge.convert(tmp_path / "gptq", tmp_path / "f.gguf", tensor_types=[(".*", "F32")], mmproj_type="none")
    reference = dequantized(tmp_path / "reference", tmp_path / "float", stored)
    if name == "gpt2":
        transpose_layers(reference)
    with LlamaCpp(tmp_path / "f.gguf") as loaded:
        assert mean_kl(predict(reference, TOKENS), loaded.logits(TOKENS)) < 1e-5


def test_verify_compares_vectors_that_are_matrices_in_the_file(tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / "granite-4.json").read_text())
    checkpoint = write_checkpoint(golden, tmp_path / "model")
    bridge.convert(checkpoint, tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none")
    report = verify(tmp_path / "m.gguf", checkpoint)
    same = {t.name for t in report.tensors if t.outcome == "kept float"}
    assert {f"blk.0.ssm_{name}" for name in ("a", "d", "norm.weight")} <= same


@pytest.mark.parametrize("name", ["kimi-linear", "ling3"])
def test_verify_compares_convolutions_of_three_dimensions_with_those_of_another_gguf(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(json.loads((GOLDENS / f"{name}.json").read_text()), tmp_path / "model")
    bridge.convert(checkpoint, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    bridge.convert(tmp_path / "m.gguf", tmp_path / "again.gguf", tensor_types=[(".*", "F16")])
    report = verify(tmp_path / "again.gguf", tmp_path / "m.gguf")
    assert failures(report) == []
    assert {f"blk.0.ssm_conv1d_{part}.weight" for part in "qkv"} <= {
        tensor.name for tensor in report.tensors if tensor.outcome == "kept float"
    }


def test_of_ling_3_vl_the_language_model_is_converted_with_the_sections_of_its_rotation(tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / "ling3.json").read_text())
    text = golden["config"] | {"mrope_section": [2, 1, 1]}
    outer = {"architectures": ["BailingMoeV3VLForConditionalGeneration"], "model_type": "bailing_moe_v3_vl"}
    golden["config"] = outer | {"text_config": text, "vision_config": {}}
    golden["checkpoint"] = {
        key.replace("model.", "model.language_model.", 1): v for key, v in golden["checkpoint"].items()
    }
    golden["checkpoint"] |= {"linear_proj.0.weight": [8, 8], "model.visual.pos_embed.weight": [8, 8]}
    folder = write_checkpoint(golden, tmp_path / "vl")
    report = bridge.convert(folder, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    assert any("linear_proj" in note for note in report.notes)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["bailingmoe3.rope.dimension_sections"].contents() == [2, 1, 1, 0]
    assert {t.name for t in reader.tensors} == golden["tensors"].keys()
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert np.isfinite(loaded.logits(TOKENS)).all()


def test_the_int4_experts_of_kimi_k2_are_stacks_of_q4_0_bit_for_bit(tmp_path: Path) -> None:
    small = {"moe_intermediate_size": 64, "hidden_size": 64}
    randomized(new_model("deepseek3", **small)).save_pretrained(tmp_path / "float", save_original_format=True)
    copy_tokenizer(tmp_path / "float")
    stored = write_experts(tmp_path / "int4", tmp_path / "float")
    config = json.loads((tmp_path / "int4/config.json").read_text()) | {"architectures": ["KimiK2ForCausalLM"]}
    (tmp_path / "int4/config.json").write_text(json.dumps(config))
    bridge.convert(tmp_path / "int4", tmp_path / "m.gguf", type="exact", mmproj_type="none")
    stacks = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "_exps." in t.name}
    assert len(stacks) == 3
    for part in ("gate", "up", "down"):
        stack = stacks[f"blk.1.ffn_{part}_exps.weight"]
        assert stack.tensor_type == gguf.GGMLQuantizationType.Q4_0
        values = gguf.dequantize(stack.data, stack.tensor_type)
        experts = [stored[f"model.layers.1.mlp.experts.{expert}.{part}_proj"] for expert in range(4)]
        assert np.array_equal(values.reshape(4, *experts[0].shape), np.stack(experts))


def test_the_4_bit_codes_of_gemma_4_12b_are_q4_0_bit_for_bit(tmp_path: Path) -> None:
    """Its release trained for it: symmetric groups of 32, which Q4_0 has too; what embeds images stays floats."""
    randomized(new_model("gemma4-unified")).save_pretrained(tmp_path / "float", save_original_format=True)
    copy_tokenizer(tmp_path / "float")
    stored = write_packed(tmp_path / "qat", tmp_path / "float", 4, 32)
    report = bridge.convert(tmp_path / "qat", tmp_path / "m.gguf", type="exact", mmproj_type="none")
    tensors = {t.name.removesuffix(".weight"): t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    coded = {t.name: str(t.source) for t in report.tensors if t.outcome == "codes carried"}
    assert {source.removesuffix(".weight") for source in coded.values()} == {*stored}
    for name, source in coded.items():
        tensor = tensors[name.removesuffix(".weight")]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values, stored[source.removesuffix(".weight")])


def test_experts_that_a_quantizer_took_out_of_their_stack_keep_their_codes(tmp_path: Path) -> None:
    """Gemma 4's gate and up are one stack; of experts in modules of their own llama.cpp takes two."""
    randomized(new_model("gemma4-moe", moe_intermediate_size=32)).save_pretrained(tmp_path / "float")
    copy_tokenizer(tmp_path / "float")
    weights = {}
    for name, values in load_floats(tmp_path / "float").items():
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts"):
            weights[name] = values
            continue
        parts = ["gate", "up"] if part == "gate_up_proj" else ["down"]
        for expert, matrix in enumerate(values):
            for own, rows in zip(parts, np.split(matrix, len(parts)), strict=True):
                weights[f"{module}.{expert}.{own}_proj.weight"] = np.ascontiguousarray(rows)
    save_file(weights, tmp_path / "float/model.safetensors", {"format": "pt"})
    stored = write_gptq(tmp_path / "gptq", tmp_path / "float", group_size=32)
    bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="exact", mmproj_type="none")
    stacks = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name.startswith("blk.1.ffn_")}
    assert "blk.1.ffn_gate_up_exps.weight" not in stacks
    for part in ("gate", "up", "down"):
        stack = stacks[f"blk.1.ffn_{part}_exps.weight"]
        assert stack.tensor_type == gguf.GGMLQuantizationType.Q4_0
        values = gguf.dequantize(stack.data, stack.tensor_type)
        experts = [stored[f"model.layers.1.experts.{expert}.{part}_proj"].dequantize() for expert in range(4)]
        assert np.array_equal(values.reshape(4, *experts[0].shape), np.stack(experts))
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert np.isfinite(loaded.logits(TOKENS)).all()


def test_gemma_3ns_tokens_without_an_input_of_their_own_have_that_of_the_first(tmp_path: Path) -> None:
    """As in transformers: config.json counts tokens of images and sound, which are the last."""
    golden = json.loads((GOLDENS / "gemma3n.json").read_text())
    name = "model.embed_tokens_per_layer.weight"
    golden["config"]["vocab_size_per_layer_input"] = golden["checkpoint"][name][0] = 2000
    checkpoint = write_checkpoint(golden, tmp_path / "model")
    bridge.convert(checkpoint, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    stored = values_of(name, (2000, golden["checkpoint"][name][1]))
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert np.array_equal(tensors["per_layer_token_embd.weight"], np.concatenate([stored, *48 * [stored[:1]]]))


def test_a_graph_that_needs_a_head_gets_the_checkpoints_where_it_is_there(tmp_path: Path) -> None:
    """Beside embeddings that are tied by the config of the language model alone; else it gets these."""
    golden = json.loads((GOLDENS / "muse-glimmer.json").read_text())
    golden["config"]["text_config"]["tie_word_embeddings"] = True
    for name, head in (("both", "lm_head.weight"), ("one", "model.language_model.embed_tokens.weight")):
        bridge.convert(
            write_checkpoint(golden, tmp_path / name),
            tmp_path / f"{name}.gguf",
            tensor_types=[(".*", "F32")],
            mmproj_type="none",
        )
        tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
        assert np.array_equal(tensors["output.weight"], values_of(head, tensors["output.weight"].shape))
        golden["checkpoint"].pop("lm_head.weight", None)


def test_a_number_of_an_activation_that_is_none_is_refused(tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / "apertus.json").read_text())
    golden["checkpoint"]["model.layers.1.mlp.act_fn.beta"] = [2]
    with pytest.raises(BridgeError, match=r"model\.layers\.1\.mlp\.act_fn\.beta: is \[.*must be one number"):
        bridge.convert(write_checkpoint(golden, tmp_path / "model"), tmp_path / "m.gguf")


def test_tied_embeddings_that_are_multiplied_otherwise_than_the_head_are_stored_twice(tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / "falcon-h1.json").read_text())
    golden["config"]["tie_word_embeddings"] = True
    del golden["checkpoint"]["lm_head.weight"]
    checkpoint = write_checkpoint(golden, tmp_path / "model")
    bridge.convert(checkpoint, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    stored = values_of("model.embed_tokens.weight", tensors["output.weight"].shape)
    for name, factor in (("token_embd.weight", "embedding_multiplier"), ("output.weight", "lm_head_multiplier")):
        assert np.array_equal(tensors[name], stored * np.float32(golden["config"][factor]))


def _floats(tensor: gguf.ReaderTensor) -> np.ndarray:
    return np.asarray(tensor.data, np.float32).reshape(-1)

"""Names, shapes, row orders, provenance, and the refusals of `describe_model`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bridge.errors import BridgeError
from bridge.models import describe_model
from bridge.models.config.rope import interleaved_rows
from bridge.models.outline import Outline, number
from bridge.system.storage.files import read_json
from tests.conftest import CHECKPOINT
from tests.support.float_gguf import outline_of, write_keys
from tests.support.tiny_vocab import NAMES, write_config

QWEN2_NAMES = [*NAMES, *(f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv")]
NORMED = [*NAMES, *(f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk")]


YARN = {"type": "yarn", "factor": 4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory with a tokenizer; tests write its config.json."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, tmp_path / file)
    return tmp_path


def describe(folder: Path, names: list[str] = NAMES, **config: Any) -> Outline:
    write_config(folder, **config)
    return outline_of(folder, names)


def keys(outline: Outline, tmp_path: Path) -> dict[str, Any]:
    """An outline's metadata, written to a file and read back."""
    path = tmp_path / "keys.gguf"
    writer = write_keys(outline, path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return {name: field.contents() for name, field in gguf.GGUFReader(str(path)).fields.items()}


def test_tensors_are_named_shaped_and_ordered_as_llama_cpp_lists_them(folder: Path) -> None:
    outline = describe(folder, [*NAMES, "lm_head.weight"], tie_word_embeddings=False, num_key_value_heads=1, head_dim=8)
    shapes = {tensor.name: tensor.shape for tensor in outline.tensors}
    assert next(iter(shapes)) == "token_embd.weight"
    assert shapes["blk.0.attn_q.weight"] == (16, 32)
    assert shapes["blk.0.attn_k.weight"] == shapes["blk.0.attn_v.weight"] == (8, 32)
    assert shapes["blk.0.attn_output.weight"] == (32, 16)
    assert shapes["output.weight"] == (64, 32)
    by_kind = {tensor.kind: tensor for tensor in outline.tensors}
    assert {"token_embd", "output", "output_norm", "attn_norm", "attn_q", "ffn_down", "ffn_norm"} <= set(by_kind)
    assert by_kind["attn_q"].layer == 0
    assert by_kind["output"].layer is None
    assert [kind for kind, tensor in by_kind.items() if tensor.fixed_type == "F32"] == [
        "attn_norm", "ffn_norm", "output_norm",
    ]  # fmt: skip
    assert [(fold.consumer, fold.producers) for fold in outline.folds] == [
        ("model.layers.0.mlp.down_proj", ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"))
    ]


def test_llama_q_and_k_rows_interleave_the_two_halves_of_each_head() -> None:
    assert interleaved_rows(2, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_row_orders_are_for_q_and_k_and_their_biases_in_llama_alone(folder: Path) -> None:
    biases = [f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkvo"]
    outline = describe(folder, [*NAMES, *biases], attention_bias=True)
    ordered = [tensor.name for tensor in outline.tensors if tensor.parts[0].rows is not None]
    assert ordered == ["blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_k.weight", "blk.0.attn_k.bias"]
    outline = describe(folder, QWEN2_NAMES, architectures=["Qwen2ForCausalLM"])
    assert all(tensor.parts[0].rows is None for tensor in outline.tensors)


def test_tied_embeddings_have_no_output_and_a_saved_copy_is_unused(folder: Path) -> None:
    outline = describe(folder, [*NAMES, "lm_head.weight"])
    assert outline.unused == ["lm_head.weight"]
    assert not any(tensor.kind == "output" for tensor in outline.tensors)


def test_tied_embeddings_that_were_saved_as_the_head_alone_are_found(folder: Path) -> None:
    names = [name for name in NAMES if "embed" not in name] + ["lm_head.weight"]
    outline = describe(folder, names)
    assert outline.tensors[0].name == "token_embd.weight"
    assert outline.tensors[0].source == "lm_head.weight"


def test_rotary_buffers_are_silently_dropped(folder: Path) -> None:
    outline = describe(folder, [*NAMES, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
    assert outline.unused == outline.zero_only == []


def test_biases_that_the_architecture_lacks_must_be_zero(folder: Path) -> None:
    extra = "model.layers.0.mlp.down_proj.bias"
    outline = describe(folder, [*QWEN2_NAMES, extra], architectures=["Qwen2ForCausalLM"])
    assert outline.zero_only == [extra]
    assert not outline.optional  # Qwen2 must have its own
    outline = describe(folder, [*NAMES, extra])  # Llama's graph has it, and can do without
    assert outline.zero_only == []
    assert any(tensor.source == extra for tensor in outline.tensors)
    assert outline.optional == {extra}


def test_qwen3_without_head_dim_has_128(folder: Path) -> None:
    outline = describe(folder, NORMED, architectures=["Qwen3ForCausalLM"])
    assert number(outline.metadata, "attention.key_length") == 128
    assert {t.name: t.shape for t in outline.tensors}["blk.0.attn_q.weight"] == (256, 32)


def test_llama3_factors_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    fields = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    outline = describe(folder, rope_parameters=rope, **fields)
    (made,) = (tensor for tensor in outline.tensors if tensor.origin == "config")
    config = transformers.LlamaConfig(**fields, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    assert made.name == "rope_freqs.weight"
    assert made.data is not None
    assert made.data.dtype == np.float32
    np.testing.assert_allclose(plain / made.data, scaled.numpy(), rtol=2e-6)


# --- metadata ---


def test_hyperparameters_are_written(folder: Path, tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}
    written = keys(describe(folder, num_key_value_heads=1, rope_theta=5e5, rope_scaling=rope), tmp_path)
    expected = {
        "general.architecture": "llama", "general.type": "model", "llama.context_length": 128,
        "llama.embedding_length": 32, "llama.block_count": 1, "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.attention.key_length": 16,
        "llama.attention.value_length": 16, "llama.rope.dimension_count": 16, "llama.rope.freq_base": 5e5,
        "llama.vocab_size": 64, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }  # fmt: skip
    assert {key: written[key] for key in expected} == expected
    assert written["llama.rope.scaling.attn_factor"] == pytest.approx(1 / (1 + 0.1 * np.log(4)))
    assert "general.file_type" not in written


def test_the_model_card_and_the_repository_go_into_the_metadata(folder: Path, tmp_path: Path) -> None:
    card = "---\nlicense: apache-2.0\nbase_model: Some/Base-7B\ntags: [chat]\nlanguage: [en]\n---\n# A model\n"
    (folder / "README.md").write_text(card)
    written = keys(describe(folder, _name_or_path="Owner/Base-7B-GPTQ"), tmp_path)
    assert written["general.name"] == "Base-7B-GPTQ"
    assert written["general.license"] == "apache-2.0"
    assert written["general.source.url"] == "https://huggingface.co/Owner/Base-7B-GPTQ"
    assert written["general.base_model.count"] == 1
    assert written["general.base_model.0.repo_url"] == "https://huggingface.co/Some/Base-7B"
    assert written["general.tags"] == ["chat"]
    assert written["general.languages"] == ["en"]


def test_a_folder_in_the_hubs_cache_knows_its_repository(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Owner--Model-1B-AWQ" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("models--*"))
    written = keys(describe(snapshot), tmp_path)
    assert written["general.name"] == "Model-1B-AWQ"
    assert written["general.source.url"] == "https://huggingface.co/Owner/Model-1B-AWQ"


def test_a_local_path_in_the_config_is_no_repository(folder: Path, tmp_path: Path) -> None:
    written = keys(describe(folder, _name_or_path="/home/somebody/models/llama"), tmp_path)
    assert "general.source.url" not in written
    assert not any("somebody" in str(value) for value in written.values())


def test_sampling_defaults_are_written_as_numbers_unless_the_model_is_greedy(folder: Path, tmp_path: Path) -> None:
    defaults = {"temperature": 1, "top_k": 40.0, "top_p": "high"}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    written = keys(describe(folder), tmp_path)
    assert written["general.sampling.temp"] == 1.0
    assert written["general.sampling.top_k"] == 40
    assert "general.sampling.top_p" not in written
    for odd in (math.nan, math.inf, 10**30):
        (folder / "generation_config.json").write_text(json.dumps(defaults | {"top_k": odd, "temperature": odd}))
        assert not {"general.sampling.top_k", "general.sampling.temp"} & keys(describe(folder), tmp_path).keys()
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"do_sample": False}))
    assert "general.sampling.temp" not in keys(describe(folder), tmp_path)


def test_a_broken_model_card_is_reported_and_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [unclosed\nbase_model: {a: b\n---\n")
    outline = describe(folder)
    keys(outline, tmp_path)
    assert any("README.md" in note for note in outline.notes)


# --- refusals ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
            r"unknown architecture BloomForCausalLM and model_type bloom; docs/checkpoints.* template='OWNER/MODEL-",
        ),
        (
            {"architectures": None, "model_type": None},
            r"config.json: has neither 'architectures' nor 'model_type'",
        ),
        ({"hidden_size": None}, r"config.json: the key 'hidden_size' is missing"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers is 'two', must be a positive integer"),
        ({"rms_norm_eps": -1}, r"rms_norm_eps is -1, must be a positive number"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan, must be a positive number"),
        ({"max_position_embeddings": 10**12}, r"max_position_embeddings is 1000000000000, must be a positive integer"),
        ({"rope_theta": -1.0}, r"rope_theta is -1.0, must be a positive number"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            r"hidden_size 32 is not a multiple of 5 heads, and head_dim is missing",
        ),
        ({"num_key_value_heads": 3}, r"2 heads cannot share 3 key-value heads"),
        ({"head_dim": 7}, r"head_dim 7 is odd"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "ntk"}}, r"unknown rope type 'ntk'; .* any other needs template"),
        ({"rope_scaling": {"type": "longrope"}}, r"long_factor is None, must be 8 numbers"),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 2},
            r"partial_rotary_factor is 2, must be a number",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0]},
            r"no_rope_layers is \[0\]; llama.cpp omits rotation in every fourth",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_act": None, "query_pre_attn_scalar": 99},
            r"query_pre_attn_scalar is 99; llama.cpp uses 256",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "hidden_act": None,
                "rope_parameters": {"sliding_attention": 3},
                "layer_types": ["sliding_attention"],
            },
            r"a key for gemma3 has an unexpected value \(AttributeError",
        ),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, r"mrope_section is None, must be three counts"),
        ({"rope_scaling": "linear"}, r"rope_scaling is 'linear', must be an object"),
        ({"rope_parameters": 7}, r"rope_parameters is 7, must be an object"),
        ({"rope_parameters": ["yarn"]}, r"rope_parameters is \['yarn'\], must be an object"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, but the checkpoint has 11 tensors in all"),
        ({"num_hidden_layers": 2}, r"model.layers.1.input_layernorm.weight is missing"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 10+, must be a positive number"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300, must be a positive number"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}}, r"is 0.5, must be a count of tokens"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 5}},
            r"low_freq_factor 5 must not be above high_freq_factor 4",
        ),
        ({"architectures": "BloomForCausalLM", "model_type": None}, r"unknown architecture BloomForCausalLM; "),
        ({"rope_scaling": {"type": "linear"}}, r"the rope parameters' factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"the rope parameters' low_freq_factor is None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 64}}, r"yarn with beta_fast 64"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}}, r"yarn with truncate false"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": "x"}},
            r"original_max_position_embeddings is 'x'",
        ),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 1e30}},
            r"embeddings is 1e\+30, must be a count of tokens",
        ),
        ({"rope_scaling": YARN | {"attention_factor": "x"}}, r"attention_factor is 'x', must be a positive number"),
        (
            {"rope_scaling": YARN | {"mscale": [1], "mscale_all_dim": 1}},
            r"mscale is \[1\], must be a positive number",
        ),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused_by_its_key(folder: Path, config: dict, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        describe(folder, **config)


def test_a_config_of_absurd_sizes_is_refused_before_lists_are_made_of_them(folder: Path) -> None:
    shapes = {name: [32, 32] for name in NAMES}
    write_config(folder, hidden_size=10**9)
    with pytest.raises(BridgeError, match=r"hidden_size is 1000000000, but the longest side of any tensor is 32"):
        describe_model(read_json(folder / "config.json"), folder, shapes)


def test_swish_is_another_name_of_silu(folder: Path) -> None:
    assert describe(folder, hidden_act="swish").tensors


def test_a_missing_tensor_is_named(folder: Path) -> None:
    missing = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(BridgeError, match=rf"^{missing} is missing"):
        describe(folder, [name for name in NAMES if name != missing])


def test_a_missing_bias_is_named(folder: Path) -> None:
    with pytest.raises(BridgeError, match=r"^model.layers.0.self_attn.q_proj.bias is missing"):
        describe(folder, attention_bias=True)


def test_a_missing_head_is_named_where_the_embeddings_are_not_tied(folder: Path) -> None:
    with pytest.raises(BridgeError, match=r"^lm_head.weight is missing.*config\.json must say tie_word_emb"):
        describe(folder, tie_word_embeddings=False)


def test_the_first_spelling_of_llama_is_known(folder: Path) -> None:
    assert describe(folder, architectures=["LLaMAForCausalLM"]).tensors


def test_a_tensor_that_nobody_knows_is_named(folder: Path) -> None:
    with pytest.raises(
        BridgeError, match=r"^model.layers.1.mlp.up_proj.weight: no tensor of a llama model of 1 layers"
    ):
        describe(folder, [*NAMES, "model.layers.1.mlp.up_proj.weight"])


def test_a_damaged_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(BridgeError, match=r"generation_config.json: not a JSON object but a list"):
        describe(folder)

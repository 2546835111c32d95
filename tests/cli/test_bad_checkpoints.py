"""Tensors and configs that contradict each other, and values that are not numbers: one line names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import bridge
from bridge.cli import main
from tests.conftest import PATIENCE, linux
from tests.support.command_line import GATE, bridge_process, edit_json, one_line
from tests.support.make_families import save_checkpoint
from tests.support.raw import Raw, edit_raw


def set_shape(name: str, shape: list[int]) -> Callable[[Raw], None]:
    """A change of the header alone: as many elements, in another shape."""
    return lambda tensors: tensors[name][0].update(shape=shape)


@pytest.mark.parametrize(
    ("part", "shape"), [("scales", [1, 1536]), ("scales", [4, 384]), ("qzeros", [4, 48]), ("qweight", [16, 1536])]
)
def test_shapes_within_a_module_that_contradict_each_other(model, convert, part, shape):
    edit_raw(model / "model.safetensors", set_shape(f"{GATE}.{part}", shape))
    error = convert()
    assert "model.safetensors" in error
    assert GATE in error


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"hidden_size": 128}, "model.embed_tokens.weight"),
        ({"hidden_size": 512}, "model.embed_tokens.weight"),
        ({"vocab_size": 4096}, "model.embed_tokens.weight"),
        ({"intermediate_size": 512}, "model.layers.0.mlp.down_proj"),
        ({"intermediate_size": 1024}, "model.layers.0.mlp.gate_proj"),
        ({"num_attention_heads": 8}, "model.layers.0.self_attn.q_proj"),
        ({"num_key_value_heads": 1}, "model.layers.0.self_attn.k_proj"),
        ({"head_dim": 32}, "model.layers.0.self_attn"),
        ({"num_hidden_layers": 3}, "model.layers.3."),
        ({"num_hidden_layers": 5}, "model.layers.4."),
    ],
)
def test_a_config_that_contradicts_the_weights(model, convert, changes, tensor):
    edit_json(model / "config.json", **changes)
    assert tensor in convert()


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 1024}


@linux
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the checkpoint has 46 tensors in all"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, but the longest side of any tensor is 2048 (model.embed"),
        ({"num_attention_heads": 2**31 - 2}, "num_attention_heads times head_dim is 137438953344, but"),
        ({"num_attention_heads": 2**30, "architectures": ["LlamaForCausalLM"]}, "num_attention_heads times head_dim"),
        ({"head_dim": 2**31 - 2, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}}, "times head_dim is"),
        (MIXTURE | {"num_experts": 2**31 - 1}, "num_experts is 2147483647, but"),
        (MIXTURE | {"num_local_experts": 2**31 - 1}, "num_local_experts is 2147483647, but"),
        (MIXTURE | {"moe_intermediate_size": 2**31 - 1}, "moe_intermediate_size is 2147483647, but"),
        (MIXTURE | {"num_experts": 2048}, "model.layers.0.mlp.gate.weight"),
    ],
)
def test_counts_far_beyond_the_tensors_cost_neither_time_nor_memory(model, tmp_path, changes, said):
    edit_json(model / "config.json", **changes)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
    limit += "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\nrun()"
    with bridge_process(limit, "convert", model, tmp_path / "out.gguf") as process:
        try:
            _, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 2
    assert said in one_line(error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_no_numbers(model, convert, value):
    def spoil(tensors: Raw) -> None:
        entry, data = tensors[f"{GATE}.scales"]
        tensors[f"{GATE}.scales"] = entry, np.float16(value).tobytes() + data[2:]

    edit_raw(model / "model.safetensors", spoil)
    error = convert()
    assert "model.safetensors" in error
    assert f"{GATE}.scales" in error
    assert "NaN or infinite" in error


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
def test_floats_that_are_no_numbers(model, convert, name):
    def spoil(tensors: Raw) -> None:
        entry, data = tensors[name]
        tensors[name] = entry, b"\xc0\x7f" + data[2:]  # NaN in bf16

    edit_raw(model / "model.safetensors", spoil)
    assert f"model.safetensors: {name} holds NaN or infinite values" in convert()


def test_values_that_no_block_type_reaches_are_said_to_be_lost(model, tmp_path, capsys):
    def scale(tensors: Raw) -> None:
        entry, data = tensors[f"{GATE}.scales"]
        tiny = np.frombuffer(data, np.float16).astype(np.float32) * np.float32(1e-8)
        tensors[f"{GATE}.scales"] = entry | {"dtype": "F32"}, tiny.tobytes()

    edit_raw(model / "model.safetensors", scale)
    command = ["convert", str(model), str(tmp_path / "out.gguf")]
    for type in ("Q8_0", "Q4_K", "F16"):
        assert main([*command, "--force", "--tensor-type", f"blk.2.ffn_gate={type}"]) == 0
        assert "note: blk.2.ffn_gate.weight: is far off (NMSE " in capsys.readouterr().out
    assert main([*command, "--force"]) == 0  # type auto takes BF16
    assert "far off" not in capsys.readouterr().out
    assert bridge.open_gguf(tmp_path / "out.gguf")["blk.2.ffn_gate.weight"].type == "BF16"
    assert main(["verify", str(tmp_path / "out.gguf"), str(model)]) == 0


def test_floats_too_small_for_any_block_type_stay_floats(model, tmp_path, capsys):
    name = "model.embed_tokens.weight"

    def scale(tensors: Raw) -> None:
        entry, data = tensors[name]
        tiny = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(1e-8)
        tensors[name] = entry, (tiny.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    edit_raw(model / "model.safetensors", scale)
    command = ["convert", str(model), str(tmp_path / "out.gguf"), "--force"]
    assert main(command) == 0
    assert "far off" not in capsys.readouterr().out
    assert bridge.open_gguf(tmp_path / "out.gguf")["token_embd.weight"].type == "BF16"
    assert main([*command, "--token-embd-type", "F16"]) == 0
    assert "token_embd.weight: " in (out := capsys.readouterr().out)
    assert "below half precision's range, and far off in F16 (NMSE 1)" in out


def test_a_tensor_that_is_not_there(model, convert):
    edit_raw(model / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    assert "model.layers.1.input_layernorm.weight" in convert()


def test_tensors_of_a_larger_model_are_named(model, convert):
    def rename(tensors: Raw) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit_raw(model / "model.safetensors", rename)
    assert "is language_model.model.embed_tokens.weight" in convert()


def test_an_unknown_method_and_the_known_ones_are_named(model, convert):
    for name in ("config.json", "quantize_config.json"):
        edit_json(model / name, quantization_config={"quant_method": "magic", "bits": 4}, quant_method="magic")
    error = convert()
    assert "'magic'" in error
    assert "gptq" in error
    assert "awq" in error


def test_an_unknown_architecture_is_named_with_the_page_of_the_known_ones(model, convert):
    """They are too many for one line of an error; tests/models/test_families.py proves that the page has each."""
    edit_json(model / "config.json", architectures=["GPT9ForCausalLM"], model_type="gpt9")
    error = convert()
    assert "GPT9ForCausalLM" in error
    assert "model-f16.gguf" in error
    assert "docs/checkpoints.md lists those that are known" in error


@pytest.mark.parametrize(
    "changes",
    [{"architectures": a} for a in (17, [17], [{}], {"a": 1}, True)] + [{"model_type": {}}, {"model_type": 17}],
)
def test_an_architecture_that_is_no_name(model, convert, changes):
    edit_json(model / "config.json", **({"architectures": None} | changes))
    assert "must be names; take the config.json of the original model" in convert()


def test_a_pre_tokenizer_that_is_not_recognised_asks_for_pre(model, convert, tmp_path, capsys):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[aeiou]+|[^aeiou]+"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "unknown pre-tokenizer rules" in convert()
    assert main(["inspect", str(model)]) == 0
    assert "convert would stop: " in capsys.readouterr().out
    assert main(["convert", str(model), str(tmp_path / "out.gguf"), "--pre", "qwen2"]) == 0


def test_a_value_whose_exponential_is_beyond_float32_is_named(tmp_path, capsys):
    save_checkpoint("mamba2", tmp_path / "model")
    name = "backbone.layers.1.mixer.A_log"

    def change(tensors: Raw) -> None:
        entry, data = tensors[name]
        tensors[name] = entry, np.full(len(data) // 4, 100, np.float32).tobytes()

    edit_raw(tmp_path / "model/model.safetensors", change)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out.gguf")]) == 2
    assert f"model.safetensors: {name} holds 100, whose -exp is beyond float32" in one_line(capsys.readouterr().err)

"""4-bit floats come out as they were stored, whoever wrote them, and go to MXFP4 and NVFP4 bit for bit."""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import E2M1, Fp4Tensor
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.writing.report import CARRIED, FLOAT, REQUANTIZED
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from scripts.peers import reference
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.conftest import shared
from tests.support import encode_fp4 as fp4
from tests.support.described import describe
from tests.support.encode import write_folder
from tests.support.encode_compressed import config, packed_tensors, quantize, scheme
from tests.support.refusal import refusal
from tests.support.tiny_models import dequantized, predict, save_model

TOKENS = np.random.default_rng(1).integers(0, 320, 40).tolist()
NAME = "model.layers.0.mlp.up_proj"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4}


def weights(out: int = 24, columns: int = 128) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns)).astype(np.float32)


def mlx(name, weight, mode):
    return fp4.mlx_fp4_tensors(name, weight, mode)


# what wrote it -> (its tensors and what they mean; its config; the kind)
WRITERS = {
    "modelopt": (fp4.modelopt_tensors, MODELOPT, "NVFP4"),
    "ct-nvfp4": (fp4.compressed_tensors, config(fp4.fp4_scheme("nvfp4"), form="nvfp4-pack-quantized"), "NVFP4"),
    "ct-mxfp4": (fp4.compressed_mxfp4, config(fp4.fp4_scheme("mxfp4"), form="mxfp4-pack-quantized"), "MXFP4"),
    "auto-round-nvfp4": (fp4.compressed_tensors, ROUND | {"data_type": "nv_fp", "group_size": 16}, "NVFP4"),
    "auto-round-mxfp4": (fp4.compressed_mxfp4, ROUND | {"data_type": "mx_fp", "group_size": 32}, "MXFP4"),
    "mlx-mxfp4": (partial(mlx, mode="mxfp4"), {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "MXFP4"),
    "mlx-nvfp4": (partial(mlx, mode="nvfp4"), {"group_size": 16, "bits": 4, "mode": "nvfp4"}, "NVFP4"),
}


def folder_of(tmp_path, who, tensors):
    write_folder(tmp_path, tensors, WRITERS[who][1])
    if WRITERS[who][2] == "NVFP4" and who != "mlx-nvfp4":
        fp4.label_scales(tmp_path)
    return tmp_path


@pytest.mark.parametrize("who", WRITERS)
def test_what_was_stored_comes_back_whole_and_in_rows(tmp_path, who):
    write, _, kind = WRITERS[who]
    tensors, values = write(NAME, weights())
    tensors[f"{NAME}.bias"] = np.arange(24, dtype=np.float16)
    with open_checkpoint(folder_of(tmp_path, who, tensors)) as checkpoint:
        info = checkpoint.modules[NAME]
        assert (info.bits, info.group_size, info.shape) == (4, {"NVFP4": 16, "MXFP4": 32}[kind], (24, 128))
        tensor = checkpoint.read_module(NAME)
        some = checkpoint.read_module(NAME, np.array([1, 5, 23]))
        assert isinstance(tensor, Fp4Tensor)
        assert tensor.kind == kind
        np.testing.assert_array_equal(tensor.dequantize(), values)
        np.testing.assert_array_equal(tensor.dequantize(slice(3, 9)), values[3:9])
        np.testing.assert_array_equal(some.dequantize(), values[[1, 5, 23]])
        np.testing.assert_array_equal(tensor.bias, np.arange(24))
        assert some.bias is None
        assert checkpoint.notes == []


def test_the_expected_noise_is_that_of_rounding_to_the_nearest(tmp_path):
    x = np.random.default_rng(1).uniform(-6, 6, (64, 1024)).astype(np.float32)
    codes, scales, values = fp4.mxfp4(x)
    tensor = Fp4Tensor("t", "MXFP4", codes, scales, 32)
    assert tensor.noise() == pytest.approx(np.square(values - x, dtype=np.float64).sum(), rel=0.25)
    assert np.array_equal(E2M1[:8] * 2, [0, 1, 2, 3, 4, 6, 8, 12])


def test_rows_columns_and_crops_are_those_of_the_weights():
    codes, scales, whole, values = fp4.nvfp4(weights())
    tensor = Fp4Tensor("t", "NVFP4", codes, scales, 16, float(whole))
    rng = np.random.default_rng(2)
    rows, columns = rng.permutation(24), rng.permutation(128)
    np.testing.assert_array_equal(tensor.take_rows(rows).dequantize(), values[rows])
    np.testing.assert_array_equal(tensor.crop(10, 64).dequantize(), values[:10, :64])
    moved = tensor.take_columns(columns)
    assert not moved.sequential
    np.testing.assert_array_equal(moved.dequantize(), values[:, columns])
    back = moved.take_columns(np.argsort(columns))
    assert back.sequential
    np.testing.assert_array_equal(back.dequantize(), values)


def test_experts_of_gpt_oss_become_modules_and_their_rows_part_into_gate_and_up(tmp_path):
    rng = np.random.default_rng(3)
    gate_up, down = (rng.normal(0, 0.05, shape).astype(np.float32) for shape in ((3, 20, 64), (3, 12, 96)))
    stack = "model.layers.0.mlp.experts"
    tensors, meant = fp4.gpt_oss_tensors(stack, gate_up, down)
    tensors[f"{stack}.gate_up_proj_bias"] = np.ones((3, 20), np.float16)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    with open_checkpoint(write_folder(tmp_path, tensors, said)) as checkpoint:
        assert len(checkpoint.modules) == 9
        assert set(checkpoint.tensors) == {f"{stack}.gate_up_proj_bias"}
        assert checkpoint.quant.describe() == "MXFP4 experts, 4-bit floats, groups of 32"
        for expert in range(3):
            parts = {"gate_proj": meant["gate_up_proj"][expert, ::2], "up_proj": meant["gate_up_proj"][expert, 1::2]}
            for name, values in (parts | {"down_proj": meant["down_proj"][expert]}).items():
                module = f"{stack}.{expert}.{name}"
                assert checkpoint.modules[module].shape == values.shape
                np.testing.assert_array_equal(checkpoint.read_module(module).dequantize(), values)
                rows = np.array([0, 7])
                np.testing.assert_array_equal(checkpoint.read_module(module, rows).dequantize(), values[rows])


def edited(change):
    """The tensors of ModelOpt's module, changed."""
    tensors = fp4.modelopt_tensors(NAME, weights())[0]
    change(tensors)
    return tensors


def part(tensors, name):
    return tensors[f"{NAME}.{name}"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{NAME}.weight_scale_2"), "has weight and weight_scale but no weight_scale_2; is the"),
        (lambda t: t.pop(f"{NAME}.weight_scale"), "has input_scale, weight, weight_scale_2 but no weight_scale"),
        (lambda t: t.pop(f"{NAME}.weight"), "but no weight"),
        (lambda t: part(t, "weight_scale").__setitem__((1, 1), 127), "1 of 192 values of"),
        (lambda t: part(t, "weight_scale").__setitem__((1, 1), 0x80), "are NaN or negative"),
        (lambda t: part(t, "weight_scale_2").fill(np.nan), "weight_scale_2 is nan, not a scale"),
        (lambda t: part(t, "weight_scale_2").fill(np.inf), "weight_scale_2 is inf, not a scale"),
        (lambda t: part(t, "weight_scale_2").fill(0), "weight_scale_2 is 0, not a scale"),
        (lambda t: part(t, "weight_scale_2").fill(-1), "weight_scale_2 is -1, not a scale"),
        (lambda t: t.update({f"{NAME}.weight_scale_2": np.ones(24, np.float32)}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight": part(t, "weight")[:, :-1].copy()}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight": part(t, "weight")[:5].copy()}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight": part(t, "weight")[None]}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight": part(t, "weight")[:0]}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight_scale": part(t, "weight_scale").repeat(2, 1)}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.bias": np.zeros(23, np.float16)}), "contradict each other"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    assert said in refusal(folder_of(tmp_path, "modelopt", edited(change)))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
@pytest.mark.parametrize("tool", ["modelopt", "ct-nvfp4"])
def test_a_scale_of_activations_that_is_none_is_noted_and_left_out(tmp_path, tool, value):
    """That of an expert that saw no token is 0; the weights do not depend on it."""
    name, tensors, meant = "input_scale", *fp4.modelopt_tensors(NAME, weights())
    if tool == "ct-nvfp4":
        name, (tensors, meant) = "input_global_scale", fp4.compressed_tensors(NAME, weights())
    tensors[f"{NAME}.{name}"] = np.full(1, value, np.float32)
    with open_checkpoint(folder_of(tmp_path, tool, tensors)) as checkpoint:
        assert checkpoint.tensor_scales(NAME).keys() == {"scale"}
        t = checkpoint.read_module(NAME)
        np.testing.assert_array_equal(t.dequantize(), meant)
        (note,) = t.notes
        assert note.startswith(f"{NAME}: {name} is {value:g}, no scale of activations")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: part(t, "weight_scale").__setitem__((0, 0), 255), "1 of 96 values of"),
        (lambda t: t.pop(f"{NAME}.weight_scale"), "has weight_packed but no weight_scale"),
        (lambda t: t.update({f"{NAME}.weight_global_scale": np.ones(1, np.float32)}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight_scale": part(t, "weight_scale").astype(np.float16)}), "contradict each"),
    ],
)
def test_damaged_mxfp4_is_named_in_one_line(tmp_path, change, said):
    tensors = fp4.compressed_mxfp4(NAME, weights())[0]
    change(tensors)
    assert said in refusal(folder_of(tmp_path, "ct-mxfp4", tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["e.down_proj_scales"].__setitem__((0, 0, 0), 255), "are NaN or negative"),
        (lambda t: t.pop("e.down_proj_scales"), "e.down_proj has blocks but no scales"),
        (lambda t: t.update({"e.down_proj_blocks": t["e.down_proj_blocks"][..., :8].copy()}), "contradict each other"),
        (lambda t: t.update({"e.gate_up_proj_blocks": t["e.gate_up_proj_blocks"][:, :3].copy()}), "contradict each"),
    ],
)
def test_damaged_stacks_of_experts_are_named_in_one_line(tmp_path, change, said):
    tensors = fp4.gpt_oss_tensors("e", np.ones((2, 4, 64), np.float32), np.ones((2, 4, 64), np.float32))[0]
    change(tensors)
    assert said in refusal(write_folder(tmp_path, tensors, {"quant_method": "mxfp4"}))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (MODELOPT | {"quant_algo": "NVFP5"}, "quant_algo NVFP5 is not supported (FP8, NVFP4"),
        (config(fp4.fp4_scheme("nvfp4"), form="nvfp5-pack-quantized"), "format 'nvfp5-pack-quantized' is not"),
        (config(scheme(4, "tensor_group", None, type="float")), "strategy 'tensor_group' has group_size None"),
        (ROUND | {"data_type": "nv_fp", "bits": 8}, "data_type 'nv_fp' is not supported"),
        ({"group_size": 16, "bits": 4, "mode": "nvfp6"}, "MLX's mode 'nvfp6' is not supported"),
    ],
)
def test_formats_of_unknown_names_are_refused(tmp_path, quantization, said):
    assert said in refusal(write_folder(tmp_path, edited(lambda t: None), quantization))


def test_integers_where_the_config_says_4_bit_floats_are_refused(tmp_path):
    tensors = packed_tensors(NAME, quantize(weights(), 4, 128, True), 4, None)
    said = config(fp4.fp4_scheme("nvfp4"), form="nvfp4-pack-quantized")
    assert "contradict each other" in refusal(write_folder(tmp_path, tensors, said))


def test_mlx_with_a_scale_of_the_whole_tensor_is_refused(tmp_path):
    tensors = fp4.mlx_fp4_tensors(NAME, weights(), "nvfp4")[0] | {f"{NAME}.global_scale": np.ones(1, np.float32)}
    assert "has a global_scale, which is not supported" in refusal(folder_of(tmp_path, "mlx-nvfp4", tensors))


# conversion


def test_modelopts_scales_stand_beside_their_tensors(tmp_path, small_model):
    stored = fp4.write_modelopt(tmp_path / "in", small_model)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf")
    on_disk = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors}
    for i, name in enumerate(("attn_q", "ffn_down")):
        module = f"model.layers.1.{('self_attn.q_proj', 'mlp.down_proj')[i]}"
        with open_checkpoint(tmp_path / "in") as checkpoint:
            assert on_disk[f"blk.1.{name}.scale"].data[0] == np.float32(checkpoint.tensor_scales(module)["scale"])
        assert on_disk[f"blk.1.{name}.input_scale"].data[0] == np.float32(0.02)
    assert {t.type for t in report.tensors if t.has_codes} == {"NVFP4"}
    assert any("k_scale left out" in note for note in report.notes)
    assert len(stored) == sum(t.name.endswith(".scale") for t in report.tensors)


def test_another_type_takes_the_scale_in(tmp_path, small_model):
    stored = fp4.write_modelopt(tmp_path / "in", small_model, head=True)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type="Q8_0")
    assert not any(t.name.endswith("scale") for t in report.tensors)
    assert {t.outcome for t in report.tensors if t.kind.startswith("attn_") and len(t.shape) == 2} == {REQUANTIZED}
    found = gguf_weights(tmp_path / "m.gguf")
    for name, values in stored.items():
        np.testing.assert_allclose(found[f"{name}.weight"], values, atol=np.abs(values).max() / 100)
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "in"), max_share=0.2) == []


def test_a_type_edited_in_a_plan_takes_its_scale_with_it(tmp_path, small_model):
    stored = fp4.write_modelopt(tmp_path / "in", small_model)
    plan_checkpoint(tmp_path / "in", out=tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    line = next(line for line in text.splitlines() if '"name": "blk.0.ffn_up.weight"' in line)
    (tmp_path / "plan.json").write_text(text.replace(line, line.replace("NVFP4", "Q8_0", 1)))
    report = bridge.convert(out=tmp_path / "m.gguf", plan=tmp_path / "plan.json")
    names = {t.name for t in report.tensors}
    assert "blk.0.ffn_up.scale" not in names
    assert "blk.1.ffn_up.scale" in names
    found = gguf_weights(tmp_path / "m.gguf")["model.layers.0.mlp.up_proj.weight"]
    values = stored["model.layers.0.mlp.up_proj"]
    np.testing.assert_allclose(found, values, atol=np.abs(values).max() / 100)


@pytest.mark.parametrize("type", ["auto", "exact"])
def test_groups_of_nvfp4_fp8_and_integers_stand_side_by_side(tmp_path, small_model, type):
    codes, floats = fp4.write_compressed_mixed(tmp_path / "in", small_model)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type=type)
    types = {t.name: (t.type, t.outcome) for t in report.tensors}
    assert types["blk.0.attn_q.weight"] == ("NVFP4", CARRIED)
    assert types["blk.0.ffn_down.weight"] == ("Q8_0", FLOAT)
    assert types["blk.0.ffn_up.weight"] == ("Q4_K" if type == "auto" else "Q4_0", CARRIED)
    found = gguf_weights(tmp_path / "m.gguf")
    for name, values in codes.items():
        if ".self_attn." in name or type == "exact":
            np.testing.assert_array_equal(found[f"{name}.weight"], values, err_msg=name)
    for name, values in floats.items():
        np.testing.assert_allclose(found[f"{name}.weight"], values, atol=np.abs(values).max() / 100)
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "in")) == []
    assert "compressed-tensors nvfp4-pack-quantized and float-quantized and pack-quantized" in describe(tmp_path / "in")


def test_modelopts_mixture_is_read_layer_by_layer(tmp_path, small_model):
    stored = fp4.write_modelopt_mixed(tmp_path / "in", small_model)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf")
    types = {t.name: (t.type, t.outcome) for t in report.tensors}
    assert types["blk.0.attn_q.weight"] == ("Q8_0", FLOAT)
    assert types["blk.0.ffn_up.weight"] == ("NVFP4", CARRIED)
    found = gguf_weights(tmp_path / "m.gguf")
    for name, values in stored.items():
        np.testing.assert_array_equal(found[f"{name}.weight"], values, err_msg=name)


def test_a_type_of_4_bit_floats_is_for_such_tensors_alone(tmp_path, small_model):
    fp4.write_compressed(tmp_path / "in", small_model, "mxfp4")
    with pytest.raises(BridgeError, match=r"blk\.0\.attn_q\.weight: cannot become NVFP4, MXFP4's 4-bit floats are no"):
        bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type="NVFP4")
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type="MXFP4")
    assert {t.type for t in report.tensors if t.outcome == FLOAT} == {"Q8_0"}
    with pytest.raises(BridgeError, match=r"token_embd\.weight: floats are rounded to MXFP4 in whole matrices"):
        bridge.convert(tmp_path / "in", tmp_path / "n.gguf", output_type="MXFP4", token_embd_type="MXFP4")


def test_verify_notices_a_changed_code_and_a_changed_scale(tmp_path, small_model):
    fp4.write_modelopt(tmp_path / "in", small_model)
    bridge.convert(tmp_path / "in", tmp_path / "m.gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors}
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[tensors["blk.0.ffn_up.weight"].data_offset + 5] ^= 1
    data[tensors["blk.1.ffn_up.scale"].data_offset + 3] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    said = failures(verify(tmp_path / "m.gguf", tmp_path / "in"))
    assert [line.split(":")[0] for line in said] == ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"]


@pytest.mark.parametrize("name", ["llama-ct-mxfp4a16", "llama-mlx-nvfp4"])
def test_checkpoints_of_the_real_tools_are_what_these_say_and_llama_cpp_computes_with_them(name, tmp_path):
    folder = shared(f"more/{name}")
    bridge.convert(folder, tmp_path / "m.gguf")
    found = gguf_weights(tmp_path / "m.gguf")
    (tmp_path / "ref.safetensors").write_bytes((folder / "ref.dequantized").read_bytes())
    for weight, values in load_file(tmp_path / "ref.safetensors").items():
        np.testing.assert_array_equal(found[weight], values.astype(np.float32), err_msg=weight)
    with open_checkpoint(folder) as checkpoint:
        model = reference.hf_model(folder, reference.checkpoint_weights(checkpoint))
        for module in checkpoint.modules:
            np.testing.assert_array_equal(found[f"{module}.weight"], checkpoint.read_module(module).dequantize())
    with LlamaCpp(tmp_path / "m.gguf", n_ctx=64) as theirs:
        tokens = theirs.tokenize("KING RICHARD: My lord, I am the son of your")
        logits = theirs.logits(tokens)
        assert len(theirs.generate_greedy(tokens, 8)) == 8
    assert mean_kl(reference.logits(model, np.array([tokens]))[0], logits) < 1e-3


class Stored:
    """Weights, as `dequantized` takes them."""

    def __init__(self, values):
        self.dequantize = lambda: values


MODELS = {
    "llama": ("LlamaConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
    ),
    "qwen2": ("Qwen2Config", {}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.exhaustive if kind == "qwen2" else []) for kind in MODELS]
)
def test_scales_of_matrices_and_of_experts_are_applied_by_llama_cpp_and_by_the_runtime(tmp_path, kind):
    model = save_model(tmp_path / "float", MODELS[kind][0], **MODELS[kind][1])
    stored = fp4.write_modelopt(tmp_path / "in", model, head=True)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", token_embd_type="F32")
    types = {t.kind: t.type for t in report.tensors if t.has_codes}
    assert types["output"] == types["attn_q"] == "NVFP4"
    assert (types.get("ffn_up", types.get("ffn_up_exps")) == "NVFP4") == (
        kind != "qwen2"
    )  # whose graph has no use for it
    expected = predict(dequantized(tmp_path / "ref", model, {n: Stored(v) for n, v in stored.items()}), TOKENS)
    with LlamaCpp(tmp_path / "m.gguf", n_ctx=64) as theirs:
        assert mean_kl(expected, theirs.logits(TOKENS)) < (2e-2 if kind == "qwen2" else 2e-3)
    ours = bridge.Model.load(tmp_path / "m.gguf", precision="f32")
    if kind != "qwen2":
        assert mean_kl(expected, ours.logits(TOKENS)) < 1e-6
    if kind == "llama":
        prepared = bridge.Model.load(tmp_path / "m.gguf").prepare()
        whole = prepared.logits(TOKENS)[-1]
        prepared.logits(TOKENS[:-1])
        one = prepared._decoder.next_scores(TOKENS[-1])  # a token by itself goes another way
        np.testing.assert_allclose(one, whole, rtol=1e-3, atol=1e-3)
    if kind == "qwen3moe":
        on_disk = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors}
        assert on_disk["blk.0.ffn_gate_exps.scale"].data.shape == (4,)
        with bridge.open_gguf(tmp_path / "m.gguf") as file:
            stack = file["blk.0.ffn_up_exps.weight"]
            np.testing.assert_array_equal(stack[2].dequantize(), stored["model.layers.0.mlp.experts.2.up_proj"])
            np.testing.assert_array_equal(stack.dequantize()[2], stack[2].dequantize())


def test_a_damaged_scale_beside_nvfp4_is_refused(tmp_path, small_model):
    fp4.write_modelopt(tmp_path / "in", small_model)
    bridge.convert(tmp_path / "in", tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.0.ffn_up.scale"
    at = data.index(name) + len(name) + 4  # then its one dimension
    assert int.from_bytes(data[at : at + 8], "little") == 1
    (tmp_path / "m.gguf").write_bytes(data[:at] + (2).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(BridgeError, match=r"blk\.0\.ffn_up\.scale is F32 \[2\], not a scale of blk\.0\.ffn_up\.weight"):
        bridge.open_gguf(tmp_path / "m.gguf")

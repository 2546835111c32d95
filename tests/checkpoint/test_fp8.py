"""8-bit floats with scales come out as the floats they stand for, and go the way of floats."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.formats.fp4 import E2M1
from bridge.checkpoint.formats.module_reader import scales_activations
from bridge.conversion.writing.verify import failures, verify
from bridge.models.families import ALL
from scripts.peers.gguf_file import gguf_weights
from tests.support.described import describe
from tests.support.encode import load_floats, write_folder
from tests.support.encode_compressed import config, float8_tensors, save_float8, scheme, write_float8
from tests.support.encode_formats import write_mxfp8
from tests.support.raw import edit_raw
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
WEIGHT = f"{NAME}.weight"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCKS = [(1, 256), (1, 64), (200, 256), (128, 128), (64, 32)]


def weights(out: int = 200, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns)).astype(np.float32)


def write(folder, tensors, quantization):
    write_folder(folder, tensors, quantization)
    save_float8(folder)
    return folder


def good(scale: str = "weight_scale_inv") -> dict[str, np.ndarray]:
    return float8_tensors(NAME, weights(), (128, 128), scale)[0]


@pytest.mark.parametrize(
    ("dtype", "twin"),
    [
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E8M0", torch.float8_e8m0fnu),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    ],
)
def test_every_byte_has_the_value_that_torch_gives_it(dtype, twin):
    if not hasattr(torch, str(twin).removeprefix("torch.")):
        pytest.skip(f"this torch has no {twin}")
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(as_float32(every, dtype), torch.from_numpy(every).view(twin).float().numpy(), equal_nan=True)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_what_was_stored_comes_back_whole_and_in_rows(tmp_path, block, method):
    tensors, meant = float8_tensors(NAME, weights(), block, "weight_scale_inv" if method == "fp8" else "weight_scale")
    strategy = scheme(8, "block", None, type="float", block_structure=list(block))
    said = {**FP8, "weight_block_size": list(block)} if method == "fp8" else config(strategy, form="float-quantized")
    with open_checkpoint(write(tmp_path, tensors, said)) as checkpoint:
        assert not checkpoint.modules
        assert list(checkpoint.tensors) == [WEIGHT]
        assert checkpoint.stored_as(WEIGHT).startswith("F8_E4M3, ")
        assert np.array_equal(checkpoint.read_float(WEIGHT), meant)
        for rows in ((0, 1), (63, 65), (100, 200), (199, 200), (5, 5)):
            assert np.array_equal(checkpoint.read_float(WEIGHT, rows), meant[slice(*rows)])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "mxfp8", "modelopt"])
def test_one_scale_a_tensor_or_a_row_in_every_shape_it_has_had(tmp_path, shape, method):
    tensors, meant = float8_tensors(NAME, weights(), (200, 256) if np.prod(shape) == 1 else (1, 256))
    tensors[f"{NAME}.weight_scale"] = tensors[f"{NAME}.weight_scale"].reshape(shape)
    with open_checkpoint(write(tmp_path, tensors, {"quant_method": method})) as checkpoint:
        assert checkpoint.format.startswith("FP8")
        assert np.array_equal(checkpoint.read_float(WEIGHT), meant)


@pytest.mark.parametrize("block", BLOCKS)
def test_scales_divide_where_the_label_calls_them_inverse(tmp_path, block):
    """GPTQModel's. Elsewhere weight_scale_inv multiplies."""
    tensors, meant = float8_tensors(NAME, weights(), block, "weight_scale_inv")
    tensors[f"{NAME}.weight_scale_inv"] = 1 / tensors[f"{NAME}.weight_scale_inv"]
    label = {"quant_method": "fp8", "weight_block_size": [*block], "weight_scale_semantics": "inverse"}
    with open_checkpoint(write(tmp_path / "good", tensors, label)) as checkpoint:
        assert np.allclose(checkpoint.read_float(WEIGHT), meant, rtol=1e-6, atol=0)
        assert np.allclose(checkpoint.read_float(WEIGHT, (70, 90)), meant[70:90], rtol=1e-6, atol=0)
    tensors[f"{NAME}.weight_scale_inv"].flat[0] = 0
    assert "which divides, contains zeros" in refusal(write(tmp_path / "zero", tensors, label))


def test_scales_may_be_powers_of_two_in_a_byte(tmp_path):
    tensors, _ = float8_tensors(NAME, weights(), (128, 128), "weight_scale_inv")
    exponents = np.array([[120, 121], [119, 127]], np.uint8)
    tensors[f"{NAME}.weight_scale_inv"] = exponents
    folder = write(tmp_path, tensors, FP8)
    edit_raw(folder / "model.safetensors", lambda raw: raw[f"{NAME}.weight_scale_inv"][0].update(dtype="F8_E8M0"))
    each = np.ldexp(1.0, exponents.astype(int) - 127).repeat(128, 0).repeat(128, 1)[:200]
    with open_checkpoint(folder) as checkpoint:
        plain = torch.from_numpy(tensors[WEIGHT]).view(torch.float8_e4m3fn).double().numpy()
        assert np.array_equal(checkpoint.read_float(WEIGHT), plain * each)
        assert list(checkpoint.tensors) == [WEIGHT]


def test_deepseek_v4_has_8_bit_floats_and_4_bit_experts_under_the_same_names(tmp_path):
    tensors, _ = float8_tensors(NAME, weights(), (128, 128), "scale")
    exponents = np.array([[120, 121], [119, 127]], np.uint8)
    tensors[f"{NAME}.scale"] = exponents
    packed = np.random.default_rng(1).integers(0, 256, (8, 32), np.uint8)
    tensors |= {"experts.0.w1.weight": packed.view(np.int8), "experts.0.w1.scale": np.full((8, 2), 126, np.uint8)}
    tensors["norm.scale"] = np.ones(4, np.float32)
    folder = write(tmp_path, tensors, FP8)
    for name in (NAME, "experts.0.w1"):
        edit_raw(folder / "model.safetensors", lambda raw, name=name: raw[f"{name}.scale"][0].update(dtype="F8_E8M0"))
    each = np.ldexp(1.0, exponents.astype(int) - 127).repeat(128, 0).repeat(128, 1)[:200]
    with open_checkpoint(folder) as checkpoint:
        plain = torch.from_numpy(tensors[WEIGHT]).view(torch.float8_e4m3fn).double().numpy()
        assert np.array_equal(checkpoint.read_float(WEIGHT), plain * each)
        assert {*checkpoint.modules} == {"experts.0.w1"}
        found = checkpoint.read_module("experts.0.w1")
        assert np.array_equal(found.codes, np.stack([packed & 15, packed >> 4], -1).reshape(8, 64))
        assert np.array_equal(found.dequantize(), E2M1[found.codes] / 2)
        assert checkpoint.read_float("norm.scale").tolist() == [1, 1, 1, 1]


def test_experts_of_fbgemm_have_a_scale_for_each_output_feature(tmp_path):
    random = np.random.default_rng(0)
    tensors, meant = {}, {}
    for part, shape, scale in (("gate_up_proj", (3, 32, 64), (3, 1, 64)), ("down_proj", (3, 32, 48), (3, 48, 1))):
        name = f"model.layers.0.feed_forward.experts.{part}"
        stored = random.integers(0, 0x70, shape, dtype=np.uint8)
        scales = random.uniform(0.5, 1, scale).astype(np.float32)
        tensors |= {name: stored, f"{name}_scale": scales}
        meant[name] = as_float32(stored, "F8_E4M3") * scales.reshape(3, 1, -1)
    folder = write_folder(tmp_path, tensors, {"quant_method": "fbgemm_fp8"})
    edit_raw(folder / "model.safetensors", lambda raw: [raw[name][0].update(dtype="F8_E4M3") for name in meant])
    with open_checkpoint(folder) as checkpoint:
        assert {*checkpoint.tensors} == {*meant}
        for name, values in meant.items():
            assert np.array_equal(checkpoint.read_float(name), values)
            assert np.array_equal(checkpoint.read_float(name, (1, 2)), values[1:2])
            assert checkpoint.stored_as(name) == "F8_E4M3, one scale an output feature"


@pytest.mark.parametrize(
    ("suffix", "shape", "words"),
    [
        ("_scale_inv", (), "one scale"),
        ("_scale_inv", (3,), "one scale an expert"),
        ("_scale_inv", (3, 1, 1), "one scale an expert"),
        ("_scale_inv", (3, 2, 2), "blocks of 32x32"),
        ("_weight_scale_inv", (3, 64, 1), "blocks of 1x64"),
        ("_weight_scale", (), "one scale"),
        ("_scale", (3, 64, 1), "one scale an output feature"),
    ],
)
def test_stacks_of_experts_have_one_scale_one_an_expert_or_one_a_block(tmp_path, suffix, shape, words):
    """Mistral Small 4 has one an expert, beside a scale of activations; a square stack tells nothing by its shape."""
    random = np.random.default_rng(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes, scales = random.integers(0, 0x70, (3, 64, 64), dtype=np.uint8), random.uniform(0.5, 1, shape)
    tensors = {name: codes, f"{name}{suffix}": scales.astype(np.float32)}
    tensors[f"{name}_activation_scale"] = np.ones(3, np.float32)
    method = "modelopt" if suffix == "_weight_scale" else "fp8"
    folder = write_folder(tmp_path, tensors, {"quant_method": method, "weight_block_size": [32, 32]})
    edit_raw(folder / "model.safetensors", lambda raw: raw[name][0].update(dtype="F8_E4M3"))
    grid = scales.astype(np.float32)
    if suffix == "_scale":
        grid = grid.reshape(3, 1, 64)
    elif grid.size <= 3:
        grid = grid.reshape(-1, 1, 1)
    elif grid.shape[1] == 2:
        grid = grid.repeat(32, 1).repeat(32, 2)
    with open_checkpoint(folder) as checkpoint:
        assert {*checkpoint.tensors} == {name}
        assert np.array_equal(checkpoint.read_float(name), as_float32(codes, "F8_E4M3") * grid)
        assert np.array_equal(checkpoint.read_float(name, (1, 3)), checkpoint.read_float(name)[1:])
        assert checkpoint.stored_as(name) == f"F8_E4M3, {words}"


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 1, 1), (3, 5, 5)])
def test_scales_that_do_not_fit_a_stack_of_experts_are_refused(tmp_path, shape):
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {name: np.zeros((3, 64, 64), np.uint8), f"{name}_scale_inv": np.ones(shape, np.float32)}
    folder = write_folder(tmp_path, tensors, {"quant_method": "fp8"})
    edit_raw(folder / "model.safetensors", lambda raw: raw[name][0].update(dtype="F8_E4M3"))
    assert "contradict each other" in refusal(folder)


ACTIVATIONS = (
    "activation_scale", "act_scale", "input_scale", "output_scale", "input_scale_ub", "input_zero_point", "k_scale",
    "output_zero_point", "v_scale", "kv_scale", "q_scale", "prob_scale", "kv_cache_scale", "k_cache_scale",
    "kv_cache_scaling_factor", "activation_scaling_factor", "input_global_scale", "act_global_scale", "k_zero_point",
    "gate_up_proj_activation_scale", "down_proj_input_scale", "w2_input_scale", "attn.k_scale", "attn.prob_scale",
    "attn.prob_output_scale", "k_fake_quantizer.qscale_act", "qscale_act", "input_quantizer._amax", "scale_input",
    "k_bmm_quantizer._amax", "input_quantizer.scale", "act_quantizer.zero_point", "activation_post_process.scale",
    "input_activation_scale", "key_scale", "value_scale", "cachek_matmul.activation_scale", "qk_scale", "k_cache.scale",
)  # fmt: skip


@pytest.mark.parametrize("quantized", [False, True])
def test_scales_of_activations_and_caches_are_left_out_whatever_they_are_called(tmp_path, quantized):
    tensors = good() if quantized else {WEIGHT: weights()}
    more = {f"model.layers.0.self_attn.{part}": np.float32([0.02]) for part in ACTIVATIONS}
    with open_checkpoint(write(tmp_path, tensors | more, FP8 if quantized else None)) as checkpoint:
        assert list(checkpoint.tensors) == [WEIGHT]
        (note,) = checkpoint.notes
        assert "scales of activations and of the key-value cache are not needed: _amax, act_global_scale" in note


@pytest.mark.parametrize("name", ["weight_scale", "pre_quant_scale", "weight_quantizer._amax", "scale", "act.scales"])
def test_scales_of_weights_are_not_taken_for_those_of_activations(name):
    assert not scales_activations(f"model.layers.0.mlp.up_proj.{name}")


def test_no_tensor_of_a_model_is_taken_for_a_scale_of_activations():
    rows = [row for family in ALL for row in family.table]
    names = {name for row in rows for name in (row.source, *row.also, *row.separate)}
    assert len(names) > 200
    assert not [name for name in names if scales_activations(name)]


def test_8_bit_floats_in_a_bin_file(tmp_path):
    tensors, meant = float8_tensors(NAME, weights(), (128, 128), "weight_scale_inv")
    write_folder(tmp_path, {}, FP8)
    (tmp_path / "model.safetensors").unlink()
    state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    state[WEIGHT] = state[WEIGHT].view(torch.float8_e4m3fn)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_float(WEIGHT), meant)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["auto", "Q6_K"])
def test_a_model_becomes_q8_0_or_what_was_asked_for(tmp_path, small_model, method, kind):
    folder = tmp_path / "fp8"
    meant = write_float8(folder, small_model, (128, 128), method)
    report = bridge.convert(folder, tmp_path / "model.gguf", type=kind)
    linears = [t for t in report.tensors if str(t.source).removesuffix(".weight") in meant]
    assert {t.type for t in linears} == {"Q8_0" if kind == "auto" else "Q6_K"}
    assert "came as 8-bit floats" in report.table()
    assert "k_scale left out" in "".join(report.notes)
    made = gguf_weights(tmp_path / "model.gguf")
    bound = 1e-4 if kind == "auto" else 1e-3
    for name, values in meant.items():
        assert np.square(made[f"{name}.weight"] - values).sum() < bound * np.square(values).sum()
    floats = load_floats(small_model)
    assert set(made) == set(floats)


def test_mlxs_8_bit_floats_become_q8_0_too(tmp_path, small_model):
    meant = write_mxfp8(tmp_path / "mlx", small_model)
    report = bridge.convert(tmp_path / "mlx", tmp_path / "model.gguf")
    assert {t.type for t in report.tensors if str(t.source).removesuffix(".weight") in meant} == {"Q8_0"}
    assert "came as 8-bit floats" in report.table()
    made = gguf_weights(tmp_path / "model.gguf")
    for name, values in meant.items():
        assert np.square(made[f"{name}.weight"] - values).sum() < 1e-4 * np.square(values).sum()
    assert failures(verify(tmp_path / "model.gguf", tmp_path / "mlx")) == []
    assert "F8_E4M3, groups of 32" in describe(tmp_path / "mlx")


def test_inspect_names_the_format_and_what_it_becomes(tmp_path, small_model):
    write_float8(tmp_path / "a", small_model, (128, 128), "fp8")
    text = describe(tmp_path / "a")
    assert "the label says  FP8, 8-bit floats, blocks of 128x128" in text
    assert "no quantized module, 46 float tensors, 28 of 8-bit floats (F8_E4M3, blocks of 128x128)" in text
    assert "F8_E4M3, blocks of 128x128" in next(line for line in text.splitlines() if line.startswith("ffn_down"))
    write_float8(tmp_path / "b", small_model, (1, 1 << 20))
    assert "compressed-tensors float-quantized" in describe(tmp_path / "b")


# damaged input


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_scale_inv", None, "without a scale"),
        ("weight_scale_inv", np.full((2, 2), np.nan, np.float32), "4 of 4 values"),
        ("weight_scale_inv", np.ones((3, 2), np.float32), "the shapes contradict each other"),
        ("weight_scale_inv", np.ones(3, np.float32), "the shapes contradict each other"),
        ("weight_scale_inv", np.ones((2, 2), np.int32), "the shapes contradict each other"),
        ("weight_scale_inv", np.ones((2, 2, 1), np.float32), "the shapes contradict each other"),
        ("weight", None, "no weight"),
        ("weight", np.zeros((200, 256), np.float16), "its weight is F16, not 8-bit floats"),
        ("weight", np.zeros((2, 200, 256), np.uint8), "the shapes contradict each other"),
        ("bias", np.zeros(199, np.float32), "the shapes contradict each other"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, part, value, said):
    whole = {name.replace("up_proj", "gate_proj"): values for name, values in good().items()}
    tensors = whole | good() | {f"{NAME}.bias": np.zeros(200, np.float32)}
    tensors.pop(f"{NAME}.{part}")
    if value is not None:
        tensors[f"{NAME}.{part}"] = value
    message = refusal(write(tmp_path, tensors, FP8))
    assert said in message
    assert NAME in message


def test_8_bit_floats_without_a_label_are_not_taken_for_plain_ones(tmp_path):
    assert "no quantization_config" in refusal(write(tmp_path, good(), None))


def test_8_bit_floats_with_zero_points(tmp_path):
    tensors = good("weight_scale") | {f"{NAME}.weight_zero_point": np.zeros((2, 2), np.int8)}
    said = config(scheme(8, "block", None, type="float", block_structure="128x128"), form="float-quantized")
    assert "8-bit floats with zero points" in refusal(write(tmp_path, tensors, said))


@pytest.mark.parametrize(
    ("algorithm", "title"),
    [
        ("FP8", "FP8 (modelopt), 8-bit floats"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "FP8 (modelopt), 8-bit floats"),
        ("MIXED_PRECISION", "ModelOpt, each layer in a format of its own"),
    ],
)
def test_modelopts_own_file_is_a_label_too(tmp_path, algorithm, title):
    tensors, meant = float8_tensors(NAME, weights(), (200, 256))
    write(tmp_path, tensors, None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.quant.describe() == title
        assert np.array_equal(checkpoint.read_float(WEIGHT), meant)


@pytest.mark.parametrize("said", [{}, {"quantization": None}, {"quantization": {"quant_algo": None}}])
def test_modelopts_file_that_says_nothing_of_weights_does_no_harm(tmp_path, said):
    write_folder(tmp_path, {WEIGHT: weights()}, None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "float"
        assert checkpoint.notes == []

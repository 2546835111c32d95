"""auto-round's checkpoints in each packing format, with settings by name and by pattern."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from tests.support.encode import write_folder
from tests.support.encode_compressed import float8_tensors, save_float8
from tests.support.encode_formats import write_auto_round
from tests.support.encode_fp4 import meaning, packed
from tests.support.refusal import refusal

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("packing", "bits", "sym", "known_as"),
    [
        ("auto_round:auto_gptq", 4, True, "gptq"),
        ("auto_round:gptq:exllamav2", 4, True, "gptq"),
        ("auto_round:auto_gptq", 3, True, "gptq"),
        ("auto_round:auto_gptq", 2, False, "gptq"),
        ("auto_round", 2, False, "gptq_v2"),
        ("auto_round", 8, False, "gptq_v2"),
        ("auto_round:exllamav2", 4, False, "gptq_v2"),
        ("auto_round:gptqmodel", 4, False, "gptq_v2"),
        ("auto_round:auto_awq", 4, False, "awq-gemm"),
        *(("auto_round:auto_awq", bits, False, "awq-gemm") for bits in (5, 6, 7)),
        # 5 to 7 bits in one stream, not in GPTQModel's planes
        ("auto_round:auto_gptq", 5, True, "gptq"),
        ("auto_round:auto_gptq", 6, False, "gptq"),
        ("auto_round", 7, False, "gptq_v2"),
    ],
)
def test_every_packing_format_comes_back(tmp_path, small_model, packing, bits, sym, known_as):
    stored = write_auto_round(tmp_path, small_model, packing.replace(":gptq:", ":auto_gptq:"), bits, 64, sym)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(":auto_gptq:", ":gptq:"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == known_as
        assert checkpoint.quant.describe().startswith("auto-round, packed as ")
        assert set(checkpoint.modules) == set(stored)
        for name in (UP, DOWN):
            tensor = checkpoint.read_module(name)
            assert tensor.bits == bits
            assert tensor.notes == ()
            assert np.array_equal(tensor.dequantize(), stored[name])


def test_mixed_bits_are_those_of_the_tensors_and_agree_with_names_and_patterns(tmp_path, small_model):
    extra = {
        UP: {"bits": 8},
        r".*layers\.1\.mlp.*": {"bits": 2},
        "down_proj": {"bits": 3},  # found in the name; the pattern before it comes first
        r".*\.o_proj": {"bits": 16, "data_type": "fp"},
    }

    def module_bits(name: str) -> int | None:
        if name == UP:
            return 8
        if "layers.1.mlp" in name:
            return 2
        return None if "o_proj" in name else 3 if "down_proj" in name else 4

    stored = write_auto_round(tmp_path, small_model, "auto_round:auto_gptq", extra=extra, module_bits=module_bits)
    with open_checkpoint(tmp_path) as checkpoint:
        assert "model.layers.0.self_attn.o_proj.weight" in checkpoint.tensors
        assert "4 rules for single modules" in checkpoint.quant.describe()
        for name in stored:
            tensor = checkpoint.read_module(name)
            assert tensor.bits == module_bits(name)
            assert tensor.notes == ()
            assert np.array_equal(tensor.dequantize(), stored[name])


def test_settings_go_by_name_then_by_the_first_pattern_that_is_found():
    extra = {"a.b": {"bits": 8, "group_size": None}, "b": {"bits": 2}, "a": {"bits": 3}, "c": {"bits": 16}}
    quant = QuantConfig(bits=4, raw={"extra_config": extra})
    found = [quant.for_module(name) for name in ("a.b", "x.b", "x.a", "d", "x.c")]
    assert [q.bits if q else None for q in found] == [8, 2, 3, 4, None]
    assert found[0] is not None
    assert found[0].group_size == 128


def test_8_bit_floats_are_read_as_such(tmp_path):
    weight = np.random.default_rng(0).normal(0, 0.05, (64, 256)).astype(np.float32)
    tensors, meant = float8_tensors(UP, weight, (1, 256), "weight_scale")
    quant = {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "data_type": "fp", "bits": 8}
    write_folder(tmp_path, tensors, quant)
    save_float8(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.quant.describe().startswith("auto-round, packed as FP8")
        assert np.array_equal(checkpoint.read_float(f"{UP}.weight"), meant)


@pytest.mark.parametrize("method", ["auto-round", "fp8"])
def test_8_bit_floats_in_blocks_have_these_for_a_group_size(tmp_path, method):
    """Its format `fp8` has the method's name, and the block twice."""
    weight = np.random.default_rng(0).normal(0, 0.05, (128, 192)).astype(np.float32)
    tensors, meant = float8_tensors(UP, weight, (64, 32), "weight_scale_inv")
    label = {"quant_method": method, "data_type": "fp", "bits": 8, "group_size": [64, 32]}
    more = {"packing_format": "auto_round:fp8"} if method == "auto-round" else {"weight_block_size": [64, 32]}
    write_folder(tmp_path, tensors, label | more)
    save_float8(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert "blocks of 64x32" in checkpoint.quant.describe()
        assert np.array_equal(checkpoint.read_float(f"{UP}.weight"), meant)


def e5m3(folder, scales: np.ndarray, size: int) -> np.ndarray:
    """A folder of NVFP4_E5M3 with these bytes for scales; what its weights are."""
    codes = np.random.default_rng(0).integers(0, 16, (scales.shape[0], scales.shape[1] * size)).astype(np.uint8)
    tensors = {f"{UP}.weight_packed": packed(codes), f"{UP}.weight_scale": scales}
    label = {"quant_method": "auto-round", "bits": 4, "data_type": "nvfp4_v2", "group_size": size}
    write_folder(folder, tensors, label | {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"})
    exponent, mantissa = scales >> 3, scales & 7
    values = [
        (8 + m) * 2.0 ** (int(e) - 18) if e else m * 2.0**-17 for e, m in zip(exponent.flat, mantissa.flat, strict=True)
    ]
    return meaning(codes) * np.repeat(np.float32(values).reshape(scales.shape), size, axis=1)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("least", [0, 9, 120])
def test_wider_scales_that_are_near_each_other_are_those_of_nvfp4(tmp_path, size, least):
    scales = np.random.default_rng(1).integers(least, least + 100, (8, 4)).astype(np.uint8)
    meant = e5m3(tmp_path, scales, size)
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.read_module(UP)
        assert isinstance(tensor, Fp4Tensor)
        assert (tensor.kind, tensor.group_size) == ("NVFP4", 16)
        assert checkpoint.tensor_scales(UP) == {"scale": tensor.tensor_scale}
        assert np.array_equal(tensor.dequantize(), meant)


def test_wider_scales_that_are_far_apart_make_floats(tmp_path):
    meant = e5m3(tmp_path, np.array([[3, 200, 90, 17]] * 8, np.uint8), 16)
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.read_module(UP)
        assert "too far apart" in tensor.obstacle
        assert checkpoint.tensor_scales(UP) == {}
        assert np.array_equal(tensor.dequantize(), meant)
        assert tensor.noise() > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_scale": np.zeros((8, 3), np.uint8)}, "the shapes contradict each other"),
        ({"weight_packed": np.zeros((8, 32), np.int8)}, "the shapes contradict each other"),
        ({"weight_scale": np.full((8, 4), 255, np.uint8)}, "32 of 32 values"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    tensors = {"weight_packed": np.zeros((8, 64), np.uint8), "weight_scale": np.ones((8, 4), np.uint8)} | change
    label = {"quant_method": "auto-round", "bits": 4, "data_type": "mx_int", "packing_format": "auto_round"}
    write_folder(tmp_path, {f"{UP}.{part}": value for part, value in tensors.items()}, label)
    assert said in refusal(tmp_path)


def test_a_data_type_that_is_not_known_is_refused(tmp_path):
    label = {"quant_method": "auto-round", "bits": 2, "data_type": "mx_int", "packing_format": "auto_round"}
    write_folder(tmp_path, {f"{UP}.weight": np.ones((4, 4), np.float32)}, label)
    assert "data_type 'mx_int' is not supported" in refusal(tmp_path)

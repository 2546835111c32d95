"""auto-round's checkpoints in each packing format, with settings by name and by pattern."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.labels.quant_config import QuantConfig
from tests.support.encode import write_folder
from tests.support.encode_compressed import float8_tensors, save_float8
from tests.support.encode_formats import write_auto_round

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

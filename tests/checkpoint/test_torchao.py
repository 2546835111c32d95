"""torchao's flattened tensors: 4-bit codes in nibbles, bytes of any bits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LABEL = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}


def int4(weight: np.ndarray, name: str = NAME) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Groups of 64 as FBGEMM quantizes them, and the weights that they stand for."""
    out, columns = weight.shape
    groups = weight.reshape(out, -1, 64)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zero = (low + 8 * scale).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - low) / scale), 0, 15).astype(np.int8) - 8
    meant = (codes * scale + zero).reshape(out, columns)
    flat = codes.reshape(out, columns)
    tensors = {
        "_weight_qdata": flat[:, ::2] & 15 | flat[:, 1::2] << 4,
        "_weight_scale": scale[:, :, 0].T.astype(np.float16),
        "_weight_zero_point": zero[:, :, 0].T.astype(np.float16),
    }
    return {f"{name}.{part}": np.ascontiguousarray(values) for part, values in tensors.items()}, meant


def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (16, 256)).astype(np.float32)


def test_nibbles_are_signed_and_zero_points_are_values(tmp_path):
    tensors, meant = int4(weight())
    with open_checkpoint(write_folder(tmp_path, tensors, LABEL)) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.abs(t.dequantize() - meant).max() < 1e-7
        rows = np.array([9, 2])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), t.dequantize()[rows])
        assert checkpoint.settings() == "4 bits, groups of 64"
        assert checkpoint.quant.describe() == "torchao, Int4WeightOnlyConfig"


def test_the_label_names_dtype_and_groups(tmp_path):
    granularity = {"_type": "PerGroup", "_data": {"group_size": 64}}
    data = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}, "granularity": granularity}
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": data}}}
    with open_checkpoint(write_folder(tmp_path, int4(weight())[0], said)) as checkpoint:
        assert checkpoint.quant.describe() == "torchao, IntxWeightOnlyConfig, int4, groups of 64"


def test_a_block_packed_by_hand(tmp_path):
    """The byte 0x7F is -1, then 7."""
    tensors = {
        "_weight_qdata": np.full((2, 32), 0x7F, np.int8),
        "_weight_scale": np.full((1, 2), 0.5, np.float32),
        "_weight_zero_point": np.array([[0, 0.25]], np.float32),
    }
    folder = write_folder(tmp_path, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    with open_checkpoint(folder) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert weights[:, :2].tolist() == [[-0.5, 3.5], [-0.25, 3.75]]


@pytest.mark.parametrize(("bits", "type"), [(4, "Q4_K"), (8, "Q8_0")])
def test_codes_are_carried(tmp_path, small_model, bits, type):
    def layer(name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers." not in name:
            return None
        if bits == 4:
            return int4(values, name)[0]
        scale = np.abs(values).max(1, keepdims=True) / 127
        return {f"{name}._weight_qdata": np.rint(values / scale).astype(np.int8), f"{name}._weight_scale": scale}

    write_model(tmp_path / "c", small_model, layer, LABEL, None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert len({t.kind for t in coded}) == 7
    assert {t.outcome for t in coded} == {"codes carried"}
    assert {t.type for t in coded if "ffn" in t.name} == {type}


def test_codes_beyond_the_bits_that_the_header_says_are_damage(tmp_path: Path):
    tensors = {
        f"{NAME}._weight_qdata": np.full((2, 64), 8, np.int8),
        f"{NAME}._weight_scale": np.ones((2, 1), np.float32),
        f"{NAME}._weight_zero_point": np.zeros((2, 1), np.int8),
    }
    write_folder(tmp_path, tensors, LABEL)
    said = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}}
    save_file(tensors, tmp_path / "model.safetensors", {f"{NAME}.weight": json.dumps(said)})
    assert "codes beyond 4 bits" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("_weight_scale", None, "but no _weight_scale"),
        ("_weight_zero_point", None, "contradict"),
        ("_weight_zero_point", np.ones((2, 16), np.float32), "contradict"),
        ("_weight_scale", np.ones((5, 16), np.float32), "contradict"),
        ("_weight_scale", np.full((4, 16), np.nan, np.float32), "NaN or infinite"),
        ("_weight_scale", np.zeros((4, 16), np.float32), "a zero point but no scale"),
        ("_weight_qdata", np.ones((16, 128), np.int16), "contradict"),
        ("_weight_act_pre_scale", np.ones(256, np.float32), "follow a scale of their inputs"),
        ("_weight_scale_and_zero", np.ones((4, 16, 2), np.float32), "contradict"),
        ("_weight_per_tensor_scale", np.ones((), np.float32), "contradict"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = int4(weight())
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, LABEL))


def test_a_word_of_plain_int32_packed_by_hand(tmp_path):
    """Eight codes a word, the first in its lowest bits; zero points are codes."""
    tensors = {
        "_weight_qdata": np.full((2, 4), 0x76543210, np.int32),
        "_weight_scale": np.full((1, 2), 0.5, np.float16),
        "_weight_zero_point": np.array([[0, 3]], np.int8),
    }
    folder = write_folder(tmp_path, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    with open_checkpoint(folder) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert weights[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
        assert weights[1, :8].tolist() == [-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2]
        assert np.array_equal(checkpoint.read_module(NAME, np.array([1])).dequantize(), weights[1:])


def test_int4_of_npus_is_refused(tmp_path):
    tensors = {
        "_weight_qdata": np.zeros((2, 4), np.int32),
        "_weight_scale": np.ones((1, 2), np.float16),
        "_weight_zero_point": np.zeros((1, 2), np.float16),
    }
    folder = write_folder(tmp_path, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    assert "packed for an NPU" in refusal(folder)


def test_a_word_of_a_tile_packed_by_hand(tmp_path):
    """Word 1 of lane 6 is row 1, columns 32 + 4, 12, 20, 28 and then 32 + 5, 13, 21, 29."""
    words = np.full((1, 1, 32, 4), 0x88888888, np.uint32)
    words[0, 0, 6, 1] = 0x76543210
    pairs = np.stack([np.full((2, 8), 0.5), np.zeros((2, 8))], 2).astype(np.float32)
    tensors = {f"{NAME}._weight_qdata": words.view(np.int32), f"{NAME}._weight_scale_and_zero": pairs}
    with open_checkpoint(write_folder(tmp_path, tensors, LABEL)) as checkpoint:
        codes = checkpoint.read_module(NAME).dequantize() * 2 + 8
        assert codes[1, [36, 44, 52, 60, 37, 45, 53, 61]].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert np.count_nonzero(codes != 8) == 8
        assert checkpoint.settings() == "4 bits, groups of 64"

"""Checkpoints by GPTQModel, AutoAWQ and llm-compressor, against a plain reading and the model they came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from tests.conftest import checkpoint_names, shared
from tests.support.encode import PLANES, load_floats

NAMES = checkpoint_names()
NOISE = {2: 0.4, 3: 0.12, 4: 0.03, 5: 0.006, 8: 1e-4}  # NMSE of a plain quantization, generously


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {"I32": np.uint32, "I64": np.int64, "F16": np.float16, "BF16": np.uint16, "F32": np.float32}
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, stop = entry["data_offsets"]
            found[name] = np.frombuffer(data[start + first : start + stop], kinds[entry["dtype"]]).reshape(
                entry["shape"]
            )
    return found


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Words along the last axis -> codes, through one Python integer per row."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(words)]
    n = words.shape[1] * 32 // bits
    return np.array([[row >> bits * i & (1 << bits) - 1 for i in range(n)] for row in rows])


def planes(words: np.ndarray, bits: int) -> np.ndarray:
    codes, at, shift = 0, 0, 0
    blocks = words.reshape(len(words), -1, bits)
    for width in PLANES[bits]:
        part = stream(blocks[:, :, at : at + width].reshape(len(words), -1), width)
        codes, at, shift = codes + (part << shift), at + width, shift + width
    return np.asarray(codes)


def plain_gptq(raw: dict[str, np.ndarray], name: str, bits: int, label: str) -> np.ndarray:
    unpack = planes if label == "gptq_p" else stream
    codes = unpack(raw[f"{name}.qweight"].T, bits)
    zeros = unpack(raw[f"{name}.qzeros"], bits) + (label == "gptq")
    scales = raw[f"{name}.scales"].astype(np.float32)
    group = raw[f"{name}.g_idx"].astype(int)
    return scales[group].T * (codes - zeros[group].T).astype(np.float32)


def plain_awq(raw: dict[str, np.ndarray], name: str, version: str) -> np.ndarray:
    codes, zeros = stream(raw[f"{name}.qweight"], 4), stream(raw[f"{name}.qzeros"], 4)
    scales = raw[f"{name}.scales"].astype(np.float32)
    if version == "gemm":
        order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
        codes, zeros = (a.reshape(len(a), -1, 8)[:, :, order].reshape(len(a), -1).T for a in (codes, zeros))
        scales = scales.T
    group = np.arange(codes.shape[1]) // 128
    return scales[:, group] * (codes - zeros[:, group]).astype(np.float32)


def plain_compressed(raw: dict[str, np.ndarray], name: str) -> np.ndarray:
    codes = stream(raw[f"{name}.weight_packed"], 4)
    out, columns = raw[f"{name}.weight_shape"]
    assert codes.shape == (out, columns)
    words = raw.get(f"{name}.weight_zero_point")
    zeros = stream(words.T, 4).T if words is not None else np.full((out, columns // 128), 8)
    group = np.arange(columns) // 128
    return raw[f"{name}.weight_scale"][:, group] * (codes - zeros[:, group]).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_near_the_model_it_came_from_and_nothing_is_noted(name):
    folder = shared(f"checkpoints/{name}")
    floats = load_floats(shared("models/tiny-llama" if name.startswith("llama") else "models/tiny-qwen3"))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.notes == []
        rescaled = checkpoint.quant.method == "awq"  # by channel, at no great distance in these two
        for module in checkpoint.modules:
            tensor = checkpoint.read_module(module)
            weight = floats[f"{module}.weight"]
            assert tensor.shape == weight.shape == checkpoint.modules[module].shape
            assert tensor.notes == ()
            noise = np.square(tensor.dequantize() - weight).sum() / np.square(weight).sum()
            assert noise < NOISE[tensor.bits]
        for tensor_name, info in checkpoint.tensors.items():
            assert checkpoint.read_float(tensor_name).shape == info.shape
            if not rescaled:
                assert np.allclose(checkpoint.read_float(tensor_name), floats[tensor_name], rtol=2**-8)


@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_a_plain_reading_bit_for_bit(name):
    folder = shared(f"checkpoints/{name}")
    raw = raw_tensors(folder)
    with open_checkpoint(folder) as checkpoint:
        for module in ("model.layers.1.self_attn.k_proj", "model.layers.3.mlp.down_proj"):
            tensor = checkpoint.read_module(module)
            if checkpoint.quant.method == "compressed-tensors":
                expected = plain_compressed(raw, module)
            elif checkpoint.quant.method == "awq":
                expected = plain_awq(raw, module, checkpoint.quant.version)
            else:
                expected = plain_gptq(raw, module, checkpoint.quant.bits, checkpoint.format)
            assert np.array_equal(tensor.dequantize(), expected)
            order = checkpoint.group_order(module)
            assert (order is not None) == name.endswith("actorder")


def test_both_awq_layouts_of_one_model_hold_the_same_codes(checkpoints):
    with (
        open_checkpoint(checkpoints / "qwen3-awq-4bit-g128-gemm") as gemm,
        open_checkpoint(checkpoints / "qwen3-awq-4bit-g128-gemv") as gemv,
    ):
        for module in gemm.modules:
            a, b = gemm.read_module(module), gemv.read_module(module)
            assert np.array_equal(a.codes, b.codes)
            assert np.array_equal(a.zeros, b.zeros)
            assert np.array_equal(a.scales, b.scales)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("qwen3-gptq-4bit-g128-asym-v2", "gptq"),
        ("qwen3-gptq-2bit-g64-asym-v2", "gptq"),
        ("qwen3-gptq-4bit-g64-asym-actorder", "gptq_v2"),
        ("llama-gptq-4bit-g128-asym-actorder", "gptq_v2"),
        ("qwen3-gptq-4bit-g32-sym", "gptq_v2"),
        ("qwen3-gptq-3bit-g128-sym", "gptq_v2"),
        ("qwen3-gptq-8bit-g128-sym", "gptq_v2"),
    ],
)
def test_a_wrong_label_on_real_data_changes_nothing_but_the_notes(tmp_path, checkpoints, name, label):
    source = checkpoints / name
    quant = json.loads((source / "quantize_config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps({**quant, "checkpoint_format": label, "format": label}))
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(source / file)
    with open_checkpoint(source) as right, open_checkpoint(tmp_path) as wrong:
        for module in right.modules:
            a, b = right.read_module(module), wrong.read_module(module)
            assert np.array_equal(a.zeros, b.zeros)
            assert a.notes == ()
            assert f"checkpoint_format says {label}" in b.notes[0]

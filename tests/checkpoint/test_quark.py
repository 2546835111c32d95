"""Quark's exports: packed integers, 8-bit integers, MXFP4 and FP8."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import E2M1
from tests.support.encode import pack_stream, write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def label(dtype: str, scheme: str = "per_group", pack: str = "reorder", **said: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "group_size": 64 if scheme == "per_group" else None}
    export = {"pack_method": pack, "weight_format": "real_quantized"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": export, **said}


def words(codes: np.ndarray, pack: str) -> np.ndarray:
    """Nibbles of int32 words along the last axis."""
    order = ORDER if pack == "reorder" else list(range(8))
    flat = (codes & 15).astype(np.uint8).reshape(-1, codes.shape[-1] // 8, 8)[:, :, order]
    return pack_stream(flat.reshape(len(flat), -1), 4).reshape(*codes.shape[:-1], -1)


def module(dtype: str, scheme: str, pack: str, name: str = NAME, shape: tuple[int, int] = (16, 256)):
    """Random codes as Quark packs them, and the weights that they stand for."""
    random = np.random.default_rng(0)
    bits = int(dtype[-1])
    low = -(1 << bits - 1) if dtype.startswith("i") else 0
    out, columns = shape
    groups = columns // 64 if scheme == "per_group" else 1
    codes = random.integers(low, low + 2**bits, shape)
    zeros = random.integers(low + 3, low + 2**bits - 3, (out, groups))
    scales = random.uniform(0.01, 0.02, (out, groups)).astype(np.float16)
    if scheme == "per_tensor":
        zeros[:], scales[:] = zeros[0], scales[0]
    spread = (np.repeat(x, columns // groups, 1) for x in (scales.astype(np.float32), zeros))
    scale, zero = spread
    meant = scale * (codes - zero).astype(np.float32)
    grouped = scheme == "per_group"
    stored, held, scales = (codes.T, zeros.T, scales.T) if grouped else (codes, zeros[:, 0], scales[:, 0])
    if scheme == "per_tensor":
        held, scales = held[0], scales[0]
    as_stored = np.int8 if dtype == "int8" else np.uint8
    tensors = {
        "weight": words(stored, pack) if bits == 4 else stored.astype(as_stored),
        "weight_scale": np.array(scales),
        "weight_zero_point": np.array(
            (words(held, pack) if held.ndim else held.astype(np.int32)) if bits == 4 else held.astype(as_stored)
        ),
    }
    return {f"{name}.{part}": np.ascontiguousarray(v).reshape(np.shape(v)) for part, v in tensors.items()}, meant


@pytest.mark.parametrize("pack", ["reorder", "order"])
@pytest.mark.parametrize("scheme", ["per_group", "per_channel", "per_tensor"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_integers_are_the_weights_that_were_meant(tmp_path, dtype, scheme, pack):
    tensors, meant = module(dtype, scheme, pack)
    with open_checkpoint(write_folder(tmp_path, tensors, label(dtype, scheme, pack))) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.array_equal(t.dequantize(), meant)
        rows = np.array([9, 2])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), meant[rows])
        assert checkpoint.settings() == f"{dtype[-1]} bits, " + (
            "groups of 64" if scheme == "per_group" else "one group a row"
        )


def test_a_word_packed_by_hand(tmp_path):
    """The nibbles of 0x75316420 are numbers 0 2 4 6 1 3 5 7 of their eight, each its own value."""
    tensors = {
        "weight": np.full((64, 1), 0x75316420, np.int32),
        "weight_scale": np.full((1, 8), 0.5, np.float32),
        "weight_zero_point": np.full((1, 1), 0x33333333, np.int32),
    }
    stored = {f"{NAME}.{part}": value for part, value in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, stored, label("uint4"))) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.array_equal(weights, np.tile((np.arange(8)[:, None] - 3) * 0.5, 64))


def test_mxfp4_is_kept_bit_for_bit(tmp_path):
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (8, 64), dtype=np.uint8)
    scales = random.integers(118, 124, (8, 2), dtype=np.uint8)
    tensors = {f"{NAME}.weight": codes[:, ::2] | codes[:, 1::2] << 4, f"{NAME}.weight_scale": scales}
    with open_checkpoint(write_folder(tmp_path, tensors, label("fp4"))) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.array_equal(weights, E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, 1))


def test_codes_of_a_model_are_carried(tmp_path, small_model):
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return module("uint4", "per_group", "reorder", name, weight.shape)[0] if ".0.mlp." in name else None

    write_model(tmp_path / "c", small_model, layer, label("uint4"), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    assert {(t.type, t.outcome) for t in report.tensors if t.has_codes} == {("Q4_K", "codes carried")}


@pytest.mark.parametrize(("dtype", "mantissa", "bias"), [("fp6_e2m3", 3, 1), ("fp6_e3m2", 2, 3)])
def test_floats_of_6_bits_are_a_stream_with_a_power_of_two_for_32(tmp_path, dtype, mantissa, bias):
    random = np.random.default_rng(0)
    codes, exponents = random.integers(0, 64, (16, 256)), random.integers(110, 130, (16, 8)).astype(np.uint8)
    meant = np.zeros(codes.shape, np.float32)
    for place, code in np.ndenumerate(codes):
        power, rest = code % 32 >> mantissa, code % 2**mantissa
        value = (rest + (2**mantissa if power else 0)) * 2.0 ** (max(power, 1) - bias - mantissa)
        meant[place] = value * (-1 if code >= 32 else 1) * 2.0 ** (int(exponents[place[0], place[1] // 32]) - 127)
    tensors = {"weight": pack_stream(codes.astype(np.uint8), 6, "uint8"), "weight_scale": exponents}
    named = {f"{NAME}.{part}": value for part, value in tensors.items()}
    with open_checkpoint(write_folder(tmp_path / "good", named, label(dtype))) as checkpoint:
        tensor, rows = checkpoint.read_module(NAME), np.array([3, 1])
        assert np.array_equal(tensor.dequantize(), meant)
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), meant[rows])
        assert checkpoint.tensor_scales(NAME) == {}
        assert tensor.noise() > 0
    bad = named | {f"{NAME}.weight_scale": exponents[:, :7]}
    assert "contradict" in refusal(write_folder(tmp_path / "bad", bad, label(dtype)))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_scale", None, "but no weight_scale"),
        ("weight_scale", np.ones((3, 16), np.float16), "contradict"),
        ("weight_zero_point", np.ones((4, 3), np.int32), "contradict"),
        ("weight", np.ones((256, 2), np.int16), "contradict"),
        ("weight_scale", np.full((4, 16), np.nan, np.float16), "NaN or infinite"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = module("int4", "per_group", "reorder")
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, label("int4")))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (label("int3"), "Quark's 'int3' is not supported"),
        (label("int4") | {"export": {"weight_format": "fake_quantized"}}, "floats that were rounded"),
        (label("int4", algo_config=[{"name": "rotation"}]), "rotates activations"),
    ],
)
def test_what_the_config_asks_for_in_vain(tmp_path, config, said):
    assert said in refusal(write_folder(tmp_path, module("int4", "per_group", "reorder")[0], config))

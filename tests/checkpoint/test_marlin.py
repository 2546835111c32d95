"""Marlin's layout comes back in rows, for GPTQ's names and AWQ's, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from tests.support.encode import quantize, write_folder
from tests.support.encode_formats import marlin_scales, marlin_words
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "marlin", "zero_point": False}


def tensors(bits: int = 4, group_size: int = 64, awq: bool = False):
    weight = np.random.default_rng(0).normal(0, 0.05, (128, 256)).astype(np.float32)
    q = quantize(weight, bits, group_size, sym=True)
    words, scales = ("qweight", "scales") if awq else ("B", "s")
    bias = np.arange(128, dtype=np.float16)
    stored = {f"{NAME}.{words}": marlin_words(q.codes, bits), f"{NAME}.{scales}": marlin_scales(q.scales)}
    return q, {**stored, f"{NAME}.bias": bias}


@pytest.mark.parametrize("awq", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_what_was_stored_comes_back(tmp_path, bits, group_size, awq):
    q, stored = tensors(bits, group_size, awq)
    quant = {**(AWQ if awq else GPTQ), "bits": bits, "group_size": group_size}
    with open_checkpoint(write_folder(tmp_path, stored, quant)) as checkpoint:
        assert checkpoint.format == "marlin"
        assert checkpoint.quant.describe().startswith("Marlin, ")
        tensor = checkpoint.read_module(NAME)
    assert np.array_equal(tensor.codes, q.codes)
    assert np.array_equal(tensor.dequantize(), q.dequantize())
    assert np.array_equal(tensor.bias, np.arange(128))
    assert tensor.notes == ()


@pytest.mark.parametrize(
    "quant", [{**GPTQ, "checkpoint_format": "gptq", "is_marlin_format": True}, {**GPTQ, "quant_method": "marlin"}]
)
def test_every_label_of_marlin_is_known(tmp_path, quant):
    q, stored = tensors()
    with open_checkpoint(write_folder(tmp_path, stored, quant)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).codes, q.codes)


def test_bits_and_groups_are_those_of_the_tensors(tmp_path):
    q, stored = tensors(8, 32)
    with open_checkpoint(write_folder(tmp_path, stored, GPTQ)) as checkpoint:
        tensor = checkpoint.read_module(NAME)
    assert np.array_equal(tensor.codes, q.codes)
    assert "8 bits but the config says 4" in tensor.notes[0]
    assert "groups of 32 but the config says 64" in tensor.notes[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({f"{NAME}.B": t[f"{NAME}.B"][:, :-32].copy()}), "contradict"),
        (lambda t: t.update({f"{NAME}.B": t[f"{NAME}.B"][:7].copy()}), "contradict"),
        (lambda t: t.update({f"{NAME}.B": t[f"{NAME}.B"].astype(np.int64)}), "contradict"),
        (lambda t: t.update({f"{NAME}.s": t[f"{NAME}.s"][:3].copy()}), "contradict"),
        (lambda t: t.pop(f"{NAME}.s"), "but no s"),
        (lambda t: t.pop(f"{NAME}.B"), "but no B"),
        (lambda t: t.update({f"{NAME}.bias": np.zeros(127, np.float16)}), "contradict"),
        (lambda t: t.update({f"{NAME}.qzeros": np.zeros((4, 16), np.int32)}), "has qzeros"),
        (lambda t: t.update({f"{NAME}.g_idx": np.zeros(256, np.int32)}), "has g_idx"),
        (lambda t: t[f"{NAME}.s"].__setitem__((1, 1), np.nan), "1 of 512 values"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    _, stored = tensors()
    change(stored)
    message = refusal(write_folder(tmp_path, stored, GPTQ))
    assert said in message
    assert NAME in message

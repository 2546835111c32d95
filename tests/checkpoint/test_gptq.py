"""GPTQ checkpoints of every shape come back as what was stored, and labels that lie are overruled."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.checkpoint import GroupedTensor, open_checkpoint
from tests.support.encode import (
    Quantized,
    gptq_tensors,
    load_floats,
    pack_stream,
    pack_zeros_autogptq,
    pack_zeros_old_3bit,
    quantize,
    write_folder,
    write_gptq,
)

NAME = "model.layers.0.mlp.up_proj"


def weights(out: int = 64, columns: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (out, columns)).astype(np.float32)


def config(bits: int = 4, group_size: int = 64, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def read(folder: Path, name: str = NAME) -> GroupedTensor:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.read_module(name)


def assert_same(tensor: GroupedTensor, q: Quantized) -> None:
    assert np.array_equal(tensor.codes, q.codes)
    assert np.array_equal(tensor.zeros, q.zeros)
    assert np.array_equal(tensor.scales, q.scales.astype(np.float32))
    assert np.array_equal(tensor.groups(), q.group)
    assert np.array_equal(tensor.dequantize(), q.dequantize())
    assert tensor.codes.dtype == np.uint8
    assert tensor.codes.flags.c_contiguous
    assert tensor.scales.dtype == tensor.zeros.dtype == np.float32
    assert tensor.scales.flags.c_contiguous
    assert tensor.zeros.flags.c_contiguous


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [32, 96, -1])
def test_what_was_stored_comes_back(tmp_path, bits, sym, label, group_size):
    q = quantize(weights(), bits, group_size, sym)
    write_folder(
        tmp_path, gptq_tensors(NAME, q, bits, label), config(bits, group_size, sym=sym, checkpoint_format=label)
    )
    tensor = read(tmp_path)
    assert_same(tensor, q)
    assert tensor.sequential
    assert tensor.bits == bits
    assert tensor.group_size == (group_size if group_size > 0 else 256)
    assert tensor.notes == ()


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("sym", [True, False])
def test_planar_words_come_back(tmp_path, bits, sym):
    q = quantize(weights(), bits, 64, sym)
    tensors = gptq_tensors(NAME, q, bits, "gptq_p", planar=True)
    write_folder(tmp_path, tensors, config(bits, sym=sym, checkpoint_format="gptq_p"))
    assert_same(read(tmp_path), q)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("pack_dtype", ["int8", "int16", "int64"])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_words_of_any_width_come_back(tmp_path, bits, pack_dtype, label):
    q = quantize(weights(), bits, 64, sym=False)
    q.zeros[:, 0] = 0  # borrows from its neighbours in v1
    tensors = gptq_tensors(NAME, q, bits, label, pack_dtype)
    write_folder(tmp_path, tensors, config(bits, sym=False, checkpoint_format=label))
    assert_same(read(tmp_path), q)


@pytest.mark.parametrize("g_idx", [True, False])
def test_a_short_last_group_and_an_absent_g_idx_are_read_from_the_shapes(tmp_path, g_idx):
    q = quantize(weights(columns=192), 4, 128, sym=False)
    write_folder(tmp_path, gptq_tensors(NAME, q, 4, g_idx=g_idx), config(group_size=128, sym=False))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.modules[NAME].shape == (64, 192)
        assert checkpoint.modules[NAME].stores_g_idx is g_idx
        assert_same(checkpoint.read_module(NAME), q)


def test_act_order_keeps_the_columns_and_names_their_groups(tmp_path):
    q = quantize(weights(), 4, 64, sym=False, desc_act=True)
    tensors = gptq_tensors(NAME, q, 4)
    tensors[f"{NAME}.g_idx"][::3] -= 4  # -1 is the last of four groups
    write_folder(tmp_path, tensors, config(sym=False, desc_act=True))
    with open_checkpoint(tmp_path) as checkpoint:
        order = checkpoint.group_order(NAME)
        assert order is not None
        assert order.dtype == np.int32
        assert np.array_equal(order, q.group)
        tensor = checkpoint.read_module(NAME)
    assert not tensor.sequential
    assert_same(tensor, q)


def test_act_order_is_seen_in_the_data_and_not_in_the_flag(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    write_folder(tmp_path, gptq_tensors(NAME, q, 4), config(desc_act=True))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.group_order(NAME) is None
        assert checkpoint.read_module(NAME).sequential


def test_a_g_idx_of_zeros_alone_is_taken_as_absent(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    tensors = gptq_tensors(NAME, q, 4)
    tensors[f"{NAME}.g_idx"][:] = 0
    tensor = read(write_folder(tmp_path, tensors, config()))
    assert_same(tensor, q)
    assert "all zeros" in tensor.notes[0]


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_zero_points_overrule_the_label(tmp_path, bits, stored):
    label = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[stored]
    q = quantize(weights(), bits, 64, sym=True)
    tensor = read(write_folder(tmp_path, gptq_tensors(NAME, q, bits, stored), config(bits, checkpoint_format=label)))
    assert_same(tensor, q)
    (note,) = tensor.notes
    assert NAME in note
    assert f"checkpoint_format says {label}" in note
    assert "0x" in note


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_codes_of_asymmetric_layers_overrule_the_label(tmp_path, bits, stored):
    label = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[stored]
    q = quantize(weights(256), bits, 64, sym=False)
    tensors = gptq_tensors(NAME, q, bits, stored)
    tensor = read(write_folder(tmp_path, tensors, config(bits, sym=False, checkpoint_format=label)))
    assert_same(tensor, q)
    assert f"checkpoint_format says {label}" in tensor.notes[0]


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("quantizer", ["gptqmodel:2.2.0", None])
def test_3_bit_layers_of_old_gptqmodel_are_read_right_even_unsigned(tmp_path, sym, quantizer):
    q = quantize(weights(256), 3, 64, sym)
    tensors = gptq_tensors(NAME, q, 3, zeros=pack_zeros_old_3bit(q.zeros.T))
    meta = {"meta": {"quantizer": [quantizer]}} if quantizer else {}
    tensor = read(write_folder(tmp_path, tensors, config(3, sym=sym, **meta)))
    assert_same(tensor, q)
    assert bool(tensor.notes) == (quantizer is None)


def test_small_asymmetric_layers_follow_the_label_and_the_quantizer(tmp_path):
    q = quantize(weights(32, 64), 3, 64, sym=False)
    tensors = gptq_tensors(NAME, q, 3, zeros=pack_zeros_old_3bit(q.zeros.T))
    meta = {"quantizer": ["optimum:1.23", "gptqmodel:4.0.0"]}
    assert_same(read(write_folder(tmp_path, tensors, config(3, sym=False, meta=meta))), q)


def test_a_zero_that_autogptq_destroyed_is_noted_by_name(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    q.zeros[16, 1] = 0
    tensors = gptq_tensors(NAME, q, 4, zeros=pack_zeros_autogptq(q.zeros.T, 4))
    (note,) = read(write_folder(tmp_path, tensors, config(sym=False))).notes
    assert note.startswith(f"{NAME}: 1 words of qzeros")


def test_a_borrow_of_gptqmodel_that_looks_the_same_raises_no_alarm(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    q.zeros[22:24, 1] = 0, 1  # lanes 6 and 7 of a word: 0 borrows, and both become 15
    meta = {"quantizer": ["gptqmodel:5.0.0"]}
    tensor = read(write_folder(tmp_path, gptq_tensors(NAME, q, 4), config(sym=False, meta=meta)))
    assert_same(tensor, q)
    assert tensor.notes == ()


def test_bits_and_group_size_are_taken_from_the_tensors(tmp_path):
    q = quantize(weights(), 8, 32, sym=True)
    for g_idx in (True, False):
        tensor = read(write_folder(tmp_path, gptq_tensors(NAME, q, 8, g_idx=g_idx), config(4, 128)))
        assert_same(tensor, q)
        assert any("8 bits but the config says 4" in n for n in tensor.notes)
        assert any("groups of 32 but the config says 128" in n for n in tensor.notes)


def test_biases_are_read_with_their_layer_and_alone(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    bias = np.arange(64, dtype=np.float16)
    tensors = {**gptq_tensors(NAME, q, 4), f"{NAME}.bias": bias, "model.norm.weight": bias}
    with open_checkpoint(write_folder(tmp_path, tensors, config())) as checkpoint:
        assert sorted(checkpoint.tensors) == [f"{NAME}.bias", "model.norm.weight"]
        assert checkpoint.read_module(NAME).bias.tolist() == list(range(64))
        assert checkpoint.read_float("model.norm.weight", (3, 5)).tolist() == [3, 4]
        assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_scales_may_be_bf16_or_fp32(tmp_path, dtype):
    q = quantize(weights(), 4, 64, sym=True)
    q.scales = (q.scales.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    tensors = gptq_tensors(NAME, q, 4)
    if dtype == "BF16":  # numpy has none: write the bits and mend the header
        tensors[f"{NAME}.scales"] = (tensors[f"{NAME}.scales"].view(np.uint32) >> 16).astype(np.uint16)
    folder = write_folder(tmp_path, tensors, config())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U16"', b'"BF16"', 1).replace(b"  ", b" ", 1))
    if dtype == "BF16":
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length]
        assert json.loads(header)[f"{NAME}.scales"]["dtype"] == "BF16"
    assert_same(read(folder), q)


def test_dynamic_overrides_are_taken_in_gptqmodels_order(tmp_path):
    dynamic = {"+:.*up_proj": {"bits": 8}, ".*": {"bits": 2}, r"-:model\.layers\.1\.": {}}
    write_folder(tmp_path, gptq_tensors(NAME, quantize(weights(), 8, 64, True), 8), config(dynamic=dynamic))
    with open_checkpoint(tmp_path) as checkpoint:
        quant = checkpoint.quant
        assert quant.for_module(NAME).bits == 8
        assert quant.for_module("model.layers.0.mlp.down_proj").bits == 2
        assert quant.for_module("model.layers.1.mlp.up_proj") is None
        assert checkpoint.read_module(NAME).notes == ()


@pytest.mark.parametrize(
    ("packing", "stored", "sym"),
    [
        ("auto_round:auto_gptq", "gptq", False),
        ("auto_round:gptqmodel", "gptq_v2", False),
        ("auto_round", "gptq_v2", False),
        ("auto_round:auto_gptq", "gptq", True),
    ],
)
def test_auto_round_names_its_zero_points_by_packing_format(tmp_path, packing, stored, sym):
    q = quantize(weights(32, 64), 4, 64, sym)
    quant = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 64, "sym": sym}
    tensor = read(write_folder(tmp_path, gptq_tensors(NAME, q, 4, stored), quant))
    assert_same(tensor, q)
    assert tensor.notes == ()


def test_autogptqs_own_file_names_are_followed(tmp_path):
    q = quantize(weights(), 4, 64, True)
    folder = write_folder(tmp_path, gptq_tensors(NAME, q, 4), None)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    (folder / "other.safetensors").write_bytes(b"not ours")
    own = {"bits": 4, "group_size": 64, "sym": True, "model_file_base_name": "gptq_model-4bit-64g"}
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert_same(read(folder), q)


def test_zero_padding_can_be_cropped_away():
    q = quantize(weights(64, 256), 4, 96, sym=False)
    tensor = GroupedTensor("t", 4, q.codes, q.scales.astype(np.float32), q.zeros.astype(np.float32), 96)
    small = tensor.crop(60, 190)
    assert small.scales.shape == (60, 2)
    assert np.array_equal(small.dequantize(), tensor.dequantize()[:60, :190])
    assert tensor.crop(64, 256) is tensor


def test_shards_and_threads_give_what_one_file_and_one_thread_give(tmp_path):
    stored = {f"model.layers.{i}.mlp.up_proj": quantize(weights(seed=i), 4, 64, False, True) for i in range(6)}
    tensors: dict[str, np.ndarray] = {}
    for name, q in stored.items():
        tensors |= gptq_tensors(name, q, 4)
    write_folder(tmp_path, tensors, config(sym=False), shards=4)
    with open_checkpoint(tmp_path) as checkpoint, ThreadPoolExecutor(4) as pool:
        assert len(checkpoint.files) == 4
        names = [*stored] * 3
        for name, tensor in zip(names, pool.map(checkpoint.read_module, names), strict=True):
            assert_same(tensor, stored[name])


@pytest.mark.parametrize("quantizer", ["gptqmodel:5.8.0", "gptqmodel:7.6.0", None])
def test_a_mixed_checkpoint_of_a_whole_model_comes_back(tmp_path, small_model, quantizer):
    def bits_of(name: str) -> int | None:
        return 8 if name.endswith("down_proj") else None if name.endswith("layers.0.mlp.up_proj") else 4

    stored = write_gptq(
        tmp_path, small_model, sym=False, module_bits=bits_of, lm_head=True, shards=2, quantizer=quantizer
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.modules) == set(stored)
        for name, q in stored.items():
            tensor = checkpoint.read_module(name)
            assert_same(tensor, q)
            assert tensor.notes == ()
        plain = load_floats(small_model)["model.layers.0.mlp.up_proj.weight"]
        assert np.array_equal(checkpoint.read_float("model.layers.0.mlp.up_proj.weight"), plain)


def test_qzeros_wider_than_their_rows_are_padding(tmp_path):
    q = quantize(weights(40), 3, 64, sym=False)
    tensors = gptq_tensors(NAME, q, 3, zeros=pack_stream((np.pad(q.zeros.T, ((0, 0), (0, 24))) - 1) & 7, 3))
    for g_idx in (True, False):
        if not g_idx:
            del tensors[f"{NAME}.g_idx"]
        assert_same(read(write_folder(tmp_path, tensors, config(3, sym=False))), q)


def test_integers_that_nothing_here_knows_are_left_out_and_said(tmp_path):
    tensors = gptq_tensors(NAME, quantize(weights(), 4, 64, sym=True), 4)
    tensors |= {f"{NAME}.perm": np.arange(256, dtype=np.int32), "model.norm.weight": np.ones(4, np.float32)}
    with open_checkpoint(write_folder(tmp_path, tensors, config())) as checkpoint:
        assert checkpoint.notes == [f"{NAME}.perm: integer tensor of unknown purpose; skipped"]
        assert set(checkpoint.tensors) == {"model.norm.weight"}

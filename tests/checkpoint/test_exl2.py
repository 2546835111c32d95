"""EXL2: groups of different bits, folded act-order, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.described import describe
from tests.support.encode import pack_stream, write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"


def exl2_tensors(
    name: str, weight: np.ndarray, widths: list[tuple[int, int]], seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A module in groups of (bits, columns), in an order of columns by chance; the weights that it stands for."""
    columns = weight.shape[1]
    perm = np.random.default_rng(seed).permutation(columns)
    permuted = weight[:, perm]
    words, table, steps, largest, values, at, row = [], [], [], [], [], 0, 0
    for bits, size in widths:
        part = permuted[:, at : at + size]
        scale = np.abs(part).max(1) / 2 ** (bits - 1)
        step = np.clip(np.ceil(np.sqrt(scale / scale.max()) * 16), 1, 16).astype(np.int64)
        top = np.float16(scale.max())
        exact = (np.float16(step**2) * np.float16(np.float32(top) / 256)).astype(np.float32)
        half = 1 << (bits - 1)
        codes = np.clip(np.rint(part / exact[:, None]) + half, 0, 2 * half - 1)
        values.append(exact[:, None] * (codes - half))
        packed = pack_stream(codes.astype(np.uint8), bits).T
        table += [bits, row]
        words.append(packed)
        steps.append(pack_stream((step - 1).astype(np.uint8)[None], 4)[0])
        largest.append(top)
        at, row = at + size, row + len(packed)
    invperm = np.argsort(perm)
    tensors = {
        f"{name}.q_weight": np.concatenate(words),
        f"{name}.q_groups": np.array(table, np.int16),
        f"{name}.q_scale": np.stack(steps),
        f"{name}.q_scale_max": np.array(largest, np.float16),
        f"{name}.q_invperm": invperm.astype(np.int32),
    }
    return tensors, np.concatenate(values, 1)[:, invperm].astype(np.float32)


def label(bits: float = 4.2) -> dict[str, Any]:
    return {"quant_method": "exl2", "version": "0.2.4", "bits": bits, "head_bits": 6}


MIXED = [(8, 32), (6, 32), (5, 64), (4, 64), (3, 32), (2, 32)]


def module(widths: list[tuple[int, int]] = MIXED) -> tuple[dict[str, np.ndarray], np.ndarray]:
    weight = np.random.default_rng(1).normal(0, 0.05, (32, 256)).astype(np.float32)
    return exl2_tensors(NAME, weight, widths)


def test_groups_of_all_widths_are_the_weights_that_were_meant(tmp_path):
    tensors, meant = module()
    with open_checkpoint(write_folder(tmp_path, tensors, label())) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert t.bits == 8
        assert np.array_equal(t.dequantize(), meant)
        rows = np.array([7, 3, 30])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), meant[rows])
        assert np.array_equal(checkpoint.group_order(NAME), t.group_of_column)
        assert checkpoint.settings() == "4.62 bits on average, groups of 2, 3, 4, 5, 6, 8 bits"


def test_a_block_packed_by_hand(tmp_path):
    """Three bits cross words; the scale is (3 + 1)^2 * 0.5 / 256."""
    codes = np.arange(32) % 8
    stream = sum(int(c) << 3 * i for i, c in enumerate(codes))
    words = np.array([stream >> 32 * i & 0xFFFFFFFF for i in range(3)], np.uint32).view(np.int32)
    tensors = {
        "q_weight": np.repeat(words[:, None], 32, 1),
        "q_groups": np.array([3, 0], np.int16),
        "q_scale": np.full((1, 4), 0x33333333, np.int32),
        "q_scale_max": np.array([0.5], np.float16),
        "q_invperm": np.arange(32)[::-1].astype(np.int16),
        "q_perm": np.arange(32)[::-1].astype(np.int16),
    }
    tensors = {f"{NAME}.{part}": np.ascontiguousarray(values) for part, values in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, tensors, label(3.0))) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.array_equal(weights[5], (codes[::-1] - 4) * np.float32(16 * 0.5 / 256))


def test_the_codes_of_down_proj_are_kept_by_permuting_the_layers_before(tmp_path, small_model):
    meant: dict[str, np.ndarray] = {}

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers." not in name:
            return None
        count = weight.shape[1] // 64
        tensors, meant[name] = exl2_tensors(name, weight, [(5, 32), (5, 32)] + [(4, 64)] * (count - 1), len(meant))
        return tensors

    write_model(tmp_path / "c", small_model, layer, label(), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    outcomes = {(t.name.split(".")[2], t.outcome) for t in report.tensors if t.has_codes}
    assert ("ffn_down", "codes carried") in outcomes
    assert {outcome for kind, outcome in outcomes if kind != "ffn_down"} == {"requantized"}
    assert all(t.fidelity.share < 0.15 for t in report.tensors if t.has_codes)
    said = describe(tmp_path / "c")
    assert "EXL2, 4.2 bits, head 6 bits, act-order" in said
    assert "they agree" in said


def test_the_head_is_read_without_its_padding(tmp_path, small_model):
    meant: dict[str, np.ndarray] = {}

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if name != "lm_head":
            return None
        padded = np.concatenate([weight, np.zeros((32, weight.shape[1]), np.float32)])
        tensors, meant[name] = exl2_tensors(name, padded, [(8, 32), (6, 64), (6, weight.shape[1] - 96)])
        return tensors

    config = json.loads((small_model / "config.json").read_text()) | {"tie_word_embeddings": False}
    floats = load_file(small_model / "model.safetensors")
    floats.setdefault("lm_head.weight", floats["model.embed_tokens.weight"])
    shutil.copytree(small_model, tmp_path / "model")
    save_file(floats, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    write_model(tmp_path / "c", tmp_path / "model", layer, label(), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    head = next(t for t in report.tensors if t.name == "output.weight")
    assert (head.outcome, head.type) == ("requantized", "Q8_0")
    assert head.fidelity.share < 0.15
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert np.array_equal(checkpoint.read_module("lm_head").dequantize(), meant["lm_head"])
        assert checkpoint.reader.disagreements() == []
    (tmp_path / "c" / "config.json").write_text(
        json.dumps(config | {"quantization_config": label() | {"head_bits": 4}})
    )
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.reader.disagreements() == ["the head has codes of 6 bits, but the label says 4"]


def test_an_average_that_the_label_denies_is_noted(tmp_path, small_model):
    tensors, _ = module()
    with open_checkpoint(write_folder(tmp_path, tensors, label(2.5))) as checkpoint:
        assert checkpoint.reader.disagreements() == ["the codes have 4.62 bits on average, but the label says 2.5"]


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("q_groups", lambda v: np.where(np.arange(len(v)) == 0, 7, v).astype(np.int16), "do not add up to 256 columns"),
        ("q_groups", lambda v: v[:-2].copy(), "contradict"),
        ("q_groups", lambda v: np.roll(v, 2), "do not add up to 256 columns"),
        ("q_weight", lambda v: v[:-1].copy(), "do not add up to 256 columns"),
        ("q_weight", lambda v: v[:, :-4].copy(), "contradict"),
        ("q_invperm", lambda v: np.zeros_like(v), "not a permutation"),
        ("q_invperm", lambda v: v[:-64].copy(), "do not add up to 192 columns"),
        ("q_scale_max", lambda v: v * np.float16(np.nan), "NaN or infinite"),
        ("q_scale", lambda v: v.astype(np.int16), "contradict"),
        ("q_scale", None, "but no q_scale"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, part, change, said):
    tensors, _ = module()
    full = f"{NAME}.{part}"
    if change is None:
        del tensors[full]
    else:
        tensors[full] = change(tensors[full])
    assert said in refusal(write_folder(tmp_path, tensors, label()))


@pytest.mark.parametrize("bits", ["four", True, 0])
def test_bits_that_are_no_number_are_refused(tmp_path, bits):
    assert "must be a number up to 16" in refusal(write_folder(tmp_path, module()[0], label(bits)))

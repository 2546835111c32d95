"""AQLM: sums of codebooks' vectors come as floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"


def label(count: int = 2) -> dict[str, Any]:
    return {"quant_method": "aqlm", "in_group_size": 8, "num_codebooks": count, "nbits_per_codebook": 8}


def aqlm(
    name: str = NAME, shape: tuple[int, int] = (24, 64), count: int = 2, og: int = 1
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random codes, and the weights that they stand for, summed one by one."""
    random = np.random.default_rng(0)
    rows, runs = shape[0] // og, shape[1] // 8
    codes = random.integers(0, 256, (rows, runs, count), dtype=np.uint8)
    books = random.normal(0, 1, (count, 256, og, 8)).astype(np.float16)
    scales = random.uniform(0.01, 0.02, (rows, 1, 1, 1)).astype(np.float16)
    meant = np.zeros(shape, np.float32)
    for i in range(rows):
        for j in range(runs):
            vector = sum(books[m, codes[i, j, m]].astype(np.float32) for m in range(count))
            meant[i * og : (i + 1) * og, 8 * j : 8 * j + 8] = vector * np.float32(scales[i, 0, 0, 0])
    return {f"{name}.codes": codes.view(np.int8), f"{name}.codebooks": books, f"{name}.scales": scales}, meant


@pytest.mark.parametrize(("count", "og"), [(1, 1), (2, 1), (2, 4)])
def test_weights_are_sums_of_vectors(tmp_path, count, og):
    tensors, meant = aqlm(count=count, og=og)
    with open_checkpoint(write_folder(tmp_path, tensors, label(count))) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.allclose(t.dequantize(), meant, rtol=1e-6, atol=1e-8)
        rows = np.array([21, 3, 4])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), t.dequantize()[rows])
        books = "1 codebook" if count == 1 else f"{count} codebooks"
        assert checkpoint.settings() == f"{books} of 256 vectors of 8 at {count / og:.3g} bits"
        one = ["1 module has codebooks [2, 256, 4, 8], but the label says [2, 256, 1, 8]"]
        assert checkpoint.reader.disagreements() == (one if og == 4 else [])


def test_a_code_packed_by_hand(tmp_path):
    """-1 is number 255 of a codebook of 8 bits."""
    books = np.zeros((1, 256, 1, 8), np.float16)
    books[0, 255, 0] = np.arange(8)
    tensors = {
        "codes": np.full((3, 2, 1), -1, np.int8),
        "codebooks": books,
        "scales": np.full((3, 1, 1, 1), 2, np.float16),
    }
    stored = {f"{NAME}.{part}": value for part, value in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, stored, label(1))) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), np.tile(2 * np.arange(8), (3, 2)))


def test_codes_that_a_pass_on_a_cpu_turned_are_turned_back(tmp_path):
    """Those of 8 rows and 8 runs, whose shape does not change, follow the others."""
    meant, stored = {}, {}
    for name, shape in ((NAME, (24, 64)), ("square", (8, 64)), ("wide", (8, 128))):
        tensors, meant[name] = aqlm(name, shape)
        tensors[f"{name}.codes"] = np.ascontiguousarray(tensors[f"{name}.codes"].swapaxes(0, 1))
        stored |= tensors
    with open_checkpoint(write_folder(tmp_path, stored, label())) as checkpoint:
        for name, values in meant.items():
            read = checkpoint.read_module(name).dequantize()
            assert np.allclose(read, values, rtol=1e-6, atol=1e-8), name
            assert np.array_equal(checkpoint.read_module(name, np.array([5, 2])).dequantize(), read[[5, 2]])
        assert checkpoint.notes == ["a pass on a CPU turned the codes of 3 layers; they are turned back"]


def test_a_model_is_requantized_within_what_its_codes_cost_at_least(tmp_path, small_model):
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return aqlm(name, weight.shape)[0] if ".layers.0.mlp" in name else None

    write_model(tmp_path / "c", small_model, layer, label(), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.kind, t.outcome) for t in coded} == {(f"ffn_{n}", "requantized") for n in ("gate", "up", "down")}
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "AQLM, 2 codebooks of 8 bits, vectors of 8" in said
    assert "codebooks have no place in GGUF" in said


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("scales", None, "but no scales"),
        ("scales", np.ones((24, 1), np.float16), "contradict"),
        ("scales", np.full((24, 1, 1, 1), np.inf, np.float16), "NaN or infinite"),
        ("codes", np.zeros((24, 8, 3), np.int8), "contradict"),
        ("codes", np.zeros((24, 8, 2), np.float16), "contradict"),
        ("codebooks", np.ones((2, 100, 1, 8), np.float16), "contradict"),
        ("codebooks", np.ones((2, 512, 1, 8), np.float16), "contradict"),
        ("codebooks", np.ones((2, 64, 1, 8), np.float16), "beyond 64 vectors"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = aqlm()
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, label()))

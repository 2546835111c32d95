"""EETQ: rows of int8, whose bytes are in the order of the GPU that wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LABEL = {"quant_method": "eetq", "weights": "int8"}


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [out, in] and scales [out]: the full range of a byte, cut at 127."""
    scales = np.abs(weight).max(1) / 128
    return (np.clip(np.rint(weight / scales[:, None]), -128, 127) + 128).astype(np.uint8), scales.astype(np.float32)


def since_turing(codes: np.ndarray) -> np.ndarray:
    """The steps of the tool's preprocessing, one by one, for compute capability 7.5 and later."""
    out, columns = codes.shape
    matrix = codes.T  # [in, out]
    order = [8 * (t % 4 // 2) + t % 2 + 2 * (t // 4) for t in range(16)]
    permuted = np.concatenate([matrix[base : base + 16][order] for base in range(0, columns, 16)])
    stored = np.empty(out * columns, np.uint8)
    for column, row in enumerate(permuted.T):  # columns of the transposed weight: one output feature each
        for base in range(0, columns, 64):
            at = column // 2 * 2 * columns + 2 * base + column % 2 * 64
            stored[at : at + 64] = row[base : base + 64]
    return swapped(stored).reshape(columns, out)


def volta(codes: np.ndarray) -> np.ndarray:
    return swapped(np.ascontiguousarray(codes.T).reshape(-1)).reshape(codes.shape[::-1])


def swapped(stored: np.ndarray) -> np.ndarray:
    """The second and third of every four bytes change places."""
    return stored.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)


ORDERS = {"turing": since_turing, "volta": volta}


def parts(codes: np.ndarray, scales: np.ndarray, order: str, name: str = NAME) -> dict[str, np.ndarray]:
    return {f"{name}.weight": ORDERS[order](codes).view(np.int8), f"{name}.weight_scales": scales.astype(np.float16)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(64, 64), (96, 256)])
def test_the_order_is_found_from_the_largest_codes(tmp_path, order, shape):
    codes, scales = quantized(np.random.default_rng(0).normal(0, 0.05, shape))
    folder = write_folder(tmp_path, parts(codes, scales, order), LABEL)
    with open_checkpoint(folder) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.array_equal(t.codes, codes)
        assert np.array_equal(t.scales[:, 0], scales.astype(np.float16).astype(np.float32))
        assert (t.zeros == 128).all()
        rows = np.array([9, 2])
        assert np.array_equal(checkpoint.read_module(NAME, rows).codes, codes[rows])
        assert checkpoint.settings() == "8 bits, one group a row"


def test_rows_of_zeros_tell_nothing_about_the_order(tmp_path):
    codes, scales = quantized(np.random.default_rng(0).normal(0, 0.05, (64, 128)))
    codes[5], scales[5] = 128, 0
    with open_checkpoint(write_folder(tmp_path, parts(codes, scales, "turing"), LABEL)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).codes, codes)


def test_a_model_keeps_all_codes_in_q8_0(tmp_path: Path, small_model: Path) -> None:
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return parts(*quantized(weight), "turing", name) if ".layers." in name else None

    write_model(tmp_path / "c", small_model, layer, LABEL, None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.outcome, t.type) for t in coded} == {("codes carried", "Q8_0")}
    assert len(coded) == 28
    assert "EETQ, 8 bits, one group a row, symmetric" in describe(tmp_path / "c")


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_scales", None, "but no weight_scales"),
        ("weight_scales", np.ones(63, np.float16), "contradict"),
        ("weight_scales", np.full(64, np.nan, np.float16), "NaN or infinite"),
        ("weight", np.ones((64, 64), np.float16), "contradict"),
        ("weight", np.ones((64, 64), np.int8), "in no known order of EETQ"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors = parts(*quantized(np.random.default_rng(0).normal(0, 0.05, (64, 64))), "turing")
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, LABEL))

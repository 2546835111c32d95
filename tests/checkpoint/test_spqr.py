"""SpQR: groups of 16 with quantized scales, and outliers."""

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
LABEL: dict[str, Any] = {"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16}
Outliers = list[list[tuple[int, float]]]


def word(scale: int, zero: int, codes: list[int], byte: int) -> int:
    return scale | zero << 3 | sum(q << 3 * (2 + j) for j, q in enumerate(codes)) | byte << 54


def spqr(
    shape: tuple[int, int] = (32, 64), name: str = NAME, turns: bool = True, order: bool = True, size: float = 1.0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random tiles with an outlier in most rows; the weights that they stand for, computed one by one."""
    random = np.random.default_rng(0)
    out, columns = shape
    words, stored = [], np.zeros(shape, np.float32)
    half = np.float16
    for i in range(0, out, 16):
        for j in range(0, columns, 16):
            ss, zs, sz, zz = (half(x) for x in random.uniform((0.01, 0.8, -2, -1), (0.02, 1, -1, 1)) * (size, 1, 1, 1))
            pieces = np.array([ss, zs, sz, zz], half).tobytes()
            for k in range(16):
                scale, zero, *codes = (int(q) for q in random.integers(0, 8, 18))
                words.append(word(scale, zero, codes, pieces[k // 2]))
                s, z = half(ss * half(half(scale) - sz)), half(zs * half(half(zero) - zz))
                stored[i + k, j : j + 16] = [half(s * half(half(q) - z)) for q in codes]
    outliers: Outliers = [[(int(random.integers(columns)), 0.5 * size)] * (row % 3) for row in range(out)]
    for row, found in enumerate(outliers):
        for column, value in found:
            stored[row, column] += np.float32(half(value))
    offsets, values = (in_turns if turns else row_by_row)(outliers)
    tensors = {"dense_weights": np.array(words, np.uint64).view(np.int64), "row_offsets": offsets, "col_vals": values}
    if order:
        at = random.permutation(columns)
        tensors["in_perm"] = at.astype(np.uint16).view(np.int32)
        stored = stored[:, np.argsort(at)]
    return {f"{name}.{part}": x for part, x in tensors.items()}, stored


def pair(column: int, value: float) -> int:
    return column | int(np.float16(value).view(np.uint16)) << 16


def row_by_row(outliers: Outliers) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum([0, *map(len, outliers)]).astype(np.int32)
    return ends, np.array([pair(*found) for row in outliers for found in row], np.uint32).view(np.int32)


def in_turns(outliers: Outliers) -> tuple[np.ndarray, np.ndarray]:
    """16 rows take turns; zeros fill those that have fewer."""
    ends, values = [0], []
    for first in range(0, len(outliers), 16):
        rows = outliers[first : first + 16]
        for n in range(max(map(len, rows))):
            values += [pair(*row[n]) if n < len(row) else 0 for row in rows]
        ends.append(len(values))
    return np.array(ends, np.int32), np.array(values, np.uint32).view(np.int32)


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("order", [True, False])
def test_weights_are_the_codes_and_the_outliers(tmp_path, turns, order):
    tensors, meant = spqr(turns=turns, order=order)
    with open_checkpoint(write_folder(tmp_path, tensors, LABEL)) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.array_equal(t.dequantize(), meant)
        rows = np.array([21, 3])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), meant[rows])
        count = tensors[f"{NAME}.col_vals"].size
        said = f"3 bits, groups of 16, outliers beside {count / 2048:.2%} of the weights"
        assert checkpoint.settings() == said


def test_a_row_of_words_by_hand(tmp_path):
    """One tile: ss 1, zs 1, sz 0, zz 0, so the first row is 2 (q - 3)."""
    pieces = np.array([1, 1, 0, 0], np.float16).tobytes()
    words = [word(2, 3, [0, 1, 2, 3, 4, 5, 6, 7] * 2, pieces[k // 2]) for k in range(16)]
    tensors = {
        f"{NAME}.dense_weights": np.array(words, np.uint64).view(np.int64),
        f"{NAME}.row_offsets": np.array([0, 1, *[1] * 15], np.int32),
        f"{NAME}.col_vals": np.array([0x3C000002], np.int32),  # 1.0 in column 2
        f"{NAME}.in_perm": np.array([n | n + 1 << 16 for n in range(0, 16, 2)], np.int32),
    }
    with open_checkpoint(write_folder(tmp_path, tensors, LABEL)) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
    assert weights[0].tolist() == [-6, -4, -1, 0, 2, 4, 6, 8, -6, -4, -2, 0, 2, 4, 6, 8]
    assert weights[1].tolist() == [-6, -4, -2, 0, 2, 4, 6, 8] * 2


def test_a_model_is_requantized_within_what_its_codes_cost(tmp_path, small_model):
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return spqr(weight.shape, name, size=0.1)[0] if ".layers.0.mlp" in name else None

    write_model(tmp_path / "c", small_model, layer, LABEL, None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {t.outcome for t in coded} == {"requantized"}
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "SpQR, 3 bits, groups of 16, outliers" in said
    assert "codes with outliers have no place in GGUF" in said


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("row_offsets", None, "but no row_offsets"),
        ("row_offsets", np.arange(4, dtype=np.int32), "contradict"),
        ("row_offsets", np.array([0, 16, 9], np.int32), "do not go from 0"),
        ("dense_weights", np.zeros(100, np.int64), "contradict"),
        ("dense_weights", np.full(128, 31 << 57, np.int64), "not finite"),
        ("col_vals", np.full(64, 0x3C000040, np.int32), "no valid outliers"),
        ("in_perm", np.zeros(32, np.int32), "not a permutation"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = spqr()
    if part == "col_vals":
        value = value[: tensors[f"{NAME}.col_vals"].size]
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, LABEL))


def test_other_sizes_are_refused(tmp_path):
    tensors, _ = spqr()
    assert "beta1 is 32; SpQR's layout has 16 alone" in refusal(write_folder(tmp_path, tensors, LABEL | {"beta1": 32}))

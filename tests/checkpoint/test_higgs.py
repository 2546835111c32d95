"""HIGGS: grid vectors in FLUTE's order, between Hadamard transforms."""

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
THREES = (0, 3, 6, 9, 12, 1, 4, 7, 10, 13, 2, 5, 8, 11, 14, 15)


def label(*names: str, bits: int = 4, template: int = 20, size: int = 64) -> dict[str, Any]:
    kernel = {"template_id": template, "num_bits": bits, "num_sms": 84}
    return {"quant_method": "higgs", "bits": bits, "p": 2, "group_size": 64, "hadamard_size": size,
            "tune_metadata": dict.fromkeys(names or (NAME,), kernel)}  # fmt: skip


def packed(codes: np.ndarray, bits: int, lane: int) -> np.ndarray:
    """FLUTE's order, code by code: uint8 [out, in] -> int16 [out * bits / 16, in]."""
    out, columns = codes.shape
    words = np.zeros((out * bits // 16, columns), np.uint16)
    count = 16 if bits == 3 else 16 // bits
    for first in range(0, out, count * lane):
        for p in range(lane):
            rows = codes[first + p : first + count * lane : lane]
            at = first * (1 if bits == 3 else bits) // 16 + p
            for k in range(0, columns, 2):
                if bits == 3:
                    stream = sum(
                        int(c) << 3 * i for i, c in enumerate(rows[j, k + half] for j in THREES for half in (1, 0))
                    )
                    for n, row in enumerate((at, *(out // 16 + first // 8 + lane * m + p for m in (0, 1)))):
                        words[row, k] = stream >> 30 * n & 0xFFFF
                        words[row, k + 1] = stream >> 30 * n + 16 & 0x3FFF | (stream >> 90 + 2 * n & 3) << 14
                    continue
                for half in range(2):
                    own = rows[half * count // 2 : (half + 1) * count // 2]
                    pairs = (int(c) for row in own for c in (row[k + 1], row[k]))
                    words[at, k + half] = sum(c << bits * i for i, c in enumerate(pairs))
    return words.view(np.int16)


def sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / np.sqrt(size)


def higgs(
    bits: int, lane: int, shape: tuple[int, int], name: str = NAME, size: int = 64
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random codes, and the weights that they stand for."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, shape, dtype=np.uint8)
    grid = random.normal(0, 0.9, (1 << bits, 1 << bits, 2)).astype(np.float16)
    scales = random.uniform(0.01, 0.02, (shape[0], shape[1] // 64)).astype(np.float16)
    values = grid.astype(np.float64)[codes[:, ::2], codes[:, 1::2]].reshape(shape)
    rotated = values * np.repeat(scales, 64, axis=1).astype(np.float64)
    weights = (rotated.reshape(shape[0], -1, size) @ sylvester(size)).reshape(shape)
    tensors = {"weight": packed(codes, bits, lane), "scales": scales, "tables2": grid,
               "tables": np.arange(1 << bits, dtype=np.float16)}  # fmt: skip
    return {f"{name}.{part}": x for part, x in tensors.items()}, weights


@pytest.mark.parametrize(("bits", "lane", "template"), [(4, 32, 20), (4, 64, 100), (2, 32, 11), (2, 64, 3), (3, 32, 0)])
def test_weights_are_the_grids_values_rotated_back(tmp_path, bits, lane, template):
    shape = (2048 if bits == 2 and lane == 64 else 1024, 128)
    tensors, meant = higgs(bits, lane, shape)
    with open_checkpoint(write_folder(tmp_path, tensors, label(bits=bits, template=template))) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.square(weights - meant).sum() <= 1e-12 * np.square(meant).sum()
        assert checkpoint.settings() == f"grid codes of {bits} bits in groups of 64, Hadamard blocks of 64"


def test_values_of_bf16_models_are_labelled_f16(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors, _ = higgs(4, 32, (256, 64))
    grid = torch.from_numpy(tensors[f"{NAME}.tables2"]).to(torch.bfloat16)
    held = {name: torch.from_numpy(x) for name, x in tensors.items()}
    held[f"{NAME}.scales"] = held[f"{NAME}.scales"].to(torch.bfloat16)
    write_folder(tmp_path, tensors, label())
    read = []
    for stored in (grid, grid.view(torch.float16)):
        save_file(held | {f"{NAME}.tables2": stored}, tmp_path / "model.safetensors")
        with open_checkpoint(tmp_path) as checkpoint:
            read.append(checkpoint.read_module(NAME).dequantize())
    assert np.array_equal(*read)


def test_a_model_is_requantized_within_what_its_codes_cost(tmp_path, small_model):
    names: list[str] = []

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers.0.mlp" not in name or weight.shape[0] % 128:
            return None
        names.append(name)
        return higgs(4, 32, weight.shape, name)[0]

    write_model(tmp_path / "c", small_model, layer, label(), None, 1)
    write_model(tmp_path / "c", small_model, layer, label(*names), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert coded
    assert {t.outcome for t in coded} == {"requantized"}
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "HIGGS, 4 bits, vectors of 2, Hadamard blocks of 64" in said
    assert "grid codes have no place in GGUF" in said


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("scales", None, "but no scales"),
        ("scales", np.ones((256, 3), np.float16), "contradict"),
        ("scales", np.full((256, 1), np.inf, np.float16), "NaN or infinite"),
        ("weight", np.zeros((64, 64), np.int32), "contradict"),
        ("weight", np.zeros((63, 64), np.int16), "contradict"),
        ("tables2", np.zeros((2, 2, 2), np.float16), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = higgs(4, 32, (256, 64))
    if value is None:
        del tensors[f"{NAME}.{part}"]
    else:
        tensors[f"{NAME}.{part}"] = value
    assert said in refusal(write_folder(tmp_path, tensors, label()))


def test_a_config_that_does_not_name_the_kernel_is_refused(tmp_path):
    tensors, _ = higgs(4, 32, (256, 64))
    folder = write_folder(tmp_path, tensors, label() | {"tune_metadata": {}})
    assert f"does not name the kernel (template_id) of {NAME}" in refusal(folder)
    assert "not a power of two" in refusal(write_folder(tmp_path, tensors, label(size=48)))

"""FP-Quant: 4-bit floats of rotated weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import E2M1, Fp4Tensor
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
SIZES = {"mxfp4": 32, "nvfp4": 16}


def label(kind: str = "mxfp4", **said: Any) -> dict[str, Any]:
    return {"quant_method": "fp_quant", "forward_dtype": kind, "hadamard_group_size": 32, **said}


def hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return (matrix / np.sqrt(size)).astype(np.float32)


def fp_quant(
    kind: str, shape: tuple[int, int] = (24, 128), rotated: bool = True, whole: float = 1.0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random codes, and the weights that they stand for."""
    random = np.random.default_rng(0)
    (out, columns), size = shape, SIZES[kind]
    codes = random.integers(0, 16, shape, dtype=np.uint8)
    held = -(-out // 128) * 128, columns // size
    if kind == "mxfp4":
        scales = random.integers(118, 122, held, dtype=np.uint8)
        values = 2.0 ** (scales.astype(int) - 127)
    else:
        scales = random.integers(0x20, 0x28, held, dtype=np.uint8)  # 2^-3 to 2^-2 in eight steps
        values = 2.0**-3 * (1 + (scales - 0x20) / 8)
    matrix = hadamard(32) if rotated else np.eye(32, dtype=np.float32)
    stored = E2M1[codes] * np.repeat(values[:out], size, axis=1).astype(np.float32) / np.float32(whole)
    weights = (stored.reshape(out, -1, 32).astype(np.float64) @ matrix.T.astype(np.float64)).reshape(shape)
    tensors = {"qweight": codes[:, ::2] | codes[:, 1::2] << 4, "scales": scales, "forward_hadamard_matrix": matrix,
               "backward_hadamard_matrix": matrix, "act_global_scale": np.array([whole], np.float32),
               "weight_global_scale": np.array([whole], np.float32)}  # fmt: skip
    return tensors, weights


def named(tensors: dict[str, np.ndarray], name: str = NAME) -> dict[str, np.ndarray]:
    return {f"{name}.{part}": x for part, x in tensors.items()}


@pytest.mark.parametrize(("kind", "whole"), [("mxfp4", 1.0), ("mxfp4", 3.0), ("nvfp4", 10.0)])
@pytest.mark.parametrize("rotated", [True, False])
def test_weights_are_the_codes_rotated_back(tmp_path, kind, whole, rotated):
    tensors, meant = fp_quant(kind, rotated=rotated, whole=whole)
    with open_checkpoint(write_folder(tmp_path, named(tensors), label(kind))) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.square(t.dequantize() - meant).sum() <= 1e-12 * np.square(meant).sum()
        rows = np.array([7, 3])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), t.dequantize()[rows])
        carried = not rotated and (kind, whole) != ("mxfp4", 3.0)
        assert isinstance(t, Fp4Tensor) == carried
        assert checkpoint.settings() == f"{kind.upper()} {'not rotated' if carried else 'rotated in blocks of 32'}"
        assert [*checkpoint.tensors] == []


@pytest.mark.parametrize("rotated", [True, False])
def test_codes_that_are_not_rotated_are_carried(tmp_path, small_model, rotated):
    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return named(fp_quant("mxfp4", weight.shape, rotated)[0], name) if ".layers.0.mlp" in name else None

    write_model(tmp_path / "c", small_model, layer, label(), None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = {(t.type if not rotated else "", t.outcome) for t in report.tensors if t.has_codes}
    assert coded == ({("", "requantized")} if rotated else {("MXFP4", "codes carried")})
    said = describe(tmp_path / "c")
    assert "FP-Quant, MXFP4, hadamard blocks of 32" in said
    assert ("rotated codes have no place in GGUF" in said) == rotated


def test_rounded_weights_that_are_not_packed_are_rotated_back(tmp_path):
    tensors, meant = fp_quant("mxfp4")
    matrix = tensors["forward_hadamard_matrix"]
    rounded = (meant.reshape(24, -1, 32) @ matrix.astype(np.float64)).reshape(meant.shape).astype(np.float32)
    empty = {part: np.zeros(0, tensors[part].dtype) for part in ("qweight", "scales")}
    folder = write_folder(tmp_path, named(tensors | empty | {"dqweight": rounded}), label(pseudoquantization=True))
    with open_checkpoint(folder) as checkpoint:
        weights = checkpoint.read_float(f"{NAME}.weight")
        assert np.square(weights - meant).sum() <= 1e-12 * np.square(meant).sum()
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight", (3, 5)), weights[3:5])
        assert [*checkpoint.tensors] == [f"{NAME}.weight"]
        assert checkpoint.stored_as(f"{NAME}.weight") == "F32, rotated"


def test_weights_that_are_not_rounded_yet_are_floats(tmp_path):
    tensors, meant = fp_quant("mxfp4")
    del tensors["qweight"], tensors["scales"]
    folder = write_folder(tmp_path, named(tensors | {"weight": meant.astype(np.float32)}), label())
    with open_checkpoint(folder) as checkpoint:
        assert np.array_equal(checkpoint.read_float(f"{NAME}.weight"), meant.astype(np.float32))
        assert [*checkpoint.tensors] == [f"{NAME}.weight"]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("scales", None, "but no scales"),
        ("scales", np.zeros((128, 3), np.uint8), "contradict"),
        ("scales", np.zeros((16, 4), np.uint8), "contradict"),
        ("scales", np.full((128, 4), 255, np.uint8), "NaN or negative"),
        ("qweight", np.zeros((24, 64), np.int32), "contradict"),
        ("forward_hadamard_matrix", np.ones((48, 48), np.float32), "contradict"),
        ("weight_global_scale", np.zeros(1, np.float32), "is 0, not a scale"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = fp_quant("mxfp4")
    if value is None:
        del tensors[part]
    else:
        tensors[part] = value
    assert said in refusal(write_folder(tmp_path, named(tensors), label()))


def test_other_types_of_codes_are_refused(tmp_path):
    tensors, _ = fp_quant("mxfp4")
    assert "forward_dtype is 'mxfp8'" in refusal(write_folder(tmp_path, named(tensors), label("mxfp8")))

"""SINQ: scales of rows in groups, and of columns. Files of the tool itself are in tests/data/tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.adapter import read_adapter
from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.merge import merge
from bridge.conversion.planning.importance import Importance
from bridge.models.outline import OutlineTensor, Part
from tests.support.adapters import low_rank, merged, write_adapter
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
LABEL: dict[str, Any] = {"quant_method": "sinq", "nbits": 4, "group_size": 64, "tiling_mode": "1D", "method": "sinq"}
SIDECAR = "model.safetensors.index.json.meta.json"


def sinq(shape: tuple[int, int], columns: bool = True) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random codes of 4 bits in groups of 64, and the weights that they stand for."""
    random = np.random.default_rng(0)
    out, width = shape
    codes = random.integers(0, 16, (out * width // 64, 64), dtype=np.uint8)
    scales = random.uniform(0.001, 0.002, (len(codes), 1)).astype(np.float16)
    zeros = random.integers(6, 9, (len(codes), 1)).astype(np.float16)
    own = random.uniform(0.5, 2, (1, width)) if columns else np.ones((1, width))
    half = len(codes) // 2
    weights = ((codes - zeros.astype(np.float32)) * scales.astype(np.float32)).reshape(shape)
    tensors = {"W_q": codes[:half] << 4 | codes[half:], "meta.scale": scales, "meta.zero": zeros,
               "meta.scale2": own.astype(np.float16)}  # fmt: skip
    return tensors, weights * tensors["meta.scale2"].astype(np.float32)


def meta(shape: tuple[int, int], **said: Any) -> dict[str, Any]:
    return {
        "meta": {"nbits": 4, "group_size": 64, "shape": list(shape), "packing": "4bit_u8", "method": "sinq", **said}
    }


def write(folder: Path, tensors: dict[str, np.ndarray], shape: tuple[int, int] = (24, 128), **said: Any) -> Path:
    write_folder(folder, {f"{NAME}.{part}": values for part, values in tensors.items()}, LABEL)
    (folder / SIDECAR).write_text(json.dumps({NAME: meta(shape, **said)}))
    return folder


@pytest.mark.parametrize("columns", [True, False])
def test_codes_without_scales_of_columns_are_codes(tmp_path, columns):
    tensors, meant = sinq((24, 128), columns)
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert isinstance(t, DecodedTensor if columns else GroupedTensor)
        assert np.array_equal(t.dequantize(), meant)
        steps = np.repeat(tensors["meta.scale"].reshape(24, 2), 64, axis=1) * tensors["meta.scale2"].astype(np.float64)
        assert t.noise() == pytest.approx(np.square(steps).sum() / 12)
        assert checkpoint.settings() == "4 bits, groups of 64, integers, scales of columns in 1"


def test_codes_may_be_stored_without_packing(tmp_path):
    tensors, meant = sinq((24, 128))
    tensors["W_q"] = np.concatenate([tensors["W_q"] >> 4, tensors["W_q"] & 15])
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), meant)


@pytest.mark.parametrize("columns", [True, False])
def test_a_model_keeps_the_codes_that_no_column_scales(tmp_path, small_model, columns):
    sidecar: dict[str, Any] = {}

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers.0.mlp" not in name:
            return None
        sidecar[name] = meta(weight.shape)
        return {f"{name}.{part}": x for part, x in sinq(weight.shape, columns)[0].items()}

    write_model(tmp_path / "c", small_model, layer, LABEL, None, 1)
    (tmp_path / "c" / SIDECAR).write_text(json.dumps(sidecar))
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    kept = {t.kind for t in coded if t.outcome == "codes carried"}
    assert kept == ({"ffn_down"} if columns else {"ffn_gate", "ffn_up", "ffn_down"})
    assert all(t.fidelity.share < 0.15 for t in coded)
    said = describe(tmp_path / "c")
    assert "SINQ, 4 bits, groups of 64, sinq" in said
    assert ("codes with scales of columns have no place in GGUF" in said) == columns


def mlp(folder: Path, *more: str) -> dict[str, np.ndarray]:
    """An MLP of 128 inputs and 192 inner values; returned are its weights."""
    shapes = {"gate_proj": (192, 128), "up_proj": (192, 128), "down_proj": (128, 192)}
    stored, weights, sidecar = {}, {}, {}
    for part, shape in shapes.items():
        name = NAME.replace("down_proj", part)
        tensors, weights[part] = sinq(shape)
        stored |= {f"{name}.{own}": values for own, values in tensors.items()}
        sidecar[name] = meta(shape)
    stored[f"{NAME.replace('down_proj', 'up_proj')}.bias"] = np.ones(192, np.float32)
    stored |= {NAME.replace("down_proj", name): np.ones(192, np.float32) for name in more}
    write_folder(folder, stored, LABEL)
    (folder / SIDECAR).write_text(json.dumps(sidecar))
    return weights


def test_scales_of_down_proj_move_into_the_rows_of_up_proj(tmp_path):
    stored = mlp(tmp_path)
    x = np.random.default_rng(1).normal(size=128).astype(np.float32)

    def output(weights: dict[str, np.ndarray], bias: np.ndarray) -> np.ndarray:
        return weights["down_proj"] @ (np.tanh(weights["gate_proj"] @ x) * (weights["up_proj"] @ x + bias))

    with open_checkpoint(tmp_path) as checkpoint:
        read = {part: checkpoint.read_module(NAME.replace("down_proj", part)) for part in stored}
        assert isinstance(read["down_proj"], GroupedTensor)
        assert not isinstance(read["up_proj"], GroupedTensor)
        bias = read["up_proj"].bias
        assert bias is not None
        moved = output({part: t.dequantize() for part, t in read.items()}, bias)
        assert np.allclose(moved, output(stored, np.ones(192)), rtol=1e-4, atol=1e-6)
        rows, _ = checkpoint.refit(NAME.replace("down_proj", "up_proj"))
        _, columns = checkpoint.refit(NAME)
        assert np.allclose(read["up_proj"].dequantize(), stored["up_proj"] * rows[:, None])
        assert np.allclose(read["down_proj"].dequantize(), stored["down_proj"] * columns)
        assert "those of 1 down_proj are in the rows of up_proj" in checkpoint.settings()
        at = np.array([7, 3])
        part = checkpoint.read_module(NAME.replace("down_proj", "up_proj"), at)
        assert np.array_equal(part.dequantize(), read["up_proj"].dequantize()[at])


def test_scales_stay_where_something_stands_between(tmp_path):
    stored = mlp(tmp_path, "ffn_sub_norm.weight")
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), stored["down_proj"])


def test_an_adapter_is_merged_into_the_weights_as_they_are_stored(tmp_path):
    stored = mlp(tmp_path / "base")
    changed = low_rank({NAME: (128, 192)})
    adapter = read_adapter(write_adapter(tmp_path / "lora", changed))
    with open_checkpoint(tmp_path / "base") as checkpoint:
        merge(checkpoint, adapter)
        meant = merged({f"{part}.weight": w for part, w in {NAME: stored["down_proj"]}.items()}, changed, 2.0)
        assert np.allclose(checkpoint.read_float(f"{NAME}.weight"), meant[f"{NAME}.weight"], atol=1e-6)
        up = checkpoint.read_module(NAME.replace("down_proj", "up_proj"))
        assert np.array_equal(up.dequantize(), stored["up_proj"])


def test_an_imatrix_follows_the_scales(tmp_path):
    mlp(tmp_path)
    shape = 128, 192
    tensor = OutlineTensor("blk.0.ffn_down.weight", shape, (Part(f"{NAME}.weight", shape),))
    with open_checkpoint(tmp_path) as checkpoint:
        held = {"blk.0.ffn_down.weight": np.ones(192, np.float32)}
        found = Importance(held, ckpt=checkpoint).of(tensor)
        _, columns = checkpoint.refit(NAME)
        assert np.allclose(found, 1 / columns**2)


def test_experts_in_a_list_are_refused(tmp_path):
    tensors, _ = sinq((24, 128))
    stored = {f"{NAME}.{part}": values for part, values in tensors.items()}
    stored["model.layers.0.mlp.experts.gate_up_W_q.0"] = np.zeros((4, 4), np.uint8)
    assert "SINQ's stacked experts" in refusal(write_folder(tmp_path, stored, LABEL))


def test_qmodel_pt_is_read_like_safetensors(tmp_path):
    """The older file of the tool: a table for each module, with its numbers and texts."""
    torch = pytest.importorskip("torch")
    tensors, meant = sinq((24, 128))
    held = {part: torch.from_numpy(values) for part, values in tensors.items()}
    table = {"W_q": held.pop("W_q"), "meta": {**meta((24, 128), axis=1, view_as_float=False)["meta"]}}
    table["meta"] |= {part.removeprefix("meta."): values for part, values in held.items()}
    coded = {"x": torch.zeros(48, 1, dtype=torch.uint8), "s": torch.ones(1, 1), "m": torch.full((1, 1), 0.5)}
    coded["shape"] = torch.Size((48, 1))
    other = {**table, "meta": {**table["meta"], "zero": coded}}
    torch.save({NAME: table, "other": other, "norm": {"weight": torch.ones(4)}}, tmp_path / "qmodel.pt")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": LABEL}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), meant)
        scales = tensors["meta.scale"].astype(np.float32), tensors["meta.zero"].astype(np.float32)
        shift = ((scales[1] - 0.5) * scales[0]).repeat(64, 1).reshape(24, 128)
        own = tensors["meta.scale2"].astype(np.float32)
        assert np.allclose(checkpoint.read_module("other").dequantize(), meant + shift * own, atol=1e-6)
        assert [*checkpoint.tensors] == ["norm.weight"]
        assert checkpoint.notes == []
        assert checkpoint.settings().startswith("4 bits, groups of 64, integers")


def test_labels_of_the_package_are_known(tmp_path):
    tensors, _ = sinq((24, 128))
    folder = write(tmp_path, tensors)
    label = {"sinq": True, "backend": "sinq", "quantization_method": "sinq", "sinq_version": "auto"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": label}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "SINQ"
        assert [*checkpoint.modules] == [NAME]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("meta.scale", None, "but no meta.scale"),
        ("meta.scale", np.ones((47, 1), np.float16), "contradict"),
        ("meta.scale", np.full((48, 1), np.inf, np.float16), "NaN or infinite"),
        ("meta.scale2", np.ones((1, 64), np.float16), "contradict"),
        ("W_q", np.zeros((23, 64), np.uint8), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = sinq((24, 128))
    if value is None:
        del tensors[part]
    else:
        tensors[part] = value
    assert said in refusal(write(tmp_path, tensors))


def test_the_file_beside_the_index_is_needed(tmp_path):
    tensors, _ = sinq((24, 128))
    folder = write(tmp_path, tensors)
    (folder / SIDECAR).unlink()
    message = refusal(folder)
    assert f"{SIDECAR}: does not give the shape of {NAME}" in message
    assert "beyond 4 levels" in refusal(write(tmp_path, tensors, nbits=2))
    assert "contradict" in refusal(write(tmp_path, tensors, packing="7bit_u8"))

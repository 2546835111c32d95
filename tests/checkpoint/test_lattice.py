"""Floats on a hidden grid are recognised and keep their codes; ordinary weights are left alone."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.files.dtypes import as_float32, from_float32
from bridge.checkpoint.files.store import Store
from bridge.checkpoint.formats.lattice import find_lattice
from bridge.conversion.writing.report import CARRIED, FLOAT
from scripts.peers.gguf_file import gguf_weights
from tests.support.described import describe
from tests.support.encode import load_floats, quantize
from tests.support.raw import edit_raw
from tests.support.tiny_models import save_model


def stored(tmp_path, x, dtype):
    """The one tensor "w.weight" of a file, in F32, F16 or BF16."""
    values = from_float32(x.astype(np.float32), dtype, "w")
    save_file({"w.weight": values}, tmp_path / "w.safetensors")
    if dtype == "BF16":
        edit_raw(tmp_path / "w.safetensors", lambda raw: raw["w.weight"][0].update(dtype="BF16"))
    store = Store([tmp_path / "w.safetensors"])
    return store, store.tensors["w.weight"], store.read_float("w.weight")


def gaussian(shape=(40, 512), seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, 512])
@pytest.mark.parametrize(
    ("dtype", "bits"), [("BF16", 2), ("BF16", 3), ("BF16", 4), ("F16", 2), ("F16", 4), ("F16", 8), ("F32", 5)]
)
def test_a_grid_is_found_and_gives_the_floats_back(tmp_path, dtype, bits, group_size, sym):
    q = quantize(gaussian(), bits, group_size, sym)
    store, info, x = stored(tmp_path, q.dequantize(), dtype)
    found = find_lattice(store, info)
    assert found is not None
    assert found.group_size == group_size
    assert found.bits <= bits + (not sym)  # codes that are not all used take fewer
    tensor = found.read(store, "w")
    back = as_float32(from_float32(tensor.dequantize(), dtype, "w"), dtype)
    np.testing.assert_array_equal(back, x)  # as it is stored
    some = found.read(store, "w", np.array([3, 17]))
    np.testing.assert_array_equal(some.dequantize(), tensor.dequantize()[[3, 17]])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "sparse", "uniform", "float8", "small"])
def test_ordinary_weights_are_none(tmp_path, dtype, kind):
    rng = np.random.default_rng(1)
    x = {
        "gaussian": gaussian(),
        "heavy": (rng.standard_t(2, (40, 512)) * 0.01).astype(np.float32),
        "sparse": gaussian() * (rng.random((40, 512)) < 0.3),
        "uniform": rng.uniform(-1, 1, (40, 512)).astype(np.float32),
        "float8": gaussian().view(np.uint32) & 0xFFF00000,
        "small": gaussian((40, 512)) * np.float32(1e-4),
    }[kind]
    store, info, _ = stored(tmp_path, x.view(np.float32) if kind == "float8" else x.astype(np.float32), dtype)
    assert find_lattice(store, info) is None


def test_one_weight_beside_the_grid_is_noticed_when_all_is_read(tmp_path):
    x = quantize(gaussian((64, 512)), 4, 64, True).dequantize()
    x[30, 100] *= 1.2
    store, info, _ = stored(tmp_path, x, "BF16")
    found = find_lattice(store, info)
    if found is not None:  # the sample may not have it
        assert found.read(store, "w") is None


def dequantized_model(folder, model_folder, bits=4, group_size=32):
    """A BF16 model whose linears were dequantized from codes; returns these by module."""
    folder.mkdir()
    codes, tensors = {}, {}
    for name, weight in load_floats(model_folder).items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and ".layers." in name:
            codes[module] = quantize(weight, bits, group_size, True)
            weight = codes[module].dequantize()
        tensors[name] = from_float32(weight.astype(np.float32), "BF16", name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_raw(folder / "model.safetensors", lambda raw: [entry.update(dtype="BF16") for entry, _ in raw.values()])
    for file in model_folder.glob("*.json"):
        if "safetensors" not in file.name:
            (folder / file.name).write_text(file.read_text())
    return codes


def test_a_bf16_model_that_was_dequantized_comes_back_exact(tmp_path, small_model):
    codes = dequantized_model(tmp_path / "in", small_model)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type="exact", detect_lattice=True)
    coded = {t.name: t for t in report.tensors if t.has_codes}
    assert len(coded) == len(codes)
    assert {(t.type, t.outcome, t.fidelity.error) for t in coded.values()} == {("Q4_0", CARRIED, 0.0)}
    found = gguf_weights(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "in") as checkpoint:
        for module, q in codes.items():
            weights = found[f"{module}.weight"]
            published = checkpoint.read_float(f"{module}.weight")
            np.testing.assert_array_equal(as_float32(from_float32(weights, "BF16", ""), "BF16"), published)
            np.testing.assert_allclose(weights, q.dequantize(), rtol=2**-8)
    assert any("lie on a grid (4 bits, groups of 32, symmetric)" in note for note in report.notes)


def test_without_being_asked_nothing_is_detected_but_inspect_says_so(tmp_path, small_model):
    dequantized_model(tmp_path / "in", small_model)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf")
    assert {t.outcome for t in report.tensors if len(t.shape) == 2} == {FLOAT}
    assert "lie on a grid (4 bits, groups of 32, symmetric): --detect-lattice carries their codes" in describe(
        tmp_path / "in"
    )
    assert "lie on a grid" not in describe(save_model(tmp_path / "ordinary", "LlamaConfig"))


def test_a_plan_remembers_what_was_detected(tmp_path, small_model):
    dequantized_model(tmp_path / "in", small_model)
    bridge.conversion.converter.plan_checkpoint(tmp_path / "in", out=tmp_path / "plan.json", detect_lattice=True)
    assert json.loads((tmp_path / "plan.json").read_text())["detect_lattice"] is True
    bridge.convert(out=tmp_path / "a.gguf", plan=tmp_path / "plan.json")
    bridge.convert(tmp_path / "in", tmp_path / "b.gguf", detect_lattice=True)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert gguf.GGUFReader(str(tmp_path / "a.gguf")).tensors

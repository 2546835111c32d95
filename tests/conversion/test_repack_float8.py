"""8-bit floats go byte for byte from one checkpoint format to another, with the scales that both have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from tests.support.encode import LINEAR, write_folder, write_model
from tests.support.encode_compressed import config as compressed_config
from tests.support.encode_compressed import float8_tensors, save_float8, scheme, write_float8
from tests.support.encode_formats import write_mxfp8
from tests.support.encode_modelopt import mxfp8_tensors
from tests.support.raw import edit_raw
from tests.support.tiny_models import save_model

TENSOR, ROW, BLOCK = (1 << 20, 1 << 20), (1, 1 << 20), (128, 128)
NAME = "model.layers.0.mlp.up_proj"
WEIGHT = f"{NAME}.weight"


def write_modelopt(folder: Path, model: Path, inputs: Callable[[str], bool] = lambda _: True) -> None:
    """ModelOpt's FP8: a scale of the weight, and one of its activations where `inputs` says so."""

    def quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if not LINEAR.match(name):
            return None
        scales = {f"{name}.input_scale": np.float32([0.125])} if inputs(name) else {}
        return {**float8_tensors(name, weight, TENSOR)[0], **scales}

    write_model(folder, model, quantized, {"quant_method": "modelopt", "quant_algo": "FP8"}, None, 1)
    save_float8(folder)


def write_modelopt_mxfp8(folder: Path, model: Path, chosen: Callable[[str], object] = LINEAR.match) -> None:
    def quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        return mxfp8_tensors(name, weight)[0] if chosen(name) else None

    write_model(folder, model, quantized, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, None, 1)

    def relabel(raw: dict[str, Any]) -> None:
        for name, (entry, _) in raw.items():
            if name.endswith(".weight") and entry["dtype"] == "U8":
                entry["dtype"] = "F8_E4M3"

    edit_raw(folder / "model.safetensors", relabel)


SOURCES: dict[str, Callable[[Path, Path], object]] = {
    "DeepSeek": lambda folder, model: write_float8(folder, model, BLOCK, "fp8"),
    "one scale a row": lambda folder, model: write_float8(folder, model, ROW),
    "one scale": lambda folder, model: write_float8(folder, model, TENSOR),
    "ModelOpt": write_modelopt,
    "MXFP8": write_modelopt_mxfp8,
    "MLX": write_mxfp8,
}
# source, format: how its layers are stored, and the scheme or algorithm that the labels name; None: refused
CARRIED = {
    ("DeepSeek", "compressed-tensors"): ("blocks of 128x128", "block group"),
    ("DeepSeek", "modelopt"): ("blocks of 128x128", "FP8_PB_WO"),
    ("DeepSeek", "fp8"): ("blocks of 128x128", [128, 128]),
    ("DeepSeek", "mlx"): None,
    ("one scale a row", "compressed-tensors"): ("one scale a row", "channel token"),
    ("one scale a row", "modelopt"): ("one scale a row", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("one scale a row", "fp8"): None,
    ("one scale", "compressed-tensors"): ("one scale", "tensor token"),
    ("one scale", "modelopt"): ("one scale a row", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("one scale", "fp8"): ("blocks of 128x128", [128, 128]),
    ("ModelOpt", "compressed-tensors"): ("one scale", "tensor tensor"),
    ("ModelOpt", "modelopt"): ("one scale", "FP8"),
    ("ModelOpt", "fp8"): ("blocks of 128x128", [128, 128]),
    ("MXFP8", "compressed-tensors"): ("groups of 32", "group group"),
    ("MXFP8", "modelopt"): ("groups of 32", "MXFP8"),
    ("MXFP8", "mlx"): ("groups of 32", "mxfp8"),
    ("MXFP8", "fp8"): None,
    ("MLX", "compressed-tensors"): ("groups of 32", "group group"),
    ("MLX", "modelopt"): ("groups of 32", "MXFP8"),
    ("MLX", "mlx"): ("groups of 32", "mxfp8"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model of one layer, whose matrices are whole blocks."""
    sizes: dict[str, int] = {"num_hidden_layers": 1, "intermediate_size": 384}
    return save_model(tmp_path_factory.mktemp("llama") / "model", "LlamaConfig", **sizes)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, write in SOURCES.items():
        write(folder / name, model)
    return {name: folder / name for name in SOURCES}


def label_of(folder: Path) -> Any:
    labels = json.loads((folder / "config.json").read_text())["quantization_config"]
    if labels.get("quant_method") == "compressed-tensors":
        (group,) = labels["config_groups"].values()
        return f"{group['weights']['strategy']} {group['input_activations']['strategy']}"
    return next(labels[key] for key in ("quant_algo", "weight_block_size", "mode") if key in labels)


def floats(folder: Path) -> dict[str, np.ndarray]:
    """float32 of all 8-bit floats."""
    with open_checkpoint(folder) as ckpt:
        return {name: ckpt.read_float(name) for name, info in ckpt.tensors.items() if info.dtype == "F8_E4M3"}


def codes(folder: Path) -> dict[str, bytes]:
    with open_checkpoint(folder) as ckpt:
        packed = {name: ckpt.read_float8(name) for name in ckpt.tensors}
        return {name: tensor.words.tobytes() for name, tensor in packed.items() if tensor is not None}


@pytest.mark.parametrize(("source", "format"), CARRIED)
def test_the_bytes_of_8_bit_floats_are_carried_where_the_format_has_their_scales(tmp_path, sources, source, format):
    how = CARRIED[source, format]
    if how is None:
        with pytest.raises(BridgeError, match="has no layer that"):
            bridge.repack(sources[source], tmp_path / "out", format)
        return
    done = bridge.repack(sources[source], tmp_path / "out", format)
    layers = [t for t in done.tensors if t.how != "floats"]
    assert len(layers) >= 7
    assert {t.how for t in layers} == {"exact"}
    assert label_of(tmp_path / "out") == how[1]
    with open_checkpoint(tmp_path / "out") as ckpt:
        assert {ckpt.stored_as(name) for name in ckpt.tensors if "_proj" in name} == {f"F8_E4M3, {how[0]}"}
    before, after = floats(sources[source]), floats(tmp_path / "out")
    for t in layers:
        assert np.array_equal(after[t.name], before[t.name]), t.name
    old, new = codes(sources[source]), codes(tmp_path / "out")
    assert all(new[t.name] == old[t.name] for t in layers)


@pytest.mark.parametrize("source", ["DeepSeek", "one scale a row", "ModelOpt", "MXFP8"])
@pytest.mark.parametrize("there", ["compressed-tensors", "modelopt"])
def test_8_bit_floats_come_back_as_they_were(tmp_path, sources, source, there):
    back = "modelopt" if there == "compressed-tensors" else "compressed-tensors"
    bridge.repack(sources[source], tmp_path / "there", there)
    bridge.repack(tmp_path / "there", tmp_path / "back", back)
    before, after = floats(sources[source]), floats(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    if source == "ModelOpt":
        with open_checkpoint(tmp_path / "back") as ckpt:
            assert float(ckpt.store.read(f"{NAME}.input_scale")[0]) == 0.125


@pytest.mark.parametrize("source", ["DeepSeek", "one scale a row", "one scale", "ModelOpt", "MXFP8"])
def test_compressed_tensors_decompresses_the_same_floats(tmp_path, sources, source):
    pytest.importorskip("compressed_tensors")
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    bridge.repack(sources[source], tmp_path / "out", "compressed-tensors")
    options = {"quantization_config": CompressedTensorsConfig(run_compressed=False), "dtype": torch.float32}
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).state_dict()
    for name, values in floats(sources[source]).items():
        assert np.array_equal(state[name].float().numpy(), values), name


def test_transformers_decompresses_the_same_floats_of_deepseeks_blocks(tmp_path, sources):
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    bridge.repack(sources["one scale"], tmp_path / "out", "fp8")
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": torch.float32}
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).state_dict()
    for name, values in floats(sources["one scale"]).items():
        assert np.array_equal(state[name].numpy(), values), name


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt", "fp8"])
def test_blocks_that_the_matrix_ends_within_are_carried(tmp_path, format):
    weight = np.random.default_rng(0).normal(0, 0.05, (200, 320)).astype(np.float32)
    tensors, meant = float8_tensors(NAME, weight, BLOCK, "weight_scale_inv")
    write_folder(tmp_path / "in", tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_float8(tmp_path / "in")
    bridge.repack(tmp_path / "in", tmp_path / "out", format)
    assert np.array_equal(floats(tmp_path / "out")[WEIGHT], meant)


def test_scales_of_blocks_that_are_powers_of_two_are_mlxs(tmp_path):
    weight = np.random.default_rng(0).normal(0, 0.05, (256, 256)).astype(np.float32)
    tensors, _ = float8_tensors(NAME, weight, BLOCK, "weight_scale_inv")
    tensors[f"{NAME}.weight_scale_inv"] = np.float32([[2**-12, 2**-13], [2**-11, 2**-126]])
    write_folder(tmp_path / "in", tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_float8(tmp_path / "in")
    bridge.repack(tmp_path / "in", tmp_path / "out", "mlx")
    assert np.array_equal(floats(tmp_path / "out")[WEIGHT], floats(tmp_path / "in")[WEIGHT])


def test_scales_of_activations_are_kept_where_all_layers_have_one_and_else_left_out_with_a_note(tmp_path, model):
    write_modelopt(tmp_path / "all", model)
    write_modelopt(tmp_path / "some", model, lambda name: name.endswith("k_proj"))
    for source, strategy in (("all", "tensor tensor"), ("some", "tensor token")):
        done = bridge.repack(tmp_path / source, tmp_path / f"of {source}", "compressed-tensors")
        assert label_of(tmp_path / f"of {source}") == strategy
        left_out = [note for note in done.notes if "activations" in note]
        expected = "scales of activations and of the key-value cache are left out: 1 input_scale"
        assert left_out == ([expected] if source == "some" else [])
    with open_checkpoint(tmp_path / "of all") as ckpt:
        assert float(ckpt.store.read(f"{NAME}.input_scale")[0]) == 0.125


def test_layers_of_several_kinds_are_labelled_one_by_one(tmp_path):
    weight = np.random.default_rng(0).normal(0, 0.05, (128, 256)).astype(np.float32)
    down = "model.layers.0.mlp.down_proj"
    tensors = {**float8_tensors(NAME, weight, BLOCK)[0], **float8_tensors(down, weight, ROW)[0]}
    strategy = scheme(8, "block", None, type="float", block_structure=[128, 128])
    write_folder(tmp_path / "in", tensors, compressed_config(strategy, form="float-quantized"))
    save_float8(tmp_path / "in")
    bridge.repack(tmp_path / "in", tmp_path / "out", "modelopt")
    labels = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert labels["quant_algo"] == "MIXED_PRECISION"
    assert {name: entry["quant_algo"] for name, entry in labels["quantized_layers"].items()} == {
        NAME: "FP8_PB_WO", down: "FP8_PER_CHANNEL_PER_TOKEN",
    }  # fmt: skip
    assert floats(tmp_path / "out").keys() == {WEIGHT, f"{down}.weight"}


def test_bits_below_8_round_what_would_be_carried(tmp_path, sources):
    done = bridge.repack(sources["DeepSeek"], tmp_path / "4", "compressed-tensors", bits=4)
    assert {(t.how, t.bits) for t in done.tensors if t.how != "floats"} == {("rounded", 4)}
    done = bridge.repack(sources["DeepSeek"], tmp_path / "8", "compressed-tensors", bits=8)
    assert {(t.how, t.kind) for t in done.tensors if t.how != "floats"} == {("exact", "FP8")}


@pytest.mark.parametrize(("dtype", "block"), [("F8_E5M2", BLOCK), ("F8_E4M3", (64, 64)), ("F8_E4M3", (1, 64))])
def test_other_8_bit_floats_become_floats(tmp_path, dtype, block):
    weight = np.random.default_rng(0).normal(0, 0.05, (128, 256)).astype(np.float32)
    tensors, _ = float8_tensors(NAME, weight, block, "weight_scale_inv")
    tensors[WEIGHT] = tensors[WEIGHT] & np.uint8(63)  # finite in either
    write_folder(tmp_path / "in", tensors, {"quant_method": "fp8", "weight_block_size": [*block]})
    save_float8(tmp_path / "in")
    edit_raw(tmp_path / "in/model.safetensors", lambda raw: raw[WEIGHT][0].update(dtype=dtype))
    for format in ("compressed-tensors", "modelopt", "fp8", "mlx"):
        with pytest.raises(BridgeError, match=r"has no layer that .* holds; choose format='floats'"):
            bridge.repack(tmp_path / "in", tmp_path / format, format)
    bridge.repack(tmp_path / "in", tmp_path / "floats", "floats", dtype="F32")
    with open_checkpoint(tmp_path / "in") as before, open_checkpoint(tmp_path / "floats") as after:
        assert np.array_equal(after.read_float(WEIGHT), before.read_float(WEIGHT))


def test_8_bit_floats_that_are_nan_are_refused(tmp_path):
    weight = np.random.default_rng(0).normal(0, 0.05, (128, 256)).astype(np.float32)
    tensors, _ = float8_tensors(NAME, weight, BLOCK, "weight_scale_inv")
    tensors[WEIGHT] = tensors[WEIGHT].copy()
    tensors[WEIGHT][3, 5] = 255
    write_folder(tmp_path / "in", tensors, {"quant_method": "fp8"})
    save_float8(tmp_path / "in")
    with pytest.raises(BridgeError, match=f"{WEIGHT} holds NaN or infinite values"):
        bridge.repack(tmp_path / "in", tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_8_bit_floats_are_no_format_of_an_export(tmp_path):
    with pytest.raises(BridgeError, match="unknown format='fp8': choose floats, gptq"):
        bridge.export(tmp_path / "model.gguf", tmp_path / "out", "fp8")


def test_experts_of_8_bit_floats_are_stacks_in_mlx_and_come_back_as_layers(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    floats_of = save_model(tmp_path / "model", "Qwen3MoeConfig", head_dim=64, **sizes)
    write_modelopt_mxfp8(tmp_path / "in", floats_of, lambda name: "_proj" in name)
    bridge.repack(tmp_path / "in", tmp_path / "mlx", "mlx")
    with open_checkpoint(tmp_path / "mlx") as ckpt:
        stack = ckpt.store.tensors["model.layers.0.mlp.switch_mlp.down_proj.weight"]
        assert (stack.dtype, stack.shape) == ("U32", (4, 256, 16))
    bridge.repack(tmp_path / "mlx", tmp_path / "back", "modelopt")
    before, there, back = (floats(tmp_path / name) for name in ("in", "mlx", "back"))
    assert before.keys() == there.keys() == back.keys()
    assert len(before) == 16
    assert all(np.array_equal(there[name], x) and np.array_equal(back[name], x) for name, x in before.items())

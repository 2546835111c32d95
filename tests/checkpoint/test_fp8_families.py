"""8-bit floats in blocks of 128 x 128 as mixtures of experts are released: in stacks, and in shares of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import E2M1
from bridge.conversion.writing.verify import failures, verify
from tests.support.encode import load_floats
from tests.support.encode_compressed import float8_tensors
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized
from tests.support.make_families import GOLDENS, stored_values_of
from tests.support.raw import edit_raw
from tests.support.refusal import refusal

Weights = dict[str, np.ndarray]
BLOCK = (128, 128)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
WIDE = {"hidden_size": 192, "intermediate_size": 160, "moe_intermediate_size": 144}
FIELDS: dict[str, dict[str, Any]] = {
    "laguna": {**WIDE, "shared_expert_intermediate_size": 136}, "mimo2": WIDE,
    "step35": {"text_config": {**MODELS["step35"][1]["text_config"], **WIDE, "share_expert_dim": 136}},
}  # fmt: skip


def stack_of(name: str, stack: np.ndarray) -> tuple[Weights, np.ndarray]:
    """A stack of experts as Step 3.5's FP8 release names it."""
    matrices = [float8_tensors(name, matrix, BLOCK, "weight_scale_inv") for matrix in stack]
    tensors = {key: np.stack([tensors[key] for tensors, _ in matrices]) for key in matrices[0][0]}
    return tensors, np.stack([meant for _, meant in matrices])


def write(folder: Path, tensors: Weights, config: dict[str, Any]) -> Path:
    """A checkpoint; the weights of bytes that have an inverse scale are F8_E4M3."""
    folder.mkdir()
    save_file({key: np.ascontiguousarray(values) for key, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))

    def relabel(raw: dict[str, Any]) -> None:
        for key, (entry, _) in raw.items():
            if f"{key}_scale_inv" in raw:
                entry["dtype"] = "F8_E4M3"

    edit_raw(folder / "model.safetensors", relabel)
    return copy_tokenizer(folder)


def tensors_of(checkpoint: Path, path: Path) -> dict[str, gguf.ReaderTensor]:
    bridge.convert(checkpoint, path, tensor_types=[(".*", "F32")], mmproj_type="none")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", FIELDS)
def test_a_release_in_blocks_has_the_values_that_its_scales_say(name: str, tmp_path: Path) -> None:
    randomized(new_model(name, **FIELDS[name])).save_pretrained(tmp_path / "float", save_original_format=True)
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    tensors: Weights = {}
    values: Weights = {}
    for key, value in load_floats(tmp_path / "float").items():
        tensors[key] = values[key] = value
        if re.search(r"model\.layers\.\d+\..*_proj\.weight$", key):
            del tensors[key]
            write_one = stack_of if value.ndim == 3 else lambda *of: float8_tensors(*of, BLOCK, "weight_scale_inv")
            coded, values[key] = write_one(key.removesuffix(".weight"), value)
            tensors |= coded
    kinds = {tensors[key].ndim for key in tensors if key.endswith("_scale_inv")}
    assert kinds == ({2, 3} if name == "step35" else {2})
    released = tensors_of(write(tmp_path / "fp8", tensors, {**config, "quantization_config": FP8}), tmp_path / "8.gguf")
    plain = tensors_of(write(tmp_path / "plain", values, config), tmp_path / "f.gguf")
    assert released.keys() == plain.keys()
    for key, tensor in plain.items():
        assert np.array_equal(released[key].data, tensor.data), key
    assert not failures(verify(tmp_path / "8.gguf", tmp_path / "fp8"))


def stored_in(checkpoint: Path) -> Weights:
    """All tensors as bytes or numbers, 8-bit floats as bytes."""
    with open_checkpoint(checkpoint) as opened:
        return {key: opened.store.read(key) for key in opened.store.tensors}


def in_shares(name: str, parts: list[np.ndarray], ranks: int) -> tuple[Weights, np.ndarray]:
    """Rows of q, k and v as each of several ranks has them, with blocks of its own; and what they mean, q, k, v."""
    pieces = [np.split(part, ranks) for part in parts]
    shares = [
        float8_tensors(name, np.concatenate([piece[rank] for piece in pieces]), BLOCK, "weight_scale_inv")
        for rank in range(ranks)
    ]
    tensors = {key: np.concatenate([tensors[key] for tensors, _ in shares]) for key in shares[0][0]}
    ends = np.cumsum([len(piece[0]) for piece in pieces])[:-1]
    meant = [np.split(values, ends) for _, values in shares]
    return tensors, np.concatenate([share[part] for part in range(3) for share in meant])


def mimo_v2_5(folder: Path, ranks: int, kv_heads: int, experts: bool) -> tuple[Path, Weights]:
    """MiMo V2.5's names and shares of q, k and v, of the shape of the small model; and what the fused matrices mean."""
    golden = json.loads((GOLDENS / "mimo2.json").read_text())
    config = golden["config"] | {
        "architectures": ["MiMoV2ForCausalLM"], "num_attention_heads": 8, "swa_num_attention_heads": 8,
        "num_key_value_heads": kv_heads, "swa_num_key_value_heads": 8, "hidden_size": 160, "moe_intermediate_size": 64,
        "quantization_config": FP8 | ({"store_dtype": "mxfp4", "mxfp4_block_size": 32} if experts else {}),
    }  # fmt: skip
    random = np.random.default_rng(0)
    tensors: Weights = {}
    meant: Weights = {}
    for key, shape in golden["checkpoint"].items():
        shape = [
            {32: 160, 16: 64}.get(side, side) if "experts" in key else 160 if side == 32 else side for side in shape
        ]
        if key.endswith("q_proj.weight"):
            module = key.replace("q_proj.weight", "qkv_proj")
            layer = int(key.split(".")[2])
            kv = 8 if config["hybrid_layer_pattern"][layer] else kv_heads
            parts = [random.normal(0, 0.1 + row, (rows, 160)).astype(np.float32)
                     for row, rows in enumerate((8 * 24, kv * 24, kv * 16))]  # fmt: skip
            coded, meant[f"blk.{layer}.attn_qkv.weight"] = in_shares(module, parts, ranks)
            tensors |= coded
        elif "experts." in key and experts and key.endswith("_proj.weight"):
            tensors[key] = random.integers(0, 256, (shape[0], shape[1] // 2), np.uint8)
            tensors[f"{key}_scale"] = random.integers(118, 126, (shape[0], shape[1] // 32), np.uint8)
        elif not re.search("[kv]_proj", key):
            shape = [160, 8 * 16] if "o_proj" in key else [8] if "sink" in key else shape
            tensors[key] = stored_values_of(key, tuple(shape))
    return write(folder, tensors, config), meant


@pytest.mark.parametrize(("ranks", "kv_heads"), [(4, 4), (8, 8)])
def test_the_fused_matrices_of_mimo_v2_5_are_put_together_from_the_shares_of_ranks(
    ranks: int, kv_heads: int, tmp_path: Path
) -> None:
    """Of four ranks layers with a window have as many rows of scales as one matrix has, the others more."""
    checkpoint, meant = mimo_v2_5(tmp_path / "model", ranks, kv_heads, experts=False)
    tensors = tensors_of(checkpoint, tmp_path / "m.gguf")
    assert len(meant) == 4
    for name, values in meant.items():
        assert np.array_equal(tensors[name].data, values), name
    source = "model.layers.1.self_attn.qkv_proj.weight"
    with open_checkpoint(checkpoint) as opened:
        rows = meant["blk.1.attn_qkv.weight"]
        assert np.array_equal(opened.read_float(source, (100, 300)), rows[100:300])


def test_scales_of_shares_of_no_known_number_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = mimo_v2_5(tmp_path / "model", 4, 4, experts=False)
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    with open_checkpoint(checkpoint) as opened:
        scales = opened.store.read(name)
    tensors = stored_in(checkpoint) | {name: np.concatenate([scales, scales[:3]])}
    other = write(tmp_path / "other", tensors, json.loads((checkpoint / "config.json").read_text()))
    assert "qkv_proj: the shapes contradict each other" in refusal(other)


def test_the_mxfp4_experts_of_mimo_v2_5_stay_as_they_are_bit_for_bit(tmp_path: Path) -> None:
    checkpoint, _ = mimo_v2_5(tmp_path / "model", 4, 4, experts=True)
    report = bridge.convert(checkpoint, tmp_path / "m.gguf", type="exact", mmproj_type="none")
    experts = {tensor.name: tensor for tensor in report.tensors if "_exps" in tensor.name}
    assert {(tensor.type, tensor.outcome) for tensor in experts.values()} == {("MXFP4", "codes carried")}
    stored = stored_in(checkpoint)
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.name not in experts:
            continue
        layer, part = tensor.name.split(".")[1], tensor.name.split("_")[1]
        blocks = tensor.data.reshape(4, -1, 17)
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            packed, scales = stored[name], stored[f"{name}_scale"]
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 2, 16)
            assert np.array_equal(blocks[expert, :, 0], scales.reshape(-1))
            assert np.array_equal(blocks[expert, :, 1:], codes[:, 0] | codes[:, 1] << 4)
            values = E2M1[codes.reshape(len(packed), -1)] * np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)
            whole = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(4, *values.shape)
            assert np.array_equal(whole[expert], values)

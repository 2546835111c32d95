"""Matrices that checkpoints store otherwise than their family names them: stacked, transposed, apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.writing.verify import failures, verify
from bridge.models import float_layers
from tests.support.encode_trellis import EXL3, Coding, exl3_tensors, write_trellis
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized
from tests.support.tiny_models import save_model

EXPERTS = "model.language_model.layers.0.mlp.experts"


def stored(path: Path) -> dict[str, np.ndarray]:
    """A GGUF's tensors, dequantized."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(path)).tensors}


def error(found: np.ndarray, meant: np.ndarray) -> float:
    """Normalized mean squared error."""
    assert found.shape == meant.shape
    return float(np.square(found - meant).mean() / np.square(meant).mean())


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("inner", [16, 24, 32])  # gate_up_proj is square, neither is, down_proj is
def test_square_experts_are_read_in_the_order_that_the_others_of_their_layer_tell(tmp_path, inner, published):
    """The published Qwen3-VL mixtures have them transposed, transformers 5 saves them as it has them in memory."""
    text = {**MODELS["qwen3-vl-moe"][1]["text_config"], "moe_intermediate_size": inner, "num_hidden_layers": 1}
    folder = tmp_path / "m"
    randomized(new_model("qwen3-vl-moe", text_config=text)).save_pretrained(folder, save_original_format=False)
    copy_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    gate_up, down = (tensors[f"{EXPERTS}.{part}"] for part in ("gate_up_proj", "down_proj"))
    assert gate_up.shape[1:] == (2 * inner, 32)
    if published:
        for part in ("gate_up_proj", "down_proj"):
            tensors[f"{EXPERTS}.{part}"] = np.ascontiguousarray(tensors[f"{EXPERTS}.{part}"].transpose(0, 2, 1))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    bridge.convert(folder, tmp_path / "m.gguf", type="Q8_0", mmproj_type="none")
    made = stored(tmp_path / "m.gguf")
    assert error(made["blk.0.ffn_gate_exps.weight"], gate_up[:, :inner]) < 1e-4
    assert error(made["blk.0.ffn_up_exps.weight"], gate_up[:, inner:]) < 1e-4
    assert error(made["blk.0.ffn_down_exps.weight"], down) < 1e-4


def test_a_gate_up_proj_of_each_expert_is_the_stack_that_llama_cpp_has_of_both(tmp_path):
    """Gemma 4: ffn_gate_up_exps, and neither ffn_gate_exps nor ffn_up_exps beside it."""
    folder = tmp_path / "m"
    randomized(new_model("gemma4-moe")).save_pretrained(folder)
    copy_tokenizer(folder)
    bridge.convert(folder, tmp_path / "stacks.gguf", type="F16")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        experts, _, part = name.rpartition(".")
        tensors |= {f"{experts}.{i}.{part}.weight": matrix.copy() for i, matrix in enumerate(tensors.pop(name))}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    bridge.convert(folder, tmp_path / "each.gguf", type="F16")
    one, other = stored(tmp_path / "stacks.gguf"), stored(tmp_path / "each.gguf")
    assert "blk.0.ffn_gate_up_exps.weight" in one
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "fields", "made_of"),
    [
        pytest.param(
            "Phi3Config",
            {},
            {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
            marks=pytest.mark.exhaustive,
        ),
        ("Glm4Config", {"head_dim": 64}, {"gate_up_proj": ("gate_proj", "up_proj")}),
    ],
)
def test_exl3_stores_the_rows_of_fused_matrices_apart(
    tmp_path: Path, kind: str, fields: dict[str, Any], made_of: dict[str, tuple[str, ...]]
) -> None:
    """q is 256 rows, k and v 128; gate and up 320, padded to 384."""
    floats = save_model(tmp_path / "float", kind, num_hidden_layers=1, intermediate_size=320, **fields)
    coding = Coding("mcg", 4, multiplier=0xCBAC1FED)
    heights = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "gate_proj": 320, "up_proj": 320}

    def encode(name: str, weight: np.ndarray, number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        folder, _, last = name.rpartition(".")
        names = made_of.get(last, (last,))
        cuts = np.cumsum([heights[n] for n in names[:-1]])
        coded = [
            exl3_tensors(f"{folder}.{part}", rows, coding, search=False, seed=number)
            for part, rows in zip(names, np.split(weight, cuts), strict=True)
        ]
        return {n: x for tensors, _ in coded for n, x in tensors.items()}, np.concatenate([w for _, w in coded])

    said = {"quantization_config": EXL3 | {"bits": 4.0}}
    meant = write_trellis(tmp_path / "m", floats, encode, said, r".*_proj")
    path = tmp_path / "m.gguf"
    bridge.convert(tmp_path / "m", path, type="Q8_0")
    made = stored(path)
    kinds = {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up", "down_proj": "ffn_down", "o_proj": "attn_output"}
    for name, w in meant.items():
        kind_of = kinds.get(name.rpartition(".")[2])
        if kind_of:
            assert error(made[f"blk.0.{kind_of}.weight"], w) < 1e-4
    bridge.convert(tmp_path / "m", tmp_path / "codes.gguf")
    assert failures(verify(tmp_path / "codes.gguf", tmp_path / "m")) == []


@pytest.mark.parametrize(
    ("architecture", "router"),
    [
        ("Qwen3MoeForCausalLM", "mlp.gate"),
        ("GraniteMoeForCausalLM", "block_sparse_moe.router.layer"),
        ("MixtralForCausalLM", "block_sparse_moe.gate"),
        ("SomethingNewForCausalLM", "mlp.gate"),
        ("SomethingNewForCausalLM", "block_sparse_moe.router.layer"),
    ],
)
def test_routers_are_layers_that_no_gguf_has_as_codes(architecture: str, router: str, tmp_path: Path) -> None:
    """Of a family that is unknown, the routers of all are."""
    names = [f"model.layers.3.{name}" for name in (router, "mlp.gate_proj", "self_attn.q_proj", "mlp.shared_expert")]
    assert float_layers({"architectures": [architecture]}, tmp_path, names) == {names[0]}

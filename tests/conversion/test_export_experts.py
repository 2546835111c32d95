"""Experts of a mixture in MLX: stacks with the GGUF's codes, under mlx-lm's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import bridge
from bridge.checkpoint.formats.mlx_models import mlx_config
from bridge.checkpoint.formats.written import Groups
from bridge.conversion.checkpoints.checkpoint_plan import shared_plan
from bridge.conversion.checkpoints.layer_plan import EXACT, ROUNDED, LayerPlan
from bridge.gguf_file.reader import read_gguf

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")

USED = {"num_experts_per_tok": 2}
QWEN = USED | {"num_experts": 3, "moe_intermediate_size": 128, "head_dim": 64, "norm_topk_prob": True}
OF = {
    "qwen": ("Qwen3MoeConfig", QWEN, "mlp.switch_mlp"),
    "mixtral": ("MixtralConfig", USED | {"num_local_experts": 3}, "block_sparse_moe.switch_mlp"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(name): a small mixture in floats."""
    from tests.support.tiny_models import save_model

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        kind, fields, _ = OF[name]
        if name not in made:
            made[name] = save_model(tmp_path_factory.mktemp(name) / "model", kind, **fields)
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "type", "bits"),
    [("qwen", "Q4_0", 4), ("qwen", "Q4_1", 4), ("qwen", "Q8_0", 8), ("mixtral", "Q4_0", 4)],
)
def test_experts_are_stacks_whose_blocks_come_back_bit_for_bit(name, type, bits, folder, tmp_path) -> None:
    path, new, back = (tmp_path / part for part in ("m.gguf", "new", "back.gguf"))
    bridge.convert(folder(name), path, tensor_types=[(".*", type)])
    done = bridge.export(path, new, "mlx", config=folder(name))
    assert not any("experts" in note for note in done.notes)
    with safe_open(new / "model.safetensors", "np") as stored:
        names = set(stored.keys())
        first = f"model.layers.1.{OF[name][2]}.down_proj"
        inner = 128 if name == "qwen" else 256
        assert stored.get_slice(f"{first}.weight").get_shape() == [3, 256, inner * bits // 32]
        assert stored.get_slice(f"{first}.scales").get_shape() == [3, 256, inner // 32]
    assert not any(".experts." in tensor for tensor in names)
    bridge.convert(new, back, tensor_types=[("_exps", type)])
    old, found = read_gguf(path), read_gguf(back)
    experts = [tensor for tensor in old.tensors if "_exps" in tensor]
    assert len(experts) == 6
    for tensor in experts:
        assert found.tensors[tensor].type == type
        assert np.array_equal(found.tensors[tensor].raw, old.tensors[tensor].raw), tensor


def test_config_has_the_stacks_that_differ_by_name(folder, tmp_path) -> None:
    bridge.convert(folder("qwen"), tmp_path / "m.gguf", tensor_types=[(".*", "Q4_0"), ("ffn_down_exps", "Q8_0")])
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", "mlx", config=folder("qwen"))
    said = json.loads((tmp_path / "new" / "config.json").read_text())["quantization"]
    assert said == {"bits": 4, "group_size": 32, "mode": "affine"} | {
        f"model.layers.{i}.mlp.switch_mlp.down_proj": {"bits": 8, "group_size": 32, "mode": "affine"} for i in range(2)
    }


@pytest.mark.parametrize("why", ["a family whose stacks are not known", "a stack of floats"])
def test_experts_that_cannot_all_be_stacked_are_floats(why, folder, tmp_path, monkeypatch) -> None:
    if why == "a stack of floats":
        types = [(".*", "Q4_0"), ("blk.1.ffn_up_exps", "F16")]
    else:
        types = [(".*", "Q4_0")]
        monkeypatch.setattr("bridge.checkpoint.formats.mlx_models.STACKING", frozenset())
    bridge.convert(folder("qwen"), tmp_path / "m.gguf", tensor_types=types)
    done = bridge.export(tmp_path / "m.gguf", tmp_path / "new", "mlx", config=folder("qwen"))
    assert any("18 matrices of experts are floats" in note for note in done.notes)
    with bridge.open_checkpoint(tmp_path / "new") as checkpoint:
        assert len([name for name in checkpoint.tensors if ".experts." in name]) == 18
        assert len(checkpoint.modules) == 8  # of attention


def test_matrices_of_a_stack_share_the_form_that_holds_all() -> None:
    exact = LayerPlan(EXACT, Groups(4, 64), packed=True)
    assert shared_plan([exact, exact]) == exact
    wider = LayerPlan(EXACT, Groups(5, 128), offsets=True)
    assert shared_plan([exact, wider, exact]) == LayerPlan(EXACT, Groups(5, 64), offsets=True)
    assert shared_plan([exact, LayerPlan(ROUNDED, Groups(8, 32))]) == LayerPlan(ROUNDED, Groups(8, 32))
    assert shared_plan([exact, None]) is None
    assert shared_plan([exact, replace(exact, groups=Groups(4, 32, kind="MXFP4"))]) is None


def test_mlx_has_the_older_names_in_the_language_model_of_several_parts_too() -> None:
    config = {"text_config": {"num_local_experts": 3}, "tie_word_embeddings": False}
    text = {"num_local_experts": 3, "num_experts": 3, "tie_word_embeddings": False}
    assert mlx_config(config) == {"text_config": text, "tie_word_embeddings": False}


def test_mlx_has_the_older_names_of_rope_and_experts_too() -> None:
    rules = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0, "partial_rotary_factor": 0.5}
    made = mlx_config({"rope_parameters": rules, "num_local_experts": 3})
    assert made == {
        "rope_parameters": rules,
        "num_local_experts": 3,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
        "num_experts": 3,
    }
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert mlx_config({"rope_parameters": plain})["rope_scaling"] is None
    by_layer = {"rope_parameters": {"full_attention": plain, "sliding_attention": plain}}
    assert mlx_config(by_layer) == by_layer

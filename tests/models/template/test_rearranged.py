"""Matrices that the converter rearranges: columns in another order, experts out of one tensor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.importance import Importance
from bridge.conversion.writing.verify import failures, verify
from tests.support.encode import write_gptq
from tests.support.template import LLAMA, interleave, rewritten, values_of, write_template

DEALT = np.arange(256).reshape(2, 4, 32).swapaxes(0, 1).reshape(-1)  # heads of 32 columns, as Qwen3.5's are dealt


def dealt_template(floats: Path, path: Path) -> Path:
    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[:, DEALT]} if "attn_output" in name else interleave(4, 2)(name, values)

    return write_template(path, floats, "llama", change, **LLAMA)


@pytest.mark.parametrize("group_size", [32, 128])
def test_columns_in_another_order_are_found_and_permuted(group_size, model, tmp_path):
    """And the codes are kept, where a group is in several places too."""
    floats = model("LlamaConfig")
    stored = write_gptq(tmp_path / "gptq", floats, group_size=group_size)
    template = dealt_template(floats, tmp_path / "t.gguf")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    assert not [note for note in report.notes if "taken from the template" in note]
    made = {t.name: t for t in report.tensors}["blk.1.attn_output.weight"]
    assert made.outcome == "codes carried"
    expected = stored["model.layers.1.self_attn.o_proj"].dequantize()[:, DEALT]
    assert np.abs(values_of(tmp_path / "m.gguf", made.name) - expected).max() < 3e-3
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "gptq", template=template)) == []


def test_columns_of_floats_are_permuted_too(model, tmp_path):
    """And a plan file has their order."""
    floats = model("LlamaConfig")
    write_gptq(tmp_path / "gptq", floats, module_bits=lambda name: None if "o_proj" in name else 4)
    template = dealt_template(floats, tmp_path / "t.gguf")
    plan_checkpoint(tmp_path / "gptq", template=template, tensor_types=[(".*", "F32")], out=tmp_path / "plan.json")
    bridge.convert(out=tmp_path / "m.gguf", plan=tmp_path / "plan.json")
    with bridge.open_checkpoint(tmp_path / "gptq") as opened:
        expected = opened.read_float("model.layers.1.self_attn.o_proj.weight")[:, DEALT]
    np.testing.assert_array_equal(values_of(tmp_path / "m.gguf", "blk.1.attn_output.weight"), expected)


def test_an_imatrix_is_in_the_templates_order_of_columns(model, tmp_path):
    """That of act-order that was undone is in the old one."""
    floats = model("LlamaConfig")
    write_gptq(tmp_path / "gptq", floats, desc_act=True)
    template = dealt_template(floats, tmp_path / "t.gguf")
    importance = np.random.default_rng(3).random(256, np.float32)
    with bridge.open_checkpoint(tmp_path / "gptq") as opened:
        tensors = {t.name: t for t in outline_of(opened, template=template).tensors}
    for name, moved in (("blk.0.attn_output.weight", False), ("blk.0.ffn_down.weight", True)):
        found = Importance({name: importance}).of(tensors[name])
        order = tensors[name].parts[0].columns
        np.testing.assert_array_equal(found, importance[order] if moved else importance)
        assert not np.array_equal(order, np.arange(256))


@pytest.mark.parametrize("transposed", [False, True])  # Granite-MoE's, Llama 4's
def test_experts_of_one_tensor_are_found_gate_and_up_apart(transposed, model, tmp_path):
    floats = model("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, intermediate_size=128)
    template = write_template(tmp_path / "t.gguf", floats, "llama", interleave(4, 2), expert_count=4, **LLAMA)

    def fuse(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {name: values for name, values in weights.items() if ".experts." not in name}
        for layer in range(2):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            w1, w2, w3 = (np.stack([weights[f"{prefix}.{e}.w{i}.weight"] for e in range(4)]) for i in (1, 2, 3))
            stacks = {"gate_up_proj": np.concatenate([w1, w3], axis=1), "down_proj": w2}
            made |= {f"{prefix}.{n}": v.swapaxes(1, 2) if transposed else v for n, v in stacks.items()}
        return made

    fused = rewritten(floats, tmp_path / "fused", fuse)
    write_gptq(tmp_path / "gptq", fused)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template, type="Q4_K_M")
    assert not [note for note in report.notes if re.search("taken from the template|dropped", note)]
    made = {t.kind: t for t in report.tensors if "exps" in t.kind}
    assert {kind: (t.shape, t.outcome) for kind, t in made.items()} == {
        "ffn_gate_exps": ((4, 128, 256), "from float"),
        "ffn_up_exps": ((4, 128, 256), "from float"),
        "ffn_down_exps": ((4, 256, 128), "from float"),
    }
    assert "F16" not in {t.type for t in made.values()}
    bridge.convert(tmp_path / "gptq", tmp_path / "f32.gguf", template=template, tensor_types=[(".*", "F32")])
    for kind in made:
        name = f"blk.1.{kind}.weight"
        np.testing.assert_array_equal(values_of(tmp_path / "f32.gguf", name), values_of(template, name))
    assert failures(verify(tmp_path / "f32.gguf", tmp_path / "gptq", template=template)) == []

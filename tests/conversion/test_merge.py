"""PEFT adapters merged into the checkpoints that are converted."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.checkpoint.adapter import read_adapter
from bridge.cli import main
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT
from tests.support.adapters import Arrays, low_rank, write_adapter
from tests.support.encode import write_gptq
from tests.support.tiny_models import save_model

Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
NORM, EMBEDDINGS = "model.norm.weight", "model.embed_tokens"


def own(module: str) -> np.ndarray:
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        weights: np.ndarray = checkpoint.read_module(module).dequantize()
    return weights


def tensors_of(path: Path) -> Arrays:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(path)).tensors}


def changed(tensors: Arrays, module: str) -> np.ndarray:
    """W + 8 / 4 * B A"""
    b, a = (tensors[f"{module}.lora_{part}.weight"].astype(np.float64) for part in "BA")
    weights: np.ndarray = own(module) + 2 * (b @ a)
    return weights


def test_touched_matrices_are_requantized_and_all_others_keep_their_codes(tmp_path: Path) -> None:
    tensors = low_rank({Q: own(Q).shape, GATE: own(GATE).shape})  # type: ignore[dict-item]
    norm = np.full(256, 1.5, np.float32)
    adapter = write_adapter(tmp_path / "adapter", tensors | {NORM: norm})
    before = bridge.convert(CHECKPOINT, tmp_path / "base.gguf")
    report = bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter)
    assert any("adapter: 3; 2 of them were codes and are requantized" in note for note in report.notes)
    outcomes = {t.name: (t.type, t.outcome) for t in before.tensors}
    touched = {"blk.0.attn_q.weight", "blk.1.ffn_gate.weight"}
    for t in report.tensors:
        if t.name in touched:
            assert t.type == "Q8_0"
            assert t.fidelity is not None
            assert 0 < t.fidelity.nmse < 1e-4
        else:
            assert (t.type, t.outcome) == outcomes[t.name]
    base, found = tensors_of(tmp_path / "base.gguf"), tensors_of(tmp_path / "out.gguf")
    for name, weights in found.items():
        if name not in touched | {"output_norm.weight"}:
            np.testing.assert_array_equal(weights, base[name])
    np.testing.assert_array_equal(found["output_norm.weight"], norm)
    expected = changed(tensors, GATE)
    assert np.square(found["blk.1.ffn_gate.weight"] - expected).sum() < 1e-4 * np.square(expected).sum()


def test_an_adapter_is_merged_into_floats_and_into_act_order(small_model: Path, tmp_path: Path) -> None:
    """Rows of gate and up follow the columns of down, whose act-order is undone."""
    write_gptq(tmp_path / "gptq", small_model, desc_act=True)
    gate, down = "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"
    for folder, modules in ((small_model, (gate, down)), (tmp_path / "gptq", (gate,))):
        tensors = low_rank({module: own(module).shape for module in modules})  # type: ignore[misc]
        adapter = write_adapter(tmp_path / "adapter", tensors)
        floats = [(f"ffn_{part}", "F32") for part in ("gate", "down")]
        bridge.convert(folder, tmp_path / "base.gguf", tensor_types=floats, force=True)
        bridge.convert(folder, tmp_path / "merged.gguf", tensor_types=floats, merge=adapter, force=True)
        bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=folder, force=True)
        base, found, lora = (tensors_of(tmp_path / f"{name}.gguf") for name in ("base", "merged", "lora"))
        for module in modules:
            name = f"blk.1.ffn_{module.rpartition('.')[2].removesuffix('_proj')}.weight"
            change = 2 * lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"]
            np.testing.assert_allclose(found[name], base[name] + change, atol=1e-5)


def test_dora_changes_the_length_of_rows(tmp_path: Path) -> None:
    tensors = low_rank({GATE: own(GATE).shape})  # type: ignore[dict-item]
    magnitude = np.linspace(1, 2, len(own(GATE))).astype(np.float32)
    dora = tensors | {f"{GATE}.lora_magnitude_vector": magnitude}
    adapter = write_adapter(tmp_path / "adapter", dora, use_dora=True)
    bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter, tensor_types=[("blk.1.ffn_gate", "F32")])
    expected = changed(tensors, GATE)
    expected *= magnitude[:, None] / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(tensors_of(tmp_path / "out.gguf")["blk.1.ffn_gate.weight"], expected, atol=1e-5)


def test_qa_lora_moves_zero_points_and_keeps_codes(tmp_path: Path) -> None:
    """A change that is the same for all columns of a group of 128 needs no new codes; others do."""
    tensors = low_rank({Q: (256, 2), GATE: (len(own(GATE)), 2)})
    before = bridge.convert(CHECKPOINT, tmp_path / "base.gguf")
    for size, outcome in ((128, "codes carried"), (64, "from float")):
        stored = {n: np.repeat(t, 128 // size, 1) if "lora_A" in n else t for n, t in tensors.items()}
        adapter = write_adapter(tmp_path / f"{size}", stored, use_qalora=True, qalora_group_size=size)
        report = bridge.convert(CHECKPOINT, tmp_path / f"{size}.gguf", merge=adapter)
        touched = {t.name: t for t in report.tensors if t.name in ("blk.0.attn_q.weight", "blk.1.ffn_gate.weight")}
        assert {t.outcome for t in touched.values()} == {outcome}
        assert any("of 2 only zero points move" in note for note in report.notes) == (size == 128)
        read = np.repeat(stored[f"{Q}.lora_A.weight"], size, 1) * (256 / size / size)
        expected = own(Q) + 2 * stored[f"{Q}.lora_B.weight"] @ read
        found = tensors_of(tmp_path / f"{size}.gguf")["blk.0.attn_q.weight"]
        assert np.square(found - expected).sum() < 1e-4 * np.square(expected).sum()
    assert {t.type for t in before.tensors if t.name in touched} == {"Q4_K"}


def head_and_embeddings(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """A GGUF's embeddings and the head of its own, if it has one."""
    found = tensors_of(path)
    return found["token_embd.weight"], found.get("output.weight")


TIED = {  # what an adapter of a model with tied embeddings W holds: tensors, config -> embeddings, head
    "LoRA on the embeddings": (["E"], {}, ("W + E", "W")),
    "LoRA on the head": (["H"], {}, ("W", "W + H")),
    "LoRA on both": (["E", "H"], {}, ("W + E", "W + H")),
    "a saved head": (["head"], {}, ("W", "head")),
    "saved embeddings": (["embeddings"], {}, ("embeddings", "W")),
    "LoRA on the embeddings, tied": (["E"], {"ensure_weight_tying": True}, ("W + E", None)),
    "LoRA on the head, tied": (["H"], {"ensure_weight_tying": True}, ("W + H", None)),
    "both saved, alike": (["embeddings", "same head"], {}, ("embeddings", None)),
    "both saved": (["embeddings", "head"], {}, ("embeddings", "head")),
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_untied_where_peft_has_two_matrices(case: str, tmp_path: Path) -> None:
    given, config, meant = TIED[case]
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        w = checkpoint.read_float(f"{EMBEDDINGS}.weight")
    rng = np.random.default_rng(5)
    new = {"embeddings": w + rng.normal(0, 0.1, w.shape), "head": w + rng.normal(0, 0.1, w.shape)}
    e, h = low_rank({"x": w.shape}, seed=1), low_rank({"x": w.shape}, seed=2)  # type: ignore[dict-item]
    parts = {
        "E": {
            f"{EMBEDDINGS}.lora_embedding_A": e["x.lora_B.weight"].T,
            f"{EMBEDDINGS}.lora_embedding_B": e["x.lora_A.weight"].T,
        },
        "H": {f"lm_head.{name[2:]}": values for name, values in h.items()},
        "embeddings": {f"{EMBEDDINGS}.weight": new["embeddings"].astype(np.float32)},
        "head": {"lm_head.weight": new["head"].astype(np.float32)},
        "same head": {"lm_head.weight": new["embeddings"].astype(np.float32)},
    }
    tensors = {name: values for one in given for name, values in parts[one].items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    report = bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter, type="F32")
    values = {
        "W": w,
        "W + E": w + 2 * e["x.lora_B.weight"] @ e["x.lora_A.weight"],
        "W + H": w + 2 * h["x.lora_B.weight"] @ h["x.lora_A.weight"],
        **new,
    }
    for found, expected in zip(head_and_embeddings(tmp_path / "out.gguf"), meant, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            np.testing.assert_allclose(found, values[expected], atol=1e-5)
    assert any("is a matrix of its own" in note for note in report.notes) == (meant[1] is not None)


def test_a_gguf_with_tied_embeddings_is_not_untied(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "base.gguf")
    adapter = write_adapter(tmp_path / "adapter", low_rank({"lm_head": (2048, 256)}))
    with pytest.raises(BridgeError, match="is also the head of the base model"):
        bridge.convert(tmp_path / "base.gguf", tmp_path / "out.gguf", merge=adapter)


@pytest.mark.parametrize("flag", [True, False])  # PEFT saves that of the last layer that it made
@pytest.mark.parametrize("targets", [["attn.c_attn", "attn.c_proj"], ["attn.c_proj"], ["mlp.c_proj", "mlp.c_fc"]])
def test_layers_of_gpt_2_are_stored_with_inputs_first(flag: bool, targets: list[str], tmp_path: Path) -> None:
    """c_proj of the attention is square: others tell which way it is, or the flag if there are none."""
    if targets == ["attn.c_proj"] and not flag:
        pytest.skip("nothing tells")
    model = save_model(tmp_path / "model", "GPT2Config", num_hidden_layers=1)
    with bridge.open_checkpoint(model) as checkpoint:
        stored = {
            name.removesuffix(".weight"): checkpoint.read_float(name)
            for name in checkpoint.tensors
            if name.endswith(tuple(f"{target}.weight" for target in targets))
        }
    tensors = low_rank({name: values.shape[::-1] for name, values in stored.items()})  # type: ignore[misc]
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=flag)
    bridge.convert(model, tmp_path / "out.gguf", merge=adapter, type="F32")
    found = tensors_of(tmp_path / "out.gguf")
    gguf_names = {
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_proj": "ffn_down",
        "mlp.c_fc": "ffn_up",
    }
    for name, values in stored.items():
        change = 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        own = gguf_names[".".join(name.split(".")[-2:])]
        np.testing.assert_allclose(found[f"blk.0.{own}.weight"], values.T + change, atol=1e-5)


def test_fan_in_fan_out_turns_no_linear_layer(tmp_path: Path) -> None:
    """PEFT sets it to False for torch.nn.Linear; a square matrix does not tell."""
    tensors = low_rank({O_PROJ: own(O_PROJ).shape})  # type: ignore[dict-item]
    adapter = write_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter, tensor_types=[("blk.0.attn_output", "F32")])
    np.testing.assert_allclose(
        tensors_of(tmp_path / "out.gguf")["blk.0.attn_output.weight"], changed(tensors, O_PROJ), atol=1e-5
    )


def test_names_of_a_whole_state_dict_are_read(tmp_path: Path) -> None:
    """torch.compile's wrapper; the base model's own values beside those of modules_to_save."""
    tensors = low_rank({O_PROJ: own(O_PROJ).shape}) | {NORM: np.full(256, 1.5, np.float32)}  # type: ignore[dict-item]
    folder = write_adapter(tmp_path / "adapter", tensors)
    head, _, last = NORM.rpartition(".")
    stored = {f"_orig_mod.base_model.model.{name}": values for name, values in tensors.items() if name != NORM}
    stored[f"_orig_mod.base_model.model.{head}.modules_to_save.default.{last}"] = tensors[NORM]
    stored[f"_orig_mod.base_model.model.{head}.original_module.{last}"] = np.ones(256, np.float32)
    save_file(stored, folder / "adapter_model.safetensors")
    adapter = read_adapter(folder)
    assert list(adapter.changes) == [O_PROJ]
    assert adapter.saved[NORM].tolist() == [1.5] * 256
    stored[f"base_model.model.{NORM}"] = tensors[NORM]  # PEFT has it so where tokens were added
    save_file(stored, folder / "adapter_model.safetensors")
    assert read_adapter(folder).saved[NORM].tolist() == [1.5] * 256
    stored[f"base_model.model.{NORM}"] = np.ones(256, np.float32)
    save_file(stored, folder / "adapter_model.safetensors")
    with pytest.raises(BridgeError, match=f"holds {NORM} under two names with different values"):
        read_adapter(folder)


REFUSED = {
    "another shape": (low_rank({Q: (256, 128)}), {}, r"q_proj\.weight is of shape \[256, 128\], the base checkpoint"),
    "a layer that is missing": (low_rank({"model.layers.9.self_attn.q_proj": (256, 256)}), {}, "changes model.layers"),
    "added tokens of the embeddings alone": (
        {f"{EMBEDDINGS}.weight": np.ones((2050, 256), np.float32)},
        {},
        r"embed_tokens\.weight has 2050 tokens with the adapter, lm_head\.weight 2048",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_adapter_that_cannot_be_merged_is_refused(why: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[why]
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)  # type: ignore[arg-type]
    with pytest.raises(BridgeError, match=message):
        bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter)
    assert not (tmp_path / "out.gguf").exists()


def test_a_plan_is_of_the_checkpoint_without_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank({Q: (256, 256)}))
    out = tmp_path / "out.gguf"
    assert main(["convert", str(CHECKPOINT), str(out), "--merge", str(adapter), "--plan", str(tmp_path / "p")]) == 2
    assert "a plan is of the checkpoint without an adapter" in capsys.readouterr().err
    assert main(["convert", str(CHECKPOINT), str(out), "--merge", str(adapter)]) == 0
    assert "merged with the adapter adapter: 1" in capsys.readouterr().out

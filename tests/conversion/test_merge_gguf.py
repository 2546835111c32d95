"""PEFT adapters merged into GGUFs: tensors that they change are rounded again, all others keep their bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from tests.conftest import CHECKPOINT
from tests.support.adapters import low_rank, write_adapter
from tests.support.tiny_models import save_model

Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"
TOUCHED = {"blk.0.attn_q.weight": Q, "blk.1.ffn_gate.weight": GATE}


def values(path: Path, name: str) -> np.ndarray:
    stored = read_gguf(path).tensors[name]
    floats: np.ndarray = gguf.quants.dequantize(stored.raw, gguf.GGMLQuantizationType[stored.type])
    return floats.reshape(stored.shape).astype(np.float64)


@pytest.mark.parametrize("type", ["F32", "Q4_0", "Q4_K", "auto"])
def test_what_an_adapter_changes_keeps_its_type_and_all_else_its_bytes(type: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    bridge.convert(CHECKPOINT, base, type=type)
    shapes = {Q: (256, 256), GATE: (768, 256)}
    tensors = low_rank(shapes)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    report = bridge.convert(base, out, merge=adapter, **({"type": "F32"} if type == "F32" else {}))
    assert any("merged with the adapter adapter: 2" in note for note in report.notes)
    old, new = read_gguf(base).tensors, read_gguf(out).tensors
    assert {n: t.type for n, t in new.items()} == {n: t.type for n, t in old.items()}
    for name in old.keys() - TOUCHED.keys():
        assert np.array_equal(old[name].raw, new[name].raw), name
    for name, module in TOUCHED.items():
        change = 2 * tensors[f"{module}.lora_B.weight"].astype(np.float64) @ tensors[f"{module}.lora_A.weight"]
        expected = values(base, name) + change
        error = np.square(values(out, name) - expected).sum() / np.square(expected).sum()
        assert error < (1e-12 if type == "F32" else 1e-2), name
        stated = next(t for t in report.tensors if t.name == name)
        if type != "F32":
            assert stated.fidelity is not None
            assert stated.fidelity.nmse == pytest.approx(error, rel=1e-2)


def test_the_change_follows_rows_that_the_gguf_has_in_another_order(tmp_path: Path) -> None:
    """Those of Llama's q: merged into the checkpoint or into its GGUF, the weights are the same."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = save_model(tmp_path / "model", "LlamaConfig", num_hidden_layers=1)
    with bridge.open_checkpoint(model) as checkpoint:
        shape = checkpoint.tensors[f"{Q}.weight"].shape
    adapter = write_adapter(tmp_path / "adapter", low_rank({Q: shape}))
    bridge.convert(model, tmp_path / "base.gguf", type="F32")
    bridge.convert(model, tmp_path / "a.gguf", type="F32", merge=adapter)
    bridge.convert(tmp_path / "base.gguf", tmp_path / "b.gguf", type="F32", merge=adapter, config=model)
    first, second = (values(tmp_path / name, "blk.0.attn_q.weight") for name in ("a.gguf", "b.gguf"))
    assert np.abs(first - values(tmp_path / "base.gguf", "blk.0.attn_q.weight")).max() > 0.01
    np.testing.assert_allclose(second, first, atol=1e-6)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "IQ4_XS"])
def test_only_rows_of_tokens_that_an_adapter_has_are_rounded_again(type: str, tmp_path: Path) -> None:
    """Those of K-quants and IQ4_XS would lose a little each time."""
    base, out, table = tmp_path / "base.gguf", tmp_path / "out.gguf", "token_embd.weight"
    bridge.convert(CHECKPOINT, base, tensor_types=[("token_embd", type)])
    rows = np.random.default_rng(0).normal(0, 0.1, (3, 256)).astype(np.float32)
    adapter = write_adapter(
        tmp_path / "adapter", {"model.embed_tokens.token_adapter.trainable_tokens_delta": rows},
        trainable_token_indices=[9, 3, 2047], ensure_weight_tying=True,
    )  # fmt: skip
    report = bridge.convert(base, out, merge=adapter)
    old, new = (read_gguf(path).tensors[table] for path in (base, out))
    assert (new.type, new.shape) == (type, old.shape)
    before, after = (stored.raw.reshape(len(values(base, table)), -1) for stored in (old, new))
    assert np.flatnonzero((before != after).any(1)).tolist() == [3, 9, 2047]
    expected = values(base, table)
    expected[[9, 3, 2047]] = rows
    difference = np.square(values(out, table) - expected)
    assert np.square(rows).sum() * 1e-2 > difference.sum() > 0
    stated = next(t for t in report.tensors if t.name == table)
    assert stated.fidelity is not None
    assert stated.fidelity.nmse == pytest.approx(difference.sum() / np.square(expected).sum(), rel=1e-3)
    assert not any("for a smaller file" in note for note in report.notes)


@pytest.mark.parametrize("changed", [[0], [2], [1, 2]])
def test_experts_that_an_adapter_does_not_change_keep_their_bytes(changed: list[int], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", num_hidden_layers=1, head_dim=32, **experts)
    base, out, part = tmp_path / "base.gguf", tmp_path / "out.gguf", "model.layers.0.mlp.experts"
    bridge.convert(model, base, type="Q4_K")
    shape = values(base, "blk.0.ffn_up_exps.weight").shape[1:]
    adapter = write_adapter(
        tmp_path / "adapter", low_rank({f"{part}.{number}.up_proj": (shape[0], shape[1]) for number in changed})
    )
    bridge.convert(base, out, merge=adapter, config=model)
    old, new = read_gguf(base).tensors, read_gguf(out).tensors
    for name, stored in old.items():
        assert new[name].type == stored.type
        if "ffn_up_exps" in name:
            same = (stored.raw.reshape(3, -1) == new[name].raw.reshape(3, -1)).all(1)
            assert np.flatnonzero(~same).tolist() == changed
        else:
            assert np.array_equal(stored.raw, new[name].raw), name


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "base.gguf", type="Q4_0")
    adapter = write_adapter(tmp_path / "adapter", low_rank({Q: (256, 128)}))
    with pytest.raises(BridgeError, match=r"q_proj\.weight is of shape \[256, 128\]"):
        bridge.convert(tmp_path / "base.gguf", tmp_path / "out.gguf", merge=adapter)
    assert not (tmp_path / "out.gguf").exists()

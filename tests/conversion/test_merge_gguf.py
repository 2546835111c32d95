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


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "base.gguf", type="Q4_0")
    adapter = write_adapter(tmp_path / "adapter", low_rank({Q: (256, 128)}))
    with pytest.raises(BridgeError, match=r"q_proj\.weight is of shape \[256, 128\]"):
        bridge.convert(tmp_path / "base.gguf", tmp_path / "out.gguf", merge=adapter)
    assert not (tmp_path / "out.gguf").exists()

"""The way back: a GGUF becomes a checkpoint again, with the same codes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from tests.conftest import CHECKPOINT, shared


def same_codes(first, second) -> None:
    """The modules of two checkpoints have the same codes and zero points, and nearly the same scales."""
    with bridge.open_checkpoint(first) as old, bridge.open_checkpoint(second) as new:
        assert new.modules.keys() == old.modules.keys()
        for name in old.modules:
            a, b = old.reader.read(name), new.reader.read(name)
            assert np.array_equal(a.codes, b.codes), name
            groups = a.groups(), b.groups()
            assert np.array_equal(a.zeros[:, groups[0]], b.zeros[:, groups[1]]), name
            assert np.allclose(a.scales[:, groups[0]], b.scales[:, groups[1]], rtol=0.1), (
                name
            )  # Q2_K has scales of 4 bits


def test_a_checkpoint_comes_back_from_its_gguf_with_the_same_codes(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    done = bridge.export(tmp_path / "m.gguf", tmp_path / "new", "gptq_v2", config=CHECKPOINT)
    assert {t.how for t in done.tensors} <= {"exact", "all codes", "floats"}
    same_codes(CHECKPOINT, tmp_path / "new")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("qwen3-gptq-4bit-g128-asym-v2", "gptq_v2"),
        ("qwen3-gptq-4bit-g32-sym", "gptq_v2"),
        ("qwen3-gptq-2bit-g64-asym-v2", "gptq_v2"),
        ("qwen3-gptq-3bit-g128-sym", "gptq"),
        ("qwen3-gptq-8bit-g128-sym", "gptq"),
        ("qwen3-gptq-4bit-channel-sym", "gptq"),
        ("qwen3-awq-4bit-g128-gemm", "awq"),
        ("qwen3-ct-w4a16-asym", "gptq_v2"),
        ("llama-gptq-4bit-g128-sym", "gptq"),
    ],
)
def test_shared_checkpoints_come_back_with_the_same_codes(name, format, converted, tmp_path) -> None:
    path, _ = converted(name)
    bridge.export(path, tmp_path / "new", format, config=shared(f"checkpoints/{name}"))
    same_codes(shared(f"checkpoints/{name}"), tmp_path / "new")


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_plain_blocks_go_to_gptq_and_back_bit_for_bit(type, tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "a.gguf", type=type)
    done = bridge.export(tmp_path / "a.gguf", tmp_path / "new", "gptq_v2", config=CHECKPOINT)
    assert {t.how for t in done.tensors if t.bits} == {"exact"}
    bridge.convert(tmp_path / "new", tmp_path / "b.gguf", type=type)
    first, second = (read_gguf(tmp_path / name).tensors for name in ("a.gguf", "b.gguf"))
    layers = [name for name in first if name.startswith("blk.") and first[name].type == type]
    assert layers
    for name in layers:
        assert np.array_equal(first[name].raw, second[name].raw), name


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_floats_are_the_dequantized_weights_under_the_old_names(dtype, tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", config=CHECKPOINT, dtype=dtype)
    with bridge.open_checkpoint(CHECKPOINT) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        assert new.format == "float"
        assert not new.config.get("quantization_config")
        assert {f"{module}.weight" for module in old.modules} <= new.tensors.keys()
        for module in old.modules:
            weights = old.reader.read(module).dequantize()
            assert np.allclose(new.store.read_float(f"{module}.weight"), weights, rtol=0.02, atol=1e-3), module


def test_the_labels_of_the_old_quantization_do_not_come_along(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    home = shutil.copytree(CHECKPOINT, tmp_path / "home")
    (home / "quantization_config.json").write_text(json.dumps({"quant_method": "exl3"}))
    (home / "quanto_qmap.json").write_text(json.dumps({"lm_head": {"weights": "qint4"}}))
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", config=home, dtype="F16")
    with bridge.open_checkpoint(tmp_path / "new") as new:
        assert new.format == "float"


def test_native_k_quants_are_rounded_to_8_bits_and_the_error_is_stated(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "floats", config=CHECKPOINT, dtype="F32")
    bridge.convert(tmp_path / "floats", tmp_path / "native.gguf", type="Q5_K")
    done = bridge.export(tmp_path / "native.gguf", tmp_path / "new", "gptq_v2", config=CHECKPOINT)
    rounded = [t for t in done.tensors if t.how == "rounded to 8 bits"]
    assert rounded
    assert all(0 < t.nmse < 1e-3 and t.bits == 8 for t in rounded)
    assert "rounded to 8 bits" in done.summary()


def test_an_unfinished_or_unfitting_export_leaves_nothing(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    out, other = tmp_path / "new", tmp_path / "other"
    other.mkdir()
    config = json.loads((CHECKPOINT / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["NobodyForCausalLM"]}, "unknown architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is qwen3"),
        ({"num_hidden_layers": 1}, "has no place for it"),
        ({"intermediate_size": 32}, "config requires"),
    ):
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(BridgeError, match=message):
            bridge.export(tmp_path / "m.gguf", out, config=other)
    with pytest.raises(BridgeError, match="unknown format"):
        bridge.export(tmp_path / "m.gguf", out, "exl2", config=CHECKPOINT)
    with pytest.raises(BridgeError, match="unknown dtype"):
        bridge.export(tmp_path / "m.gguf", out, config=CHECKPOINT, dtype="F8")
    with pytest.raises(BridgeError, match="shard is missing"):
        bridge.export(tmp_path / "m-00001-of-00002.gguf", out, config=CHECKPOINT)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "other"]
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(BridgeError, match="exists"):
        bridge.export(tmp_path / "m.gguf", out, config=CHECKPOINT)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]

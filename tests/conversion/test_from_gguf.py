"""A GGUF as the source: its tensors in other types, its metadata as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from tests.conftest import CHECKPOINT, linux


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m-BF16.gguf"
    bridge.convert(CHECKPOINT, path, type="BF16")
    return path


def test_metadata_and_names_stay_and_weights_are_rounded_with_the_error_stated(source, tmp_path) -> None:
    report = bridge.convert(source, tmp_path / "out.gguf", type="Q8_0")
    old, new = read_gguf(source), read_gguf(tmp_path / "out.gguf")
    assert {t.name: t.shape for t in old.tensors.values()} == {t.name: t.shape for t in new.tensors.values()}
    changed = {"general.file_type", "general.quantization_version"}
    assert {k: old.metadata[k] for k in old.metadata if k not in changed} == {
        k: new.metadata[k] for k in new.metadata if k not in changed
    }
    kinds = {t.name: t.fidelity for t in report.tensors if t.type == "Q8_0"}
    assert "blk.0.ffn_down.weight" in kinds
    for name, fidelity in kinds.items():
        before, after = (
            gguf.quants.dequantize(m.tensors[name].raw, gguf.GGMLQuantizationType[m.tensors[name].type]).astype(float)
            for m in (old, new)
        )
        before = before.reshape(-1) if before.ndim == 1 else before
        assert fidelity is not None
        error = np.square(after.reshape(-1) - before.reshape(-1)).sum() / np.square(before).sum()
        assert fidelity.nmse == pytest.approx(error, rel=1e-3), name


def test_without_a_type_a_quantized_gguf_is_copied_and_shards_are_made_and_joined(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf", token_embd_type="F16")
    bridge.convert(tmp_path / "m.gguf", tmp_path / "split.gguf", split_max_size=40_000)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 1
    report = bridge.convert(parts[1], tmp_path / "whole.gguf")
    assert all(t.fidelity is None for t in report.tensors)
    first, last = (read_gguf(tmp_path / name) for name in ("m.gguf", "whole.gguf"))
    assert {n: (t.type, t.raw.tobytes()) for n, t in first.tensors.items()} == {
        n: (t.type, t.raw.tobytes()) for n, t in last.tensors.items()
    }


def test_tensors_that_have_the_type_already_are_copied(source, tmp_path) -> None:
    bridge.convert(source, tmp_path / "a.gguf", type="Q4_K")
    report = bridge.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", type="Q4_K", tensor_types={"ffn_down": "Q6_K"})
    rounded = {t.name for t in report.tensors if t.fidelity is not None}
    assert rounded == {t.name for t in report.tensors if "ffn_down" in t.name}
    first, second = (read_gguf(tmp_path / name).tensors for name in ("a.gguf", "b.gguf"))
    assert all(np.array_equal(first[n].raw, second[n].raw) for n in first.keys() - rounded)
    assert "came as Q4_K" in report.table()
    assert "the GGUF has Q4_K" in report.table()
    assert "as they were" in report.table()


def test_a_plan_of_a_gguf_is_executed(source, tmp_path) -> None:
    plan_checkpoint(source, out=tmp_path / "plan.json", type="Q4_K_M")
    bridge.convert(plan=tmp_path / "plan.json", out=tmp_path / "a.gguf")
    bridge.convert(source, tmp_path / "b.gguf", type="Q4_K_M")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("types", [[], [("ffn_(gate|up|down)_exps", "Q4_0")]])
def test_stacks_of_experts_and_unknown_architectures_are_converted(types, tmp_path) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "nobody-knows-it")
    writer.add_block_count(1)
    weights = {
        "token_embd.weight": rng.standard_normal((64, 64)),
        "blk.0.ffn_gate_inp.weight": rng.standard_normal((4, 64)),
        "blk.0.ffn_up_exps.weight": rng.standard_normal((4, 96, 64)),
        "blk.0.attn_norm.weight": rng.standard_normal(64),
    }
    for name, values in weights.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    bridge.convert(tmp_path / "in.gguf", tmp_path / "out.gguf", type="Q8_0", tensor_types=types)
    new = read_gguf(tmp_path / "out.gguf").tensors
    stack = new["blk.0.ffn_up_exps.weight"]
    assert (new["blk.0.ffn_gate_inp.weight"].type, new["token_embd.weight"].type) == ("F32", "Q8_0")
    assert stack.type == (types[0][1] if types else "Q8_0")
    values = gguf.quants.dequantize(stack.raw, gguf.GGMLQuantizationType[stack.type]).reshape(stack.shape)
    assert np.abs(values - weights[stack.name]).max() < (0.5 if types else 0.03)


def test_what_a_gguf_cannot_be_combined_with_is_said(source, tmp_path) -> None:
    with pytest.raises(BridgeError, match="keeps its names"):
        bridge.convert(source, tmp_path / "out.gguf", type="Q4_K", template=source)
    with pytest.raises(BridgeError, match="shard is missing"):
        bridge.convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out.gguf")
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "")
    writer.kv_data[0].clear()
    writer.add_tensor("a.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BridgeError, match=r"general\.architecture is missing"):
        bridge.convert(tmp_path / "bare.gguf", tmp_path / "out.gguf", type="Q8_0")
    assert not (tmp_path / "out.gguf").exists()


def test_a_gguf_is_read_as_the_checkpoint_that_it_was_made_of(source, tmp_path) -> None:
    """Config and tokenizer are made of the metadata, tensors named and ordered by its family."""
    pytest.importorskip("transformers")
    bridge.export(source, tmp_path / "model", config=CHECKPOINT, dtype="F32")
    with bridge.open_checkpoint(tmp_path / "model") as old, open_source(source, by_family=True) as new:
        assert new.tensors.keys() == old.tensors.keys()
        for name in old.tensors:
            values = old.read_float(name)
            assert np.array_equal(new.read_float(name), values), name
            assert np.array_equal(new.read_float(name, (3, 7)), values[3:7]), name
        home = new.home
        assert (home / "tokenizer.json").exists()
    assert not home.exists()


def calibrated_alike(model, path, config, folder, text, type="Q4_K") -> None:
    """A checkpoint and its GGUF of F32, quantized with the same text, are the same."""
    calibrate = bridge.Calibration(text, samples=8, length=32, method="gptq")
    found = []
    for source, given in ((model, None), (path, config)):
        out = folder / f"{source.name}.out"
        bridge.convert(source, out, type=type, calibrate=calibrate, config=given, mmproj_type="none")
        found.append(read_gguf(out).tensors)
    assert found[0].keys() == found[1].keys()
    assert any(t.type == type for t in found[0].values())
    for name, tensor in found[0].items():
        assert np.array_equal(tensor.raw, found[1][name].raw), name


@pytest.mark.exhaustive
def test_a_gguf_is_calibrated_like_the_checkpoint_that_it_was_made_of(source, tmp_path) -> None:
    """Config and tokenizer are made of the metadata."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    bridge.export(source, tmp_path / "model", config=CHECKPOINT, dtype="F32")
    bridge.convert(tmp_path / "model", tmp_path / "m.gguf", type="F32")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    calibrated_alike(tmp_path / "model", tmp_path / "m.gguf", None, tmp_path, tmp_path / "text.txt")


@pytest.mark.exhaustive
def test_rows_that_the_gguf_has_in_another_order_are_calibrated_in_the_checkpoints(tmp_path) -> None:
    """Those of Llama's q and k."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.tiny_models import save_model

    model = save_model(tmp_path / "model", "LlamaConfig", num_hidden_layers=1)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(1).integers(0, 320, (8, 32)))
    bridge.convert(model, tmp_path / "m.gguf", type="F32")
    calibrated_alike(model, tmp_path / "m.gguf", model, tmp_path, tmp_path / "tokens.npy")


@pytest.mark.exhaustive
def test_a_language_model_is_calibrated_with_the_config_of_the_whole_model(tmp_path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.conversion.test_export_families import gguf_of

    path = gguf_of("mistral3", tmp_path, "F32")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(1).integers(0, 320, (8, 32)))
    calibrated_alike(tmp_path / "model", path, tmp_path / "model", tmp_path, tmp_path / "tokens.npy", "Q8_0")


def test_a_gguf_that_was_made_of_another_is_verified_against_it(source, tmp_path) -> None:
    made = bridge.convert(source, tmp_path / "out.gguf", type="Q6_K")
    found = bridge.verify(tmp_path / "out.gguf", source)
    by_name = {t.name: t for t in found.tensors}
    for tensor in made.tensors:
        if tensor.fidelity is not None:
            assert by_name[tensor.name].fidelity.nmse == pytest.approx(tensor.fidelity.nmse, rel=1e-4)


def test_the_output_is_named_by_its_type(source, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = bridge.convert(source, type="Q8_0")
    assert [path.name for path in report.outputs] == ["m-Q8_0.gguf"]


# prints by how many MB the peak of the resident set rises, after a conversion that loads all kernels
_RISE = """
import resource, sys
import bridge
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
bridge.convert(sys.argv[1], sys.argv[3], type="Q4_0")
before = peak()
bridge.convert(sys.argv[2], sys.argv[3], type="Q4_0", force=True)
print(peak() - before)
"""


def matrices(path: Path, count: int) -> Path:
    """A GGUF of 8.9 MB for each matrix, of Q8_0."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(count)
    floats = np.random.default_rng(1).standard_normal((2048, 4096)).astype(np.float32)
    raw = gguf.quants.quantize(floats, gguf.GGMLQuantizationType.Q8_0)
    for i in range(count):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@linux
@pytest.mark.exhaustive
def test_requantizing_takes_memory_for_tensors_and_not_for_the_file(tmp_path: Path) -> None:
    """Twelve matrices more, 107 MB in the file, take no more memory than four do."""
    few, many = matrices(tmp_path / "few.gguf", 4), matrices(tmp_path / "many.gguf", 16)
    done = subprocess.run(
        [sys.executable, "-c", _RISE, few, many, tmp_path / "out.gguf"], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 30

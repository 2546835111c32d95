"""gguf-bridge convert on good checkpoints: what it writes, prints and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter, PoolingType

import bridge
from bridge.cli import main
from bridge.cli.files.convert import _next_steps
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT
from tests.support.command_line import KINDS, rows, types
from tests.support.raw import edit_raw, read_raw


def test_the_table_says_what_became_of_each_kind_of_tensor(run, tmp_path):
    out = run("convert", CHECKPOINT, tmp_path / "out.gguf")
    assert out.split("\n")[0].split() == ["tensors", "type", "bpw", "codes", "kept", "NMSE", "of", "source", "noise"]
    table = rows(out)
    assert set(table) == {*KINDS, "token_embd", "norms, biases and other floats", "all that came as codes"}
    for kind in KINDS:
        count, name, bpw, kept, nmse, share = table[kind]
        assert (count, name, bpw, kept) == ("4", "Q4_K", "4.50", "100%")
        assert 0 < float(nmse) < 1e-6
        assert 0 < float(share.removesuffix("%")) < 1
    assert table["token_embd"][:3] == ["1", "Q8_0", "8.50"]
    assert "28 of these tensors would be bit-exact at no extra size as Q4_0: use --type exact" in out
    assert f"wrote {tmp_path / 'out.gguf'}" in out
    assert "2.7 MB gptq -> 2.4 MB GGUF in " in out
    assert "source noise: added error as a share of the checkpoint's own rounding error" in out


def test_exact_is_bit_exact(run, tmp_path):
    out = run("convert", CHECKPOINT, tmp_path / "out.gguf", "--exact")
    assert rows(out)["all that came as codes"] == ["28", "Q4_0", "4.50", "100%", "exact", "0%"]
    assert "--exact" not in out
    run("verify", tmp_path / "out.gguf", CHECKPOINT, "--max-share", "0")


def test_force_replaces_nothing_that_the_conversion_reads(auto, tmp_path, capsys):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    shutil.copyfile(auto, folder / "template.gguf")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for name in ("model.safetensors", "config.json", "tokenizer.json", "template.gguf"):
        out = folder / name
        assert main(["convert", str(folder), str(out), "--force", "--template", str(folder / "template.gguf")]) == 2
        assert (
            f"{out}: {'this run reads' if name == 'template.gguf' else 'is in the checkpoint'}"
            in capsys.readouterr().err
        )
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_report_replaces_reports_alone(auto, tmp_path, capsys):
    weights = Path(shutil.copyfile(CHECKPOINT / "model.safetensors", tmp_path / "model.safetensors"))
    for command in ("convert", CHECKPOINT, tmp_path / "out.gguf"), ("verify", auto, CHECKPOINT):
        assert main([*map(str, command), "--report", str(weights)]) == 2
        assert "exists and is not a report" in capsys.readouterr().err
    assert weights.read_bytes() == (CHECKPOINT / "model.safetensors").read_bytes()
    assert not (tmp_path / "out.gguf").exists()
    report = bridge.verify(auto, CHECKPOINT)
    for _ in range(2):
        report.save(tmp_path / "report.json")
    with pytest.raises(BridgeError, match="is not a report"):
        report.save(auto)


def test_the_report_has_every_tensor_and_the_figures_that_verify_finds_in_the_file(run, tmp_path):
    run("convert", CHECKPOINT, tmp_path / "out.gguf", "--report", tmp_path / "made.json")
    run("verify", tmp_path / "out.gguf", CHECKPOINT, "--report", tmp_path / "read.json")
    made, read = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("made", "read"))
    assert made["outputs"] == [str(tmp_path / "out.gguf")]
    assert made["output_bytes"] == (tmp_path / "out.gguf").stat().st_size
    assert len(made["tensors"]) == 46
    for a, b in zip(made["tensors"], read["tensors"], strict=True):
        assert (a["name"], a["type"], a["how"], a["nbytes"]) == (b["name"], b["type"], b["how"], b["nbytes"])
        assert (a["fidelity"] is None) == (b["fidelity"] is None)
        if a["fidelity"]:
            assert a["fidelity"]["codes_kept"] == b["fidelity"]["codes_kept"]
            assert a["fidelity"]["nmse"] == pytest.approx(b["fidelity"]["nmse"], rel=1e-3)
            assert a["fidelity"]["noise"] == pytest.approx(b["fidelity"]["noise"])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_block_type_is_taken_literally_and_keeps_the_codes(run, tmp_path, name):
    out = run("convert", CHECKPOINT, tmp_path / "out.gguf", "--type", name.lower())
    assert rows(out)["all that came as codes"][1] == name
    assert rows(out)["all that came as codes"][3] == "100%"
    run("verify", tmp_path / "out.gguf", CHECKPOINT, "--max-nmse", "0.01")


def test_a_preset_mixes_types_for_floats_and_bounds_them_for_codes(run, tmp_path):
    table = rows(run("convert", CHECKPOINT, tmp_path / "out.gguf", "--type", "Q4_K_M"))
    assert table["token_embd"][1] == "Q6_K"  # the head too: the embeddings are tied
    assert {table[kind][1] for kind in KINDS} == {"Q4_K"}
    assert gguf.GGUFReader(tmp_path / "out.gguf").fields["general.file_type"].contents() == 15  # MOSTLY_Q4_K_M


def test_single_tensors_have_the_types_asked_for(run, tmp_path):
    path = tmp_path / "out.gguf"
    some = ["--tensor-type", "ffn_down=Q6_K", "--tensor-type", r"blk\.0\.ffn_down=F16", "--tensor-type", "attn_q=BF16"]
    run("convert", CHECKPOINT, path, *some, "--token-embd-type", "F16")
    found = types(path)
    assert found["token_embd.weight"] == "F16"
    assert found["blk.0.ffn_down.weight"] == "F16"
    assert found["blk.1.ffn_down.weight"] == "Q6_K"
    assert found["blk.3.attn_q.weight"] == "BF16"
    assert found["blk.3.attn_k.weight"] == "Q4_K"
    run("convert", CHECKPOINT, path, "--force", "--output-type", "F32", "--token-embd-type", "Q8_0")
    assert types(path)["token_embd.weight"] == "F32"  # tied: the head's type comes first
    run("verify", path, CHECKPOINT, "--max-nmse", "0")


def test_shards_are_loaded_by_llama_cpp_and_by_verify(run, tmp_path, auto):
    out = run("convert", CHECKPOINT, tmp_path / "out.gguf", "--split-max-size", "800K")
    shards = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in shards] == [f"out-{i + 1:05}-of-{len(shards):05}.gguf" for i in range(len(shards))]
    assert len(shards) > 2
    assert all(f"wrote {path}" in out for path in shards)
    tokens = list(range(5, 25))
    with LlamaCpp(shards[0], n_ctx=32) as split, LlamaCpp(auto, n_ctx=32) as whole:
        np.testing.assert_array_equal(split.logits(tokens), whole.logits(tokens))
    assert "OK: every tensor" in run("verify", shards[0], CHECKPOINT)
    assert f"in {len(shards)} files" in run("inspect", shards[0])


def test_the_modelfile_names_the_gguf_beside_it(run, tmp_path):
    printed = run("convert", CHECKPOINT, tmp_path / "Out 2.gguf", "--modelfile")
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./Out 2.gguf\n")
    assert printed.endswith(f"\n  ollama create out-2 -f {tmp_path / 'Modelfile'}\n")


@pytest.mark.parametrize("command", [["convert"], ["quantize", "--type", "F16"]])
def test_the_next_steps_end_the_output(run, tmp_path, command):
    out = tmp_path / "a b.gguf"
    assert run(*command, CHECKPOINT, out).splitlines()[-4:] == [
        "next:",
        f"  gguf-bridge run '{out}' -p \"Once upon a time\"",
        f"  llama-cli -m '{out}'",
        f"  ollama create a-b -f {tmp_path / 'Modelfile'}   (--modelfile writes the Modelfile)",
    ]


@pytest.mark.parametrize(
    ("arch", "pooling", "step"),
    [
        ("bert", PoolingType.MEAN, "gguf-bridge serve {}   (/v1/embeddings)"),
        ("qwen3", PoolingType.LAST, "gguf-bridge serve {}   (/v1/embeddings)"),
        ("qwen3", PoolingType.RANK, "gguf-bridge serve {}   (/v1/rerank)"),
        ("modern-bert", None, "gguf-bridge serve {}   (/v1/embeddings)"),
        ("eagle3", None, "gguf-bridge run MODEL.gguf --draft {}"),
        ("qwen3", PoolingType.NONE, 'gguf-bridge run {} -p "Once upon a time"'),
    ],
)
def test_the_next_step_is_what_a_model_can_do(arch, pooling, step, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", arch)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    steps = _next_steps([tmp_path / "m.gguf"], modelfile=False).splitlines()
    assert steps[:2] == ["next:", "  " + step.format(tmp_path / "m.gguf")]
    assert len([line for line in steps if "gguf-bridge" in line]) == 1


def test_a_shard_alone_has_no_next_steps(run, tmp_path):
    run("plan", CHECKPOINT, "-o", tmp_path / "plan.json", "--split-max-size", "1M")
    assert "next:" not in run("convert", "--plan", tmp_path / "plan.json", tmp_path / "out.gguf", "--shard", "1/3")


def test_a_model_that_only_llama_cpp_runs_is_not_offered_to_run_here(run, tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.gguf_file.purpose.ARCHITECTURES", {})
    printed = run("convert", CHECKPOINT, tmp_path / "out.gguf")
    assert "llama-cli -m" in printed
    assert "gguf-bridge run" not in printed


def test_the_output_is_named_after_the_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("convert", CHECKPOINT)
    run("convert", f"{CHECKPOINT}/", "--type", "q4_k_m")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "qwen3-gptq-4bit-g128-sym-Q4_K.gguf",
        "qwen3-gptq-4bit-g128-sym-Q4_K_M.gguf",
    ]


def test_a_snapshot_in_the_hubs_cache_gives_the_output_the_repositorys_name(run, tmp_path, monkeypatch):
    repository = tmp_path / "models--org--tiny-GPTQ"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(CHECKPOINT.iterdir()):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.chdir(tmp_path)
    run("convert", snapshot)
    assert [p.name for p in tmp_path.glob("*.gguf")] == ["tiny-GPTQ-Q4_K.gguf"]


def test_a_name_for_pre_that_is_unknown_here_is_taken_and_reported(run, tmp_path):
    assert "unknown name, which llama.cpp may refuse" in run(
        "convert", CHECKPOINT, tmp_path / "out.gguf", "--pre", "klingon"
    )


def test_an_imatrix_weighs_what_is_requantized(run, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "x")
    writer.add_type("imatrix")
    sums = (10 ** np.random.default_rng(0).uniform(0, 4, (1, 256))).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", sums)
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    error = {}
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        weights = checkpoint.read_module("model.layers.0.self_attn.q_proj").dequantize()
    for name, options in (("plain", []), ("weighted", ["--imatrix", tmp_path / "imatrix.gguf"])):
        path = tmp_path / f"{name}.gguf"
        run("convert", CHECKPOINT, path, "--tensor-type", "attn_q=Q3_K", *options)
        tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        error[name] = float((np.square(values - weights) * sums).sum())
    assert error["weighted"] < 0.9 * error["plain"]


def test_the_same_conversion_gives_the_same_bytes_whatever_the_threads(tmp_path, auto):
    expected = auto.read_bytes()
    for threads in (1, 2, 2):
        bridge.convert(CHECKPOINT, tmp_path / "auto.gguf", threads=threads, force=True)
        assert (tmp_path / "auto.gguf").read_bytes() == expected


def test_biases_of_zeros_that_need_not_be_are_left_out(run, tmp_path, auto):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    biases = {
        f"{name[:-8]}.bias": ({"dtype": "F16", "shape": entry["shape"][1:]}, bytes(2 * entry["shape"][1]))
        for name, (entry, _) in read_raw(folder / "model.safetensors").items()
        if name.endswith(".qweight")
    }
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update(biases))
    run("convert", folder, tmp_path / "out.gguf")
    assert types(tmp_path / "out.gguf") == types(auto)
    one = {"model.layers.0.self_attn.q_proj.bias": ({"dtype": "F16", "shape": [256]}, b"\0\x3c" * 256)}
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update(one))
    run("convert", folder, tmp_path / "out.gguf", "--force")
    assert types(tmp_path / "out.gguf").keys() - types(auto).keys() == {"blk.0.attn_q.bias"}
    assert "OK: every tensor" in run("verify", tmp_path / "out.gguf", folder)


def test_convert_from_python_reports_what_the_command_line_prints(tmp_path):
    calls: list[tuple[int, int, str]] = []
    report = bridge.convert(CHECKPOINT, tmp_path / "out.gguf", progress=lambda *call: calls.append(call))
    assert report.outputs == [tmp_path / "out.gguf"]
    total = report.total()
    assert total is not None
    assert total.kept == total.weights
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) == 1 + len(report.tensors)


def test_a_wrong_label_is_overruled_and_said_in_one_line(run, tmp_path, mislabelled, auto):
    out = run("convert", mislabelled, tmp_path / "out.gguf", "--report", tmp_path / "report.json")
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "and 27 more: qzeros are symmetric v1 (0x77777777) but checkpoint_format says gptq_v2" in notes[0]
    said = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert sum("qzeros are symmetric v1" in note for note in said) == 28
    run("verify", tmp_path / "out.gguf", CHECKPOINT)

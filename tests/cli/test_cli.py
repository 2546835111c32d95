"""The command line on good checkpoints: what it writes, prints and returns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from scripts.peers.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT, ROOT, shared
from tests.support.encode import gptq_tensors, quantize, write_gptq
from tests.support.encode_formats import mlx_tensors, write_hqq
from tests.support.raw import edit_raw, read_raw

KINDS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run(*arguments, code=0): what the program prints; nothing may go to standard error."""

    def call(*arguments: object, code: int = 0) -> str:
        assert main([str(a) for a in arguments]) == code
        out, error = capsys.readouterr()
        assert error == ""
        return out

    return call


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint converted without any option."""
    path = tmp_path_factory.mktemp("auto") / "auto.gguf"
    bridge.convert(CHECKPOINT, path)
    return path


def rows(table: str) -> dict[str, list[str]]:
    """The closing table's cells by the kind of tensor: count, type, bpw, codes kept, NMSE, share of noise."""
    cells = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        for kind in ("token_embd", "output", "all that came as codes", "norms, biases and other floats", *KINDS):
            if line.startswith(f"{kind} "):
                cells[kind] = line.removeprefix(kind).split()
    return cells


def types(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


# convert


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
    assert "28 of these tensors would be bit-exact at no extra size as Q4_0: use --exact" in out
    assert f"wrote {tmp_path / 'out.gguf'}" in out
    assert "2.7 MB gptq -> 2.4 MB GGUF in " in out
    assert "of source noise: the error beside what the checkpoint's own rounding costs" in out


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
        assert f"{out}: is read to make the new file" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_report_replaces_reports_alone(auto, tmp_path, capsys):
    weights = Path(shutil.copyfile(CHECKPOINT / "model.safetensors", tmp_path / "model.safetensors"))
    for command in ("convert", CHECKPOINT, tmp_path / "out.gguf"), ("verify", auto, CHECKPOINT):
        assert main([*map(str, command), "--report", str(weights)]) == 2
        assert "exists and is no report" in capsys.readouterr().err
    assert weights.read_bytes() == (CHECKPOINT / "model.safetensors").read_bytes()
    assert not (tmp_path / "out.gguf").exists()
    report = bridge.verify(auto, CHECKPOINT)
    for _ in range(2):
        report.save(tmp_path / "report.json")
    with pytest.raises(BridgeError, match="is no report"):
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
    assert "all within threshold" in run("verify", shards[0], CHECKPOINT)
    assert f"in {len(shards)} files" in run("inspect", shards[0])


def test_the_modelfile_names_the_gguf_beside_it(run, tmp_path):
    printed = run("convert", CHECKPOINT, tmp_path / "Out 2.gguf", "--modelfile")
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./Out 2.gguf\n")
    assert printed.endswith(f"Ollama takes it: ollama create out-2 -f {tmp_path / 'Modelfile'}\n")


def test_the_output_is_named_after_the_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("convert", CHECKPOINT)
    run("convert", f"{CHECKPOINT}/", "--type", "q4_k_m")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "qwen3-gptq-4bit-g128-sym-Q4_K_M.gguf",
        "qwen3-gptq-4bit-g128-sym.gguf",
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
    assert [p.name for p in tmp_path.glob("*.gguf")] == ["tiny-GPTQ.gguf"]


def test_a_name_for_pre_that_is_unknown_here_is_taken_and_reported(run, tmp_path):
    assert "note: --pre klingon: a name unknown here" in run(
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
    assert "all within threshold" in run("verify", tmp_path / "out.gguf", folder)


def test_a_head_unlike_the_embeddings_is_kept_though_the_config_ties_them(run, tmp_path, auto):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    entry, data = read_raw(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": (entry, data)}))
    run("convert", folder, tmp_path / "out.gguf")
    assert types(tmp_path / "out.gguf") == types(auto)
    other = data[: -len(data) // 8] + bytes(len(data) // 8)  # the last rows alone
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": (entry, other)}))
    table = run("convert", folder, tmp_path / "out.gguf", "--force")
    assert table.count("config.json ties lm_head to the embeddings, but it is stored with other values") == 1
    assert types(tmp_path / "out.gguf") == types(auto) | {"output.weight": "Q8_0"}
    assert "all within threshold" in run("verify", tmp_path / "out.gguf", folder)


def tied_to(
    folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], **quantization: Any
) -> Path:
    """The checkpoint, whose config ties the head to the embeddings, with its tensors changed; another config's."""
    shutil.copytree(CHECKPOINT, folder)
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        store = checkpoint.store
        tensors = {n: (store.read_float if info.floating else store.read)(n) for n, info in store.tensors.items()}
    tensors = change(tensors)
    save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    if quantization:
        (folder / "quantize_config.json").unlink()
        config |= {"quantization_config": quantization, "quantization": quantization}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_head_of_codes_is_compared_with_the_embeddings_by_its_values(run, tmp_path, auto):
    name = "model.embed_tokens.weight"
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        head = quantize(checkpoint.read_float(name), 4, 128, sym=True)
    codes = gptq_tensors("lm_head", head, 4)
    other = tied_to(tmp_path / "other", lambda tensors: tensors | codes)
    assert "lm_head to the embeddings, but it is stored with other values" in run("convert", other, tmp_path / "o.gguf")
    assert types(tmp_path / "o.gguf") == types(auto) | {"output.weight": "Q4_K"}
    assert "all within threshold" in run("verify", tmp_path / "o.gguf", other)
    same = tied_to(tmp_path / "same", lambda tensors: tensors | codes | {name: head.dequantize()})
    run("convert", same, tmp_path / "s.gguf")
    assert types(tmp_path / "s.gguf") == types(auto)


def test_a_head_of_floats_is_compared_with_quantized_embeddings(run, tmp_path):
    """As mlx-lm writes it: every matrix is quantized, the head alone left out."""

    def quantized(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {n: v for n, v in tensors.items() if n.endswith("norm.weight")}
        with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
            weights = {name: checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
        for name, weight in (weights | {"model.embed_tokens": tensors["model.embed_tokens.weight"]}).items():
            made |= mlx_tensors(name, weight, 4, 64)[0]
        return made

    settings = {"bits": 4, "group_size": 64}
    with bridge.open_checkpoint(tied_to(tmp_path / "tied", quantized, **settings)) as checkpoint:
        embeddings = checkpoint.read_module("model.embed_tokens").dequantize()
    for head, type_ in ((embeddings, None), (embeddings * np.float32(1.25), "Q8_0")):
        folder, path = tmp_path / str(type_), tmp_path / f"{type_}.gguf"
        tied_to(folder, lambda tensors, head=head: quantized(tensors) | {"lm_head.weight": head}, **settings)
        run("convert", folder, path)
        assert types(path)["token_embd.weight"] == "Q4_K"
        assert types(path).get("output.weight") == type_
        assert "all within threshold" in run("verify", path, folder)


def test_a_real_checkpoint_keeps_its_quantized_head_whatever_the_config_ties(run, tmp_path):
    folder = Path(shutil.copytree(shared("more/llama-gptq-4bit-lmhead"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "it is stored with other values; it is kept" in run("convert", folder, tmp_path / "m.gguf")
    assert types(tmp_path / "m.gguf")["output.weight"] == "Q8_0"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' file names are text")
def test_a_folder_whose_name_is_not_utf_8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/mod\xe9le"
    shutil.copytree(os.fsencode(CHECKPOINT), folder)
    command = [os.fsencode(sys.executable), b"-m", b"bridge.cli", b"convert", folder, folder + b"/\xe9.gguf"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\nwrote " in done.stdout


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


# labels that the data contradicts


@pytest.fixture
def mislabelled(tmp_path: Path) -> Path:
    """The checkpoint, labelled as GPTQ v2 with act-order, neither of which it has."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "mislabelled"))
    changes = {"checkpoint_format": "gptq_v2", "desc_act": True}
    file = folder / "quantize_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_a_wrong_label_is_overruled_and_said_in_one_line(run, tmp_path, mislabelled, auto):
    out = run("convert", mislabelled, tmp_path / "out.gguf", "--report", tmp_path / "report.json")
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "and 27 more: qzeros are symmetric v1 (0x77777777) but checkpoint_format says gptq_v2" in notes[0]
    said = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert sum("qzeros are symmetric v1" in note for note in said) == 28
    run("verify", tmp_path / "out.gguf", CHECKPOINT)


def test_inspect_sets_the_label_beside_the_data(run, mislabelled):
    out = run("inspect", mislabelled)
    assert "the label says  GPTQ, checkpoint_format gptq_v2, 4 bits, groups of 128, symmetric, act-order" in out
    assert "the data says   28 quantized modules, 4 bits, groups of 128, no act-order, 18 float tensors" in out
    assert "they differ     the label says act-order, but all groups are consecutive" in out
    assert "more: qzeros are symmetric v1 (0x77777777) but checkpoint_format says gptq_v2; read as v1" in out
    assert "they agree" in run("inspect", CHECKPOINT)


# act-order


@pytest.fixture(scope="module")
def act_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's weights quantized again with act-order."""
    folder = tmp_path_factory.mktemp("act-order")
    floats = Path(shutil.copytree(CHECKPOINT, folder / "floats"))
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        weights = {f"{name}.weight": checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
        weights |= {name: checkpoint.read_float(name) for name in checkpoint.tensors}
    save_file(weights, floats / "model.safetensors")
    write_gptq(folder / "model", floats, sym=False, desc_act=True)
    return folder / "model"


def test_act_order_is_folded_into_gate_and_up_and_the_codes_of_down_are_kept(run, tmp_path, act_order):
    table = rows(run("convert", act_order, tmp_path / "out.gguf"))
    assert table["ffn_down"][1] == "Q4_K"
    assert table["ffn_down"][3] == "100%"
    for kind in set(KINDS) - {"ffn_down"}:
        assert table[kind][3] == "0%"
        assert float(table[kind][5].removesuffix("%")) < 15
    run("verify", tmp_path / "out.gguf", act_order)


def test_inspect_tells_which_act_order_folds(run, act_order):
    out = run("inspect", act_order)
    assert "act-order in 28" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "act-order that folds into groups of 128" in lines["ffn_down"]
    assert "codes carried" in lines["ffn_down"]
    assert "act-order: the smallest type that adds under 15% of its noise" in lines["attn_q"]


def lost(report: Path) -> dict[str, str]:
    """A saved report's tensors without their codes, and why."""
    tensors = json.loads(report.read_text())["tensors"]
    return {t["name"]: " ".join(t["notes"]) for t in tensors if t["how"] == "requantized"}


def test_the_report_says_of_each_tensor_why_its_codes_were_not_kept(run, tmp_path, act_order, small_model):
    out, report = tmp_path / "out.gguf", tmp_path / "report.json"
    scattered = ": codes not kept, act-order groups are scattered over the columns"
    table = run("convert", act_order, out, "--report", report)
    assert "24 tensors could not keep their codes" in table
    assert f"blk.0.attn_q.weight and 23 more{scattered}" in table
    assert len(lost(report)) == 24
    assert all(why.startswith(f"{name}{scattered}") for name, why in lost(report).items())
    run("verify", out, act_order, "--report", report)
    assert all(why.startswith(f"{name}{scattered}") for name, why in lost(report).items())

    write_hqq(tmp_path / "hqq", small_model, 8)
    run("convert", tmp_path / "hqq", out, "--force", "--report", report)
    assert len(lost(report)) == 28
    assert all("codes not kept, Q8_0 has no place for fractional zero points" in why for why in lost(report).values())

    run("convert", CHECKPOINT, out, "--force", "--report", report, "--tensor-type", "attn_q=Q3_K", "--tensor-type",
        "attn_k=F16")  # fmt: skip
    assert len(lost(report)) == 8
    assert "4-bit codes less their zero points do not fit in Q3_K's 8 codes" in lost(report)["blk.0.attn_q.weight"]
    assert "blk.0.attn_k.weight: codes not kept, stored as F16; adds" in lost(report)["blk.0.attn_k.weight"]


def test_act_order_tensors_have_the_type_asked_for(run, tmp_path, act_order):
    run("convert", act_order, tmp_path / "out.gguf", "--actorder-type", "Q6_K")
    found = types(tmp_path / "out.gguf")
    assert found["blk.0.attn_q.weight"] == "Q6_K"
    assert found["blk.0.ffn_down.weight"] == "Q4_K"


# verify


def test_verify_prints_the_table_that_convert_printed(run, tmp_path):
    made = run("convert", CHECKPOINT, tmp_path / "out.gguf")
    read = run("verify", tmp_path / "out.gguf", CHECKPOINT)
    assert read.split("\n\n")[0] == made.split("\n\n")[0]
    assert read.endswith("all within threshold\n")


def test_verify_fails_where_a_tensor_is_damaged(run, tmp_path, auto):
    path = Path(shutil.copy(auto, tmp_path / "bad.gguf"))
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with path.open("r+b") as file:
        for name in ("blk.1.ffn_up.weight", "token_embd.weight"):
            file.seek(int(tensors[name].data_offset) + 20)
            file.write(bytes(100))
    out = run("verify", path, CHECKPOINT, code=1)
    failed = [line.split(":")[0] for line in out.splitlines() if line.startswith("FAILED ")]
    assert failed == ["FAILED token_embd.weight", "FAILED blk.1.ffn_up.weight"]
    assert out.endswith("2 of 46 tensors failed (thresholds: --max-share, --max-nmse)\n")


def test_percentages_above_a_hundred_are_written_in_full(run, tmp_path):
    out = run("convert", CHECKPOINT, tmp_path / "coarse.gguf", "--type", "Q2_K")
    share = next(line for line in out.splitlines() if line.startswith("all that came as codes")).split()[-1]
    assert re.fullmatch(r"\d{3,}%", share)
    out = run("verify", tmp_path / "coarse.gguf", CHECKPOINT, "--max-share", "1.8", code=1)
    assert re.search(r"adds \d{3,}% of the checkpoint's noise; allowed 180%", out)
    assert "e+" not in out


def test_verify_fails_where_a_threshold_is_tight(run, auto):
    out = run("verify", auto, CHECKPOINT, "--max-share", "1e-9", code=1)
    assert out.count("FAILED ") == 28
    out = run("verify", auto, CHECKPOINT, "--max-nmse", "1e-9", code=1)
    assert out.count("FAILED ") == 1


# inspect


def test_inspect_tells_what_convert_would_do(run, auto):
    out = run("inspect", CHECKPOINT)
    assert "2.7 MB in 1 file" in out
    assert "architecture    qwen3, 4 layers" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    for name, found in types(auto).items():
        if name.startswith("blk.0.") and (kind := name.split(".")[2]) in KINDS:
            assert f" {found} " in lines[kind]
            assert "4 bits, groups of 128" in lines[kind]
    assert lines["token_embd"].split()[-1] == "Q8_0"


@pytest.mark.parametrize(
    ("label", "differs"),
    [
        ({"lm_head": True}, True),
        ({"lm_head": False}, False),
        ({"dynamic": {"+:lm_head": {"bits": 4}}}, True),
        ({"dynamic": {"-:lm_head": {}}}, False),
        ({"dynamic": {"lm_head": {"bits": 16}}}, False),
        ({"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 8}}}, True),
    ],
)
def test_inspect_sees_that_a_head_which_the_label_says_is_quantized_is_not(label, differs, run, tmp_path):
    def with_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}

    folder = tied_to(tmp_path / "model", with_head)
    config = folder / "quantize_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | label))
    out = run("inspect", folder)
    line = "they differ     lm_head: the label says that it is quantized, but it is stored as F32"
    assert (line in out.splitlines(), "they agree" in out) == (differs, not differs)


def test_inspect_describes_a_gguf(run, auto):
    out = run("inspect", auto)
    assert "architecture    qwen3, 4 layers, context 1024" in out
    assert "tokenizer       gpt2, pre qwen2, 2048 tokens" in out
    assert "weights         3.7 M in 46 tensors" in out
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["Q4_K", "28"], ["Q8_0", "1"], ["F32", "17"]]


# the Hub


@pytest.mark.parametrize(
    "extra", [[], ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "x/a.json"]]
)
def test_a_hub_id_is_downloaded_weights_once(run, tmp_path, monkeypatch, extra):
    files = [p.name for p in CHECKPOINT.iterdir()]
    asked: list[Any] = []

    def model_info(_api: object, name: str, **_: object) -> SimpleNamespace:
        assert name == "org/name"
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in [*files, *extra]])

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    run("convert", "org/name")
    assert sorted(asked) == sorted(files)
    assert [p.name for p in tmp_path.iterdir()] == ["name.gguf"]


def test_a_branch_of_a_repository_is_downloaded_and_named(run, tmp_path, monkeypatch, capsys):
    asked: list[tuple[str, str]] = []

    def model_info(_api: object, name: str, revision: str, **_: object) -> SimpleNamespace:
        if revision == "none":
            raise huggingface_hub.errors.RevisionNotFoundError(
                "404", response=SimpleNamespace(headers={}, request=None)
            )
        asked.append((name, revision))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=p.name) for p in CHECKPOINT.iterdir()])

    def snapshot_download(name: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    run("convert", "org/name@gptq-4bit-32g-actorder_True")
    assert asked == [("org/name", "gptq-4bit-32g-actorder_True")] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["name-gptq-4bit-32g-actorder_True.gguf"]
    assert main(["convert", "org/name@none"]) == 2
    assert "org/name: has no branch, tag or commit 'none' on the Hub" in capsys.readouterr().err


def test_bin_files_are_downloaded_where_there_is_nothing_else_and_pt_files_last():
    from bridge.checkpoint.files.weight_files import checkpoint_files

    assert checkpoint_files(["pytorch_model.bin", "config.json", "model.onnx", "a.pt"]) == [
        "pytorch_model.bin",
        "config.json",
    ]
    assert checkpoint_files(["llama-7b-4bit.pt", "config.json", "model.onnx"]) == ["llama-7b-4bit.pt", "config.json"]


def test_a_downloaded_model_is_found_without_a_network(run, tmp_path, monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    def snapshot_download(name: str, revision: str | None, local_files_only: bool) -> str:
        return str(CHECKPOINT)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert "qwen3, 4 layers" in run("inspect", "org/name")


# the process


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import bridge", {"numpy", "gguf", "numba", "torch", "transformers"}),
        (
            "from bridge.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            {"numba", "torch", "transformers"},
        ),
        ("from bridge.cli import main; main(['inspect', '.'])", {"numba", "torch", "transformers"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code, heavy):
    done = python("-c", f"{code}\nimport sys; sys.stderr.write(' '.join({heavy} & set(sys.modules)))")
    assert re.sub(r"error: config.json: not found; .*\n", "", done.stderr) == ""


def test_functions_of_the_package_are_functions_whatever_was_imported_before():
    code = "import bridge.conversion.converter, bridge.conversion.verify\n"
    code += "assert callable(bridge.convert) and callable(bridge.verify)"
    assert python("-c", code).stderr == ""
    assert python("-c", "import bridge; bridge.verify; assert callable(bridge.convert)").stderr == ""


@pytest.mark.parametrize("command", ["", "convert", "verify", "inspect", "run", "cache", "plot"])
def test_help_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as done:
        main([*([command] if command else []), "--help"])
    assert done.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge.cli", "inspect", str(CHECKPOINT)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(tmp_path, closed):
    command = f"{sys.executable} -m bridge.cli convert {CHECKPOINT} {tmp_path}/out.gguf --type Q4_0 {closed}"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 0
    assert types(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == "Q4_0"


def test_a_progress_bar_shows_on_a_terminal_and_nowhere_else(tmp_path):
    command = [sys.executable, "-m", "bridge.cli", "convert", str(CHECKPOINT), str(tmp_path / "a.gguf"), "--force"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert shown.lstrip("\r").startswith("converting")
    assert "100%" in shown or "%|" in shown
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stderr == b""

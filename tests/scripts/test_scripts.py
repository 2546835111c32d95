"""The measuring scripts run, and the synthetic checkpoint is a checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import ROOT, shared

SMALL = ["--layers=5", "--hidden=256", "--intermediate=512", "--heads=4", "--kv-heads=2", "--vocab=600"]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"scripts.{script}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options", ["", "--bits 3", "--bits 2 --asym", "--bits 8 --group-size -1", "--asym --act-order"]
)
def test_a_synthetic_checkpoint_reads_as_what_it_was_asked_to_be(options: str, tmp_path: Path) -> None:
    run("make_synthetic", str(tmp_path), *SMALL, *options.split())
    with bridge.open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.modules) == 5 * 7
        tensor = checkpoint.read_module("model.layers.4.mlp.down_proj")
        embeddings = checkpoint.read_float("model.embed_tokens.weight")
    bits = int(options.split()[1]) if "--bits" in options else 4
    assert tensor.bits == bits
    assert tensor.shape == (256, 512)
    assert tensor.sequential == ("act-order" not in options)
    assert len(np.unique(tensor.codes)) > 2**bits * 0.8
    assert (len(np.unique(tensor.zeros)) > 1) == ("asym" in options)
    assert abs(tensor.dequantize().mean()) < 0.01  # a scale
    assert embeddings.std() == pytest.approx(0.02, rel=0.02)


def test_a_synthetic_checkpoint_converts_and_its_tokens_are_llama_cpps(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run("make_synthetic", str(tmp_path / "model"), *SMALL)
    bridge.convert(tmp_path / "model", tmp_path / "model.gguf")
    text = "the time is 12345 now, Größe"
    with LlamaCpp(tmp_path / "model.gguf") as model:
        assert model.tokenize(text) == AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"]
        assert np.isfinite(model.logits(model.tokenize(text))).all()


def test_a_synthetic_mixture_runs_and_a_second_turn_reads_only_what_is_new(tmp_path: Path) -> None:
    shape = ["--layers=1", "--hidden=256", "--intermediate=256", "--heads=4", "--kv-heads=2", "--vocab=4096"]
    run("make_synthetic", str(tmp_path / "model"), *shape, "--experts=4", "--experts-used=2")
    bridge.convert(tmp_path / "model", tmp_path / "m.gguf")
    config = bridge.Model.load(tmp_path / "m.gguf").config
    assert (config.arch, config.experts, config.routing.used) == ("qwen3moe", 4, 2)
    printed = run("speed.bench_model", str(tmp_path / "m.gguf"), "--conversation")
    assert "second turn: 1596 tokens, 33 of them read" in printed


def test_the_benchmark_prints_its_table_for_any_checkpoint(tmp_path: Path) -> None:
    run("make_synthetic", str(tmp_path / "model"), *SMALL)
    printed = run(
        "speed.bench_convert",
        "--checkpoint",
        str(tmp_path / "model"),
        "--runs",
        "1",
        "--no-cold",
        "--json",
        str(tmp_path / "x"),
    )
    assert "| conversion, whole process |" in printed
    assert '"convert_gb_per_second"' in (tmp_path / "x").read_text()


def first_layer(model: Path, folder: Path) -> Path:
    """A copy of a model that has its first layer alone: as good a witness, in a quarter of the time."""
    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith("model.layers.") or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_quantizing_is_measured_beside_ggml_and_is_nearer_to_the_floats(tmp_path: Path) -> None:
    text = shared("text/shakespeare_val.txt").read_text(encoding="utf-8")
    for name, part in {"calibrate": text[:40_000], "test": text[60_000:70_000]}.items():
        (tmp_path / name).write_text(part, encoding="utf-8")
    printed = run(
        "quality.bench_quantize",
        str(first_layer(shared("models/tiny-qwen3"), tmp_path / "model")),
        f"--calibrate={tmp_path / 'calibrate'}",
        f"--test={tmp_path / 'test'}",
        *("--types=Q4_0", "--samples=24", "--length=64", "--windows=4", "--threads=1"),
    )
    own, peer = (float(cell.partition("±")[0]) for cell in printed.splitlines()[-1].split("|")[3:5])
    assert 0 < own < 0.8 * peer


def test_peers_are_measured_without_quantizing(tmp_path: Path) -> None:
    text = shared("text/shakespeare_val.txt").read_text(encoding="utf-8")
    (tmp_path / "text").write_text(text[:40_000], encoding="utf-8")
    run(
        "quality.bench_quantize",
        str(first_layer(shared("models/tiny-qwen3"), tmp_path / "model")),
        *(f"--calibrate={tmp_path / 'text'}", f"--test={tmp_path / 'text'}", f"--json={tmp_path / 'out'}"),
        *("--types=NVFP4", "--peers-only", "--samples=4", "--length=64", "--windows=4", "--threads=1"),
    )
    record = json.loads((tmp_path / "out").read_text())
    ggml, modelopt = record["formats"]
    assert (ggml["maker"], modelopt["maker"]) == ("llama.cpp's quantizer, imatrix", "ModelOpt's rounding")
    assert ggml["kl"] == ggml["texts"]["text"]["kl"] > 0
    assert modelopt["texts"]["text"]["ratio"] == pytest.approx(modelopt["kl"] / ggml["kl"])
    assert record["peer"]["build"].startswith("ggml ")


def test_rounding_is_measured_beside_ggml() -> None:
    printed = run("quality.bench_rounding", str(shared("models/tiny-llama")), "IQ4_NL", "--rows=8", "--rounds=1")
    cells = printed.splitlines()[-1].split("|")[1:-1]
    assert cells[0].strip() == "IQ4_NL"
    assert all(float(cell.split()[1]) < 1 for cell in cells[1:5])


@pytest.mark.exhaustive
def test_the_peak_of_a_synthetic_model_is_near_what_quantize_said(tmp_path: Path) -> None:
    options = ("--shape=tiny", "--tokens=2048", "--memory=4G", "--", "--method=gptaq", "--sweeps=0", "--threads=1")
    row = run("speed.bench_memory", str(tmp_path), *options).splitlines()[-1]
    shape, blocks, tokens, _, _, ratio, _ = row[2:-2].split(" | ")
    assert (shape, blocks, tokens) == ("tiny", "2", "2048")
    assert 0.85 < float(ratio) < 1.15

"""The table of formats: its rows, and that a run continues where it was stopped; the quantizer against the real one."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from scripts.peers.llama import llama_quantizer, tuned
from tests.conftest import ROOT, shared

GOLDENS = ROOT / "tests" / "data" / "converter"


def test_llama_cpps_presets_are_what_its_own_quantizer_writes(tmp_path: Path) -> None:
    for name in ("stablelm", "stablelm-Q4_K_M"):
        (tmp_path / f"{name}.gguf").write_bytes(lzma.decompress((GOLDENS / f"{name}.gguf.xz").read_bytes()))
    llama_quantizer.quantize(tmp_path / "stablelm.gguf", tmp_path / "made.gguf", "Q4_K_M", threads=2)
    made, golden = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("made", "stablelm-Q4_K_M"))
    theirs = {tensor.name: tensor for tensor in golden.tensors}
    assert len(made.tensors) == len(theirs)
    assert {t.tensor_type.name for t in made.tensors} == {"F32", "Q4_K", "Q6_K"}
    for tensor in made.tensors:
        assert tensor.tensor_type == theirs[tensor.name].tensor_type
        assert np.array_equal(tensor.data, theirs[tensor.name].data), tensor.name
    keys = ("general.architecture", "general.file_type", "tokenizer.ggml.tokens")
    assert all(made.fields[key].contents() == golden.fields[key].contents() for key in keys)


def bench(model: Path, work: Path, *options: str, code: int = 0) -> tuple[str, str]:
    """What the script prints, and its complaints."""
    texts = [f"--{name}={shared('text/shakespeare_val.txt')}" for name in ("calibrate", "test")]
    small = ["--samples=4", "--length=64", "--windows=2", f"--work={work}"]
    command = [sys.executable, "-m", "scripts.quality.bench_formats", str(model), *texts, *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_rows_that_are_there_are_printed_and_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()  # holds nothing that could be measured
    text = shared("text/shakespeare_val.txt")
    settings = {"model": str(tmp_path / "model"), "calibrate": str(text), "test": str(text)}
    settings |= {"samples": "4", "length": "64", "windows": "2"}
    quality = {"bpw": 4.5, "bytes": 2_500_000, "perplexity": 60.1, "perplexity_error": 2.0}
    rows = {
        "F16": {"maker": "float", "quality": quality},
        "Q2_K": {"maker": "llama.cpp", "quality": quality | {"kl": 0.0123, "kl_error": 0.001, "same_top": 0.9}},
        "Q8_0": {"maker": "llama.cpp", "quality": {"missing": "nothing here quantizes"}, "speed": {}},
    }
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "rows.json").write_text(json.dumps({"settings": settings, "rows": rows}))
    options = ("--turns=0", f"--json={tmp_path / 'x.json'}", "--only", *rows)
    printed, said = bench(tmp_path / "model", tmp_path / "work", *options)
    assert said == ""
    assert printed.splitlines()[-3:] == [
        "| F16 | 4.50 | 2.5 | 60.100 ± 2.000 |  |  |",
        "| Q8_0 | nothing here quantizes |  |  |  |  |",
        "| Q2_K | 4.50 | 2.5 | 60.100 ± 2.000 | 1.23e-02 ± 1e-03 | 90.0% |",
    ]
    assert [row["name"] for row in json.loads((tmp_path / "x.json").read_text())["formats"]] == ["F16", "Q2_K"]
    _, said = bench(tmp_path / "model", tmp_path / "work", *options, "--windows=3", code=1)
    assert "holds rows of other settings" in said


@pytest.mark.exhaustive
def test_rows_are_measured_once_and_kept(small_model: Path, tmp_path: Path) -> None:
    only = ("--turns=0", "--only", "F16", "Q2_K", "Q4_K, GPTQ on the grid")
    printed, said = bench(small_model, tmp_path / "work", f"--json={tmp_path / 'x.json'}", *only)
    assert said.count("...") == 3
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    assert [row[0] for row in table] == ["format", "F16", "Q2_K", "Q4_K, GPTQ on the grid"]
    bits, divergences = [float(row[1]) for row in table[1:]], [float(row[4].split()[0]) for row in table[2:]]
    assert bits[0] > 16 > bits[2] > bits[1]
    assert divergences[0] > 10 * divergences[1] > 0
    again, said = bench(small_model, tmp_path / "work", *only)
    assert again == printed
    assert "..." not in said
    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["maker"].split()[0] for row in record["formats"]] == ["float", "llama.cpp's", "gguf-bridge"]


@pytest.mark.exhaustive
def test_speeds_are_of_both_runtimes_and_of_another_models_shapes(small_model: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    try:
        tuned.download(packages)
    except RuntimeError as problem:
        pytest.skip(str(problem))
    shapes = ["--layers=5", "--hidden=256", "--intermediate=512", "--heads=4", "--kv-heads=2", "--vocab=4096"]
    command = [sys.executable, "-m", "scripts.make_synthetic", str(tmp_path / "shape"), *shapes]
    subprocess.run(command, check=True, cwd=ROOT)
    options = "--turns=1", f"--speed-of={tmp_path / 'shape'}", f"--packages={packages}", "--only", "F16", "Q4_K_M"
    printed, _ = bench(small_model, tmp_path / "work", *options)
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith(("| F16", "| Q4_K_M"))]
    assert len(rows) == 2
    assert all(float(cell) > 0 for row in rows for cell in row[6:])

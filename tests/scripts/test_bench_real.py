"""The comparison on real models: its texts, its tokens, what a contender costs, and that a run continues."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import ROOT, shared
from tests.scripts.test_scripts import first_layer

LIBRARIES = os.environ.get("BRIDGE_NODE_LLAMA_CPP")


def bench(model: Path, work: Path, *options: str) -> tuple[str, str]:
    """What the script prints, and what it says while it works."""
    text = shared("text/shakespeare_val.txt")
    small = [f"--calibrate={text}", "--samples=6", "--length=64", "--windows=2", "--window=48", f"--work={work}"]
    small += [
        "--no-llama-quantize",
        "--types=Q4_0",
        "--methods=gptq",
        "--over=convert --imatrix",
        "--kinds",
        "plays",
        "python",
    ]
    command = [sys.executable, "-m", "scripts.quality.bench_real", str(model), *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_files_are_made_and_measured_once_and_drawn(tmp_path: Path) -> None:
    from bridge.cli.plot import plot

    model = first_layer(shared("models/tiny-qwen3"), tmp_path / "model")
    text = f"--text=plays={shared('text/shakespeare_train.txt')}"
    record = tmp_path / "x.json"
    printed, said = bench(model, tmp_path / "work", text, f"--json={record}", "--llama-cpp")
    assert said.count(": made ...") == 2
    assert said.count(": plays ...") == 2
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "Q4_0" in line]
    assert [row[1] for row in rows[:2]] == ["convert --imatrix", "quantize --method gptq"]
    rounded, ratio = (float(row[4].split()[0]) for row in rows[:2])  # of the plays, which the model was trained on
    assert 0 < rounded < 0.1
    assert 0.1 < ratio < 1
    again, said = bench(model, tmp_path / "work", text, "--again", "convert*")
    assert said.count(": made ...") == 1
    assert said.count(": plays ...") == 1  # the same bytes, but a new file
    assert [line.split("|")[3:7] for line in again.splitlines()[5:7]] == [
        line.split("|")[3:7] for line in printed.splitlines()[5:7]
    ]

    found = json.loads(record.read_text())
    assert [row["maker"] for row in found["formats"]] == [
        "gguf-bridge convert --imatrix", "gguf-bridge quantize --method gptq"
    ]  # fmt: skip
    by_arithmetic = found["formats"][0]["texts"]
    there, here = (by_arithmetic[name]["plays"] for name in ("llama.cpp", "float32"))
    assert here["kl"] == pytest.approx(there["kl"], rel=0.3)
    assert here["kl"] != there["kl"]
    assert found["formats"][1]["texts"]["float32"]["plays"]["ratio"] == pytest.approx(ratio, abs=0.001)
    assert plot(record, tmp_path / "x.svg").exists()


def test_token_files_hold_back_what_the_texts_would(tmp_path: Path) -> None:
    from bridge.quantize.settings import Calibration
    from bridge.quantize.text.mixture import calibration_sequences
    from bridge.quantize.text.sources import sources_of
    from bridge.quantize.text.texts import load_tokenizer
    from scripts.benchlib.contenders import Tokens

    model, plays = shared("models/tiny-qwen3"), shared("text/shakespeare_val.txt")
    texts = [f"{plays}:0.7", str(shared("text/wiki_test.txt"))]
    tokens = Tokens(tmp_path, model, Calibration(texts, 10, 32))
    expected = calibration_sequences(sources_of(texts), load_tokenizer(model), 10, 32)
    assert expected.held == 3
    options = tokens.options()
    given = calibration_sequences(sources_of(options[1:3]), None, int(options[4]), int(options[6]))
    assert (given.held, given.tokens.tolist()) == (3, expected.tokens.tolist())
    assert tokens.sequences.tolist() == expected.tokens.tolist()


def test_a_contenders_memory_is_its_own_and_its_failure_is_told(tmp_path: Path) -> None:
    from scripts.benchlib.contenders import Contender, ModelFiles

    made = ModelFiles(tmp_path, threads=1)
    held = np.ones(300 << 20, np.uint8)  # by the process that measures
    work = "import sys; data = bytearray(b'x') * (100 << 20); sum(range(10**7)); open(sys.argv[1], 'wb').write(b'made')"
    contender = Contender("bytes", "nobody", "Q4_0", ([sys.executable, "-c", work], []))
    cost = made.cost(contender)
    assert isinstance(cost, dict)
    assert made.path(contender).read_bytes() == b"made"
    assert 100 << 20 < cost["peak_bytes"] < held.nbytes
    assert cost["cpu_seconds"] > 0.05
    assert made.cost(contender) == cost
    failing = Contender("fails", "nobody", "Q4_0", ([sys.executable, "-c", "raise SystemExit('no such type')"], []))
    assert made.cost(failing) == "no such type"


def test_figures_are_of_tokens_and_errors_of_windows() -> None:
    from scripts.benchlib.token_kl import TokenKl

    kl = np.array([[0.0, 0.2, 0.1], [0.3, 0.5, 0.4]])
    figures = TokenKl(kl, kl < 0.35).figures()
    assert figures["kl"] == pytest.approx(0.25)
    assert figures["kl_error"] == pytest.approx(0.15)  # of the means 0.1 and 0.4
    assert figures["median"] == pytest.approx(0.25)
    assert figures["p99"] == pytest.approx(0.495)
    assert figures["same_top"] == pytest.approx(4 / 6)
    half = TokenKl(kl / 2, kl < 1)
    assert half.windows.ratio(TokenKl(kl, kl < 1).windows) == pytest.approx((0.5, 0))


def test_a_size_is_compared_with_the_best_file_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # where it finds benchlib, run as a program
    from scripts.benchlib.contenders import Contender
    from scripts.benchlib.divergence import Divergence
    from scripts.quality.bench_real import Row, compare

    def row(name: str, format: str, nbytes: int, kl: float, sized: bool = False) -> Row:
        found = Row.__new__(Row)
        found.contender, found.bytes, found.base = Contender(name, "", format, ([], []), sized), nbytes, None
        found.all_texts = lambda: Divergence(np.array([kl]))  # type: ignore[method-assign]
        return found

    peers = [
        row("peer", "Q2_K", 1000, 0.3), row("peer", "Q3_K", 1500, 0.1), row("peer", "IQ1_S", 800, 2.0),
        row("peer", "Q4_0", 999, 0.4),
    ]  # fmt: skip
    exact, between, below = (
        row("ours", size, nbytes, 0.2, True) for size, nbytes in (("1000", 990), ("1.4K", 1399), ("799", 799))
    )
    preset = row("ours", "Q3_K", 1500, 0.05)
    compare([*peers, exact, between, below, preset], "peer")
    assert exact.base is between.base is peers[0]  # although the file has 10 bytes fewer
    assert below.base is None
    assert preset.base is peers[1]
    assert peers[0].base is None


def test_windows_lie_over_a_whole_text(tmp_path: Path) -> None:
    from bridge.quantize.text.texts import load_tokenizer
    from scripts.benchlib.real_texts import text_of, windows_of

    tokenizer = load_tokenizer(shared("models/tiny-qwen3"))
    text = text_of("python", tmp_path) + text_of("manual", tmp_path)
    windows = windows_of(text, tokenizer, 5, 40)
    assert windows.shape == (5, 40)
    assert text.startswith(tokenizer.decode(windows[0]))
    assert text.endswith(tokenizer.decode(windows[-1]))
    with pytest.raises(ValueError, match="take 4000"):
        windows_of("short", tokenizer, 100, 40)


def test_a_dithered_models_weights_leave_the_grid_by_half_a_step_at_most(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from scripts.benchlib.real_models import float_model

    dice = np.random.default_rng(1)
    codes = dice.integers(0, 16, (64, 4, 32)).astype(np.float32)
    codes[..., :2] = 0, 15  # as Q4_1 leaves them
    steps = dice.uniform(0.01, 1, (64, 4, 1)).astype(np.float32)
    matrix, norm = (codes * steps - 3 * steps).reshape(64, 128), np.ones(128, np.float32)
    (tmp_path / "smollm2").mkdir()
    save_file({"matrix": matrix, "norm": norm}, tmp_path / "smollm2" / "model.safetensors")

    found = load_file(float_model("smollm2-dithered", tmp_path, tmp_path) / "model.safetensors")
    moved = (found["matrix"] - matrix).reshape(codes.shape) / steps
    assert np.abs(moved).max() <= 0.5001
    assert np.isclose(moved.std(), 12**-0.5, rtol=0.02)
    assert np.array_equal(found["norm"], norm)
    assert np.array_equal(load_file(tmp_path / "smollm2" / "model.safetensors")["matrix"], matrix)


def test_llama_quantize_writes_what_it_always_has_and_heeds_an_imatrix(tmp_path: Path) -> None:
    from bridge.gguf_file.imatrix import write_imatrix
    from scripts.peers.llama import llama_quantize

    if not LIBRARIES:
        pytest.skip("set BRIDGE_NODE_LLAMA_CPP to the folder of libllama in npm's @node-llama-cpp package")
    goldens = ROOT / "tests" / "data" / "converter"
    for name in ("stablelm", "stablelm-Q4_K_M"):
        (tmp_path / f"{name}.gguf").write_bytes(lzma.decompress((goldens / f"{name}.gguf.xz").read_bytes()))
    source, golden = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("stablelm", "stablelm-Q4_K_M"))
    heavy = {"blk.0.ffn_down.weight", "blk.0.ffn_up.weight"}
    columns = {t.name: int(t.shape[0]) for t in source.tensors if t.name in heavy}
    squares = {name: (np.geomspace(1e-3, 1, n, dtype=np.float32)[None], np.array([64])) for name, n in columns.items()}
    write_imatrix(tmp_path / "imatrix.gguf", squares, 64, ["none"])
    for imatrix in (None, tmp_path / "imatrix.gguf"):
        given = Path(LIBRARIES), tmp_path / "stablelm.gguf", tmp_path / "made.gguf", "Q4_K_M"
        llama_quantize.quantize(*given, imatrix=imatrix)
        made = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
        other = {t.name for t in golden.tensors if not np.array_equal(t.data, made[t.name].data)}
        assert other == (heavy if imatrix else set())

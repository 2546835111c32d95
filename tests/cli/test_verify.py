"""gguf-bridge verify: the same table as convert's, and which tensors fail."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import gguf

from tests.conftest import CHECKPOINT


def test_verify_prints_the_table_that_convert_printed(run, tmp_path):
    made = run("convert", CHECKPOINT, tmp_path / "out.gguf")
    read = run("verify", tmp_path / "out.gguf", CHECKPOINT)
    assert read.split("\n\n")[0] == made.split("\n\n")[0]
    assert read.splitlines()[-1].startswith("OK: every tensor is as close")


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

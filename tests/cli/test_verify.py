"""gguf-bridge verify: the same table as convert's, and which tensors fail."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import gguf
import pytest

import bridge
from tests.conftest import CHECKPOINT
from tests.support.raw import edit_raw


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


def test_weights_that_became_floats_are_not_said_to_be_requantized(run, tmp_path):
    bridge.repack(CHECKPOINT, tmp_path / "floats", "floats")
    out = run("verify", tmp_path / "floats", CHECKPOINT)
    assert re.search(r"and 27 more: codes not kept, stored as \S+16;", out)
    assert "requantized" not in out


def test_blocks_of_a_reference_are_named_by_their_type(run, auto):
    out = run("verify", auto, auto)
    assert re.search(r"^attn_q +4 +Q4_K +\S+ +came as Q4_K +exact", out, re.MULTILINE)


def test_a_report_of_verify_says_read(auto):
    assert bridge.verify(auto, CHECKPOINT).table().endswith(f"read {auto}")


def test_windows_without_a_text_are_refused(refused, auto):
    assert "--windows is of a text; give --text too" in refused("verify", auto, CHECKPOINT, "--windows", 2)


@pytest.fixture
def v2(tmp_path):
    """The checkpoint as GPTQ v2."""
    bridge.repack(CHECKPOINT, tmp_path / "v2", "gptq_v2")
    return tmp_path / "v2"


def test_two_checkpoints_have_the_same_table(run, v2):
    out = run("verify", v2, CHECKPOINT)
    assert re.search(r"^all that came as codes +28 +4 bits +\S+ +100% +exact +0%$", out, re.MULTILINE)
    assert re.search(r"^\d\.\d MB gptq -> \d\.\d MB gptq_v2$", out, re.MULTILINE)
    assert f"read {v2 / 'model.safetensors'}\n" in out
    assert out.splitlines()[-1].startswith("OK: every tensor is as close")


def test_exact_fails_where_a_weight_differs_at_all(run, v2, auto):
    assert run("verify", v2, CHECKPOINT, "--exact").endswith("OK: every tensor is equal, weight by weight (--exact)\n")
    out = run("verify", auto, CHECKPOINT, "--exact", code=1)
    assert re.search(
        r"^FAILED blk\.0\.attn_q\.weight: is not equal: weights differ by up to \S+, NMSE \S+$", out, re.MULTILINE
    )
    assert out.endswith(" of 46 tensors failed (thresholds: --exact)\n")

    def damage(tensors):
        entry, data = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = entry, bytes([data[0] ^ 1]) + data[1:]

    edit_raw(v2 / "model.safetensors", damage)
    assert "OK: every tensor" in run("verify", v2, CHECKPOINT)
    out = run("verify", v2, CHECKPOINT, "--exact", code=1)
    assert [line.split(":")[0] for line in out.splitlines() if "FAILED" in line] == ["FAILED output_norm.weight"]


def test_a_text_is_predicted_by_both(run, v2, auto, tmp_path):
    (tmp_path / "text.txt").write_text("KING RICHARD: Once upon a time. " * 40)
    text = ["--text", tmp_path / "text.txt", "--windows", "2", "--length", "32"]
    out = run("verify", v2, CHECKPOINT, *text)
    assert "30 predictions in 2 windows of 32 tokens: KL divergence from the reference 0.000000 +- 0.000000 nats" in out
    out = run("verify", auto, CHECKPOINT, *text)
    divergence = re.search(r"reference (\S+) \+- (\S+) nats a token, same top token (\S+)%, perplexity", out)
    assert divergence is not None
    assert 0 <= float(divergence[1]) < 1e-3


def test_a_report_replaces_no_file_of_either_checkpoint(refused, v2):
    for folder in (v2, CHECKPOINT):
        assert "is in the checkpoint's folder" in refused("verify", v2, CHECKPOINT, "--report", folder / "new.json")

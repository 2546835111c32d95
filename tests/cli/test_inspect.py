"""gguf-bridge inspect: what a checkpoint holds and what convert would make of it; what a GGUF holds."""

from __future__ import annotations

from tests.conftest import CHECKPOINT
from tests.support.command_line import KINDS, types


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


def test_inspect_sets_the_label_beside_the_data(run, mislabelled):
    out = run("inspect", mislabelled)
    assert "the label says  GPTQ, checkpoint_format gptq_v2, 4 bits, groups of 128, symmetric, act-order" in out
    assert "the data says   28 quantized modules, 4 bits, groups of 128, no act-order, 18 float tensors" in out
    assert "they differ     the label says act-order, but all groups are consecutive" in out
    assert "more: qzeros are symmetric v1 (0x77777777) but checkpoint_format says gptq_v2; read as v1" in out
    assert "they agree" in run("inspect", CHECKPOINT)


def test_inspect_describes_a_gguf(run, auto):
    out = run("inspect", auto)
    assert "architecture    qwen3, 4 layers, context 1024" in out
    assert "tokenizer       gpt2, pre qwen2, 2048 tokens" in out
    assert "weights         3.7 M in 46 tensors" in out
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["Q4_K", "28"], ["Q8_0", "1"], ["F32", "17"]]

"""Act-order on the command line: folded where the GGUF allows it, otherwise requantized and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import bridge
from tests.conftest import CHECKPOINT
from tests.support.command_line import KINDS, rows, types
from tests.support.encode import write_gptq
from tests.support.encode_formats import write_hqq


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
    assert "act-order: the smallest type that adds under 15% of the checkpoint's noise" in lines["attn_q"]


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

"""Which tensors a text calibrates: the plan says it before anything runs, and the report of the run says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.plan import PlannedTensor
from bridge.conversion.writing.report import CALIBRATED, CARRIED, FLOAT, REQUANTIZED
from bridge.errors import BridgeError
from bridge.quantize.settings import Calibration
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model

OUTCOMES = {"carried": CARRIED, "requantized": REQUANTIZED, "calibrated": CALIBRATED, "rounded": FLOAT}
METHODS = ("rtn", "imatrix", "gptq", "gptaq", "two-sided")  # awq is for checkpoints


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    return {
        "floats": save_model(folder / "floats", "LlamaConfig", num_hidden_layers=1),
        "tied experts": save_model(
            folder / "experts",
            "Qwen3MoeConfig",
            tie_word_embeddings=True,
            num_hidden_layers=1,
            norm_topk_prob=True,
            **experts,
        ),
        "codes": CHECKPOINT,
    }


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 300, (8, 32)))
    return path


def few(tokens: Path, method: str) -> Calibration:
    return Calibration(tokens, samples=8, length=32, sweeps=0, method=method)


def outcome(tensor: PlannedTensor) -> str | None:
    """What the report will say of a quantized tensor; None of others."""
    ways = set(tensor.how)
    return OUTCOMES[tensor.how[0]] if len(ways) == 1 and ways <= OUTCOMES.keys() else None


@pytest.mark.parametrize("name", ["floats", "tied experts", "codes"])
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_says_what_the_report_of_the_run_says(
    models: dict[str, Path], tokens: Path, name: str, method: str, tmp_path: Path
) -> None:
    types = [("ffn_up", "Q3_K"), ("attn_v", "Q8_0"), ("token_embd", "Q4_0"), ("output.weight", "Q8_0")]
    types = types if name != "tied experts" else types[:-1]
    plan = plan_checkpoint(models[name], tensor_types=types, calibrate=few(tokens, method))
    report = bridge.convert(models[name], tmp_path / "m.gguf", tensor_types=types, calibrate=few(tokens, method))
    planned = {t.name: what for t in plan.tensors if (what := outcome(t)) is not None}
    outcomes = {t.name: t.outcome for t in report.tensors if t.name in planned}
    assert {t.name: t.type for t in plan.tensors} == {t.name: t.type for t in report.tensors}
    assert outcomes == planned
    calibrated = {name for name, what in planned.items() if what == CALIBRATED}
    assert (not calibrated) == (method == "imatrix")
    assert "output.weight" not in calibrated  # of 8 bits
    assert ("token_embd.weight" in calibrated) == (method == "two-sided")


def test_a_plan_may_be_made_with_a_text_and_executed_without_and_the_other_way_around(
    models: dict[str, Path], tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--type", "Q4_0", "--calibrate", str(tokens), "--method", "gptq"]
    assert main(["plan", str(models["floats"]), "-o", str(tmp_path / "with.json"), *asked]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert next(row for row in rows if row.startswith("ffn_down")).endswith("came as floats, calibrated")
    assert next(row for row in rows if row.startswith("token_embd")).endswith("came as floats")
    plan_checkpoint(models["floats"], out=tmp_path / "without.json", type="Q4_0")
    hows = {
        file: {entry["how"] for entry in json.loads((tmp_path / file).read_text())["tensors"] if "ffn" in entry["name"]}
        for file in ("with.json", "without.json")
    }
    assert hows == {"with.json": {"calibrated", "as it came"}, "without.json": {"rounded", "as it came"}}
    for file in hows:
        for calibrate, expected in ((None, FLOAT), (few(tokens, "gptq"), CALIBRATED)):
            report = bridge.convert(out=tmp_path / "m.gguf", plan=tmp_path / file, calibrate=calibrate, force=True)
            assert {t.outcome for t in report.tensors if t.kind == "ffn_down"} == {expected}


def test_floats_cannot_become_4_bit_floats_where_a_plan_with_a_text_would_not_calibrate_them(
    models: dict[str, Path], tokens: Path
) -> None:
    for kind, calibrate in (("token_embd", few(tokens, "two-sided")), ("attn_q", None)):
        with pytest.raises(BridgeError, match=f"{kind}.weight: floats are rounded to MXFP4 in whole matrices"):
            plan_checkpoint(models["floats"], tensor_types=[(kind, "MXFP4")], calibrate=calibrate)

"""What `quantize` says before it begins and after each block, and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from bridge.cli import main
from bridge.conversion.converter import convert
from bridge.errors import BridgeError
from bridge.quantize.run import calibrate
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import save_model

PLAN = r"needs [\d.]+ [MG]B of memory and [\d.]+ MB of disk, about .* on this machine"
BLOCK = r"block \d of 3: [\d.]+ (s|min), \d+ tokens a second; error 0\.\d\d of rounding to nearest \(.*\)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("log")
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (64, 32)))
    return save_model(folder / "model", "LlamaConfig", num_hidden_layers=2), tokens


@pytest.mark.parametrize("format", [(), ("--format", "gptq_v2", "--group-size", "32")], ids=["gguf", "checkpoint"])
def test_each_block_is_said_and_reported_beside_rounding_to_nearest(
    model: tuple[Path, Path], format: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    command = ["quantize", model[0], tmp_path / "out", "--calibrate", model[1], "--sequence-length", "32", *format]
    assert main([*map(str, command), "--sweeps", "1", "--memory", "20G", "--report", str(report)]) == 0
    said = capfd.readouterr().err.splitlines()
    assert any(re.fullmatch(PLAN, line) for line in said)
    found = json.loads(report.read_text())["blocks"]
    assert [own["block"] for own in found] == ([0, 1] if format else [0, 1, 2])
    lines = [line for line in said if line.startswith("block ")]
    assert len(lines) == len(found)
    if not format:
        assert all(re.match(BLOCK, line) for line in lines)
    assert "left" in lines[0]
    assert "left" not in lines[-1]
    for own in found:
        assert own["seconds"] >= 0
        assert_allclose(own["tokens_a_second"], 2048 / max(own["seconds"], 1e-3), rtol=0.2)
        for name, layer in own["layers"].items():
            assert layer["error"] > 0, name
            assert layer["tokens"] == 2048
        # with A of the outputs, a layer may lose more by H alone
        assert sum(x["error"] for x in own["layers"].values()) < sum(x["nearest"] for x in own["layers"].values())
    assert [len(own["layers"]) for own in found[:2]] == ([7, 7] if format else [8, 7])  # a GGUF's embeddings too
    assert report.read_text().startswith('{\n "checkpoint": ')  # so that another run may replace it


def test_a_resumed_run_reports_the_blocks_that_were_finished_before(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(**options: Any) -> Calibration:
        return Calibration(model[1], length=32, sweeps=0, method="gptq", **options)

    def stop(done: int, _total: int, _name: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model[0], tmp_path / "out.gguf", type="Q4_0", calibrate=settings(progress=stop))
    with monkeypatch.context() as changed:
        changed.setattr(calibrate, "_solver", lambda: "other sources")
        with pytest.raises(BridgeError, match="a run with other options, inputs or version"):
            convert(model[0], tmp_path / "out.gguf", type="Q4_0", calibrate=settings())
    lines: list[str] = []
    report = convert(model[0], tmp_path / "out.gguf", type="Q4_0", calibrate=settings(say=lines.append))
    assert [own["block"] for own in report.blocks] == [0, 1, 2]
    assert [line.split(":")[0] for line in lines[1:]] == ["block 2 of 3", "block 3 of 3"]
    assert len(report.blocks[0]["layers"]) == 7

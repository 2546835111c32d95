"""Layers whose codes a format does not hold, quantized with a text on their way from a GGUF to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.conversion.gguf_input.gguf_source import GgufSource
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import save_model

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    bridge.convert(save_model(folder, "LlamaConfig"), folder / "model.gguf", type="Q4_1")
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 300, (8, 32)))
    return path


def values(folder: Path) -> dict[str, np.ndarray]:
    with bridge.open_checkpoint(folder) as ckpt:
        return {module: ckpt.reader.read(module).dequantize() for module in ckpt.modules}


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors", "hqq"])
def test_layers_that_a_format_does_not_hold_are_calibrated(
    format: str, model: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"bits": 3} if format == "hqq" else {"bits": 4}  # HQQ holds all codes of Q4_1
    options = ["--calibrate", str(tokens), "--sequence-length", "32", "--method", "gptq", "--sweeps", "0"]
    command = ["export", str(model), str(tmp_path / "one"), "--format", format, "--bits", str(size["bits"])]
    command += ["--config", str(model.parent)]
    assert main([*command, *options]) == 0
    assert "layers calibrated on 256 tokens" in capsys.readouterr().out
    settings = Calibration(tokens, length=32, method="gptq", sweeps=0)
    done = bridge.export(model, tmp_path / "two", format, config=model.parent, calibrate=settings, **size)
    layers = [t for t in done.tensors if t.bits]
    assert {(t.how, t.bits, t.group_size) for t in layers} == {("calibrated", size["bits"], 32)}
    assert "calibrated" in done.summary()
    found = [values(tmp_path / name) for name in ("one", "two")]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".layers"]
    if format != "gptq":  # v1 has no zero point of 0, and loses a step at the other end for it
        source = GgufSource(read_gguf(model), tmp_path / "two", "F32")
        for t in layers:
            weights = source.read(t.name)
            held = found[1][t.name.removesuffix(".weight")]
            assert np.square(held - weights).sum() / np.square(weights).sum() == pytest.approx(t.nmse, rel=1e-3)


def test_what_cannot_be_calibrated_is_said(model: Path, tokens: Path, tmp_path: Path) -> None:
    def refused(match: str, format: str = "awq", bits: int | None = 4, **options: object) -> None:
        settings = Calibration(tokens, length=32, **options)  # type: ignore[arg-type]
        with pytest.raises(BridgeError, match=match):
            bridge.export(model, tmp_path / "new", format, bits=bits, config=model.parent, calibrate=settings)
        assert not any(tmp_path.iterdir())

    refused("method='awq': changes norms too", method="awq")
    refused("blocks=.*: all blocks are calibrated in one run", blocks=(1, 2), feed="float")
    refused("act_order='free': awq has no column permutation", act_order="free")
    refused("mlx holds the codes of all its layers; leave out calibrate", "mlx", None)
    refused("calibrate: floats are not rounded; choose another format", "floats", None)

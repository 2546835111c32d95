"""A run that is killed goes on at the block that it had come to, and gives the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.conversion.converter import convert
from bridge.quantize.float_model import FloatModel
from bridge.quantize.kept_inputs import KeptInputs
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import save_model


class Killed(BaseException):
    """No handler of errors sees it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of three blocks, and tokens."""
    folder = tmp_path_factory.mktemp("resume")
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (4, 32)))
    return save_model(folder / "model", "LlamaConfig", num_hidden_layers=3), tokens


def quantized(model: tuple[Path, Path], out: Path, kill_at: int | None = None) -> list[str]:
    """What a run says; it is killed when so many layers are done."""
    said: list[str] = []

    def progress(done: int, _all: int, text: str) -> None:
        said.append(text)
        if done == kill_at:
            raise Killed

    convert(model[0], out, type="Q4_0", calibrate=Calibration(model[1], length=32, sweeps=0, progress=progress))
    return said


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The blocks whose weights were loaded since."""
    numbers: list[int | None] = []
    load = FloatModel.load

    def noted(self: Any, block: int | None) -> None:
        numbers.append(block)
        load(self, block)

    monkeypatch.setattr(FloatModel, "load", noted)
    return numbers


def test_a_killed_run_goes_on_at_its_block_with_its_gradients_and_gives_the_same_bytes(
    model: tuple[Path, Path], tmp_path: Path, loaded: list[int | None]
) -> None:
    assert any("gradients" in text for text in quantized(model, tmp_path / "whole.gguf"))
    with pytest.raises(Killed):
        quantized(model, tmp_path / "again.gguf", kill_at=17)  # three layers of the last block
    kept = {file.name for file in (tmp_path / "again.gguf.layers").iterdir() if file.name.startswith("inputs")}
    assert kept == {"inputs.json", "inputs-00002-00000.safetensors", "inputs-00002-00000-float.safetensors"}
    loaded.clear()
    said = quantized(model, tmp_path / "again.gguf")
    assert not any("gradients" in text for text in said)
    assert [n for n in loaded if n is not None] == [0, 2]  # the first one shows what the blocks are called with
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not (tmp_path / "again.gguf.layers").exists()


def test_inputs_that_are_damaged_or_another_runs_are_not_used(tmp_path: Path) -> None:
    import torch

    kept = KeptInputs(tmp_path, "job")
    assert kept.block(1, True) == 0
    x = torch.randn(2, 3, 4).to(torch.bfloat16)
    for block in (1, 2):
        for floats in (False, True):
            kept.write(block, 0, floats, x + floats)
        kept.finish(block)
    assert kept.block(1, True) == 2
    assert torch.equal(kept.read(2, 0, False), x)
    assert len(list(tmp_path.iterdir())) == 3
    assert KeptInputs(tmp_path, "other").block(1, True) == 0
    assert kept.block(2, True) == 0
    file = tmp_path / "inputs-00002-00000-float.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert kept.block(1, True) == 0
    assert kept.block(1, False) == 2

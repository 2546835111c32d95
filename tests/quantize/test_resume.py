"""A run that is killed goes on at the block that it had come to, and gives the same file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.conversion.converter import convert
from bridge.errors import BridgeError
from bridge.quantize.layer_store import read_tensors
from bridge.quantize.model import float_model
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.stored_inputs import StoredInputs
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


@pytest.fixture
def in_bfloat16(model: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same with weights in bfloat16."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model[0], tmp_path / "bfloat16")
    weights = load_file(folder / "model.safetensors")
    save_file({n: w.bfloat16() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder, model[1]


def quantized(model: tuple[Path, Path], out: Path, kill_at: int | str | None = None) -> list[str]:
    """What a run says; it is killed when so many layers are done, or when it says this."""
    said: list[str] = []

    def progress(done: int, _all: int, text: str) -> None:
        said.append(text)
        if kill_at in (done, text):
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


def test_a_run_that_is_killed_among_its_gradients_goes_on_at_their_block(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    quantized(model, tmp_path / "whole.gguf")
    with pytest.raises(Killed):
        quantized(model, tmp_path / "again.gguf", kill_at="gradients: model.layers.0.mlp.down_proj")
    folder = tmp_path / "again.gguf.layers"
    assert {file.name for file in folder.glob("gradients*")} == {"gradients.json", "gradients-00001-00000.safetensors"}
    said = quantized(model, tmp_path / "again.gguf")
    assert {text.split(".")[2] for text in said if text.startswith("gradients: model.layers")} == {"0"}
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not folder.exists()


def test_a_model_in_bfloat16_goes_on_in_it_but_not_on_a_cpu_that_does_not_multiply_it(
    in_bfloat16: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = [True]
    monkeypatch.setattr(float_model.torch.cpu, "_is_avx512_bf16_supported", lambda: fast[0])
    monkeypatch.setattr(float_model.torch.cpu, "_is_amx_tile_supported", lambda: False)
    out = tmp_path / "again.gguf"
    quantized(in_bfloat16, tmp_path / "whole.gguf")
    with pytest.raises(Killed):
        quantized(in_bfloat16, out, kill_at=17)
    files = list(tmp_path.glob("again.gguf.layers/inputs-*"))
    assert len(files) == 2
    for file in files:
        kept = read_tensors(file)
        assert kept is not None
        assert kept[1]["dtype"] == "bfloat16"
        assert kept[0]["x"].nbytes == 2 * 4 * 32 * 256
    fast[0] = False
    with pytest.raises(BridgeError, match="holds layers of a run with other options, inputs or version"):
        quantized(in_bfloat16, out)
    fast[0] = True
    quantized(in_bfloat16, out)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_codes_found_in_bfloat16_serve_as_well_as_those_found_in_float32(
    in_bfloat16: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for fast in (True, False):
        monkeypatch.setattr(float_model.torch.cpu, "_is_avx512_bf16_supported", lambda own=fast: own)
        monkeypatch.setattr(float_model.torch.cpu, "_is_amx_tile_supported", lambda: False)
        settings = Calibration(in_bfloat16[1], length=32, sweeps=0, method="gptaq")
        report = convert(in_bfloat16[0], tmp_path / f"{fast}.gguf", type="Q4_0", calibrate=settings)
        errors.append([own["error"] for block in report.blocks for own in block["layers"].values()])
    assert errors[0] != errors[1]
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.2)


def test_inputs_that_are_damaged_or_another_runs_are_not_used(tmp_path: Path) -> None:
    import torch

    kept = StoredInputs(tmp_path, "job")
    assert kept.block(1, True) == 0
    x = torch.randn(2, 3, 4).to(torch.bfloat16)
    for block in (1, 2):
        for floats in (False, True):
            kept.write(block, 0, floats, x + floats)
        kept.finish(block)
    assert kept.block(1, True) == 2
    assert torch.equal(kept.read(2, 0, False), x)
    assert len(list(tmp_path.iterdir())) == 3
    assert StoredInputs(tmp_path, "other").block(1, True) == 0
    assert kept.block(2, True) == 0
    file = tmp_path / "inputs-00002-00000-float.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert kept.block(1, True) == 0
    assert kept.block(1, False) == 2

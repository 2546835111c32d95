"""A model's blocks quantized in parts, by several runs, each with inputs from the float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.converter import convert
from bridge.errors import BridgeError
from bridge.quantize.settings import Calibration
from tests.support.tiny_models import save_model

TYPES: dict[str, Any] = {"type": "Q4_0", "tensor_types": {"output": "Q4_0"}}  # the head too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of three blocks, and tokens."""
    folder = tmp_path_factory.mktemp("parts")
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 300, (4, 32)))
    return save_model(
        folder / "model", "LlamaConfig", num_hidden_layers=3, hidden_size=64, intermediate_size=64
    ), tokens


def calibration(tokens: Path, **options: Any) -> Calibration:
    return Calibration(tokens, length=32, sweeps=0, feed="float", **options)


def test_the_parts_of_a_model_give_the_bytes_of_one_run(model: tuple[Path, Path], tmp_path: Path) -> None:
    convert(model[0], tmp_path / "whole.gguf", **TYPES, calibrate=calibration(model[1]))
    out = tmp_path / "m.gguf"
    seen: list[int] = []
    for number in (2, 1):
        done = convert(model[0], out, **TYPES, calibrate=calibration(model[1], blocks=(number, 2)))
        seen.append(len(list((tmp_path / f"m.gguf.layers-{number}-of-2").glob(f"{'?' * 24}.safetensors"))))
        assert done.outputs == []
        assert f"part {number} of 2" in done.table()
        assert not out.exists()
    assert seen == [15, 8]  # seven layers in each block; a head, and the embeddings
    said: list[str] = []
    last = calibration(model[1], progress=lambda done, count, text: said.append(f"{done} of {count} {text}"))
    convert(model[0], out, **TYPES, calibrate=last)
    assert said == ["23 of 23 "]
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"m.gguf", "whole.gguf"}


def test_what_a_part_lacks_is_made_by_the_last_run(model: tuple[Path, Path], tmp_path: Path) -> None:
    for name, parts in (("whole", ()), ("made", ((2, 3),))):
        for part in (*parts, None):
            options = calibration(model[1], method="gptq", blocks=part)
            done = quantize_checkpoint(model[0], tmp_path / name, "gptq_v2", group_size=64, calibrate=options)
            assert bool(done.modules) == (part is None)
    whole, made = (tmp_path / name / "model.safetensors" for name in ("whole", "made"))
    assert whole.read_bytes() == made.read_bytes()


def test_parts_need_inputs_that_no_other_part_makes(model: tuple[Path, Path], tmp_path: Path) -> None:
    for wrong, why in (
        ({"feed": "quantized", "blocks": (1, 2)}, "feed='float'"),
        ({"feed": "float", "blocks": (3, 2)}, "numbered from 1 to 2"),
        ({"feed": "float", "blocks": (1, 2), "method": "awq"}, "not awq"),
    ):
        with pytest.raises(BridgeError, match=why):
            Calibration(model[1], **wrong)
    with pytest.raises(BridgeError, match="the model has 3 blocks"):
        convert(model[0], tmp_path / "m.gguf", **TYPES, calibrate=calibration(model[1], blocks=(1, 4)))
    assert not list(tmp_path.iterdir())

"""The files of a repacked checkpoint beside its layers: config.json, and what is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.conversion.checkpoints.repack import Repacked
from tests.support import repack_table

CONFIG: dict[str, Any] = {
    "torch_dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "hidden_size": 256},
    "vision_config": {"depth": 1},
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    repack_table.SOURCES["AWQ"](tmp_path / "awq")
    file = tmp_path / "awq/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **CONFIG}))
    return tmp_path / "awq"


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if not key.startswith("quantization")}


@pytest.mark.parametrize(("format", "dtype", "stated"), [("floats", "F32", "float32"), ("mlx", None, "float16")])
def test_config_states_the_dtype_that_floats_have_become(source, tmp_path, format, dtype, stated):
    bridge.repack(source, tmp_path / "out", format, dtype=dtype)
    config = config_of(tmp_path / "out")
    assert config["dtype"] == config["text_config"]["dtype"] == stated
    assert config["text_config"]["hidden_size"] == 256
    assert "torch_dtype" not in {*config, *config["text_config"], *config["vision_config"]}
    assert config["vision_config"] == CONFIG["vision_config"]


def test_config_is_the_sources_where_floats_stay(source, tmp_path):
    bridge.repack(source, tmp_path / "out", "compressed-tensors")
    assert config_of(tmp_path / "out") == CONFIG


def test_weights_for_other_programs_are_left_out(source, tmp_path):
    others = ["model.gguf", "model.onnx", "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth"]
    for name in [*others, "modeling_own.py", "generation_config.json"]:
        (source / name).write_text("{}")
    done = bridge.repack(source, tmp_path / "out", "compressed-tensors")
    assert isinstance(done, Repacked)
    assert sorted(done.left_out) == sorted(others)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "modeling_own.py",
    ]  # fmt: skip

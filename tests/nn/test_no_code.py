"""No code of a checkpoint runs: auto_map names a module next to the weights, and nobody is asked."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import bridge.nn
from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.text.texts import load_tokenizer
from tests.support.tiny_models import save_model

CODE = """
from pathlib import Path
Path(__file__).with_name("code ran").touch()
raise SystemExit("code of the checkpoint ran")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose configs ask for own classes, and a user who says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_model(tmp_path / "m", "LlamaConfig", num_hidden_layers=1)
    (folder / "own.py").write_text(CODE)
    change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def ran(folder: Path) -> list[Path]:
    return list(folder.parent.rglob("code ran"))


@pytest.mark.parametrize("kind", ["llama", "own"])
def test_no_code_of_a_checkpoint_runs(folder: Path, kind: str) -> None:
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    change(folder / "config.json", model_type=kind, auto_map=auto)
    attempts = [
        lambda: load_tokenizer(folder),
        lambda: bridge.nn.load(folder, folder / "none.gguf"),
        lambda: FloatModel(open_checkpoint(folder)),
        lambda: bridge.convert(folder, folder.parent / "m.gguf"),
    ]
    for attempt in attempts:
        with suppress(BridgeError):
            attempt()
    assert ran(folder) == []

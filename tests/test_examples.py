"""The programs in examples/ run as their first lines say, on small models."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import bridge
from tests.conftest import CHECKPOINT, ROOT

EXAMPLES = ROOT / "examples"
CALLS = {
    "convert_and_verify": (["CHECKPOINT", "NEW"], r"largest error on disk: \S+, NMSE \d"),
    "read_codes": (["CHECKPOINT"], r"model\.layers\.3\.mlp\.down_proj: codes \(\d+, \d+\), 0 to 15"),
    "multiply": (["GGUF", "blk.0.ffn_up.weight"], r"Q4_K \(\d+, \d+\), relative error 0\.\d+%"),
    "generate": (["GGUF", "KING RICHARD:", "5"], r"^KING RICHARD:\S*\s"),
    "quantize_module": (["4"], r"outputs differ by \d\.\d%"),
    "under_transformers": (["FLOATS", "GGUF", "KING RICHARD:"], r"KING RICHARD:.*\w"),
    "character_gpt": (["TRAIN", "VALIDATE", "10", "3"], "61 linear layers, 10 steps"),
    "train_mtp": (
        ["FLOATS", "--text", "TRAIN", "--out", "NEW", "--replies", "2", "--steps", "3", "--depth", "5"],
        "step 3: loss",
    ),
}
# training takes half a minute, and proves of quantizing and guessing what other tests prove in parts
SLOW = dict.fromkeys(("character_gpt", "train_mtp"), pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "model.gguf"
    bridge.convert(CHECKPOINT, path)
    return path


def test_every_example_is_called_and_named_in_their_readme():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == CALLS.keys()
    assert re.findall(r"`(\w+)\.py`", (EXAMPLES / "README.md").read_text()) == list(CALLS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in CALLS])
def test_an_example_runs(name, gguf, small_model, tmp_path, monkeypatch, capsys):
    arguments, said = CALLS[name]
    if name in ("quantize_module", "under_transformers", "train_mtp"):
        pytest.importorskip("transformers")
    names = {"CHECKPOINT": CHECKPOINT, "GGUF": gguf, "NEW": tmp_path / "new.gguf", "FLOATS": small_model}
    names |= {"TRAIN": tmp_path / "train.txt", "VALIDATE": tmp_path / "validate.txt"}
    names["TRAIN"].write_text("the cat sat on the mat and the dog ran off. " * 60)
    names["VALIDATE"].write_text("the dog sat on the mat and the cat ran off. " * 20)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *(str(names.get(word, word)) for word in arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(said, capsys.readouterr().out, re.DOTALL)

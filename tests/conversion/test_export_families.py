"""The way back, of every family that `convert` knows: its GGUF as a float checkpoint is the model that it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.models.families import ALL
from bridge.models.gguf_config import family_of_gguf
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))  # more than any window of these
# what no key of a GGUF tells, as the published models have it
UNSAID: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {**MODELS["gpt-oss"][1]["rope_parameters"], "truncate": False}},
}
PLAIN = ("falcon-h1", "gemma4-moe", "qwen3-next")  # others are of `make test-all`
HALVES = ("deepseek", "glm4-moe-lite", "glm5", "mistral4", "gemma3n", "gemma4")  # matrices that are F16 in the GGUF


@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS])
def test_a_familys_gguf_becomes_the_checkpoint_that_it_came_from(name: str, tmp_path: Path) -> None:
    model = randomized(new_model(name, **UNSAID.get(name, {})))
    model.save_pretrained(tmp_path / "model", save_original_format=True)
    copy_tokenizer(tmp_path / "model")
    bridge.convert(tmp_path / "model", tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", dtype="F32")
    kind = getattr(transformers, json.loads((tmp_path / "new/config.json").read_text())["architectures"][0])
    back = kind.from_pretrained(tmp_path / "new", attn_implementation="eager").eval()
    with torch.no_grad():
        expected, found = model(TOKENS).logits, back(TOKENS).logits
    assert (found - expected).norm() < (1e-2 if name.startswith(HALVES) else 1e-4) * expected.norm()


def test_every_family_has_a_way_back() -> None:
    for family in ALL:
        assert family_of_gguf({"general.architecture": family.arch}).arch == family.arch
    with pytest.raises(BridgeError, match="architecture 'rwkv9'; known are llama, "):
        family_of_gguf({"general.architecture": "rwkv9"})

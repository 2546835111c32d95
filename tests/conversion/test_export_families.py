"""A GGUF of any family becomes a checkpoint again, which transformers loads: floats, and layers with their codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))  # more than any window of these
# what no key of a GGUF tells, as the published models have it
UNSAID: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {**MODELS["gpt-oss"][1]["rope_parameters"], "truncate": False}},
}
PLAIN = ["nemotron-h", "gemma4-moe"]  # others are of `make test-all`
# language models of vision models, whose GGUFs have architectures of their own
PARTS = ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "mistral3", "glm4v-moe"]


def families(*without: str) -> list[Any]:
    names = [name for name in MODELS if name not in without]
    return [name if name in PLAIN else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def gguf_of(name: str, folder: Path, type: str, **fields: Any) -> tuple[Any, Path]:
    """A family's model, of halves, and its GGUF."""
    model = randomized(new_model(name, **UNSAID.get(name, {}), **fields))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder / "model", save_original_format=True)
    path = folder / "model.gguf"
    bridge.convert(copy_tokenizer(folder / "model"), path, tensor_types=[(".*", type)], mmproj_type="none")
    return model, path


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
    model, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), told
    return model.eval()


@pytest.mark.parametrize("name", families(*PARTS))
def test_floats_have_the_logits_of_the_checkpoint_that_the_gguf_came_from(name: str, tmp_path: Path) -> None:
    model, path = gguf_of(name, tmp_path, "F32")
    bridge.export(path, tmp_path / "new", dtype="F32")
    expected = logits(model)
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", families(*PARTS, "gpt2"))  # all layers of GPT-2 are Conv1D, which stay floats
def test_layers_with_codes_have_the_logits_of_the_gguf(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    experts = {"moe_intermediate_size": 32} if "moe_intermediate_size" in MODELS[name][1] else {}
    _, path = gguf_of(name, tmp_path, "Q8_0", **experts)
    done = bridge.export(path, tmp_path / "new", "compressed-tensors", dtype="F32")
    assert {tensor.how for tensor in done.tensors if tensor.bits} == {"exact"}
    expected = logits(bridge.nn.load(path, precision="f32"))
    halves = any(".experts." in tensor.name for tensor in done.tensors if tensor.bits)  # transformers makes them so
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < (5e-3 if halves else 1e-4) * expected.norm()

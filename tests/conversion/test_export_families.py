"""A GGUF of any family becomes a checkpoint again, which transformers loads: floats, and layers with their codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.models.families import ALL
from bridge.models.gguf_config import family_of_gguf
from tests.support.encode import load_floats
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))  # more than any window of these
# what no key of a GGUF tells, as the published models have it
UNSAID: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {**MODELS["gpt-oss"][1]["rope_parameters"], "truncate": False}},
}
PLAIN = ["falcon-h1", "gemma4-moe", "nemotron-h"]  # others are of `make test-all`


def families(*without: str) -> list[Any]:
    names = [name for name in MODELS if name not in without]
    return [name if name in PLAIN else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def gguf_of(name: str, folder: Path, type: str, **fields: Any) -> Path:
    """The GGUF of a family's model, of halves, which is saved in `folder / "model"`."""
    model = randomized(new_model(name, **UNSAID.get(name, {}), **fields))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder / "model", save_original_format=True)
    path = folder / "model.gguf"
    bridge.convert(copy_tokenizer(folder / "model"), path, tensor_types=[(".*", type)], mmproj_type="none")
    return path


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, told = kind.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(told[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), told
    return model.eval()


@pytest.mark.parametrize("name", families("minimax-m3"))  # transformers has no names of its language model alone
def test_floats_have_the_logits_of_the_checkpoint_that_the_gguf_came_from(name: str, tmp_path: Path) -> None:
    path = gguf_of(name, tmp_path, "F32")
    bridge.export(path, tmp_path / "new", dtype="F32")
    expected = logits(loaded(tmp_path / "model"))
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", families("gpt2", "falcon-h1", "minimax-m3"))  # Conv1D stays floats; not run packed
def test_layers_with_codes_have_the_logits_of_the_gguf(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    experts = {"moe_intermediate_size": 32} if "moe_intermediate_size" in MODELS[name][1] else {}
    path = gguf_of(name, tmp_path, "Q8_0", **experts)
    done = bridge.export(path, tmp_path / "new", "compressed-tensors", dtype="F32")
    assert {tensor.how for tensor in done.tensors if tensor.bits} == {"exact"}
    expected = logits(bridge.nn.load(path, precision="f32"))
    halves = any(".experts." in tensor.name for tensor in done.tensors if tensor.bits)  # transformers makes them so
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < (5e-3 if halves else 1e-4) * expected.norm()


def test_a_language_model_gets_its_published_names_and_values_back(tmp_path: Path) -> None:
    bridge.export(gguf_of("minimax-m3", tmp_path, "F32"), tmp_path / "new", dtype="F32")
    stored, back = load_floats(tmp_path / "model"), load_floats(tmp_path / "new")
    prefix = "language_model."
    own = {name.removeprefix(prefix): values for name, values in stored.items() if name.startswith(prefix)}
    assert back.keys() == own.keys()
    assert max(np.abs(back[name] - own[name]).max() for name in own) < 1e-6


def test_every_family_has_a_way_back() -> None:
    for family in ALL:
        assert family_of_gguf({"general.architecture": family.arch}).arch == family.arch
    with pytest.raises(BridgeError, match="architecture 'rwkv9'; known are llama, "):
        family_of_gguf({"general.architecture": "rwkv9"})

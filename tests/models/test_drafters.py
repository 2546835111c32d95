"""Drafters: what `convert` makes of them is what llama.cpp's own converter makes, with the codes of quantized ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.writing.verify import verify
from bridge.errors import BridgeError
from tests.support.drafter_models import DRAFTERS, write_config
from tests.support.encode import write_gptq
from tests.support.family_models import copy_tokenizer
from tests.support.make_families import GOLDENS, checksum, plain, stored_values_of

# what llama.cpp takes for granted where it is not said, or never reads
MORE = {"attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count", "vocab_size"}


def write_drafter(name: str, folder: Path, weights: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    """A drafter in a folder of that name, and what `convert` needs beside it."""
    model = DRAFTERS[name]
    write_config(folder / name, model.config)
    weights = weights or {key: stored_values_of(key, shape) for key, shape in model.shapes.items()}
    save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
    if model.target is None:
        copy_tokenizer(folder / name)
        return {}
    return {"target_model": copy_tokenizer(write_config(folder / "target", model.target))}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    of = write_drafter(name, tmp_path)
    bridge.convert(tmp_path / name, tmp_path / "m.gguf", tensor_types=[(".*", "F32")], **of)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    arch = reader.fields["general.architecture"].contents()
    assert arch == golden["arch"]
    keys = {key: plain(field.contents()) for key, field in reader.fields.items()}
    assert {key: keys.get(key) for key in golden["keys"]} == golden["keys"]
    own = {key.removeprefix(f"{arch}.") for key in keys if key.startswith(f"{arch}.")}
    assert own - {key.removeprefix(f"{arch}.") for key in golden["keys"]} <= MORE
    tensors = {
        t.name: [[int(n) for n in reversed(t.shape)], checksum(np.asarray(t.data).reshape(-1))] for t in reader.tensors
    }
    assert tensors == golden["tensors"]
    assert {t.name: t.tensor_type.name for t in reader.tensors}.get("d2t", "I64") == "I64"
    assert verify(tmp_path / "m.gguf", tmp_path / name, **of).total() is None


def randomized(name: str) -> dict[str, np.ndarray]:
    """Random weights of a drafter, a multiple of 32 wide."""
    rng = np.random.default_rng(0)
    weights = {key: stored_values_of(key, shape) for key, shape in DRAFTERS[name].shapes.items()}
    for key, values in weights.items():
        if values.dtype == np.float32:
            weights[key] = (rng.standard_normal(values.shape) * 0.1 + (values.ndim == 1)).astype(np.float32)
    return weights


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_quantized_drafters_codes_are_carried(name: str, tmp_path: Path) -> None:
    of = write_drafter(name, tmp_path, randomized(name))
    stored = write_gptq(tmp_path / "gptq", tmp_path / name, group_size=32)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="exact", **of)
    of_codes = [t for t in report.tensors if str(t.source).removesuffix(".weight") in stored]
    assert len(of_codes) == len(stored) > 5
    assert {t.outcome for t in of_codes} == {"codes carried"}
    assert verify(tmp_path / "m.gguf", tmp_path / "gptq", **of).total() is not None


def test_a_plan_of_a_drafter_makes_the_same_file(tmp_path: Path) -> None:
    of = write_drafter("eagle3", tmp_path)
    bridge.convert(tmp_path / "eagle3", tmp_path / "m.gguf", **of)
    plan_checkpoint(tmp_path / "eagle3", out=tmp_path / "plan.json", **of)
    bridge.convert(tmp_path / "eagle3", tmp_path / "planned.gguf", plan=tmp_path / "plan.json")
    assert (tmp_path / "planned.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_a_drafters_gguf_is_quantized_again(tmp_path: Path) -> None:
    """Its table of tokens stays."""
    of = write_drafter("eagle3", tmp_path, randomized("eagle3"))
    bridge.convert(tmp_path / "eagle3", tmp_path / "f.gguf", type="F16", **of)
    bridge.convert(tmp_path / "f.gguf", tmp_path / "m.gguf", type="Q8_0")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["fc.weight"].tensor_type.name == "Q8_0"
    assert tensors["d2t"].data.tolist() == [3 * token for token in range(512)]


def test_a_drafter_without_the_model_that_it_guesses_for_is_refused(tmp_path: Path) -> None:
    write_drafter("eagle3", tmp_path)
    with pytest.raises(BridgeError, match=r"is a drafter \(eagle3\).*target_model"):
        bridge.convert(tmp_path / "eagle3", tmp_path / "m.gguf")


def test_a_model_that_needs_no_other_refuses_one(tmp_path: Path) -> None:
    folder = copy_tokenizer(write_config(tmp_path / "target", DRAFTERS["eagle3"].target or {}))
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match=r"target_model.*is a llama model, which needs no other; leave it out"):
        bridge.convert(folder, tmp_path / "m.gguf", target_model=folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "heads that read 3 layers"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "must be numbers from 0 to 8"),
        ("eagle3", {"num_hidden_layers": 2}, "graph of EAGLE-3 has one layer"),
        ("eagle3", {"attention_bias": True}, "no biases"),
        ("dflash", {"dflash_config": {"mask_token_id": 2048, "target_layer_ids": [1, 4, 6]}}, "one of the 2048 tokens"),
    ],
)
def test_a_config_that_llama_cpp_cannot_express_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    of = write_drafter(name, tmp_path)
    write_config(tmp_path / name, DRAFTERS[name].config | change)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(tmp_path / name, tmp_path / "m.gguf", **of)


@pytest.mark.parametrize("offsets", [np.zeros(512, np.int64) + 2000, -np.arange(512) // 2])
def test_a_table_of_tokens_that_the_model_does_not_have_is_refused(offsets: np.ndarray, tmp_path: Path) -> None:
    of = write_drafter("eagle3", tmp_path)
    weights = load_file(tmp_path / "eagle3/model.safetensors")
    save_file(weights | {"d2t": offsets}, tmp_path / "eagle3/model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match="d2t: must name 512 different ones of the model's 2048 tokens"):
        bridge.convert(tmp_path / "eagle3", tmp_path / "m.gguf", **of)


def test_a_head_for_some_tokens_that_does_not_say_which_is_refused(tmp_path: Path) -> None:
    of = write_drafter("eagle3", tmp_path)
    weights = load_file(tmp_path / "eagle3/model.safetensors")
    del weights["d2t"]
    save_file(weights, tmp_path / "eagle3/model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match="d2t is missing from the checkpoint"):
        bridge.convert(tmp_path / "eagle3", tmp_path / "m.gguf", **of)


def test_a_head_for_all_tokens_may_list_them(tmp_path: Path) -> None:
    of = write_drafter("eagle3-whole", tmp_path)
    weights = load_file(tmp_path / "eagle3-whole/model.safetensors") | {"d2t": np.zeros(2048, np.int64)}
    save_file(weights, tmp_path / "eagle3-whole/model.safetensors", {"format": "pt"})
    bridge.convert(tmp_path / "eagle3-whole", tmp_path / "m.gguf", **of)
    (tokens,) = (t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "d2t")
    assert tokens.data.tolist() == list(range(2048))

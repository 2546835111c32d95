"""A GGUF of any family becomes a checkpoint again, which transformers loads: floats, and layers with their codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.conversion.checkpoints.to_checkpoint import linears
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.gguf_input.gguf_source import AssembledTensor
from bridge.errors import BridgeError
from bridge.gguf_file.reader import StoredTensor
from bridge.models.families import ALL
from bridge.models.gguf_config import family_of_gguf
from bridge.models.towers.tower import TOWER_NAME
from tests.support.encode import load_floats
from tests.support.family_models import MODELS, OF_PARTS_ONLY, copy_tokenizer, new_model, randomized
from tests.support.remote_models import REMOTE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))  # more than any window of these
# what no key of a GGUF tells, as the published models have it
UNSAID: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {**MODELS["gpt-oss"][1]["rope_parameters"], "truncate": False}},
}
NOT_ALONE = ("minimax-m3", *OF_PARTS_ONLY)  # transformers has no names of their language models alone
PLAIN = ["falcon-h1", "gemma4-moe", "nemotron-h"]  # others are of `make test-all`


def families(*without: str) -> list[Any]:
    names = [name for name in MODELS if name not in without and name not in REMOTE]
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


def wide_experts(name: str, size: int) -> dict[str, Any]:
    """Fields that give a model experts of whole blocks; another size than the hidden one, where stacks are turned."""
    fields = MODELS[name][1]
    if "text_config" in fields:
        return {"text_config": fields["text_config"] | wide_fields(fields["text_config"], size)}
    return wide_fields(fields, size)


def wide_fields(fields: dict[str, Any], size: int) -> dict[str, Any]:
    return {key: size for key in ("moe_intermediate_size", "moe_latent_size") if key in fields}


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


@pytest.mark.parametrize("name", families(*NOT_ALONE))
def test_floats_have_the_logits_of_the_checkpoint_that_the_gguf_came_from(name: str, tmp_path: Path) -> None:
    path = gguf_of(name, tmp_path, "F32")
    bridge.export(path, tmp_path / "new", dtype="F32")
    expected = logits(loaded(tmp_path / "model"))
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < 1e-4 * expected.norm()


# of floats that it joins, transformers (5.24) finds none in checkpoints with such codes
JOINED = "kimi-linear", "ling3", "qwen4exp"


# Conv1D stays floats; Falcon-H1 has weights that its factors multiply; Mamba2 of transformers needs floats in out_proj
@pytest.mark.parametrize("name", families("gpt2", "falcon-h1", "mamba2", *NOT_ALONE, *JOINED))
def test_layers_with_codes_have_the_logits_of_the_gguf(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    path = gguf_of(name, tmp_path, "Q8_0", **wide_experts(name, 32))
    done = bridge.export(path, tmp_path / "new", "compressed-tensors", dtype="F32")
    assert {tensor.how for tensor in done.tensors if tensor.bits} == {"exact"}
    expected = logits(bridge.nn.load(path, precision="f32"))
    halves = any(".experts." in tensor.name for tensor in done.tensors if tensor.bits)  # transformers makes them so
    assert (logits(loaded(tmp_path / "new")) - expected).norm() < (5e-3 if halves else 1e-4) * expected.norm()


@pytest.mark.parametrize("name", REMOTE)
def test_a_model_of_its_repositorys_code_gets_its_names_and_values_back(name: str, tmp_path: Path) -> None:
    bridge.export(gguf_of(name, tmp_path, "F32"), tmp_path / "new", dtype="F32")
    stored, back = load_floats(tmp_path / "model"), load_floats(tmp_path / "new")
    stored = {key: values for key, values in stored.items() if key != "lm_head.weight" or name != "ling"}  # as it acts
    assert {*back} - {"lm_head.weight"} == {*stored} - {"lm_head.weight"}
    assert max(np.abs(back[key] - values).max() for key, values in stored.items()) < 1e-6


@pytest.mark.parametrize("name", JOINED)
def test_the_codes_of_those_that_transformers_does_not_load_make_the_gguf_again(name: str, tmp_path: Path) -> None:
    path = gguf_of(name, tmp_path, "Q8_0", **wide_experts(name, 32))
    done = bridge.export(path, tmp_path / "new", "compressed-tensors", dtype="F32")
    assert {tensor.how for tensor in done.tensors if tensor.bits} == {"exact"}
    bridge.convert(tmp_path / "new", tmp_path / "again.gguf", tensor_types=[(".*", "Q8_0")])
    first, second = (
        {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
        for file in (path, tmp_path / "again.gguf")
    )
    assert first.keys() == second.keys()
    assert all(np.allclose(first[name], second[name], rtol=1e-3, atol=1e-6) for name in first)


def test_a_language_model_gets_its_published_names_and_values_back(tmp_path: Path) -> None:
    bridge.export(gguf_of("minimax-m3", tmp_path, "F32"), tmp_path / "new", dtype="F32")
    stored, back = load_floats(tmp_path / "model"), load_floats(tmp_path / "new")
    prefix = "language_model."
    own = {name.removeprefix(prefix): values for name, values in stored.items() if name.startswith(prefix)}
    assert back.keys() == own.keys()
    assert max(np.abs(back[name] - own[name]).max() for name in own) < 1e-6


def whole_models() -> list[Any]:
    """The models of several parts, in both formats; with their weights, or their config alone."""
    names = [name for name, (_, fields) in MODELS.items() if "text_config" in fields]
    formats = {name: ("floats", "compressed-tensors") for name in names} | {
        "qwen3-vl-moe": ("floats",),
        **dict.fromkeys(("minimax-m3", "qwen4exp", *OF_PARTS_ONLY), ("floats",)),
    }
    cases = [(name, format, tower) for name in names for format in formats[name] for tower in (True, False)]
    plain = [("mistral3", "floats", False)]
    return [case if case in plain else pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(("name", "format", "tower"), whole_models())
def test_with_the_config_of_a_whole_model_the_checkpoint_is_of_that(
    name: str, format: str, tower: bool, tmp_path: Path
) -> None:
    """Its tower comes from the config's folder, or is missing, and a note says so."""
    path = gguf_of(name, tmp_path, "F32" if format == "floats" else "Q8_0", **wide_experts(name, 64))
    expected = logits(loaded(tmp_path / "model") if format == "floats" else bridge.nn.load(path, precision="f32"))
    if not tower:
        (tmp_path / "model/model.safetensors").unlink()
    done = bridge.export(path, tmp_path / "new", format, config=tmp_path / "model", dtype="F32")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "new")
    how = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, told = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / "new", **how)
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    assert all(TOWER_NAME.match(key) for key in told["missing_keys"])
    assert bool(told["missing_keys"]) == (not tower)
    assert any(("come from" if tower else "are missing") in note for note in done.notes)
    assert (logits(model.eval()) - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("name", [pytest.param("gpt-oss", marks=pytest.mark.exhaustive), "qwen3.5"])
def test_a_run_of_what_is_put_together_is_read_alone(name: str, tmp_path: Path, monkeypatch) -> None:
    """Rows of matrices whose columns are in another order, and matrices of stacks."""
    sizes: list[int] = []
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self, a, b: (sizes.append(b - a), read(self, a, b))[1])
    with open_source(gguf_of(name, tmp_path, "F32"), by_family=True) as source:
        sources = {
            k: p for k, p in source.store.sources.items() if isinstance(p, AssembledTensor) and np.prod(p.shape) > 1000
        }
        assert sources
        for where, tensor in sources.items():
            expected = tensor.floats()
            sizes.clear()
            assert np.array_equal(tensor.floats(slice(1, 2)), expected[1:2]), where
            assert sum(sizes) < expected.nbytes / 2, where


def test_a_model_without_layers_of_codes_is_refused(tmp_path: Path) -> None:
    path = gguf_of("mamba2", tmp_path, "Q8_0")
    with pytest.raises(BridgeError, match="has no layer that modelopt holds; choose format='floats'"):
        bridge.export(path, tmp_path / "new", "modelopt")


@pytest.mark.parametrize("name", ["lfm2", pytest.param("jamba", marks=pytest.mark.exhaustive)])
def test_export_and_quantize_take_the_same_layers(name: str, tmp_path: Path) -> None:
    """All matrices of the blocks but those that the family's table has as floats."""
    done = bridge.export(gguf_of(name, tmp_path, "Q8_0"), tmp_path / "new", "compressed-tensors")
    with bridge.open_checkpoint(tmp_path / "model") as ckpt:
        layers = {f"{layer}.weight" for layer, (_, columns) in linears(ckpt).items() if columns % 32 == 0}
    assert {tensor.name for tensor in done.tensors if tensor.bits} == layers


@pytest.mark.exhaustive
def test_experts_of_a_whole_model_are_stacks_as_floats_and_modules_with_codes(tmp_path: Path) -> None:
    """vLLM reads both of Qwen3-VL-MoE, transformers the stacks."""
    path = gguf_of("qwen3-vl-moe", tmp_path, "Q8_0", **wide_experts("qwen3-vl-moe", 64))
    experts = "model.language_model.layers.0.mlp.experts"
    for format, name in (("floats", f"{experts}.gate_up_proj"), ("gptq", f"{experts}.0.gate_proj.qweight")):
        bridge.export(path, tmp_path / format, format, config=tmp_path / "model")
        with bridge.open_checkpoint(tmp_path / format) as made:
            assert name in made.store.tensors


def test_a_tower_that_is_not_of_floats_is_refused(tmp_path: Path) -> None:
    path = gguf_of("mistral3", tmp_path, "F32")
    codes = np.zeros((2, 2), np.uint8)
    save_file({"vision_tower.patch_conv.weight": codes}, tmp_path / "model/model.safetensors")
    with pytest.raises(BridgeError, match=r"patch_conv\.weight is U8; take the float model's config and weights"):
        bridge.export(path, tmp_path / "new", config=tmp_path / "model")


def test_every_family_has_a_way_back() -> None:
    """But drafters."""
    for family in (one for one in ALL if not one.drafter):
        assert family_of_gguf({"general.architecture": family.arch}).arch == family.arch
    with pytest.raises(BridgeError, match="architecture 'rwkv9'; known are llama, "):
        family_of_gguf({"general.architecture": "rwkv9"})

"""A GGUF of any family as a transformers model: config, places and values, against the model it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.models.config.model_config import Config
from bridge.models.config.rope import read_rope
from bridge.models.gguf_config import add_rope_factors, config_of_gguf
from tests.support.family_models import MODELS, copy_tokenizer, new_model, randomized
from tests.support.remote_models import REMOTE
from tests.support.tiny_models import save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import bridge.transformers  # noqa: E402
from bridge.nn import QuantEmbedding, QuantExperts, QuantLinear  # noqa: E402
from bridge.nn.quant_linear import JoinedLinear  # noqa: E402

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))  # more than any window of these
# what no key of a GGUF tells, as the published models have it
UNSAID: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {**MODELS["gpt-oss"][1]["rope_parameters"], "truncate": False}},
}
LOADED = [name for name in MODELS if name not in REMOTE]  # by a config that keys tell
STORED = [name for name in LOADED if name != "falcon-h1"]  # whose GGUF has its weights times factors
PLAIN = ["smollm3", "granite-moe-shared", "qwen3.5"]  # others are of `make test-all`


def made(name: str, folder: Path, type: str, **fields: Any) -> tuple[Any, Path]:
    model = randomized(new_model(name, **UNSAID.get(name, {}), **fields))
    for parameter in model.parameters():  # some matrices are F16 in every GGUF
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder / "model", save_original_format=True)
    model = model.__class__.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager").eval()
    path = folder / "model.gguf"
    bridge.convert(copy_tokenizer(folder / "model"), path, tensor_types=[(".*", type)], mmproj_type="none")
    return model, path


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def exact(folder: Path) -> Any:
    """The model of a folder, and there, with matrices that Q8_0 holds exactly: rows are rounded wherever they stand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim > 1 and not name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                matrices = values.reshape(-1, values.shape[-1]).numpy()
                rounded = gguf.quants.dequantize(gguf.quants.quantize(matrices, kind), kind)
                values.copy_(torch.from_numpy(rounded).reshape(values.shape))
    model.save_pretrained(folder, save_original_format=True)
    return model


@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.exhaustive) for n in LOADED])
def test_a_family_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    """Of floats, so that nothing but the config, the places and the orders decides."""
    model, path = made(name, tmp_path, "F32")
    expected = logits(model)
    found = logits(bridge.nn.load(path, precision="f32"))
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.exhaustive) for n in STORED])
def test_every_matrix_stays_packed_and_is_the_checkpoints(name: str, tmp_path: Path) -> None:
    model, path = made(name, tmp_path, "Q8_0")
    packed = bridge.nn.load(path, precision="f32")
    floats = {name: p for name, p in packed.named_parameters() if p.ndim > 1 and p.numel() > 4096}
    assert not [name for name in floats if not name.endswith(("kv_b_proj.weight", "wpe.weight"))]
    how = bridge.transformers.PackedConfig("f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=how)
    torch.testing.assert_close(logits(theirs), logits(packed), rtol=1e-4, atol=1e-4)
    compared = 0
    for name, module in packed.named_modules():
        if not isinstance(module, QuantLinear | JoinedLinear | QuantEmbedding) or ".parts." in name:
            continue
        old = next((m for n, m in model.named_modules() if n.replace("model.language_model.", "model.") == name), None)
        if old is None or not hasattr(old, "weight"):
            continue
        weights = old.weight.detach()
        if isinstance(module, QuantEmbedding):
            found = module(torch.arange(len(weights))) / module.scale
        else:
            eye, zero = torch.eye(module.in_features), torch.zeros(1, module.in_features)
            found = (module(eye) - module(zero)).T
            weights = weights.T if type(old).__name__ == "Conv1D" else weights
        assert (found - weights).norm() < 0.01 * weights.norm(), name
        compared += 1
    assert compared > 4


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("deepseek3.2", torch.float16), pytest.param("ernie4.5-moe", torch.bfloat16, marks=pytest.mark.exhaustive)],
)
def test_what_transformers_keeps_in_float32_is_not_rounded(name: str, dtype: Any, tmp_path: Path) -> None:
    """Neither to blocks nor to halves: the weights of an indexer, and what routers choose experts by."""
    model, path = made(name, tmp_path, "Q8_0")
    whole = bridge.nn.load(path).state_dict()
    how = bridge.transformers.PackedConfig("f32")
    packed = bridge.nn.load(path, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=how, dtype=dtype
    )
    floats = model.__class__.from_pretrained(tmp_path / "model", dtype=dtype).state_dict()
    kept = [key for key, values in floats.items() if values.dtype == torch.float32]
    assert kept
    for found in (packed.state_dict(), theirs.state_dict()):
        for key in kept:
            torch.testing.assert_close(found[key], whole[key], rtol=0, atol=0)
    assert torch.isfinite(logits(packed)).all()


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config", "MixtralConfig"])
def test_the_tokens_are_those_of_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "MixtralConfig" else {"head_dim": 64}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    more = {"rope_parameters": rope} if kind == "LlamaConfig" else {}
    folder = save_model(tmp_path / "m", kind, tie_word_embeddings=kind == "Qwen3Config", **experts, **more)
    floats = exact(folder)
    bridge.convert(folder, tmp_path / "m.gguf", tensor_types=[(".*", "Q8_0")])
    packed = bridge.nn.load(tmp_path / "m.gguf", precision="f32")
    torch.testing.assert_close(logits(packed), logits(floats), rtol=1e-3, atol=1e-3)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert packed.generate(TOKENS[:, :9], **how).tolist() == floats.generate(TOKENS[:, :9], **how).tolist()
    kinds = {type(module) for module in packed.modules()}
    assert QuantExperts in kinds if kind == "MixtralConfig" else QuantLinear in kinds
    assert not kinds & {torch.nn.Embedding}


def test_experts_are_in_a_compiled_graph(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2)
    bridge.convert(folder, tmp_path / "m.gguf", tensor_types=[(".*", "Q8_0")])
    model = bridge.nn.load(tmp_path / "m.gguf")
    torch._dynamo.reset()
    graph = torch.compile(lambda t: model(t, use_cache=False).logits, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(graph(TOKENS), model(TOKENS, use_cache=False).logits)


# configs


def metadata(**keys: Any) -> dict[str, Any]:
    own = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, **keys}  # fmt: skip
    return {"general.architecture": "llama", "tokenizer.ggml.tokens": 100} | {f"llama.{k}": v for k, v in own.items()}


def test_a_missing_key_and_an_unknown_architecture_are_refused() -> None:
    with pytest.raises(BridgeError, match=r"llama\.context_length is missing from the metadata"):
        config_of_gguf(metadata(context_length=None), ())
    with pytest.raises(BridgeError, match="architecture 'rwkv9'; known are llama, "):
        config_of_gguf({"general.architecture": "rwkv9"}, ())


def test_the_rules_of_rotation_come_back() -> None:
    linear = config_of_gguf(metadata(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}), ())
    assert linear["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    values = config_of_gguf(metadata(**{"rope.freq_base": 500000.0}), ())
    with pytest.raises(BridgeError, match="no config expresses"):
        add_rope_factors(values, {"rope_freqs": np.array([1, 3, 2, 8], np.float32)})
    add_rope_factors(values, {"rope_freqs": np.ones(4, np.float32)})
    assert values["rope_parameters"]["rope_type"] == "default"
    add_rope_factors(values, {"rope_freqs": np.array([1, 1e30, 1e30, 1e30], np.float32)})
    assert values["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_llama_4s_rule_of_rotation_comes_back() -> None:
    """Its two factors are equal: frequencies are divided or not, and nothing is between."""
    rules = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
    factors = read_rope(Config({"rope_parameters": rules}, Path("config.json")), 128).factors["rope_freqs"]
    assert set(factors) == {1, 16}
    values = config_of_gguf(metadata(**{"rope.freq_base": 500000.0}), ())
    add_rope_factors(values, {"rope_freqs": factors})
    assert values["rope_parameters"] | {"low_freq_factor": 1.0, "high_freq_factor": 1.0} == rules
    again = read_rope(Config(values, Path("config.json")), 128).factors["rope_freqs"]
    assert np.array_equal(again, factors)


def test_phi_moes_factor_of_attention_is_its_own() -> None:
    rules = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25], "long_factor": [1.5, 4.0],
        "original_max_position_embeddings": 64, "short_mscale": 1.25, "long_mscale": 1.25}  # fmt: skip
    config = {"rope_parameters": rules, "max_position_embeddings": 256}
    assert read_rope(Config(config, Path("config.json")), 4).attention_factor == 1.25
    rules["short_mscale"] = 1.0
    with pytest.raises(BridgeError, match=r"llama\.cpp has one factor for both"):
        read_rope(Config(config, Path("config.json")), 4)


def test_a_model_of_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "LlamaConfig")
    bridge.convert(folder, tmp_path / "m.gguf")
    file = bridge.open_gguf(tmp_path / "m.gguf")
    del file.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(BridgeError, match=r"blk\.1\.ffn_up\.weight: is missing from the GGUF"):
        bridge.nn.load(file)

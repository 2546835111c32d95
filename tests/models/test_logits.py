"""Float GGUFs made from an outline, in llama.cpp: the logits must be those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT, shared
from tests.support.family_models import MODELS as FAMILIES
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.float_gguf import outline_of, write_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 96  # positions compared; over the original contexts of the scaled models below

# llama.cpp applies no window in Phi-3; 128 tokens of DeepSeek V4 become one
OWN_LENGTH = {"phi3": 60, "deepseek4": 200}
SPARSE = {"minimax-m3"}  # 3 blocks of 32 tokens, of which a token attends to 2
LIMITS = {"deepseek2-lite": 1e-3}  # 27 layers with k_b in F16
LITE = {"num_hidden_layers": 27}  # llama.cpp knows DeepSeek V2 Lite by its layers
FIELDS = {
    "deepseek2-lite": LITE,
    "gemma3n": {"intermediate_size": 8192},  # a deviation over n values there, over n - 1 in llama.cpp
}

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama, tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, attention and MLP biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim of its own": ("LlamaConfig", {"head_dim": 32}),
    "llama, as many kv heads": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, yarn with its own attention factor": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.3,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2, yarn, tied": (
        "Qwen2Config",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3, tied, one head_dim for all": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}


def random_model(config_class: str, fields: dict, folder: Path):
    """A transformers model with random weights, biases and norms, its config.json and a tokenizer in `folder`."""
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**(COMMON | fields))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name else 0.15
            parameter.copy_((1.0 if "norm" in name else 0.0) + spread * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, folder / file)
    tied = config.tie_word_embeddings
    return model, {n: p.detach().numpy() for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL divergence in nats over the positions."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def reference_logits(model, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model, weights = random_model(*MODELS[name], tmp_path)
    outline = outline_of(tmp_path, set(weights))
    path = write_gguf(outline, weights, tmp_path / "model.gguf")
    tokens = np.random.default_rng(1).integers(0, COMMON["vocab_size"], LENGTH).tolist()
    with LlamaCpp(path, n_ctx=256) as loaded:
        logits = loaded.logits(tokens)
    reference = reference_logits(model, tokens)
    assert divergence(reference, logits) < 1e-6
    assert np.abs(reference - logits).max() < 1e-2 * np.abs(reference).max()


def logits_of(name: str, fields: dict, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of a family's model of random weights in transformers, and of its float GGUF in llama.cpp."""
    model = randomized(new_model(name, **fields))
    model.save_pretrained(folder / "model", save_original_format=True)
    bridge.convert(
        copy_tokenizer(folder / "model"), folder / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none"
    )
    tokens = np.random.default_rng(1).integers(0, 2048, OWN_LENGTH.get(name, LENGTH)).tolist()
    with LlamaCpp(folder / "m.gguf", n_ctx=256, flash=name in SPARSE) as loaded:
        logits = loaded.logits(tokens)
    return reference_logits(model, tokens), logits


def divergence_of(name: str, fields: dict, folder: Path) -> float:
    """Between `logits_of`."""
    return divergence(*logits_of(name, fields, folder))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("phimoe", "hy-v4")])
def test_a_familys_checkpoint_gives_the_logits_of_transformers_in_llama_cpp(name: str, tmp_path: Path) -> None:
    """What is taken over by value: factors, caps, windows (of 32 tokens, fewer than are compared), routers."""
    kl = divergence_of(name, FIELDS.get(name, {}), tmp_path)
    assert kl < LIMITS.get(name, 1e-6)


def test_llama_cpp_computes_phi_moe_otherwise_as_the_note_says(tmp_path: Path, monkeypatch: Any) -> None:
    """The file is right: with llama.cpp's norms and its weights of experts transformers' logits are the same."""
    from transformers.models.phimoe import modeling_phimoe

    def softmax(scores: Any, **_: Any) -> tuple[Any, Any]:
        weights, chosen = torch.topk(scores.softmax(-1), 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def rms_norm(self: Any, x: Any) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias

    assert divergence_of("phimoe", {}, tmp_path / "said") > 1e-2
    monkeypatch.setattr(modeling_phimoe, "sparsemixer", softmax)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", rms_norm)
    assert divergence_of("phimoe", {}, tmp_path / "done") < 1e-6


def test_llama_cpp_rotates_neighbours_in_hunyuan_4_as_the_note_says(tmp_path: Path, monkeypatch: Any) -> None:
    """The file is right: with these rotated, transformers' logits are the same."""
    from transformers.models.hy_v4 import modeling_hy_v4

    rotate = modeling_hy_v4.apply_rotary_pos_emb

    def by_neighbours(q: Any, k: Any, *angles: Any, **how: Any) -> Any:
        halves = (torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in (q, k))
        return rotate(*halves, *angles, **how)

    assert divergence_of("hy-v4", {}, tmp_path / "said") > 1e-2
    monkeypatch.setattr(modeling_hy_v4, "apply_rotary_pos_emb", by_neighbours)
    assert divergence_of("hy-v4", {}, tmp_path / "done") < 1e-6


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": [*2 * ["linear_attention"], "full_attention", "linear_attention"]},
        {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "kda_lower_bound": -2.0, "norm_topk_prob": False},
        {"tie_word_embeddings": True, "num_shared_experts": 2, "head_dim": 32, "short_conv_kernel_size": 3},
        {"rope_parameters": {**LLAMA3_ROPE, "rope_type": "yarn"}, "first_k_dense_replace": 4},
    ],
)
def test_other_configs_of_ling_3_give_the_logits_of_transformers_in_llama_cpp(fields: dict, tmp_path: Path) -> None:
    """Layers in an order of their own; a head beside tied embeddings; yarn, which no expert chooses by a near-tie."""
    assert divergence_of("ling3", fields, tmp_path) < 1e-6


@pytest.mark.parametrize("name", ["exaone-moe", "ling2"])
def test_groups_of_experts_that_are_all_chosen_are_one_group_to_llama_cpp(name: str, tmp_path: Path) -> None:
    assert divergence_of(name, {"n_group": 2, "topk_group": 2}, tmp_path) < 1e-6


def test_the_pools_that_glm_5_3s_indexer_chooses_are_those_of_transformers(tmp_path: Path) -> None:
    """8 of up to 24 in the last layer, with keys as halves in llama.cpp: most positions have no near-ties."""
    text = FAMILIES["glm5-next"][1]["text_config"]
    kinds = [*4 * ["linear_attention"], "indexed_attention"]
    model, logits = logits_of(
        "glm5-next", {"text_config": {**text, "index_topk": 32, "layer_types": kinds, "indexer_types": None}}, tmp_path
    )
    kl = [divergence(*pair) for pair in zip(model[40:, None], logits[40:, None], strict=True)]
    assert np.mean(np.array(kl) < 1e-6) > 0.7


@pytest.mark.exhaustive
def test_the_last_layers_of_gemma_3n_attend_to_the_keys_of_earlier_ones(tmp_path: Path) -> None:
    """transformers saves no matrices for them. The sharp thresholds of its networks amplify what rounding differs."""
    fields = {
        "num_hidden_layers": 22, "num_kv_shared_layers": 2, "layer_types": 11 * ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": 10 * [0.95] + 12 * [0.0], "intermediate_size": 4096,
    }  # fmt: skip
    assert divergence_of("gemma3n", fields, tmp_path) < 3e-3


@pytest.mark.parametrize("keys", ["old", "new"])
def test_old_and_new_config_keys_give_the_same_file(keys: str, tmp_path: Path) -> None:
    model, weights = random_model("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if keys == "old":
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype", "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = list(range(3, 3 + LENGTH))
    with LlamaCpp(write_gguf(outline_of(tmp_path, set(weights)), weights, tmp_path / "m.gguf"), n_ctx=256) as loaded:
        assert divergence(reference_logits(model, tokens), loaded.logits(tokens)) < 1e-6


def test_a_missing_rope_factor_tensor_would_be_noticed(tmp_path: Path) -> None:
    """The comparison above has teeth: without its factors the same model is another."""
    model, weights = random_model("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}, tmp_path)
    outline = outline_of(tmp_path, set(weights))
    outline.tensors = [tensor for tensor in outline.tensors if tensor.kind != "rope_freqs"]
    tokens = list(range(3, 3 + LENGTH))
    with LlamaCpp(write_gguf(outline, weights, tmp_path / "m.gguf"), n_ctx=256) as loaded:
        assert divergence(reference_logits(model, tokens), loaded.logits(tokens)) > 1e-4


def test_dynamic_rope_is_the_default_rope_within_the_context_and_says_so(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model, weights = random_model("LlamaConfig", {"rope_parameters": rope}, tmp_path)
    outline = outline_of(tmp_path, set(weights))
    assert any("dynamic" in note for note in outline.notes)
    tokens = list(range(3, 3 + LENGTH))
    with LlamaCpp(write_gguf(outline, weights, tmp_path / "m.gguf"), n_ctx=256) as loaded:
        assert divergence(reference_logits(model, tokens), loaded.logits(tokens)) < 1e-6


def test_mistral_within_its_window_agrees_and_the_window_is_reported(tmp_path: Path) -> None:
    model, weights = random_model("MistralConfig", {"sliding_window": 128}, tmp_path)
    outline = outline_of(tmp_path, set(weights))
    assert any("sliding window of 128" in note for note in outline.notes)
    tokens = list(range(3, 3 + LENGTH))
    with LlamaCpp(write_gguf(outline, weights, tmp_path / "m.gguf"), n_ctx=256) as loaded:
        assert divergence(reference_logits(model, tokens), loaded.logits(tokens)) < 1e-6
        assert loaded.meta()["llama.attention.sliding_window"] == "128"


def test_llama_cpp_attends_beyond_the_window_of_mistral_as_the_note_says(tmp_path: Path) -> None:
    model, weights = random_model("MistralConfig", {"sliding_window": 16}, tmp_path)
    tokens = list(range(3, 3 + LENGTH))
    with LlamaCpp(write_gguf(outline_of(tmp_path, set(weights)), weights, tmp_path / "m.gguf"), n_ctx=256) as loaded:
        logits = loaded.logits(tokens)
    reference = reference_logits(model, tokens)
    assert divergence(reference[:16], logits[:16]) < 1e-6
    assert divergence(reference[32:], logits[32:]) > 1e-4


@pytest.mark.parametrize("name", ["own", "tiny-llama"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_trained_model_has_its_own_logits_in_llama_cpp(
    name: str, dtype: type, small_model: Path, tmp_path: Path
) -> None:
    folder = small_model if name == "own" else shared(f"models/{name}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {n: p.numpy() for n, p in model.state_dict().items()}
    outline = outline_of(folder, set(weights))
    path = write_gguf(outline, weights, tmp_path / "m.gguf", dtype)
    text = "When the sun rose over the harbour, the ships had already gone. " * 4
    with LlamaCpp(path) as loaded:
        tokens = loaded.tokenize(text)
        kl = divergence(reference_logits(model, tokens), loaded.logits(tokens))
    assert kl < (1e-6 if dtype is np.float32 else 1e-4)  # llama.cpp rounds activations to float16 for F16 weights

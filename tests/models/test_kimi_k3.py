"""Kimi K3, which transformers does not have: llama.cpp's logits, and the runtime's, against the equations in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.layers.weights import read_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax, mean_kl
from tests.support.encode import write_model as encode_model
from tests.support.encode_compressed import config
from tests.support.encode_fp4 import compressed_mxfp4, fp4_scheme
from tests.support.kimi_k3 import CONFIG, PREFIX, shapes, write_kimi_k3
from tests.support.make_families import GOLDENS

GOLDEN = json.loads((GOLDENS / "kimi-k3.json").read_text())
TOKENS = np.random.default_rng(1).integers(0, 2048, 40).tolist()


def converted(folder: Path, type: str) -> Path:
    """The GGUF of the checkpoint in folder/model."""
    bridge.convert(folder / "model", folder / "m.gguf", tensor_types=[(".*", type)], mmproj_type="none")
    return folder / "m.gguf"


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Reference:
    """The logits of a checkpoint's weights."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        self.weights = {name.removeprefix(PREFIX): value.astype(np.float64) for name, value in weights.items()}
        self.config, self.linear = config, config["linear_attn_config"]
        self.heads, self.eps = config["num_attention_heads"], config["rms_norm_eps"]

    def logits(self, tokens: list[int]) -> np.ndarray:
        x = self.weights["model.embed_tokens.weight"][tokens]
        kept: list[np.ndarray] = []  # states that were put aside
        for layer in range(self.config["num_hidden_layers"]):
            read = self.mixed([*kept, x], f"layers.{layer}.self_attention_res") if kept else x
            aside = layer % self.config["attn_res_block_size"] == 0
            kept += [x] if aside else []
            read = self.norm(read, f"layers.{layer}.input_layernorm")
            full = layer + 1 in self.linear["full_attn_layers"]
            added = self.latent(read, layer) if full else self.delta(read, layer)
            x = added if aside else x + added
            read = self.norm(
                self.mixed([*kept, x], f"layers.{layer}.mlp_res"), f"layers.{layer}.post_attention_layernorm"
            )
            dense = layer < self.config["first_k_dense_replace"]
            x = x + (self.network(read, f"layers.{layer}.mlp", "gate_proj", "up_proj", "down_proj") if dense
                     else self.experts(read, f"layers.{layer}.block_sparse_moe"))  # fmt: skip
        x = self.norm(self.mixed([*kept, x], "output_attn_res"), "norm")
        return x @ self.weights["lm_head.weight"].T

    def matrix(self, x: np.ndarray, module: str) -> np.ndarray:
        return x @ self.weights[f"model.{module}.weight"].T

    def norm(self, x: np.ndarray, module: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / size * self.weights[f"model.{module}.weight"]

    def mixed(self, states: list[np.ndarray], module: str) -> np.ndarray:
        scores = np.stack([self.matrix(self.norm(state, f"{module}_norm"), f"{module}_proj")[:, 0] for state in states])
        shares = np.exp(scores - scores.max(0))
        return np.einsum("st,std->td", shares / shares.sum(0), np.stack(states))

    def delta(self, x: np.ndarray, layer: int) -> np.ndarray:
        own, dim = f"layers.{layer}.self_attn", self.linear["head_dim"]

        def convolved(part: str) -> np.ndarray:
            kernel = self.weights[f"model.{own}.{part}_conv1d.weight"][:, 0].T
            rows = np.concatenate([np.zeros((len(kernel) - 1, kernel.shape[1])), self.matrix(x, f"{own}.{part}_proj")])
            out = sum(kernel[i] * rows[i : i + len(x)] for i in range(len(kernel)))
            return (out * sigmoid(out)).reshape(len(x), self.heads, dim)

        q, k, v = (convolved(part) for part in "qkv")
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-12) for part in (q, k))
        steps = self.matrix(self.matrix(x, f"{own}.f_a_proj"), f"{own}.f_b_proj") + self.weights[f"model.{own}.dt_bias"]
        rates = np.exp(self.weights[f"model.{own}.A_log"])[:, None]
        decays = np.exp(self.linear["gate_lower_bound"] * sigmoid(rates * steps.reshape(q.shape)))
        beta = sigmoid(self.matrix(x, f"{own}.b_proj"))
        state, out = np.zeros((self.heads, dim, dim)), np.empty(q.shape)
        for t in range(len(x)):
            state = decays[t][:, :, None] * state
            change = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * change[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t]) / dim**0.5
        gate = sigmoid(self.matrix(x, f"{own}.g_proj"))
        return self.matrix(self.norm(out, f"{own}.o_norm").reshape(len(x), -1) * gate, f"{own}.o_proj")

    def latent(self, x: np.ndarray, layer: int) -> np.ndarray:
        own, c, n = f"layers.{layer}.self_attn", self.config, len(x)
        q = self.matrix(self.norm(self.matrix(x, f"{own}.q_a_proj"), f"{own}.q_a_layernorm"), f"{own}.q_b_proj")
        both = self.matrix(x, f"{own}.kv_a_proj_with_mqa")
        low, shared = np.split(both, [c["kv_lora_rank"]], axis=1)
        made = self.matrix(self.norm(low, f"{own}.kv_a_layernorm"), f"{own}.kv_b_proj").reshape(n, self.heads, -1)
        k, v = np.split(made, [c["qk_nope_head_dim"]], axis=2)
        k = np.concatenate([k, np.repeat(shared[:, None], self.heads, 1)], axis=2)
        scores = np.einsum("nhd,phd->hnp", q.reshape(n, self.heads, -1), k) / k.shape[2] ** 0.5
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hnp,phd->nhd", shares / shares.sum(-1, keepdims=True), v).reshape(n, -1)
        return self.matrix(out * sigmoid(self.matrix(x, f"{own}.g_proj")), f"{own}.o_proj")

    def network(self, x: np.ndarray, module: str, *names: str) -> np.ndarray:
        gate, up = (self.matrix(x, f"{module}.{name}") for name in names[:2])
        first, second = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        bent = first * np.tanh(gate / first) * sigmoid(gate) * second * np.tanh(up / second)
        return self.matrix(bent, f"{module}.{names[2]}")

    def experts(self, x: np.ndarray, module: str) -> np.ndarray:
        c = self.config
        scores = sigmoid(self.matrix(x, f"{module}.gate"))
        bias = self.weights[f"model.{module}.gate.e_score_correction_bias"]
        chosen = np.argsort(-(scores + bias), axis=1)[:, : c["num_experts_per_token"]]
        low, out = self.matrix(x, f"{module}.routed_expert_down_proj"), []
        for row, experts, score in zip(low, chosen, scores, strict=True):
            shares = score[experts] / score[experts].sum() * c["routed_scaling_factor"]
            made = [self.network(row[None], f"{module}.experts.{e}", "w1", "w3", "w2")[0] for e in experts]
            out.append(shares @ np.array(made))
        routed = self.matrix(
            self.norm(np.array(out), f"{module}.routed_expert_norm"), f"{module}.routed_expert_up_proj"
        )
        return routed + self.network(x, f"{module}.shared_experts", "gate_proj", "up_proj", "down_proj")


def llama_cpps(path: Path) -> np.ndarray:
    with LlamaCpp(path, n_ctx=len(TOKENS)) as loaded:
        return loaded.logits(TOKENS)


def test_a_small_checkpoint_has_the_tensors_of_the_golden() -> None:
    assert shapes(CONFIG["text_config"]) == {name: tuple(shape) for name, shape in GOLDEN["checkpoint"].items()}


def test_llama_cpp_gives_the_logits_of_the_equations(tmp_path: Path) -> None:
    weights = write_kimi_k3(tmp_path / "model")
    path = converted(tmp_path, "F32")
    expected = Reference(weights, CONFIG["text_config"]).logits(TOKENS)
    assert mean_kl(expected, llama_cpps(path)) < 1e-6
    assert mean_kl(expected, bridge.Model.load(path, precision="f32", kv="f32").logits(TOKENS)) < 1e-8


LINEAR: dict[str, Any] = CONFIG["text_config"]["linear_attn_config"]
UNBOUNDED = {key: value for key, value in LINEAR.items() if key != "gate_lower_bound"}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "states put aside every third layer": {"attn_res_block_size": 3},
    "states put aside in each layer": {"attn_res_block_size": 1},
    "no states put aside": {"attn_res_block_size": 0},
    "more layers and heads": {
        "num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 6, "first_k_dense_replace": 2,
        "linear_attn_config": LINEAR | {"full_attn_layers": [1, 3, 7], "head_dim": 8, "num_heads": 6},
        "layer_types": None, "mlp_layer_types": None,
    },
    "experts that read a longer vector": {"routed_expert_hidden_size": 48, "num_experts": 6, "num_shared_experts": 2},
    "experts that read the state": {"routed_expert_hidden_size": None},
    "queries of the state, results without a gate": {"q_lora_rank": None, "gated": False},
    "decays without a bound": {"linear_attn_config": UNBOUNDED},
    "a bound near zero": {"linear_attn_config": LINEAR | {"gate_lower_bound": -0.25}},
    "only gates are bent": {"activation_situ_beta": 0.5, "activation_situ_linear_beta": 0.0},
    "both are bent far": {"activation_situ_beta": 0.5, "activation_situ_linear_beta": 0.25},
    "weights of experts as they are": {"moe_renormalize": False},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variants_graph_is_that_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """In a prompt, and in NumPy in parts."""
    write_kimi_k3(tmp_path / "model", **VARIANTS[name])
    path = converted(tmp_path, "F32")
    model = bridge.Model.load(path, precision="f32", kv="f32", context=len(TOKENS))
    found = model.logits(TOKENS)
    assert mean_kl(llama_cpps(path), found) < 1e-6
    plain = NumpyMachine(model._decoder.weights, model.config, len(TOKENS))
    parts = [plain.logits(plain.read(part)) for part in (TOKENS[:-3], TOKENS[-3:-2], TOKENS[-2:])]
    np.testing.assert_allclose(np.concatenate(parts), found, atol=1e-4 * np.abs(found).max())


@pytest.mark.parametrize("name", ["as published", "experts that read the state"])
def test_its_blocks_give_llama_cpps_perplexity_and_token_by_token_what_a_prompt_gives(
    name: str, tmp_path: Path
) -> None:  # fmt: skip
    write_kimi_k3(tmp_path / "model", **VARIANTS[name])
    path = converted(tmp_path, "Q8_0")
    model = bridge.Model.load(path, kv="f32", context=len(TOKENS))
    prompt, following = model.logits(TOKENS), np.arange(len(TOKENS) - 1)
    ours, peers = (-log_softmax(rows[:-1])[following, TOKENS[1:]].mean() for rows in (prompt, llama_cpps(path)))
    assert ours == pytest.approx(peers, abs=0.1)  # as of others with states: weights of no training carry rounding far
    decoder = model._decoder
    decoder.prepare()
    decoder.cache.length = 0
    assert mean_kl(prompt, np.array([decoder.next_scores(token).copy() for token in TOKENS])) < 1e-5


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("attn_res.block_size", None, "attn_res.block_size is None; must be a number of layers, or 0; convert"),
        ("attn_res.block_size", -2, "attn_res.block_size is -2; must be a number of layers, or 0; convert"),
        ("activation.situ_beta", None, "activation.situ_beta is missing; convert"),
        ("activation.situ_linear_beta", None, "a key of kimi-k3 is missing or has a value of the wrong kind"),
        ("kda.gate_lower_bound", 5.0, "kda.gate_lower_bound is 5.0; must be below 0, or missing; convert"),
        ("kda.gate_lower_bound", 0.0, "kda.gate_lower_bound is 0.0; must be below 0, or missing; convert"),
    ],
)
def test_metadata_that_cannot_run_is_refused(key: str, value: Any, problem: str) -> None:
    keys = {"general.architecture": "kimi-k3", **GOLDEN["keys"]}
    assert read_config(keys, Path("m.gguf")).activation == "situ"
    keys[f"kimi-k3.{key}"] = value
    with pytest.raises(BridgeError, match=f"m.gguf: .*{problem}"):
        read_config({key: value for key, value in keys.items() if value is not None}, Path("m.gguf"))


def test_a_file_without_the_scores_of_states_is_refused(tmp_path: Path) -> None:
    write_kimi_k3(tmp_path / "model", attn_res_block_size=0)
    file = bridge.open_gguf(converted(tmp_path, "F32"))
    config = read_config({**file.metadata, "kimi-k3.attn_res.block_size": 2}, file.path)
    with pytest.raises(BridgeError, match=r"output_res_score\.weight"):
        read_weights(file, config)


def test_the_4_bit_floats_of_its_experts_are_stacks_of_mxfp4_bit_for_bit(tmp_path: Path) -> None:
    write_kimi_k3(tmp_path / "float")
    said = config(fp4_scheme("mxfp4"), form="mxfp4-pack-quantized")
    stored: dict[str, np.ndarray] = {}

    def quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".experts." not in name:
            return None
        tensors, stored[name] = compressed_mxfp4(name, weight)
        return tensors

    encode_model(tmp_path / "mxfp4", tmp_path / "float", quantized, said, None, 1)
    bridge.convert(tmp_path / "mxfp4", tmp_path / "m.gguf", type="exact", mmproj_type="none")
    stacks = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "_exps." in t.name}
    assert len(stacks) == 9
    for name, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stack = stacks[f"blk.1.ffn_{name}_exps.weight"]
        assert stack.tensor_type == gguf.GGMLQuantizationType.MXFP4
        module = f"{PREFIX}model.layers.1.block_sparse_moe.experts"
        experts = np.stack([stored[f"{module}.{expert}.{part}"] for expert in range(4)])
        assert np.array_equal(gguf.dequantize(stack.data, stack.tensor_type).reshape(experts.shape), experts)


def test_the_checkpoint_that_is_made_of_its_gguf_makes_the_same_gguf(tmp_path: Path) -> None:
    """Its norms before scores are ones, and the vectors have what both were."""
    write_kimi_k3(tmp_path / "model")
    floats = [(".*", "F32")]
    bridge.convert(tmp_path / "model", tmp_path / "m.gguf", tensor_types=floats, mmproj_type="none")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", dtype="F32")
    bridge.convert(tmp_path / "new", tmp_path / "again.gguf", tensor_types=floats, mmproj_type="none")
    first, second = (
        {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("m.gguf", "again.gguf")
    )
    assert first.keys() == second.keys()
    assert all(np.allclose(first[name], second[name], rtol=1e-5) for name in first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"linear_num_heads": 2}, "2 heads of linear attention"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "in first layers only"),
    ],
)
def test_what_llama_cpp_has_no_graph_for_is_refused(text: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_kimi_k3(tmp_path / "model", **text)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(tmp_path / "model", tmp_path / "m.gguf", mmproj_type="none")

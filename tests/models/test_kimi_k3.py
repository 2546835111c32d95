"""Kimi K3, which transformers does not have: llama.cpp's logits, and the runtime's, against the equations in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.encode import write_model as encode_model
from tests.support.encode_compressed import config
from tests.support.encode_fp4 import compressed_mxfp4, fp4_scheme
from tests.support.family_models import copy_tokenizer
from tests.support.make_families import GOLDENS

GOLDEN = json.loads((GOLDENS / "kimi-k3.json").read_text())
TOKENS = np.random.default_rng(1).integers(0, 2048, 40).tolist()
PREFIX = "language_model."


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


def write_model(folder: Path, **text: Any) -> dict[str, np.ndarray]:
    """A checkpoint of the golden's names with random weights, which are returned; `text`: other keys of its config."""
    rng, weights = np.random.default_rng(8), {}  # without near-ties of experts
    for name, shape in GOLDEN["checkpoint"].items():
        values = rng.standard_normal(shape)
        if values.ndim == 1:
            values = 0.3 * values + name.endswith("norm.weight")
        else:
            values *= (4 if name.endswith("gate.weight") else 1) / values.shape[-1] ** 0.5
        weights[name] = values.astype(np.float32)
    folder.mkdir()
    config = {**GOLDEN["config"], "text_config": {**GOLDEN["config"]["text_config"], **text}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    copy_tokenizer(folder)
    return weights


def test_llama_cpp_gives_the_logits_of_the_equations(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "model")
    bridge.convert(tmp_path / "model", tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none")
    expected = Reference(weights, GOLDEN["config"]["text_config"]).logits(TOKENS)
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-6


def test_the_4_bit_floats_of_its_experts_are_stacks_of_mxfp4_bit_for_bit(tmp_path: Path) -> None:
    write_model(tmp_path / "float")
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
    write_model(tmp_path / "model")
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
    write_model(tmp_path / "model", **text)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(tmp_path / "model", tmp_path / "m.gguf", mmproj_type="none")

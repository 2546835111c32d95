"""Encoders that transformers does not have: Jina Embeddings v2 and nomic-embed-text v2, as their repositories' code
computes them, written from the formulas; and Jina Embeddings v3 as it was published."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

Shapes = dict[str, tuple[int, ...]]


class RemoteEncoder:
    """Random weights by their published names, and what they make of the ids of one text."""

    base_model_prefix = ""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        generator = torch.Generator().manual_seed(7)
        self.weights = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            norm = len(shape) == 1 and name.endswith(".weight")
            self.weights[name] = norm + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        words, types = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type"))
        return SimpleNamespace(last_hidden_state=self.states(words[ids[0]] + types[0])[None])

    def shapes(self) -> Shapes:
        raise NotImplementedError

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden] of the sum of embeddings."""
        raise NotImplementedError

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)


def _with_bias(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


class JinaBert(RemoteEncoder):
    """Jina Embeddings v2: ALiBi in both directions, and gelu(a) * b of the halves of one matrix."""

    def shapes(self) -> Shapes:
        c = self.config
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        shapes: Shapes = {
            "embeddings.word_embeddings.weight": (c["vocab_size"], hidden),
            "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], hidden),
            **_with_bias("embeddings.LayerNorm", hidden), **_with_bias("pooler.dense", hidden, hidden),
        }  # fmt: skip
        for n in range(c["num_hidden_layers"]):
            layer = f"encoder.layer.{n}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                shapes |= _with_bias(f"{layer}.attention.{part}", hidden, hidden)
            shapes |= _with_bias(f"{layer}.attention.output.LayerNorm", hidden)
            shapes[f"{layer}.mlp.gated_layers.weight"] = (2 * inner, hidden)
            shapes |= _with_bias(f"{layer}.mlp.wo", hidden, inner)
            shapes |= _with_bias(f"{layer}.mlp.layernorm", hidden)
        return shapes

    def states(self, x: torch.Tensor) -> torch.Tensor:
        c, heads = self.config, self.config["num_attention_heads"]
        eps = c["layer_norm_eps"]
        slopes = torch.tensor(_slopes(heads))
        positions = torch.arange(len(x))
        bias = -slopes[:, None, None] * (positions[:, None] - positions).abs()
        x = self.norm("embeddings.LayerNorm", x, eps)
        for n in range(c["num_hidden_layers"]):
            layer = f"encoder.layer.{n}"
            q, k, v = (
                self.linear(f"{layer}.attention.self.{part}", x).view(len(x), heads, -1).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
            attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(x.shape)
            x = self.norm(
                f"{layer}.attention.output.LayerNorm", x + self.linear(f"{layer}.attention.output.dense", attended), eps
            )
            gate, up = self.linear(f"{layer}.mlp.gated_layers", x).chunk(2, -1)
            x = self.norm(f"{layer}.mlp.layernorm", x + self.linear(f"{layer}.mlp.wo", functional.gelu(gate) * up), eps)
        return x


def _slopes(heads: int) -> list[float]:
    """By the paper's rule, https://arxiv.org/abs/2108.12409: halves for 8 heads, and so on."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    fewer = 2 ** (heads.bit_length() - 1)
    return [*_slopes(fewer), *_slopes(2 * fewer)[::2][: heads - fewer]]


class NomicMoe(RemoteEncoder):
    """nomic-embed-text v2: every second layer has experts, whose matrices are one below another."""

    def shapes(self) -> Shapes:
        c = self.config
        hidden, inner, experts = c["n_embd"], c["n_inner"], c["num_experts"]
        shapes: Shapes = {
            "embeddings.word_embeddings.weight": (c["vocab_size"], hidden),
            "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], hidden),
            **_with_bias("emb_ln", hidden),
        }  # fmt: skip
        for n in range(c["n_layer"]):
            layer = f"encoder.layers.{n}"
            shapes |= _with_bias(f"{layer}.attn.Wqkv", 3 * hidden, hidden)
            shapes |= _with_bias(f"{layer}.attn.out_proj", hidden, hidden)
            shapes |= _with_bias(f"{layer}.norm1", hidden) | _with_bias(f"{layer}.norm2", hidden)
            if n % c["moe_every_n_layers"] == 1:
                shapes[f"{layer}.mlp.router.layer.weight"] = (experts, hidden)
                shapes |= {f"{layer}.mlp.experts.mlp.{w}": (experts * inner, hidden) for w in ("w1", "w2")}
            else:
                shapes |= _with_bias(f"{layer}.mlp.fc1", inner, hidden) | _with_bias(f"{layer}.mlp.fc2", hidden, inner)
        return shapes

    def states(self, x: torch.Tensor) -> torch.Tensor:
        c, heads = self.config, self.config["n_head"]
        eps, size = c["layer_norm_epsilon"], c["n_embd"] // c["n_head"]
        frequencies = c["rotary_emb_base"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(len(x))[:, None, None] * frequencies

        def turned(heads: torch.Tensor) -> torch.Tensor:
            a, b = heads.chunk(2, -1)
            return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

        x = self.norm("emb_ln", x, eps)
        for n in range(c["n_layer"]):
            layer = f"encoder.layers.{n}"
            q, k, v = (part.view(len(x), heads, -1) for part in self.linear(f"{layer}.attn.Wqkv", x).chunk(3, -1))
            scores = torch.einsum("nhd,mhd->hnm", turned(q), turned(k)) / size**0.5
            attended = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).reshape(x.shape)
            x = self.norm(f"{layer}.norm1", x + self.linear(f"{layer}.attn.out_proj", attended), eps)
            if n % c["moe_every_n_layers"] == 1:
                added = self._experts(f"{layer}.mlp", x)
            else:
                added = self.linear(f"{layer}.mlp.fc2", functional.gelu(self.linear(f"{layer}.mlp.fc1", x)))
            x = self.norm(f"{layer}.norm2", x + added, eps)
        return x

    def _experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        count, hidden = self.config["num_experts"], x.shape[1]
        first, last = (self.weights[f"{name}.experts.mlp.{w}"].view(count, -1, hidden) for w in ("w1", "w2"))
        shares, chosen = self.linear(f"{name}.router.layer", x).softmax(-1).topk(self.config["moe_top_k"])
        rows = [
            sum(s * (functional.gelu(first[e] @ token) @ last[e]) for s, e in zip(share, experts, strict=True))
            for token, share, experts in zip(x, shares, chosen, strict=True)
        ]
        return torch.stack(rows)


REMOTE: dict[str, type[RemoteEncoder]] = {
    "JinaBertModel": JinaBert,
    "JinaBertForMaskedLM": JinaBert,
    "NomicMoe": NomicMoe,
}
TASKS = ("retrieval.query", "classification")


def as_published_jina3(folder: Path) -> None:
    """Jina Embeddings v3 with the names of its repository, where each matrix has an adapter for each task."""
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if name.endswith(".weight") and values.ndim == 2:
            adapted = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
            rows, columns = values.shape
            tensors[f"{adapted}.original"] = values
            tensors[f"{adapted}.0.lora_A"] = torch.ones(len(TASKS), 4, columns)
            tensors[f"{adapted}.0.lora_B"] = torch.ones(len(TASKS), rows, 4)
        else:
            tensors[f"roberta.{name}"] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    base = config.pop("rope_parameters")["rope_theta"]
    config |= {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": base, "lora_adaptations": list(TASKS), "lora_rank": 4, "lora_alpha": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def as_published_nomic(folder: Path, config: dict[str, Any]) -> None:
    """nomic-embed-text with the keys of its repository."""
    own = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["NomicBertModel"], "vocab_size": own["vocab_size"], **config}
    (folder / "config.json").write_text(json.dumps(config))

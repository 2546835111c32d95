"""A GGUF that is little more than its tokenizer: one layer of zeros around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bridge.models.outline import Outline
from tests.support.float_gguf import outline_of, write_gguf

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"model.layers.0.{part}.weight" for part in (*PARTS, *MLP, *NORMS)),
]


def write_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """CONFIG with changes (None removes a key) as the folder's config.json."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def vocab_gguf(folder: Path, vocab_size: int, pre: str | None = None, **config: Any) -> tuple[Outline, Path]:
    """The outline of a folder that holds a tokenizer, and a GGUF that llama.cpp loads."""
    write_config(folder, vocab_size=vocab_size, **config)
    outline = outline_of(folder, NAMES, pre=pre)
    return outline, write_vocab(outline, folder / "vocab.gguf")


def write_vocab(outline: Outline, path: Path) -> Path:
    """An outline's GGUF, its weights zeros."""
    zeros = {part.source: np.zeros(part.shape, np.float32) for tensor in outline.tensors for part in tensor.parts}
    return write_gguf(outline, zeros, path)


def vocabulary(outline: Outline) -> dict[str, Any]:
    """The values of the keys tokenizer.ggml.*, by what follows."""
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix): v.value for key, v in outline.metadata.items() if key.startswith(prefix)}

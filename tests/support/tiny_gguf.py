"""A decoder of random weights as a GGUF without a tokenizer, small enough for a GPU made of NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from bridge.blocks import ROUNDED
from bridge.blocks.read import READ
from bridge.runtime.bench import put_d


def write_decoder(
    path: Path,
    arch: str = "llama",
    types: Mapping[str, str] | None = None,
    hidden: int = 32,
    inner: int = 32,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    layers: int = 1,
    vocab: int = 32,
    biases: tuple[str, ...] = (),
    tied: bool = False,
) -> Path:
    """`types`: a type per part of a tensor's name ("attn_q"), "" for all others, by default Q4_0."""
    types = {"": "Q4_0", **(types or {})}
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = gguf.GGMLQuantizationType[types.get(name.rpartition(".")[2], types[""])]
        if kind.name == "NVFP4":  # gguf makes none: random codes and scales, and the factor beside them
            blocks = rng.integers(0, 256, (rows, columns // 64, 36), np.uint8)
            blocks[:, :, :4] = rng.integers(0x30, 0x40, (rows, columns // 64, 4))  # 0.25 to 1
            writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)
            writer.add_tensor(f"{name}.scale", rng.uniform(0.03, 0.07, 1).astype(np.float32))
            return
        if kind.name in ROUNDED:  # gguf makes none of most: random codes and scales
            block = READ[kind.name]
            blocks = rng.integers(0, 256, (rows, columns // block.size, block.nbytes), np.uint8)
            put_d(block, blocks, np.ones(blocks.shape[:2], np.float16))
            spread = gguf.quants.dequantize(blocks.reshape(rows, -1), kind).std()
            put_d(block, blocks, rng.normal(0, 0.15 / spread, blocks.shape[:2]).astype(np.float16))
            writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)
            return
        weights = rng.normal(0, 0.15, (rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)

    def vector(name: str, size: int, mean: float) -> None:
        writer.add_tensor(name, rng.normal(mean, 0.1, size).astype(np.float32))

    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    matrix("token_embd", vocab, hidden)
    for i in range(layers):
        for part, (rows, columns) in shapes.items():
            matrix(f"blk.{i}.{part}", rows, columns)
            if part in biases:
                vector(f"blk.{i}.{part}.bias", rows, 0)
        vector(f"blk.{i}.attn_norm.weight", hidden, 1)
        vector(f"blk.{i}.ffn_norm.weight", hidden, 1)
        if arch == "qwen3":
            vector(f"blk.{i}.attn_q_norm.weight", head_dim, 1)
            vector(f"blk.{i}.attn_k_norm.weight", head_dim, 1)
    vector("output_norm.weight", hidden, 1)
    if not tied:
        matrix("output", vocab, hidden)
    if "output" in biases:
        vector("output.bias", vocab, 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Gemma's packed weights, against the functions of transformers that decode them."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from tests.support.encode import write_folder
from tests.support.refusal import refusal

NAME, WORDS = "model.layers.0.mlp.down_proj", "model.embed_tokens"
LABEL = {
    "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True,
    "module_quant_configs": {r"mlp\.down": {"num_bits": 2}, r"attn": {"num_bits": 8}},
}  # fmt: skip


def tensors(seed: int = 0, rows: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = "model.layers.0.self_attn.q_proj"
    return {
        f"{NAME}.weight": rng.integers(0, 256, (rows, 16)).astype(np.uint8),
        f"{NAME}.weight_scale": rng.normal(0, 1, (rows, 1)).astype(np.float32),
        f"{NAME}.input_activation_scale": np.ones((), np.float32),
        f"{NAME}.output_activation_scale": np.ones((), np.float32),
        f"{q}.weight": rng.integers(-128, 128, (rows, 64)).astype(np.int8),
        f"{q}.weight_scale": rng.normal(0, 1, (rows, 1)).astype(np.float32),
        f"{WORDS}.embedding_quantized": rng.integers(0, 256, (10, 32)).astype(np.uint8),
        f"{WORDS}.embedding_scale": rng.normal(0, 1, (10, 2)).astype(np.float32),
        "model.layers.0.self_attn.k_cache_scale": np.ones((), np.float32),
    }


def test_weights_are_those_of_transformers(tmp_path):
    gemma = pytest.importorskip("transformers.integrations.gemma_quant")
    import torch

    stored = tensors()
    with open_checkpoint(write_folder(tmp_path, stored, LABEL)) as checkpoint:
        assert {name: m.bits for name, m in checkpoint.modules.items()} == {
            NAME: 2, WORDS: 4, "model.layers.0.self_attn.q_proj": 8,
        }  # fmt: skip
        for name, unpack, part in (
            (NAME, gemma._unpack_int2, "weight"),
            ("model.layers.0.self_attn.q_proj", lambda codes, _: codes, "weight"),
            (WORDS, gemma._unpack_int4, "embedding_quantized"),
        ):
            codes = unpack(torch.from_numpy(stored[f"{name}.{part}"]), 64).numpy()
            scale = stored[f"{name}.{part.removesuffix('_quantized')}_scale"]
            read = checkpoint.read_module(name).dequantize()
            assert np.array_equal(read, codes * np.repeat(scale, 64 // scale.shape[1], 1))
            rows = np.array([4, 1])
            assert np.array_equal(checkpoint.read_module(name, rows).dequantize(), read[rows])
        assert not checkpoint.tensors
        assert "8 bits" in checkpoint.settings()
        assert checkpoint.quant.describe() == "Gemma's packed weights, 2 and 4 and 8 bits, symmetric"


def test_bytes_packed_by_hand(tmp_path):
    """0b11100100 is -2, -1, 0, 1 of two bits; 0xF0 is -8, then 7 of four."""
    stored = {
        f"{NAME}.weight": np.full((1, 16), 0b11100100, np.uint8),
        f"{NAME}.weight_scale": np.full((1, 1), 0.5, np.float32),
        f"{WORDS}.embedding_quantized": np.full((1, 32), 0xF0, np.uint8),
        f"{WORDS}.embedding_scale": np.full((1, 1), 2, np.float32),
    }
    with open_checkpoint(write_folder(tmp_path, stored, LABEL)) as checkpoint:
        assert checkpoint.read_module(NAME).dequantize()[0, :4].tolist() == [-1, -0.5, 0, 0.5]
        assert checkpoint.read_module(WORDS).dequantize()[0, :2].tolist() == [-16, 14]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_bits": 3}, "num_bits must be 2, 4 or 8"),
        ({"module_quant_configs": {"(": {}}}, "not a table of patterns"),
        ({"module_quant_configs": {"down": {"num_bits": 8}}}, "contradict"),
    ],
)
def test_what_the_config_gets_wrong_is_named(tmp_path, change, said):
    assert said in refusal(write_folder(tmp_path, tensors(), LABEL | change))

"""Checkpoint -> GGUF -> checkpoint, over all shared checkpoints with integer codes, and what transformers says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from scripts.peers.predictions import mean_kl
from tests.conftest import CHECKPOINT, shared

# a checkpoint -> the formats that hold its codes
INTEGERS = {
    "qwen3-gptq-4bit-g128-sym": ("gptq", "gptq_v2", "compressed-tensors", "awq", "mlx", "hqq"),
    "qwen3-gptq-4bit-g128-asym-v2": ("gptq_v2", "awq", "mlx", "hqq"),
    "qwen3-gptq-2bit-g64-asym-v2": ("gptq_v2", "mlx", "hqq"),
    "qwen3-gptq-3bit-g128-sym": ("gptq", "gptq_v2", "gptq_p"),
    "qwen3-gptq-8bit-g128-sym": ("gptq", "gptq_v2", "compressed-tensors", "mlx", "hqq"),
    "qwen3-gptq-4bit-g32-sym": ("gptq", "gptq_v2", "compressed-tensors", "mlx"),
    "qwen3-gptq-4bit-channel-sym": ("gptq", "gptq_v2"),
    "qwen3-gptq-5bit-g128-planar": ("gptq_p", "mlx", "hqq"),
    "qwen3-awq-4bit-g128-gemm": ("awq", "gptq_v2"),
    "qwen3-awq-4bit-g128-gemv": ("awq", "gptq_v2"),
    "qwen3-ct-w4a16-sym": ("compressed-tensors", "gptq_v2"),
    "qwen3-ct-w4a16-asym": ("gptq_v2", "mlx"),
    "llama-gptq-4bit-g128-sym": ("gptq", "gptq_v2", "compressed-tensors", "mlx"),
}


def same_codes(first: Path, second: Path) -> None:
    """All modules have equal codes and zero points per weight; scales differ by what Q2_K's 4 bits cost at most."""
    with bridge.open_checkpoint(first) as old, bridge.open_checkpoint(second) as new:
        assert new.modules.keys() == old.modules.keys()
        for name in old.modules:
            a, b = old.reader.read(name), new.reader.read(name)
            assert np.array_equal(a.codes, b.codes), name
            groups = a.groups(), b.groups()
            zeros = a.zeros[:, groups[0]], b.zeros[:, groups[1]]
            assert np.abs(zeros[0] - zeros[1]).max() < 0.01, name  # MLX has offsets, rounded to halves
            assert np.allclose(a.scales[:, groups[0]], b.scales[:, groups[1]], rtol=0.1), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "format"), [(name, format) for name, all in INTEGERS.items() for format in all])
def test_codes_come_back_from_the_gguf(name: str, format: str, converted, tmp_path: Path) -> None:
    home = shared(f"checkpoints/{name}")
    path, _ = converted(name)
    bridge.export(path, tmp_path / "new", format, config=home)
    same_codes(home, tmp_path / "new")


@pytest.mark.exhaustive
@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_transformers_says_of_an_export_what_the_gguf_says(type: str, tmp_path: Path) -> None:
    """compressed-tensors, which transformers loads by itself, against floats of the same GGUF."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf", type=type)
    bridge.export(tmp_path / "m.gguf", tmp_path / "floats", "floats", dtype="F32")
    bridge.export(tmp_path / "m.gguf", tmp_path / "codes", "compressed-tensors")
    tokens = torch.tensor([np.random.default_rng(1).integers(0, 2000, 64).tolist()])
    found = []
    for name in ("floats", "codes"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            found.append(model(tokens).logits[0].numpy())
    assert mean_kl(*found) < 1e-5

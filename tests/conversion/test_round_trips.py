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


ACT_ORDER = ("llama-gptq-4bit-g128-asym-actorder", "qwen3-gptq-4bit-g64-asym-actorder")
# 4-bit floats -> the formats that hold them
FP4 = {
    "llama-ct-mxfp4a16": ("compressed-tensors", "mlx"),
    "llama-mlx-nvfp4": ("mlx", "compressed-tensors", "modelopt"),
}


def same_codes(first: Path, second: Path, head: bool = False) -> None:
    """All modules have equal codes and zero points per weight; scales differ by what Q2_K's 4 bits cost at most.

    head  the first has a quantized head, which is floats in the second
    """
    with bridge.open_checkpoint(first) as old, bridge.open_checkpoint(second) as new:
        assert new.modules.keys() == old.modules.keys() - ({"lm_head"} if head else set())
        for name in new.modules:
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
@pytest.mark.parametrize("name", ACT_ORDER)
def test_act_order_comes_back_with_sorted_columns(name: str, converted, tmp_path: Path) -> None:
    """`convert` sorts the columns of down_proj, with the rows that feed it, and requantizes the other layers."""
    home = shared(f"checkpoints/{name}")
    path, _ = converted(name)
    bridge.export(path, tmp_path / "new", "gptq_v2", config=home)
    with bridge.open_checkpoint(home) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        assert new.modules.keys() == old.modules.keys()
        for layer in (name.removesuffix(".down_proj") for name in old.modules if name.endswith(".down_proj")):
            a, b = (ckpt.reader.read(f"{layer}.down_proj") for ckpt in (old, new))
            order = np.argsort(a.groups(), kind="stable")
            assert not np.array_equal(order, np.arange(len(order)))
            assert np.array_equal(a.codes[:, order], b.codes), layer
            assert np.array_equal(a.zeros[:, a.groups()[order]], b.zeros[:, b.groups()]), layer
            for feeding in ("gate_proj", "up_proj"):
                a, b = (ckpt.reader.read(f"{layer}.{feeding}").dequantize() for ckpt in (old, new))
                assert np.square(a[order] - b).sum() < 5e-3 * np.square(a).sum(), (layer, feeding)


@pytest.mark.exhaustive
def test_codes_come_back_beside_a_quantized_head(tmp_path: Path) -> None:
    home = shared("more/llama-gptq-4bit-lmhead")
    bridge.convert(home, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", "gptq_v2", config=home)
    same_codes(home, tmp_path / "new", head=True)
    with bridge.open_checkpoint(home) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        before, after = old.reader.read("lm_head").dequantize(), new.store.read("lm_head.weight").astype(np.float32)
        assert np.allclose(before, after, rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "format"), [(name, format) for name, all in FP4.items() for format in all])
def test_4_bit_floats_come_back_from_the_gguf(name: str, format: str, tmp_path: Path) -> None:
    home = shared(f"more/{name}")
    bridge.convert(home, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", format, config=home)
    with bridge.open_checkpoint(home) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        layers = {name for name in new.modules if ".layers." in name}
        assert layers == {name for name in old.modules if ".layers." in name}
        for name in layers:
            a, b = old.reader.read(name), new.reader.read(name)
            assert np.array_equal(a.codes, b.codes), name
            assert np.array_equal(a.scales, b.scales), name
            assert a.tensor_scale == b.tensor_scale, name


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

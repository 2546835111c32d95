"""PEFT adapters of quantized checkpoints: as GGUFs for llama.cpp and for our runtime, and merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT
from tests.models.test_logits import divergence
from tests.support.adapters import Arrays, low_rank, merged, write_adapter
from tests.support.encode import write_awq, write_gptq
from tests.support.encode_compressed import write_packed

TOKENS = np.random.default_rng(1).integers(3, 1000, 64).tolist()
MODULES = [*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))]
WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "gptq": lambda out, model: write_gptq(out, model),
    "gptq, act-order": lambda out, model: write_gptq(out, model, desc_act=True),
    "awq": lambda out, model: write_awq(out, model),
    "compressed-tensors": lambda out, model: write_packed(out, model, 4),
}


def weights_of(folder: Path) -> Arrays:
    """A checkpoint's weights, dequantized."""
    with bridge.open_checkpoint(folder) as checkpoint:
        weights = {f"{name}.weight": checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
        return weights | {name: checkpoint.read_float(name) for name in checkpoint.tensors}


def every_linear(weights: Arrays) -> dict[str, tuple[int, int]]:
    """The linear layers that adapters usually change, and their shapes."""
    names = (name.removesuffix(".weight") for name in weights)
    return {name: weights[f"{name}.weight"].shape for name in names if name.endswith(tuple(MODULES))}  # type: ignore[misc]


def float_logits(folder: Path, weights: Arrays) -> np.ndarray:
    """transformers' logits of a checkpoint's model with these weights in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([TOKENS])).logits[0].numpy()
    return logits


def tensors_of(path: Path) -> Arrays:
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(str(path)).tensors}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", WRITERS)
def test_base_and_adapter_in_llama_cpp_are_the_merged_model(form: str, small_model: Path, tmp_path: Path) -> None:
    """The base is written as floats in the rows and columns of its usual file, so that activations stay floats."""
    base = tmp_path / "base"
    WRITERS[form](base, small_model)
    weights = weights_of(base)
    tensors = low_rank(every_linear(weights))
    adapter = write_adapter(tmp_path / "adapter", tensors)
    bridge.convert(base, tmp_path / "base.gguf", tensor_types=[(".*", "F32")])
    changed = bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=base)
    assert len(changed) == len(tensors) // 2
    with LlamaCpp(tmp_path / "base.gguf", lora=tmp_path / "lora.gguf") as adapted:
        logits = adapted.logits(TOKENS)
    before, after = float_logits(base, weights), float_logits(base, merged(weights, tensors, 2.0))
    assert divergence(after, before) > 0.01
    assert divergence(after, logits) < 1e-6


def test_rows_and_columns_are_in_the_order_of_the_converted_file(small_model: Path, tmp_path: Path) -> None:
    """Act-order of down_proj is undone by permuting the rows of gate and up: a and b follow."""
    write_gptq(tmp_path / "base", small_model, desc_act=True)
    weights = weights_of(tmp_path / "base")
    module = "model.layers.1.mlp"
    names = [f"{module}.{part}_proj" for part in ("gate", "up", "down")]
    tensors = low_rank({name: weights[f"{name}.weight"].shape for name in names})  # type: ignore[misc]
    bridge.convert_lora(write_adapter(tmp_path / "a", tensors), tmp_path / "a.gguf", base=tmp_path / "base")
    found = tensors_of(tmp_path / "a.gguf")
    with bridge.open_checkpoint(tmp_path / "base") as checkpoint:
        group = checkpoint.group_order(f"{module}.down_proj")
    assert group is not None
    order = np.argsort(group, kind="stable")
    assert (np.diff(order) != 1).any()
    down = tensors[f"{module}.down_proj.lora_A.weight"]
    np.testing.assert_array_equal(found["blk.1.ffn_down.weight.lora_a"], down[:, order])
    for part in ("gate", "up"):
        b = tensors[f"{module}.{part}_proj.lora_B.weight"]
        np.testing.assert_array_equal(found[f"blk.1.ffn_{part}.weight.lora_b"], b[order])


def converted(tmp_path: Path, tensors: Arrays, **config: object) -> tuple[Arrays, float]:
    """The tensors and the alpha of an adapter of the project's own checkpoint."""
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)  # type: ignore[arg-type]
    bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=CHECKPOINT)
    reader = gguf.GGUFReader(str(tmp_path / "lora.gguf"))
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["general.architecture"].contents() == "qwen3"
    return tensors_of(tmp_path / "lora.gguf"), reader.fields["adapter.lora.alpha"].contents()


Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
SHAPES = {Q: (256, 256), K: (128, 256)}


def test_a_plain_adapters_matrices_are_unchanged(tmp_path: Path) -> None:
    tensors = low_rank(SHAPES)
    found, alpha = converted(tmp_path, tensors)
    assert alpha == 8
    np.testing.assert_array_equal(found["blk.0.attn_q.weight.lora_a"], tensors[f"{Q}.lora_A.weight"])
    np.testing.assert_array_equal(found["blk.0.attn_k.weight.lora_b"], tensors[f"{K}.lora_B.weight"])


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    tensors = low_rank(SHAPES)
    found, alpha = converted(tmp_path, tensors, use_rslora=True)
    assert alpha / 4 == 8 / 4**0.5
    np.testing.assert_array_equal(found["blk.0.attn_q.weight.lora_b"], tensors[f"{Q}.lora_B.weight"])


def test_patterns_of_ranks_and_alphas_are_in_the_scale(tmp_path: Path) -> None:
    tensors = low_rank({Q: (256, 256)}) | low_rank({K: (128, 256)}, r=2)
    found, alpha = converted(tmp_path, tensors, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 16})
    b = found["blk.0.attn_k.weight.lora_b"]
    np.testing.assert_allclose(alpha / 2 * b, 16 / 2 * tensors[f"{K}.lora_B.weight"], rtol=1e-6)
    np.testing.assert_array_equal(found["blk.0.attn_q.weight.lora_b"], tensors[f"{Q}.lora_B.weight"])


def test_a_matrix_that_was_trained_whole_is_a_change_of_full_rank(tmp_path: Path) -> None:
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        own = checkpoint.read_module(Q).dequantize()
    new = own + np.random.default_rng(0).normal(size=own.shape).astype(np.float32)
    found, alpha = converted(tmp_path, {f"{Q}.weight": new})
    a, b = found["blk.0.attn_q.weight.lora_a"], found["blk.0.attn_q.weight.lora_b"]
    np.testing.assert_allclose(own + alpha / len(a) * (b @ a), new, atol=1e-5)


def test_qa_lora_reads_means_of_groups_of_columns(tmp_path: Path) -> None:
    """As PEFT computes it: the means times their number."""
    tensors = low_rank({Q: (256, 4)})
    found, alpha = converted(tmp_path, tensors, use_qalora=True, qalora_group_size=64)
    x = np.random.default_rng(0).normal(size=256).astype(np.float32)
    a, b = found["blk.0.attn_q.weight.lora_a"], found["blk.0.attn_q.weight.lora_b"]
    read = 4 * x.reshape(4, 64).mean(1)
    expected = 8 / 4 * tensors[f"{Q}.lora_B.weight"] @ (tensors[f"{Q}.lora_A.weight"] @ read)
    np.testing.assert_allclose(alpha / 4 * b @ (a @ x), expected, rtol=1e-4, atol=1e-5)


EMBEDDINGS = "model.embed_tokens"
REFUSED: dict[str, tuple[Arrays, dict[str, object], str]] = {
    "the shape of another base": (low_rank({Q: (256, 128)}), {}, r"q_proj is a change of shape \[256, 128\], .*has"),
    "a layer that is missing": (low_rank({"model.layers.9.self_attn.q_proj": (256, 256)}), {}, "changes model.layers"),
    "half a pair": ({f"{Q}.lora_A.weight": np.ones((4, 256), np.float32)}, {}, "has no lora_B"),
    "matrices that do not fit": (
        {f"{Q}.lora_A.weight": np.ones((4, 256), np.float32), f"{Q}.lora_B.weight": np.ones((256, 3), np.float32)},
        {},
        "must be two matrices",
    ),
    "another rank": (low_rank(SHAPES), {"r": 8}, "has rank 4, adapter_config.json says 8"),
    "DoRA": (
        low_rank(SHAPES) | {f"{m}.lora_magnitude_vector": np.ones(n, np.float32) for m, (n, _) in SHAPES.items()},
        {"use_dora": True},
        "DoRA",
    ),
    "DoRA without its vector": (low_rank(SHAPES), {"use_dora": True}, "has no lora_magnitude_vector"),
    "a norm": ({"model.norm.weight": np.ones(256, np.float32)}, {}, "model.norm.weight is not a plain matrix"),
    "tied embeddings": (low_rank({EMBEDDINGS: (2048, 256)}), {}, "is also the head of the base model"),
    "another tied head": ({"lm_head.weight": np.ones((2048, 256), np.float32)}, {}, "lm_head.weight has no tensor"),
    "added tokens": ({f"{EMBEDDINGS}.weight": np.ones((2050, 256), np.float32)}, {}, "tokens were added"),
    "another method": (low_rank(SHAPES), {"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "no alpha": (low_rank(SHAPES), {"lora_alpha": None}, "lora_alpha is None, must be a number from"),
    "an infinite alpha": (low_rank(SHAPES), {"lora_alpha": float("inf")}, "lora_alpha is inf, must be a number from"),
    "a pattern that is none": (low_rank(SHAPES), {"alpha_pattern": {"(": 1}}, "is not a regular expression"),
    "an alpha beyond float32": (low_rank(SHAPES), {"alpha_pattern": {"q_proj": 1e300}}, "'q_proj' is 1e.300, must be"),
    "a rank of 401 digits": (low_rank(SHAPES), {"rank_pattern": {"q_proj": 10**400}}, "must be a number from"),
    "an alpha that is true": (low_rank(SHAPES), {"alpha_pattern": {"q_proj": True}}, "'q_proj' is True, must be"),
    "matrices that overflow": (
        {f"{Q}.lora_A.weight": np.full((4, 256), 1e20, "f4"), f"{Q}.lora_B.weight": np.full((256, 4), 1e20, "f4")},
        {},
        r"q_proj has values of up to 1.0e.20 and 1.0e.20",
    ),
    "QA-LoRA of 10^9 columns": (
        low_rank(SHAPES), {"use_qalora": True, "qalora_group_size": 10**9}, r"a change of shape \[256, 256000000000\]"
    ),
    "a saved matrix with a change of another shape": (
        {f"{Q}.weight": np.ones((256, 256), "f4"), **low_rank({Q: (256, 128)})}, {}, r"change of shape \[256, 128\]"
    ),
    "patterns that are a list": (low_rank(SHAPES), {"rank_pattern": [1]}, "must map patterns"),
    "a changed base": (low_rank(SHAPES), {"init_lora_weights": "pissa"}, "it changed the base model's weights too"),
    "QA-LoRA without its groups": (low_rank(SHAPES), {"use_qalora": True}, "qalora_group_size is None, must be"),
    "an unknown tensor": ({f"{Q}.lora_C.weight": np.ones(4, np.float32)}, {}, "not a tensor of a LoRA"),
    "NaN": ({f"{Q}.weight": np.full((256, 256), np.nan, np.float32)}, {}, "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_applied_is_refused_in_a_sentence(why: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[why]
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)  # type: ignore[arg-type]
    with pytest.raises(BridgeError, match=message):
        bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=CHECKPOINT)
    assert not (tmp_path / "lora.gguf").exists()


def test_a_folder_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"has no adapter_config\.json"):
        bridge.convert_lora(CHECKPOINT, tmp_path / "lora.gguf", base=CHECKPOINT)
    adapter = write_adapter(tmp_path / "adapter", low_rank(SHAPES))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(BridgeError, match=r"adapter_model\.safetensors: not found"):
        bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=CHECKPOINT)


def test_the_command_writes_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank(SHAPES))
    bridge.convert_lora(adapter, tmp_path / "python.gguf", base=CHECKPOINT)
    arguments = ["convert-lora", str(adapter), str(tmp_path / "command.gguf"), "--base", str(CHECKPOINT)]
    assert main(arguments) == 0
    assert "changes 2 tensors" in capsys.readouterr().out
    assert (tmp_path / "command.gguf").read_bytes() == (tmp_path / "python.gguf").read_bytes()
    assert main(arguments) == 2
    assert "exists; --force replaces it" in capsys.readouterr().err

"""Q2_0 holds symmetric 2-bit codes bit for bit, and is used where the file is for a llama.cpp that knows it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import bridge
from bridge.blocks.integers.q2_0 import Q2_0
from bridge.checkpoint import GroupedTensor
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.recipe import Recipe
from bridge.conversion.writing.report import CARRIED
from bridge.conversion.writing.verify import failures, verify
from bridge.encode.carrying.carry import CannotCarryError, carry
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.encode.type_choice import exact_type
from bridge.errors import BridgeError
from bridge.runtime.cpu.engines import dequantize
from scripts.peers.llama import ggml
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.support.encode import write_gptq
from tests.support.encode_formats import write_auto_round


def grouped(zero: float = 2, group_size: int = 64, seed: int = 0) -> GroupedTensor:
    rng = np.random.default_rng(seed)
    scales = rng.normal(0, 0.02, (8, 256 // group_size)).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, 4, (8, 256)).astype(np.uint8)
    return GroupedTensor("t", 2, codes, scales, np.full_like(scales, zero), group_size)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("group_size", [64, 128, 256])
def test_2_bit_codes_about_a_zero_point_of_1_or_2_are_exact(zero, group_size):
    t = grouped(zero, group_size)
    mapped = carry(t, Q2_0)
    assert mapped.fidelity.error == 0
    assert mapped.fidelity.kept == t.codes.size
    np.testing.assert_array_equal(dequantize.rows("Q2_0", mapped.data), t.dequantize())
    assert exact_type(t) is Q2_0


@pytest.mark.parametrize(("zero", "group_size"), [(0, 64), (3, 64), (2, 32), (1.5, 64)])
def test_other_zero_points_and_smaller_groups_are_not(zero, group_size):
    t = grouped(zero, group_size)
    assert exact_type(t) is not Q2_0
    if zero != 1.5:  # which is rounded, and costs
        with pytest.raises(CannotCarryError):
            carry(t, Q2_0)


def test_floats_are_quantized_no_worse_than_by_ggml():
    x = np.random.default_rng(1).normal(0, 0.02, (16, 512)).astype(np.float32)
    ours = quantize_rows(x, Q2_0)
    theirs = ggml.dequantize(ggml.quantize(x, "Q2_0"), int(Q2_0.ggml))
    assert ours.error == pytest.approx(np.square(dequantize.rows("Q2_0", ours.data) - x).sum(), rel=1e-4)
    assert ours.error < np.square(theirs - x).sum()


def test_the_scales_of_floats_are_as_good_as_the_best_of_many():
    x = np.random.default_rng(2).normal(0, 0.02, (64, Q2_0.size)).astype(np.float32)
    widest = np.abs(x).max(1, keepdims=True)
    least = np.full(len(x), np.inf)
    for share in np.concatenate([np.linspace(-1.2, -0.2, 300), np.linspace(0.2, 1.2, 300)]):
        d = (share * widest).astype(np.float16).astype(np.float32)
        least = np.minimum(least, np.square(x - d * np.clip(np.rint(x / d), -1, 2)).sum(1))
    assert quantize_rows(x, Q2_0).error < 1.002 * least.sum()


@pytest.mark.parametrize("writer", ["gptq", "auto-round"])
def test_exact_takes_it_and_llama_cpp_loads_it(tmp_path, small_model, writer):
    if writer == "gptq":
        stored = {n: q.dequantize() for n, q in write_gptq(tmp_path / "in", small_model, 2, 64).items()}
    else:
        stored = write_auto_round(tmp_path / "in", small_model, "auto_round:auto_gptq", 2, 128)
    report = bridge.convert(tmp_path / "in", tmp_path / "m.gguf", type="exact")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.type, t.outcome, t.fidelity.error) for t in coded} == {("Q2_0", CARRIED, 0)}
    assert any("llama.cpp has Q2_0 since build 10015 (July 2026)" in note for note in report.notes)
    for tensor in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors:
        if tensor.name == "blk.1.ffn_up.weight":
            read = ggml.dequantize(tensor.data, int(Q2_0.ggml))
            np.testing.assert_array_equal(read, stored["model.layers.1.mlp.up_proj"])
    assert failures(verify(tmp_path / "m.gguf", tmp_path / "in")) == []
    with LlamaCpp(tmp_path / "m.gguf", n_ctx=32) as model:
        assert np.isfinite(model.logits(model.tokenize("ROMEO:"))).all()


def test_auto_takes_it_for_builds_that_know_it_alone(tmp_path, small_model):
    write_gptq(tmp_path / "in", small_model, 2, 64)

    def types(**options):
        plan = plan_checkpoint(tmp_path / "in", **options)
        said = any("earlier ones cannot load this file" in note for note in plan.notes)
        return {t.type for t in plan.tensors if t.kind == "ffn_up"}, said

    assert types() == ({"Q2_K"}, False)
    assert types(target="llama.cpp@11549") == ({"Q2_0"}, False)
    assert types(target="llama.cpp@b10014") == ({"Q2_K"}, False)
    assert types(type="exact", target="llama.cpp@b10014") == ({"Q4_0"}, False)
    assert types(type="Q2_0") == ({"Q2_0"}, True)


def test_a_target_is_llama_cpp_and_a_build():
    for target in ("llama.cpp", "ollama@3", "llama.cpp@new"):
        with pytest.raises(BridgeError, match=r"must be llama.cpp and its build"):
            Recipe(target=target)
    with pytest.raises(BridgeError, match=r"llama\.cpp has Q2_0 since build 10015; choose another type"):
        Recipe("Q2_0", target="llama.cpp@9000")

"""Every format but GPTQ and AWQ, from a whole checkpoint to llama.cpp: codes kept, weights near, text the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.writing.report import CARRIED, FLOAT, PARTLY, REQUANTIZED
from bridge.conversion.writing.verify import failures, verify
from scripts.peers import reference
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax, mean_kl
from tests.conftest import CHECKPOINT
from tests.support import encode_compressed as compressed
from tests.support import encode_formats as write
from tests.support import encode_fp4 as fp4
from tests.support.described import describe
from tests.support.encode import write_awq
from tests.support.tiny_models import save_model

# format -> how to write it; the type of its linears; NMSE at most; what inspect calls it
FORMATS: dict[str, tuple[Callable[[Path, Path], dict[str, np.ndarray]], str, float, str]] = {
    "ct-2bit-g64-asym": (
        partial(compressed.write_packed, bits=2, group_size=64, sym=False),
        "Q2_K",
        4e-4,
        "compressed-tensors pack-quantized, 2 bits, groups of 64, asymmetric",
    ),
    "ct-3bit": (
        partial(compressed.write_packed, bits=3, by_words=True),
        "Q3_K",
        3.5e-6,
        "compressed-tensors pack-quantized, 3 bits, groups of 128, symmetric",
    ),
    "ct-4bit-channel": (
        partial(compressed.write_packed, bits=4, group_size=-1),
        "Q4_K",
        0,
        "compressed-tensors pack-quantized, 4 bits, one group a row",
    ),
    "ct-5bit-asym": (
        partial(compressed.write_packed, bits=5, sym=False),
        "Q5_K",
        4e-6,
        "compressed-tensors pack-quantized, 5 bits",
    ),
    "ct-6bit": (
        partial(compressed.write_packed, bits=6, by_words=True),
        "Q6_K",
        1e-5,
        "compressed-tensors pack-quantized, 6 bits",
    ),
    "ct-int8": (compressed.write_int8, "Q8_0", 0, "compressed-tensors int-quantized, 8 bits, one group a row"),
    "ct-mxfp6": (compressed.write_mxfp6, "Q8_0", 0, "compressed-tensors mxfp6-pack-quantized, 6-bit floats, groups of"),
    "ct-mixed": (compressed.write_mixed, "Q4_K", 4e-6, "compressed-tensors pack-quantized and int-quantized, (4 bits"),
    "mlx-4bit-g64": (lambda to, model: write.write_mlx(to, model, 4, 64), "Q4_K", 1.5e-5, "MLX, affine, 4 bits"),
    "mlx-mixed": (
        lambda to, model: write.write_mlx(
            to, model, 3, 128, {f"model.layers.{i}.mlp.down_proj": {"bits": 6, "group_size": 64} for i in range(4)}
        ),
        "Q4_K",
        1e-5,
        "MLX, affine, 3 bits",
    ),
    "hqq-4bit-g64": (lambda to, model: write.write_hqq(to, model, 4, 64), "Q4_K", 2e-5, "HQQ, 4 bits"),
    "hqq-3bit-g64": (lambda to, model: write.write_hqq(to, model, 3, 64), "Q4_K", 2e-5, "HQQ, 3 bits"),
    "hqq-pt-quantized-zeros": (write.write_hqq_pt, "Q4_K", 2e-5, "nothing about quantization"),
    "marlin": (lambda to, model: write.write_marlin(to, model), "Q4_K", 5e-7, "Marlin, 4 bits"),
    "marlin-awq-channel": (lambda to, model: write.write_marlin(to, model, 4, -1, awq=True), "Q4_K", 0, "Marlin, 4"),
    "marlin-8bit": (lambda to, model: write.write_marlin(to, model, 8, 128), "Q8_0", 0, "Marlin, 8 bits"),
    "auto-round-5bit": (
        lambda to, model: write.write_auto_round(to, model, "auto_round:auto_gptq", 5, 128),
        "Q5_K",
        5e-7,
        "auto-round, packed as GPTQ, checkpoint_format gptq, 5 bits",
    ),
    "auto-round-asym": (
        lambda to, model: write.write_auto_round(to, model, "auto_round", 4, 128, False),
        "Q4_K",
        1e-6,
        "auto-round, packed as GPTQ, checkpoint_format gptq_v2, 4 bits",
    ),
    "modelopt-nvfp4": (fp4.write_modelopt, "NVFP4", 0, "ModelOpt NVFP4, 4-bit floats, groups of 16"),
    "modelopt-w4a16": (
        partial(fp4.write_modelopt, algorithm="W4A16_NVFP4", head=True),
        "NVFP4",
        0,
        "ModelOpt W4A16_NVFP4, 4-bit floats",
    ),
    "ct-mxfp4": (
        partial(fp4.write_compressed, kind="mxfp4"),
        "MXFP4",
        0,
        "compressed-tensors mxfp4-pack-quantized, 4-bit floats, groups of 32",
    ),
    "auto-round-nvfp4": (
        partial(fp4.write_auto_round_fp4, kind="nvfp4"),
        "NVFP4",
        0,
        "auto-round, packed as nvfp4, 4-bit floats",
    ),
    "llm-awq": (
        lambda to, model: {n: q.dequantize() for n, q in write_awq(to, model, "llm-awq").items()},
        "Q4_K",
        1e-6,
        "AWQ version llm-awq, 4 bits, groups of 128, asymmetric",
    ),
    "auto-round-awq": (
        lambda to, model: write.write_auto_round(to, model, "auto_round:auto_awq", 4, 128, False),
        "Q4_K",
        1e-6,
        "auto-round, packed as AWQ version gemm, 4 bits",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_kept_and_llama_cpp_says_what_the_checkpoint_says(name, tmp_path, small_model):
    writer, kind, bound, title = FORMATS[name]
    stored = writer(tmp_path / name, small_model)
    path = tmp_path / "model.gguf"
    report = bridge.convert(tmp_path / name, path)
    quantized = [t for t in report.tensors if t.has_codes]
    assert {str(t.source).removesuffix(".weight") for t in quantized} == set(stored)
    assert all(t.fidelity.kept == t.weights for t in quantized)

    # what is on disk, against what was stored: neither through our readers nor through our report
    found = gguf_weights(path)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(str(path)).tensors}
    error = sum(np.square(found[f"{n}.weight"] - w, dtype=np.float64).sum() for n, w in stored.items())
    power = sum(np.square(w, dtype=np.float64).sum() for w in stored.values())
    assert error <= bound * power, error / power
    assert report.total().nmse == pytest.approx(error / power, rel=1e-3, abs=1e-13)
    assert types["blk.0.ffn_up.weight"] == kind
    assert failures(verify(path, tmp_path / name)) == []
    assert f"the label says  {title}" in describe(tmp_path / name)

    assert_llama_cpp_says_the_same(path, tmp_path / name)


# the same for what has no codes to keep, or cannot keep them: how to write it; the types of its linears
WITHOUT_CODES: dict[str, tuple[Callable[[Path, Path], object], set[str]]] = {
    "ct-4bit-g64-act-order": (
        partial(compressed.write_packed, bits=4, group_size=64, act_order=True),
        {"Q4_K", "Q5_K"},  # down_proj keeps them
    ),
    "ct-fp8-channel": (partial(compressed.write_float8, block=(1, 1 << 20)), {"Q8_0"}),
    "fp8-blocks": (partial(compressed.write_float8, block=(128, 128), method="fp8"), {"Q8_0"}),
}


@pytest.mark.parametrize("name", WITHOUT_CODES)
def test_what_cannot_keep_its_codes_is_near_and_llama_cpp_says_what_the_checkpoint_says(name, tmp_path, small_model):
    writer, types = WITHOUT_CODES[name]
    writer(tmp_path / name, small_model)
    path = tmp_path / "model.gguf"
    report = bridge.convert(tmp_path / name, path)
    linears = [t for t in report.tensors if t.kind.startswith(("attn_", "ffn_")) and len(t.shape) == 2]
    assert {t.type for t in linears} == types
    assert failures(verify(path, tmp_path / name)) == []
    assert_llama_cpp_says_the_same(path, tmp_path / name)


def assert_llama_cpp_says_the_same(path: Path, folder: Path) -> None:
    """What llama.cpp makes of a GGUF, greedily, is the first choice of the checkpoint in float, or as good."""
    with open_checkpoint(folder) as checkpoint:
        weights = reference.checkpoint_weights(checkpoint)
    with LlamaCpp(path, n_ctx=64) as model:
        start = model.tokenize("ROMEO:\nWhat light through yonder")
        made = model.generate_greedy(start, 12)
    predicted = reference.logits(reference.hf_model(folder, weights), np.array([start + made]))[0]
    scores = log_softmax(predicted)[len(start) - 1 : -1]
    assert len(made) == 12
    assert (scores.max(-1) - scores[np.arange(12), made]).max() < 0.5


def test_mlx_embeddings_keep_their_codes_and_serve_as_the_head(tmp_path, small_model):
    write.write_mlx(tmp_path / "mlx", small_model)
    report = bridge.convert(tmp_path / "mlx", tmp_path / "model.gguf", type="Q4_K_M")
    embedding = next(t for t in report.tensors if t.kind == "token_embd")
    assert (embedding.type, embedding.outcome) == ("Q4_K", CARRIED)
    assert embedding.fidelity.kept == embedding.weights


def test_mlx_in_half_precision_is_exact_where_the_type_has_an_offset(tmp_path, small_model):
    stored = write.write_mlx(tmp_path / "mlx", small_model)
    report = bridge.convert(tmp_path / "mlx", tmp_path / "model.gguf", type="exact")
    assert {t.type for t in report.tensors if t.has_codes} == {"Q4_1"}
    assert report.total().error == 0
    found = gguf_weights(tmp_path / "model.gguf")
    for name, values in stored.items():
        assert np.array_equal(found[f"{name}.weight"], values), name


def test_eight_bit_mlx_keeps_what_eight_signed_bits_can_hold_and_passes_verify(tmp_path, small_model):
    write.write_mlx(tmp_path / "mlx", small_model, 8)
    report = bridge.convert(tmp_path / "mlx", tmp_path / "model.gguf")
    assert {t.type for t in report.tensors if t.has_codes} == {"Q8_0"}
    assert 0 < report.total().kept < report.total().weights
    found = verify(tmp_path / "model.gguf", tmp_path / "mlx")
    assert found.total().nmse == pytest.approx(report.total().nmse, rel=1e-4)
    assert found.total().nmse < 3e-5
    assert failures(found) == []
    assert len(failures(found, max_share=0.15)) == len([t for t in report.tensors if t.has_codes])


def test_tensors_that_keep_some_of_their_codes_say_how_many(tmp_path, small_model):
    write.write_mlx(tmp_path / "mlx", small_model, 8)
    report = bridge.convert(tmp_path / "mlx", tmp_path / "model.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {t.outcome for t in coded} == {PARTLY}
    kept = f"{100 * report.total().kept / report.total().weights:.4g}%"
    assert f"{len(coded)} tensors kept {kept} of their codes" in report.table()
    why = "some codes less their zero points leave Q8_0's"
    assert any(note.startswith(f"{coded[0].name}: ") and why in note for note in report.notes)
    measured = verify(tmp_path / "model.gguf", tmp_path / "mlx")
    assert re.search(rf"^{len(coded)} tensors kept \d\d\.\d+% of their codes", measured.table(), re.M)
    assert "Q8_0              no type carries its codes within 1%" in describe(tmp_path / "mlx")


@pytest.mark.parametrize(
    ("bits", "type", "why"),
    [
        (3, "Q4_K", "groups of 16 do not hold whole sub-blocks of 32"),
        (4, "Q6_K", "Q6_K has no place for fractional zero points"),
    ],
)
def test_groups_of_16_that_lose_their_codes_say_why_and_what_it_costs(bits, type, why, tmp_path, small_model):
    write.write_hqq(tmp_path / "hqq", small_model, bits, 16)
    report = bridge.convert(tmp_path / "hqq", tmp_path / "model.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.type, t.outcome, t.fidelity.share < 0.15) for t in coded} == {(type, REQUANTIZED, True)}
    first, share = coded[0].name, f"{100 * coded[0].fidelity.share:.2g}%"
    table = report.table()
    assert f"{len(coded)} tensors could not keep their codes" in table
    said = f"codes not kept, {why}; adds {share} of the checkpoint's noise"
    assert f"note: {first} and {len(coded) - 1} more: {said}\n" in table
    assert coded[0].notes == [f"{first}: {said}"]
    assert failures(verify(tmp_path / "model.gguf", tmp_path / "hqq")) == []


def test_verify_finds_another_checkpoints_codes_though_8_bits_hide_them_in_the_error(tmp_path, small_model):
    compressed.write_int8(tmp_path / "channels", small_model)
    compressed.write_packed(tmp_path / "groups", small_model, 8)
    compressed.write_packed(tmp_path / "offset", small_model, 8, sym=False)
    for name in ("channels", "groups", "offset"):
        bridge.convert(tmp_path / name, tmp_path / f"{name}.gguf")
        assert failures(verify(tmp_path / f"{name}.gguf", tmp_path / name)) == []
    for made, other in (("channels", "groups"), ("groups", "channels"), ("groups", "offset")):
        found = verify(tmp_path / f"{made}.gguf", tmp_path / other)
        lines = failures(found)
        assert len(lines) == len([t for t in found.tensors if t.has_codes])
        assert all("of its codes are not the checkpoint's, though Q8_0 holds them bit for bit" in x for x in lines)
        assert found.total().nmse < 1e-4
        assert found.total().share > 0.5
        assert "e+" not in found.table()


def test_verify_demands_no_codes_that_a_type_could_hold_in_some_blocks_only(tmp_path, small_model):
    write_awq(tmp_path / "awq", small_model)
    report = bridge.convert(tmp_path / "awq", tmp_path / "model.gguf", type="Q4_0")
    assert report.total().kept == 0
    assert failures(verify(tmp_path / "model.gguf", tmp_path / "awq"), max_share=10, max_nmse=1) == []


def test_a_layer_after_a_scaled_activation_is_quantized_from_what_it_amounts_to(tmp_path, small_model):
    stored = write_awq(tmp_path / "awq", small_model)
    name = "model.layers.0.mlp.down_proj"
    tensors = load_file(tmp_path / "awq" / "model.safetensors")
    scales = np.random.default_rng(0).uniform(0.5, 2, 768).astype(np.float16)
    save_file({**tensors, "model.layers.0.mlp.act.scales": scales}, tmp_path / "awq" / "model.safetensors")
    report = bridge.convert(tmp_path / "awq", tmp_path / "model.gguf")
    found = next(t for t in report.tensors if t.source == f"{name}.weight")
    assert (found.outcome, found.type) == (FLOAT, "Q8_0")
    assert any(f"{name}: its input is divided by" in note for note in report.notes)
    meant = stored[name].dequantize() / scales.astype(np.float32)
    error = gguf_weights(tmp_path / "model.gguf")[f"{name}.weight"] - meant
    assert np.square(error).sum() < 1e-4 * np.square(meant).sum()
    assert failures(verify(tmp_path / "model.gguf", tmp_path / "awq")) == []
    assert "codes over activation scales" in describe(tmp_path / "awq")
    assert_llama_cpp_says_the_same(tmp_path / "model.gguf", tmp_path / "awq")


def test_mlx_experts_in_one_tensor_are_taken_apart_and_routers_become_floats(tmp_path):
    model = save_model(
        tmp_path / "model", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
    )  # fmt: skip
    folder = tmp_path / "mlx"
    stored = write.write_mlx(folder, model)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts.0." in n]:
        parts = [tensors.pop(name.replace(".experts.0.", f".experts.{i}.")) for i in range(4)]
        tensors[name.replace(".experts.0.", ".switch_mlp.")] = np.stack(parts)
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.modules:
            assert np.allclose(checkpoint.read_module(name).dequantize(), stored[name], rtol=0, atol=1e-6), name

    path = tmp_path / "model.gguf"
    report = bridge.convert(folder, path)
    types = {t.kind: t.type for t in report.tensors}
    assert types["ffn_gate_exps"] == types["ffn_down_exps"] == types["ffn_up_shexp"] == "Q4_K"
    assert types["ffn_gate_inp"] == types["ffn_gate_inp_shexp"] == "F32"
    assert all(t.fidelity.kept == t.weights for t in report.tensors if t.has_codes and t.type != "F32")
    assert "requantized" not in report.table()
    assert failures(verify(path, folder)) == []
    on_disk = {t.name: t for t in gguf.GGUFReader(str(path)).tensors}
    gate = np.ravel(on_disk["blk.1.ffn_gate_inp_shexp.weight"].data)
    assert np.allclose(gate, stored["model.layers.1.mlp.shared_expert_gate"][0], rtol=0, atol=1e-6)
    ups = gguf.quants.dequantize(on_disk["blk.1.ffn_up_exps.weight"].data, gguf.GGMLQuantizationType.Q4_K)
    meant = np.stack([stored[f"model.layers.1.mlp.experts.{i}.up_proj"] for i in range(4)])
    assert np.square(ups - meant).sum() < 3e-5 * np.square(meant).sum()
    with LlamaCpp(path, n_ctx=64) as loaded:
        assert len(loaded.generate_greedy([5, 6, 7, 8], 8)) == 8


def test_mlx_lms_own_mixture_of_experts_says_in_llama_cpp_what_it_says_in_mlx(tmp_path):
    """tests/data/mlx-moe: a Qwen3-MoE of mlx-lm 0.32.2 and its logits there; see tests/support/make_mlx_moe.py."""
    data = CHECKPOINT.parent / "mlx-moe"
    folder = shutil.copytree(data, tmp_path / "mlx")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, folder / file)
    expected = np.load(data / "expected.npz")
    tokens = expected["tokens"].tolist()
    assert "MLX, affine, 4 bits" in describe(folder)

    bridge.convert(folder, tmp_path / "floats.gguf", tensor_types=[(".*", "F32")])
    with LlamaCpp(tmp_path / "floats.gguf", n_ctx=64) as loaded:
        assert mean_kl(expected["logits"], loaded.logits(tokens)) < 1e-6

    path = tmp_path / "model.gguf"
    report = bridge.convert(folder, path)
    types = {t.kind: t.type for t in report.tensors}
    assert types["ffn_gate_exps"] == types["ffn_up_exps"] == types["attn_q"] == types["token_embd"] == "Q4_K"
    assert types["ffn_gate_inp"] == "F32"
    assert all(t.fidelity.kept == t.weights for t in report.tensors if t.has_codes and t.type != "F32")
    assert failures(verify(path, folder)) == []
    with LlamaCpp(path, n_ctx=64) as loaded:
        assert mean_kl(expected["logits"], loaded.logits(tokens)) < 1e-2  # llama.cpp rounds activations to 8 bits
        assert len(loaded.generate_greedy(tokens[:4], 8)) == 8

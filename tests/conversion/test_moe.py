"""Mixtures of experts: stacked, one type for all experts of a tensor, and the logits of transformers in llama.cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.planning.recipe import BLOCKS, Recipe, TensorPlace
from bridge.conversion.writing.verify import failures, verify
from bridge.encode.rounding.round_rows import quantize_rows
from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import Routing
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.decoder.experts import route
from bridge.runtime.layers.weights import read_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.conftest import repacked
from tests.support.encode import Quantized, write_gptq
from tests.support.encode_formats import write_hqq

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.support.described import describe
from tests.support.tiny_models import dequantized, predict, save_model

TOKENS = np.random.default_rng(1).integers(0, 320, 48).tolist()
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
}
EXPERTS = {"mixtral": 8, "qwen2moe": 4, "qwen3moe": 5}
MIXTRAL = "model.layers.{}.block_sparse_moe.experts.{}.{}"

Checkpoints = Callable[..., tuple[Path, Path, dict[str, Quantized]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model(kind): a float model of random weights; original_format=False for transformers' own fused tensors."""

    @cache
    def make(kind: str, original_format: bool = True) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "float"
        return save_model(folder, MODELS[kind][0], original_format=original_format, **MODELS[kind][1])

    return make


@pytest.fixture(scope="module")
def checkpoint(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoint(kind, **of write_gptq): the model as GPTQ; the folder, the float model and what was stored."""

    @cache
    def make(kind: str, **options: Any) -> tuple[Path, Path, dict[str, Quantized]]:
        folder = tmp_path_factory.mktemp(kind) / "gptq"
        return folder, model(kind), write_gptq(folder, model(kind), **options)

    return make


def copied(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint."""
    shutil.copytree(folder, to)
    return to


def stacked(path: Path) -> dict[str, Any]:
    """The GGUF's tensors by name."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_checkpoints_weights_as_floats_have_the_logits_of_transformers(kind, desc_act, checkpoint, tmp_path):
    """Names, stacking, shared experts, routers and folded act-order, without the rounding of any block type."""
    folder, floats, stored = checkpoint(kind, desc_act=desc_act, sym=not desc_act)
    bridge.convert(folder, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    expected = predict(dequantized(tmp_path / "reference", floats, stored), TOKENS)
    with LlamaCpp(tmp_path / "m.gguf") as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 1e-6


@pytest.mark.parametrize("kind", MODELS)
def test_experts_keep_all_their_codes_and_llama_cpp_says_what_transformers_says(kind, checkpoint, tmp_path):
    folder, floats, stored = checkpoint(kind, desc_act=False, sym=True)
    path = tmp_path / "m.gguf"
    report = bridge.convert(folder, path)
    experts = {t.name: t for t in report.tensors if t.kind.endswith("_exps")}
    assert len(experts) == 2 * 3
    assert {(t.type, t.shape, t.outcome) for t in experts.values()} == {
        ("Q4_K", (EXPERTS[kind], 256, 256), "codes carried")
    }
    total = report.total()
    assert total is not None
    assert total.kept == total.weights
    assert total.share < 1e-4
    routers = [t for t in report.tensors if "gate_inp" in t.kind]
    assert {t.type for t in routers} == {"F32"}

    measured = verify(path, folder)
    assert failures(measured) == []
    on_disk = measured.total()
    assert on_disk is not None
    assert (on_disk.kept, on_disk.error) == (total.kept, pytest.approx(total.error))
    expected = predict(dequantized(tmp_path / "reference", floats, stored), TOKENS)
    with LlamaCpp(path) as loaded:
        assert mean_kl(expected, loaded.logits(TOKENS)) < 0.02  # 8-bit activations in llama.cpp
        assert len(loaded.generate_greedy(TOKENS[:8], 8)) == 8


def test_the_metadata_tells_counts_and_widths(checkpoint, tmp_path):
    expected = {
        "mixtral": {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 256},
        "qwen2moe": {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 256,
            "expert_shared_feed_forward_length": 512,
        },
        "qwen3moe": {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 256},
    }
    for kind, keys in expected.items():
        path = tmp_path / f"{kind}.gguf"
        bridge.convert(checkpoint(kind, desc_act=False, sym=True)[0], path)
        fields = gguf.GGUFReader(path).fields
        arch = fields["general.architecture"].contents()
        assert arch == {"mixtral": "llama"}.get(kind, kind)
        assert {key: fields[f"{arch}.{key}"].contents() for key in keys} == keys
        shared_gate = stacked(path).get("blk.0.ffn_gate_inp_shexp.weight")
        assert (shared_gate is not None) == (kind == "qwen2moe")
        if shared_gate is not None:
            assert shared_gate.shape.tolist() == [256]


def test_the_size_of_a_mixture_is_told_as_experts_times_what_a_token_of_one_expert_sees(model, tmp_path):
    """As llama.cpp's converter has it: 562,432 weights outside of the experts, 393,216 in one of each layer."""
    bridge.convert(model("mixtral"), tmp_path / "m.gguf")
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["general.size_label"].contents() == "8x956K"


@pytest.mark.parametrize("kind", MODELS)
def test_fused_experts_make_the_same_file_as_separate_ones(kind, model, tmp_path):
    for original in (True, False):
        bridge.convert(model(kind, original), tmp_path / f"{original}.gguf")
    one, other = stacked(tmp_path / "True.gguf"), stacked(tmp_path / "False.gguf")
    assert list(one) == list(other)
    assert all(np.array_equal(one[name].data, other[name].data) for name in one)
    assert one["blk.1.ffn_down_exps.weight"].tensor_type.name == "Q8_0"


def test_qwens_names_of_mixtrals_experts_are_read_alike(checkpoint, tmp_path):
    """GPTQModel saves Mixtral under transformers 5's names."""
    from safetensors.numpy import load_file, save_file

    folder, _, _ = checkpoint("mixtral", desc_act=False, sym=True)
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for file in folder.iterdir():
        (renamed / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    moved = {}
    for name, values in tensors.items():
        new = name.replace("block_sparse_moe", "mlp")
        for old, part in parts.items():
            new = new.replace(f".{old}.", f".{part}.")
        moved[new] = values
    save_file(moved, renamed / "model.safetensors", {"format": "pt"})
    for source in (folder, renamed):
        bridge.convert(source, tmp_path / f"{source.name}.gguf")
    one, other = stacked(tmp_path / "gptq.gguf"), stacked(tmp_path / "renamed.gguf")
    assert all(np.array_equal(one[name].data, other[name].data) for name in one)


def test_act_order_of_each_experts_down_is_folded_into_its_own_gate_and_up(checkpoint, tmp_path):
    folder, _, stored = checkpoint("mixtral", desc_act=True, sym=False)
    report = bridge.convert(folder, tmp_path / "m.gguf")
    by_kind = {t.kind: t for t in report.tensors}
    assert by_kind["ffn_down_exps"].outcome == "codes carried"
    assert by_kind["ffn_down_exps"].type == "Q4_K"
    assert by_kind["ffn_gate_exps"].outcome == "requantized"
    fidelity = by_kind["ffn_gate_exps"].fidelity
    assert fidelity is not None
    assert 0 < fidelity.share < 0.15
    down = gguf.quants.dequantize(*_bytes(tmp_path / "m.gguf", "blk.0.ffn_down_exps.weight"))
    for expert in (0, 5):
        q = stored[MIXTRAL.format(0, expert, "w2")]
        np.testing.assert_allclose(down[expert], q.dequantize()[:, np.argsort(q.group, kind="stable")], atol=1e-3)
    assert not np.array_equal(stored[MIXTRAL.format(0, 0, "w2")].group, stored[MIXTRAL.format(0, 5, "w2")].group)


@pytest.mark.parametrize("desc_act", [False, True])
def test_experts_whose_gate_and_up_are_one_matrix_become_what_they_are_apart(desc_act, checkpoint, tmp_path):
    """mlp.experts.3.gate_up_proj, as codes; or as floats beside a down whose act-order is folded into both halves."""
    source, _, stored = checkpoint("mixtral", desc_act=desc_act, sym=not desc_act)
    apart = copied(source, tmp_path / "apart")
    tensors = load_file(apart / "model.safetensors")
    experts = [MIXTRAL.format(layer, expert, "") for layer in range(2) for expert in range(8)]
    if desc_act:  # both halves of a matrix have one order, so these are no longer codes
        for module in (f"{expert}{part}" for expert in experts for part in ("w1", "w3")):
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{module}.{part}"]
            tensors[f"{module}.weight"] = stored[module].dequantize().astype(np.float16)
        save_file(tensors, apart / "model.safetensors", {"format": "pt"})
    fused = copied(apart, tmp_path / "fused")
    for expert in experts:
        for part, axis in (("weight", 0),) if desc_act else (("qweight", 1), ("qzeros", 1), ("scales", 1)):
            halves = [tensors.pop(f"{expert}{half}.{part}") for half in ("w1", "w3")]
            tensors[f"{expert}gate_up_proj.{part}"] = np.concatenate(halves, axis)
        if not desc_act:
            tensors[f"{expert}gate_up_proj.g_idx"] = tensors.pop(f"{expert}w1.g_idx")
            del tensors[f"{expert}w3.g_idx"]
    named = {n.replace("block_sparse_moe", "mlp").replace(".w2.", ".down_proj."): v for n, v in tensors.items()}
    save_file(named, fused / "model.safetensors", {"format": "pt"})
    for folder in (apart, fused):
        bridge.convert(folder, folder / "m.gguf")
    one, other = stacked(apart / "m.gguf"), stacked(fused / "m.gguf")
    assert {name: t.tensor_type for name, t in one.items()} == {name: t.tensor_type for name, t in other.items()}
    assert all(np.array_equal(one[name].data, other[name].data) for name in one)
    assert failures(verify(fused / "m.gguf", fused)) == []


def _bytes(path: Path, name: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    tensor = stacked(path)[name]
    return tensor.data, tensor.tensor_type


def _some_experts(name: str) -> int | None:
    if name == MIXTRAL.format(0, 3, "w1"):
        return 8
    return None if name == MIXTRAL.format(1, 2, "w2") else 4


def test_a_stack_has_the_one_type_that_holds_every_expert(checkpoint, tmp_path):
    """One expert of 8 bits among eight of 4, and one that was left out of the quantization."""
    folder, _, _ = checkpoint("mixtral", module_bits=_some_experts)
    report = bridge.convert(folder, tmp_path / "m.gguf")
    by_name = {t.name: t for t in report.tensors}
    wide = by_name["blk.0.ffn_gate_exps.weight"]
    assert (wide.type, wide.outcome) == ("Q8_0", "codes carried")
    assert wide.fidelity is not None
    assert wide.fidelity.error == 0
    assert by_name["blk.0.ffn_up_exps.weight"].type == "Q4_K"
    mixed = by_name["blk.1.ffn_down_exps.weight"]
    assert mixed.type == "Q4_K"
    assert "1 of its 8 parts came as floats and are Q4_K like the others" in " ".join(mixed.notes)
    assert mixed.fidelity is not None
    assert mixed.fidelity.kept == mixed.fidelity.weights == 7 * 256 * 256
    assert failures(verify(tmp_path / "m.gguf", folder)) == []


@pytest.mark.parametrize(("bits", "group_size", "type"), [(2, 16, "Q2_K"), (8, 64, "Q8_0")])
def test_a_stack_decides_between_its_codes_and_closer_ones_as_a_matrix_does(bits, group_size, type, model, tmp_path):
    write_hqq(tmp_path / "hqq", model("mixtral"), bits, group_size)
    report = bridge.convert(tmp_path / "hqq", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {t.type for t in coded} == {type}
    assert {t.fidelity.kept / t.weights for t in coded} == {type == "Q2_K"}
    assert all(t.fidelity.share > 0.01 for t in coded)
    if type == "Q8_0":
        assert all("Q8_0 has no place for fractional zero points" in t.notes[0] for t in coded)


@pytest.mark.parametrize(
    ("options", "type_", "how"),
    [
        ({"type": "exact"}, "Q4_0", "codes carried"),
        ({"type": "Q6_K"}, "Q6_K", "codes carried"),
        ({"type": "Q4_K_M"}, "Q4_K", "codes carried"),
        ({"type": "Q3_K"}, "Q3_K", "requantized"),
        ({"tensor_types": [("exps", "F16")]}, "F16", "requantized"),
    ],
)
def test_types_are_chosen_as_for_other_tensors(options, type_, how, checkpoint, tmp_path):
    report = bridge.convert(checkpoint("qwen3moe", desc_act=False, sym=True)[0], tmp_path / "m.gguf", **options)
    experts = [t for t in report.tensors if t.kind == "ffn_gate_exps"]
    assert {(t.type, t.outcome) for t in experts} == {(type_, how)}
    if options.get("type") == "exact":
        assert {t.fidelity.error for t in experts if t.fidelity} == {0}


def test_each_expert_has_its_own_importance(model, tmp_path):
    rng = np.random.default_rng(3)
    sums = rng.uniform(0.1, 10, (5, 256)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "")
    writer.add_string("general.type", "imatrix")
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", sums)
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.full((5, 1), 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = model("qwen3moe")
    bridge.convert(folder, tmp_path / "m.gguf", type="Q4_K", imatrix=tmp_path / "imatrix.gguf")
    found = stacked(tmp_path / "m.gguf")["blk.0.ffn_up_exps.weight"].data
    with bridge.open_checkpoint(folder) as opened:
        for expert in range(5):
            weights = opened.read_float(f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
            expected = quantize_rows(weights, BLOCKS["Q4_K"], sums[expert] / 2)
            assert np.array_equal(found[expert], expected.data)


def test_presets_spare_the_attention_of_eight_experts_as_llama_cpp_does():
    def type_of(preset: str, kind: str, experts: int, layer: int = 9) -> str | None:
        place = TensorPlace(f"blk.{layer}.{kind}.weight", kind, layer, 32, 4, 4096, experts=experts)
        return Recipe(preset).wanted(place, as_codes=False).type

    assert [type_of("Q4_K_M", f"attn_{part}", 8) for part in "qkv"] == ["Q4_K", "Q8_0", "Q8_0"]
    assert type_of("Q4_K_M", "attn_output", 8) == "Q5_K"
    assert type_of("Q5_K_M", "attn_output", 8) == "Q5_K"
    assert type_of("Q3_K_L", "attn_output", 8) == "Q3_K"
    assert type_of("Q4_K_M", "attn_k", 60) == "Q4_K"
    assert type_of("Q4_K_M", "ffn_down_exps", 8, layer=0) == "Q6_K"
    assert type_of("Q4_K_M", "ffn_down_exps", 8, layer=4) == "Q4_K"
    assert type_of("Q4_K_M", "ffn_up_exps", 8, layer=0) == "Q4_K"


def test_inspect_names_the_experts(checkpoint):
    text = describe(checkpoint("qwen2moe", desc_act=False, sym=True)[0])
    assert "qwen2moe, 2 layers" in text
    (line,) = [line for line in text.splitlines() if line.startswith("ffn_down_exps")]
    assert "4x256x256" in line
    assert "codes carried" in line


def copy_with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A folder with another config.json."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; some layers have no experts"),
        ("qwen2moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step is 2; some layers have no experts"),
        ("qwen3moe", {"norm_topk_prob": False}, r"norm_topk_prob is False; llama.cpp normalizes"),
        ("qwen2moe", {"norm_topk_prob": True}, r"norm_topk_prob is True; llama.cpp does not normalize"),
        ("qwen2moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, but"),
        ("mixtral", {"num_local_experts": 9}, r"block_sparse_moe.experts.8.w1.weight is missing"),
        ("mixtral", {"num_local_experts": 7}, r"experts.7.w1.weight: no tensor of a llama model of 2 layers"),
        ("mixtral", {"intermediate_size": 512}, r"intermediate_size is 512, but the longest side of any tensor is 320"),
        ("mixtral", {"intermediate_size": 288}, r"experts.0.w1.weight has shape \[256, 256\], not \[288, 256\]"),
    ],
)
def test_what_llama_cpp_cannot_express_or_the_checkpoint_lacks_is_refused(kind, changes, message, checkpoint, tmp_path):
    folder = copy_with_config(checkpoint(kind, desc_act=False, sym=True)[0], tmp_path / "changed", **changes)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


# --- the Python runtime ---


@pytest.mark.parametrize("kind", MODELS)
def test_the_runtime_predicts_what_transformers_and_llama_cpp_do(kind, checkpoint, tmp_path):
    folder, floats, stored = checkpoint(kind, desc_act=False, sym=True)
    path = tmp_path / "m.gguf"
    bridge.convert(folder, tmp_path / "f32.gguf", tensor_types=[(".*", "F32")])
    bridge.convert(folder, path)
    expected = predict(dequantized(tmp_path / "reference", floats, stored), TOKENS)
    exact = bridge.Model.load(tmp_path / "f32.gguf", precision="f32", kv="f32")
    assert mean_kl(expected, exact.logits(TOKENS)) < 1e-9
    decoder = exact._decoder
    decoder.cache.length = 0
    single = [decoder.logits(decoder.run([token]))[0] for token in TOKENS[:8]]
    assert mean_kl(expected[:8], np.array(single)) < 1e-9

    model = bridge.Model.load(path)
    with LlamaCpp(path) as loaded:
        assert mean_kl(loaded.logits(TOKENS), model.logits(TOKENS)) < 0.02
    assert mean_kl(expected, bridge.Model.load(path, precision="f32").logits(TOKENS)) < 1e-3
    assert "".join(model.generate(TOKENS[:8], 4, temperature=0))


@repacked
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("mixtral", "int8"),
        ("qwen2moe", "f32"),
        ("qwen3moe", "f32"),
        pytest.param("mixtral", "f32", marks=pytest.mark.exhaustive),
        pytest.param("qwen2moe", "int8", marks=pytest.mark.exhaustive),
        pytest.param("qwen3moe", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_a_table_of_calls_chooses_the_experts_that_python_does(kind, precision, checkpoint, tmp_path):
    """Token by token, and with tokens of several sequences, against matrix by matrix."""
    path = tmp_path / "m.gguf"
    bridge.convert(checkpoint(kind, desc_act=False, sym=True)[0], path)
    model, plain = (bridge.Model.load(path, precision=precision, kv="f32")._decoder for _ in range(2))
    model.prepare()
    for experts in (layer.experts for layer in (*model.layers, *plain.layers)):
        for e, (gate, up, down) in enumerate(experts.networks):  # as NVFP4's scales are
            gate.factors, up.factors, down.factors = (np.array([1 + 0.1 * e * n], np.float32) for n in (1, -1, 2))
    tokens = TOKENS[:6]
    single = np.concatenate([model.step([model.cache], [token]).copy() for token in tokens])
    assert model._steps[1].program.single
    expected = plain.logits(plain.run(tokens, len(tokens)))
    assert not plain._steps
    assert mean_kl(expected, single) < (1e-9 if precision == "f32" else 1e-4)
    caches = [model.new_cache() for _ in range(3)]
    together = np.stack([model.step(caches, TOKENS[t : t + 3]).copy() for t in range(3)])
    assert model._steps[3].program.single
    for i in range(3):
        assert mean_kl(plain.scores(TOKENS[i : i + 3], 3), together[:, i]) < (1e-9 if precision == "f32" else 1e-4)


def test_the_width_of_dense_layers_takes_no_memory_in_a_mixture(checkpoint, tmp_path):
    bridge.convert(checkpoint("qwen3moe", desc_act=False, sym=True)[0], tmp_path / "m.gguf")
    file = bridge.open_gguf(tmp_path / "m.gguf")
    scores = []
    for changes in {}, {"qwen3moe.feed_forward_length": 2**32 - 1}:
        config = read_config({**file.metadata, **changes}, file.path)
        scores.append(Decoder(file, config, 64, "f16", "int8").scores(TOKENS, 4))
    np.testing.assert_array_equal(*scores)


def test_a_router_takes_the_largest_probabilities_as_they_are_or_their_shares():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]], np.float32))
    chosen, weights = route(logits, Routing(used=2, normalized=False))
    assert chosen.tolist() == [[1, 3], [0, 1]]
    np.testing.assert_allclose(weights, [[0.4, 0.3], [0.7, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(route(logits, Routing(used=2))[1], [[4 / 7, 3 / 7], [7 / 8, 1 / 8]], rtol=1e-6)


def test_metadata_of_experts_that_do_not_fit_is_refused(checkpoint, tmp_path):
    bridge.convert(checkpoint("qwen3moe", desc_act=False, sym=True)[0], tmp_path / "m.gguf")
    file = bridge.open_gguf(tmp_path / "m.gguf")
    keys = {**file.metadata, "qwen3moe.expert_used_count": 9}
    with pytest.raises(BridgeError, match=r"m.gguf: 9 of 5 experts are used"):
        read_config(keys, file.path)
    keys = {**file.metadata, "qwen3moe.expert_count": 6}
    with pytest.raises(BridgeError, match=r"ffn_down_exps.weight: shape \[5, 256, 256\], the metadata says \[6, 256"):
        read_weights(file, read_config(keys, file.path))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
def test_verify_compares_experts_in_stacks_with_experts_by_themselves(kind, model, checkpoint, tmp_path):
    """Of floats, of MLX and of a GGUF."""
    fused = model(kind, original_format=False)
    assert failures(verify(fused, model(kind)), exact=True) == failures(verify(model(kind), fused), exact=True) == []
    folder, _, stored = checkpoint(kind, sym=True)
    path = tmp_path / "m.gguf"
    bridge.convert(folder, path)
    bridge.export(path, tmp_path / "mlx", "mlx", config=folder)
    stacks = {name for name in load_file(tmp_path / "mlx" / "model.safetensors") if ".switch_mlp." in name}
    assert len(stacks) == 2 * 3 * 3
    report = verify(tmp_path / "mlx", folder)
    assert failures(report) == []
    total = report.total()
    assert total is not None
    assert total.kept == total.weights
    assert failures(verify(tmp_path / "mlx", path)) == []
    damaged = copied(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    name = next(
        name for name in stored if ".1." in name and ".experts.2." in name and name.endswith(("w2", "down_proj"))
    )
    tensors[f"{name}.qweight"][0, 0] ^= 1
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    for reference in (folder, tmp_path / "mlx", path):
        [line] = failures(verify(damaged, reference))
        assert line.startswith("blk.1.ffn_down_exps.weight: ")

"""Families whose layers are not Llama's: tables of calls, long contexts, several of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES, read_windows
from bridge.models.gguf_config import config_of_gguf
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import Routing
from bridge.runtime.decoder.experts import route
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.layers.weights import read_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax, mean_kl
from tests.models.test_logits import reference_logits
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.make_families import GOLDENS

torch = pytest.importorskip("torch")

# sizes of which all matrices are multiplied in blocks
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "glm4-moe": {"moe_intermediate_size": 32}, "deepseek3": LATENT, "glm4-moe-lite": LATENT,
    "gpt2": {"n_positions": 640}, "llama4": {"intermediate_size": 64}, "gemma4-moe": {"moe_intermediate_size": 32},
    "gemma4": {"hidden_size_per_layer_input": 32},
    "laguna": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "nemotron-3-super": {
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32,
        "mamba_num_heads": 16, "mamba_head_dim": 4,
    },
}  # fmt: skip
LONG = 600  # tokens: more than two spans of attention
TOKENS = np.random.default_rng(3).integers(0, 2048, LONG + 4).tolist()


def converted(name: str, folder: Path, type: str = "Q8_0", **fields: Any) -> tuple[Any, Path]:
    """A family's model with random weights, and its GGUF."""
    model = randomized(new_model(name, **({"max_position_embeddings": 640} | FIELDS.get(name, {}) | fields)))
    model.save_pretrained(folder / "model", save_original_format=True)
    bridge.convert(copy_tokenizer(folder / "model"), folder / "m.gguf", tensor_types=[(".*", type)])
    return model, folder / "m.gguf"


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("gpt-oss", "f16"),
        ("glm4-moe", "f32"),
        ("deepseek3", "f32"),
        ("deepseek3", "q8_0"),
        ("glm4-moe-lite", "f16"),
        ("command-r", "f32"),
        ("gpt2", "f32"),
        ("hunyuan", "q8_0"),
        ("minimax-m2", "f32"),
        ("gemma4", "f32"),
        ("gemma4-dense", "q8_0"),
        ("gemma4-moe", "f16"),
        ("gemma3n", "f32"),
        ("apertus", "f16"),
        ("llama4", "f32"),
        ("phimoe", "f32"),
        ("laguna", "f16"),
        ("muse-glimmer", "f32"),
    ],
)
def test_tokens_one_by_one_in_several_contexts_get_what_a_prompt_gives(name: str, kv: str, tmp_path: Path) -> None:
    """By a table of calls: at the end of a long context, and in a short one that has a part of it."""
    path = converted(name, tmp_path)[1]
    decoder, plain = (bridge.Model.load(path, precision="f32", kv=kv, context=640)._decoder for _ in range(2))
    decoder.run(TOKENS[:LONG])
    alone = [decoder.step([decoder.cache], [token])[0].copy() for token in TOKENS[LONG:]]
    assert decoder._steps[1].program.single
    assert mean_kl(plain.scores(TOKENS, 4), np.array(alone)) < 1e-7
    decoder.cache.length, short = LONG, decoder.new_cache()
    short.copy_prefix(decoder.cache, 40)
    both = decoder.step([decoder.cache, short], TOKENS[LONG : LONG + 2]).copy()
    assert decoder._steps[2].program.single
    expected = [alone[0], plain.scores([*TOKENS[:40], TOKENS[LONG + 1]], 1)[0]]
    assert mean_kl(np.array(expected), both) < 1e-7


@pytest.mark.parametrize("name", ["gpt-oss", "glm4-moe", "deepseek3", "command-r", "laguna"])
def test_guessed_tokens_are_computed_as_each_alone_is(name: str, tmp_path: Path) -> None:
    """To the last bit: experts, latent keys and values, sinks and windows."""
    decoder = bridge.Model.load(converted(name, tmp_path)[1], context=64)._decoder
    assert decoder.multiplied_one_by_one() is None
    other = decoder.new_cache()
    alone = [decoder.step([other], [token])[0].copy() for token in TOKENS[:14]]
    np.testing.assert_array_equal(np.concatenate([decoder.follow(TOKENS[:8]), decoder.follow(TOKENS[8:14])]), alone)


def test_a_latent_cache_holds_a_row_a_token(tmp_path: Path) -> None:
    cache = bridge.Model.load(converted("deepseek3", tmp_path)[1], context=64)._decoder.cache
    assert cache.nbytes == 2 * 64 * (32 + 16) * 2  # layers, tokens, latent vector and rotated part, halves


def test_sequences_and_continuations_of_a_latent_model_are_those_of_single_texts(tmp_path: Path) -> None:
    model = bridge.Model.load(converted("deepseek3", tmp_path)[1], context=128)
    prompts = [TOKENS[:30], [*TOKENS[:20], *TOKENS[40:45]]]
    alone = ["".join(model.generate(prompt, 8, temperature=0)) for prompt in prompts]
    with model.batch() as batch:
        made = [batch.add(prompt, 8, temperature=0) for prompt in prompts]
        for _ in batch:
            pass
    assert [generation.text for generation in made] == alone
    ends = [TOKENS[50:52], TOKENS[60:63]]
    for end, (score, _) in zip(ends, model.score_continuations(TOKENS[:30], ends), strict=True):
        rows = log_softmax(model.logits([*TOKENS[:30], *end])[29:-1])
        assert score == pytest.approx(float(rows[np.arange(len(end)), end].sum()), abs=1e-3)


def test_groups_of_experts_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    """By their two largest sigmoids, or by the largest probability (DeepSeek V2)."""
    fields = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    for name, more in (("deepseek3", {}), ("deepseek2-lite", {"topk_method": "group_limited_greedy"})):
        reference, path = converted(name, tmp_path / name, "F32", **fields, **more)
        logits = bridge.Model.load(path, precision="f32", kv="f32").logits(TOKENS[:64])
        assert mean_kl(reference_logits(reference, TOKENS[:64]), logits) < 1e-6


def test_a_router_leaves_all_but_the_best_groups() -> None:
    p = np.array([[0.9, 0.1, 0.6, 0.5, 0.7, 0.2]], np.float32)
    logits = np.log(p / (1 - p))
    chosen, weights = route(logits, Routing(used=2, sigmoid=True, scale=2.0, groups=3))
    assert chosen.tolist() == [[2, 3]]  # 1.1, where the others' two largest make 1.0 and 0.9
    np.testing.assert_allclose(weights, [[2 * 0.6 / 1.1, 2 * 0.5 / 1.1]], rtol=1e-5)
    bias = np.array([0.2, 0, 0, 0, 0, 0], np.float32)
    assert route(logits, Routing(used=2, sigmoid=True, groups=3), bias)[0].tolist() == [[0, 1]]


def test_llama_4_attends_to_chunks_and_weighs_what_it_does_not_rotate(tmp_path: Path, monkeypatch) -> None:
    """With chunks of 16 positions, where the published ones have 8192; as a prompt and, in spans, token by token."""
    reference = randomized(new_model("llama4", attention_chunk_size=16, floor_scale=16, max_position_embeddings=640))
    reference.save_pretrained(tmp_path / "model", save_original_format=True)
    config = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    published = config | {"attention_chunk_size": 8192, "floor_scale": 8192}
    (tmp_path / "model/config.json").write_text(json.dumps(published), encoding="utf-8")
    bridge.convert(
        copy_tokenizer(tmp_path / "model"), tmp_path / "m.gguf", tensor_types=[(".*", "F32")],
        metadata={"llama4.attention.sliding_window": 16},
    )  # fmt: skip
    graph = replace(ARCHITECTURES["llama4"], temperature=(0.1, 16, 1))
    monkeypatch.setitem(ARCHITECTURES, "llama4", graph)
    decoder = bridge.Model.load(tmp_path / "m.gguf", precision="f32", kv="f32", context=320)._decoder
    expected = reference_logits(reference, TOKENS[:300])
    assert mean_kl(expected, decoder.scores(TOKENS[:300], 300)) < 1e-8
    decoder.cache.length = 290
    last = [decoder.next_scores(token).copy() for token in TOKENS[290:300]]
    assert mean_kl(expected[290:], np.array(last)) < 1e-8


def test_layers_that_share_keys_and_values_have_one_place_for_them(tmp_path: Path) -> None:
    """Gemma 4's last layers, with and without a window, use those of the last layers that make some."""
    model = bridge.Model.load(converted("gemma4", tmp_path)[1], context=64)
    assert model.config.stored == {0: 0, 1: 1, 2: 0, 3: 1}
    assert model._decoder.cache.nbytes == 2 * 64 * 2 * (16 + 32) * 2  # keys and values, tokens, heads, elements, halves


@pytest.mark.exhaustive
def test_the_last_layers_of_gemma_3n_use_the_keys_of_earlier_ones(tmp_path: Path) -> None:
    """The sharp thresholds of its networks amplify what rounding differs."""
    fields = {
        "num_hidden_layers": 22, "num_kv_shared_layers": 2, "layer_types": 11 * ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": 10 * [0.95] + 12 * [0.0], "intermediate_size": 4096,
    }  # fmt: skip
    reference, path = converted("gemma3n", tmp_path, "F32", **fields)
    model = bridge.Model.load(path, precision="f32", kv="f32", context=96)
    assert [model.config.stored[layer] for layer in (18, 19, 20, 21)] == [18, 19, 18, 19]
    assert mean_kl(reference_logits(reference, TOKENS[:64]), model.logits(TOKENS[:64])) < 3e-3


def test_numbers_that_a_layers_activation_lacks_are_refused() -> None:
    golden = json.loads((GOLDENS / "apertus.json").read_text())
    keys = {"general.architecture": "apertus", **golden["keys"], "xielu.beta": [0.5]}
    with pytest.raises(BridgeError, match=r"m.gguf: xielu.beta is \[0.5\]; must be 2 numbers; convert the model again"):
        read_config(keys, Path("m.gguf"))


def test_a_jamba_of_one_expert_has_plain_networks(tmp_path: Path) -> None:
    reference, path = converted("jamba", tmp_path, "F32", num_experts=1, num_experts_per_tok=1)
    model = bridge.Model.load(path, precision="f32", kv="f32")
    assert not model.config.experts
    assert mean_kl(reference_logits(reference, TOKENS[:24]), model.logits(TOKENS[:24])) < 1e-8


def test_phi_moes_experts_are_chosen_one_after_another() -> None:
    """As transformers' sparsemixer does: each weighed among those near it that are left."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = np.random.default_rng(0).normal(0, 0.05, (64, 16)).astype(np.float32) + np.float32(2)
    weights, chosen = sparsemixer(torch.from_numpy(logits), 0.01, False)
    found = route(logits, Routing(used=2, mixer=0.02))
    assert found[0].tolist() == chosen.tolist()
    np.testing.assert_allclose(found[1], weights.numpy(), rtol=1e-5)
    assert (found[1] < 0.99).any()


LOCAL, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.5}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("olmo3", {"layer_types": [LOCAL, FULL] * 2}),
        ("olmo3", {"rope_parameters": {FULL: YARN, LOCAL: DEFAULT}}),
        ("olmo3", {"layer_types": [FULL] * 4}),
        ("gemma2", {"layer_types": [FULL, LOCAL, LOCAL, FULL]}),
        ("gemma2", {"layer_types": [FULL] * 4}),
        ("gemma2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("gemma3", {"layer_types": [LOCAL, FULL] * 2}),
        ("gemma3", {"layer_types": [FULL] * 4}),
        ("gpt-oss", {"layer_types": [FULL, LOCAL, LOCAL, FULL]}),
        ("gpt-oss", {"layer_types": [LOCAL] * 4}),
        ("llama4", {"rope_parameters": LLAMA3}),
        ("gemma4-dense", {"per_layer_config": {}, "attention_k_eq_v": False}),
        ("gemma4-dense", {"per_layer_config": {"1": {"num_key_value_heads": 1}, "3": {"num_key_value_heads": 1}}}),
    ],
)
def test_layers_with_a_window_are_those_of_the_checkpoint(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Here, in llama.cpp, and in what is exported, over more tokens than the window has."""
    own = {} if name == "llama4" else {"sliding_window": 8}
    reference, path = converted(name, tmp_path, "F32", num_hidden_layers=4, **own, **fields)
    expected = reference_logits(reference, TOKENS[:32])
    assert mean_kl(expected, bridge.Model.load(path, precision="f32", kv="f32").logits(TOKENS[:32])) < 1e-10
    with LlamaCpp(path, n_ctx=64) as peer:
        assert mean_kl(expected, peer.logits(TOKENS[:32])) < 1e-6
    config = config_of_gguf(bridge.open_gguf(path).metadata, bridge.open_gguf(path))
    assert config.get("layer_types", [FULL] * 4 if name == "olmo3" else reference.config.layer_types) == (
        [LOCAL, FULL] * 2 if name == "gemma2" and fields.get("layer_types") == [FULL] * 4
        else reference.config.layer_types
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "keys", "expected"),
    [
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, [1, 0, 1, 0]),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 0}, [1, 1, 1, 1]),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": [0, 1, 0, 1, 0]}, [0, 1, 0, 1]),
        ("gemma3", {"sliding_window_pattern": 2}, []),
        ("gemma3n", {"sliding_window": 8}, [1, 1, 1, 1]),
        ("gemma2", {}, [1, 0, 1, 0]),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}, []),
        ("lfm2", {"sliding_window": 8}, [1, 1, 1, 1]),
        ("llama4", {"sliding_window": 0}, []),
        ("llama", {"sliding_window": 8}, []),
        ("gpt-oss", {}, "gpt-oss.attention.sliding_window is None; must be a number of tokens"),
        ("gemma3", {"sliding_window": -8}, "gemma3.attention.sliding_window is -8; must be"),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": [1, 0]}, "whether it has a window, or be a period"),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": True}, "sliding_window_pattern is True"),
        ("gemma4", {"sliding_window": 8, "sliding_window_pattern": 2}, "whether it has a window; convert"),
    ],
)
def test_the_keys_of_windows_are_read_as_llama_cpp_reads_them(
    arch: str, keys: dict[str, Any], expected: list[int] | str
) -> None:
    def read() -> tuple[int, tuple[bool, ...]]:
        return read_windows(arch, lambda key: keys.get(key.removeprefix("attention.")), 4)

    if isinstance(expected, str):
        with pytest.raises(BridgeError, match=expected):
            read()
    else:
        assert [int(one) for one in read()[1]] == expected


@pytest.mark.parametrize(
    ("name", "base"), [("olmo3", 5e5), ("gemma3", 1e4), ("gemma2", 5e5), ("gpt-oss", 5e5), ("llama4", 5e5)]
)
def test_without_a_base_for_layers_with_a_window_it_is_llama_cpps(name: str, base: float) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    arch = golden["arch"]
    keys = {"general.architecture": arch, **golden["keys"], f"{arch}.rope.freq_base": 5e5}
    keys.pop(f"{arch}.rope.freq_base_swa", None)
    assert read_config(keys, Path("m.gguf")).local_base == base


@pytest.mark.parametrize(
    ("name", "sigmoid"),
    [
        ("dots1", True), ("glm4-moe", True), ("solar-open", True), ("glm4-moe-lite", False), ("deepseek2-lite", False),
        ("deepseek3.2", True), ("glm5", True), ("minimax-m2", True), ("minimax-m3", True), ("lfm2-moe", True),
        ("nemotron-h-moe", True), ("llama4", True), ("ernie4.5-moe", False), ("gpt-oss", False), ("phimoe", False),
        ("mistral4", False), ("gemma4-moe", False), ("jamba", False), ("hunyuan-moe", False), ("granite-moe", False),
        ("qwen3.5-moe", False), ("qwen3-next", False),
    ],
)  # fmt: skip
def test_a_router_without_a_gating_key_is_that_of_transformers(name: str, sigmoid: bool) -> None:
    """GLM-4.7 Flash alone, of DeepSeek V2's architecture, is known by its vocabulary."""
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    arch = golden["arch"]
    keys = {"general.architecture": arch, **golden["keys"]}
    keys.pop(f"{arch}.expert_gating_func", None)
    assert read_config(keys, Path("m.gguf")).routing.sigmoid == sigmoid
    if name == "glm4-moe-lite":
        keys.pop("deepseek2.vocab_size", None)
        assert read_config(keys | {"tokenizer.ggml.tokens": range(154880)}, Path("m.gguf")).routing.sigmoid


def test_exaone_4_of_64_layers_has_windows_whose_layers_alone_are_rotated(tmp_path: Path) -> None:
    """Windows other than the default, and frequencies with divisors, as the published model has."""
    fields = {
        "num_hidden_layers": 64, "sliding_window": 8, "layer_types": [LOCAL, FULL] * 32, "rope_parameters": LLAMA3,
    }  # fmt: skip
    reference, path = converted("exaone4", tmp_path, "F32", **fields)
    logits = bridge.Model.load(path, precision="f32", kv="f32").logits(TOKENS[:24])
    assert mean_kl(reference_logits(reference, TOKENS[:24]), logits) < 1e-6
    with LlamaCpp(path, n_ctx=32) as peer:
        assert mean_kl(peer.logits(TOKENS[:24]), logits) < 1e-6


@pytest.mark.parametrize(
    "fields",
    [
        {"q_lora_rank": 16, "norm_topk_prob": False, "kda_lower_bound": -2.0},
        {"tie_word_embeddings": True, "n_group": 1, "topk_group": 1, "mrope_section": [2, 1, 1]},
        {
            "head_dim": 32, "first_k_dense_replace": 2, "expert_swiglu_limit_list": [0, 0, 0.02, 0.03],
            "share_expert_swiglu_limit_list": [None, 0.3, None, 0.01],
        },
    ],
    ids=["another bound", "of images", "limited activations"],
)  # fmt: skip
def test_other_configs_of_ling_3_give_the_logits_of_llama_cpp(fields: dict[str, Any], tmp_path: Path) -> None:
    """In a model that sees images other pairs are rotated; limits are those of experts, and of other networks."""
    _, path = converted("ling3", tmp_path, "F32", **fields)
    model = bridge.Model.load(path, precision="f32", kv="f32")
    c = model.config
    assert (c.graph.neighbours, bool(c.limits)) == ("mrope_section" not in fields, "expert_swiglu_limit_list" in fields)
    with LlamaCpp(path, n_ctx=64) as peer:
        logits = peer.logits(TOKENS[:40])
    plain = NumpyMachine(model._decoder.weights, c, 64)
    assert mean_kl(logits, model.logits(TOKENS[:40])) < 1e-6
    assert mean_kl(logits, plain.logits(plain.read(TOKENS[:40]))) < 1e-6


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("glm4-moe", {"expert_gating_func": 4}, "expert_gating_func is 4, which is unknown"),
        ("glm4-moe", {"expert_group_count": 3}, "2 of 4 experts in 1 of 3 groups; convert the model again"),
        ("ernie4.5-moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2; ernie4_5-moe runs here"),
        (
            "deepseek3",
            {"attention.kv_lora_rank": 24},
            "a latent vector of 24 elements, with 4 rotated ones in keys of 20",
        ),
        ("deepseek3", {"attention.key_length_mla": None}, "attention.key_length_mla is missing; convert"),
        ("nemotron-h-moe", {"feed_forward_length": [0, 16]}, "must be a size for each of . layers; convert"),
        (
            "gemma4",
            {"attention.sliding_window_pattern": [True]},
            "must say of each of . layers whether",
        ),
        ("gemma4", {"attention.value_length_swa": 8}, "heads of 16 for keys, 8 for values with 16 rotated in layers"),
        ("laguna", {"rope.dimension_count_swa": 32}, "for values with 32 rotated in layers with a window cannot run"),
        ("laguna", {"attention.head_count": [4, 6]}, "must be a size for each of 5 layers; convert"),
        ("laguna", {"attention.head_count": [4, 6, 5, 6, 4]}, "5 heads cannot share 2 key-value heads; convert"),
        ("gemma3n", {"altup.num_inputs": 2}, "2 streams of activations .* must be 4, and the first"),
        ("minicpm", {"residual_scale": None}, "residual_scale is missing; convert"),
        ("jamba", {"ssm.state_size": None}, "ssm.state_size is missing; convert"),
        ("ling3", {"kda.gate_lower_bound": None}, "kda.gate_lower_bound is None; must be below 0; convert"),
        ("ling3", {"kda.gate_lower_bound": 0.5}, "kda.gate_lower_bound is 0.5; must be below 0; convert"),
        (
            "ling3",
            {"swiglu_clamp_exp": [1.0]},
            "swiglu_clamp_exp is .1.0.; must be a number for each of . layers, 0 or",
        ),
        ("ling3", {"swiglu_clamp_shexp": -1.0}, "swiglu_clamp_shexp is -1.0; must be a number for each of . layers"),
        ("falcon-h1", {"ssm.group_count": 3}, "64 values in 4 heads that share 3 groups cannot run here"),
    ],
)
def test_metadata_that_cannot_run_is_refused(name: str, changes: dict[str, Any], problem: str) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    arch = golden["arch"]
    keys = {"general.architecture": arch, **golden["keys"], **{f"{arch}.{key}": v for key, v in changes.items()}}
    read_config({"general.architecture": arch, **golden["keys"]}, Path("m.gguf"))
    with pytest.raises(BridgeError, match=f"m.gguf: .*{problem}"):
        read_config({key: value for key, value in keys.items() if value is not None}, Path("m.gguf"))


def test_a_shorter_vector_for_experts_is_that_of_the_metadata(tmp_path: Path) -> None:
    file = bridge.open_gguf(converted("nemotron-3-super", tmp_path)[1])
    metadata = {**file.metadata, "nemotron_h_moe.moe_latent_size": 48}
    with pytest.raises(
        BridgeError, match=r"blk.1.ffn_down_exps.weight: shape \[4, 32, 32\], the metadata says \[4, 48"
    ):
        read_weights(file, read_config(metadata, file.path))


def test_more_positions_than_are_embedded_are_refused(tmp_path: Path) -> None:
    path = converted("gpt2", tmp_path)[1]
    with pytest.raises(BridgeError, match=r"context=641: must be at most 640, the positions that .*m.gguf has"):
        bridge.Model.load(path, context=641)


def test_a_context_in_which_tokens_are_chosen_is_refused(tmp_path: Path) -> None:
    """By DeepSeek V3.2's indexer: it takes all as long as there are no more than it chooses."""
    path = converted("deepseek3.2", tmp_path, index_topk=40)[1]
    assert bridge.Model.load(path).context == 40
    with pytest.raises(BridgeError, match="context=41: must be at most 40; beyond, deepseek32 chooses the tokens"):
        bridge.Model.load(path, context=41)


def test_heads_with_norms_of_their_own_are_refused(tmp_path: Path) -> None:
    path = converted("command-r", tmp_path, use_qk_norm=True, num_hidden_layers=64)[1]
    with pytest.raises(BridgeError, match=r"blk.0.attn_q_norm.weight: heads normalized by a norm of their own"):
        bridge.Model.load(path)

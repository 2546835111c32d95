"""The layer that predicts a token further: what it computes, and that replies are the same with its guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.decoder.prediction import agreement
from bridge.runtime.replies.speculation import HeadDrafter
from tests.conftest import repacked
from tests.support.encode import load_floats
from tests.support.predicting_models import save_predicting

pytest.importorskip("torch")

# of states, or of gates, as many as a kernel has lanes
HEADS = {
    "qwen3.5": {"linear_num_value_heads": 16}, "ling3": {"num_attention_heads": 16, "num_key_value_heads": 16},
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, 2048, 40).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_predicting("glm4-moe", tmp_path_factory.mktemp("mtp") / "model")


def converted(folder: Path, type: str) -> Path:
    out = folder.parent / f"{type}.gguf"
    if not out.exists():
        bridge.convert(folder, out, tensor_types=[(".*", type)])
    return out


def rms(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    return x / ((x * x).mean(-1)[..., None] + eps) ** 0.5 * weight


def expected_states(folder: Path, states: np.ndarray) -> np.ndarray:
    """The layer's normalized states by transformers' layer, of the model's states and TOKENS."""
    import torch
    from transformers import AutoConfig
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    weights = {key: torch.from_numpy(value) for key, value in load_floats(folder).items()}
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    layer, own = glm.Glm4MoeDecoderLayer(config, 2).eval(), "model.layers.3."
    rows = {key.removeprefix(own): value for key, value in weights.items() if key.startswith(own)}
    experts = [[rows[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(4)] for part in ("gate", "up", "down")]
    rows["mlp.experts.gate_up_proj"] = torch.cat([torch.stack(experts[0]), torch.stack(experts[1])], 1)
    rows["mlp.experts.down_proj"] = torch.stack(experts[2])
    with torch.no_grad():
        missing = layer.load_state_dict(rows, strict=False).missing_keys
        assert not missing
        e = rms(rows["embed_tokens.weight"][TOKENS[1:]].numpy(), rows["enorm.weight"].numpy())
        h = rms(states[:-1], rows["hnorm.weight"].numpy())
        x = torch.from_numpy(np.concatenate([e, h], 1)) @ rows["eh_proj.weight"].T
        at = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        y = layer(x[None], attention_mask=mask, position_embeddings=glm.Glm4MoeRotaryEmbedding(config)(x, at))
    return rms(y[0].numpy(), rows["shared_head.norm.weight"].numpy())


def test_the_layer_computes_what_transformers_layer_does(folder: Path) -> None:
    """Of states read together, or a few at a time."""
    model = bridge.Model.load(converted(folder, "F32"), precision="f32", kv="f32", context=64)
    states = model._decoder.states(TOKENS, len(TOKENS))
    expected = expected_states(folder, states)
    head = model.prediction_head()
    logits = head.decoder.logits(expected)
    assert (head.guesses(states, TOKENS[1:]) == logits.argmax(1)).all()
    head.start((), 0)
    for start, stop in ((0, 20), (20, 23), (23, 24), (24, 39)):
        state, guess = head.read_pairs(states[start:stop], TOKENS[start + 1 : stop + 1])
        np.testing.assert_allclose(state[0], expected[stop - 1], atol=2e-4)
        assert guess == logits[stop - 1].argmax()
        head.read_guess(state, guess)  # is forgotten


@repacked
@pytest.mark.parametrize("name", ["glm4-moe", "glm4-moe-lite", "qwen3.5", "ling3"])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_the_reply_is_the_one_without_guesses(name: str, kv: str, folder: Path, tmp_path: Path) -> None:
    if name != "glm4-moe":
        folder = save_predicting(name, tmp_path / "model", **HEADS.get(name, {}))
    model = bridge.Model.load(converted(folder, "Q8_0"), context=64, kv=kv)
    for prompt in (TOKENS[:20], TOKENS[:25], [*TOKENS[:10], *TOKENS[30:]]):
        plain = list(model.generate_tokens(prompt, 40, temperature=0))
        assert list(model.generate_tokens(prompt, 40, temperature=0, draft="mtp")) == plain
        assert model.timing.speculation.drafted > 3
        assert list(model.generate_tokens(prompt, 40, seed=1, draft="mtp")) == list(
            model.generate_tokens(prompt, 40, seed=1)
        )


@repacked
@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5"])
def test_sequences_made_together_have_the_layers_guesses(name: str, folder: Path, tmp_path: Path) -> None:
    """The replies are those without; a single one has the guesses that it has alone."""
    if name != "glm4-moe":
        folder = save_predicting(name, tmp_path / "model", **HEADS.get(name, {}))
    model = bridge.Model.load(converted(folder, "Q8_0"), context=64)
    prompts = [TOKENS[:20], [*TOKENS[:10], *TOKENS[30:]], TOKENS[:1]]
    for sequences in (1, 2):
        with model.batch(sequences, draft="mtp") as batch:
            generations = [batch.add(prompt, 30, temperature=0) for prompt in prompts]
            list(batch)
        for prompt, generation in zip(prompts, generations, strict=True):
            assert generation.tokens == list(model.generate_tokens(prompt, 30, temperature=0))
            assert generation.speculation.drafted > 3
        if sequences == 1:
            list(model.generate_tokens(prompts[0], 30, temperature=0, draft="mtp"))
            alone, single = model.timing.speculation, generations[0].speculation
            assert (single.drafted, single.accepted) == (alone.drafted, alone.accepted)


@repacked
def test_a_text_that_is_taken_over_has_the_guesses_that_it_has_alone(folder: Path) -> None:
    model, prompt = bridge.Model.load(converted(folder, "Q8_0"), context=128), [*TOKENS, 7]
    list(model.generate_tokens(prompt, 30, temperature=0, draft="mtp"))
    alone = model.timing.speculation
    with model.batch(2, draft="mtp") as batch:
        other = batch.add(TOKENS, 10, temperature=0)
        list(batch)
        taken = batch.add(prompt, 30, temperature=0)
        list(batch)
    assert (other.kept, taken.kept) == (0, len(TOKENS) - 1)  # a pair has the token after it
    assert (taken.speculation.drafted, taken.speculation.accepted) == (alone.drafted, alone.accepted)


def without_own_embeddings(folder: Path, out: Path) -> Path:
    """The model with the layer's embeddings and head gone: it shares the model's."""
    from safetensors.numpy import save_file

    weights = load_floats(folder)
    for name in ("embed_tokens", "shared_head.head", "shared_head.norm"):
        del weights[f"model.layers.3.{name}.weight"]
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@repacked
def test_a_layer_that_guesses_as_the_model_replies_is_right(folder: Path, tmp_path: Path) -> None:
    """Its guesses are made to be the model's reply: all are accepted, after prompts that share a start."""
    model = bridge.Model.load(converted(without_own_embeddings(folder, tmp_path / "shared"), "Q8_0"), context=64)
    head = model.prediction_head()
    assert head.decoder.embedding is model._decoder.embedding
    plain = list(model.generate_tokens(TOKENS[:20], 40, temperature=0))
    text = TOKENS[:20] + plain
    read = head._read

    def reads(states: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, int]:
        state, _ = read(states, tokens)
        return state, text[head.cache.length + 1]

    head._read = reads  # type: ignore[method-assign]
    for kept in (0, 19, 14):
        assert list(model.generate_tokens([*TOKENS[:kept], 5], 2, temperature=0, draft="mtp"))
        assert list(model.generate_tokens(TOKENS[:20], 30, temperature=0, draft="mtp")) == plain[:30]
        assert model.timing.kept_tokens == max(0, kept - 1)  # a pair has the token after it
        speculation = model.timing.speculation
        assert speculation.drafted >= speculation.accepted > 20
        assert speculation.drafted - speculation.accepted <= HeadDrafter.longest  # of the last step, when 30 are drawn


def test_the_layer_of_a_model_with_a_state_computes_what_transformers_layer_does(tmp_path: Path) -> None:
    """Qwen3.5: full attention with an output gate, norms of which one more is stored."""
    import torch
    from transformers import AutoConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    folder = save_predicting("qwen3.5", tmp_path / "model")
    bridge.convert(folder, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    model = bridge.Model.load(tmp_path / "m.gguf", precision="f32", kv="f32", context=64)
    states = model._decoder.states(TOKENS, len(TOKENS))
    weights = {key: torch.from_numpy(value) for key, value in load_floats(folder).items()}
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation, eps = "eager", config.rms_norm_eps
    layer, own = qwen.Qwen3_5DecoderLayer(config, 3).eval(), "mtp.layers.0."
    rows = {key.removeprefix(own): value for key, value in weights.items() if key.startswith(own)}
    assert not layer.load_state_dict(rows).missing_keys
    with torch.no_grad():
        e = rms(weights["model.embed_tokens.weight"][TOKENS[1:]], 1 + weights["mtp.pre_fc_norm_embedding.weight"], eps)
        h = rms(torch.from_numpy(states[:-1]), 1 + weights["mtp.pre_fc_norm_hidden.weight"], eps)
        x = torch.cat([e, h], 1) @ weights["mtp.fc.weight"].T
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        place = qwen.Qwen3_5TextRotaryEmbedding(config)(x, torch.arange(len(x))[None])
        y = layer(x[None], attention_mask=mask, position_embeddings=place)
        expected = rms(y[0], 1 + weights["mtp.norm.weight"], eps).numpy()
    head = model.prediction_head()
    state, _ = head.read_pairs(states[:-1], TOKENS[1:])
    np.testing.assert_allclose(state[0], expected[-1], atol=2e-4)
    assert agreement(model._decoder, head, TOKENS)[1] == 39


def test_agreement_counts_the_guesses_that_the_model_would_make(folder: Path) -> None:
    model = bridge.Model.load(converted(folder, "F32"), precision="f32", kv="f32", context=64)
    decoder, head = model._decoder, model.prediction_head()
    right, of = agreement(decoder, head, TOKENS)
    states = decoder.states(TOKENS, len(TOKENS))
    guessed = head.decoder.logits(expected_states(folder, states)).argmax(1)
    assert of == 39
    assert right == int((guessed == decoder.logits(states[1:]).argmax(1)).sum())


def test_a_file_without_such_a_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    bridge.convert(folder, tmp_path / "m.gguf", no_mtp=True)
    with pytest.raises(BridgeError, match=r"m\.gguf: has no layer that predicts a further token \(MTP\)"):
        bridge.Model.load(tmp_path / "m.gguf").prediction_head()
    with pytest.raises(BridgeError, match="has no layer that predicts"):
        bridge.Model.load(tmp_path / "m.gguf").batch(2, draft="mtp")

"""Drafters: what they compute, and that replies are the same with their guesses."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.drafters.attention import KeysAndValues
from bridge.runtime.model import Model
from bridge.runtime.replies import speculation
from scripts.peers.llama.llama_drafts import reply
from tests.conftest import PATIENCE
from tests.support.drafter_models import DRAFTERS, DrafterModel, Shapes, layer_shapes, write_config
from tests.support.encode import load_floats
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.make_families import stored_values_of

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(0, 2048, 60).tolist()


def random_weights(shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that keep the size of what they multiply."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        values = rng.normal(1, 0.1, shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)
        weights[name] = values.astype(np.float32)
    weights |= {name: stored_values_of(name, shapes[name]) for name in ("d2t", "t2d") if name in shapes}
    return weights


def save(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    write_config(folder, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def llama_shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocab, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        head = hidden // config["num_attention_heads"]
        kv = config["num_key_value_heads"] * head
        shapes |= layer_shapes(f"model.layers.{i}", hidden, hidden, hidden, kv, inner)
    return {**shapes, "model.norm.weight": (hidden,)}


def converted(folder: Path, type: str, **options: Any) -> Path:
    out = folder.parent / f"{folder.name}-{type}.gguf"
    bridge.convert(folder, out, tensor_types=[(".*weight", type)], **options)
    return out


class Pair:
    """A Llama and a drafter for it, as checkpoints and as GGUFs."""

    def __init__(self, name: str, folder: Path):
        self.drafter = DRAFTERS[name]
        target = self.drafter.target or {}
        target = target.get("text_config", target)
        self.target_folder = save(folder / "target", target, random_weights(llama_shapes(target), 1))
        copy_tokenizer(self.target_folder)
        self.folder = save(folder / name, self.drafter.config, random_weights(self.drafter.shapes, 2))
        self.of = {"target_model": self.target_folder} if self.drafter.target else {}
        self.model, self.file = (converted(path, "Q8_0", **of) for path, of in self._both)
        self.exact_model, self.exact_file = (converted(path, "F32", **of) for path, of in self._both)

    @property
    def _both(self) -> list[tuple[Path, dict[str, Any]]]:
        return [(self.target_folder, {}), (self.folder, self.of)]


@pytest.fixture(scope="module", params=[name for name in DRAFTERS if name.startswith("eagle3")])
def eagle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("eagle"))


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned_halves(x: np.ndarray, base: float, factors: np.ndarray) -> np.ndarray:
    """[n, heads, dim] turned as transformers does, position by position."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half) / factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama3_factors(dim: int, base: float, rules: dict[str, Any]) -> np.ndarray:
    lengths = 2 * np.pi * base ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rules["low_freq_factor"], rules["high_freq_factor"], rules["factor"]
    turns = rules["original_max_position_embeddings"] / lengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """[n, heads, dim] and [n, kv, dim] -> [n, heads * dim]."""
    share = q.shape[1] // k.shape[1]
    scores = np.einsum("nhd,phd->hnp", q, np.repeat(k, share, 1)) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnp,phd->nhd", shares / shares.sum(-1, keepdims=True), np.repeat(v, share, 1)).reshape(len(q), -1)


def eagle_reference(drafter: DrafterModel, weights: dict[str, np.ndarray], embedding: np.ndarray, head: np.ndarray,
                    states: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """h and the logits of all pairs, from the checkpoint's weights alone: states [n, 3 hidden] before token i + 1."""
    config = {**drafter.config, **drafter.config.get("transformer_layer_config", {})}
    layer = next(name for name in weights if name.endswith("q_proj.weight")).partition(".self_attn")[0]
    w = {name.removeprefix(f"{layer}."): value.astype(np.float64) for name, value in weights.items()}
    heads, dim = config["num_attention_heads"], 8
    if config.get("norm_before_fc"):
        states = rms(states, w["input_norm.weight"])
    g = states @ w["fc.weight"].T
    normed = rms(g, w["hidden_norm.weight"])
    x = np.concatenate([rms(embedding[tokens], w["input_layernorm.weight"]), normed], axis=1)
    q, k, v = (x @ w[f"self_attn.{n}_proj.weight"].T for n in "qkv")
    base, rules = config["rope_theta"], config.get("rope_scaling")
    factors = llama3_factors(dim, base, rules) if rules else np.ones(dim // 2)
    q, k = (turned_halves(a.reshape(len(x), -1, dim), base, factors) for a in (q, k))
    mixed = causal_attention(q, k, v.reshape(len(x), -1, dim), dim**-0.5) @ w["self_attn.o_proj.weight"].T
    x = mixed + (normed if config.get("norm_before_residual") else g)
    read = rms(x, w["post_attention_layernorm.weight"])
    gate = read @ w["mlp.gate_proj.weight"].T
    h = x + (gate / (1 + np.exp(-gate)) * (read @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    assert q.shape[1] == heads
    return h, rms(h, w["norm.weight"]) @ head.T


def target_states(folder: Path, tokens: list[int]) -> list[np.ndarray]:
    """The model's states before each of its layers, and after the last, by transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states: list[np.ndarray] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0][0].numpy().copy()))
             for layer in model.model.layers]  # fmt: skip
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, given: states.append(given[0][0].numpy().copy())))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return states


def test_an_eagle_head_computes_what_the_formula_says_of_the_models_states(eagle: Pair) -> None:
    """The states are those of transformers' model before its layers."""
    model = Model.load(eagle.exact_model, precision="f32", kv="f32", context=64)
    drafter: Any = model.drafter(eagle.exact_file)
    head = drafter._head
    states = target_states(eagle.target_folder, TOKENS)
    layers = drafter.taps
    model._decoder.tap(layers)
    expected_states = np.concatenate([states[layer] for layer in layers], axis=1)
    model._decoder.cache.length = 0
    model._decoder.run(TOKENS, len(TOKENS))
    np.testing.assert_allclose(model._decoder.tapped, expected_states, atol=2e-4)

    weights, target = load_floats(eagle.folder), load_floats(eagle.target_folder)
    embedding = weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    h, logits = eagle_reference(
        eagle.drafter,
        weights,
        embedding,
        weights["lm_head.weight"],
        expected_states[:-1].astype(np.float64),
        TOKENS[1:],
    )
    stored = KeysAndValues(head.heads, 64)
    for start, stop in ((0, 20), (20, 23), (23, 24), (24, len(TOKENS) - 1)):
        g = head.fused(expected_states[start:stop])
        got = head.states(g, TOKENS[start + 1 : stop + 1], start, stored)
        np.testing.assert_allclose(got, h[start:stop], atol=5e-4)
        np.testing.assert_allclose(head.logits(got), logits[start:stop], atol=2e-3)
        row = int(logits[stop - 1].argmax())
        assert head.guess(got) == (3 * row if "d2t" in weights else row)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_the_reply_with_an_eagle_head_is_the_one_without(eagle: Pair, kv: str) -> None:
    model = Model.load(eagle.model, context=128, kv=kv)
    for prompt in (TOKENS[:20], TOKENS[:25], [*TOKENS[:10], *TOKENS[30:]], TOKENS[:1]):
        plain = list(model.generate_tokens(prompt, 40, temperature=0))
        assert list(model.generate_tokens(prompt, 40, temperature=0, draft=eagle.file)) == plain
        assert model.timing.speculation is not None
        assert model.timing.speculation.drafted > 3
        sampled = list(model.generate_tokens(prompt, 40, seed=1))
        assert list(model.generate_tokens(prompt, 40, seed=1, draft=str(eagle.file))) == sampled


def successors(rng: np.random.Generator) -> np.ndarray:
    """The token that follows each, where one alone decides: a permutation."""
    return rng.permutation(2048)


def bigram_model(folder: Path, config: dict[str, Any], follows: np.ndarray) -> dict[str, np.ndarray]:
    """A model whose layers do nothing, and whose head names the successor of each token; its weights."""
    weights = {name: np.zeros(shape, np.float32) for name, shape in llama_shapes(config).items()}
    weights["model.embed_tokens.weight"] = np.random.default_rng(3).normal(0, 1, (2048, 64)).astype(np.float32)
    weights["lm_head.weight"][follows] = weights["model.embed_tokens.weight"]
    for name in weights:
        if weights[name].ndim == 1:
            weights[name] += 1
    copy_tokenizer(save(folder, config, weights))
    return weights


def eagle_of_bigrams(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """A head without output matrix of its own that attends to its token alone, and so finds the same successors."""
    one, nothing = np.eye(64, dtype=np.float32), np.zeros((64, 64), np.float32)
    sharp = np.concatenate([4 * one, nothing], axis=1)
    head = {"fc.weight": np.zeros((64, 192)), "norm.weight": np.ones(64), "midlayer.hidden_norm.weight": np.zeros(64)}
    head |= {f"midlayer.self_attn.{name}_proj.weight": sharp for name in "qkv"}
    head |= {"midlayer.self_attn.o_proj.weight": one, "embed_tokens.weight": weights["model.embed_tokens.weight"]}
    head |= {f"midlayer.mlp.{name}_proj.weight": np.zeros((64, 64)) for name in ("gate", "up", "down")}
    head |= {f"midlayer.{name}_layernorm.weight": np.ones(64) for name in ("input", "post_attention")}
    own = {**config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 2048}
    arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in head.items()}
    return save(folder, {**own, "norm_before_residual": True}, arrays)


BIGRAMS = {
    **DRAFTERS["eagle3"].target, "hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose every token decides the next, and an EAGLE-3 head that knows it."""
    folder = tmp_path_factory.mktemp("bigrams")
    weights = bigram_model(folder / "target", BIGRAMS, successors(np.random.default_rng(4)))
    head = eagle_of_bigrams(folder / "head", BIGRAMS, weights)
    return converted(folder / "target", "Q8_0"), converted(head, "Q8_0", target_model=folder / "target")


def test_a_head_that_computes_what_the_model_does_is_right(bigrams: tuple[Path, Path]) -> None:
    """After prompts that share a start, too, of which the head keeps its part."""
    model = Model.load(bigrams[0], context=128)
    for prompt in (TOKENS[:20], [*TOKENS[:20], 7, 8, 9], TOKENS[:10], TOKENS[:1]):
        plain = list(model.generate_tokens(prompt, 60, temperature=0))
        assert list(model.generate_tokens(prompt, 60, temperature=0, draft=bigrams[1])) == plain
        made: Any = model.timing.speculation
        assert made.accepted > 40
        assert made.accepted >= made.drafted - 5  # guessed beyond the end


def guessed_three_at_a_time(model: Model, drafter: Path, prompt: list[int], count: int) -> tuple[list[int], int, int]:
    """A greedy reply, and how many tokens were guessed and right, without pauses."""
    guessing = model.drafter(drafter)
    guessing.first = guessing.longest = 3
    tokens = list(model.generate_tokens(prompt, count, temperature=0, draft=drafter))
    made: Any = model.timing.speculation
    return tokens, made.drafted, made.accepted


def test_llama_cpp_finds_as_many_guesses_right(
    bigrams: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head that is wrong after some tokens: the same reply, and the same count of right guesses."""
    monkeypatch.setattr(speculation, "_LONGEST_PAUSE", 0)
    target = load_floats(bigrams[0].parent / "target")
    head = load_floats(bigrams[0].parent / "head")
    rows = np.arange(2048)
    rows[rows % 4 == 0] = np.roll(rows[rows % 4 == 0], 1)
    head["lm_head.weight"] = target["lm_head.weight"][rows]
    config = json.loads((bigrams[0].parent / "head/config.json").read_text())
    some = converted(save(tmp_path / "some", config, head), "Q8_0", target_model=bigrams[0].parent / "target")
    model = Model.load(bigrams[0], context=256)
    tokens, guessed, right = guessed_three_at_a_time(model, some, TOKENS[:20], 60)
    peer = reply(bigrams[0], TOKENS[:20], 60, some, "EAGLE3")
    assert model.tokenizer.decode(tokens) == peer.text == reply(bigrams[0], TOKENS[:20], 60).text
    assert 0.3 < right / guessed < 0.95
    assert abs(right - peer.right) <= 3
    assert abs(guessed - peer.guessed) <= 3


def test_the_command_line_says_how_many_guesses_were_right(
    bigrams: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(bigrams[0]), "--draft", str(bigrams[1]), "-p", "a", "-n", "40", "--temperature", "0"]
    assert main(command) == 0
    err = capsys.readouterr().err
    drafted = [int(n) for n in re.findall(r"(\d+) of (\d+) guesses right", err)[0]]
    assert drafted[0] > 25


def renamed(path: Path, out: Path, **keys: Any) -> Path:
    """A GGUF with other values of its metadata."""
    bridge.edit(path, out, metadata=keys)
    return out


def test_a_drafter_of_another_model_is_refused(bigrams: tuple[Path, Path], eagle: Pair, tmp_path: Path) -> None:
    model = Model.load(bigrams[0], context=64)
    hidden = eagle.drafter.target or {}
    if hidden.get("text_config", hidden)["hidden_size"] != 64:
        with pytest.raises(
            BridgeError, match=r"draft=.*is of another model: it reads states of 96 elements, the model's"
        ):
            list(model.generate_tokens([1], 4, draft=eagle.file))


def test_a_drafter_with_another_vocabulary_is_refused(bigrams: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copy_tokenizer(write_config(tmp_path / "target", BIGRAMS))
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("KING", "QUEEN"), encoding="utf-8")
    head = eagle_of_bigrams(tmp_path / "head", BIGRAMS, {"model.embed_tokens.weight": np.zeros((2048, 64))})
    other = converted(head, "Q8_0", target_model=folder)
    with pytest.raises(BridgeError, match=r"is of another model: token \d+ is '.*' there, '.*' in its file"):
        list(Model.load(bigrams[0], context=64).generate_tokens([1], 4, draft=other))


def test_a_drafter_is_no_model_and_a_model_no_drafter(bigrams: tuple[Path, Path]) -> None:
    with pytest.raises(BridgeError, match=r"is a drafter \(eagle3\), which only guesses tokens for another model"):
        Model.load(bigrams[1])
    model = Model.load(bigrams[0], context=64)
    with pytest.raises(BridgeError, match="is a llama model, no drafter; a model guesses in `run`"):
        list(model.generate_tokens([1], 4, draft=bigrams[0]))
    with pytest.raises(
        BridgeError, match=r"unknown draft 'none\.gguf': choose ngram, mtp, a drafter's GGUF, or another"
    ):
        list(model.generate_tokens([1], 4, draft="none.gguf"))


class Gemma:
    """A Gemma 4 and an assistant for it, both by transformers."""

    def __init__(self, name: str, folder: Path):
        import torch
        from transformers import AutoConfig

        torch.manual_seed(0)
        target, own = ("gemma4", {"hidden_size_per_layer_input": 32}) if "unified" not in name else ("gemma4-dense", {})
        self.target = randomized(new_model(target, hidden_size=64, **own))
        self.target.save_pretrained(folder / "target")
        copy_tokenizer(folder / "target")
        write_config(folder / name, DRAFTERS[name].config)
        kind = AutoConfig.from_pretrained(folder / name)
        self.assistant = randomized(getattr(transformers, DRAFTERS[name].config["architectures"][0])(kind))
        self.assistant.config.use_ordered_embeddings = False  # which llama.cpp's graph does not have either
        self.assistant.save_pretrained(folder / name)
        copy_tokenizer(folder / name)
        self.model, self.file = (converted(folder / part, "Q8_0") for part in ("target", name))
        self.exact_model, self.exact_file = (converted(folder / part, "F32") for part in ("target", name))

    def guesses(self, tokens: list[int], count: int) -> tuple[np.ndarray, dict[bool, Any], list[np.ndarray]]:
        """What transformers' assistant reads after tokens, of which the model has read all but the last: the state,
        keys and values with a window and without. And its logits of so many guesses."""
        import torch

        with torch.no_grad():
            out = self.target.model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True)
            state, token, at = out.last_hidden_state[:, -1:], tokens[-1], torch.tensor([[len(tokens) - 1]])
            shared, first = dict(out.shared_kv_states), state[0].numpy()
            logits = []
            for _ in range(count):
                embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
                made = self.assistant(
                    inputs_embeds=torch.cat([embedded, state], dim=-1), position_ids=at, shared_kv_states=shared
                )
                state, token = made.last_hidden_state, int(made.logits[0, -1].argmax())
                logits.append(made.logits[0, -1].numpy())
        read = {kind == "sliding_attention": [part[0].numpy() for part in parts] for kind, parts in shared.items()}
        return first, read, logits


@pytest.fixture(scope="module", params=["gemma4-assistant", "gemma4-unified-assistant"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    return Gemma(request.param, tmp_path_factory.mktemp("gemma"))


def test_an_assistant_computes_what_transformers_assistant_does(gemma: Gemma) -> None:
    """Within the window, where all agree on what it sees."""
    model = Model.load(gemma.exact_model, precision="f32", context=64)
    drafter: Any = model.drafter(gemma.exact_file)
    state, read, logits = gemma.guesses(TOKENS[:29], 4)
    for local, parts in read.items():
        drafter._stored[local].store(0, *(part.transpose(1, 0, 2) for part in parts))
    token = TOKENS[28]
    for row in logits:
        state, got = drafter._head.step(state, token, drafter._stored, 28)
        token = int(row.argmax())
        np.testing.assert_allclose(got, row, atol=1e-3)


@pytest.mark.parametrize(("kv", "near"), [("f32", 5e-3), ("f16", 1e-2), ("q8_0", 0.3)])
def test_an_assistant_reads_the_models_keys_and_values(gemma: Gemma, kv: str, near: float) -> None:
    """As they are in its cache, also those that take the place of others after wrong guesses."""
    model = Model.load(gemma.exact_model, precision="f32", kv=kv, context=64)
    drafter: Any = model.drafter(gemma.exact_file)
    decoder, tokens = model._decoder, TOKENS[:29]
    _, read, logits = gemma.guesses(tokens, 4)
    decoder.cache.length = 0
    drafter.begin(tokens, 0, decoder.cache)
    drafter.read(22, decoder.run([*tokens[:20], 7, 8, 9], 1), None)
    drafter.propose([*tokens[:20], 7, 8, 9, 10], 1)
    decoder.cache.length = 20
    drafter.read(20, decoder.run(tokens[20:-1], 8), None)
    guesses = drafter.propose(tokens, 4)
    assert guesses == [int(row.argmax()) for row in logits] or kv != "f32"
    for local, parts in read.items():
        stored = drafter._stored[local]
        for got, expected in zip((stored.keys, stored.values), parts, strict=True):
            np.testing.assert_allclose(got[:, :28], expected, atol=near)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_the_reply_with_an_assistant_is_the_one_without(gemma: Gemma, kv: str) -> None:
    """Beyond the window too."""
    model = Model.load(gemma.model, context=128, kv=kv)
    for prompt in (TOKENS[:20], TOKENS[:25], [*TOKENS[:10], *TOKENS[30:]], TOKENS[:1]):
        plain = list(model.generate_tokens(prompt, 40, temperature=0))
        assert list(model.generate_tokens(prompt, 40, temperature=0, draft=gemma.file)) == plain
        made: Any = model.timing.speculation
        assert made.drafted > 3


def test_an_assistant_that_knows_the_model_is_right(gemma: Gemma, tmp_path: Path) -> None:
    """Of a model that repeats the last token: none of its layers does anything."""
    for part in ("target", gemma.file.name.removesuffix("-Q8_0.gguf")):
        shutil.copytree(gemma.model.parent / part, tmp_path / part)
        weights = load_floats(tmp_path / part)
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight", "layer_projection.weight")):
                weights[name] = np.zeros_like(weights[name])
        if part == "target":
            embedding = weights["model.embed_tokens.weight"]
        else:
            weights["pre_projection.weight"][:, 64:] = 0
            rows = embedding @ weights["pre_projection.weight"][:, :64].T
            weights["model.embed_tokens.weight"] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for name in weights:
            if name.endswith(("norm.weight", "layer_scalar")):
                weights[name] = np.ones_like(weights[name])
        save_file(weights, tmp_path / part / "model.safetensors", {"format": "pt"})
    model, file = converted(tmp_path / "target", "Q8_0"), converted(tmp_path / part, "Q8_0")
    loaded = Model.load(model, context=128)
    plain = list(loaded.generate_tokens(TOKENS[:20], 60, temperature=0))
    assert list(loaded.generate_tokens(TOKENS[:20], 60, temperature=0, draft=file)) == plain
    made: Any = loaded.timing.speculation
    assert made.accepted >= made.drafted - 5
    assert made.accepted > 40


def test_an_assistant_of_another_model_is_refused(gemma: Gemma, bigrams: tuple[Path, Path]) -> None:
    model = Model.load(bigrams[0], context=64)
    with pytest.raises(BridgeError, match=r"is of another model: no layer of it has keys of 16 elements for layer 0"):
        list(model.generate_tokens([1], 4, draft=gemma.file))


@pytest.fixture(scope="module", params=["dflash", "dflash-windows"])
def dflash(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("dflash"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--remove", "tokenizer.ggml.mask_token_id"), "mask_token_id is None; must be one of the 2048 tokens"),
        (("--set", "dflash.block_size=100000"), "block_size is 100000; must be from 2 to 1024"),
    ],
)
def test_a_dflash_drafter_whose_block_cannot_be_made_is_refused(
    change: tuple[str, str], message: str, dflash: Pair, tmp_path: Path
) -> None:
    assert main(["edit", str(dflash.file), "-o", str(tmp_path / "edited.gguf"), *change]) == 0
    with pytest.raises(BridgeError, match=message):
        list(Model.load(dflash.model, context=64).generate_tokens([1], 4, draft=tmp_path / "edited.gguf"))


def dflash_reference(pair: Pair, states: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    """A block's normalized states by transformers' drafter of this kind, which attends to the whole block."""
    import torch
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = dict(pair.drafter.config)
    window = config.get("sliding_window", 64)
    layers = config["num_hidden_layers"]
    rules = config.get("rope_scaling") or {"rope_type": "default"}
    kind = MuseGlimmerAssistantConfig(
        **{key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        num_hidden_layers=layers, num_key_value_heads=config["num_key_value_heads"], rms_norm_eps=1e-5,
        rope_parameters={**rules, "rope_theta": config["rope_theta"]}, max_position_embeddings=256,
        layer_types=config.get("layer_types") or layers * ["full_attention"],
        target_layer_ids=config["dflash_config"]["target_layer_ids"],
    )  # fmt: skip
    kind._attn_implementation = "eager"
    model = MuseGlimmerAssistantModel(kind).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {names.get(key, key): torch.from_numpy(values) for key, values in load_floats(pair.folder).items()}
    assert not model.load_state_dict(weights, strict=False).missing_keys
    block, count = len(embedded), len(states) + len(embedded)
    seen = torch.arange(count) > torch.arange(count - block, count)[:, None] - window
    masks = {"full_attention": None, "sliding_attention": torch.where(seen, 0.0, -torch.inf)[None, None]}
    with torch.no_grad():
        out = model(torch.from_numpy(embedded)[None], torch.from_numpy(states)[None], attention_mask=masks)
    return np.asarray(out.last_hidden_state[0].numpy())


def test_a_dflash_drafter_computes_what_transformers_drafter_of_this_kind_does(dflash: Pair) -> None:
    """Of states read together or a few at a time, some of them again."""
    model = Model.load(dflash.exact_model, precision="f32", context=128)
    drafter: Any = model.drafter(dflash.exact_file)
    head = drafter._head
    head.causal = False
    read = target_states(dflash.target_folder, TOKENS[:-1])
    states = np.concatenate([read[layer] for layer in head.file.target_layers()], axis=1)
    for start, stop in ((0, 20), (20, 29), (25, 40), (40, len(TOKENS) - 1)):
        head.read(states[start:stop], start, drafter._stored)
    own, target = load_floats(dflash.folder), load_floats(dflash.target_folder)
    embedding = own.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    block = [TOKENS[-1], *(head.block - 1) * [5]]
    embedded = embedding[block] * np.float32(dflash.drafter.config["dflash_config"].get("input_embedding_scale", 1))
    expected = dflash_reference(dflash, states, embedded)[1:] @ own.get("lm_head.weight", target["lm_head.weight"]).T
    got = head.logits(TOKENS[-1], len(TOKENS) - 1, drafter._stored)
    np.testing.assert_allclose(got, expected, atol=1e-3)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_the_reply_with_a_dflash_drafter_is_the_one_without(dflash: Pair, kv: str) -> None:
    model = Model.load(dflash.model, context=128, kv=kv)
    for prompt in (TOKENS[:20], TOKENS[:25], [*TOKENS[:10], *TOKENS[30:]], TOKENS[:1], TOKENS[:60] + TOKENS[:50]):
        plain = list(model.generate_tokens(prompt, 40, temperature=0))
        assert list(model.generate_tokens(prompt, 40, temperature=0, draft=dflash.file)) == plain
        made: Any = model.timing.speculation
        assert made.drafted > 3


def dflash_of_bigrams(folder: Path, target: Path, block: int) -> Path:
    """A drafter whose masks are nothing but what they read of the token before: the first guess is its successor."""
    weights = load_floats(target)
    embedding = weights["model.embed_tokens.weight"].copy()
    embedding[5] = 0
    one, nothing = np.eye(64), np.zeros((64, 64))
    own = {"fc.weight": np.zeros((64, 64)), "hidden_norm.weight": np.ones(64), "norm.weight": np.ones(64)}
    own |= {f"layers.0.self_attn.{name}_proj.weight": nothing for name in "qk"}
    own |= {f"layers.0.self_attn.{name}_proj.weight": one for name in "vo"}
    own |= {f"layers.0.self_attn.{name}_norm.weight": np.ones(64) for name in "qk"}
    own |= {f"layers.0.mlp.{name}_proj.weight": np.zeros((64, 64)) for name in ("gate", "up", "down")}
    own |= {f"layers.0.{name}_layernorm.weight": np.ones(64) for name in ("input", "post_attention")}
    own |= {"embed_tokens.weight": embedding, "lm_head.weight": weights["lm_head.weight"]}
    config = {**BIGRAMS, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1}
    config |= {"block_size": block, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [2]}}
    arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in own.items()}
    return converted(save(folder, config, arrays), "Q8_0", target_model=target)


def test_a_dflash_drafter_that_knows_the_next_token_is_right_as_often_as_in_llama_cpp(
    bigrams: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tokens the first, which is guessed, always; of a block of four one in three."""
    monkeypatch.setattr(speculation, "_LONGEST_PAUSE", 0)
    model, target = Model.load(bigrams[0], context=256), bigrams[0].parent / "target"
    plain = list(model.generate_tokens(TOKENS[:20], 60, temperature=0))
    for block, share in ((2, 1.0), (4, 1 / 3)):
        file = dflash_of_bigrams(tmp_path / str(block), target, block)
        assert list(model.generate_tokens(TOKENS[:20], 60, temperature=0, draft=file)) == plain
        made: Any = model.timing.speculation
        assert made.accepted / made.drafted == pytest.approx(share, abs=0.05)  # one may be beyond the end
    peer = reply(bigrams[0], TOKENS[:20], 60, file, "DFLASH")
    assert peer.text == model.tokenizer.decode(plain)
    assert abs(made.accepted - peer.right) <= 3
    assert abs(made.drafted - peer.guessed) <= 6


def made_together(model: Model, draft: Path, prompts: list[list[int]], count: int, sequences: int) -> list[Any]:
    """Generations of prompts, and then of these with their replies and more, in the contexts of the first."""
    with model.batch(sequences, draft=draft) as batch:
        first = [batch.add(prompt, count, temperature=0) for prompt in prompts]
        list(batch)
        longer = [[*prompt, *generation.tokens, 9] for prompt, generation in zip(prompts, first, strict=True)]
        second = [batch.add(prompt, count, temperature=0) for prompt in longer]
        list(batch)
        assert batch.guessed_tokens == sum(g.speculation.drafted for g in first + second)
        assert batch.right_tokens == sum(g.speculation.accepted for g in first + second)
    return first + second


PROMPTS = [TOKENS[:20], [*TOKENS[:10], *TOKENS[30:]], TOKENS[:1], [*TOKENS, *TOKENS, *TOKENS, 7]]


def check_together(pair: Pair | Gemma) -> None:
    """The replies are those without guesses, whether there are columns for guesses of all or contexts for all; a
    single one has the guesses that it has alone."""
    model, prompts = Model.load(pair.model, context=256), [*PROMPTS[:-1], TOKENS[:45]]
    for sequences in (2, 5):
        for generation in made_together(model, pair.file, prompts, 20, sequences):
            assert generation.tokens == list(model.generate_tokens(generation.prompt, 20, temperature=0))
            assert generation.speculation.drafted > 3
    list(model.generate_tokens(TOKENS[:20], 20, temperature=0, draft=pair.file))
    single, alone = made_together(model, pair.file, prompts[:1], 20, 1)[0].speculation, model.timing.speculation
    assert alone is not None
    assert (single.drafted, single.accepted) == (alone.drafted, alone.accepted)


def test_sequences_made_together_have_the_guesses_of_an_eagle_head(eagle: Pair) -> None:
    check_together(eagle)


def test_sequences_made_together_have_the_guesses_of_an_assistant(gemma: Gemma) -> None:
    check_together(gemma)


def test_sequences_made_together_have_the_guesses_of_a_dflash_drafter(dflash: Pair) -> None:
    check_together(dflash)


def test_a_head_that_is_right_makes_several_sequences_in_fewer_steps(bigrams: tuple[Path, Path]) -> None:
    """Each has the states of its own text, also while a reply alone has another drafter's guesses."""
    model = Model.load(bigrams[0], context=256)
    other = dflash_of_bigrams(bigrams[0].parent / "dflash", bigrams[0].parent / "target", 2)
    plain = [list(model.generate_tokens(prompt, 40, temperature=0)) for prompt in PROMPTS]
    alone = model.generate_tokens(PROMPTS[0], 40, temperature=0, draft=other)
    found = []
    with model.batch(2, draft=bigrams[1]) as batch:
        generations = [batch.add(prompt, 40, temperature=0) for prompt in PROMPTS]
        while batch.busy():
            batch.advance()
            found += [token for token in [next(alone, None)] if token is not None]
        assert [generation.tokens for generation in generations] == plain
        assert batch.right_tokens > 0.9 * batch.guessed_tokens > 90
        assert batch.steps < batch.step_tokens / 4
    assert [*found, *alone] == plain[0]
    made: Any = model.timing.speculation
    assert made.accepted > 0.9 * made.drafted


def test_a_context_that_continues_a_text_keeps_what_the_head_read_of_it(bigrams: tuple[Path, Path]) -> None:
    model = Model.load(bigrams[0], context=256)
    first, *_, second = made_together(model, bigrams[1], [TOKENS[:20]], 30, 1)
    assert first.kept == 0
    assert second.kept >= 20 + 28
    assert second.speculation.accepted > 20


def check_take_over(model: Model, draft: str | Path) -> None:
    """Prompts that begin like one that is being answered take over what was read of it; the guesses are as alone."""
    prompts = [TOKENS[:30], [*TOKENS[:20], *TOKENS[40:50]], [*TOKENS[:30], 7, 8]]
    with model.batch(3, draft=draft) as batch:
        generations = [batch.add(prompts[0], 30, temperature=0)]
        while not generations[0].tokens:
            batch.advance()
        batch.advance()
        generations += [batch.add(prompt, 30, temperature=0) for prompt in prompts[1:]]
        list(batch)
    assert generations[0].kept == 0
    assert [generation.kept for generation in generations[1:]] in ([19, 29], [20, 30])  # a pair has the token after it
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.tokens == list(model.generate_tokens(prompt, 30, temperature=0))


def test_prompts_that_begin_alike_take_over_what_an_eagle_head_read(bigrams: tuple[Path, Path]) -> None:
    check_take_over(Model.load(bigrams[0], context=256), bigrams[1])


def test_prompts_that_begin_alike_take_over_what_a_dflash_drafter_read(dflash: Pair) -> None:
    check_take_over(Model.load(dflash.model, context=256), dflash.file)


def test_a_text_that_is_taken_over_has_the_guesses_that_it_has_alone(eagle: Pair) -> None:
    model, prompt = Model.load(eagle.model, context=256), [*TOKENS[:40], 7]
    list(model.generate_tokens(prompt, 30, temperature=0, draft=eagle.file))
    alone: Any = model.timing.speculation
    with model.batch(2, draft=eagle.file) as batch:
        other = batch.add(TOKENS[:40], 10, temperature=0)
        list(batch)
        taken = batch.add(prompt, 30, temperature=0)
        list(batch)
    assert (other.kept, taken.kept) == (0, 39)
    assert (taken.speculation.drafted, taken.speculation.accepted) == (alone.drafted, alone.accepted)


def test_prompts_that_are_only_read_need_no_guesses(bigrams: tuple[Path, Path]) -> None:
    model = Model.load(bigrams[0], context=256)
    seen: list[int] = []
    with model.batch(1, draft=bigrams[1]) as batch:
        batch.add(TOKENS, 0, reader=lambda position, states: seen.append(position + len(states)))
        replies = batch.add(TOKENS, 10, reader=lambda position, states: seen.append(position + len(states)))
        list(batch)
        cancelled = batch.add(TOKENS[:20], 100, temperature=0)
        batch.advance()
        batch.cancel(cancelled)
        again = batch.add(TOKENS[:20], 10, temperature=0)
        list(batch)
    assert seen == [len(TOKENS), len(TOKENS)]
    assert len(replies.tokens) == 10
    assert again.tokens == list(model.generate_tokens(TOKENS[:20], 10, temperature=0))


def test_the_server_takes_a_drafter_and_counts_its_guesses(bigrams: tuple[Path, Path]) -> None:
    httpx = pytest.importorskip("httpx")
    from tests.serve.conftest import Server

    model, prompts = Model.load(bigrams[0], context=128), [TOKENS[:20], TOKENS[20:30], TOKENS[:5]]
    server = Server(bigrams[0], "--draft", str(bigrams[1]), "--context", "128")
    try:
        asked = {"prompt": prompts, "max_tokens": 40, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE).json()
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    finally:
        assert server.stop()[0] == (0 if os.name == "posix" else 1)  # Windows ends a process without asking it
    expected = ["".join(model.generate(prompt, 40, temperature=0)) for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == expected
    counts = dict(re.findall(r"^gguf_bridge_(\w+) (\d+)$", metrics, re.MULTILINE))
    assert int(counts["generated_tokens_total"]) == 120
    assert int(counts["guessed_tokens_total"]) >= int(counts["guessed_tokens_right_total"]) > 50


def test_the_server_refuses_a_model_as_a_drafter(
    bigrams: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    assert main(["serve", str(bigrams[0]), "--port", "0", "--draft", str(bigrams[0])]) == 2
    assert "is a llama model, no drafter; a model guesses in `run`, or once it is loaded in" in capsys.readouterr().err


def test_a_batch_refuses_a_model_and_a_drafter_of_another_one(bigrams: tuple[Path, Path], gemma: Gemma) -> None:
    model = Model.load(bigrams[0], context=64)
    with pytest.raises(BridgeError, match="is a llama model, no drafter"):
        model.batch(2, draft=bigrams[0])
    with pytest.raises(BridgeError, match="is of another model"):
        model.batch(2, draft=gemma.file)
    with pytest.raises(BridgeError, match="draft is of type Model; must be"):
        model.batch(2, draft=model)  # type: ignore[arg-type]

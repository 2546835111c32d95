"""Layers with a state compute what transformers does, however a text is cut, and go back to copies of their state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.architectures import CONVOLUTION
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.cpu.ops.program import Program
from bridge.runtime.decoder import decoder as decoder_module
from bridge.runtime.decoder.recurrent import RecurrentBuffers
from bridge.runtime.layers.recurrent_state import COPIES, RecurrentState
from bridge.runtime.model import Model
from scripts.peers.predictions import mean_kl
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.kimi_k3 import CONFIG, write_kimi_k3
from tests.support.plain_recurrent import DEEPER, SHAPES, plain_layer, random_layer

torch = pytest.importorskip("torch")

FAMILIES = [
    "lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-4", "nemotron-h", "nemotron-h-moe",
    "nemotron-3-super", "falcon-h1", "mamba2", "jamba", "kimi-linear", "ling3",
]  # fmt: skip
FAR = {"ling3": 1e-8}  # by matrices of keys in half floats, of several layers
TOKENS = np.random.default_rng(1).integers(0, 2048, 48).tolist()
GREEDY: dict[str, Any] = {"temperature": 0}

Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A family's small model in float32: the GGUF and transformers' model."""
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            reference = randomized(new_model(name))
            reference.save_pretrained(folder / "model", save_original_format=True)
            bridge.convert(copy_tokenizer(folder / "model"), folder / "m.gguf", tensor_types=[(".*", "F32")])
            found[name] = folder / "m.gguf", reference
        return found[name]

    return make


def loaded(path: Path, **options: Any) -> Model:
    return bridge.Model.load(path, **{"context": 200, "precision": "f32", "kv": "f32"} | options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_transformers_however_its_tokens_are_read(
    name: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, reference), far = made(name), FAR.get(name, 1e-9)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    model = loaded(path)
    assert mean_kl(expected, model.logits(TOKENS)) < far
    monkeypatch.setattr(decoder_module, "BATCH", 5)  # more tokens than the convolution sees, and in the end fewer
    assert mean_kl(expected, model.logits(TOKENS)) < far
    decoder = model._decoder
    decoder.cache.length = 0
    assert mean_kl(expected, np.array([decoder.next_scores(token).copy() for token in TOKENS])) < far


def test_a_falcon_h1_may_have_no_norm_in_its_mamba_layers(tmp_path: Path) -> None:
    reference = randomized(new_model("falcon-h1", mamba_rms_norm=False))
    reference.save_pretrained(tmp_path / "model", save_original_format=True)
    bridge.convert(copy_tokenizer(tmp_path / "model"), tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    assert mean_kl(expected, loaded(tmp_path / "m.gguf").logits(TOKENS)) < 1e-9


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h", "jamba"])
def test_a_prompt_is_read_again_from_the_last_copy_that_fits(
    name: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "BATCH", 16)
    path, _ = made(name)
    model = loaded(path)

    def kept_of(prompt: list[int]) -> int:
        reply = list(model.generate_tokens(prompt, 5, **GREEDY))
        kept = model.timing.kept_tokens
        assert reply == list(loaded(path).generate_tokens(prompt, 5, **GREEDY))
        return kept

    assert kept_of(TOKENS[:40]) == 0
    assert kept_of(TOKENS[:40]) == 39  # a copy before the last token of each batch
    assert kept_of([*TOKENS[:40], 7, 8]) == 39
    assert kept_of([*TOKENS[:36], 7, 8]) == 31
    assert kept_of([*TOKENS[:20], 7, 8]) == 15
    assert kept_of([5, *TOKENS[:20]]) == 0
    reply = list(model.generate_tokens(TOKENS[:20], 5, **GREEDY))
    assert kept_of([*TOKENS[:20], *reply[:4], 7]) == 24  # where nothing has to be forgotten, all is kept


def test_a_state_goes_back_only_to_where_it_was_copied(made: Callable[[str], Made]) -> None:
    decoder = loaded(made("qwen3.5")[0])._decoder
    decoder.run(TOKENS[:20])
    assert [decoder.cache.reach(count) for count in (30, 20, 19, 18)] == [20, 20, 19, 0]
    with pytest.raises(BridgeError, match="after 18 of 20 tokens is not kept; read the tokens again from 0"):
        decoder.cache.length = 18
    decoder.cache.come_back_to(25)
    decoder.run(TOKENS[20:30])
    assert decoder.cache.reach(28) == 25


def test_copies_are_few_and_spread_over_the_prompt() -> None:
    state = RecurrentState(RecurrentConfig(CONVOLUTION, (True,), 3, 16))
    for _ in range(16):
        state.begin(16)
        state.append(16)
    assert len(state.copies) == COPIES
    assert max(np.diff([0, *sorted(state.copies)])) <= 128
    assert 255 in state.copies
    assert state.nbytes == (1 + COPIES) * 2 * 16 * 4


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h-moe", "falcon-h1"])
def test_sequences_made_together_are_those_made_alone(name: str, made: Callable[[str], Made]) -> None:
    model = loaded(made(name)[0])
    shared = "What is that to me? " * 3
    prompts = ["KING", shared + "Then speak", shared + "no more", "a", shared + "Then speak"]
    alone = ["".join(model.generate(prompt, 8, **GREEDY)) for prompt in prompts]
    with model.batch(3) as batch:
        generations = [batch.add(prompt, 8, **GREEDY) for prompt in prompts]
        for _ in batch:
            pass
    assert [generation.text for generation in generations] == alone
    assert generations[-1].kept == len(generations[-1].prompt) - 1


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_the_continuations_of_a_context_are_scored_as_by_themselves(name: str, made: Callable[[str], Made]) -> None:
    path, _ = made(name)
    context, continuations = TOKENS[:20], [TOKENS[20:24], TOKENS[30:31], TOKENS[40:45]]
    together = loaded(path).score_continuations(context, continuations)
    for tokens, found in zip(continuations, together, strict=True):
        (alone,) = loaded(path).score_continuations(context, [tokens])
        assert found[0] == pytest.approx(alone[0], rel=1e-5)


# the arithmetic


class Cache:
    """As much of a cache as the buffers ask for."""

    def __init__(self, c: RecurrentConfig):
        self.state = RecurrentState(c)


@pytest.mark.parametrize("shape", SHAPES | DEEPER)
def test_the_arithmetic_is_that_of_the_formulas_and_the_copy_that_of_its_token(shape: str) -> None:
    c, n = (SHAPES | DEEPER)[shape], 11
    layer, inputs = random_layer(c, n)
    expected = plain_layer(c, layer, inputs, 1e-5)

    def run(cache: Any, first: int, stop: int) -> np.ndarray:
        buffers = RecurrentBuffers(c, [layer], stop - first, [cache], 1e-5)
        program = Program(stop - first)
        products: list[Any] = []
        steps = SimpleNamespace(program=program, products=lambda x, pairs: products.extend((x, *p) for p in pairs))
        buffers.add(steps, layer, 0)
        for own, values in zip(buffers.rows[0].inputs, inputs, strict=True):
            own[:] = values[first:stop]
        for x, matrix, y in products:
            y[:] = x @ matrix.dequantize().T
        buffers.begin([cache], stop - first)
        program.run()
        cache.state.append(stop - first)
        return buffers.out.copy()

    cache: Any = Cache(c)
    np.testing.assert_allclose(run(cache, 0, n), expected, rtol=1e-4, atol=1e-5)
    cache.state.cut(n - 1)  # the copy
    np.testing.assert_allclose(run(cache, n - 1, n), expected[-1:], rtol=1e-4, atol=1e-5)


# guessed tokens

# sizes of which all matrices are multiplied in blocks, by row groups
GUESSING: dict[str, dict[str, Any]] = {
    "lfm2": {"intermediate_size": 96}, "qwen3.5": {"linear_num_value_heads": 16},
    "qwen3-next": {"linear_num_value_heads": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "granite-4": {"mamba_n_heads": 16, "mamba_d_head": 4, "shared_intermediate_size": 64},
    "nemotron-h": {"mamba_num_heads": 16, "mamba_head_dim": 4},
    "nemotron-3-super": {
        "mamba_num_heads": 16, "mamba_head_dim": 4, "moe_intermediate_size": 32, "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "falcon-h1": {"mamba_n_heads": 16, "mamba_d_head": 4}, "mamba2": {"num_heads": 16, "head_dim": 4},
    "jamba": {"mamba_dt_rank": 32, "mamba_d_state": 16},
    "kimi-linear": {"moe_intermediate_size": 32, "linear_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 16},
    "kimi-k3": {
        "linear_attn_config": CONFIG["text_config"]["linear_attn_config"] | {"head_dim": 32}, "q_lora_rank": 32,
        "kv_lora_rank": 32, "v_head_dim": 16,
    },
    "ling3": {
        "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 32, "kv_lora_rank": 32,
    },
}  # fmt: skip
REPEATED: dict[str, Any] = {"temperature": 0, "logit_bias": dict.fromkeys(TOKENS[:4], 30.0)}  # few tokens are drawn


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's small model in blocks of 8 bits."""
    found: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            if name == "kimi-k3":
                write_kimi_k3(folder / "model", **GUESSING[name])
            else:
                model = randomized(new_model(name, **GUESSING[name]))
                model.save_pretrained(folder / "model", save_original_format=True)
            found[name] = folder / "m.gguf"
            copy_tokenizer(folder / "model")
            bridge.convert(folder / "model", found[name], tensor_types=[(".*", "Q8_0")], mmproj_type="none")
        return found[name]

    return make


@pytest.mark.parametrize("name", GUESSING)
def test_a_table_of_calls_gives_what_a_prompt_gives(name: str, guessing: Callable[[str], Path]) -> None:
    decoder, other = (loaded(guessing(name))._decoder for _ in range(2))
    alone = [decoder.step([decoder.cache], [token])[0].copy() for token in TOKENS]
    assert decoder._steps[1].program.single
    assert mean_kl(other.scores(TOKENS, len(TOKENS)), np.array(alone)) < 1e-7


@pytest.mark.parametrize("name", GUESSING)
def test_a_step_of_guesses_can_go_back_to_any_of_them(name: str, guessing: Callable[[str], Path]) -> None:
    """What follows is then computed as without the others, to the last bit; also in a context that takes it over."""
    decoder = loaded(guessing(name), precision="int8")._decoder
    assert decoder.multiplied_one_by_one() is None
    own, other = decoder.cache, decoder.new_cache()
    for cache in (own, other):
        decoder.run(TOKENS[:5], cache=cache)
    alone = [decoder.step([other], [token])[0].copy() for token in TOKENS[5:21]]
    np.testing.assert_array_equal(decoder.follow(TOKENS[5:13]), alone[:8])
    own.length = 7
    assert [own.reach(count) for count in (4, 5, 6, 7)] == [4, 5, 6, 7]
    other.copy_prefix(own, 6)
    own.length = 9  # as the guesses are drawn one by one
    np.testing.assert_array_equal(decoder.follow([*TOKENS[9:13], 7, 8, 9])[:4], alone[4:8])
    own.length = 13
    np.testing.assert_array_equal(decoder.step([own], TOKENS[13:14])[0], alone[8])
    rows = decoder.step([other, other, other, own, own], [*TOKENS[6:9], *TOKENS[14:16]])
    np.testing.assert_array_equal(rows, [*alone[1:4], *alone[9:11]])
    other.length, own.length = 8, 14
    rows = decoder.step([other, own], [TOKENS[8], TOKENS[14]])
    np.testing.assert_array_equal(rows, [alone[3], alone[9]])


@pytest.mark.parametrize("name", GUESSING)
def test_the_reply_of_a_model_with_states_is_the_one_without_guesses(
    name: str, guessing: Callable[[str], Path]
) -> None:
    """Whether n-grams guess or a model that has states too; the next prompt then takes over what was drawn."""
    model, other = (loaded(guessing(name), precision="int8") for _ in range(2))
    text = [*TOKENS[:12], *TOKENS[:12], *TOKENS[:7]]
    for draft, options in (("ngram", REPEATED), (other, GREEDY)):
        plain = list(model.generate_tokens(text, 30, **options))
        assert list(model.generate_tokens(text, 30, draft=draft, **options)) == plain
        speculation = model.timing.speculation
        assert speculation is not None
        assert speculation.drafted
    assert speculation.accepted > 0.8 * speculation.drafted  # the same weights
    again = [*text, *plain[:20], 7]
    expected = list(other.generate_tokens(again, 6, **GREEDY))
    assert list(model.generate_tokens(again, 6, draft="ngram", **GREEDY)) == expected


def test_sequences_of_a_model_with_states_guess_in_free_columns(guessing: Callable[[str], Path]) -> None:
    model = loaded(guessing("qwen3.5"), precision="int8")
    prompts = [[*TOKENS[:9], *TOKENS[:9], *TOKENS[:4]], TOKENS[20:30], [*TOKENS[30:36], *TOKENS[30:36]]]
    plain = [list(model.generate_tokens(prompt, 20, **REPEATED)) for prompt in prompts]
    with model.batch(2, draft="ngram") as batch:
        generations = [batch.add(prompt, 20, **REPEATED) for prompt in prompts]
        for _ in batch:
            pass
    assert [generation.tokens for generation in generations] == plain
    assert any(generation.speculation.drafted for generation in generations)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_attention_beside_a_state_has_keys_of_every_kind(kv: str, guessing: Callable[[str], Path]) -> None:
    decoder = loaded(guessing("falcon-h1"), kv=kv)._decoder
    expected = decoder.scores(TOKENS, len(TOKENS))
    decoder.cache.length = 0
    found = np.array([decoder.next_scores(token).copy() for token in TOKENS])
    assert decoder._steps[1].program.single
    assert mean_kl(expected, found) < 1e-7

"""Guessed tokens on a GPU of NumPy: a step of several has the sums of each alone, and replies are those without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.replies.speculation import Drafter
from tests.runtime.test_prediction import HEADS, without_own_embeddings
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.small_models import BLOCK_FIELDS, converted
from tests.support.predicting_models import save_predicting
from tests.support.tiny_gguf import write_decoder

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("speculation")]  # compiles once
TOKENS = list(range(6))
TEXT = np.random.default_rng(1).integers(3, 300, 6).tolist() * 2
TYPES: dict[str, dict[str, str]] = {
    "one type": {"": "Q4_0"},
    "two types": {"": "Q4_0", "attn_v": "Q8_0", "ffn_up": "Q8_0"},
    "floats": {"": "Q8_0", "attn_q": "F16"},
}


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    if (reason := ptx.unavailable()) is not None:
        pytest.skip(reason)
    with pretended_gpu(multiprocessors=4):
        yield


class Guesses(Drafter):
    """What it is told, of which every third token is wrong."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens

    def propose(self, tokens: Any, most: int) -> list[int]:
        known = self._tokens[len(tokens) : len(tokens) + most]
        return [token + (len(tokens) + i) % 3 // 2 for i, token in enumerate(known)]


def load(path: Path, **options: Any) -> Any:
    return bridge.Model.load(path, **{"context": 64, "device": "cuda", **options})


def check_reply(model: Any, draft: Any, text: list[int] | None = None) -> Any:
    """The speculation of a reply, once that is the one without guesses: after another text, and drawn after a part.

    `text` becomes the prompt and the reply before there are guesses.
    """
    for before, options in ((TEXT[::-1], {"temperature": 0}), (TEXT[:-2], {"seed": 3})):
        replies = []
        for how in (None, draft):
            list(model.generate_tokens(before, 1, draft=how, **options))
            replies.append(list(model.generate_tokens(TEXT, 5, draft=how, **options)))
            if text is not None:
                text[:] = TEXT + replies[0]
        assert replies[0] == replies[1]
    return model.timing.speculation


@pytest.mark.parametrize(("types", "precision"), [
    ("one type", "f32"), ("two types", "int8"), pytest.param("two types", "f32", marks=pytest.mark.exhaustive),
    ("floats", "int8"),
])  # fmt: skip
def test_several_tokens_are_computed_as_each_alone_is(types: str, precision: str, tmp_path: Path) -> None:
    """To the last bit."""
    path, biases = tmp_path / "m.gguf", ("attn_q", "ffn_down")
    decoder = decoder_of(write_decoder(path, hidden=64, inner=96, types=TYPES[types], biases=biases), precision)
    decoder.prepare()
    tokens = np.random.default_rng(0).integers(0, 32, 10).tolist()
    alone = np.array([decoder.next_scores(token) for token in tokens])
    decoder.cache.length = 0
    together = np.concatenate([decoder.follow(tokens[at : at + n]) for at, n in ((0, 3), (3, 4), (7, 2), (9, 1))])
    np.testing.assert_array_equal(together, alone)
    assert decoder.read == tokens
    states, expected = decoder.followed, decoder.states(tokens, 1)
    np.testing.assert_allclose(states, expected, rtol=0, atol=0.05 * np.abs(expected).max())


# lfm2 has short convolutions, gemma4-moe experts with factors, qwen3-next a delta net and experts, falcon-h1 Mamba-2
# beside attention, jamba Mamba
@pytest.mark.parametrize("name", ["lfm2", "gemma4-moe", *(pytest.param(name, marks=pytest.mark.exhaustive)
                                  for name in ("qwen3-next", "falcon-h1", "jamba", "seed-oss"))])  # fmt: skip
def test_a_reply_is_the_one_without_guesses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def garbage(*shape: Any, **how: Any) -> Any:  # what launches that are only noted leave
        return empty(*shape, **how).fill_(1 << 40 if how.get("dtype") == torch.int64 else 1)

    monkeypatch.setattr("torch.empty", garbage)
    with load(converted(name, tmp_path, "Q8_0", **BLOCK_FIELDS.get(name, {}))) as model:
        text: list[int] = []
        monkeypatch.setattr("bridge.runtime.replies.speculation.NgramDrafter", lambda: Guesses(text))
        found = check_reply(model, "ngram", text)
        assert 0 < found.accepted < found.drafted


def test_a_step_ends_where_the_context_does(tmp_path: Path) -> None:
    with load(converted("seed-oss", tmp_path, "Q8_0"), context=16) as model:
        plain = list(model.generate_tokens(TEXT, 9, temperature=0))
        assert list(model.generate_tokens(TEXT, 9, temperature=0, draft="ngram")) == plain
        decoder = model._decoder
        for length, room in ((16, 0), (14, 2), (3, 4)):
            decoder.cache.length = length
            assert decoder.room() == room


def test_another_model_guesses_on_either_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps of states is kept on its device and stream, and its memory may end there."""
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.recurrent.layer import DeviceState

    active, save, depth = Decoder._active, DeviceState.save, [0]

    @contextmanager
    def counted(decoder: Any) -> Iterator[None]:
        with active(decoder):
            depth[0] += 1
            try:
                yield
            finally:
                depth[0] -= 1

    def saved(state: Any) -> Any:
        assert depth[0]
        return save(state)

    monkeypatch.setattr(Decoder, "_active", counted)
    monkeypatch.setattr(DeviceState, "save", saved)
    path = converted("lfm2", tmp_path, "Q8_0", intermediate_size=64, block_auto_adjust_ff_dim=False)
    with load(path) as model, load(path, device="cpu") as other:
        assert check_reply(model, other).drafted > 0
        options = {"temperature": 0, "draft": model}
        assert list(other.generate_tokens(TEXT, 5, **options)) == list(other.generate_tokens(TEXT, 5, temperature=0))


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5"])
def test_the_layer_that_predicts_a_further_token_guesses_there(name: str, tmp_path: Path) -> None:
    """As on the CPU; the embeddings and the head are not uploaded a second time."""
    folder, path = save_predicting(name, tmp_path / "model", **HEADS.get(name, {})), tmp_path / "m.gguf"
    if name == "glm4-moe":
        folder = without_own_embeddings(folder, tmp_path / "shared")
    bridge.convert(folder, path, tensor_types=[(".*", "Q8_0")])
    options: dict[str, Any] = {"precision": "f32", "kv": "f32"}
    with load(path, **options) as model, load(path, device="cpu", **options) as other:
        ours, theirs = (check_reply(each, "mtp") for each in (model, other))
        assert theirs.drafted >= ours.drafted > 0
        head, decoder = model.prediction_head().decoder, model._decoder
        assert head.device == decoder.device
        table = decoder.weights.table(decoder.weights.model.output)
        assert head.weights.table(head.weights.model.output) is table
        assert head.nbytes + table.nbytes < decoder.nbytes
        states, expected = (each._decoder.states(TEXT, len(TEXT)) for each in (model, other))
        np.testing.assert_allclose(states, expected, rtol=1e-3, atol=1e-3)
        heads = [each.prediction_head() for each in (model, other)]
        for each in heads:
            each.cache.length = each.start((), 0)
        np.testing.assert_array_equal(*(each.guesses(states[:-1], TEXT[1:]) for each in heads))


def test_the_check_on_a_machine_with_a_gpu_tries_given_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda.decoder import Decoder

    from tests.support.gpu.carried import model as checks

    converted("lfm2", tmp_path, "Q8_0")
    monkeypatch.delenv("BRIDGE_MODELS", raising=False)
    assert checks.others() == {}
    monkeypatch.setenv("BRIDGE_MODELS", str(tmp_path))
    assert checks.others() == {"m": tmp_path / "m.gguf"}
    assert checks.check("m")["wrong"] == []
    follow = Decoder.follow
    monkeypatch.setattr(
        Decoder, "follow", lambda self, tokens: follow(self, tokens) * np.float32(1 + 1e-4 * (len(tokens) > 1))
    )
    monkeypatch.setattr(checks, "LIMITS", {"f32": 1e-9})
    wrong = [line.split(":")[0] for line in checks.check("m")["wrong"]]
    assert wrong == ["m, prompt", "m, tokens after it", "m"]


def decoder_of(path: Path, precision: str = "int8") -> Any:
    from bridge.cuda.decoder import Decoder

    file = bridge.open_gguf(path)
    return Decoder(file, read_config(file.metadata, file.path), 64, "f16", precision, "cuda")


def test_the_last_state_of_a_prompt_is_the_same_whether_others_are_wanted(tmp_path: Path, monkeypatch: Any) -> None:
    from bridge.cuda.machine import CudaMachine

    by_torch = CudaMachine._normalized_by_torch

    def other_sums(machine: Any, x: Any, *given: Any) -> Any:  # with the number of rows, as torch's
        return by_torch(machine, x, *given) * (1 + 1e-3 * len(x))

    decoder = decoder_of(write_decoder(tmp_path / "m.gguf"))
    decoder.prepare()
    monkeypatch.setattr(CudaMachine, "_normalized_by_torch", other_sums)
    for count in (1, 6):
        alone = decoder.states(TOKENS[:count], 1)
        np.testing.assert_array_equal(decoder.states(TOKENS[:count], count)[-1:], alone)


def test_embeddings_that_are_only_looked_up_need_no_kernel(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "m.gguf", types={"token_embd": "F16"}, vocab=1024)
    assert decoder_of(path).multiplied_one_by_one() is None
    path = write_decoder(tmp_path / "tied.gguf", types={"token_embd": "F16"}, vocab=1024, tied=True)
    assert decoder_of(path).multiplied_one_by_one().name == "token_embd.weight"


def test_what_torch_multiplies_token_by_token_is_refused(tmp_path: Path) -> None:
    with load(converted("seed-oss", tmp_path, "F16")) as model:
        with pytest.raises(BridgeError, match=r"weight: F16 .* has no kernel for several tokens .* leave it out"):
            model.generate("a", draft="ngram")
        with pytest.raises(BridgeError, match="several sequences at once only run on the CPU"):
            model.batch(2, draft="ngram")

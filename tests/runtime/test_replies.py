"""What a reply is made of: tokens that need not be read again, stop texts, penalties, biases, probabilities, a chat."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.chat.formats import HARMONY
from bridge.runtime.chat.parser import HarmonyParser, Parts
from bridge.runtime.chat.templates import ChatTemplate
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.model import Model
from bridge.runtime.replies.generation import until
from bridge.runtime.sampling import Sampler, Sampling
from tests.conftest import CHECKPOINT
from tests.runtime.test_model import changed

PROMPT = "The history of the city"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replies")
    bridge.convert(CHECKPOINT, folder / "plain.gguf")
    return changed(folder / "plain.gguf", folder / "model.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path, context=2048)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that go through the layers."""
    seen: list[int] = []
    through = Decoder._through

    def counted(self: Decoder, work: Any, tokens: Any) -> Any:
        seen.extend(tokens)
        return through(self, work, tokens)

    monkeypatch.setattr(Decoder, "_through", counted)
    return seen


# --- tokens that are there already ---


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "min_p": 0.0, "top_p": 1.0, "top_k": 0}])
def test_the_second_turn_of_a_long_conversation_reads_only_what_is_new(options, model: Model, evaluated) -> None:
    """Even where the reply's own tokens are others than its text is cut into, as a hot sampler's are."""
    messages = [{"role": "user", "content": "A plague on both your houses! " * 130}]
    first = model.chat_tokens(messages)
    assert len(first) > 1300
    hot = options["temperature"] > 0
    for seed in range(30):  # which seeds give other tokens differs between processors
        reply = "".join(model.chat(messages, 60, seed=seed, **options))
        made = model.timing.tokens + 1
        cut = model.chat_tokens([*messages, {"role": "assistant", "content": reply}])
        if (cut[: len(first) + made - 1] != model._decoder.read) == hot:
            break
    del evaluated[:]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    ending = model.tokenizer.encode("<|endoftext|>user: And then?<|endoftext|>assistant: ")
    list(model.chat(messages, 1, temperature=0))
    assert evaluated[-len(ending) :] == ending
    assert len(evaluated) == 1 + len(ending)  # the reply's last token had not been read
    assert model.timing.prompt_tokens == len(first) + made + len(ending)
    assert model.timing.kept_tokens == len(first) + made - 1
    same = model.chat_tokens(messages)[: len(first) + made] == model._decoder.read[: len(first) + made]
    assert same != hot


def test_kept_keys_and_values_predict_what_new_ones_do(path: Path, evaluated) -> None:
    model = bridge.Model.load(path, precision="f32", kv="f32", context=128)
    start, rest = model.tokenizer.encode(PROMPT * 5), model.tokenizer.encode("KING")
    list(model.generate_tokens([*start, 7, 8, 9], 4, temperature=0))
    del evaluated[:]
    (kept,) = model.generate_scored(start + rest, 1, logprobs=5, temperature=0)
    assert evaluated == rest
    model.logits([1])  # an empty context, and the cache is another's
    (fresh,) = model.generate_scored(start + rest, 1, logprobs=5, temperature=0)
    assert len(evaluated) == len(rest) + 1 + len(start + rest)
    assert kept.token == fresh.token
    np.testing.assert_allclose([p for _, p in kept.top], [p for _, p in fresh.top], atol=1e-4)


def test_a_prompt_that_was_read_is_asked_again_for_its_last_token_alone(model: Model, evaluated) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    first = list(model.generate_tokens(tokens, 3, temperature=0))
    del evaluated[:]
    assert list(model.generate_tokens(tokens, 3, temperature=0)) == first
    assert evaluated == [tokens[-1], *first[:2]]
    del evaluated[:]
    assert model.logits(tokens).shape[0] == len(tokens)  # all positions are asked for
    assert evaluated == tokens


def test_a_text_is_spelled_as_it_was_before(model: Model) -> None:
    tokenizer = model.tokenizer
    tokens = tokenizer.encode("the king and the queen")
    letters = [tokenizer.encode(letter)[0] for letter in "the king"]
    assert len(letters) > len(tokenizer.encode("the king"))
    found = tokenizer.spelled_as(tokens, letters)
    assert found[: len(letters)] == letters
    assert tokenizer.decode(found) == "the king and the queen"
    assert found[len(letters) :] == tokens[-len(found) + len(letters) :]
    for other in ([], tokens, tokens[:2], tokenizer.encode("xyz"), [5000]):
        assert tokenizer.spelled_as(tokens, other) == tokens
    cut = tokenizer.encode("the kin")  # ends within a token
    assert tokenizer.decode(tokenizer.spelled_as(tokens, cut)) == "the king and the queen"


# --- stop texts ---


def test_what_may_begin_a_stop_text_is_held_back_until_it_is_none() -> None:
    given: list[str] = []

    def pieces() -> Any:
        for piece in ("one ", "<e", "n", "x> two <", "end", "> three"):
            given.append(piece)
            yield piece

    seen = [(piece, len(given)) for piece in until(pieces(), ["<end>", "<stop>"])]
    assert seen == [("one ", 1), ("<enx> two ", 4)]
    assert "".join(until(iter(["a <e", "nd"]), ["<end>"])) == "a <end"


def test_stop_texts_on_the_command_line_end_the_reply_across_tokens(path: Path, model: Model, capsys) -> None:
    whole = "".join(model.generate(PROMPT, 40, temperature=0))
    stop = whole[9:17]
    assert len(model.tokenizer.encode(stop)) > 1
    options = ["run", str(path), "-p", PROMPT, "-n", "40", "--temp", "0"]
    assert main([*options, "--stop", "not in it", "--stop", stop]) == 0
    assert capsys.readouterr().out == PROMPT + whole[: whole.index(stop)] + "\n"
    with pytest.raises(BridgeError, match="stop 7: must be a text or a list of texts"):
        model.generate(PROMPT, stop=[7], temperature=0)  # type: ignore[list-item]


# --- penalties, biases, probabilities ---


def penalized(logits: np.ndarray, seen: list[int], last: int, penalty: float, bias: dict[int, float]) -> np.ndarray:
    """llama.cpp's order, plainly."""
    out = logits.astype(np.float64).copy()
    for token, added in bias.items():
        out[token] += added
    for token in set(seen if last < 0 else seen[len(seen) - min(last, len(seen)) :]):
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


@pytest.mark.parametrize("last", [3, 64, -1, 0])
@pytest.mark.parametrize("bias", [{}, {4: 2.5, 9: -np.inf}])
def test_seen_tokens_are_penalized_after_biases(last: int, bias: dict[int, float]) -> None:
    rng = np.random.default_rng(last + 2)
    sampler = Sampler(Sampling(repeat_penalty=1.7, repeat_last_n=last, logit_bias=bias, temperature=0))
    seen = [1, 5, 4, 2, 5]
    sampler.see(seen)
    for _ in range(40):
        logits = rng.normal(0.2, 1, 12).astype(np.float32)
        before = logits.copy()
        token = sampler(logits)
        assert token == int(penalized(logits, seen, last, 1.7, bias).argmax())
        np.testing.assert_array_equal(logits, before)
        seen.append(token)
    assert len(set(seen[5:])) > 3


def test_a_penalty_keeps_a_reply_from_going_round(model: Model) -> None:
    def tokens(**options: Any) -> list[int]:
        return list(model.generate_tokens(PROMPT, 60, temperature=0, **options))

    strict = tokens(repeat_penalty=100.0, repeat_last_n=-1)
    assert len(set(strict)) == len(strict)
    assert not set(strict) & set(model.tokenizer.encode(PROMPT))
    plain = tokens()
    assert len(set(plain)) < len(plain)
    assert tokens(repeat_penalty=100.0, repeat_last_n=0) == tokens(repeat_penalty=1.0) == plain


def test_a_bias_forbids_a_token_or_forces_one(model: Model) -> None:
    first = next(model.generate_tokens(PROMPT, 1, temperature=0))
    assert next(model.generate_tokens(PROMPT, 1, logit_bias={first: -np.inf}, temperature=0)) != first
    assert list(model.generate_tokens(PROMPT, 3, logit_bias={77: 1000.0}, temperature=0)) == [77, 77, 77]
    everything = dict.fromkeys(range(2048), -np.inf)
    with pytest.raises(BridgeError, match="logit_bias forbids every possible next token"):
        next(model.generate(PROMPT, 1, logit_bias=everything, temperature=0))


def test_probabilities_are_the_models_own_and_come_with_the_most_likely_tokens(model: Model) -> None:
    found = list(model.generate_scored(PROMPT, 6, logprobs=3, temperature=1.0, seed=1, repeat_penalty=1.3, top_k=5))
    tokens = model.tokenizer.encode(PROMPT)
    rows = model.logits(tokens + [t.token for t in found])[len(tokens) - 1 : -1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    np.testing.assert_allclose([t.logprob for t in found], rows[range(6), [t.token for t in found]], atol=0.02)
    for token, row in zip(found, rows, strict=True):
        np.testing.assert_allclose([p for _, p in token.top], np.sort(row)[-3:][::-1], atol=0.02)
        assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)
    assert "".join(t.text for t in found) == model.tokenizer.decode([t.token for t in found])
    assert next(model.generate_scored(PROMPT, 1, temperature=0)).top == ()


def test_tokens_of_a_stop_text_are_not_scored(model: Model) -> None:
    every = list(model.generate_scored(PROMPT, 20, temperature=0))
    whole = "".join(t.text for t in every)
    stop = whole[len(every[0].text + every[1].text) :][:5]
    assert list(model.generate_scored(PROMPT, 20, stop=stop, temperature=0)) == every[:2]
    assert list(model.generate_scored(PROMPT, 20, stop="not in it", temperature=0)) == every


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat_penalty": 0.0}, "repeat_penalty 0.0: must be above 0"),
        ({"repeat_penalty": float("nan")}, "repeat_penalty nan"),
        ({"repeat_last_n": -2}, "repeat_last_n -2: must be at least 0, or -1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty nan: must be between -100 and 100"),
        ({"presence_penalty": 101}, "presence_penalty 101: must be between -100 and 100"),
        ({"presence_penalty": "1"}, "presence_penalty='1': must be a number"),
        ({"logit_bias": {2048: 1.0}}, "logit_bias of token 2048: the vocabulary has 2048"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of token -1: the key must be a token id"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias of token 'the'"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias inf of token 1: must be a number or -inf"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias nan of token 1"),
        ({"logprobs": -1}, "logprobs=-1: must be at least 0"),
    ],
)
def test_samplings_that_make_no_sense_are_refused_at_once(options: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(BridgeError, match=message) as error:
        model.generate_scored(PROMPT, **options)
    assert "\n" not in str(error.value)


def test_the_options_are_on_the_command_line(path: Path, model: Model, capsys) -> None:
    base = ["run", str(path), "-p", PROMPT, "-n", "8", "--temp", "0"]
    first, *_ = model.generate_tokens(PROMPT, 1, temperature=0)
    options = ["--repeat-penalty", "1.9", "--repeat-last-n", "-1", "--logit-bias", f"{first}-inf", "--logit-bias=9-0.5"]
    options += ["--frequency-penalty", "0.5", "--presence-penalty", "1.5"]
    assert main([*base, *options]) == 0
    how: dict[str, Any] = {"repeat_penalty": 1.9, "repeat_last_n": -1, "logit_bias": {first: -np.inf, 9: -0.5}}
    how |= {"frequency_penalty": 0.5, "presence_penalty": 1.5}
    assert capsys.readouterr().out == PROMPT + "".join(model.generate(PROMPT, 8, temperature=0, **how)) + "\n"
    assert main([*base, "--logprobs", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [len(line) for line in lines] == [3] * 8
    assert all(line[0] == line[1] for line in lines)  # greedy
    (token, *_) = model.generate_scored(PROMPT, 1, temperature=0)
    assert lines[0][0] == f'{token.logprob:.4f} "{token.text}"'
    for wrong in ("15043", "1.5", "+1", "the+1", "12+x", ""):
        assert main([*base, "--logit-bias", wrong]) == 2
        assert "must be a token id and a number, as 15043+1 or 15043-inf" in capsys.readouterr().err


def test_the_likelihood_of_a_continuation_is_that_of_its_tokens(model: Model) -> None:
    context, continuation = "KING RICHARD:", " the king"
    tokens = model.tokenizer.encode(context)
    whole = model.tokenizer.encode(context + continuation)
    logits = model.logits(whole).astype(np.float64)
    expected = sum(
        logits[i - 1, whole[i]] - np.log(np.exp(logits[i - 1]).sum()) for i in range(len(tokens), len(whole))
    )
    found, greedy = model.loglikelihood(context, continuation)
    assert found == pytest.approx(expected, abs=1e-3)
    assert not greedy
    (first,) = model.generate_tokens(context, 1, temperature=0)
    likely = model.tokenizer.decode([first])
    assert model.tokenizer.encode(context + likely) == [*tokens, first]
    assert model.loglikelihood(context, likely)[1]
    with pytest.raises(BridgeError, match="tokens of their own"):
        model.loglikelihood(context, "")


def test_the_probabilities_of_a_text_are_those_of_its_tokens(model: Model) -> None:
    """Also of many tokens, whose logits are computed in parts."""
    tokens = model.tokenizer.encode("The history of the city is long. " * 12)
    found = model.logprobs(tokens, top=3)
    assert [token.token for token in found] == tokens[1:]
    logits = model.logits(tokens).astype(np.float64)[:-1]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logits[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose([token.logprob for token in found], expected, atol=1e-3)
    assert [token.top[0][0] for token in found] == logits.argmax(-1).tolist()
    assert all(len(token.top) == 3 for token in found)
    assert [token.text for token in model.logprobs("KING RICHARD:")] == [" RICHARD", ":"]
    with pytest.raises(BridgeError, match="top=-1"):
        model.logprobs("KING", -1)


def test_a_texts_vector_is_the_mean_or_the_last_of_its_states(model: Model) -> None:
    texts = ["KING RICHARD:", "The history of the city"]
    states = [model._decoder.states(ids := model.tokenizer.encode(text), len(ids)) for text in texts]
    mean, last = model.embed(texts, normalize=False), model.embed(texts, "last", normalize=False)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [rows.mean(0) for rows in states], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, [rows[-1] for rows in states], rtol=1e-4, atol=1e-5)
    unit = model.embed(texts[0])
    np.testing.assert_allclose(unit[0], mean[0] / np.linalg.norm(mean[0]), rtol=1e-4, atol=1e-5)
    assert model.embed([]).shape == (0, model.config.hidden)
    with pytest.raises(BridgeError, match="pooling='max': choose mean, cls or last"):
        model.embed(texts, "max")


def test_a_model_is_not_pickled(model: Model) -> None:
    for copying in (pickle.dumps, copy.deepcopy):
        with pytest.raises(BridgeError, match=r"cannot be pickled or copied.*load it in each process"):
            copying(model)


# --- replies with channels ---

CHANNELS = {
    "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2": ("Two.", "2"),
    "<|channel|>commentary<|message|>Let me see. <|end|><|start|>assistant<|channel|>analysis<|message|>Well":
        ("Well", "Let me see. "),
    "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}":
        ("A", " to=functions.f<|channel|>commentary json<|message|>{}"),
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}":
        ("", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"),
    "<|channel|>commentary to=assistant<|channel|>analysis<|message|>B<|end|>": ("B", ""),
    "<|channel|>final <|constrain|>json<|message|>{}": ("", "{}"),
    '{"a": "<|message|>"}': ("", '{"a": "<|message|>"}'),
    " two <|start": ("", " two <|start"),
    "<|channel|>analysis<|message|>C <|en": ("C <|en", ""),
    "<|channel|>analysis<|message|>D<|end|><|start|>assistant<|channel|>fin": ("D", ""),
    "": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("reply", CHANNELS)
def test_a_reply_with_channels_is_reasoning_and_what_is_said(reply: str) -> None:
    assert HarmonyParser(tools=False).add(reply, last=True) == Parts(*CHANNELS[reply])
    for size in (1, 2, 7):
        parser = HarmonyParser(tools=False)
        parts = [parser.add(reply[at : at + size]) for at in range(0, len(reply), size)]
        assert sum([*parts, parser.add("", last=True)], Parts()) == Parts(*CHANNELS[reply])


def test_a_template_with_channels_gets_reasoning_by_its_own_name(model: Model) -> None:
    text = (
        "{% for m in messages %}{% if '<|channel|>' in (m.content or '') and m.role == 'assistant' %}"
        "{{ raise_exception('marks') }}{% endif %}{{ m.role }} {{ m.thinking }} {{ m.content }}"
        "{{ '' if m.tool_calls }}\n{% endfor %}"
    )
    template = ChatTemplate({"tokenizer.chat_template": text}, Path("m.gguf"))
    assert template.call_format is HARMONY
    messages = [
        {"role": "user", "content": "<|channel|>"},
        {"role": "assistant", "content": next(iter(CHANNELS))},
        {"role": "assistant", "content": "3", "reasoning_content": "Three."},
        {"role": "assistant", "content": "", "reasoning_content": "Four.", "tool_calls": [{}]},
        {"role": "assistant", "content": "5"},
    ]
    tokens = template.tokens(model.tokenizer, messages, None)
    wanted = "user  <|channel|>\nassistant Two. 2\nassistant Three. 3\nassistant Four. \nassistant  5\n"
    assert model.tokenizer.decode(tokens) == wanted
    assert ChatTemplate({"tokenizer.chat_template": "{{ messages }}"}, Path("m.gguf")).call_format is not HARMONY


# --- the chat command ---


def talk(path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
    return main(["chat", str(path), "--temp", "0", "-n", "6", *options])


def test_a_chat_answers_line_by_line_and_knows_what_was_said(path: Path, model: Model, monkeypatch, capsys) -> None:
    lines = b"Who is there?\n\nAnd \\\nyou?\n/clear\nWho is there?\n/exit\nnot read\n"
    assert talk(path, lines, monkeypatch, "--system", "be brief") == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Who is there?"}]
    first = "".join(model.chat(messages, 6, temperature=0))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And \nyou?"}]
    second = "".join(model.chat(messages, 6, temperature=0))
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


def test_a_chat_reads_only_what_is_new(path: Path, monkeypatch, evaluated, capsys) -> None:
    assert talk(path, b"Who is there?\nAnd you?\n", monkeypatch) == 0
    model = bridge.Model.load(path)
    new = len(model.tokenizer.encode("<|endoftext|>user: And you?<|endoftext|>assistant: "))
    first = len(model.chat_tokens([{"role": "user", "content": "Who is there?"}]))
    assert len(evaluated) == (first + 5) + (1 + new + 5)


def test_a_chat_that_cannot_be_says_why_in_one_line(path: Path, monkeypatch, capsys, tmp_path: Path) -> None:
    assert talk(path, b"Who is there? " * 20, monkeypatch, "--context", "32") == 2
    assert "error: the prompt has" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert talk(path, "Où?".encode("latin-1"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: standard input is not UTF-8 (byte 1); convert it first\n"
    bare = changed(path, tmp_path / "bare.gguf", drop=("tokenizer.chat_template",))
    assert talk(bare, b"Who?\n", monkeypatch) == 2
    assert "the file has no chat template" in capsys.readouterr().err


def test_an_interrupted_reply_is_remembered_as_far_as_it_was_read(model: Model) -> None:
    from bridge.cli.use.chat import Conversation

    talk = Conversation(model)
    reply = talk.reply("Who is there?", max_tokens=10, temperature=0)
    said = next(reply) + next(reply)
    reply.close()
    assert talk.messages[-1] == {"role": "assistant", "content": said}
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    with pytest.raises(BridgeError, match="shorten it"):
        next(talk.reply("Who is there? " * 2000, temperature=0))
    assert len(talk.messages) == 2

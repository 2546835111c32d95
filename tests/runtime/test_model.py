"""A model run from its GGUF alone: the text, the errors, the command line. Needs nothing but the repository."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.blocks import BLOCKS
from bridge.cli.use import chat, run
from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.runtime.replies.perplexity import perplexity
from bridge.runtime.sampling import Sampler, Sampling
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.conftest import CHECKPOINT, ROOT, repacked

PROMPT = "The history of the city"
TEXT = "The tower is 324 metres tall, about the same height as an 81-storey building. It was finished in 1889. " * 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return bridge.Model.load(path)


def changed(path: Path, out: Path, drop: tuple[str, ...] = (), **values: Any) -> Path:
    """The GGUF with tensors or keys left out, and strings of its metadata replaced."""
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(str(out), values.pop("architecture", "qwen3"))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in drop:
            continue
        kind = field.types[0]
        writer.add_key_value(key, values.get(key.replace(".", "_"), field.contents()), kind, field.types[-1])
    for key, value in values.items():
        if key == "chat_template":
            writer.add_chat_template(value)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# --- generation ---


def test_greedy_text_is_llama_cpps(model: Model, path: Path) -> None:
    """Token by token its first choice, or as good: 8-bit activations decide near-ties anew."""
    start = model.tokenizer.encode(PROMPT)
    made = list(model.generate_tokens(start, 40, temperature=0))
    with LlamaCpp(path) as other:
        assert other.tokenize(PROMPT, add_special=True) == start
        scores = other.logits(start + made)[len(start) - 1 : -1]
    behind = scores.max(-1) - scores[np.arange(len(made)), made]
    assert len(made) == 40
    assert behind.max() < 0.5
    assert (behind > 0).mean() <= 0.1
    assert model.tokenizer.decode(made) == "".join(model.generate(PROMPT, 40, temperature=0))


@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("kv", ["f16", "q8_0", "f32"])
def test_tokens_one_by_one_predict_what_a_batch_does(precision: str, kv: str, path: Path) -> None:
    model = bridge.Model.load(path, kv=kv, precision=precision, context=64)
    tokens = model.tokenizer.encode(TEXT)[:40]
    batch = model.logits(tokens)
    decoder = model._decoder
    decoder.cache.length = 0
    single = np.stack([decoder.next_scores(token).copy() for token in tokens])
    assert mean_kl(batch, single) < (1e-7 if precision == "f32" else 1e-3)


@repacked
@pytest.mark.parametrize("embedding", ["Q4_K", "Q8_0", "F16", "BF16"])
def test_a_table_of_calls_computes_what_matrix_by_matrix_does(
    embedding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding is the output matrix too; in blocks it is looked up and multiplied by the table itself."""
    path = tmp_path / "model.gguf"
    bridge.convert(CHECKPOINT, path, tensor_types=[("token_embd", embedding)])
    prepared, plain = (bridge.Model.load(path, precision="f32", context=32) for _ in range(2))
    tokens = prepared.tokenizer.encode(PROMPT)
    prepared.prepare()
    rows = [np.stack([prepared._decoder.next_scores(t).copy() for t in tokens])]
    monkeypatch.setattr("bridge.runtime.decoder.steps.Steps.multiplies", lambda *_: False)
    rows += [np.stack([plain._decoder.next_scores(t).copy() for t in tokens])]
    assert (prepared._decoder._steps[1].scores.size > 0) == (embedding in BLOCKS)
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-3, atol=1e-3)


def test_a_program_that_was_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a child sees it that was forked meanwhile, or the next token after an interrupt."""
    from bridge.runtime.decoder.cpu_machine import CpuMachine

    bridge.convert(CHECKPOINT, tmp_path / "model.gguf")
    whole, model = (bridge.Model.load(tmp_path / "model.gguf", context=32)._decoder for _ in range(2))
    attend, calls = CpuMachine.attend, []

    def stopped(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attend(*given)

    monkeypatch.setattr(CpuMachine, "attend", stopped)
    with pytest.raises(KeyboardInterrupt):
        model.next_scores(5)
    np.testing.assert_array_equal(model.next_scores(5), whole.next_scores(5))


@repacked
@pytest.mark.parametrize("share", [0.0, 1e9])
def test_weights_are_repacked_between_tokens_for_a_share_of_their_time(share: float, path: Path, monkeypatch) -> None:
    monkeypatch.setattr("bridge.runtime.decoder.decoder._SHARE", share)
    monkeypatch.setattr("bridge.runtime.decoder.decoder._FIRST", 0)
    model = bridge.Model.load(path, context=64)
    matrices = model._decoder._matrices
    model.logits(model.tokenizer.encode(TEXT)[:20])
    assert not any(matrix.prepared for matrix in matrices)
    made, counts = [], []
    for token in model.generate_tokens(PROMPT, 12, temperature=0):
        made.append(token)
        counts.append(sum(m.prepared for m in matrices))
    assert counts == sorted(counts)
    assert counts[-1] == (len(matrices) if share else 0)
    assert model._decoder._steps[1].program.single
    if share:
        assert 0 < counts[0] < len(matrices)
        assert made == list(bridge.Model.load(path, context=64).prepare().generate_tokens(PROMPT, 12, temperature=0))
        assert model._decoder.preparing > 0


def test_a_short_reply_repacks_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.runtime.decoder.decoder._SHARE", 1e9)
    model = bridge.Model.load(path, context=128)
    counts = []
    for _ in model.generate_tokens(PROMPT, 70, temperature=0):
        counts.append(sum(matrix.prepared for matrix in model._decoder._matrices))
    assert not any(counts[:60])
    assert counts[-1]


def test_q8_0_keys_and_values_cost_little(path: Path) -> None:
    tokens = bridge.Model.load(path).tokenizer.encode(TEXT)[:200]
    exact, halves, bytes_ = (
        bridge.Model.load(path, kv=kv, precision="f32").logits(tokens) for kv in ("f32", "f16", "q8_0")
    )
    assert mean_kl(exact, halves) < 1e-6
    assert mean_kl(exact, bytes_) < 1e-3


def test_a_prompt_longer_than_a_batch_is_read_as_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = bridge.Model.load(path).tokenizer.encode(TEXT)[:100]
    whole = bridge.Model.load(path, precision="f32").logits(tokens)
    monkeypatch.setattr("bridge.runtime.decoder.decoder.BATCH", 37)
    model = bridge.Model.load(path, precision="f32")
    np.testing.assert_allclose(model.logits(tokens), whole, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(model.logits(tokens, last=40), whole[-40:], rtol=1e-3, atol=1e-3)


def test_one_seed_gives_one_text(model: Model) -> None:
    def text(seed: int | None, **options: Any) -> str:
        return "".join(model.generate(PROMPT, 24, temperature=1.0, seed=seed, **options))

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(4)}) > 1
    assert text(None, top_k=1) == "".join(model.generate(PROMPT, 24, temperature=0))


def test_sampling_draws_from_what_is_left_in() -> None:
    logits = np.log(np.array([0.05, 0.5, 0.3, 0.1, 0.05], np.float32))

    def drawn(**how: Any) -> set[int]:
        how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} | how
        sampler = Sampler(Sampling(**how))
        return {sampler(logits) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_p=0.75) == {1, 2}
    assert drawn(min_p=0.3) == {1, 2}
    assert drawn(temperature=0) == {1}
    assert drawn(temperature=0.01) == {1}
    sampler = Sampler(Sampling(1.0, 0, 1.0, 0.0, 0))
    counts = np.bincount([sampler(logits) for _ in range(4000)], minlength=5) / 4000
    np.testing.assert_allclose(counts, [0.05, 0.5, 0.3, 0.1, 0.05], atol=0.03)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"temperature": 1.0, "top_p": 1.0, "min_p": 0.1}])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_say_that_the_file_is_damaged(options: dict[str, float], wrong: float) -> None:
    sampler = Sampler(Sampling(**options))  # type: ignore[arg-type]
    with pytest.raises(BridgeError, match=r"the model computes -?(nan|inf) for the next token"):
        sampler(np.full(100, wrong, np.float32))
    if wrong == -np.inf:  # of one token: it is never drawn
        assert sampler(np.array([-np.inf, 0, -np.inf], np.float32)) == 1


def test_pieces_are_whole_characters(model: Model) -> None:
    text = "naïve 日本語 🙂!"
    tokens = model.tokenizer.encode(text)
    assert len(tokens) > len(text)  # some characters are several tokens
    pieces = list(model.tokenizer.stream(tokens))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert "".join(model.tokenizer.stream(tokens[:-3])).endswith("\ufffd")  # cut within the last emoji


def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(model: Model) -> None:
    whole = "".join(model.generate(PROMPT, 40, temperature=0))
    stop = whole[20:26]
    assert "".join(model.generate(PROMPT, 40, stop=stop, temperature=0)) == whole[: whole.index(stop)]
    assert (
        "".join(model.generate(PROMPT, 40, stop=["not in it", whole[30:]], temperature=0))
        == whole[: whole.index(whole[30:])]
    )


def test_an_end_token_ends_the_reply(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list(model.generate_tokens(PROMPT, 10, temperature=0))
    monkeypatch.setattr(model.tokenizer, "stops", frozenset({made[4]}))
    assert list(model.generate_tokens(PROMPT, 10, temperature=0)) == made[: made.index(made[4])]


def test_a_reply_ends_where_the_context_does(path: Path) -> None:
    model = bridge.Model.load(path, context=16)
    start = model.tokenizer.encode(PROMPT)
    made = list(model.generate_tokens(start, 100, temperature=0))
    assert len(start) + len(made) == 17  # the last one need not be read
    assert model.timing.prompt_tokens == len(start)
    assert model.timing.tokens == len(made) - 1


def test_a_conversation_goes_through_the_files_template(model: Model, path: Path, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="no chat template"):
        model.chat([{"role": "user", "content": "hello"}], temperature=0)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    loaded = bridge.Model.load(changed(path, tmp_path / "chat.gguf", chat_template=template))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    tokens = loaded.chat_tokens(messages)
    expected = "<system>be brief<|endoftext|><user>hello<|endoftext|><assistant>"
    assert loaded.tokenizer.decode(tokens, special=True) == expected
    assert tokens.count(0) == 2
    assert "".join(loaded.chat(messages, 8, temperature=0)) == "".join(loaded.generate(tokens, 8, temperature=0))
    broken = bridge.Model.load(changed(path, tmp_path / "broken.gguf", chat_template="{{ raise_exception('no') }}"))
    with pytest.raises(BridgeError, match="chat template cannot be used: it fails with: no"):
        broken.chat(messages)


def test_tools_and_other_options_reach_the_files_template_for_them(path: Path, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain {{ mood }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    loaded = bridge.Model.load(changed(path, tmp_path / "tools.gguf", chat_template=templates))
    messages = [{"role": "user", "content": "hello"}]

    def text(**options: Any) -> str:
        return loaded.tokenizer.decode(loaded.chat_tokens(messages, options), special=True)

    assert text(mood="good") == "plain good"
    assert text(tools=[{"name": "f"}]) == "[{'name': 'f'}]"
    made = "".join(loaded.chat(messages, 8, {"mood": "good"}, temperature=0))
    assert made == "".join(loaded.generate("plain good", 8, temperature=0))


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}, ["hello"], None, 5])
def test_messages_that_are_no_list_of_messages_are_refused(messages: Any, model: Model) -> None:
    with pytest.raises(BridgeError, match=r'the messages of a chat must be a list: \[\{"role": "user"'):
        model.chat(messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "message 0 has no content; it must be"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], "message 1 has no content"),
        ([{"role": "user", "tool_calls": [{"name": "f"}]}], "message 0 has no content"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"content": "hi"}], "message 1 has no role"),
    ],
)
def test_a_message_without_a_role_or_content_is_refused(messages: Any, message: str, model: Model) -> None:
    """But for a reply that calls tools, which may have no content."""
    with pytest.raises(BridgeError, match=f"^{message}"):
        model.chat(messages)


# --- perplexity ---


def test_perplexity_counts_the_second_half_of_every_window(model: Model) -> None:
    found = perplexity(model, TEXT, window=64, n_windows=3)
    tokens = model.tokenizer.encode(TEXT)
    losses = []
    for i in range(3):
        window = tokens[64 * i : 64 * (i + 1)]
        rows = model.logits(window)[32:-1].astype(np.float64)
        log_p = rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1)[:, None]
        losses += [-log_p[j, window[33 + j]] for j in range(31)]
    assert found.tokens == 93
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-9)
    assert found.error == pytest.approx(found.perplexity * np.std(losses) / np.sqrt(92), rel=1e-9)


def test_a_model_diverges_from_itself_by_nothing_and_from_another_precision_by_little(model: Model, path: Path) -> None:
    seen = []
    own = perplexity(model, TEXT, 64, 2, reference=model, progress=lambda *p: seen.append(p)).divergence
    assert own is not None
    assert (own.mean, own.maximum, own.same_top, own.delta_p) == (0, 0, 1, 0)
    assert [p[:2] for p in seen] == [(0, 2), (1, 2), (2, 2)]
    assert seen[-1][2] == f"perplexity {perplexity(model, TEXT, 64, 2).perplexity:.4f}"
    other = perplexity(model, TEXT, 64, 2, reference=bridge.Model.load(path, precision="f32")).divergence
    assert other is not None
    assert 0 < other.mean < other.p99 <= other.maximum < 0.01
    assert other.same_top > 0.9


def test_texts_and_windows_that_do_not_fit_are_refused(model: Model) -> None:
    with pytest.raises(BridgeError, match=r"the text has \d+ tokens, 0 windows of 256; 1 needed"):
        perplexity(model, "short")
    with pytest.raises(BridgeError, match="window of 100000 tokens: must be between 4 and"):
        perplexity(model, TEXT, window=100000)


# --- bad input ---


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_computed(path: Path) -> None:
    model = bridge.Model.load(path, context=8)
    with pytest.raises(BridgeError, match=r"the prompt has \d+ tokens, the context holds 8; shorten it"):
        model.generate(TEXT, temperature=0)
    with pytest.raises(BridgeError, match="the prompt is empty"):
        model.generate("", temperature=0)
    with pytest.raises(BridgeError, match="token 99999: the vocabulary has 2048"):
        model.logits([1, 99999])
    assert not model._decoder.output.prepared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu': choose cpu, cuda, cuda:1 ..., or auto"),
        ({"precision": "int4"}, "unknown precision 'int4': choose int8 or f32"),
        ({"kv": "q4_0"}, "unknown kv 'q4_0': choose f16, q8_0, f32"),
        ({"context": 0}, "context=0"),
        ({"context": 2**70}, r"context=\d+: must be between 1 and 16777216"),
        ({"context": "many"}, "context is of type str; must be an integer"),
        ({"context": True}, "context is of type bool; must be an integer"),
        ({"threads": "2"}, "threads is of type str; must be an integer"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 100_000}, "threads=100000: must be between 1 and 1024"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str, path: Path) -> None:
    with pytest.raises(BridgeError, match=message) as error:
        bridge.Model.load(path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt_neox"}, "architecture 'gpt_neox' cannot run here"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "no tensor blk.1.ffn_up.weight"),
        ({"drop": ("blk.0.attn_q_norm.weight",)}, "no tensor blk.0.attn_q_norm.weight"),
        ({"drop": ("qwen3.block_count",)}, "qwen3.block_count is missing"),
        ({"drop": ("tokenizer.ggml.merges",)}, "tokenizer.ggml.merges is missing"),
        ({"drop": ("tokenizer.ggml.tokens",)}, "tokenizer.ggml.tokens is missing"),
        ({"qwen3_attention_head_count": 3}, "3 heads cannot share 2 key-value heads"),
        ({"qwen3_embedding_length": 512}, r"token_embd.weight: shape \[2048, 256\], the metadata says \[2048, 512\]"),
        ({"qwen3_block_count": 512}, r"no tensor blk\.\d+\.\w+"),
        ({"qwen3_block_count": 2**32 - 1}, "qwen3.block_count is 4294967295; must be at most 512"),
        ({"tokenizer_ggml_pre": "of tomorrow"}, "tokenizer.ggml.pre is 'of tomorrow'"),
        ({"tokenizer_ggml_model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
    ],
)
def test_a_file_that_cannot_be_run_says_why(changes: dict, message: str, path: Path, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=message) as error:
        bridge.Model.load(changed(path, tmp_path / "changed.gguf", **changes))
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_refused(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "cut.gguf")
    with open(tmp_path / "cut.gguf", "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(BridgeError, match="damaged or truncated"):
        bridge.Model.load(tmp_path / "cut.gguf")


# --- several callers ---


def test_a_later_call_takes_the_context_and_the_earlier_one_says_so(model: Model) -> None:
    alone = "".join(model.generate(PROMPT, 8, temperature=0))
    earlier = model.generate("KING", 8, temperature=0)
    next(earlier)
    later = model.generate(PROMPT, 8, temperature=0)
    first = next(later)
    with pytest.raises(BridgeError, match="another call on this model has taken its context"):
        list(earlier)
    assert first + "".join(later) == alone
    earlier = model.generate("KING", 8, temperature=0)
    next(earlier)
    model.logits([1, 2, 3])
    with pytest.raises(BridgeError, match="another call"):
        list(earlier)


def test_a_generation_goes_on_where_it_was_left(model: Model) -> None:
    pieces = model.generate(PROMPT, 8, temperature=0)
    assert next(pieces) + "".join(pieces) == "".join(model.generate(PROMPT, 8, temperature=0))


def test_threads_that_share_a_model_get_the_right_text_or_an_error(model: Model, path: Path) -> None:
    prompts = ["KING", "ROMEO:", PROMPT]
    alone = {prompt: "".join(model.generate(prompt, 12, temperature=0)) for prompt in prompts}
    other = bridge.Model.load(path)
    wrong: list[str] = []
    finished: list[str] = []

    def work(chosen: Model, prompt: str) -> None:
        for _ in range(5):
            with contextlib.suppress(BridgeError):
                text = "".join(chosen.generate(prompt, 12, temperature=0))
                finished.append(prompt)
                if text != alone[prompt]:
                    wrong.append(text)

    threads = [threading.Thread(target=work, args=(m, p)) for m, p in zip([model, model, other], prompts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert finished.count(PROMPT) == 5  # nobody disturbs the other model


def test_a_closed_model_says_that_it_is(path: Path) -> None:
    model = bridge.Model.load(path)
    pieces = model.generate(PROMPT, 8, temperature=0)
    next(pieces)
    model.close()
    with pytest.raises(BridgeError, match="this model was closed"):
        model.logits([1])
    with pytest.raises(BridgeError, match="this model was closed"):
        next(pieces)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1: must be at least 0"),
        ({"max_tokens": "x"}, "max_tokens is of type str; must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens is of type float; must be an integer"),
        ({"temperature": "1"}, "temperature='1': must be a number"),
        ({"temperature": 10**400}, r"temperature=10+.*: must be a number"),
        ({"top_p": None}, "top_p: must be a number"),
        ({"top_k": 1.5}, r"top_k=1\.5: must be an integer"),
        ({"repeat_last_n": None}, "repeat_last_n: must be an integer"),
        ({"seed": 0.5}, r"seed=0\.5: must be an integer"),
        ({"logit_bias": {2**70: 1.0}}, r"logit_bias of token \d+: the key must be a token id"),
        ({"logit_bias": {1: "2"}}, "logit_bias 2 of token 1: must be a number or -inf"),
        ({"logit_bias": "15043+1"}, "logit_bias=.*: must be {token id: number}"),
        ({"logit_bias": 5}, "logit_bias=5: must be {token id: number}"),
        ({"seed": -1}, "seed -1"),
        ({"prompt": "caf\udce9"}, "not UTF-8 at character 3"),
        ({"prompt": b"KING"}, "the prompt is a bytes"),
        ({"prompt": None}, "the prompt is a NoneType"),
        ({"prompt": [1.5]}, "a text or token ids"),
        ({"prompt": np.array([[1, 2]])}, r"token ids \[n\]"),
    ],
)
def test_a_prompt_or_an_option_that_makes_no_sense_is_refused_at_once(model: Model, options, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        model.generate(**({"prompt": PROMPT} | options))


def test_limits_beyond_any_context_are_none(model: Model) -> None:
    options = {"temperature": 0, "repeat_penalty": 1.1}
    expected = list(model.generate_tokens(PROMPT, 4, **options, repeat_last_n=-1, top_k=0))
    endless = model.generate_tokens(PROMPT, 2**70, **options, repeat_last_n=2**70, top_k=2**70)
    assert [next(endless) for _ in expected] == expected
    assert list(model.generate_tokens(PROMPT, np.int64(4), **options)) == expected


def test_a_context_that_does_not_fit_the_memory_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("bridge.runtime.decoder.decoder.KVCache", full)
    with pytest.raises(BridgeError, match="context=64: takes more memory than there is; choose a shorter one"):
        bridge.Model.load(path, context=64)


def test_no_stop_text_may_be_none(model: Model) -> None:
    alone = "".join(model.generate(PROMPT, 4, temperature=0))
    assert "".join(model.generate(PROMPT, 4, stop=None, temperature=0)) == alone


def test_positions_that_are_none_are_refused(model: Model) -> None:
    with pytest.raises(BridgeError, match="last=0: must be at least 1"):
        model.logits([1, 2], last=0)
    with pytest.raises(BridgeError, match="last='2': must be an integer"):
        model.logits([1, 2], last="2")


# --- command line ---


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for module in (chat, run):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


def test_run_streams_the_text_and_ends_with_the_speeds(path: Path, model: Model, capsys) -> None:
    assert call("run", str(path), "-p", PROMPT, "-n", "12", "--temp", "0") == 0
    found = capsys.readouterr()
    assert found.out == PROMPT + "".join(model.generate(PROMPT, 12, temperature=0)) + "\n"
    assert "prompt: 8 tokens" in found.err
    assert found.err.count("tokens/s") == 2
    with pytest.raises(BridgeError, match="--system"):
        call("run", str(path), "-p", PROMPT, "--system", "be brief")


def test_a_prompt_on_standard_input_must_be_utf_8(path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Où est ".encode())))
    assert call("run", str(path), "-p", "-", "-n", "1") == 0
    assert capsys.readouterr().out.startswith("Où est ")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Où".encode("latin-1"))))
    with pytest.raises(BridgeError, match=r"standard input is not UTF-8 \(byte 1\)"):
        call("run", str(path), "-p", "-")


def test_a_context_beyond_the_models_is_reported(path: Path, capsys) -> None:
    assert call("run", str(path), "-p", "KING", "-n", "1", "--context", "2000") == 0
    assert "trained for 1024 tokens" in capsys.readouterr().err


def test_perplexity_prints_it_with_its_error_and_the_divergences(path: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("-f", str(tmp_path / "text.txt"), "--windows", "2", "--length", "64")
    assert call("perplexity", str(path), *options, "--reference", str(path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("perplexity ")
    assert "+-" in lines[0]
    assert "(2 windows of 64 tokens)" in lines[0]
    assert "KL divergence: mean 0.000000" in lines[2]
    with pytest.raises(BridgeError, match="No such file"):
        call("perplexity", str(path), "-f", str(tmp_path / "none.txt"))


def test_generating_text_needs_no_torch(path: Path) -> None:
    code = (
        "import sys, bridge; model = bridge.Model.load(sys.argv[1]); print(len(list(model.generate('The', 3))));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=ROOT, capture_output=True)


def test_a_cpu_without_halves_keeps_floats(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("bridge.system.cpu.machine.features", lambda: frozenset())
    assert bridge.Model.load(path, context=16)._decoder.cache.kind == "f32"
    monkeypatch.setattr("bridge.system.cpu.machine.features", lambda: frozenset({"f16c"}))
    assert bridge.Model.load(path, context=16)._decoder.cache.kind == "f16"

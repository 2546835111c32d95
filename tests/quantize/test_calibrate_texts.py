"""Calibration tokens from texts, .jsonl and files of tokens, and what is said of those that give none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bridge.conversion.size_budget import _probe
from bridge.errors import BridgeError
from bridge.quantize.run import calibration_text
from bridge.quantize.settings import Calibration
from bridge.quantize.text import mixture, texts
from bridge.quantize.text.texts import bos_of, load_tokenizer, read_tokens
from bridge.runtime.replies.perplexity import cut_windows
from scripts.peers.reference import windows
from tests.conftest import CHECKPOINT

TEXT = "".join(f"Line {i} of a text about {'the sea' if i % 3 else 'mountains'}.\n" for i in range(400))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(CHECKPOINT)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_without_a_seed_the_first_windows_of_a_text_are_taken_as_benchmarks_take_them(
    tmp_path: Path, tokenizer: Any
) -> None:
    text = write(tmp_path / "a.txt", TEXT)
    tokens = read_tokens(text, tokenizer, 5, 32)
    assert tokens.dtype == torch.int64
    np.testing.assert_array_equal(tokens.numpy(), windows(tokenizer, TEXT, 5, 32))


def test_a_seed_chooses_among_all_windows_in_the_texts_order_and_always_the_same(
    tmp_path: Path, tokenizer: Any
) -> None:
    text = write(tmp_path / "a.txt", TEXT)
    every = np.array(ids(tokenizer, TEXT))
    every = every[: len(every) // 32 * 32].reshape(-1, 32)
    chosen = read_tokens(text, tokenizer, 9, 32, seed=3).numpy()
    at = [int(np.flatnonzero((every == window).all(1))[0]) for window in chosen]
    assert at == sorted(set(at))
    assert at[-1] > 9
    np.testing.assert_array_equal(chosen, read_tokens(text, tokenizer, 9, 32, seed=3).numpy())
    assert (chosen != read_tokens(text, tokenizer, 9, 32, seed=4).numpy()).any()
    np.testing.assert_array_equal(read_tokens(text, tokenizer, 10**6, 32, seed=3).numpy(), every)


def test_a_long_text_is_tokenized_in_pieces_of_whole_lines_and_no_further_than_needed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_PIECE", 1000)
    seen: list[str] = []

    class Counting:
        bos_token_id = None

        def __call__(self, piece: str, **options: Any) -> Any:
            seen.append(piece)
            return tokenizer(piece, **options)

    text = write(tmp_path / "a.txt", TEXT)
    tokens = read_tokens(text, Counting(), 5, 32)
    np.testing.assert_array_equal(tokens.numpy(), windows(tokenizer, TEXT, 5, 32))
    assert len(seen) < len(TEXT) // 1000
    assert all(piece.endswith("\n") and len(piece) < 1100 for piece in seen)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer, made to put its <|endoftext|> before a text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    data, settings = (
        json.loads((CHECKPOINT / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config")
    )
    bos = settings["bos_token"] = settings["eos_token"]
    number = next(token["id"] for token in data["added_tokens"] if token["content"] == bos)
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }
    write(folder / "tokenizer.json", json.dumps(data))
    write(folder / "tokenizer_config.json", json.dumps(settings))
    return load_tokenizer(folder)


def test_windows_start_with_bos_if_the_tokenizer_puts_it_before_a_text_as_perplexity_takes_them(
    tmp_path: Path, tokenizer: Any, with_bos: Any
) -> None:
    bos = with_bos.bos_token_id
    assert bos_of(with_bos) == bos
    assert bos_of(tokenizer) is None
    text = write(tmp_path / "a.txt", TEXT)
    tokens = read_tokens(text, with_bos, 5, 32)
    plain = ids(tokenizer, TEXT)
    assert tokens[0].tolist() == [bos, *plain[:31]]
    assert tokens[1].tolist() == [bos, *plain[32:63]]
    np.testing.assert_array_equal(tokens.numpy(), windows(with_bos, TEXT, 5, 32))
    runtime: Any = SimpleNamespace(
        encode=lambda text: with_bos(text)["input_ids"], bos=bos, add_bos=True, add_eos=False
    )  # fmt: skip
    measured: Any = SimpleNamespace(tokenizer=runtime, context=256)
    assert tokens.tolist() == cut_windows(measured, TEXT, 32, 5)
    assert (read_tokens(text, with_bos, 9, 32, seed=3)[:, 0] == bos).all()
    probe = _probe(read_tokens(text, with_bos, 3, 300), 10**6)
    assert probe.shape == (3, 300)
    assert (_probe(read_tokens(text, with_bos, 3, 600), 10**6)[:, 0] == bos).all()


def test_a_text_that_has_bos_gets_no_second_one_and_token_ids_stay_as_they_are(tmp_path: Path, with_bos: Any) -> None:
    bos = with_bos.bos_token_id
    text = write(tmp_path / "a.txt", with_bos.bos_token + TEXT)
    assert read_tokens(text, with_bos, 1, 8)[0].tolist() == [bos, *ids(with_bos, TEXT)[:7]]
    np.save(tmp_path / "a.npy", np.arange(20))
    assert read_tokens(tmp_path / "a.npy", with_bos, 2, 10).tolist() == np.arange(20).reshape(2, 10).tolist()


def test_jsonl_gives_the_field_text_or_the_only_one_or_a_chat_by_the_tokenizers_template(
    tmp_path: Path, tokenizer: Any
) -> None:
    records = [
        {"text": "First document.", "title": "One"},
        "Second document.",
        {"content": "Third document.", "id": 3},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(r) for r in records) + "\n\n")

    class Chatty:
        bos_token_id = None
        special_tokens_map = {"eos_token": "<e>"}  # noqa: RUF012 - as transformers has it
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"

        def __call__(self, text: str, **options: Any) -> Any:
            return tokenizer(text, **options)

        def get_chat_template(self) -> str:
            return self.template

    expected = ids(tokenizer, "First document.\n\nSecond document.\n\nThird document.\n\n<user>Hello<e>")
    np.testing.assert_array_equal(read_tokens(path, Chatty(), 99, len(expected))[0].numpy(), expected)
    with pytest.raises(BridgeError, match=r"chat template cannot format a chat \(.*\); give its text"):
        read_tokens(path, tokenizer, 1, 4)  # this one has no template
    Chatty.template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(BridgeError, match=r"cannot format a chat \(it runs for more than 5 seconds\); give its text"):
        read_tokens(path, Chatty(), 1, 4)
    write(path, json.dumps({"messages": ["Hello"]}))
    with pytest.raises(BridgeError, match=r"cannot format a chat"):
        read_tokens(path, Chatty(), 1, 4)


def test_files_of_tokens_are_taken_as_they_are_rows_and_flat_runs_alike(tmp_path: Path) -> None:
    tokens = torch.randint(0, 320, (6, 50), dtype=torch.int32)
    torch.save(tokens, tmp_path / "a.pt")
    torch.save({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tmp_path / "b.pt")
    save_file({"anything": tokens}, tmp_path / "a.safetensors")
    np.save(tmp_path / "a.npy", tokens.numpy())
    for name in ("a.pt", "b.pt", "a.safetensors", "a.npy"):
        torch.testing.assert_close(read_tokens(tmp_path / name, None, 6, 50, vocabulary=320), tokens.long())
    torch.testing.assert_close(read_tokens(tmp_path / "a.pt", None, 3, 24), tokens[:2, :48].reshape(4, 24)[:3].long())
    np.save(tmp_path / "flat.npy", tokens.numpy().ravel())
    torch.testing.assert_close(read_tokens(tmp_path / "flat.npy", None, 6, 50), tokens.long())


def test_what_gives_no_sequence_is_refused_in_one_line_that_says_how_to_mend_it(tmp_path: Path, tokenizer: Any) -> None:
    def refused(path: Path, match: str, **options: Any) -> None:
        with pytest.raises(BridgeError, match=match) as caught:
            read_tokens(path, options.pop("tokenizer", tokenizer), **({"samples": 4, "length": 64} | options))
        assert "\n" not in str(caught.value)

    refused(tmp_path / "none.txt", "no such file")
    refused(tmp_path, "is a folder; give a text")
    refused(write(tmp_path / "empty.txt", ""), "is empty")
    count = len(ids(tokenizer, "A short text."))
    refused(write(tmp_path / "short.txt", "A short text."), rf"{count} tokens, but a calibration sequence has 64; give")
    refused(write(tmp_path / "a.txt", TEXT), "finds no tokens in it", tokenizer=lambda text, **_: {"input_ids": []})
    refused(tmp_path / "a.txt", "a text needs a tokenizer; give a token file", tokenizer=None)
    refused(tmp_path / "a.txt", "0 calibration sequences", samples=0)
    refused(tmp_path / "a.txt", r"holds token \d+, but the model's vocabulary has 30 tokens", vocabulary=30)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 99)
    refused(tmp_path / "latin.txt", "is not UTF-8 text")
    (tmp_path / "wide.txt").write_bytes(TEXT.encode("utf-16"))
    refused(tmp_path / "wide.txt", "is not UTF-8 text")
    for zeros in (bytes(1 << 16), TEXT.encode("utf-16-le"), b"GGUF\3\0\0\0" * 999):
        (tmp_path / "zeros.txt").write_bytes(zeros)
        refused(tmp_path / "zeros.txt", "holds zero bytes")
    (tmp_path / "noise.txt").write_bytes(np.random.default_rng(0).bytes(1 << 16))
    refused(tmp_path / "noise.txt", "is not UTF-8 text|holds zero bytes")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.txt")
        refused(tmp_path / "pipe.txt", "is not a regular file")
    refused(write(tmp_path / "a.jsonl", '{"prompt": "a", "answer": "b"}\n'), "line 1 has no text, but 'prompt', 'ans")
    refused(write(tmp_path / "a.jsonl", '{"text": "a"}\n[1]\n'), "line 2 has no text, but a list")
    refused(write(tmp_path / "a.jsonl", "plain\n"), "line 1 is not JSON")
    refused(write(tmp_path / "a.npy", "no array"), "cannot be read as a tensor of tokens")
    np.save(tmp_path / "a.npy", np.zeros((2, 64), np.float32))
    refused(tmp_path / "a.npy", r"float32 of shape \[2, 64\] is not a list of tokens")
    np.save(tmp_path / "a.npy", np.zeros((2, 63), np.int64))
    refused(tmp_path / "a.npy", "2 rows of 63 tokens, but a calibration sequence has 64")
    np.save(tmp_path / "a.npy", np.full((2, 64), -1))
    refused(tmp_path / "a.npy", "holds token -1")
    torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "holds a, b; name the tensor of tokens input_ids")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "length", "sequences"),
    [(12288, 2048, 48), (28672, 2048, 112), (256, 2048, 32), (256, 256, 128), (12288, 300, 328)],
)
def test_eight_tokens_are_taken_for_each_input_of_the_widest_layer_but_no_fewer_than_the_least(
    columns: int, length: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(_sources: Any, _tokenizer: Any, samples: int, own_length: int, *_: Any) -> Any:
        return SimpleNamespace(tokens=torch.zeros(samples, own_length, dtype=torch.int64))

    monkeypatch.setattr(mixture, "calibration_sequences", taken)
    shapes = {"down": (128, columns), "up": (columns, 128), "other": (8, 1 << 20)}
    model: Any = SimpleNamespace(ckpt=None, vocabulary=1000, linears=lambda: shapes, head=lambda: ("head", (1000, 128)))
    found = calibration_text.calibration_set(model, Calibration("tokens.npy", length=length), {"down", "up"})
    assert found.tokens.shape == (sequences, length)

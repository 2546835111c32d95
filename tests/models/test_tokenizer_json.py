"""The tokenizer.json that is made of a GGUF's vocabulary gives llama.cpp's ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from bridge.models.tokenizer.tokenizer_json import tokenizer_files
from bridge.runtime.tokenizer import Tokenizer
from tests.conftest import CHECKPOINT, SHARED, shared
from tests.models.test_pretokenizer import OTHERWISE, RULES, TEXTS, tokenizer_json
from tests.models.test_tokenizer import SPM_SETTINGS, sentencepiece_model, spm_texts  # noqa: F401  (a fixture)
from tests.support.tiny_vocab import vocab_gguf

VOCABULARIES = SHARED / "vocabularies"  # llama.cpp's models/ggml-vocab-*.gguf with .inp and .out


def same(path: Path, texts: list[str]) -> tokenizers.Tokenizer:
    """The new tokenizer and the runtime's, which is compared with llama.cpp elsewhere, give the same ids."""
    metadata = read_gguf(path).metadata
    fast = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    own = Tokenizer(metadata)
    for text in texts:
        assert fast.encode(text).ids == own.encode(text), text
        assert fast.encode(text, add_special_tokens=False).ids == own.encode(text, add_special=False), text
    return fast


@pytest.mark.parametrize("name", RULES)
def test_byte_level_vocabularies_are_cut_by_the_rules_that_the_gguf_names(name: str, tmp_path: Path) -> None:
    data = tokenizer_json(*RULES[name])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    _, path = vocab_gguf(tmp_path, len(data["model"]["vocab"]))
    texts = [text for text in TEXTS if OTHERWISE.get(name, "<none>") not in text]
    fast = same(path, [*texts, "a<|endoftext|>b <|endoftext|>\n"])
    for text in texts:
        assert fast.decode(fast.encode(text).ids) == text


def test_sentencepiece_vocabularies_join_by_score(sentencepiece_model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPM_SETTINGS))
    _, path = vocab_gguf(tmp_path, 1000)
    fast = same(path, [*spm_texts(), "a</s>b", ""])
    assert fast.decode(fast.encode("Hello  world\n").ids) == "Hello  world\n"


def test_settings_and_chat_template_come_along(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    metadata = dict(read_gguf(tmp_path / "m.gguf").metadata)
    assert "chat_template" not in json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    metadata |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    config = json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    assert config["eos_token"] == metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.eos_token_id"]]
    named = {each["name"]: each["template"] for each in config["chat_template"]}
    assert named == {"default": metadata["tokenizer.chat_template"], "tool_use": "{{ tools }}"}
    with pytest.raises(BridgeError, match="must be gpt2"):
        tokenizer_files(metadata | {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(BridgeError, match=r"tokenizer\.ggml\.scores is missing, by which texts are cut into unigrams"):
        tokenizer_files(metadata | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(BridgeError, match="rules for cutting words"):
        tokenizer_files(metadata | {"tokenizer.ggml.pre": "nobodys"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(file.name for file in VOCABULARIES.glob("*.gguf")) or ["none-found"])
def test_llama_cpps_own_vocabularies_give_the_ids_that_it_expects(name: str) -> None:
    path = shared(f"vocabularies/{name}")
    metadata = read_gguf(path).metadata
    texts, wanted = (path.with_name(f"{name}.{end}") for end in ("inp", "out"))
    if metadata["tokenizer.ggml.model"] not in ("gpt2", "llama", "gemma4") or not texts.exists():
        pytest.skip("is of another kind, or has no expected ids")
    fast = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    lines = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(token) for token in line.split()] for line in wanted.read_text().splitlines()]
    own = Tokenizer(metadata)
    for encoded in (
        [fast.encode(line, add_special_tokens=False).ids for line in lines],
        [own.encode(line, add_special=False) for line in lines],
    ):
        assert encoded[: len(expected)] == expected

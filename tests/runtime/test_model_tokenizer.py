"""A GGUF's tokenizer: ids and texts must be llama.cpp's, for every kind and every cutting rule."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from gguf.gguf_writer import GGUFValue

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file import pretokenizers
from bridge.models.outline import Outline
from bridge.models.tokenizer.tokenizer_json import tokenizer_files
from bridge.runtime.tokenizer import Tokenizer, stop_tokens
from bridge.runtime.tokenizer.ascii_words import words_of
from bridge.runtime.tokenizer.bpe import pre_tokenizer
from scripts.peers.gguf_file import rewrite
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.models.test_pretokenizer import RULES, tokenizer_json
from tests.models.test_pretokenizer import TEXTS as CUT_TEXTS
from tests.models.test_tokenizer import (
    SPM_SETTINGS,
    TEXTS,
    copy_tokenizer,
    save,
    sentencepiece_model,  # noqa: F401  (a fixture)
)
from tests.support.tiny_vocab import vocab_gguf, write_vocab


def same_as_llama_cpp(path: Path, texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(bridge.open_gguf(path).metadata)
    with LlamaCpp(path) as other:
        for text in texts:
            for special in (False, True):
                for parse in (False, True):
                    assert tokenizer.encode(text, special, parse) == other.tokenize(text, special, parse), text
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids, special=True) == other.detokenize(ids)
            assert tokenizer.decode(ids) == other.detokenize(ids, special=False)
            assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)
    return tokenizer


@pytest.mark.parametrize("name", RULES)
def test_words_are_cut_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    data = tokenizer_json(*RULES[name])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    _, path = vocab_gguf(tmp_path, len(data["model"]["vocab"]))
    same_as_llama_cpp(path, [*CUT_TEXTS, "a<|endoftext|>b <|endoftext|>\n"])


LETTERS = """a Z Hello WORLD camelCase HTTPServer 's 'S 'RE 've 'll don't ' " ` 1 12 123 1234 12345 1234567 3.14 1,000
$ + = < ^ ~ | _ -- -> != // /* # @ && ( ) [] {} \\ ? !!! ... . , ; :: IMGIMGABZ <sentinel:12>"""
OTHERS = r"""\u2019s \u0663 \u0663\u0664\u0665\u0666 \u0967\u0968\u0969 \u2167 \xbd \xb2 \xe9 \xdc \xf1 \u017f \u0130
\u01c5 \u02b0 \xaa e\u0301 \u0301\u0301 \u65e5\u672c\u8a9e \u6f22\u5b57\u304b\u306a \u30ab\u30bf\u30fc \u3105\u3106
\ud55c\uad6d\uc5b4 \u3131 \u3400 \U00020000 \uf900 \uff76 \uff21 \uff11 \u3001 \u3002 \uff0c \uff01 \u300c \u2026
\u2014 \u201c \uff5e \u0e44\u0e17\u0e22 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48 \u0ea5\u0eb2\u0ea7
\u1781\u17d2\u1798\u17c2\u179a \u1019\u103c\u1014\u103a \u0939\u093f\u0928\u094d\u0926\u0940
\u09ac\u09be\u0982\u09b2\u09be \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0645\u064e\u0631\u0652\u062d\u064e \u0640
\u060c \u06d4 \u0964 \u05e9\u05b8\u05c1 \u0645\u06cc\u200c\u062e
\u041f\u0440\u0438\u0432\u0435\u0442\u041c\u0438\u0440 \u0395\u03bb\u03b7 \u10e5\u10d0 \u13a0 \u0540\u0561 \U0001d4b3
\U00010400 \U0001f642 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469 1\ufe0f\u20e3 \u20ac \xa9 \xb0 \ue000 \ufeff
\ufffd"""
ATOMS = LETTERS.split() + OTHERS.encode().decode("unicode_escape").split()
SPACES = [
    " ",
    "  ",
    5 * " ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " \n ",
    "\xa0",
    "\u3000",
    "\u2028",
    "\x85",
    "\v",
    "\x1c",
]


def random_texts(seed: int, count: int, length: int) -> list[str]:
    choose = random.Random(seed)
    return ["".join(choose.choice(choose.choice((ATOMS, ATOMS, SPACES))) for _ in range(length)) for _ in range(count)]


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    """A byte-level vocabulary whose merges cross the borders of every rule."""
    folder = tmp_path_factory.mktemp("crossing")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2500, special_tokens=["<|endoftext|>"], show_progress=False, max_token_length=16,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([*random_texts(1, 2000, 3), *CUT_TEXTS], trainer)
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return vocab_gguf(folder, made.get_vocab_size(), pre="gpt-2")[0]


@pytest.mark.parametrize("name", [name for name, rules in pretokenizers.RULES.items() if rules.byte_level])
def test_every_name_of_rules_cuts_random_texts_as_in_llama_cpp(name: str, crossing: Outline, tmp_path: Path) -> None:
    crossing.metadata["tokenizer.ggml.pre"] = GGUFValue(name, gguf.GGUFValueType.STRING)
    path = write_vocab(crossing, tmp_path / "m.gguf")
    tokenizer = Tokenizer(bridge.open_gguf(path).metadata)
    rules = pretokenizers.RULES
    if name == next(first for first in rules if rules[first] is rules[name]):
        texts = [*random_texts(3, 2, 400), *random_texts(4, 10, 3)]
    else:  # another name of rules that are tested
        texts = random_texts(2, 1, 200)
    with LlamaCpp(path) as other:
        for text in texts:
            assert tokenizer.encode(text) == other.tokenize(text, add_special=True), text


BY_PYTHON = ("llama-bpe", "qwen2", "qwen35", "gpt-2", "smollm", "default")


@pytest.mark.parametrize("name", [name for name, rules in pretokenizers.RULES.items() if rules.byte_level])
def test_words_of_ascii_are_those_of_the_library(name: str) -> None:
    steps = pretokenizers.RULES[name].steps
    library, draw = pre_tokenizer(steps), random.Random(1)
    ascii = [chr(code) for code in range(128)]
    common = [*"ab'sS \n", "'ll", "'RE", "  ", "\r\n", "12", "345", "e.g.", " x", "\t"]
    for _ in range(400):
        signs = draw.choices(draw.choice((ascii, common, ascii + 9 * common)), k=draw.randrange(30))
        text = "".join(signs)
        words = words_of(steps, text)
        if words is None:
            assert name not in BY_PYTHON
            return
        assert words == [word for word, _ in library.pre_tokenize_str(text)]
    assert words_of(steps, "caf\u00e9") is None


@pytest.mark.parametrize(
    ("model", "pre"),
    [("gemma4", ""), ("gpt2", "gemma4"), ("gpt2", "granite-embed-multi-311m"), ("gpt2", "sarvam-moe")],
)
def test_characters_are_merged_line_by_line_as_in_llama_cpp(model: str, pre: str, tmp_path: Path) -> None:
    data = tokenizer_json(*RULES["gpt-2"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    roles = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    made = ["▁▁", "▁a", "ab", "▁ab", "\n\n", "\n\n\n", "é", "<b>"]
    tokens = [*roles, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc<>\n.", *made]
    merges = ["▁ ▁", "▁ a", "a b", "▁a b", "\n \n"]
    size = max(len(tokens), len(data["model"]["vocab"]))
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    kinds = [6 if re.fullmatch("<0x..>", text) else 3 if text in roles else 1 for text in tokens]
    kinds[tokens.index("<b>")] = 4
    text, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.INT32
    changes = {
        "model": GGUFValue(model, text), "pre": GGUFValue(pre, text),
        "add_bos_token": GGUFValue(False, gguf.GGUFValueType.BOOL),
        "tokens": GGUFValue(tokens, gguf.GGUFValueType.ARRAY, text),
        "token_type": GGUFValue(kinds, gguf.GGUFValueType.ARRAY, number),
        "merges": GGUFValue(merges, gguf.GGUFValueType.ARRAY, text),
        **{f"{role}_token_id": GGUFValue(i, gguf.GGUFValueType.UINT32) for i, role in enumerate(
            ("padding", "eos", "bos", "unknown"))},
    }  # fmt: skip
    _, path = vocab_gguf(tmp_path, size)
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    rewrite(path, tmp_path / "gemma4.gguf", lambda tensor: tensor.tensor_type.name, lambda *_: None, keys)
    texts = ["", " ab  ab", "a\nb\n\nc", "\n\n\n", "\n" * 7, "é日 <b>ab</b>.", "<turn|>a", " a b c\n ab"]
    if pre == "sarvam-moe":  # llama.cpp ends the process there
        texts = [text for text in texts if "\n\n" not in text]
    tokenizer = same_as_llama_cpp(tmp_path / "gemma4.gguf", texts)
    assert tokenizer.add_bos == (pre != "sarvam-moe")
    assert {tokens[token] for token in tokenizer.stops} == {"<eos>", "<turn|>"}


def test_a_file_that_names_no_rules_is_cut_by_llama_cpps_default_ones(tmp_path: Path) -> None:
    data = tokenizer_json(*RULES["gpt-2"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    _, path = vocab_gguf(tmp_path, len(data["model"]["vocab"]), pre="default")
    tokenizer = same_as_llama_cpp(path, CUT_TEXTS)
    metadata = dict(bridge.open_gguf(path).metadata)
    assert metadata.pop("tokenizer.ggml.pre") == "default"
    assert all(Tokenizer(metadata).encode(text) == tokenizer.encode(text) for text in CUT_TEXTS)


def test_added_tokens_are_found_in_the_text(tmp_path: Path) -> None:
    data = copy_tokenizer("tiny-qwen3", tmp_path)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": 2048, "content": "<|im_end|>", "special": True, **added},
        {"id": 2049, "content": "<tool_call>", "special": False, **added},
        {"id": 2050, "content": "<tool_call>s", "special": False, **added},
    ]
    save(tmp_path, data, eos_token={"content": "<|im_end|>", "special": True})
    _, path = vocab_gguf(tmp_path, 2053)
    texts = [*TEXTS, "a<|im_end|>b", "call <tool_call>{} x<tool_call>s<tool_call>", "<|endoftext|><|im_end|>"]
    tokenizer = same_as_llama_cpp(path, texts)
    assert tokenizer.stops == {0, 2048}
    assert tokenizer.encode("<tool_call>s", parse_special=False) == [2050]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_llama_cpp(prefix: bool, sentencepiece_model: Path, tmp_path: Path) -> None:  # noqa: F811
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    settings = SPM_SETTINGS | {"add_prefix_space": prefix, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 1000}))
    _, path = vocab_gguf(tmp_path, 1001)
    texts = [*TEXTS, "one<s>two </s> three", "<extra> more<extra>", "a\u2581b  \u2581 c", "x" * 300, "\x00\x7f é"]
    tokenizer = same_as_llama_cpp(path, texts)
    assert tokenizer.add_bos
    assert tokenizer.stops == {2}
    monkey = Tokenizer(bridge.open_gguf(path).metadata)
    monkey.cutter._words = False  # type: ignore[attr-defined]
    for text in texts:
        assert monkey.encode(text) == tokenizer.encode(text)


def plamo_tokenizer(folder: Path, lines: list[list[Any]]) -> None:
    """A tokenizer.jsonl of PLaMo's kind: special tokens, bytes, and these lines."""
    special = [[f"<|plamo:{role}|>", 0.0, "CONTROL"] for role in ("bos", "eos", "pad", "op")]
    of_bytes = [[f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)]
    lines = [["<|plamo:unk|>", 0.0, "UNKNOWN"], *special, *of_bytes, *lines]
    (folder / "tokenizer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    roles = {f"{role}_token": f"<|plamo:{role}|>" for role in ("bos", "eos", "unk", "pad")}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, "add_bos_token": True, "add_eos_token": True}))


def test_plamos_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    texts = [text for text in [*TEXTS, *random_texts(1, 8, 40)] if text]
    draw = random.Random(1)
    parts = {text[first : first + draw.randrange(1, 9)] for text in texts for first in range(0, len(text), 3)}
    parts |= {"[PA", "D1]", "D2]", "x["}  # cheaper than padding
    scores = [draw.choice((-9.5, -12.00005, -1999.9, -2000.5, float("-inf"))) for _ in parts]
    scores = [draw.uniform(-15, -3) if draw.random() < 0.8 else score for score in scores]
    plamo_tokenizer(tmp_path, [[text, score, "NORMAL"] for text, score in zip(sorted(parts), scores, strict=True)])
    _, path = vocab_gguf(tmp_path, 265 + len(parts))
    padding = ["[PAD1]", "x[PAD1] [PAD1", "AD1][PAD2]", "[PAD1][PAD3]\u65e5", "[PAD99] a"]
    marks = ["<|plamo:op|>a<|plamo:eos|>", "<|plamo:unk|>", "<|plamo:", "\ufeffBOM\ufeff", "\ufeff", "", "\x00\x7f\xe9"]
    tokenizer = same_as_llama_cpp(path, [*texts, *random_texts(2, 20, 40), *padding, *marks])
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, True)
    assert {tokenizer.tokens[token] for token in tokenizer.stops} == {"<|plamo:eos|>", "<|plamo:op|>"}
    with pytest.raises(BridgeError, match=r"'plamo2'; must be gpt2, llama, gemma4, bert or t5 for a"):
        tokenizer_files(bridge.open_gguf(path).metadata)


def test_plamos_vocabulary_without_a_byte_is_refused(tmp_path: Path) -> None:
    plamo_tokenizer(tmp_path, [["a", -1.0, "NORMAL"]])
    _, path = vocab_gguf(tmp_path, 262)
    metadata = dict(bridge.open_gguf(path).metadata)
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[5 + 0x41] = 1
    with pytest.raises(BridgeError, match="no token is of the byte 65, as one must be of each"):
        Tokenizer(metadata | {"tokenizer.ggml.token_type": kinds})


def gemma4_tokenizer(folder: Path) -> None:
    """A tokenizer.json of Gemma 4's kind with few tokens."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_call>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=60, show_progress=False)
    made.train_from_iterator(8 * TEXTS, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:6]
    data["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
    }  # fmt: skip
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def test_gemma_4s_characters_are_joined_by_rank_as_in_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.support.family_models import new_model

    new_model("gemma4", eos_token_id=1).save_pretrained(tmp_path)
    gemma4_tokenizer(tmp_path)
    bridge.convert(tmp_path, tmp_path / "m.gguf", type="F16")
    texts = [text for text in TEXTS if text] + [
        "a\n\n\nb  c\n",
        "one<turn|>two <|tool_call>",
        "\x00\x7f \u00e9\U0001f600",
        "x" * 99,
    ]
    tokenizer = same_as_llama_cpp(tmp_path / "m.gguf", texts)
    metadata = bridge.open_gguf(tmp_path / "m.gguf").metadata
    assert (metadata["tokenizer.ggml.model"], tokenizer.add_bos, tokenizer.stops) == ("gemma4", True, {1, 4})
    files = tokenizer_files(metadata)
    fast = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in texts:
        assert fast.encode(text).ids == tokenizer.encode(text)
        assert fast.decode(fast.encode(text).ids, skip_special_tokens=False).removeprefix("<bos>") == text


# special tokens of published models with the types that files give them, and those that end a reply
VOCABULARIES = {
    "gpt-oss": (
        {"<|return|>": 3, "<|constrain|>": 3, "<|channel|>": 3, "<|start|>": 3, "<|end|>": 3, "<|message|>": 3,
         "<|call|>": 3}, {"<|return|>", "<|call|>"}),
    "solar-open": ({"<|flush|>": 3, "<|calls|>": 4, "<|end|>": 3, "<|begin|>": 4}, {"<|flush|>", "<|calls|>"}),
    "without its own end": ({"<|return|>": 3, "<|end|>": 4, "<|message|>": 4}, {"<|return|>", "<|end|>"}),
    "kimi": ({"[EOS]": 3, "[EOT]": 3, "[PAD]": 3, "[BOS]": 3}, {"[EOS]", "[EOT]", "[PAD]"}),
    "minimax": ({"[e~[": 3, "]~b]": 3, "<think>": 4}, {"[e~["}),
    "qwen": (
        {"<|im_end|>": 3, "<|fim_prefix|>": 4, "<|fim_middle|>": 1, "<|fim_suffix|>": 4, "<|fim_pad|>": 4,
         "<|repo_name|>": 4, "<|file_sep|>": 4, "<tool_call>": 4},
        {"<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}),
    "granite": ({"<fim_prefix>": 3, "<fim_pad>": 3, "<reponame>": 4, "<filename>": 4}, {"<fim_pad>", "<reponame>"}),
    "html": ({"</s>": 4, "<s>": 4, "<end_of_turn>": 1, "<h1>": 4}, {"</s>", "<end_of_turn>"}),
    "gemma4": ({"</s>": 4, "<|tool_response>": 4, "<turn|>": 3}, {"<|tool_response>", "<turn|>"}),
    "overlaps": ({"<a": 4, "<ab": 4, "b>c": 4, "<<a>": 4, "<eos>": 4, "os>": 4, "s>": 3}, {"<eos>"}),
    "deepseek": (
        {"<\uff5cend\u2581of\u2581sentence\uff5c>": 4, "<\uff5cfim\u2581hole\uff5c>": 4, "<|EOT|>": 4},
        {"<\uff5cend\u2581of\u2581sentence\uff5c>"}),
}  # fmt: skip


def with_special_tokens(source: Path, types: dict[str, int], out: Path, **keys: Any) -> Path:
    """A vocabulary's GGUF with its last tokens replaced, and other values of some keys."""
    metadata = bridge.open_gguf(source).metadata
    tokens, kinds = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    tokens[-len(types) :], kinds[-len(types) :] = types.keys(), types.values()
    array, text, number = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, gguf.GGUFValueType.INT32
    changes = {
        "tokenizer.ggml.tokens": GGUFValue(tokens, array, text),
        "tokenizer.ggml.token_type": GGUFValue(kinds, array, number),
        **{key: GGUFValue(v, text if isinstance(v, str) else gguf.GGUFValueType.UINT32) for key, v in keys.items()},
    }
    rewrite(source, out, lambda tensor: tensor.tensor_type.name, lambda *_: None, changes)
    return out


def texts_with(special: Iterable[str]) -> list[str]:
    """Texts in which special tokens stand alone, next to one another, in words, and with white space around them."""
    marks = list(special)
    spaced = [f"a{white}{mark}{white}b" for mark in marks for white in ("", " ", "\n", "\r\n\t \v\f")]
    parts = [half for mark in marks for half in (mark[:-1], mark[1:], f"{mark[:-1]} {mark[-1:]}")]
    return ["".join(marks), "\n".join(marks), " x ".join(reversed(marks)), "<<ab>c><a>", "<eos>>", *spaced, *parts]


@pytest.fixture(scope="module")
def plain_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF of byte-level BPE whose last eight tokens are padding."""
    folder = tmp_path_factory.mktemp("plain")
    data = tokenizer_json(*RULES["gpt-2"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return vocab_gguf(folder, len(data["model"]["vocab"]) + 8)[1]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_tokens_are_what_llama_cpp_takes_them_for(name: str, plain_vocabulary: Path, tmp_path: Path) -> None:
    types, ends = VOCABULARIES[name]
    path = with_special_tokens(plain_vocabulary, types, tmp_path / "m.gguf")
    tokenizer = same_as_llama_cpp(path, texts_with(types))
    assert {tokenizer.text(token) for token in tokenizer.stops} == ends | {"<|endoftext|>"}
    stops = stop_tokens(bridge.open_gguf(path).metadata)
    assert (stops[0], set(stops)) == (tokenizer.eos, tokenizer.stops)
    with LlamaCpp(path) as other:
        assert {t for t in range(len(tokenizer)) if other._lib.llama_vocab_is_eog(other._vocab, t)} == tokenizer.stops
    if name == "gpt-oss":
        reply = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2"
        assert tokenizer.decode(tokenizer.encode(reply + "<|return|>")) == reply


def test_a_role_that_a_key_names_is_no_other_tokens(plain_vocabulary: Path, tmp_path: Path) -> None:
    types = {"<|fim_pad|>": 4, "<|repo_name|>": 1, "<|end|>": 3, "<|return|>": 3, "<|call|>": 3}
    first = len(bridge.open_gguf(plain_vocabulary).metadata["tokenizer.ggml.tokens"]) - len(types)
    keys = {"fim_pad": 5, "fim_rep": 9, "eot": first + 2, "eom": 7}
    path = with_special_tokens(
        plain_vocabulary, types, tmp_path / "m.gguf", **{f"tokenizer.ggml.{k}_token_id": v for k, v in keys.items()}
    )
    tokenizer = same_as_llama_cpp(path, texts_with(types))
    assert tokenizer.stops == {tokenizer.eos, 5, 7, 9, first + 3, first + 4}
    with LlamaCpp(path) as other:
        assert {t for t in range(len(tokenizer)) if other._lib.llama_vocab_is_eog(other._vocab, t)} == tokenizer.stops


@pytest.mark.parametrize("model", ["Phi-3-mini-4k-instruct", "My PHI3", "Phi 3", "modern-bert", ""])
def test_white_space_goes_with_special_tokens_in_models_of_llama_cpps_names(
    model: str,
    sentencepiece_model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPM_SETTINGS | {"add_bos_token": True}))
    _, source = vocab_gguf(tmp_path, 1006)
    types = {"<|user|>": 3, "<|assistant|>": 4, "<|end|>": 3, "<|endoftext|>": 3, "[MASK]": 3, "<tool>": 4}
    path = with_special_tokens(source, types, tmp_path / "m.gguf", **{"general.name": model})
    turn = "<|user|>\nHello<|end|>\n<|assistant|>\n"
    tokenizer = same_as_llama_cpp(path, [*texts_with([*types, "</s>", "<s>"]), turn])
    marks = [token for token in tokenizer.encode(turn) if token >= 1000]
    assert (tokenizer.encode(turn)[-1] == marks[-1]) == (model in ("Phi-3-mini-4k-instruct", "My PHI3"))
    fast = tokenizers.Tokenizer.from_str(tokenizer_files(bridge.open_gguf(path).metadata)["tokenizer.json"])
    added = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    assert {text for text in types if added[text].rstrip} == {
        text for text in types if tokenizer.rstrip and text != "<|endoftext|>"
    }


@pytest.mark.parametrize("keys", [{"tokenizer.ggml.pre": "jina-v2-de"}, {"general.name": "Modern-BERT"}])
def test_a_mask_takes_the_white_space_before_it(keys: dict[str, str], plain_vocabulary: Path, tmp_path: Path) -> None:
    types = {"<mask>": 3, "[MASK]": 4, "<other>": 3}
    path = with_special_tokens(plain_vocabulary, types, tmp_path / "m.gguf", **keys)
    tokenizer = same_as_llama_cpp(path, texts_with(types))
    assert tokenizer.lstrip == {len(tokenizer) - 3 + ("general.name" in keys)}


def test_a_sentencepiece_file_that_names_no_bos_and_eos_has_llama_cpps(
    sentencepiece_model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPM_SETTINGS | {"add_bos_token": True}))
    _, source = vocab_gguf(tmp_path, 1001)
    keys = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), 1 << 20)
    path = with_special_tokens(source, {"<end>": 3}, tmp_path / "m.gguf", **keys)
    tokenizer = same_as_llama_cpp(path, ["one two"])
    assert (tokenizer.bos, tokenizer.eos, tokenizer.stops) == (1, 2, {2})


def test_a_text_without_bos_in_the_vocabulary_has_none(tmp_path: Path) -> None:
    data = copy_tokenizer("tiny-qwen3", tmp_path)
    save(tmp_path, data, add_bos_token=True)
    _, path = vocab_gguf(tmp_path, 2048)
    assert same_as_llama_cpp(path, ["Hello"]).bos is None


def test_damaged_vocabularies_are_refused() -> None:
    good = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert Tokenizer(good).encode("ab") == [2]
    for change, message in (
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 values for 3 tokens"),
        ({"tokenizer.ggml.merges": []}, "merges is missing"),
        ({"tokenizer.ggml.tokens": []}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens is not an array of str"),
        ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokens is not an array of str"),
        ({"tokenizer.ggml.token_type": ["1", "1", "1"]}, "token_type is not an array of int"),
        ({"tokenizer.ggml.token_type": 3}, "token_type is not an array of int"),
        ({"tokenizer.ggml.merges": [1]}, "merges is not an array of str"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, r"tokenizer.ggml.pre is \['gpt-2'\]"),
    ):
        with pytest.raises(BridgeError, match=message):
            Tokenizer(good | change)
    with pytest.raises(BridgeError, match="token 3: the vocabulary has 3"):
        Tokenizer(good).decode([3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0, 0.0]}, "scores has 2 values for 4 tokens"),
        ({"scores": ["0"] * 4}, "scores is not an array of float"),
        ({"tokens": [1, 2, 3, 4]}, "tokens is not an array of str"),
        ({"tokens": [["a"]] * 4}, "tokens is not an array of str"),
        *(
            ({"tokens": ["<unk>", "a", "ab", text]}, f"token 3 is a byte's, but is spelled {text!r}")
            for text in ("<0xZZ>", "<0x+1>", "<0x4>", "4", "")
        ),
    ],
)
def test_damaged_sentencepiece_vocabularies_are_refused(change: dict[str, list], message: str) -> None:
    good = {"model": "llama", "tokens": ["<unk>", "a", "ab", "<0x62>"], "token_type": [2, 1, 1, 6], "scores": [0.0] * 4,
            "add_bos_token": False}  # fmt: skip

    def tokenizer(**values: Any) -> Tokenizer:
        return Tokenizer({f"tokenizer.ggml.{key}": value for key, value in (good | values).items()})

    assert tokenizer(add_space_prefix=False).encode("abba") == [2, 3, 1]
    assert tokenizer(add_space_prefix=False, unknown_token_id="?").encode("c") == [0]
    with pytest.raises(BridgeError, match=re.escape(message)):
        tokenizer(**change)

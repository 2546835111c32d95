"""The name of the pre-tokenizer: recognized from tokenizer.json's own rules, and right in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError, spelled
from bridge.gguf_file import pretokenizers
from bridge.models.tokenizer.pretokenizer import recognize
from bridge.runtime.tokenizer.bpe import pre_tokenizer
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.support.tiny_vocab import vocab_gguf, vocabulary
from tests.support.tokenizers_by_hand import GPT4O

tokenizers = pytest.importorskip("tokenizers")


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def byte_level(use_regex: bool = False, prefix: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


DIGITS = {"type": "Digits", "individual_digits": True}

# The rules as the models' tokenizer.json files spell them
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}"
    "| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
KIMI = (rf"[\p{{Han}}]+|{CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+").replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
JAIS2 = LLAMA3[: -len(r"|\s+(?!\S)|\s+")] + (
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "]+"
)
DEEPSEEK_LLM = (
    split("[\r\n]"),
    split(DEEPSEEK_LETTERS),
    split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    split("\\s+$"),
    split(CJK),
    DIGITS,
    byte_level(),
)

TRINITY_DIGITS = (
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
    r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
    r"\A\p{Nd}{3}|\G\p{Nd}{3}",
)
TRINITY_SCRIPTS = (
    r"(?:[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uf900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF]+|[\u0E00-\u0E7F]+"
    r"|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+|[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|[\uAC00-\uD7AF\u1100-\u11FF]+)"
)
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
SPARK = DEEPSEEK_V3.replace("+[\r\n]*|\\s*[\r\n]+|", "+|[\r\n]|")

RULES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "llama-bpe": ([split(LLAMA3), byte_level()], True),
    "smaug-bpe": ([split(LLAMA3), byte_level()], False),
    "qwen2": ([split(QWEN2), byte_level()], False),
    "qwen35": ([split(QWEN35), byte_level()], False),
    "gpt-2": ([byte_level(use_regex=True)], False),
    "smollm": ([DIGITS, byte_level(use_regex=True)], False),
    "tekken": ([split(TEKKEN), byte_level()], True),
    "gpt-4o": ([split(GPT4O), byte_level()], False),
    "deepseek-llm": (list(DEEPSEEK_LLM), False),
    "deepseek-coder": (
        [split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split(CJK), DIGITS, byte_level()],
        False,
    ),
    "deepseek-v3": (
        [split("\\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(DEEPSEEK_V3), byte_level()],
        False,
    ),
    "seed-coder": ([split(SEED), byte_level()], False),
    "bailingmoe": ([split(BAILING), byte_level()], False),
    "falcon": (
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(use_regex=True),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ],
        False,
    ),
    "minicpm5": ([split("\\p{N}{1,3}"), split(LLAMA3.replace("{1,3}", "+")), byte_level()], True),
    "kimi-k2": ([split(KIMI), byte_level()], False),
    "exaone-moe": ([split(EXAONE_MOE), byte_level()], False),
    "jais-2": ([split(JAIS2), byte_level()], False),
    "tiny_aya": ([split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(GPT4O), byte_level()], False),
    "superbpe": ([split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), byte_level()], False),
    "bloom": ([split(BLOOM), byte_level()], False),
    "viking": ([split(BLOOM), DIGITS, byte_level()], False),
    "laguna": ([split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), split(QWEN2), byte_level()], False),
    "afmoe": ([*map(split, (*TRINITY_DIGITS, TRINITY_SCRIPTS, DEEPSEEK_V3)), byte_level()], False),
    "youtu": ([split(YOUTU), split(GPT4O.replace("{1,3}", "")), byte_level()], True),
    "spark2_5": (
        [split("\\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(SPARK), DIGITS, byte_level()],
        False,
    ),
}
OTHERWISE = {"laguna": "\r"}  # what llama.cpp cuts otherwise than the models' tokenizer.json
TEXTS = [
    "Hello world, it's 1234567 o'clock; don't say 3.14 or WE'LL see 12 345.",
    "  two  spaces\n\n\nthree lines\t\ttabs \r\n end  ",
    "def f(x):\n    return x[0] + 'a' if x != {} else None  # done\n",
    "Ünïcödé naïve café, Ελληνικά, кириллица и слова.",
    "日本語のテキスト、中文文本 한국어",
    "🙂 emoji 👍🏽 and — dashes… “quotes”",
    "",
    " ",
    "a",
]


def tokenizer_json(pre: list[dict[str, Any]], ignore_merges: bool) -> dict[str, Any]:
    """A byte-level BPE trained within the words that the rules cut."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre} if len(pre) > 1 else pre[0]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = ignore_merges
    data["decoder"] = byte_level(use_regex=True)
    return data


@pytest.mark.parametrize("name", RULES)
def test_recognized_rules_cut_text_in_llama_cpp_as_in_tokenizers(name: str, tmp_path: Path) -> None:
    data = tokenizer_json(*RULES[name])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    outline, path = vocab_gguf(tmp_path, len(data["model"]["vocab"]))
    assert vocabulary(outline)["pre"] == name
    assert outline.notes == []
    reference = tokenizers.Tokenizer.from_str(json.dumps(data))
    with LlamaCpp(path) as loaded:
        for text in (text for text in TEXTS if not (name in OTHERWISE and OTHERWISE[name] in text)):
            assert loaded.tokenize(text) == reference.encode(text).ids, text


@pytest.mark.parametrize("name", [name for name, rules in pretokenizers.RULES.items() if rules.byte_level])
def test_the_rules_that_a_name_gives_a_tokenizer_json_are_recognized(name: str) -> None:
    rules = pretokenizers.RULES[name]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = pre_tokenizer(rules.of_tokenizer_json)
    found, notes = recognize(json.loads(fast.to_str())["pre_tokenizer"], rules.ignore_merges, [])
    same = pretokenizers.RULES[found]
    assert (same.of_tokenizer_json, same.ignore_merges) == (rules.of_tokenizer_json, rules.ignore_merges)
    assert notes == []


def test_removed_and_inverted_is_the_same_split_as_isolated() -> None:
    pre = {"type": "Sequence", "pretokenizers": [split(LLAMA3, "Removed", True), byte_level()]}
    assert recognize(pre, True, []) == ("llama-bpe", [])


def test_a_pair_of_rules_and_ignore_merges_that_llama_cpp_lacks_is_noted() -> None:
    pre = {"type": "Sequence", "pretokenizers": [split(QWEN2), byte_level()]}
    name, notes = recognize(pre, True, [])
    assert name == "qwen2"
    assert "ignore_merges is true" in notes[0]


@pytest.mark.parametrize(
    "pre",
    [
        {"type": "Sequence", "pretokenizers": [split(r"\w+|\W+"), byte_level()]},
        {"type": "Sequence", "pretokenizers": [split(LLAMA3, "MergedWithNext"), byte_level()]},
        {"type": "Sequence", "pretokenizers": [split(LLAMA3), byte_level(prefix=True)]},
        {"type": "Whitespace"},
        None,
    ],
)
def test_unknown_rules_are_refused_with_the_rules_and_the_option(pre: dict[str, Any] | None) -> None:
    with pytest.raises(BridgeError, match="pre='NAME'") as error:
        recognize(pre, False, [])
    if pre and pre["type"] == "Sequence":
        assert pre["pretokenizers"][0]["pattern"]["Regex"] in str(error.value)
    with spelled(lambda name, value: f"--{name} {value}"), pytest.raises(BridgeError, match="--pre NAME"):
        recognize(pre, False, [])


def test_deepseek_rules_with_tokens_of_several_digits_are_not_taken_for_llama_cpps() -> None:
    pre = {"type": "Sequence", "pretokenizers": list(DEEPSEEK_LLM)}
    assert recognize(pre, False, ["1", "2"])[0] == "deepseek-llm"
    with pytest.raises(BridgeError, match="pre='NAME'"):
        recognize(pre, False, ["1", "12"])


def test_pre_overrides_what_is_recognized(tmp_path: Path) -> None:
    data = tokenizer_json([split(r"\w+|\W+"), byte_level()], False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    outline, _ = vocab_gguf(tmp_path, len(data["model"]["vocab"]), pre="qwen2")
    assert vocabulary(outline)["pre"] == "qwen2"

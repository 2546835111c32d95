"""tokenizer.ggml.pre: which of llama.cpp's pre-tokenizers splits text as tokenizer.json's rules do.

A byte-level BPE first cuts the text into words, and merges only within them. llama.cpp has the
cutting rules compiled in, under names; a wrong name gives a working model of lower quality. So the
rules themselves are compared, after bringing them to one notation:

    split       Split(regex, Isolated); (Removed, invert) is the same where the regex matches everything
    digits      Digits: one by one, or as a run
    bytes       ByteLevel; with use_regex it applies GPT-2's own regex
    punctuation Punctuation(Contiguous)

Several names stand for the same cutting rule and differ in ignore_merges: whether a word that is a
token is taken whole before any merge is tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bridge.errors import BridgeError

Step = tuple[str, str]

# the parts that the regexes of this field are made of
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK, _KANA = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_PUNCTUATION}|{_SPACES}"


def _o200k(contractions: str, digits: str) -> str:
    words = (rf"{_UPPER}*{_LOWER}+", rf"{_UPPER}+{_LOWER}*")
    cased = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contractions}" for word in words)
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_BYTES = ("bytes", "plain")
_GPT2_BYTES = ("bytes", "regex")
_ONE_DIGIT, _DIGIT_RUN = ("digits", "one"), ("digits", "run")


def _split(regex: str) -> Step:
    return ("split", regex)


# rules -> (name where ignore_merges is false, name where it is true); None: llama.cpp has no such pair
_NAMES: dict[tuple[Step, ...], tuple[str | None, str | None]] = {
    (_split(_cl100k(r"\p{N}{1,3}")), _BYTES): ("smaug-bpe", "llama-bpe"),
    (_split(_cl100k(r"\p{N}")), _BYTES): ("qwen2", None),
    (_split(_QWEN35), _BYTES): ("qwen35", None),
    (_split(_o200k("", r"\p{N}")), _BYTES): (None, "tekken"),
    (_split(_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")), _BYTES): ("gpt-4o", None),
    (_split(_SEED_CODER), _BYTES): ("seed-coder", None),
    (_split(_BAILING), _BYTES): ("bailingmoe", None),
    (_split(r"\p{N}{1,3}"), _split(f"[{_CJK}{_KANA}]+"), _split(_DEEPSEEK_V3), _BYTES): ("deepseek-v3", None),
    (_split(r"\p{N}{1,3}"), _split(_cl100k(r"\p{N}+")), _BYTES): (None, "minicpm5"),
    (_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(_DEEPSEEK_CJK), _ONE_DIGIT, _BYTES): (
        "deepseek-coder",
        None,
    ),
    (_GPT2_BYTES,): ("gpt-2", None),
    (_ONE_DIGIT, _GPT2_BYTES): ("smollm", None),
    (("punctuation", "contiguous"), _GPT2_BYTES, _DIGIT_RUN, _split("[0-9][0-9][0-9]")): ("falcon", None),
}

# DeepSeek's second rule spells out a table of letters; its ends, and what surrounds it, are telling enough
_DEEPSEEK_LLM = (
    _split(r"[\r\n]"),
    ("split", "letters"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split(_DEEPSEEK_CJK),
)


def recognize(pre_tokenizer: dict[str, Any] | None, ignore_merges: bool, vocab: Iterable[str]) -> tuple[str, list[str]]:
    """The name for tokenizer.ggml.pre, and notes.

    pre_tokenizer   of tokenizer.json
    ignore_merges   of its BPE model
    vocab           the tokens, byte-level

    Raises:
        BridgeError: the rules are not among those known here; it shows them and names --pre.
    """
    steps = tuple(_steps(pre_tokenizer))
    plain, whole = _NAMES.get(steps, (None, None))
    if plain is None and whole is None and _is_deepseek_llm(steps, vocab):
        plain = "deepseek-llm"
    name = whole if ignore_merges else plain
    if name is not None:
        return name, []
    if other := plain or whole:
        return other, [
            f"the tokenizer's ignore_merges is {str(ignore_merges).lower()}, which llama.cpp does not offer with "
            f"its pre-tokenizer {other!r}: rare words may be cut differently"
        ]
    raise BridgeError(
        f"tokenizer.json: none of llama.cpp's pre-tokenizers known here has these rules: {_show(pre_tokenizer)}; "
        "give --pre NAME with the name that llama.cpp's own converter uses for this tokenizer"
    )


def _is_deepseek_llm(steps: tuple[Step, ...], vocab: Iterable[str]) -> bool:
    if len(steps) != len(_DEEPSEEK_LLM) + 2 or steps[-1] != _BYTES or steps[-2][0] != "digits":
        return False
    letters = steps[1][1]
    if not (letters.startswith(r"\s?[A-Za-z\u00b5") or letters.startswith("\\s?[A-Za-z\u00b5")):
        return False
    if any(step != rule for step, rule in zip(steps, _DEEPSEEK_LLM, strict=False) if rule[1] != "letters"):
        return False
    # llama.cpp cuts digits as runs: the same thing as one by one where no token joins two
    return steps[-2] == _DIGIT_RUN or not any(len(token) > 1 and token.isdecimal() for token in vocab)


def _steps(node: dict[str, Any] | None) -> Iterable[Step]:
    kind = (node or {}).get("type")
    if node is None:
        return
    if kind == "Sequence":
        for part in node.get("pretokenizers", []):
            yield from _steps(part)
    elif kind == "Split":
        pattern = node.get("pattern", {})
        isolated = (node.get("behavior"), bool(node.get("invert"))) in (("Isolated", False), ("Removed", True))
        yield ("split" if isolated and "Regex" in pattern else "other", _notation(pattern.get("Regex", str(pattern))))
    elif kind == "ByteLevel" and not node.get("add_prefix_space"):
        yield _GPT2_BYTES if node.get("use_regex", True) else _BYTES
    elif kind == "Digits":
        yield _ONE_DIGIT if node.get("individual_digits") else _DIGIT_RUN
    elif kind == "Punctuation" and node.get("behavior") == "Contiguous":
        yield ("punctuation", "contiguous")
    else:
        yield ("other", json.dumps(node, sort_keys=True))


def _notation(regex: str) -> str:
    """One spelling of a regex: line ends escaped."""
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def _show(node: dict[str, Any] | None) -> str:
    return " then ".join(f"{kind} {rule}" for kind, rule in _steps(node)) or "none"

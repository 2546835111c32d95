"""tokenizer.ggml.pre: the pre-tokenizer of llama.cpp that splits text by the rules in tokenizer.json.

The rules are compiled into llama.cpp, under names (`bridge.gguf_file.pretokenizers`); a wrong name gives
a working model of lower quality. So the rules themselves are compared, in one notation:

    split       Split(regex, Isolated); (Removed, invert) is the same where the regex matches everything
    next        Split(regex, MergedWithNext)
    digits      Digits: one by one, or as a run
    bytes       ByteLevel; with use_regex it applies GPT-2's own regex
    punctuation Punctuation(Contiguous)
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.pretokenizers import (
    BYTES,
    CONTRACTIONS,
    DEEPSEEK_LLM,
    DIGIT_RUN,
    GPT2_BYTES,
    ONE_DIGIT,
    RULES,
    Step,
)

_SPLITS = {("Isolated", False): "split", ("Removed", True): "split", ("MergedWithNext", False): "next"}
_NUMBERED = re.compile(r"\\u([0-9A-Fa-f]{4})")
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # the usual spelling of CONTRACTIONS


def recognize(pre_tokenizer: dict[str, Any] | None, ignore_merges: bool, vocab: Iterable[str]) -> tuple[str, list[str]]:
    """The name for tokenizer.ggml.pre, and notes.

    pre_tokenizer   of tokenizer.json
    ignore_merges   of its BPE model
    vocab           the tokens, byte-level

    Raises:
        BridgeError: the rules are unknown; the message shows them and names `pre`.
    """
    steps = tuple(_steps(pre_tokenizer))
    known = tuple((kind, rule.replace(_ANY_CASE, CONTRACTIONS)) for kind, rule in steps)
    if _is_deepseek_llm(steps, vocab):
        known = RULES["deepseek-llm"].of_tokenizer_json
    name, other = (_names().get((known, merges)) for merges in (ignore_merges, not ignore_merges))
    if name is not None:
        return name, []
    if other is not None:
        return other, [
            f"the tokenizer's ignore_merges is {str(ignore_merges).lower()}, which llama.cpp does not offer with "
            f"its pre-tokenizer {other!r}: rare words may be split differently"
        ]
    shown = " then ".join(f"{kind} {rule}" for kind, rule in steps) or "none"
    raise BridgeError(
        f"tokenizer.json: unknown pre-tokenizer rules: {shown}; give {parameter('pre', 'NAME')}, "
        "the name that llama.cpp's converter uses for this tokenizer"
    )


@cache
def _names() -> dict[tuple[tuple[Step, ...], bool], str]:
    """Rules and ignore_merges -> the first name that has them."""
    of_names = ((name, rules) for name, rules in reversed(RULES.items()) if rules.byte_level)
    return {(rules.of_tokenizer_json, rules.ignore_merges): name for name, rules in of_names}


def _is_deepseek_llm(steps: tuple[Step, ...], vocab: Iterable[str]) -> bool:
    if len(steps) != len(DEEPSEEK_LLM) + 2 or steps[-1] != BYTES or steps[-2][0] != "digits":
        return False
    letters = steps[1][1]
    if not (letters.startswith(r"\s?[A-Za-z\u00b5") or letters.startswith("\\s?[A-Za-z\u00b5")):
        return False
    if any(step != rule for step, rule in zip(steps, DEEPSEEK_LLM, strict=False) if rule[1] != "letters"):
        return False
    # llama.cpp splits off runs of digits, which is the same as single digits if no token has two
    return steps[-2] == DIGIT_RUN or not any(len(token) > 1 and token.isdecimal() for token in vocab)


def _steps(node: dict[str, Any] | None) -> Iterable[Step]:
    kind = (node or {}).get("type")
    if node is None:
        return
    if kind == "Sequence":
        for part in node.get("pretokenizers", []):
            yield from _steps(part)
    elif kind == "Split":
        pattern = node.get("pattern", {})
        # one spelling of line ends, and of characters that have a number
        regex = pattern.get("Regex", str(pattern)).replace("\r", r"\r").replace("\n", r"\n")
        regex = _NUMBERED.sub(lambda number: chr(int(number[1], 16)), regex)
        kind = _SPLITS.get((str(node.get("behavior")), bool(node.get("invert"))), "other")
        yield (kind if "Regex" in pattern else "other", regex)
    elif kind == "ByteLevel" and not node.get("add_prefix_space"):
        yield GPT2_BYTES if node.get("use_regex", True) else BYTES
    elif kind == "Digits":
        yield ONE_DIGIT if node.get("individual_digits") else DIGIT_RUN
    elif kind == "Punctuation" and node.get("behavior") == "Contiguous":
        yield ("punctuation", "contiguous")
    else:
        yield ("other", json.dumps(node, sort_keys=True))

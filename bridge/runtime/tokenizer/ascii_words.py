"""Words of ASCII texts, cut by Python's own regular expressions, which are there at once.

The `tokenizers` library, whose notation the rules are in (`bridge.gguf_file.pretokenizers`), takes 20 ms to import. Its
regular expressions (Oniguruma's) mean the same in Python's, for ASCII, once their categories of Unicode are spelled
out, but for a few things: then the library has to do it.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache

from bridge.gguf_file.pretokenizers import BYTES, DIGIT_RUN, GPT2, GPT2_BYTES, ONE_DIGIT, Step, byte_of

_NONE = "\u0100"  # of a category that ASCII has no character of
_CATEGORIES = {
    "L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": "$+<=>^`|~",
    "M": _NONE, "Lt": _NONE, "Lm": _NONE, "Lo": _NONE, "Han": _NONE,
}  # fmt: skip
_SIGNS = re.compile(r"\\p\{(?P<category>\w+)\}|\\(?P<escaped>.)|(?P<plain>\[\^?|.)", re.DOTALL)
_SAME_ESCAPES = frozenset("sSdbArntu")  # letters; what else is escaped stands for itself


def words_of(steps: Sequence[Step], text: str) -> list[str] | None:
    """The words of a text, as `bpe.pre_tokenizer` cuts it; None where that is not sure."""
    if not text.isascii():
        return None
    words = [text] if text else []
    for kind, detail in steps:
        regex = _REGEXES.get((kind, detail), detail if kind == "split" else None)
        if regex is not None:
            pattern = _pattern(regex)
            if pattern is None:
                return None
            words = [piece for word in words for piece in _pieces(pattern, word)]
        if kind == "bytes":
            words = [word.translate(_spelling()) for word in words]
        elif regex is None:
            return None
    return words


_REGEXES = {ONE_DIGIT: "[0-9]", DIGIT_RUN: "[0-9]+", GPT2_BYTES: GPT2, BYTES: None}


def _pieces(pattern: re.Pattern[str], word: str) -> Iterator[str]:
    """What a pattern finds, and what lies between."""
    end = 0
    for match in pattern.finditer(word):
        yield from filter(None, (word[end : match.start()], match[0]))
        end = match.end()
    if end < len(word):
        yield word[end:]


@cache
def _pattern(regex: str) -> re.Pattern[str] | None:
    """A regular expression of Oniguruma's as one of Python's; None where it may mean something else."""
    parts, within = [], False  # a class of characters
    for sign in _SIGNS.finditer(regex):
        category, escaped, plain = sign["category"], sign["escaped"], sign["plain"] or ""
        classes = within and (plain.startswith("[") or plain == "&")  # one in another, what two have in common
        ends = not within and plain in {"^", "$"}  # of lines, not of the text
        strange = escaped is not None and escaped.isalnum() and escaped not in _SAME_ESCAPES
        if classes or ends or strange or (category is not None and category not in _CATEGORIES):
            return None
        within = plain.startswith("[") or (within and plain != "]")
        ranges = _CATEGORIES.get(category or "", "")
        parts.append(sign[0] if category is None else ranges if within else f"[{ranges}]")
    return re.compile("".join(parts), re.ASCII)


@cache
def _spelling() -> dict[int, str]:
    return {byte: character for character, byte in byte_of().items() if byte < 128}

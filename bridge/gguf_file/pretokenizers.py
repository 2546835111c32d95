"""The meaning of llama.cpp's names of pre-tokenizers, for the converter and the runtime.

A byte-level BPE first cuts a text into words, and merges only within them. tokenizer.ggml.pre names the
cutting rules, which are compiled into llama.cpp; here they are in the notation of `tokenizers`:

    split       Split(regex, Isolated)
    digits      Digits: one by one, or as a run
    bytes       ByteLevel; "regex" applies GPT-2's own regex too
    punctuation Punctuation(Contiguous)

Several names have the same cutting rules and differ in ignore_merges: whether a word that is itself a
token is used as a whole before any merge is tried.
"""

from functools import cache

Step = tuple[str, str]

# the building blocks of the regexes
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

BYTES = ("bytes", "plain")
GPT2_BYTES = ("bytes", "regex")
ONE_DIGIT, DIGIT_RUN = ("digits", "one"), ("digits", "run")


def _split(regex: str) -> Step:
    return ("split", regex)


# rules -> (name if ignore_merges is false, name if it is true); None: llama.cpp has no such pair
NAMES: dict[tuple[Step, ...], tuple[str | None, str | None]] = {
    (_split(_cl100k(r"\p{N}{1,3}")), BYTES): ("smaug-bpe", "llama-bpe"),
    (_split(_cl100k(r"\p{N}")), BYTES): ("qwen2", None),
    (_split(_QWEN35), BYTES): ("qwen35", None),
    (_split(_o200k("", r"\p{N}")), BYTES): (None, "tekken"),
    (_split(_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")), BYTES): ("gpt-4o", None),
    (_split(_SEED_CODER), BYTES): ("seed-coder", None),
    (_split(_BAILING), BYTES): ("bailingmoe", None),
    (_split(r"\p{N}{1,3}"), _split(f"[{_CJK}{_KANA}]+"), _split(_DEEPSEEK_V3), BYTES): ("deepseek-v3", None),
    (_split(r"\p{N}{1,3}"), _split(_cl100k(r"\p{N}+")), BYTES): (None, "minicpm5"),
    (*map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)), ONE_DIGIT, BYTES): ("deepseek-coder", None),
    (GPT2_BYTES,): ("gpt-2", None),
    (ONE_DIGIT, GPT2_BYTES): ("smollm", None),
    (("punctuation", "contiguous"), GPT2_BYTES, DIGIT_RUN, _split("[0-9][0-9][0-9]")): ("falcon", None),
}

# DeepSeek's second rule spells out a table of letters; its ends and its neighbours are enough to recognize it
DEEPSEEK_LLM = (
    _split(r"[\r\n]"),
    ("split", "letters"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split(_DEEPSEEK_CJK),
)

# llama.cpp's rules if a file names none (as files of 2023), or "default"
_DEFAULT = (
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    DIGIT_RUN,
    _split("[0-9][0-9][0-9]"),
    BYTES,
)

# deepseek-llm's spelled-out table: the letters that have a case
_CASED = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"

# other names of the same rules in llama.cpp
_ALIASES = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "gpt-2": ("phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum",
              "modern-bert", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    "smollm": ("codeshell", "starcoder", "refact", "command-r", "exaone", "minerva-7b"),
    "qwen2": ("deepseek-r1-qwen", "kormo", "stablelm2", "megrez"),
    "gpt-4o": ("llama4", "kanana2"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm"),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
}  # fmt: skip
# names that imply a BOS unless tokenizer.ggml.add_bos_token is set
_WITH_BOS = {"llama-bpe", "tekken"}


@cache
def byte_of() -> dict[str, int]:
    """GPT-2's 256 printable characters -> the bytes that they represent."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def rules_of(pre: str) -> tuple[tuple[Step, ...], bool, bool] | None:
    """The meaning of a tokenizer.ggml.pre: cutting rules, ignore_merges, default of add_bos. None: an unknown name."""
    name = next((own for own, others in _ALIASES.items() if pre in others), pre)
    if name == "default":
        return _DEFAULT, False, False
    if name == "deepseek-llm":
        steps = tuple(("split", _CASED) if rule[1] == "letters" else rule for rule in DEEPSEEK_LLM)
        return (*steps, DIGIT_RUN, BYTES), False, False
    for steps, (plain, whole) in NAMES.items():
        if name in (plain, whole):
            return steps, name == whole, name in _WITH_BOS
    return None

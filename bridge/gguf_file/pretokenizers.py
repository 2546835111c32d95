"""The meaning of llama.cpp's names of pre-tokenizers, for the converter and the runtime.

A BPE first cuts a text into words, and merges only within them. tokenizer.ggml.pre names the cutting rules, which are
compiled into llama.cpp (src/llama-vocab.cpp, and src/unicode.cpp for those it cuts by hand); here they are in the
notation of `tokenizers`:

    split       Split(regex, Isolated)
    next        Split(regex, MergedWithNext): a word begins with each match
    digits      Digits: one by one, or as a run
    bytes       ByteLevel; "regex" applies GPT-2's own regex too
    punctuation Punctuation(Contiguous)

For some names llama.cpp cuts otherwise than the tokenizer.json of the models that have them: it tells upper from lower
case in ASCII alone or not at all, and it ends some words at combining marks. Those names have both rules here.
"""

from functools import cache
from typing import NamedTuple

Step = tuple[str, str]

# the building blocks of the regexes
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+"
_SPACES = rf"{_LINES}|\s+(?!\S)|\s+"
_CJK, _KANA = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# where a rule names no category, llama.cpp finds no white space beyond ASCII in a range of characters
_DEEPSEEK_VISIBLE = f"[{_DEEPSEEK_CJK[:-1]}&&\\S]+"
# the blocks that llama.cpp takes for Han
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f"
)

# classes of letters as (those of an upper-case part, those of a lower-case part)
_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_CASES = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_ASCII_CASES_OR_MARKS = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
_NOT_HAN = tuple(rf"{case[:-1]}&&[^\p{{Han}}]]" for case in _CASES)


def _cl100k(digits: str, contractions: str = f"{CONTRACTIONS}|", spaces: str = _SPACES) -> str:
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_PUNCTUATION}|{spaces}"


def _cased(cases: tuple[str, ...], contractions: str) -> str:
    upper, lower = cases
    words = (f"{upper}*{lower}+", f"{upper}+{lower}*")
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contractions}" for word in words)


def _o200k(words: str, digits: str) -> str:
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK_V3 = rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}"
_SPARK = rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2_SPACES = "|".join(
    [_LINES, *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)|\s{1}"]
)
_JOINERS = "\u200c|\u200d"
_K2_HORIZON = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}|\p{{M}}|{_JOINERS})+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
)
_YOUTU = (
    f"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[{_CJK}{_KANA}]+"
)
_AFMOE = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
# the same scripts, each in words of its own
_AFMOE_SCRIPTS = (
    "(?:[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+|[\u0e00-\u0e7f]+"
    "|[\u0e80-\u0eff]+|[\u1780-\u17ff]+|[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+|[\uac00-\ud7af\u1100-\u11ff]+)"
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

BYTES = ("bytes", "plain")
GPT2_BYTES = ("bytes", "regex")
ONE_DIGIT, DIGIT_RUN = ("digits", "one"), ("digits", "run")


def _split(*regexes: str) -> tuple[Step, ...]:
    return tuple(("split", regex) for regex in regexes)


def _bytes(*regexes: str) -> tuple[Step, ...]:
    return (*_split(*regexes), BYTES)


# groups of three digits, counted from the end of a run
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_AFMOE_THREES = (
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}", r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
    r"\A\p{Nd}{3}|\G\p{Nd}{3}",
)  # fmt: skip
# the same in llama.cpp, which leaves the first group with what lies before it; in time linear in the run
_TEXT_AND_THREES = (
    r"[^\p{N}]+\p{N}*|\p{N}+", r"\A[^\p{N}]*+(?:\p{N}{1,2}(?=(?:\p{N}{3})*+\z)|\p{N}{3})|\p{N}{3}"
)  # fmt: skip
_SUPERBPE_THREES = r"(?=(\d{3})+(?!\d))"
_FIRST_OF_THREES = r"[0-9]{1,2}(?=(?:[0-9]{3})*+(?![0-9]))"
_OTHERS = rf"(?:[^0-9]+(?:{_FIRST_OF_THREES})?)"
_ASCII_THREES = rf"(?:\A{_FIRST_OF_THREES}|[0-9]{{3}}){_OTHERS}*|{_OTHERS}+"

_DEEPSEEK_CODER = _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# DeepSeek's second rule spells out a table of letters; its ends and its neighbours are enough to recognize it
DEEPSEEK_LLM = (*_split(r"[\r\n]"), ("split", "letters"), *_split(_DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_CJK))
# that table: the letters that have a case, without these blocks
_CASED = (
    "\\s?[[\\p{Lu}\\p{Ll}\\p{Lt}]&&[^\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua78f-\ua7ff\uab30-\uab6f"
    "\U00010530-\U0010ffff]]+"
)
_CHAMELEON = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")


class Rules(NamedTuple):
    """What a tokenizer.ggml.pre means.

    steps          how llama.cpp cuts a text into words
    published      how the tokenizer.json of such models cuts it, where that differs
    ignore_merges  a word that is itself a token is used as a whole before any merge is tried; of characters, only a
                   run of newlines
    add_bos        the default of tokenizer.ggml.add_bos_token
    force_bos      BOS whatever the file says
    byte_level     words are bytes, not characters with U+2581 for a space
    """

    steps: tuple[Step, ...]
    published: tuple[Step, ...] = ()
    ignore_merges: bool = False
    add_bos: bool = False
    force_bos: bool = False
    byte_level: bool = True

    @property
    def of_tokenizer_json(self) -> tuple[Step, ...]:
        """How the models' own tokenizer.json cuts a text."""
        return self.published or self.steps


_LLAMA3 = _bytes(_cl100k(r"\p{N}{1,3}"))
_LINES_APART = r"[^\n]+|[\n]+"
_CASED_AND = _cased(_CASES, f"{CONTRACTIONS}?")
_GPT4O = _o200k(_CASED_AND, r"\p{N}{1,3}")
_ASCII_CASED_AND = _cased(_ASCII_CASES, f"{CONTRACTIONS}?")
_ASCII_CASED_OR_MARKS_AND = _cased(_ASCII_CASES_OR_MARKS, f"{CONTRACTIONS}?")
_UNCASED_AND = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{CONTRACTIONS}?"
_KIMI_WORDS = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{CONTRACTIONS}?"
_KIMI_CASED_WORDS = rf"[\p{{Han}}]+|{_cased(_NOT_HAN, f'{CONTRACTIONS}?')}"
_KIMI_REST = rf"\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"

# names that mean the same -> what; the first of them is the one that the converter writes
_TABLE = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Rules(
        _LLAMA3, ignore_merges=True, add_bos=True
    ),
    "glm4 glm5": Rules(_LLAMA3, ignore_merges=True),
    "smaug-bpe dbrx chatglm-bpe": Rules(_LLAMA3),
    "jais-2": Rules(_bytes(_cl100k(r"\p{N}{1,3}", spaces=_JAIS2_SPACES))),
    "minicpm5": Rules(_bytes(r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Rules(_bytes(_cl100k(r"\p{N}"))),
    "ufakzeka": Rules(_bytes(_cl100k(r"\p{N}", contractions=""))),
    "laguna": Rules(
        _bytes(_LINES_APART, _cl100k(r"\p{N}")),
        published=(("next", r"(?:\r?\n)+(?!\r?\n)"), *_bytes(_cl100k(r"\p{N}"))),
    ),
    "qwen35": Rules(_bytes(_QWEN35)),
    "k2-horizon": Rules(_bytes(_K2_HORIZON)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Rules(
        _bytes(_o200k(_ASCII_CASED_AND, r"\p{N}{1,3}")), published=_bytes(_GPT4O)
    ),
    "granite-embed-multi-97m": Rules(_bytes(_o200k(_ASCII_CASED_OR_MARKS_AND, r"\p{N}{1,3}")), ignore_merges=True),
    "tekken": Rules(
        _bytes(_o200k(_cased(_ASCII_CASES, ""), r"\p{N}")), published=_bytes(_o200k(_cased(_CASES, ""), r"\p{N}")),
        ignore_merges=True, add_bos=True,
    ),
    "tiny_aya cohere2moe": Rules(
        _bytes(*_TEXT_AND_THREES, _o200k(_UNCASED_AND, r"\p{N}{1,3}")), published=_bytes(_THREES, _GPT4O)
    ),
    "youtu": Rules(
        _bytes(_YOUTU, _o200k(_UNCASED_AND, r"\p{N}")), published=_bytes(_YOUTU, _o200k(_CASED_AND, r"\p{N}")),
        ignore_merges=True,
    ),
    "kimi-k2": Rules(_bytes(f"{_KIMI_WORDS}|{_KIMI_REST}"), published=_bytes(f"{_KIMI_CASED_WORDS}|{_KIMI_REST}")),
    "seed-coder": Rules(_bytes(_SEED_CODER)),
    "bailingmoe bailingmoe2 llada-moe": Rules(_bytes(_BAILING)),
    "exaone-moe": Rules(_bytes(_EXAONE_MOE)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Rules(_bytes(r"\p{N}{1,3}", f"[{_CJK}{_KANA}]+", _DEEPSEEK_V3)),
    "spark2_5": Rules(
        _bytes(r"\p{N}{1,3}", f"[{_CJK}{_KANA}]+", _SPARK, r"\p{N}"),
        published=(*_split(r"\p{N}{1,3}", f"[{_CJK}{_KANA}]+", _SPARK), ONE_DIGIT, BYTES),
    ),
    "afmoe": Rules(
        _bytes(*_TEXT_AND_THREES, _AFMOE, _DEEPSEEK_V3), published=_bytes(*_AFMOE_THREES, _AFMOE_SCRIPTS, _DEEPSEEK_V3)
    ),
    "deepseek-coder": Rules(
        (*_DEEPSEEK_CODER, *_split(_DEEPSEEK_VISIBLE), ONE_DIGIT, BYTES),
        published=(*_DEEPSEEK_CODER, *_split(_DEEPSEEK_CJK), ONE_DIGIT, BYTES),
    ),
    "deepseek-llm": Rules(
        _bytes(r"[\r\n]", _CASED, _DEEPSEEK_MARKS.replace("\u3000", "\u3001"), r"\s+$", _DEEPSEEK_VISIBLE, r"\p{N}+"),
        published=(*_split(r"[\r\n]", _CASED, _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_CJK), DIGIT_RUN, BYTES),
    ),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling": Rules((GPT2_BYTES,)),
    "smollm codeshell starcoder refact command-r exaone minerva-7b mellum2": Rules((ONE_DIGIT, GPT2_BYTES)),
    "bloom poro-chat gpt3-finnish": Rules(_bytes(_BLOOM)),
    "viking": Rules((*_split(_BLOOM), ONE_DIGIT, BYTES)),
    "superbpe": Rules(_bytes(r"\p{N}+", _ASCII_THREES), published=_bytes(r"\p{N}+", _SUPERBPE_THREES)),
    "chameleon": Rules((*_split(*_CHAMELEON), ONE_DIGIT, *_split(r"[\p{P}!-/:-@\[-`{-~]"), GPT2_BYTES), add_bos=True),
    "falcon": Rules(
        _bytes(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
        published=(("punctuation", "contiguous"), GPT2_BYTES, DIGIT_RUN, *_split("[0-9][0-9][0-9]")),
    ),
    # also of a file that names none, as those of 2023
    "default": Rules(_bytes(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gemma4 granite-embed-multi-311m": Rules(
        _split(_LINES_APART), ignore_merges=True, add_bos=True, force_bos=True, byte_level=False
    ),
    "sarvam-moe": Rules(_split(_LINES_APART), byte_level=False),
}  # fmt: skip
RULES: dict[str, Rules] = {name: rules for names, rules in _TABLE.items() for name in names.split()}


@cache
def byte_of() -> dict[str, int]:
    """GPT-2's 256 printable characters -> the bytes that they represent."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

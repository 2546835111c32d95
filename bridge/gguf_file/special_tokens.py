"""What llama.cpp makes of a vocabulary's special tokens when it loads a file, by their texts, whatever the file says.

The rules are compiled into llama.cpp (src/llama-vocab.cpp, llama_vocab::impl::load) and apply in this order:

    1. A token of a text for filling in the middle has that role where no key gives it to another.
    2. A reply ends at such a token for padding, a repository's name or a file's end, and at every token of `ENDS`.
    3. All these are control tokens: they are found in a prompt's markup alone, and are not part of a reply's text.
    4. The marks of gpt-oss's channels are user-defined: they are part of a reply's text.
    5. A reply ends at the tokens that the file names eos, eot and eom, too.
    6. `<|end|>` ends a part of a reply, not the reply, where `<|return|>` and `<|call|>` end one (gpt-oss), or
       `<|flush|>` and `<|calls|>` (Solar Open).
    7. `</s>` is HTML's where `<|tool_response>` ends a reply (Gemma 4) or `<|plamo:eos|>`.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import compress, count

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPECIAL = {UNKNOWN, CONTROL, USER_DEFINED}  # found in a text before it is cut into words

ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
}  # fmt: skip

# texts of each role; where a vocabulary has several of one role, llama.cpp takes any one of them, and we the first
_FILLING = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
                "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
                "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
                "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_FILLING_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_NAMED_ENDS = ("eos", "eot", "eom")
ROLES = (*_NAMED_ENDS, *_FILLING)  # whose keys the rules ask for: tokenizer.ggml.<role>_token_id

_CHANNEL_MARKS = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}
# a token does not end a reply, and is of that type, where a token of each of these sets ends one
_NO_ENDS = (
    ("<|end|>", USER_DEFINED, ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"})),
    ("</s>", NORMAL, ({"<|tool_response>", "<|plamo:eos|>"},)),
)

_TEXTS = ENDS | _CHANNEL_MARKS | {text for texts in _FILLING.values() for text in texts}


def special_tokens(
    tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]
) -> tuple[list[int], frozenset[int]]:
    """The type of each token in llama.cpp, and the ids that end a reply.

    types  of the file, by id
    ids    the file's token for each of `ROLES`, where it names one
    """
    id_of = {tokens[token]: token for token in compress(count(), map(_TEXTS.__contains__, tokens))}
    token_types = list(types)
    named = {role: token for role in ROLES if (token := ids.get(role)) is not None}
    for role, texts in _FILLING.items():
        if role not in named and (known := [id_of[text] for text in texts if text in id_of]):
            named[role], token_types[known[0]] = known[0], CONTROL
    ends = {named[role] for role in _FILLING_ENDS if role in named}
    for text in ENDS & id_of.keys():
        ends.add(id_of[text])
        token_types[id_of[text]] = CONTROL
    for text in _CHANNEL_MARKS & id_of.keys():
        token_types[id_of[text]] = USER_DEFINED
    ends |= {named[role] for role in _NAMED_ENDS if role in named}
    for text, kind, others in _NO_ENDS:
        end_texts = {tokens[token] for token in ends}
        if text in end_texts and all(end_texts & group for group in others):
            ends.remove(id_of[text])
            token_types[id_of[text]] = kind
    return token_types, frozenset(ends)


def stripping(
    tokens: Sequence[str], special: Collection[int], metadata: Mapping[str, object]
) -> tuple[frozenset[int], frozenset[int]]:
    """The ids that take white space before them in a text, and those that take it after them.

    A GGUF has no key for it: llama.cpp goes by the names of the model (general.name), its cutting rules and its
    architecture.

    special  ids of the tokens that are found in a text before it is cut into words
    """
    name, pre, architecture = (
        value if isinstance(value := metadata.get(key), str) else ""
        for key in ("general.name", "tokenizer.ggml.pre", "general.architecture")
    )

    def of(*texts: str) -> frozenset[int]:
        return frozenset(token for token in special if tokens[token] in texts)

    def has(text: str, *parts: str) -> bool:
        return any(part in text for part in parts)

    none = frozenset[int]()
    if has(pre, "jina-v2-de", "jina-v2-es", "jina-v2-code") or has(architecture, "nomic-bert-moe", "jina-bert-v3"):
        return of("<mask>"), none
    if has(name.lower(), "phi-3", "phi3"):
        return none, frozenset(special) - of("<unk>", "<s>", "<|endoftext|>")
    return (of("[MASK]") if has(name.lower(), "modern-bert") else none), none

"""A Hugging Face tokenizer as the tokenizer.* keys of a GGUF.

Five kinds reach GGUF: byte-level BPE ("gpt2": tokens and merges, see `bpe_vocabulary` and `tiktoken`),
SentencePiece BPE ("llama": tokens and scores; "gemma4": merges, see `sentencepiece`), and those of encoders, WordPiece
("bert", see `wordpiece`) and unigrams ("t5", see `unigram`), and PLaMo's ("plamo2", see `plamo`). This module
detects the kind and adds what all have: special tokens, added tokens, chat template.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.chat_template import TemplateFailed, render_chats
from bridge.gguf_file.pretokenizers import RULES
from bridge.models.config.model_config import Config
from bridge.models.tokenizer.bpe_vocabulary import byte_level_vocabulary, is_byte_level
from bridge.models.tokenizer.plamo import END_OF_TURN, plamo_vocabulary
from bridge.models.tokenizer.sentencepiece import vocabulary_by_merges, vocabulary_of_json, vocabulary_of_model
from bridge.models.tokenizer.special_tokens import add_bos_and_eos, add_special_tokens, last_of_template, text_of
from bridge.models.tokenizer.tiktoken import vocabulary_of_tiktoken
from bridge.models.tokenizer.unigram import unigram_vocabulary
from bridge.models.tokenizer.vocabulary import Added, GGUFTokenizer, Vocabulary
from bridge.models.tokenizer.wordpiece import tokenizer_of_vocab_txt, wordpiece_vocabulary
from bridge.system.storage.files import read_json, read_text, refuse_pointer

_LEAST_SHARE = 0.9  # of the embedding's rows have a token: padding is a few thousand in a hundred thousand


def read_tokenizer(
    config: Config, folder: Path, generation: Mapping[str, Any], pre: str | None, model: str = "llama"
) -> GGUFTokenizer:
    """The tokenizer of a Hugging Face directory, with as many tokens as config.json's vocab_size.

    model  tokenizer.ggml.model of a tokenizer.json with byte fallback
    pre    overrides the recognition of the pre-tokenizer

    Raises:
        BridgeError: no tokenizer, a damaged one, or one that GGUF cannot express.
    """
    try:
        return _read(config, folder, generation, pre, model)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        raise BridgeError(
            f"{folder}: a tokenizer file (tokenizer.json, tokenizer_config.json ...) is not as tokenizers and "
            f"transformers write it ({type(problem).__name__}: {problem}); take them from the original model"
        ) from problem


def _read(
    config: Config, folder: Path, generation: Mapping[str, Any], pre: str | None, by_fallback: str
) -> GGUFTokenizer:
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    data = read_json(folder / "tokenizer.json", optional=True)
    if not data and str(settings.get("tokenizer_class", "Bert")).startswith("Bert") and config.get("type_vocab_size"):
        vocab_txt = folder / "vocab.txt"
        data = tokenizer_of_vocab_txt(vocab_txt, settings) if vocab_txt.is_file() else data
    added = _added_tokens(folder, settings, data)
    if data:
        model = data.get("model") or {}
        kind = model.get("type", "BPE" if "merges" in model else None)
        if kind not in ("BPE", "WordPiece", "Unigram"):
            raise BridgeError(
                f"{folder / 'tokenizer.json'}: the tokenizer is a {kind}, only BPE, WordPiece and Unigram can be "
                f"converted; {parameter('template')} uses the tokenizer of a GGUF of this model"
            )
        if not model.get("vocab"):
            raise BridgeError(f"{folder / 'tokenizer.json'}: has no vocabulary; it is damaged, download it again")
        if kind == "WordPiece":
            vocabulary = wordpiece_vocabulary(data, added)
        elif kind == "Unigram":
            vocabulary = unigram_vocabulary(data, added)
        elif is_byte_level(data):
            vocabulary = byte_level_vocabulary(data, added, pre)
        elif by_fallback == "gemma4":
            vocabulary = vocabulary_by_merges(data, added)
        else:
            vocabulary = vocabulary_of_json(data, added)
    elif (folder / "tokenizer.jsonl").is_file():
        vocabulary = plamo_vocabulary(folder / "tokenizer.jsonl", added, config.integer("vocab_size"))
    elif (folder / "tokenizer.model").is_file():
        vocabulary = vocabulary_of_model(folder / "tokenizer.model", added)
    elif (folder / "tiktoken.model").is_file():
        vocabulary = vocabulary_of_tiktoken(folder / "tiktoken.model", added, settings, pre)
    else:
        raise BridgeError(
            f"{folder}: neither tokenizer.json nor tokenizer.model; take them from the original model, or save them "
            "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if pre is not None:
        vocabulary.pre = pre
        if pre not in RULES:
            vocabulary.notes.append(f"{parameter('pre', pre)}: unknown name, which llama.cpp may refuse")
    if vocabulary.model == "llama" and isinstance(settings.get("add_prefix_space"), bool):
        vocabulary.add_space_prefix = settings["add_prefix_space"]
    tokens, types, scores, notes = _rows(vocabulary, config.integer("vocab_size"))
    tokenizer = GGUFTokenizer(
        vocabulary.model, vocabulary.pre, tokens, types, scores, vocabulary.merges,
        add_space_prefix=vocabulary.add_space_prefix, chat_templates=read_chat_templates(folder, settings),
        lstrip=frozenset(token.id for token in added if token.lstrip and token.id < len(tokens)),
        rstrip=frozenset(token.id for token in added if token.rstrip and token.id < len(tokens)),
        notes=vocabulary.notes + notes, keys=vocabulary.keys,
    )  # fmt: skip
    # texts in GGUF are UTF-8; JSON can escape half a character, which is not
    "".join([*tokens, *(vocabulary.merges or []), *tokenizer.chat_templates.values()]).encode("utf-8")
    types = config.get("type_vocab_size", 1 if vocabulary.model in ("bert", "t5") else None)
    if types is not None:
        tokenizer.keys["tokenizer.ggml.token_type_count"] = GGUFValue(int(types), GGUFValueType.UINT32)
    add_special_tokens(tokenizer, config, folder, settings, generation, vocabulary.unk, last_of_template(data))
    add_bos_and_eos(tokenizer, data, settings)
    if vocabulary.model == "plamo2" and END_OF_TURN in tokens:
        tokenizer.ids["eot"] = tokens.index(END_OF_TURN)
    if vocabulary.model == "gemma4":
        tokenizer.add_bos = "bos" in tokenizer.ids  # llama.cpp has it always
    return tokenizer


def _added_tokens(folder: Path, settings: Mapping[str, Any], data: Mapping[str, Any]) -> list[Added]:
    """From tokenizer.json, tokenizer_config.json and added_tokens.json; the first to name an id wins."""
    by_id: dict[int, Added] = {}

    def note(token: Any, content: Any, entry: Mapping[str, Any]) -> None:
        if isinstance(content, str) and str(token).isdecimal():
            flags = (bool(entry.get(name, False)) for name in ("special", "normalized", "lstrip", "rstrip"))
            by_id.setdefault(int(token), Added(int(token), content, *flags))

    for entry in data.get("added_tokens") or []:
        note(entry.get("id"), entry.get("content"), entry)
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        note(token, entry.get("content"), entry)
    known = {token.content for token in by_id.values()}
    for content, token in read_json(folder / "added_tokens.json", optional=True).items():
        if content not in known:
            note(token, content, {})
    return sorted(by_id.values(), key=lambda token: token.id)


def highest_token(folder: Path) -> int:
    """The highest id that a directory's tokenizer.json and added tokens have; -1 where no such file is readable."""
    try:
        settings = read_json(folder / "tokenizer_config.json", optional=True)
        data = read_json(folder / "tokenizer.json", optional=True)
        ids = [token.id for token in _added_tokens(folder, settings, data)]
        vocab = (data.get("model") or {}).get("vocab", {})
        return max([*ids, *(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))], default=-1)
    except (AttributeError, TypeError, ValueError):  # `read_tokenizer` reports what is wrong
        return -1


def _rows(vocabulary: Vocabulary, size: int) -> tuple[list[str], list[int], list[float] | None, list[str]]:
    """Lists by id: gaps and the tail are filled with unused tokens, ids beyond the embedding are dropped."""
    entries, notes = vocabulary.entries, []
    if beyond := sorted(token for token in entries if token >= size):
        shown = ", ".join(entries[token][0] for token in beyond[:3])
        notes.append(f"{len(beyond)} tokens have no row in the embedding of {size} rows and are dropped: {shown}")
    elif len(entries) < _LEAST_SHARE * size:
        notes.append(
            f"the tokenizer has {len(entries)} tokens for an embedding of {size} rows; it may belong to another model"
        )
    tokens, types = [], []
    texts: set[str] = set()
    for token in range(size):
        text, kind = entries.get(token, (vocabulary.padding.format(token), int(TokenType.UNUSED)))
        while text in texts:  # llama.cpp refuses a vocabulary with duplicate texts
            text, kind = f"{text}[{token}]", int(TokenType.UNUSED)
        texts.add(text)
        tokens.append(text)
        types.append(int(kind))
    scores = vocabulary.scores
    rows = None if scores is None else [scores.get(token, -10000.0) for token in range(size)]
    return tokens, types, rows, notes


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Jinja chat templates by name; separate files take precedence over tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if value is None:
        value = read_json(folder / "chat_template.json", optional=True).get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, dict):
        templates.update({name: text for name, text in value.items() if isinstance(text, str)})
    elif isinstance(value, list):
        entries = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
        templates.update({name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)})
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _template(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        if file.is_file():
            templates[file.stem] = _template(file)
    return templates


def _template(file: Path) -> str:
    refuse_pointer(file)
    return read_text(file).removeprefix("\ufeff")


def check_chat_template(folder: Path, messages: Sequence[Mapping[str, str]]) -> None:
    """Raise BridgeError unless the chat template of a Hugging Face directory accepts a conversation."""
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    template = read_chat_templates(folder, settings).get("default")
    if template is None:
        raise BridgeError(
            f"{folder}: the checkpoint has no chat template; give the whole prompt as a text, to `gguf-bridge run -p` "
            "without --chat"
        )
    tokens = {name: text_of(settings.get(name)) or "" for name in ("bos_token", "eos_token")}
    (text,) = render_chats(template, [(messages, True)], tokens)
    if isinstance(text, TemplateFailed):
        raise BridgeError(f"{folder}: the chat template cannot be used: {text}") from text

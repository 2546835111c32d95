"""tokenizer.json and tokenizer_config.json of a GGUF's vocabulary: the inverse of `gguf_tokenizer`.

    gpt2    BPE, cut by the rules that tokenizer.ggml.pre names as the models' own tokenizer.json has them
    gemma4  BPE on characters, with byte fallback
    llama   SentencePiece's: BPE with byte fallback, whose merges are all pairs that make a token, by the token's score
    bert    WordPiece, with the normalizer that two keys name
    t5      unigrams, with their table of replacements

Control tokens become special tokens, user-defined ones other added tokens; both are matched before any cutting.
"""

import json
from collections.abc import Mapping
from itertools import compress
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.gguf_file.special_tokens import USER_DEFINED
from bridge.models.tokenizer.sentencepiece import SPACE
from bridge.runtime.tokenizer import Tokenizer, role_token
from bridge.runtime.tokenizer.bpe import ByteLevel, CharacterLevel, pre_tokenizer
from bridge.runtime.tokenizer.by_library import Unigram, WordPiece

_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "sep",
    "mask_token": "mask",
}  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"
_ADDED = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}  # type -> special


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The two files' texts by name. Raises BridgeError if the vocabulary is of another kind, damaged, or cut by rules
    that are unknown."""
    if (model := metadata.get("tokenizer.ggml.model")) == "plamo2":
        must = "must be gpt2, llama, gemma4, bert or t5 for a tokenizer.json"
        raise BridgeError(f"tokenizer.ggml.model is {model!r}; {must}")
    tokenizer = Tokenizer(metadata)
    texts = {key: tokenizer.text(role_token(metadata, role, len(tokenizer))) for key, role in _ROLES.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        **{key: text for key, text in texts.items() if text},
    }  # fmt: skip
    if _says_pairs(metadata, tokenizer):
        config["cls_token"] = texts["bos_token"]
        if not _has_types(metadata, tokenizer):
            config["model_input_names"] = ["input_ids", "attention_mask"]
    else:
        config |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    templates = {key: text for key, text in metadata.items() if key.startswith(f"{_TEMPLATE}.")}
    if templates:
        named = {
            "default": metadata.get(_TEMPLATE),
            **{k.removeprefix(f"{_TEMPLATE}."): t for k, t in templates.items()},
        }
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text]
    elif _TEMPLATE in metadata:
        config["chat_template"] = metadata[_TEMPLATE]
    return {"tokenizer.json": _fast(metadata, tokenizer), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def _fast(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """tokenizer.json."""
    from tokenizers import AddedToken, decoders

    cutter = tokenizer.cutter
    if isinstance(cutter, ByteLevel):
        fast = cutter.tokenizer
        fast.pre_tokenizer = pre_tokenizer(cutter.rules.of_tokenizer_json)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(cutter, CharacterLevel):
        fast = cutter.tokenizer
        fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    elif isinstance(cutter, WordPiece):
        fast = cutter.tokenizer
        fast.decoder = decoders.WordPiece()
    elif isinstance(cutter, Unigram):
        fast = cutter.tokenizer
        fast.model = _unigrams(metadata, tokenizer)
        fast.decoder = decoders.Metaspace()
    else:
        fast = _by_score(metadata, tokenizer)
    for token, kind in enumerate(tokenizer.types):
        # WordPiece's user-defined tokens are words: they are spelled with a mark that texts do not have
        if kind in _ADDED and tokenizer.text(token) and not (kind == USER_DEFINED and isinstance(cutter, WordPiece)):
            strip = {"lstrip": token in tokenizer.lstrip, "rstrip": token in tokenizer.rstrip}
            added = AddedToken(tokenizer.text(token), normalized=False, special=_ADDED[TokenType(kind)], **strip)
            (fast.add_special_tokens if added.special else fast.add_tokens)([added])
    if tokenizer.add_bos or tokenizer.last is not None:
        fast.post_processor = _around(metadata, tokenizer)
    return str(fast.to_str(pretty=True))


def _says_pairs(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether it says what is between two texts: an encoder's, whose tokenizer_config.json has no word in that."""
    return "tokenizer.ggml.add_sep_token" in metadata or isinstance(tokenizer.cutter, WordPiece | Unigram)


def _has_types(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the second of two texts has another token type than the first, as BERT's has."""
    return isinstance(tokenizer.cutter, WordPiece) and metadata.get("tokenizer.ggml.token_type_count") != 1


def _around(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    """What puts tokens around a text, and around and between two."""
    from tokenizers import processors

    first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    last = [tokenizer.last] if tokenizer.last is not None else []
    one = [*map(tokenizer.text, first), "$A", *map(tokenizer.text, last)]
    before, between, after = (
        tokenizer.around_pair() if _says_pairs(metadata, tokenizer) else (first, last + first, last)
    )
    second = [f"{part}:{int(_has_types(metadata, tokenizer))}" for part in ("$B", *map(tokenizer.text, after))]
    two = [*map(tokenizer.text, before), "$A", *map(tokenizer.text, between), *second]
    special = {(tokenizer.text(token), token) for token in (*first, *last, *before, *between, *after)}
    return processors.TemplateProcessing(single=one, pair=two, special_tokens=[*special])


def _unigrams(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    """The tokens with their scores. Others than normal ones, which are found before a text is cut, have the lowest."""
    from tokenizers import models

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise BridgeError("tokenizer.ggml.scores is missing, by which texts are cut into unigrams")
    normal = [kind == TokenType.NORMAL for kind in tokenizer.types]
    lowest = min(compress(scores, normal), default=0.0)
    vocab = [
        (text, score if of_text else lowest)
        for text, score, of_text in zip(tokenizer.tokens, scores, normal, strict=True)
    ]
    return models.Unigram(vocab, unk_id=role_token(metadata, "unknown", len(tokenizer)) or 0)


def _by_score(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    """SentencePiece's joining as a BPE of the `tokenizers` library."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers

    vocab, types = {text: token for token, text in enumerate(tokenizer.tokens)}, tokenizer.types
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokenizer)
    normal = (token for token, kind in enumerate(types) if kind == TokenType.NORMAL and len(tokenizer.text(token)) > 1)
    merges = []
    for token in sorted(normal, key=lambda token: -scores[token]):
        text = tokenizer.text(token)
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    unknown = next((tokenizer.text(token) for token, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    fast = Fast(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    fast.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return fast

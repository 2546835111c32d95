"""tokenizer.json and tokenizer_config.json of a GGUF's vocabulary: the inverse of `gguf_tokenizer`.

    gpt2    BPE, cut by the rules that tokenizer.ggml.pre names as the models' own tokenizer.json has them
    gemma4  BPE on characters, with byte fallback
    llama   SentencePiece's: BPE with byte fallback, whose merges are all pairs that make a token, by the token's score

Control tokens become special tokens, user-defined ones other added tokens; both are matched before any cutting.
"""

import json
from collections.abc import Mapping
from typing import Any

from gguf import TokenType

from bridge.errors import BridgeError
from bridge.models.tokenizer.sentencepiece import SPACE
from bridge.runtime.tokenizer import Tokenizer, role_token
from bridge.runtime.tokenizer.bpe import ByteLevel, CharacterLevel, pre_tokenizer

_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
}  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"
_ADDED = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}  # type -> special


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The two files' texts by name. Raises BridgeError if the vocabulary is of another kind, damaged, or cut by rules
    that are unknown."""
    if (model := metadata.get("tokenizer.ggml.model")) in ("bert", "plamo2", "t5"):
        raise BridgeError(f"tokenizer.ggml.model is {model!r}; must be gpt2, llama or gemma4 for a tokenizer.json")
    tokenizer = Tokenizer(metadata)
    texts = {key: tokenizer.text(role_token(metadata, role, len(tokenizer))) for key, role in _ROLES.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos,
        **{key: text for key, text in texts.items() if text},
    }  # fmt: skip
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
    from tokenizers import AddedToken, decoders, processors

    cutter = tokenizer.cutter
    if isinstance(cutter, ByteLevel):
        fast = cutter.tokenizer
        fast.pre_tokenizer = pre_tokenizer(cutter.rules.of_tokenizer_json)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(cutter, CharacterLevel):
        fast = cutter.tokenizer
        fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        fast = _by_score(metadata, tokenizer)
    for token, kind in enumerate(tokenizer.types):
        if kind in _ADDED and tokenizer.text(token):
            strip = {"lstrip": token in tokenizer.lstrip, "rstrip": token in tokenizer.rstrip}
            added = AddedToken(tokenizer.text(token), normalized=False, special=_ADDED[TokenType(kind)], **strip)
            (fast.add_special_tokens if added.special else fast.add_tokens)([added])
    ends = [(tokenizer.bos, tokenizer.add_bos), (tokenizer.eos, tokenizer.add_eos)]
    first, last = (tokenizer.text(token) if asked else None for token, asked in ends)
    if first or last:
        one = [*([first] if first else []), "$A", *([last] if last else [])]
        two = [*one, *(f"{part}:1".replace("$A", "$B") for part in one)]
        special = [(tokenizer.text(token), token) for token, asked in ends if asked and token is not None]
        fast.post_processor = processors.TemplateProcessing(single=one, pair=two, special_tokens=[*{*special}])
    return str(fast.to_str(pretty=True))


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

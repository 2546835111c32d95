"""Special tokens: the id of each role, the tokens that end a reply, and whether BOS and EOS are added to a text.

The tokenizer's files take precedence over config.json, whose ids are often not updated with the tokenizer.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.gguf_file.special_tokens import SPECIAL, special_tokens, stripping
from bridge.models.config.model_config import Config
from bridge.models.tokenizer.vocabulary import GGUFTokenizer
from bridge.system.storage.files import read_json

_PHI_3 = re.compile("(phi)-?3", re.IGNORECASE)
_PHI_3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}  # without which llama.cpp loads no vocabulary of that name
_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
_ALSO = {"bos": "cls", "eos": "sep"}  # roles that BERT's tokens of other names have


def text_of(value: Any) -> str | None:
    """The text of a special token: a string, or an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def add_special_tokens(
    tokenizer: GGUFTokenizer, config: Config, folder: Path, settings: Mapping[str, Any],
    generation: Mapping[str, Any], unk: str | None, last: str | None = None,
) -> None:  # fmt: skip
    """Set ids by role, from the tokenizer's files or else config.json, and all tokens that end a reply.

    last  the token that the tokenizer puts after a text, which is EOS then, and what was EOS is EOT
    """
    index = {text: i for i, text in enumerate(tokenizer.tokens)}
    special_map = read_json(folder / "special_tokens_map.json", optional=True)
    for role in _ROLES:
        text = text_of(settings.get(f"{role}_token")) or text_of(special_map.get(f"{role}_token"))
        token = index.get(text) if text else None
        named = token is not None
        if token is None:
            ids = _id_list(config.get(f"{role}_token_id"))
            token = next((i for i in ids if i < len(tokenizer.tokens)), None)
        if token is None and role == "unk" and unk is not None:
            token = index.get(unk)
        if token is not None:
            tokenizer.ids[role] = token
            if role == "unk" and tokenizer.model == "llama":
                tokenizer.types[token] = int(TokenType.UNKNOWN)
            # padding may be an ordinary token, which must remain one in a text
            kinds = (TokenType.NORMAL, TokenType.USER_DEFINED) if role in ("bos", "eos") else (TokenType.USER_DEFINED,)
            if named and role != "unk" and tokenizer.types[token] in kinds:
                tokenizer.types[token] = int(TokenType.CONTROL)
    for role, other in _ALSO.items():
        if role not in tokenizer.ids and other in tokenizer.ids:
            tokenizer.ids[role] = tokenizer.ids[other]
    tokenizer.ids.pop("cls", None)  # GGUF has no key for it
    stops = [tokenizer.ids["eos"]] if "eos" in tokenizer.ids else []
    if last in index and stops and index[last] != stops[0]:
        tokenizer.ids |= {"eos": index[last], "eot": stops[0]}
        stops.insert(0, index[last])
    for token in _id_list(generation.get("eos_token_id")) + _id_list(config.get("eos_token_id")):
        if token < len(tokenizer.tokens) and token not in stops:
            stops.append(token)
    tokenizer.stop_ids = stops
    _mark_ends(tokenizer)


def _mark_ends(tokenizer: GGUFTokenizer) -> None:
    """Set the ids of eot and eom to ends of a reply that llama.cpp does not know by their texts, and the type of all
    tokens that it takes for control tokens."""
    types, ends = special_tokens(tokenizer.tokens, tokenizer.types, tokenizer.ids)
    for token in tokenizer.stop_ids:
        if token in ends:
            continue
        free = next((role for role in ("eot", "eom") if role not in tokenizer.ids), None)
        if free is None:
            tokenizer.notes.append(f"GGUF has no key left for {tokenizer.tokens[token]!r}, which also ends a reply")
            continue
        tokenizer.ids[free] = token
        _, ends = special_tokens(tokenizer.tokens, tokenizer.types, tokenizer.ids)
        if token not in ends:
            del tokenizer.ids[free]
            tokenizer.notes.append(f"llama.cpp does not end a reply at this vocabulary's {tokenizer.tokens[token]!r}")
    for token, kind in enumerate(types):
        if kind == TokenType.CONTROL:
            tokenizer.types[token] = kind


def stripping_name(tokenizer: GGUFTokenizer, name: str, arch: str) -> tuple[str, list[str]]:
    """general.name, spelled so that llama.cpp loads the vocabulary, and strips white space next to the special tokens
    that the tokenizer strips it at; and notes where it does not."""
    special = [token for token, kind in enumerate(tokenizer.types) if kind in SPECIAL]

    def not_stripped(spelling: str) -> list[int]:
        names = {"general.name": spelling, "tokenizer.ggml.pre": tokenizer.pre, "general.architecture": arch}
        left, right = stripping(tokenizer.tokens, special, names)
        return sorted(((tokenizer.lstrip - left) | (tokenizer.rstrip - right)) & set(special))

    notes = []
    best = _PHI_3.sub(r"\1 3", name)
    if missing := sorted(_PHI_3_TOKENS - set(tokenizer.tokens)):
        if best != name:
            notes.append(
                f"general.name is {best!r}: llama.cpp refuses {name!r} for a vocabulary without {missing[0]!r}"
            )
    elif tokenizer.lstrip | tokenizer.rstrip:  # else no name by which llama.cpp strips
        best = min(name, name.replace(" ", "-"), key=lambda spelling: len(not_stripped(spelling)))
    if tokens := not_stripped(best):
        notes.append(
            f"the tokenizer strips white space next to {len(tokens)} special tokens such as "
            f"{tokenizer.tokens[tokens[0]]!r}; llama.cpp does so after those of Phi-3, by general.name, and not here"
        )
    return best, notes


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def add_bos_and_eos(tokenizer: GGUFTokenizer, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Set whether a prompt gets BOS and EOS: by explicit settings, else by the post-processor's template."""
    template = _template(data, "single")
    # transformers' Llama classes prepend BOS by default; they also read a tokenizer.model without tokenizer.json
    reader = str(settings.get("tokenizer_class") or ("" if data else "LlamaTokenizer")).lower()
    add_bos = template is None and reader.startswith(("llamatok", "codellamatok"))
    add_eos = False
    if template is not None:
        sequence = next((i for i, part in enumerate(template) if "Sequence" in part), 0)
        before, after = _names(template[:sequence]), _names(template[sequence + 1 :])
        add_bos, add_eos = tokenizer.text("bos") in before, tokenizer.text("eos") in after
        if len(before) > int(add_bos) or len(after) > int(add_eos):
            tokenizer.notes.append(
                f"the tokenizer puts {' '.join(before)} before and {' '.join(after)} after a text; "
                "llama.cpp only puts BOS and EOS there"
            )
    if any(part.get("type") == "RobertaProcessing" for part in _processors(data)):
        add_bos = add_eos = tokenizer.add_sep = True
    pair = _template(data, "pair")
    if pair is not None and add_eos:
        tokenizer.add_sep = len(_names(pair)) == 3 + int(add_bos)  # A EOS SEP B EOS
    if isinstance(settings.get("add_bos_token"), bool):
        add_bos = settings["add_bos_token"]
    if isinstance(settings.get("add_eos_token"), bool):
        add_eos = settings["add_eos_token"]
    tokenizer.add_bos = add_bos and "bos" in tokenizer.ids
    tokenizer.add_eos = add_eos and "eos" in tokenizer.ids


def last_of_template(data: Mapping[str, Any]) -> str | None:
    """The one token that a tokenizer.json puts after a text; None where there is none, or several."""
    template = _template(data, "single") or []
    sequence = next((i for i, part in enumerate(template) if "Sequence" in part), 0)
    after = _names(template[sequence + 1 :])
    return after[0] if len(after) == 1 else None


def _processors(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    processor = data.get("post_processor") or {}
    processors: list[Mapping[str, Any]] = processor.get("processors", [processor])
    return processors


def _template(data: Mapping[str, Any], kind: str) -> Sequence[Mapping[str, Any]] | None:
    """The template of a tokenizer.json's post-processor for a "single" text, or a "pair" of them, or None."""
    for part in _processors(data):
        if part.get("type") == "TemplateProcessing":
            return part.get(kind) or []
    return None


def _names(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]

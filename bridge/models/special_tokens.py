"""Special tokens: which id serves for what, which end a reply, and whether BOS and EOS are added to a text.

The tokenizer's own files are believed before config.json, whose ids stay in when a tokenizer is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from bridge.gguf_file.pretokenizers import KNOWN_ENDS
from bridge.models.model_config import Config
from bridge.models.vocabulary import GGUFTokenizer
from bridge.system.files import read_json

_ROLES = ("bos", "eos", "unk", "pad", "sep", "mask")


def _content(value: Any) -> str | None:
    """The text of a special token: a string, or an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def add_special_tokens(
    tokenizer: GGUFTokenizer, config: Config, folder: Path, settings: Mapping[str, Any],
    generation: Mapping[str, Any], unk: str | None,
) -> None:  # fmt: skip
    """Ids by role: from the tokenizer's files, else config.json's; and all the tokens that end a reply."""
    index = {text: i for i, text in enumerate(tokenizer.tokens)}
    special_map = read_json(folder / "special_tokens_map.json", optional=True)
    for role in _ROLES:
        text = _content(settings.get(f"{role}_token")) or _content(special_map.get(f"{role}_token"))
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
            # padding may be an ordinary token: what a text contains must stay one
            kinds = (TokenType.NORMAL, TokenType.USER_DEFINED) if role in ("bos", "eos") else (TokenType.USER_DEFINED,)
            if named and role != "unk" and tokenizer.types[token] in kinds:
                tokenizer.types[token] = int(TokenType.CONTROL)
    stops = [tokenizer.ids["eos"]] if "eos" in tokenizer.ids else []
    for token in _id_list(generation.get("eos_token_id")) + _id_list(config.get("eos_token_id")):
        if token < len(tokenizer.tokens) and token not in stops:
            stops.append(token)
    tokenizer.stop_ids = stops
    # two more ids fit the metadata; the usual texts need none
    for token in stops[1:]:
        if tokenizer.tokens[token] not in KNOWN_ENDS:
            free = next((role for role in ("eot", "eom") if role not in tokenizer.ids), None)
            if free is None:
                tokenizer.notes.append(f"llama.cpp is not told that {tokenizer.tokens[token]!r} ends a reply")
            else:
                tokenizer.ids[free] = token


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def add_bos_and_eos(tokenizer: GGUFTokenizer, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Whether a prompt is given BOS and EOS: the post-processor's template, overruled by explicit settings."""
    template = _template(data.get("post_processor"))
    # transformers' Llama classes prepend BOS unless told otherwise; a tokenizer.model alone is read by one of them
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
                "llama.cpp puts no more than BOS and EOS there"
            )
    if isinstance(settings.get("add_bos_token"), bool):
        add_bos = settings["add_bos_token"]
    if isinstance(settings.get("add_eos_token"), bool):
        add_eos = settings["add_eos_token"]
    tokenizer.add_bos = add_bos and "bos" in tokenizer.ids
    tokenizer.add_eos = add_eos and "eos" in tokenizer.ids


def _template(processor: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]] | None:
    """The `single` template of a post-processor, None where it has none."""
    for part in (processor or {}).get("processors", [processor or {}]):
        if part.get("type") == "TemplateProcessing":
            return part.get("single") or []
    return None


def _names(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]

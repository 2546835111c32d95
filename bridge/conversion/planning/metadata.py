"""The entries of a GGUF's metadata that a user gives: --name, --author, --metadata KEY=VALUE, edit --set KEY=VALUE."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError, parameter, refused

# they describe the file or choose what reads it
_FIXED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.")
_TEXTS, _NUMBERS = "general.", "general.sampling."
# the types that llama.cpp reads keys as
_KNOWN = (
    (r"general\.(tags|languages|datasets)", GGUFValueType.ARRAY),
    (r"tokenizer\.(chat_template.*|ggml\.(model|pre))|.*\.rope\.scaling\.type", GGUFValueType.STRING),
    (r"tokenizer\.ggml\.\w+_token_id", GGUFValueType.UINT32),
    (r".*\.(context_length|embedding_length|block_count|feed_forward_length|vocab_size|expert_(\w+_)?count"
     r"|attention\.(head_count|head_count_kv|key_length|value_length|sliding_window)|rope\.dimension_count"
     r"|rope\.scaling\.original_context_length)", GGUFValueType.UINT32),
    (r".*\.(rope\.freq_base\w*|rope\.scaling\.(factor|attn_factor|yarn_\w+)|attention\.(layer_norm\w*_epsilon|scale)"
     r"|\w+_scale|\w*softcapping)", GGUFValueType.FLOAT32),
    (r"tokenizer\.ggml\.(add_\w+|remove_extra_whitespaces)|.*\.(attention\.causal|expert_weights_norm)",
     GGUFValueType.BOOL),
)  # fmt: skip


def with_given(metadata: Mapping[str, GGUFValue], pairs: Sequence[tuple[str, Any]]) -> dict[str, GGUFValue]:
    """The metadata with (key, value) pairs set.

    A value gets the type that its key has, and the value of a new key the type that llama.cpp reads. Values of other
    new keys keep their own; a text that says true, false, a number or a list is one, except under general., where
    names, versions and licenses are texts, and tags, languages and datasets lists. A list is given as one, or as JSON.

    Raises BridgeError for a key that describes the file itself, a value of another type, and a token that is none.
    """
    entries = dict(metadata)
    for key, value in pairs:
        if key.startswith(_FIXED):
            raise refused("metadata", (key, value), f"{key} describes the file; it cannot be given")
        known = next((kind for pattern, kind in _KNOWN if re.fullmatch(pattern, key)), None)
        kind = entries[key].type if key in entries else known
        try:
            if kind == GGUFValueType.ARRAY:
                entries[key] = _list(value, entries[key].sub_type if key in entries else GGUFValueType.STRING)
            else:
                entries[key] = _of_type(value, kind) if kind is not None else _of_new_key(key, value)
        except (ValueError, OverflowError):
            what = _NAMES.get(kind, str(kind and kind.name.lower()))
            raise BridgeError(f"{parameter('metadata', (key, value))}: must be {what}") from None
        tokens: Any = entries["tokenizer.ggml.tokens"].value if "tokenizer.ggml.tokens" in entries else None
        if key.endswith("_token_id") and tokens is not None and entries[key].value >= len(tokens):
            raise refused("metadata", (key, value), f"there are {len(tokens)} tokens")
    return entries


_NAMES = {
    None: "text, a number, true, false or a list of one kind of these",
    GGUFValueType.ARRAY: "a list like the one there is, or of texts",
}


def _list(value: Any, kind: GGUFValueType | None) -> GGUFValue:
    items = json.loads(value) if isinstance(value, str) else value
    if not isinstance(items, list) or not items or kind is None:
        raise ValueError
    return GGUFValue([_of_type(item, kind).value for item in items], GGUFValueType.ARRAY, kind)


def _of_new_key(key: str, value: Any) -> GGUFValue:
    if isinstance(value, str) and (not key.startswith(_TEXTS) or key.startswith(_NUMBERS)):
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        value = read if isinstance(read, bool | int | float | list) else value
    if isinstance(value, list):
        kinds = {_of_new_key(key, item).type for item in value}
        signed = kinds == {GGUFValueType.UINT32, GGUFValueType.INT32}
        if (len(kinds) != 1 and not signed) or GGUFValueType.ARRAY in kinds:
            raise ValueError
        return _list(value, GGUFValueType.INT32 if signed else kinds.pop())
    for python, kind in ((str, GGUFValueType.STRING), (bool, GGUFValueType.BOOL), (float, GGUFValueType.FLOAT32)):
        if isinstance(value, python):
            return _of_type(value, kind)
    return _of_type(value, GGUFValueType.UINT32 if isinstance(value, int) and value >= 0 else GGUFValueType.INT32)


def _of_type(value: Any, kind: GGUFValueType) -> GGUFValue:
    """ValueError or OverflowError where the type cannot hold the value."""
    if kind == GGUFValueType.STRING:
        if not isinstance(value, str):
            raise ValueError
        return GGUFValue(value.encode("utf-8", "replace").decode(), kind)  # an argument need not be UTF-8
    if kind == GGUFValueType.BOOL:
        if str(value).lower() not in ("true", "false"):
            raise ValueError
        return GGUFValue(str(value).lower() == "true", kind)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    if kind in (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64):
        return GGUFValue(float(value), kind)
    limits = np.iinfo(kind.name.lower())
    integer = int(value) if not isinstance(value, float) or value.is_integer() else None
    if integer is None or not limits.min <= integer <= limits.max:
        raise ValueError
    return GGUFValue(integer, kind)

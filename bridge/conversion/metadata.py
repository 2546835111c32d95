"""The entries of a GGUF's metadata that a user gives: --name, --author, --metadata KEY=VALUE."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError, parameter

# they describe the file or choose what reads it
_FIXED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.")
_TEXTS, _NUMBERS = "general.", "general.sampling."


def with_given(metadata: Mapping[str, GGUFValue], given: Sequence[tuple[str, Any]]) -> dict[str, GGUFValue]:
    """The metadata with (key, value) pairs set.

    A value gets the type that its key has. The value of a new key keeps its own type; a text that says true, false or a
    number is one, except under general., where names, versions and licenses are texts.

    Raises BridgeError for a key that describes the file itself, a list, or a value of another type.
    """
    found = dict(metadata)
    for key, value in given:
        if key.startswith(_FIXED):
            raise BridgeError(f"{parameter('metadata', (key, value))}: {key} describes the file; it cannot be given")
        kind = found[key].type if key in found else None
        if kind == GGUFValueType.ARRAY:
            raise BridgeError(f"{parameter('metadata', (key, value))}: {key} is a list; edit it in a plan instead")
        try:
            found[key] = _of_type(value, kind) if kind is not None else _of_new_key(key, value)
        except (ValueError, OverflowError):
            what = kind.name.lower() if kind is not None else "text, a number, true or false"
            raise BridgeError(f"{parameter('metadata', (key, value))}: must be {what}") from None
    return found


def _of_new_key(key: str, value: Any) -> GGUFValue:
    if isinstance(value, str) and (not key.startswith(_TEXTS) or key.startswith(_NUMBERS)):
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        value = read if isinstance(read, bool | int | float) else value
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
    whole = int(value) if not isinstance(value, float) or value.is_integer() else None
    if whole is None or not limits.min <= whole <= limits.max:
        raise ValueError
    return GGUFValue(whole, kind)

"""Options that the command line and Python share: a field of a frozen dataclass with the help that belongs to it.

    @dataclass(frozen=True)
    class Sampling:
        top_k: int = option(40, "draw from the N most likely tokens, 0: from all", metavar="N")

The dataclass holds the default and checks it in `__post_init__`; `bridge.cli.options` makes the flag --top-k of it,
with the default at the end of its help.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, is_dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from bridge.errors import BridgeError, parameter


class Flag(NamedTuple):
    """How the command line asks for a field.

    help     a noun phrase or an imperative that makes sense without the flag's name
    flag     "--top-k", or several with spaces between them; None: made of the field's name
    metavar  placeholder of the value in the help; None for a switch
    parse    from text to the value, as argparse's `type`
    choices  the values that are possible, if they are few
    default  words for the default in the help instead of the value; "" for nothing
    """

    help: str
    flag: str | None
    metavar: str | None
    parse: Callable[[str], Any] | None
    choices: Sequence[str] | None
    default: str | None


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    says: str | None = None,
) -> Any:
    """A dataclass field with a flag; see `Flag` for the arguments, `says` is its `default`."""
    metadata = {"flag": Flag(help, flag, metavar, parse, choices, says)}
    return field(default=default, metadata=metadata) if default is not MISSING else field(metadata=metadata)


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise BridgeError unless an argument is an integer of this range."""
    if not is_integer(value):
        raise BridgeError(f"{parameter(name, value)}: must be an integer")
    if value < least or (most is not None and value > most):
        range = f"at least {least}" if most is None else f"between {least} and {most}"
        raise BridgeError(f"{parameter(name, value)}: must be {range}")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or numpy's, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


# what a value of a hint may be, and how that is said
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, str | PathLike)),
    bool: ("True or False", lambda value: value in (True, False)),
    int: ("an integer", is_integer),
    float: ("a number", is_number),
    NoneType: ("None", lambda value: value is None),
}


def check_types(settings: Any) -> None:
    """Raise BridgeError where a field of a dataclass has a value that its hint does not allow.

    Only hints of texts, paths, numbers, switches and other dataclasses are looked at.
    """
    for name, hint in get_type_hints(type(settings)).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if any(kind not in _KINDS and not is_dataclass(kind) for kind in kinds):
            continue
        value = getattr(settings, name)
        if not any(_KINDS[kind][1](value) if kind in _KINDS else isinstance(value, kind) for kind in kinds):
            words = " or ".join(_KINDS[kind][0] if kind in _KINDS else kind.__name__ for kind in kinds)
            raise BridgeError(f"{parameter(name)} is of type {type(value).__name__}; must be {words}")


def positive(text: str) -> int:
    """A count of at least 1."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def count(text: str) -> int:
    """0 or more."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def size(text: str) -> int:
    """4000000000 of "4G"."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)([KMGT]?)B?", text.upper())
    found = float(match[1]) * 1000 ** ("KMGT".index(match[2]) + 1 if match[2] else 0) if match else 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 500M")
    return int(found)


def pair(text: str) -> tuple[str, str]:
    """("ffn_down", "Q6_K") of "ffn_down=Q6_K"."""
    pattern, sign, name = text.rpartition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE")
    return pattern, name


def entry(text: str) -> tuple[str, str]:
    """("general.name", "A=B") of "general.name=A=B"."""
    key, sign, value = text.partition("=")
    if not sign or not is_key(key):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def is_key(name: Any) -> bool:
    """Whether this can be a key of a GGUF's metadata."""
    return isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name) is not None


def share(text: str) -> tuple[int, int]:
    """(3, 12) of "3/12"."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N such as 3/12")
    return int(match[1]), int(match[2])

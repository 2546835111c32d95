"""Options that the command line and Python share: a field of a frozen dataclass with the help that belongs to it.

    @dataclass(frozen=True)
    class Sampling:
        top_k: int = option(40, "draw from the N most likely tokens, 0: from all", metavar="N")

The dataclass holds the default and checks it in `__post_init__`; `bridge.cli.options` makes the flag --top-k of it,
with the default at the end of its help.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, field
from functools import cache, wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from bridge.errors import BridgeError, parameter
from bridge.system.text import meant

P = ParamSpec("P")
R = TypeVar("R")


class Flag(NamedTuple):
    """How the command line asks for a field.

    help     a noun phrase or an imperative that makes sense without the flag's name
    flag     "--top-k", or several with spaces between them; None: made of the field's name
    metavar  placeholder of the value in the help; None for a switch
    parse    from text to the value, as argparse's `type`
    choices  the values that are possible, if they are few
    default  words for the default in the help instead of the value; "" for nothing
    several  whether the flag takes several values
    usual    whether `--help` shows it; others are left to `--help-all`
    """

    help: str
    flag: str | None
    metavar: str | None
    parse: Callable[[str], Any] | None
    choices: Sequence[str] | None
    default: str | None
    several: bool = False
    usual: bool = False


def option(
    default: Any, help: str, *, flag: str | None = None, metavar: str | None = None,
    parse: Callable[[str], Any] | None = None, choices: Sequence[str] | None = None, says: str | None = None,
    several: bool = False, usual: bool = False,
) -> Any:  # fmt: skip
    """A dataclass field with a flag; see `Flag` for the arguments, `says` is its `default`."""
    metadata = {"flag": Flag(help, flag, metavar, parse, choices, says, several, usual)}
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

    Only hints of texts, paths, numbers, switches, functions and classes are looked at.
    """
    for name, hint in get_type_hints(type(settings)).items():
        _check_type(name, getattr(settings, name), hint)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises BridgeError where an argument is of a type that its hint does not allow, as
    `check_types`, and TypeError for a keyword that it does not have, with the one that was perhaps meant."""
    signature, hints = inspect.signature(function), dict[str, Any]()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:
            hints.update({name: _hint_of(p, function) for name, p in signature.parameters.items()})
        for name in kwargs:
            if name not in (known := _keywords(function)):
                why = f"got an unexpected keyword argument {name!r}{meant(name, known)}"
                raise TypeError(f"{function.__name__}() {why}")
        arguments: dict[str, Any] = {}
        with suppress(TypeError):  # Python's own sentence on arguments that are missing or too many follows
            arguments = signature.bind(*args, **kwargs).arguments
        for name, value in arguments.items():
            _check_type(name, value, hints[name])
        return function(*args, **kwargs)

    return call


@cache
def _keywords(function: Callable[..., Any]) -> list[str]:
    """The keywords that a function takes, with those of `**options: Unpack[...]`."""
    names: list[str] = []
    for name, accepted in inspect.signature(function).parameters.items():
        if accepted.kind is accepted.VAR_KEYWORD:
            (keys,) = get_args(_hint_of(accepted, function))
            names += get_type_hints(keys)
        else:
            names.append(name)
    return names


def _hint_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """A parameter's annotation, read where `from __future__ import annotations` leaves a text; Any where it has names
    that only type checkers import."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    try:
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        return eval(annotation, scope) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    checks = [_kind(kind) for kind in kinds if not (kind is str and Path in kinds)]  # a path may be a text
    known = [kind for kind in checks if kind is not None]
    if len(known) < len(checks) or any(allows(value) for _, allows in known):
        return
    words = " or ".join(words for words, _ in known)
    raise BridgeError(f"{parameter(name)} is of type {type(value).__name__}; must be {words}")


def _kind(hint: Any) -> tuple[str, Callable[[Any], bool]] | None:
    """A type hint in words, and what checks a value for it; None for hints that are not checked."""
    if hint in _KINDS:
        return _KINDS[hint]
    if get_origin(hint) is Callable:
        return "a function", callable
    if get_origin(hint) is Iterable:
        return "a sequence", lambda value: isinstance(value, Iterable)
    checkable = isinstance(hint, type) and not getattr(hint, "_is_protocol", False)
    if checkable and get_origin(hint) is None and hint is not Any:
        return hint.__name__, lambda value: isinstance(value, hint)
    return None


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
    nbytes = float(match[1]) * 1000 ** ("KMGT".index(match[2]) + 1 if match[2] else 0) if match else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 500M")
    return int(nbytes)


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

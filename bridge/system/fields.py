"""Reads fields of JSON that somebody else wrote: configs, plans, requests.

`Fields` is strict: a field is of its kind, or a FieldError says what it must be. A kind is a function that returns the
values it accepts. `table`, `whole_number` and `integers` read configs, in which anything may be missing or wrong.
"""

import re
import reprlib
from collections.abc import Callable, Collection
from typing import Any

Kind = Callable[[Any, str], Any]  # a value and the name of its field -> the value; raises FieldError
_NEEDED: Any = object()
_LARGEST = 1 << 40


class FieldError(Exception):
    """What is wrong with a field; its text is for users.

    name     of the field
    must_be  what it must be, in words; "" where it is missing, or wrong together with others
    """

    def __init__(self, message: str, name: str = "", must_be: str = "") -> None:
        super().__init__(message)
        self.name, self.must_be = name, must_be


def not_as(name: str, value: Any, must_be: str) -> FieldError:
    """The error of a field of another kind than it must be."""
    return FieldError(f"{name} is {reprlib.repr(value)}, must be {must_be}", name, must_be)


class Fields:
    """The fields of a JSON object, each taken once.

    name  of the object in errors
    """

    def __init__(self, values: Any, name: str) -> None:
        self.left = dict(object_(values, name))

    def __contains__(self, key: str) -> bool:
        return key in self.left

    def take(self, key: str, kind: Kind, default: Any = _NEEDED, name: str = "") -> Any:
        """The value of a field, or the default if it is not there.

        name  of the field in errors, if it is not the key
        """
        if key in self.left:
            return kind(self.left.pop(key), name or key)
        if default is _NEEDED:
            raise FieldError(f"{key!r} is missing", key)
        return default


def anything(value: Any, name: str) -> Any:
    """Any value."""
    return value


def of_type(types: type | tuple[type, ...], must_be: str) -> Kind:
    """A value of a Python type; `must_be` says in words what it is for. Of numbers, true and false are none."""

    def kind(value: Any, name: str) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise not_as(name, value, must_be)
        return value

    return kind


flag = of_type(bool, "true or false")
object_ = of_type(dict, "an object")


def text(value: Any, name: str) -> str:
    """A text that UTF-8 can hold: JSON may also contain halves of characters."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise not_as(name, value, "a text")


def number(value: Any, name: str) -> int | float:
    """A number that a float can hold, or a float."""
    if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1023):
        return value
    raise not_as(name, value, "a number")


def whole(least: int = 0) -> Kind:
    """An integer from `least` on, below what no size and no index reaches."""

    def kind(value: Any, name: str) -> int:
        if type(value) is not int or not least <= value < _LARGEST:
            raise not_as(name, value, f"a whole number from {least} on")
        return value

    return kind


def list_of(item: Kind | None = None, least: int = 0) -> Kind:
    """A list of at least so many items."""

    def kind(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise not_as(name, value, "a list" + " that is not empty" * bool(least))
        of_item = f"{name}'{'' if name.endswith('s') else 's'} item"
        return value if item is None else [item(each, of_item) for each in value]

    return kind


def one_of(known: Collection[str]) -> Kind:
    """One of these names."""

    def kind(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise FieldError(f"unknown {name} {reprlib.repr(value)}: choose one of {', '.join(known)}", name)
        return value

    return kind


def optional(kind: Kind) -> Kind:
    """A value of a kind, or null."""
    return lambda value, name: None if value is None else kind(value, name)


def table(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def whole_number(value: object) -> int | None:
    """An integer written in JSON as 4, 4.0 or "4"; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def integers(value: object, count: int, least: int | None = None) -> bool:
    """Whether a value is a list of `count` integers, from `least` on."""
    if not isinstance(value, list) or len(value) != count:
        return False
    return all(type(n) is int and (least is None or n >= least) for n in value)

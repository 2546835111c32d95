"""Dataclasses of which a start makes many.

`dataclasses` writes and compiles source for each method that it adds: a millisecond a class, and a start of the command
line has thirty. Here it does so for `__init__` alone.
"""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(dataclasses.field,))
def record(kind: Class | None = None, /, *, kw_only: bool = False) -> Any:
    """A dataclass whose objects are equal, and have the same hash, where their fields are, and are not to be changed.

    Only type checkers prevent that: `frozen=True`, which does too, takes source for three methods.
    """
    if kind is None:
        return lambda kind: record(kind, kw_only=kw_only)
    made: Any = dataclasses.dataclass(eq=False, repr=False, match_args=False, kw_only=kw_only)(kind)
    compared = attrgetter(*(field.name for field in dataclasses.fields(made) if field.compare))
    made.__eq__, made.__hash__ = _equality(compared), lambda self: hash(compared(self))
    made.__repr__ = _shown
    return made


def _equality(compared: Callable[[Any], Any]) -> Callable[[Any, object], Any]:
    def equal(self: Any, other: object) -> Any:
        return compared(self) == compared(other) if type(other) is type(self) else NotImplemented

    return equal


def _shown(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"

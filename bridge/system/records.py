"""Dataclasses of which a start makes many.

`dataclasses` writes and compiles source for each method that it adds: a millisecond a class, and a start of the command
line has thirty. Here all classes share methods that are plain Python, which costs an object a few microseconds.
"""

import dataclasses
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(kind: Class | None = None, /, *, frozen: bool = True) -> Any:
    """A dataclass whose objects are equal, and have the same hash, where their fields are.

    frozen  they are not to be changed, which type checkers alone prevent; others are equal to themselves alone
    """
    if kind is None:
        return lambda kind: record(kind, frozen=frozen)
    cls: Any = dataclasses.dataclass(init=False, eq=False, repr=False, match_args=False)(kind)
    fields = dataclasses.fields(cls)
    cls._names = tuple(field.name for field in fields)
    cls._named = frozenset(cls._names)
    cls._defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    cls._factories = {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}
    cls.__init__, cls.__repr__ = _initialize, _repr
    if frozen:
        cls._compared = staticmethod(attrgetter(*(field.name for field in fields if field.compare)))
        cls.__eq__, cls.__hash__ = _equal, _hash
    return cls


def _initialize(self: Any, *values: Any, **named: Any) -> None:
    positional = dict(zip(self._names, values, strict=False))
    if len(values) > len(positional) or positional.keys() & named.keys() or not named.keys() <= self._named:
        raise TypeError(f"{type(self).__name__} takes each of {', '.join(self._names)} once")
    defaults = {name: make() for name, make in self._factories.items() if name not in positional and name not in named}
    self.__dict__ = {**self._defaults, **defaults, **positional, **named}
    if len(self.__dict__) < len(self._names):
        missing = ", ".join(name for name in self._names if name not in self.__dict__)
        raise TypeError(f"{type(self).__name__} needs {missing}")


def _equal(self: Any, other: Any) -> Any:
    return self._compared(self) == self._compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"

"""config.json as a mapping that complains by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.errors import BridgeError


class Config:
    """Typed access to config.json's keys.

    values   the parsed file
    path     for messages
    longest  name and length of the checkpoint's longest side of a tensor; None: not to be compared
    names    key -> the name that this config.json has for it
    """

    def __init__(
        self,
        values: dict[str, Any],
        path: Path,
        longest: tuple[str, int] | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.values = values
        self.names = names
        self.path = path
        self.longest = longest

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        value = self.values.get(self.names.get(key, key))
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `BridgeError` where it is missing without a default, or is something else."""
        value, key = self.get(key, default), self.names.get(key, key)
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise BridgeError(f"{self.path}: {key} is {value!r}, a positive integer is expected")
        return value

    def side(self, key: str, default: int | None = None) -> int:
        """A positive integer that is a side of some tensor, or less; raises like `integer`, and where none is so long.

        For what lists are made of: a config may say any number, and the tensors' sizes are the file's.
        """
        return self.within_sides(key, self.integer(key, default))

    def within_sides(self, what: str, count: int) -> int:
        """The count itself; `BridgeError` where no tensor has so long a side."""
        if self.longest is not None and count > self.longest[1]:
            name, length = self.longest
            raise BridgeError(
                f"{self.path}: {what} is {count}, but the longest side of any tensor is {length} ({name}); config and "
                "weights are not of the same model"
            )
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; raises like `integer`."""
        value, key = self.get(key, default), self.names.get(key, key)
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise BridgeError(f"{self.path}: {key} is {value!r}, a positive number is expected")
        return float(value)

    def expect(self, key: str, supported: tuple[Any, ...], why: str, default: Any) -> None:
        """`BridgeError` unless the value, or the default, can be expressed; the message names the first that can."""
        value = self.get(key, default)
        if value not in supported:
            raise BridgeError(f"{self.path}: {key} is {value!r}; {why}: only {supported[0]!r} can be converted")

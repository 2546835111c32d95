"""config.json as a mapping that complains by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError


class Config:
    """Typed access to config.json's keys.

    values  the parsed file
    path    for messages
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `BridgeError` where it is missing without a default, or is something else."""
        value = self.get(key, default)
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise BridgeError(f"{self.path}: {key} is {value!r}, a positive integer is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; raises like `integer`."""
        value = self.get(key, default)
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise BridgeError(f"{self.path}: {key} is {value!r}, a positive number is expected")
        return float(value)

    def expect(self, key: str, supported: Any, why: str) -> None:
        """`BridgeError` unless the key is absent, null or the one value that can be expressed."""
        value = self.get(key, supported)
        if value != supported:
            raise BridgeError(f"{self.path}: {key} is {value!r}; {why}: only {supported!r} can be converted")

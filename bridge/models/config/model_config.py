"""config.json as a mapping whose errors name the key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from bridge.errors import BridgeError
from bridge.system.fields import table

_SIZE = re.compile(r"\w*_(size|dim|rank)(_per_layer_input)?|n_embd|n_inner|d_model|d_ff")  # keys of tensors' sides
_LARGEST = 2.0**127  # GGUF has numbers as float32

NO_OTHER = "llama.cpp's graph for this architecture has no other"


@dataclass(frozen=True, eq=False)
class Config:
    """Typed access to config.json's keys.

    values   the parsed file
    path     for messages
    longest  name and length of the longest side of any tensor in the checkpoint; None: unknown
    tensors  how many the checkpoint has; None: unknown
    target   of the model that this one guesses tokens for, where it needs that
    names    key -> its name in this config.json, or several, of which the first that it has counts
    """

    values: dict[str, Any]
    path: Path
    longest: tuple[str, int] | None = None
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    tensors: int | None = None
    target: "Config | None" = None

    def name(self, key: str) -> str:
        """What this config.json calls a key."""
        names = self.names.get(key, key)
        return names if isinstance(names, str) else next((name for name in names if name in self.values), names[0])

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if the key is absent or null."""
        value = self.values.get(self.name(key))
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; BridgeError if it is missing without a default, or is something else."""
        value, key = self.get(key, default), self.name(key)
        if isinstance(value, list) and value and value == len(value) * value[:1]:  # the same one for every layer
            value = value[0]
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise BridgeError(f"{self.path}: {key} is {value!r}, must be a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number from 0 on; raises like `integer`."""
        return 0 if self.get(key, default) == 0 else self.integer(key, default)

    def side(self, key: str, default: int | None = None) -> int:
        """A positive integer up to the longest side of any tensor; raises like `integer`, and if it is longer.

        It bounds the lists that are made from a config, which may contain any number; sizes of tensors are real.
        """
        return self.within_sides(key, self.integer(key, default))

    def repeats(self, key: str, default: int | None = None) -> int:
        """A positive integer up to the number of tensors: of layers, each of which has some; raises like `side`."""
        count = self.integer(key, default)
        if self.tensors is not None and count > self.tensors:
            raise BridgeError(
                f"{self.path}: {self.name(key)} is {count}, but the checkpoint has {self.tensors} tensors in "
                "all; correct the key"
            )
        return count

    def within_sides(self, what: str, count: int) -> int:
        """The count itself; BridgeError if no tensor has a side of that length."""
        if self.longest is not None and count > self.longest[1]:
            name, length = self.longest
            raise BridgeError(
                f"{self.path}: {what} is {count}, but the longest side of any tensor is {length} ({name}); correct the "
                "key"
            )
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; raises like `integer`."""
        value, key = self.get(key, default), self.name(key)
        if value is None:
            raise BridgeError(f"{self.path}: the key {key!r} is missing; take the config.json of the original model")
        if not positive(value):
            raise BridgeError(f"{self.path}: {key} is {value!r}, must be a positive number")
        return float(value)

    def expect(self, key: str, supported: tuple[Any, ...], default: Any, why: str = NO_OTHER, unless: str = "") -> None:
        """BridgeError unless the value, or the default, is supported; the message names the first that is."""
        value = self.get(key, default)
        if value not in supported:
            raise BridgeError(f"{self.path}: {key} is {value!r}; {why}: only {supported[0]!r} can be converted{unless}")


def positive(value: Any) -> TypeGuard[float]:
    """Whether a value of config.json is a positive number that GGUF can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST


def sizes_of(config: Mapping[str, Any], size: int) -> list[str]:
    """What in a config.json is of this size, with it: "vocab_size 352", "num_attention_heads times head_dim 512"."""
    values = {**config, **table(config.get("text_config", config.get("llm_config")))}
    numbers = {key: value for key, value in values.items() if type(value) is int and value > 0}
    matches = [f"{key} {size}" for key, value in numbers.items() if value == size and _SIZE.fullmatch(key)]
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = numbers.get(key)
        head_dim = numbers.get("head_dim")
        if heads is not None and head_dim is not None and heads * head_dim == size:
            matches.append(f"{key} {heads} times head_dim {head_dim}")
        elif key == "num_key_value_heads" and heads is not None and head_dim is None:
            width, all_heads = numbers.get("hidden_size", 0), numbers.get("num_attention_heads", 1)
            if width // all_heads * heads == size:
                matches.append(f"{key} {heads} of heads of {width // all_heads}")
    return matches

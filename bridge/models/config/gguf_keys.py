"""The keys of a family's GGUF, both ways: made from config.json, and read back into one.

    metadata=(
        Key("attention.indexer.top_k", "index_topk", 512),    a key of both, and its value where config.json has none
        Present("attention_bias", "attn_q.bias"),             in config.json: whether layers have that tensor
        Constant("expert_gating_func", 2),                    in every GGUF of the family
        Computed(_metadata, _config),                         what is not one key for one key
    )

Their order is that of the keys in the GGUF. A later one overrides an earlier one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.models.config.arguments import Arguments
from bridge.models.config.model_config import Config

_SAME: Any = object()


@dataclass(frozen=True)
class StoredKeys:
    """What the config of a GGUF's model is made of.

    arch    its architecture
    get     reads a key of the architecture: (name without the architecture's, value if it is missing)
    names   of its tensors
    values  what all families have, by the usual names of config.json
    """

    arch: str
    get: Callable[..., Any]
    names: Collection[str]
    values: Mapping[str, Any]

    def has(self, part: str) -> bool:
        """Whether a layer has a tensor of this name, which follows the layer's."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self.names)


class _Neither:
    """What has a key neither in the GGUF nor in config.json."""

    def metadata(self, config: Config, args: Arguments) -> dict[str, Any]:
        """Keys of the GGUF without the architecture's name -> their values; None omits a key."""
        return {}

    def config(self, stored: StoredKeys) -> dict[str, Any]:
        """Keys of a config.json that is made from a GGUF -> their values."""
        return {}


@dataclass(frozen=True)
class Key(_Neither):
    """A key of the GGUF that is a key of config.json.

    key       in the GGUF, after the architecture's name
    name      in config.json; "": it has none
    default   the value if config.json has none: a positive number, a positive integer, true or false, or a text, which
              the key's own value must be too; None: it must have an integer
    defines   the value is the size of this name in shapes
    size      the value is this one of `Arguments.sizes` instead, which is made otherwise
    missing   the value in config.json if the GGUF has none, if that is not the default
    optional  the GGUF has the key only where its value is neither 0 nor false
    """

    key: str
    name: str = ""
    default: Any = None
    defines: str = ""
    size: str = ""
    missing: Any = _SAME
    optional: bool = False

    def metadata(self, config: Config, args: Arguments) -> dict[str, Any]:
        size = self.size or self.defines
        value = args.sizes[size] if size else self.value(config)
        return {self.key: (value or None) if self.optional else value}

    def value(self, config: Config) -> Any:
        """The value that config.json gives the key; 0 if it is optional and there is none."""
        if self.optional and not config.get(self.name):
            return 0
        if isinstance(self.default, bool):
            return bool(config.get(self.name, self.default))
        if isinstance(self.default, str):
            return config.get(self.name, self.default)
        if isinstance(self.default, float):
            return config.number(self.name, self.default)
        return (config.side if self.defines else config.integer)(self.name, self.default)

    def config(self, stored: StoredKeys) -> dict[str, Any]:
        value = stored.get(self.key, self.default if self.missing is _SAME else self.missing)
        return {self.name: bool(value) if isinstance(self.default, bool) else value} if self.name else {}


@dataclass(frozen=True)
class Present(_Neither):
    """A key of config.json that says whether layers have a tensor, named by the end of its name in the GGUF."""

    name: str
    part: str

    def config(self, stored: StoredKeys) -> dict[str, Any]:
        return {self.name: stored.has(self.part)}


ATTENTION_BIAS = Present("attention_bias", "attn_q.bias")


@dataclass(frozen=True)
class Constant(_Neither):
    """A key that every GGUF of the family has with this value; None: none has it. config.json does not say it."""

    key: str
    value: Any

    def metadata(self, config: Config, args: Arguments) -> dict[str, Any]:
        return {self.key: self.value}


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Computed:
    """Keys that functions make.

    metadata  those of the GGUF, without the architecture's name, or tokenizer.*; None omits a key
    config    those of config.json; model_type and class, too, where models of a family have several
    """

    metadata: Callable[[Config, Arguments], Mapping[str, Any]] = _nothing
    config: Callable[[StoredKeys], Mapping[str, Any]] = _nothing


Entry = Key | Present | Constant | Computed


def typed(value: Any) -> GGUFValue:
    """A value with its GGUF type: counts are unsigned, numbers 32 bits wide."""
    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
    }  # fmt: skip
    if isinstance(value, list):
        sub = GGUFValueType.INT32 if type(value[0]) is int else kinds[type(value[0])]
        return GGUFValue(value, GGUFValueType.ARRAY, sub)
    return GGUFValue(value, kinds[type(value)])

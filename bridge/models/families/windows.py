"""Layers that attend only to a window, of a layout that GGUF writes down layer by layer."""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.model_config import Config


def window_layers(config: Config, args: Arguments) -> dict[str, Any]:
    """The keys of the window and of the layers that have it: by default all but every fourth; none without a window.

    Raises:
        BridgeError: layer_types is not one known type for each layer.
    """
    if not config.get("sliding_window"):
        return {}
    types = config.get("layer_types") or _by_pattern(config, args.layers)
    if len(types) != args.layers or not {*types} <= {*_TYPES.values()}:
        raise BridgeError(f"{config.path}: layer_types is {types!r:.80}, must be full or sliding, for every layer")
    return {
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": [kind == _WINDOWED for kind in types],
    }


def _by_pattern(config: Config, layers: int) -> list[str | None]:
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # "LLLG": local and global layers
        return [_TYPES.get(pattern[layer % len(pattern)]) for layer in range(layers)]
    period = config.integer("sliding_window_pattern", 4)
    return ["full_attention" if (layer + 1) % period == 0 else _WINDOWED for layer in range(layers)]


_WINDOWED = "sliding_attention"
_TYPES = {"L": _WINDOWED, "G": "full_attention"}

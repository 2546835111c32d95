"""Layers that attend only to a window: which a config.json names, and how GGUF has them."""

from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES, Windows, read_windows
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_number, rope_rules


def window_rule(arch: str) -> Windows:
    """llama.cpp's rule for an architecture that has windows."""
    rule = ARCHITECTURES[arch].windows
    assert rule is not None
    return rule


def window_layers(config: Config, layers: int, period: int) -> tuple[bool, ...]:
    """Whether each layer has a window: by layer_types, or by sliding_window_pattern, whose default is a period.

    Raises:
        BridgeError: layer_types is not one known type for each layer.
    """
    types = config.get("layer_types") or _by_pattern(config, layers, period)
    if len(types) != layers or not {*types} <= {*_TYPES.values()}:
        raise BridgeError(f"{config.path}: layer_types is {types!r:.80}, must be full or sliding, for every layer")
    return tuple(kind == _WINDOWED for kind in types)


def _by_pattern(config: Config, layers: int, period: int) -> list[str | None]:
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # "LLLG": local and global layers
        return [_TYPES.get(pattern[layer % len(pattern)]) for layer in range(layers)]
    period = config.integer("sliding_window_pattern", period)
    return ["full_attention" if (layer + 1) % period == 0 else _WINDOWED for layer in range(layers)]


def window_keys(
    config: Config, args: Arguments, arch: str, named: bool = False, tokens: int | None = None
) -> dict[str, Any]:
    """The keys of the window and of the layers that have it; these only where llama.cpp takes others for granted.

    named   of a family whose models may have no window; the layers are always named, as llama.cpp's converter does
    tokens  of the window, if the config does not say so

    Where no layer has the window its key is left out, or it is as long as the context if llama.cpp wants one always.
    """
    if named and not config.get("sliding_window"):
        return {}
    rule = window_rule(arch)
    windows = window_layers(config, args.layers, rule.period or 1)
    if not any(windows):
        return {"attention.sliding_window": args.context} if rule.tokens != 0 else {}
    keys: dict[str, Any] = {"attention.sliding_window": config.integer("sliding_window", tokens)}
    if named or windows != rule.by_default(args.layers):
        keys["attention.sliding_window_pattern"] = list(windows)
    return keys


def rotated_window_keys(config: Config, args: Arguments, arch: str, named: bool = True) -> dict[str, Any]:
    """`window_keys` of an architecture that rotates layers with a window alone; BridgeError where no layer has one."""
    keys = window_keys(config, args, arch, named)
    if not config.get("sliding_window") or not any(window_layers(config, args.layers, window_rule(arch).period or 1)):
        raise BridgeError(
            f"{config.path}: sliding_window is {config.get('sliding_window')}, and no layer has a window; llama.cpp "
            "rotates layers with a window alone here, others not at all"
        )
    return keys


def one_base_windows(arch: str) -> Computed:
    """The window's keys of a family whose models may have none, and in which both kinds of layers rotate alike."""

    def metadata(config: Config, args: Arguments) -> dict[str, Any]:
        base = local_base(config, args.rope.base)
        if base != args.rope.base:
            raise BridgeError(
                f"{config.path}: layers with a window rotate by rope_theta {base:g}, the others by "
                f"{args.rope.base:g}; llama.cpp has one for both in this architecture"
            )
        return {**window_keys(config, args, arch, named=True), "rope.freq_base_swa": base}

    def of_gguf(stored: StoredKeys) -> dict[str, Any]:
        base = stored.values["rope_parameters"]["rope_theta"]
        return {**window_config(stored), **rules_of_both(stored, base)}

    return Computed(metadata, of_gguf)


def local_base(config: Config, default: float = 10000.0) -> float:
    """The base of rotation in layers with a window; BridgeError where they scale it, which llama.cpp does not do."""
    rules = rope_rules(config).get("sliding_attention") or {}
    kind = rules.get("rope_type") or "default"
    if kind != "default":
        raise BridgeError(f"{config.path}: rope of type {kind!r} in layers with a window; llama.cpp has default there")
    return rope_number(config, rules, "rope_theta", config.get("rope_local_base_freq", default))


def window_config(stored: StoredKeys) -> dict[str, Any]:
    """The window and the layers that have it, in config.json; None and full attention where none has."""
    layers = stored.values["num_hidden_layers"]
    tokens, windows = read_windows(stored.arch, stored.get, layers)
    kinds = [_WINDOWED if local else "full_attention" for local in windows or layers * (False,)]
    return {"sliding_window": tokens or None, "layer_types": kinds}


def rules_of_both(stored: StoredKeys, local_base: float) -> dict[str, Any]:
    """The rules of rotation in layers with full attention, and in those with a window."""
    local = {"rope_type": "default", "rope_theta": local_base}
    return {"rope_parameters": {"full_attention": stored.values["rope_parameters"], "sliding_attention": local}}


_WINDOWED = "sliding_attention"
_TYPES = {"L": _WINDOWED, "G": "full_attention"}

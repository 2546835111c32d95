"""Who made a file, as pictures name and colour it: the same on all of them."""

from typing import Any

from bridge.cli.plot.theme import Theme
from bridge.quantize.settings import Calibration

_DEFAULT_METHOD = Calibration.method


def ours(maker: str) -> bool:
    return maker.startswith("gguf-bridge")


def name(maker: str) -> str:
    """ "llama.cpp's quantizer, imatrix" is "llama.cpp with imatrix"; the default method needs no naming."""
    short = maker.replace("'s quantizer", "").replace(", imatrix", " with imatrix").replace(", carried", ", converted")
    return short.removesuffix(f" --method {_DEFAULT_METHOD}")


def colour(maker: str, theme: Theme) -> str:
    if ours(maker):
        return theme.ours
    return theme.theirs if maker.startswith("llama.cpp") else theme.other


def bits_of(record: dict[str, Any]) -> str:
    """Which weights "bpw" counts."""
    return "bits per weight of " + ("the linear layers" if record.get("bits_of") == "linears" else "the whole file")

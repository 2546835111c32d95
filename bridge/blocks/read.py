"""WRITTEN: all block types that are written. READ: all that are read and multiplied. CALIBRATED: those whose scales
a calibration text chooses together with the codes; of K-quants it chooses codes on fitted scales.

A module of its own, because the codebooks and tables of the IQ types are the `gguf` package's, whose import takes
0.1 s: WRITTEN and CALIBRATED have all records when they are asked for, READ imports the types that are asked for.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridge.blocks import ROUNDED, TYPES
from bridge.blocks.base import BlockType

_READ_ONLY = ("Q1_0",)
_WITH_CODEBOOKS = (
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "MXFP4", "IQ4_NL", "NVFP4",
)  # fmt: skip
_PLAIN = ("Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

_FOLDERS = {"IQ": "codebook", "TQ": "small", "Q1": "integers"}  # of types whose modules are imported when asked for


class _Read(Mapping[str, BlockType]):
    """The records by name, in order."""

    def __init__(self) -> None:
        self.names = dict.fromkeys((*TYPES, *ROUNDED, *_READ_ONLY))

    def __getitem__(self, name: str) -> BlockType:
        if name not in self.names:
            raise KeyError(name)
        return _record(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@cache
def _record(name: str) -> BlockType:
    """The record of a type, from the module of its name."""
    if name in TYPES:
        return TYPES[name]
    block: BlockType = getattr(import_module(f"bridge.blocks.{_FOLDERS[name[:2]]}.{name.lower()}"), name)
    assert block.size == ROUNDED.get(name, block.size), name
    return block


READ: Mapping[str, BlockType] = _Read()

if TYPE_CHECKING:
    WRITTEN: dict[str, BlockType]
    CALIBRATED: dict[str, BlockType]


def __getattr__(name: str) -> Any:
    """WRITTEN and CALIBRATED, made when they are imported first."""
    names = {"WRITTEN": (*TYPES, *ROUNDED), "CALIBRATED": (*_WITH_CODEBOOKS, *_PLAIN)}.get(name)
    if names is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = {type: _record(type) for type in names}
    return globals()[name]

"""WRITTEN: all block types that are written. READ: all that are read and multiplied. CALIBRATED: those that are
`BlockType.calibrated`.

A module of its own, because the codebooks and tables of the IQ types are the `gguf` package's, whose import takes
0.1 s: WRITTEN and CALIBRATED have all records when they are asked for, READ imports the types that are asked for.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from bridge.blocks import ROUNDED, TYPES, load_block_type
from bridge.blocks.base import BlockType
from bridge.blocks.tensor_types import TENSOR_TYPES


class _Read(Mapping[str, BlockType]):
    """The records by name, in order."""

    def __init__(self) -> None:
        self.types = {type.name: type for type in TENSOR_TYPES if type.use}

    def __getitem__(self, name: str) -> BlockType:
        if name not in self.types:
            raise KeyError(name)
        return _record(name)

    def __contains__(self, name: object) -> bool:
        return name in self.types

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __len__(self) -> int:
        return len(self.types)


READ = _Read()


@cache
def _record(name: str) -> BlockType:
    return TYPES.get(name) or load_block_type(READ.types[name])


if TYPE_CHECKING:
    WRITTEN: dict[str, BlockType]
    CALIBRATED: dict[str, BlockType]


def __getattr__(name: str) -> Any:
    """WRITTEN and CALIBRATED, made when they are imported first."""
    if name not in ("WRITTEN", "CALIBRATED"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    records = {type: READ[type] for type in (*TYPES, *ROUNDED)}
    globals()["WRITTEN"] = records
    globals()["CALIBRATED"] = {type: block for type, block in records.items() if block.calibrated}
    return globals()[name]

"""What the grids of GGUF's block types have in common."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from bridge.blocks import BlockType
from bridge.encode.block_bytes import packer, row_bytes
from bridge.errors import BridgeError
from bridge.system.cpu.row_threads import over_rows


@dataclass
class BlockGrid:
    """A grid for `gptq_solver` over `rows` rows of `columns` weights in blocks of this type.

    Raises BridgeError if the columns do not fill whole blocks.
    """

    block: BlockType
    rows: int
    columns: int
    fit_columns: int = field(init=False)
    sub: int = field(init=False)
    low: int = field(init=False)
    high: int = field(init=False)
    a: np.ndarray = field(init=False)  # float32 [rows, columns / sub], as c
    c: np.ndarray = field(init=False)
    ternary: bool = field(default=False, init=False)
    row_fields: ClassVar[tuple[str, ...]] = ("a", "c")  # arrays that have the parameters of each row

    def __post_init__(self) -> None:
        block = self.block
        if self.columns % block.size:
            raise BridgeError(
                f"rows of {self.columns} weights do not fill {block} blocks of {block.size}; use another type"
            )
        self.fit_columns, self.sub = block.size, block.sub
        self.low, self.high = -block.zero, block.levels - 1 - block.zero
        self.a, self.c = (np.zeros((self.rows, self.columns // self.sub), np.float32) for _ in range(2))

    def copy_rows(self, rows: np.ndarray, source: Self, source_rows: np.ndarray) -> None:
        """See `gptq_solver.Grid`."""
        for name in self.row_fields:
            getattr(self, name)[rows] = getattr(source, name)[source_rows]

    def _pack(
        self, q: Callable[[slice], np.ndarray], sc: np.ndarray, mn: np.ndarray, d: np.ndarray, dmin: np.ndarray
    ) -> np.ndarray:
        """Blocks uint8 [rows, row bytes] of their fields; `q` gives the codes of some rows, uint8 counted from 0."""
        data = np.empty((self.rows, row_bytes(self.block, self.columns)), np.uint8)
        pack = packer(self.block.name)
        over_rows(self.rows, lambda r: pack(q(r), sc[r], mn[r], d[r], dmin[r], data[r]))
        return data

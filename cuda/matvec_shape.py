"""How products of matvec.py share their work: rows, units and warps, and the registers for them.

The floor is bytes over bandwidth, 8192 x 28672 in Q4_K are 132 MB, 30 us at 4.4 TB/s. To come near it:

    bytes in flight   Little's law: 4.4 TB/s times 0.8 us under load are 3.5 MB, 27 KB for each of 132
                      multiprocessors, 40 with room. 32 warps (64 registers) that wait for 2 rows x 1 unit of Q4_K,
                      1152 bytes, make 37 KB; x 2 units 65 KB, in 28 warps. So two units where a row has at least four
                      times that
    registers         of two units 32 hold weights of Q4_K. With 64 registers in all, the compiler issues 3 of the 8
                      loads before arithmetic on the first (27 KB in flight), with 80 all of them; it then uses 72.
                      Q6_K takes 16 loads, of which 80 allow for 8 to 12: it has 96, and 20 warps make 67 KB
    warps             what fits at once is one wave: 4224 warps. With fewer, rows are split: 2048 pairs of rows of
                      4096 x 14336 become 4096 warps of half a row

This is reasoning, not measurement: scripts/gpu_check.py times `shapes_to_try` where there is a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bridge.cuda.superblock import functions

if TYPE_CHECKING:
    from bridge.cuda.matrix import DeviceMatrix

COLUMNS_OF_A_LANE = 4  # of x; with more, each half of a warp takes half of them
_MULTIPROCESSOR = 64 << 10  # registers of a multiprocessor
_REGISTERS, _MORE_REGISTERS = 64, 80  # of a thread whose warp loads up to two units at once, or more
_MOST_REGISTERS, _LOADS = 96, 3  # and where a unit takes more than so many loads, whose addresses take registers too


class MatvecShape(NamedTuple):
    """How a kernel shares the work; see above. `warps` are those of a block."""

    rows: int
    units: int
    split: int
    warps: int


def choose_shape(matrix: DeviceMatrix, n: int, exact: bool = False, products: int = 1) -> MatvecShape:
    """The shape that products of n columns use, of which a launch makes so many; see above."""
    rows = 2
    units = 2 if n == 1 and not exact and matrix.units % 64 == 0 and matrix.units >= 256 else 1
    wanted = _MULTIPROCESSOR // (32 * _registers(rows, units)) * matrix.device.multiprocessors
    split = 1
    pairs = matrix.rows // rows * products
    while split < _most_split(n) and pairs * split < wanted * 3 // 4 and matrix.units >= 64 * units * split:
        split *= 2
    return MatvecShape(rows, units, split, 4)


def _registers(rows: int, units: int) -> int:
    """Registers that a thread may have: enough for all loads of a round."""
    return _REGISTERS if rows * units <= 2 else _MORE_REGISTERS


def _most_split(n: int) -> int:
    """Warps that may share rows; with more, some kernels of several columns run out of registers."""
    return 4 if n == 1 else 2


def shapes_to_try(matrix: DeviceMatrix, n: int, exact: bool = False) -> list[MatvecShape]:
    """All shapes for n columns, the one in use first; `launch(..., shape=)` takes them, to be timed."""
    chosen = choose_shape(matrix, n, exact)
    tried = [
        MatvecShape(rows, units, split, warps)
        for rows in ((2, 1, 4) if n == 1 else (2, 1))
        for units in ((1, 2, 4) if n == 1 else (1,))
        for split, warps in ((1, 4), (2, 4), (4, 4), (1, 8), (1, 2))
        if split <= _most_split(n) and rows * units <= 4 and 32 * units * split <= max(32, matrix.units)
    ]
    return [chosen, *(shape for shape in tried if shape != chosen)]


def registers_of(type: str, n: int, shape: MatvecShape, exact: bool = False) -> int:
    """Registers that a thread of a kernel may have."""
    found = _registers(shape.rows, shape.units)
    if found == _MORE_REGISTERS and functions(type).layout.loads > _LOADS:
        found = _MOST_REGISTERS
    if n > COLUMNS_OF_A_LANE and functions(type).layout.fields:  # constants of tables stay in registers
        found += 16 if exact else 8
    return found

"""How matvec.py shares its work: rows and units of a warp, warps that share rows, warps of a block.

The floor is bytes over bandwidth: 8192 x 28672 in Q4_K are 132 MB, 30 us at the 4.4 TB/s that an H200 reads. To come
near it:

    bytes in flight   Little's law: 4.4 TB/s times 0.8 us under load are 3.5 MB, 27 KB for each of 132
                      multiprocessors, 40 with room. 32 warps (64 registers) that wait for 2 rows x 1 unit of Q4_K,
                      1152 bytes, make 37 KB; x 2 units 74 KB. So two units where a row has at least four times that
    warps             what fits at once is one wave: 4224 warps. With fewer, rows are split: 2048 pairs of rows of
                      4096 x 14336 become 4096 warps of half a row

This is reasoning, no measurement: scripts/gpu_check.py times `shapes_to_try` where there is a GPU.
"""

from typing import NamedTuple

from bridge.cuda.matrix import DeviceMatrix

COLUMNS_OF_A_LANE = 4  # of x; of more, each half of a warp takes one half
_WARPS_AT_ONCE = 32  # warps of 64 registers that a multiprocessor runs at once


class MatvecShape(NamedTuple):
    """How a kernel shares the work; see above. `warps` are those of a block."""

    rows: int
    units: int
    split: int
    warps: int


def choose_shape(matrix: DeviceMatrix, n: int, exact: bool = False) -> MatvecShape:
    """The one that products of n columns use; see above."""
    rows = 2
    units = 2 if n == 1 and not exact and matrix.units % 64 == 0 and matrix.units >= 256 else 1
    wanted = _WARPS_AT_ONCE * matrix.device.multiprocessors
    split = 1
    while (
        split < _most_split(n) and matrix.rows // rows * split < wanted * 3 // 4 and matrix.units >= 64 * units * split
    ):
        split *= 2
    return MatvecShape(rows, units, split, 4)


def _most_split(n: int) -> int:
    """Warps that may share rows; with more, some kernels of several columns run out of registers."""
    return 4 if n == 1 else 2


def shapes_to_try(matrix: DeviceMatrix, n: int, exact: bool = False) -> list[MatvecShape]:
    """All that may be tried for n columns, the one in use first: `launch(..., shape=)` takes them, to be timed."""
    chosen = choose_shape(matrix, n, exact)
    tried = [
        MatvecShape(rows, units, split, warps)
        for rows in ((2, 1, 4) if n == 1 else (2, 1))
        for units in ((1, 2, 4) if n == 1 else (1,))
        for split, warps in ((1, 4), (2, 4), (4, 4), (1, 8), (1, 2))
        if split <= _most_split(n) and rows * units <= 4 and 32 * units * split <= max(32, matrix.units)
    ]
    return [chosen, *(shape for shape in tried if shape != chosen)]

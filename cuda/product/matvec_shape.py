"""How products of matvec.py share their work: rows, units and warps, and the registers for them.

The floor is bytes over bandwidth, 8192 x 28672 in Q4_K are 132 MB, 30 us at 4.4 TB/s. To come near it:

    bytes in flight   Little's law: 4.4 TB/s times 0.8 us under load are 3.5 MB, 27 KB for each of 132
                      multiprocessors, 40 with room. 32 warps (64 registers) that wait for 2 rows x 1 unit of Q4_K,
                      1152 bytes, make 37 KB; x 2 units 65 KB, in 28 warps. So two units where a row has at least four
                      times that
    registers         of two units 32 hold weights of Q4_K. With 64 registers in all, the compiler issues 3 of the 8
                      loads before arithmetic on the first (27 KB in flight), with 80 all of them; it then uses 72.
                      Q6_K takes 16 loads, of which 80 allow for 8 to 12: it has 96, and 20 warps make 67 KB
    warps             what fits at once is one wave: 4224 warps. With fewer, rows are split. Long rows of a product
                      alone are anyway: 4096 warps of 28672 columns end in a wave and a part of one, in which most of
                      the GPU waits; 16384 shorter ones leave less of it idle

Measured on an H100 of 132 multiprocessors and 3.1 TB/s by scripts/gpu_check.py, which times `shapes_to_try`, us:

                      Q4_K     Q6_K     Q8_0     Q5_K     Q3_K     Q2_K
    8192 x 28672      53.1     68.2     84.9     61.0     43.6     28.7     not split
                      45.9     64.8     82.2     55.6     37.9     28.7     in 4 parts
                      45.2     63.2     81.4     54.4     36.8     28.3     the best of 30 shapes
    4096 x 14336      14.2     18.6     22.9     16.8     12.9      8.8     in 2 parts
                      13.2     18.2     22.1     15.5     12.2      9.5     in 4 parts
                      13.1     17.8     22.1     15.5     11.3      8.8     the best

With less than 3.8 KB of weights for a warp, more parts cost more than they bring: up to 13% for IQ1_M. In a decoder's
step, whose launches begin while others end, one wave is better: its warps wait with their first weights on the way.
There rows in 4 parts took Llama 3 8B in Q4_K from 459 to 445 tokens a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bridge.cuda.forms.superblock import functions

if TYPE_CHECKING:
    from bridge.cuda.forms.matrix import DeviceMatrix

COLUMNS_OF_A_LANE = 4  # of x; with more, each half of a warp takes half of them
_MULTIPROCESSOR = 64 << 10  # registers of a multiprocessor
_REGISTERS, _MORE_REGISTERS = 64, 80  # of a thread whose warp loads up to two units at once, or more
_LONG = 256  # units of a row
_ENOUGH = 3800  # bytes of weights for a warp
_MOST_REGISTERS, _LOADS = 96, 3  # and where a unit takes more than so many loads, whose addresses take registers too


class MatvecShape(NamedTuple):
    """How a kernel shares the work; see above. `warps` are those of a block."""

    rows: int
    units: int
    split: int
    warps: int


def choose_shape(
    matrix: DeviceMatrix, n: int, exact: bool = False, products: int = 1, alone: bool = True
) -> MatvecShape:
    """The shape of a launch of so many products of n columns, alone or in a decoder's step; see above."""
    rows = 2
    units = 2 if n == 1 and not exact and matrix.units % 64 == 0 and matrix.units >= _LONG else 1
    wanted = _MULTIPROCESSOR // (32 * _registers(rows, units)) * matrix.device.multiprocessors * 3 // 4
    if alone and matrix.units >= _LONG:
        wanted = max(wanted, matrix.nbytes * products // (2 * _ENOUGH))  # half of what there is before the last split
    split = 1
    pairs = matrix.rows // rows * products
    while split < _most_split(n) and pairs * split < wanted and matrix.units >= 64 * units * split:
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


def registers_of(type: str, n: int, shape: MatvecShape, exact: bool = False, fused: bool = False) -> int:
    """Registers that a thread of a kernel may have; `fused`: it includes the steps around a product."""
    count = _registers(shape.rows, shape.units)
    if count == _MORE_REGISTERS and functions(type).layout.loads > _LOADS:
        count = _MOST_REGISTERS
    if n > COLUMNS_OF_A_LANE and functions(type).layout.fields:  # constants of tables stay in registers
        count += 16 if exact else 8
    if n > 1 and (fused or shape.units > 1):  # several columns in a decoder's step
        count += 16
    return count

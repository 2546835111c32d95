"""The form of a block that unpacked.py's kernels read.

    vectors, one lane a row
        codes        uint8 [size/4] words, or their values if the type has a table, less the zero point as int8; of 8
                     bits, a vector of low digits and one of high ones, v = 16 high + low, both -8..8, since AVX2 has
                     no product of int8 that does not saturate
        K-quants     sc twice as int16 [subs], words of mn [subs/4]
        starts       where there is a zero point: where sums start, -128 times the sums of the codes, as values of x are
                     x + 128; int16 [size/4/started], two a lane, or int32, times sc, [size/32], of types with one level
                     of scales [size/sum_span]
        then         d float32, or the scales [subs] of a type of scale bytes; -dmin of K-quants, dmin

Values that have a common divisor are divided by it. A sum of int16 that starts at -128 times its codes ends within 128
times their magnitudes, though values reach 255: from 0, half as many products could be added. On the way it may wrap.
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

from bridge.blocks import BlockType
from bridge.runtime.cpu.machine.intrinsics_avx2 import words_together
from bridge.runtime.cpu.machine.operands import Nibbles
from bridge.system.records import record


@record
class UnpackedLayout:
    """Where the parts of an unpacked block are, in bytes."""

    block: BlockType
    lanes: int

    @property
    def groups(self) -> int:
        """Row groups that are multiplied by the same broadcasts: a tile has at most eight sums in int16."""
        return 1 if self.block.value_bits == 8 else 2

    @property
    def vector(self) -> int:
        return 4 * self.lanes

    @property
    def digits(self) -> int:
        """Vectors of a word."""
        return 2 if self.block.value_bits == 8 else 1

    @property
    def scales_at(self) -> int:
        return self.block.size // 4 * self.digits * self.vector

    @property
    def mins_at(self) -> int:
        return self.scales_at + self.block.is_k * self.block.subs * self.vector

    @property
    def starts_at(self) -> int:
        return self.mins_at + (self.block.is_k and self.block.has_min) * self.block.subs // 4 * self.vector

    @property
    def sums(self) -> int:
        """Sums of int32 in a block."""
        return self.block.size // (32 if self.block.is_k else self.block.sum_span)

    @property
    def step(self) -> int:
        """What values are multiples of; they are divided by it, and d is multiplied."""
        return gcd(*self.block.values) if self.block.value_bits < 8 and self.block.values else 1

    @property
    def magnitude(self) -> int:
        """Of signed codes, at most, or of their digits; 0: codes are unsigned."""
        block = self.block
        if block.value_bits == 8:
            return 8
        numbers = block.values or (-block.zero, block.levels - 1 - block.zero)
        return max(map(abs, numbers)) // self.step if block.lift else 0

    @property
    def started(self) -> int:
        """Words whose products are summed in int16, from a start of their own: as many as saves a widening.

        0: sums in int16 start at 0, those in int32 where 128 is made up for.
        """
        if not self.block.lift or self.block.value_bits == 8:
            return 0
        scaled = self.block.sum_span // 4
        lone = min(scaled, words_together(7, self.magnitude))
        most = min(scaled, words_together(7, self.magnitude, started=True))
        started = 1 << (most.bit_length() - 1)
        return started if scaled // started < -(-scaled // lone) else 0

    @property
    def starts(self) -> int:
        """Vectors in a block of what sums start from."""
        if not self.block.lift:
            return 0
        return self.block.size // 4 // self.started if self.started else self.sums

    @property
    def d_at(self) -> int:
        return self.starts_at + self.starts * self.vector

    @property
    def dmin_at(self) -> int:
        return self.d_at + (self.block.subs if self.block.scales else 1) * self.vector

    @property
    def nbytes(self) -> int:
        return self.dmin_at + self.vector

    def parts(self, i: int) -> list[tuple[range, int]]:
        """The words of sum i that have one scale, and where that is as int16."""
        block = self.block
        if not block.is_k:
            words = block.sum_span // 4
            return [(range(i * words, (i + 1) * words), -1)]
        words = block.sub // 4
        subs = range(8 * i // words, 8 * (i + 1) // words)
        return [(range(j * words, (j + 1) * words), self.scales_at + j * self.vector) for j in subs]

    def words(self, v: Any, space: Any, r: int, words: range) -> list[Callable[[], Any]]:
        """Words of row group r."""
        offsets = [r * self.nbytes + k * self.digits * self.vector for k in words]
        return [Nibbles(v, space, offset) if self.digits == 2 else partial(v.load, space, offset) for offset in offsets]

    def starts_of(self, v: Any, space: Any, r: int, words: range) -> list[Callable[[], Any]]:
        """Where the sums of words of row group r start."""
        base = r * self.nbytes + self.starts_at
        return [partial(v.load_shorts, space, base + k // self.started * self.vector) for k in words[:: self.started]]

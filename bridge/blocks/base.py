"""The common parts of GGUF block types: the fields of a block, and the record that describes a type.

A block holds `size` consecutive weights of one row. It is split into sub-blocks of `sub` weights,
each with its own scale code (and min code); the block's f16 `d` (and `dmin`) turn those into reals:

    affine types   w = d * sc * q - dmin * mn         q in 0..levels-1     (Q2_K, Q4_K, Q5_K)
    scaled types   w = d * sc * (q - zero)                                 (Q3_K, Q6_K)
    plain types    w = d * (q - zero)                                      (Q2_0, Q4_0, Q5_0, Q8_0, TQ1_0, TQ2_0)
                   w = d * q + dmin                                        (Q4_1, Q5_1)
    table types    w = scales[sc] * values[q]    sc a byte, no d           (MXFP4, NVFP4)
                   w = d * values[q]                                       (Q1_0, IQ4_NL)
                   w = d * sc * values[q]                                  (IQ4_XS)
                   w = unit * d * (2 * sc + 1) * values[q]                 (IQ1, IQ2, IQ3)

Each type's module defines `pack` and `unpack` for one block in plain Python that Numba can compile
unchanged: they are both the readable reference and the source of every fast kernel.

    pack(q, sc, mn, d, dmin, out)
        q    uint8 [size]        codes, 0..levels-1
        sc   int8  [size/sub]    sub-block scale codes, of table types as they are stored; ignored by plain types
        mn   uint8 [size/sub]    sub-block min codes; ignored by types without them
        d, dmin  uint16          IEEE half bit patterns; dmin ignored where the type has none
        out  uint8 [nbytes]      the block

    unpack(raw, q, sc, mn)       the inverse for q, sc, mn; d and dmin are the little-endian halves
                                 at byte offsets `d_at` and `dmin_at`

The types IQ1, IQ2 and IQ3 hold the number of a codebook's point in place of 4 or 8 codes (see `codebooks.py`). Their
codes are levels and signs of the point's coordinates, so that what reads or multiplies codes needs no codebook; but
`pack` can only write codes that make up a point.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class ScaleSearch(NamedTuple):
    """How the scales of sub-blocks are searched, and d and dmin of their block; a search uses some of the fields."""

    first: float  # code of the widest weight at the first start, less the last code; of table types its value
    step: float  # by which it grows from start to start
    starts: int
    refits: int = 0  # least squares from the best start on
    tries: int = 0  # values of d
    rounds: int = 0  # sweeps over the sub-blocks, each followed by least squares for d
    compared: int = 2  # scale codes, next to the best scale, whose errors a sweep compares
    d_step: float = 0.0  # at each further try of d, the largest scale's code is so much less
    m_step: float = 0.0  # the same for dmin and the largest minimum
    grid_wide: int = 0  # how far the first sweep of a grid looks, in steps of sc
    wide: int = 0  # the same for the best grid
    shakes: int = 0  # values of d close to the best one that are tried
    coarse: float = 0.0  # a scale this many times smaller than the largest is small


def put_word(out, at, word):
    """Write 16 bits, such as those of d, the low byte first; plain Python, as `pack` is."""
    out[at] = word & 255
    out[at + 1] = word >> 8


def d_of_nibbles(raw, places):
    """The bits of a d whose four nibbles are the high ones of these bytes; plain Python, as `unpack` is."""
    bits = 0
    for i in range(4):
        bits |= (raw[places[i]] >> 4) << (4 * i)
    return bits


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One GGUF block type: what its fields may hold, how they lie in memory, and how weights are rounded to it.

    A default: no such field.
    """

    name: str  # as gguf.GGMLQuantizationType spells it
    size: int  # weights in a block
    sub: int  # weights in a sub-block
    nbytes: int  # bytes in a block
    levels: int  # number of codes
    zero: int = 0  # the code that means 0
    unit: float = 1.0  # a power of two that multiplies d
    scale_lo: int = 1  # range of sub-block scale codes
    scale_hi: int = 1
    odd_scales: bool = False  # a scale code means 2 * sc + 1
    min_hi: int = 0  # min codes are 0..min_hi
    d_at: int = -1  # byte offset of d in the block
    d_nibbles: tuple[int, ...] = ()  # where d is not in one place: the bytes whose high nibbles it is, lowest first
    dmin_at: int = -1  # byte offset of dmin (Q4_1, Q5_1: m)
    pack: Callable[..., None]
    unpack: Callable[..., None]
    values: tuple[int, ...] = ()  # table types: the value of each code
    scales: tuple[float, ...] = ()  # and of each scale byte, where there is no d
    points: "np.ndarray | None" = field(default=None, compare=False, repr=False)  # see `codebooks.points_of`
    even_signs: bool = False  # of 8 weights, an even number are negative, so that seven signs tell the eighth
    shifted: int = 0  # weights whose values are shifted together, by 1 or by -1
    clips: bool = False  # codes that leave the range are clipped; other types cannot carry them
    last_resort: bool = False  # taken when no other type is good enough
    ternary: bool = False  # codes are those of -1, 0 and 1
    matrix_scale: bool = False  # a tensor of its own, `<name>.scale`, multiplies all of a matrix
    nibble_run: int = 0  # the last size / 2 bytes hold codes: low nibbles of so many columns, high ones of as many next
    search: ScaleSearch | None = None  # how floats are rounded to it
    text_starts: tuple[float, float] = (0.0, 0.0)  # of plain types whose scales a text chooses: first and step
    lift_share: float = 0.0  # how far d is lifted against shrinking, see `encode.rounding.round_values`
    needs_imatrix: bool = False  # llama.cpp rounds to it with an imatrix only, but for embeddings and head
    noise: float = 0.3  # squared error over squared weights, with some margin, of weights that are rounded to it

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.nbytes / self.size

    @property
    def subs(self) -> int:
        """Sub-blocks in a block."""
        return self.size // self.sub

    @property
    def sum_span(self) -> int:
        """Columns that share a scale, at most 32: kernels take the sums of activations over as many."""
        return min(self.sub, 32)

    @property
    def lift(self) -> int:
        """The offset that makes codes, or their values, unsigned in kernels: 128 for values of 8 bits."""
        if not self.values:
            return self.zero
        return -min(self.values) if self.value_bits < 8 else 128

    @property
    def value_bits(self) -> int:
        """Bits of a code, or of its value, made unsigned."""
        numbers = self.values or range(self.levels)
        return (max(numbers) - min(numbers)).bit_length()

    @property
    def no_scale(self) -> int:
        """The bits that are all set in a scale byte that means NaN; NVFP4 ignores the top bit."""
        return 255 if self.subs == 1 else 127

    @property
    def is_k(self) -> bool:
        """Whether scales of sub-blocks are themselves quantized, as those of K-quants are."""
        return self.subs > 1 and not self.scales

    @property
    def has_min(self) -> bool:
        """Whether the type has a term besides scale times code."""
        return self.dmin_at >= 0

    @property
    def numbered(self) -> bool:
        """Whether several codes share a number: a codebook's, or one of another base than 2."""
        return self.points is not None or self.levels.bit_count() != 1

    @property
    def calibrated(self) -> bool:
        """Whether a calibration text chooses scales with codes; those of K-quants it chooses on fitted scales."""
        return not self.ternary and (bool(self.values) or not self.is_k)

    @property
    def ggml(self) -> Any:
        """The type as a `gguf.GGMLQuantizationType`."""
        from bridge.blocks.ggml import GGMLQuantizationType

        return GGMLQuantizationType[self.name]

    def __str__(self) -> str:
        return self.name

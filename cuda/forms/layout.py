"""The form of a tensor on the device: each field of the blocks in its own array, in about as many bytes as in GGUF.

A *unit* is what a lane takes at a time: 32 columns of a row. Unit u of row r has the number r * units + u; there is
no padding between rows, and the arrays are indexed by that number:

    codes    planes of bits (see bridge/runtime/cpu/forms/layout.py), of the 8 words of a unit (word i: columns 4i to
             4i + 3, a byte each), cut into pieces of up to 16 bytes; each piece is an array, so that a warp reads
             up to 512 bytes in a row. The third bits of Q3_K are placed so that they fall above their lower two:
             word 2f + v has bit 2f + 2 - v for f 0..2, bits 7 and 0 for f = 3. Types with a table of values: see
             tables.py; types with numbered codes: see numbered.py
    scales   K-quants: 16 bytes a superblock, packed as scales.py says; others: a unit's own bytes, see tables.py
    halves   d, or d and dmin, of a block, if the scales have no room for them; or d and six bits of each unit
    factors  NVFP4 only: float32 a row, by which its products and weights are multiplied
    table    IQ1, IQ2 and IQ3 only: the codebook, see numbered.py

    type          pieces of codes  scales  halves  bits per weight
    Q2_0          8                     -       2   2.25
    TQ2_0         8                     -       2   2.0625
    Q2_K          8                    16       4   2.625
    Q3_K          8, 4                 16       -   3.5     (GGUF 3.4375: 2 bytes pad the 16)
    Q4_K          16                   16       -   4.5
    MXFP4         16                    1       -   4.25
    NVFP4         16                    4       -   4.5     (and 4 bytes a row)
    IQ4_NL        16                    -       2   4.5
    IQ4_XS        16                    -       8   4.25
    Q4_0, Q4_1    16                    -    2, 4   4.5, 5
    Q5_K          16, 4                16       -   5.5
    Q5_0, Q5_1    16, 4                 -    2, 4   5.5, 6
    Q6_K          16, 8                16       2   6.5625
    Q8_0          16, 16                -       2   8.5     (codes as int8)
    others        see numbered.py

All arrays lie in one buffer, one after the other. `room` is the number of units that each can hold: 128 more than there
are, rounded up to a multiple of 128. So arrays are aligned to 128 bytes, and a warp may read beyond the last row.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.forms import numbered, scales, tables

from bridge.blocks import BlockType
from bridge.blocks.read import WRITTEN
from bridge.runtime.cpu.forms.layout import PLANES
from bridge.runtime.cpu.forms.rowmajor import readers_of
from bridge.system.kernels.jit import from_plain, inlined, specialize

UNIT = 32  # columns
_EVEN = 128  # units
THIRD_BIT = np.array([2, 1, 4, 3, 6, 5, 7, 0], np.uint32)  # the bit of each word in the plane of third bits


@dataclass(frozen=True)
class DeviceLayout:
    """Sizes and places of a type's arrays; bytes are those of a unit."""

    block: BlockType

    @property
    def units_per_block(self) -> int:
        return self.block.size // UNIT

    @property
    def code_bits(self) -> int:
        return 4 if self.block.values else (self.block.levels - 1).bit_length()

    @property
    def planes(self) -> list[tuple[int, int]]:
        """(width in bits, words in a unit) of each plane, lowest bits first: 8 words of codes make `width` words."""
        return [(width, width) for width in PLANES[self.code_bits]]

    @property
    def pieces(self) -> list[int]:
        """Words of a unit in each piece."""
        if self.block.numbered:
            return self.book.pieces if self.book else [1]
        return [min(4, words - start) for _, words in self.planes for start in range(0, words, 4)]

    @property
    def pieces_at(self) -> list[int]:
        """Where the array of each piece begins, in bytes for each of the `room` units."""
        return [4 * sum(self.pieces[:i]) for i in range(len(self.pieces))]

    @property
    def scales_at(self) -> int:
        return 4 * sum(self.pieces)

    @property
    def fields(self) -> tables.FieldForm | None:
        """Where the fields of a type with a table of values or with numbered codes are."""
        return numbered.form_of(self.block)

    @property
    def book(self) -> numbered.Book | None:
        """The codebook of a type that has one."""
        return numbered.book_of(self.block)

    @property
    def whole(self) -> bool:
        """Whether a lane reads all scales of a superblock."""
        return self.block.name in scales.FORMS and scales.FORMS[self.block.name].whole

    @property
    def own(self) -> int:
        """Bytes of scales, and whatever is with them, that a lane reads for its unit alone."""
        if self.fields:
            return self.fields.own
        return 2 if self.block.is_k and not self.whole else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of packed scales in a block."""
        return 16 if self.whole else self.own * self.units_per_block

    @property
    def half_bytes(self) -> int:
        """Bytes of d (and dmin) of a block outside of its packed scales."""
        if self.fields:
            return self.fields.shared
        if self.block.is_k and scales.FORMS[self.block.name].holds_halves:
            return 0
        return 4 if self.block.has_min else 2

    @property
    def loads(self) -> int:
        """Loads of a lane for a unit."""
        return len(self.pieces) + (self.whole or self.own > 0) + (self.half_bytes > 0)

    @property
    def factored(self) -> bool:
        """Whether there is a factor for each row."""
        return self.block.matrix_scale

    @property
    def largest(self) -> int:
        """The most bytes that a buffer can have: kernels count loads, the smallest of one byte or two, in int32."""
        return (1 if self.own == 1 else 2) << 31

    def halves_at(self, room: int) -> int:
        """Where the halves begin, in bytes."""
        return room * self.scales_at + room // self.units_per_block * self.scale_bytes

    def factors_at(self, room: int) -> int:
        """Where the factors of rows, or the codebook, begin, in bytes."""
        return self.halves_at(room) + room // self.units_per_block * self.half_bytes

    def room(self, rows: int, columns: int) -> int:
        """Units that each array has room for."""
        return (rows * (columns // UNIT) // _EVEN + 2) * _EVEN

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of the buffer."""
        table = self.book.table.nbytes if self.book else 0
        return self.factors_at(self.room(rows, columns)) + 4 * rows * self.factored + table

    @property
    def bpw(self) -> float:
        """Bits that a product reads for a weight."""
        per_block = self.units_per_block * self.scales_at + self.scale_bytes + self.half_bytes
        return 8 * per_block / self.block.size


# set per type by `specialize`
unpack: Any = None
d_bits: Any = None
put: Any = None
pack_scales: Any = None
size = subs = nbytes = dmin_at = flip = no_scale = 0
thirds = scaled = formed = False
low_width = high_width = scales_at = scale_bytes = half_bytes = 0
own_bytes = unit_subs = scale_bits = scale_lift = own_at = shared = 0


@inlined
def _put_plane(words, first, width, shift, thirds, out, plane_at, room, unit):
    """Bits shift.. of words[first : first + 8], `width` of each byte -> pieces of the plane at plane_at; see above."""
    mask = np.uint32(0x01010101) * np.uint32((1 << width) - 1)
    for v in range(width):
        value = np.uint32(0)
        for i in range(8 // width):
            bit = THIRD_BIT[i] if thirds else np.uint32(width * i)
            value |= ((words[first + v + i * width] >> np.uint32(shift)) & mask) << bit
        piece = v // 4
        wide = min(4, width - 4 * piece)
        out[plane_at + 4 * piece * room + unit * wide + v % 4] = value


@inlined
def _put_nibbles(q, first, scale, out, room, unit):
    """Codes q[first : first + 32], of 4 bits, as in tables.py; 0, as they are all that is to be put."""
    for v in range(4):
        value = np.uint32(0)
        for i in range(8):
            value |= np.uint32(q[first + 8 * v + i] & np.uint8(15)) << np.uint32(4 * i)
        out[unit * 4 + v] = value
    return np.uint32(0)


def _repack(raw, first, step, out, room):
    """Blocks of raw uint8 [rows, row bytes], whose rows become rows first, first + step ... of the matrix in out.

    Returns the first row of raw whose d, dmin or scale is not finite, or -1.
    """
    out32 = out.view(np.uint32)
    out16 = out.view(np.uint16)
    blocks = raw.shape[1] // nbytes
    per_block = size // UNIT
    scale_base = room * scales_at
    half_base = scale_base + room // per_block * scale_bytes
    q = np.empty(size, np.uint8)
    code_words = q.view(np.uint32)
    sc = np.zeros(subs, np.int8)
    mn = np.zeros(subs, np.uint8)
    bad = -1
    for row in range(raw.shape[0]):
        for b in range(blocks):
            block = raw[row, b * nbytes : (b + 1) * nbytes]
            number = (first + row * step) * blocks + b
            unpack(block, q, sc, mn)
            d = np.uint16(0) if scaled else np.uint16(d_bits(block))
            dmin = np.uint16(0)
            if dmin_at >= 0:
                dmin = np.uint16(block[dmin_at]) | np.uint16(block[dmin_at + 1]) << np.uint16(8)
            if (d & 0x7C00 == 0x7C00 or dmin & 0x7C00 == 0x7C00) and bad < 0:
                bad = row
            if scaled:
                for j in range(subs):
                    if np.int32(sc[j]) & no_scale == no_scale and bad < 0:
                        bad = row
            if formed:
                words = out32[(half_base + number * half_bytes) // 4 :]
                if half_bytes == 8:
                    words[0] = 0
                    words[1] = d
                for u in range(per_block):
                    unit = number * per_block + u
                    scale = np.uint32(0)
                    for j in range(unit_subs):
                        code = np.uint32(np.int32(sc[unit_subs * u + j]) + scale_lift)
                        scale |= (code & np.uint32((1 << scale_bits) - 1)) << np.uint32(scale_bits * j)
                    more = put(q, 32 * u, scale, out32, room, unit)
                    if own_at >= 0:
                        more |= scale << np.uint32(own_at)
                    for i in range(own_bytes):
                        out[scale_base + unit * own_bytes + i] = np.uint8(more >> np.uint32(8 * i))
                    if half_bytes == 8:
                        six = scale if shared else more >> np.uint32(16)
                        words[0] |= (six & np.uint32(15)) << np.uint32(4 * u)
                        words[1] |= (six >> np.uint32(4)) << np.uint32(16 + 2 * u)
                if half_bytes == 2:
                    out16[(half_base + number * 2) // 2] = d
                continue
            if flip:
                for i in range(size):
                    q[i] ^= np.uint8(128)
            for u in range(per_block):
                unit = number * per_block + u
                _put_plane(code_words, 8 * u, low_width, 0, False, out32, 0, room, unit)
                if high_width:
                    _put_plane(code_words, 8 * u, high_width, low_width, thirds, out32, low_width * room, room, unit)
            if scale_bytes:
                word = (scale_base + number * scale_bytes) // 4
                pack_scales(sc, mn, d, dmin, out32[word : word + 4])
            if half_bytes:
                half = (half_base + number * half_bytes) // 2
                out16[half] = d
                if half_bytes == 4:
                    out16[half + 1] = dmin
    return bad


def _no_scales(sc, mn, d, dmin, out):
    pass


@cache
def repacker(name: str) -> Any:
    """The compiled `repack(raw, first, step, out, room)` of a type."""
    layout = DeviceLayout(WRITTEN[name])
    block, form = layout.block, layout.fields
    (low, _), *high = layout.planes
    fields: dict[str, Any] = {}
    if form:
        fields = {
            "put": numbered.putter(name) if block.numbered else _put_nibbles, "own_bytes": form.own,
            "unit_subs": max(1, block.subs // layout.units_per_block) if form.scale_bits else 0,
            "scale_bits": form.scale_bits, "scale_lift": np.int32(form.scale_lift),
            "own_at": form.scale_at if form.scale_in == tables.OWN else -1, "shared": form.scale_in == tables.SHARED,
        }  # fmt: skip
    return specialize(
        _repack, f"{name}_cuda", **readers_of(block),
        pack_scales=from_plain(scales.FORMS[name].pack if name in scales.FORMS else _no_scales, inlined),
        size=block.size, subs=block.subs, nbytes=block.nbytes, dmin_at=block.dmin_at, formed=form is not None,
        thirds=layout.code_bits == 3, scaled=bool(block.scales), no_scale=np.int32(block.no_scale),
        flip=int(layout.code_bits == 8), low_width=low, high_width=sum(width for width, _ in high),
        scales_at=layout.scales_at, scale_bytes=layout.scale_bytes, half_bytes=layout.half_bytes, **fields,
    )  # fmt: skip

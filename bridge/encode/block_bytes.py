"""From the fields of blocks to their bytes: `bridge.blocks`' own pack functions, compiled, row by row.

Fields of `rows` rows of `n` blocks each:

    q          uint8  [rows, n * size]        codes
    sc         int8   [rows, n * size/sub]    scale codes; any array for plain types
    mn         uint8  [rows, n * size/sub]    min codes; any array for types without them
    d, dmin    float32 [rows, n]              exact halves; dmin any array for types without it
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.base import d_of_nibbles
from bridge.blocks.read import READ, WRITTEN
from bridge.system.kernels.half import half_bits
from bridge.system.kernels.jit import UNSET, from_plain, inlined, specialize

# set per type by `specialize`
pack = unpack = UNSET
size = subs = nbytes = 0


def _pack_blocks(q, sc, mn, d, dmin, out):
    for b in range(out.shape[0]):
        pack(q[b], sc[b], mn[b], d[b], dmin[b], out[b])


@cache
def packer(name: str) -> Callable[..., None]:
    """The `pack_rows(q, sc, mn, d, dmin, out)` of a type; out is uint8 [rows, n * nbytes], contiguous."""
    block = WRITTEN[name]
    pack_blocks = specialize(_pack_blocks, name, pack=from_plain(block.pack, inlined))

    def pack_rows(
        q: np.ndarray, sc: np.ndarray, mn: np.ndarray, d: np.ndarray, dmin: np.ndarray, out: np.ndarray
    ) -> None:
        fields = q.reshape(-1, block.size), sc.reshape(-1, block.subs), mn.reshape(-1, block.subs)
        halves = (half_bits(x.ravel()) for x in (d, dmin))
        pack_blocks(*fields, *halves, out.reshape(-1, block.nbytes))

    return pack_rows


def _unpack_rows(raw, q, sc, mn):
    for row in range(q.shape[0]):
        for b in range(q.shape[1] // size):
            codes, scales = slice(b * size, (b + 1) * size), slice(b * subs, (b + 1) * subs)
            unpack(raw[row, b * nbytes : (b + 1) * nbytes], q[row, codes], sc[row, scales], mn[row, scales])


@cache
def _unpacker(name: str) -> Callable[..., None]:
    block = READ[name]
    return specialize(
        _unpack_rows, name, unpack=from_plain(block.unpack, inlined), size=block.size, subs=block.subs,
        nbytes=block.nbytes,
    )  # fmt: skip


def unpack_codes(block: BlockType, raw: np.ndarray) -> np.ndarray:
    """The codes uint8 [rows, in] in blocks uint8 [rows, row bytes]."""
    return unpack_fields(block, raw)[0]


def unpack_fields(block: BlockType, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields q, sc and mn in blocks uint8 [rows, row bytes]; sc and mn mean nothing in types without them."""
    rows, n = raw.shape[0], raw.shape[1] // block.nbytes
    q = np.empty((rows, n * block.size), np.uint8)
    sc, mn = np.ones((rows, n * block.subs), np.int8), np.zeros((rows, n * block.subs), np.uint8)
    _unpacker(block.name)(raw, q, sc, mn)
    return q, sc, mn


def unpack_scales(block: BlockType, raw: np.ndarray, sc: np.ndarray) -> np.ndarray:
    """The scales float32 [rows, in / sub] in blocks uint8 [rows, row bytes], whose field sc is given: what multiplies
    q - zero, or the value of q."""
    if block.scales:
        return np.asarray(block.scales, np.float32)[sc.view(np.uint8)]
    if block.d_nibbles:
        bits = d_of_nibbles(raw.reshape(len(raw), -1, block.nbytes).T.astype(np.uint16), block.d_nibbles)
        d = np.ascontiguousarray(bits.T).view(np.float16).astype(np.float32)
    else:
        d = unpack_halves(block, raw, block.d_at)
    scales = np.repeat(d, block.subs, 1)
    if block.is_k:
        scales = scales * (2 * sc.astype(np.float32) + 1 if block.odd_scales else sc)
    return scales * np.float32(block.unit) if block.unit != 1 else scales


def unpack_halves(block: BlockType, raw: np.ndarray, offset: int) -> np.ndarray:
    """float32 [rows, blocks]: the halves at a byte of every block."""
    bytes_ = raw.reshape(len(raw), -1, block.nbytes)[:, :, offset : offset + 2]
    return np.ascontiguousarray(bytes_).view("<f2")[..., 0].astype(np.float32)


def row_bytes(block: BlockType, columns: int) -> int:
    """Bytes of one row of `columns` weights; `columns` is a multiple of the block's size."""
    return columns // block.size * block.nbytes

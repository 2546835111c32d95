"""Unpacks words to one byte per code, at the speed of memory.

A row's words, one after the other, are a little-endian stream of b-bit codes, least significant bit
first, whatever the width of a word. Codes of 2, 4 and 8 bits do not cross bytes. With other widths,
eight codes fill b bytes, and three shift-and-mask steps spread them over the eight
bytes of a uint64:

    hgfedcba (b bits each)  ->  ....hgfe ....dcba  ->  ..hg ..fe ..dc ..ba  ->  h g f e d c b a

Planar packing (gptq_p) uses several such streams: each block of 32 codes holds the low plane's
4*w bytes, then the next plane's; a code joins the planes' fields. `widths` lists the planes' bits:
(4,) is plain 4-bit, (4, 1) planar 5-bit.

GPTQ's words run down the input features, so codes are transposed, in tiles that stay in cache.
"""

import numpy as np

from bridge.system.jit import kernel

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_TILE = 64  # blocks of 32 codes: with 16 rows, at most 64 KiB


@kernel
def _expand(source, widths, bits, n, out):
    """The first n codes of a row: source uint8, out uint8, both one-dimensional."""
    if bits == 8:
        for i in range(n):
            out[i] = source[i]
        return
    done = 0
    if bits == 4:  # lanes that do not cross bytes: LLVM vectorizes this
        done = n // 2 * 2
        for i in range(n // 2):
            out[2 * i] = source[i] & 15
            out[2 * i + 1] = source[i] >> 4
    elif bits == 2:
        done = n // 4 * 4
        for i in range(n // 4):
            out[4 * i] = source[i] & 3
            out[4 * i + 1] = source[i] >> 2 & 3
            out[4 * i + 2] = source[i] >> 4 & 3
            out[4 * i + 3] = source[i] >> 6
    else:
        done = n // 8 * 8
        _expand_odd(source, widths, bits, done, out)
    for k in range(done, n):  # plain streams only: planar ones have multiples of 32 codes
        at = k * bits
        x = np.uint64(source[at >> 3])
        if (at & 7) + bits > 8:
            x |= np.uint64(source[(at >> 3) + 1]) << np.uint64(8)
        out[k] = np.uint8((x >> np.uint64(at & 7)) & np.uint64((1 << bits) - 1))


@kernel
def _expand_odd(source, widths, bits, n, out):
    """Codes that cross bytes or are planar: eight at a time, n a multiple of 8."""
    for group in range(n // 8):
        at = (group >> 2) * 4 * bits
        g = group & 3
        shift = 0
        value = np.uint64(0)
        for p in range(len(widths)):
            w = widths[p]
            first = at + g * w
            x = np.uint64(0)
            for i in range(w):
                x |= np.uint64(source[first + i]) << np.uint64(8 * i)
            value |= _spread(x, w) << np.uint64(shift)
            shift += w
            at += 4 * w
        k = group * 8
        for i in range(8):
            out[k + i] = np.uint8(value >> np.uint64(8 * i))


@kernel
def _spread(x, w):
    """Eight fields of w bits -> eight bytes."""
    one = np.uint64(1)
    m = (one << np.uint64(4 * w)) - one
    x = (x & m) | (x << np.uint64(32 - 4 * w) & m << np.uint64(32))
    m = ((one << np.uint64(2 * w)) - one) * np.uint64(0x0000000100000001)
    x = (x & m) | (x << np.uint64(16 - 2 * w) & m << np.uint64(16))
    m = ((one << np.uint64(w)) - one) * np.uint64(0x0001000100010001)
    return (x & m) | (x << np.uint64(8 - w) & m << np.uint64(8))


@kernel
def _unpack_rows(source, widths, bits, out):
    """source uint8 [rows, bytes] -> out uint8 [rows, n]."""
    for row in range(out.shape[0]):
        _expand(source[row], widths, bits, out.shape[1], out[row])


@kernel
def _unpack_columns(words, widths, bits, out):
    """words uint32 [in*bits/32, out] -> out uint8 [out, in], 16 rows and 64 * 32 codes at a time."""
    length = words.shape[0]
    rows, n = out.shape
    tile = _TILE * bits
    scratch = np.empty((16, tile + 16), np.uint32)  # an odd stride, in cache lines
    stream = scratch.view(np.uint8)
    for row in range(0, rows, 16):
        height = min(16, rows - row)
        for start in range(0, length, tile):
            width = min(tile, length - start)
            for i in range(width):
                line = words[start + i, row : row + height]
                if height == 16:
                    for j in range(16):
                        scratch[j, i] = line[j]
                else:
                    for j in range(height):
                        scratch[j, i] = line[j]
            k = start // bits * 32
            count = min(n - k, _TILE * 32)
            for j in range(height):
                _expand(stream[j], widths, bits, count, out[row + j, k : k + count])


@kernel
def _unpack_gemm(words, out):
    """AWQ gemm: words uint32 [in, out/8] -> out uint8 [out, in].

    Nibble i of a word is column order[i] of its eight, order = 0 2 4 6 1 3 5 7. Eight words of eight
    consecutive input features are an 8 x 8 matrix of codes, transposed in registers.
    """
    low, half, byte = np.uint64(0x00000000FFFFFFFF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF)
    n, columns = words.shape
    x = np.empty(8, np.uint64)
    scratch = np.empty((64, 16), np.uint32)
    for column in range(0, columns, 16):
        width = min(16, columns - column)
        for start in range(0, n, 64):
            height = min(64, n - start)
            for i in range(height):
                for j in range(width):
                    scratch[i, j] = words[start + i, column + j]
            for j in range(width):
                for block in range(0, height, 8):
                    k = start + block
                    count = min(8, n - k)
                    for i in range(8):
                        x[i] = _spread(np.uint64(scratch[block + i, j]), 4) if i < count else np.uint64(0)
                    for i in range(4):
                        a, b = x[i], x[i + 4]
                        x[i] = (a & low) | b << np.uint64(32)
                        x[i + 4] = a >> np.uint64(32) | (b & ~low)
                    for q in range(4):
                        i = (q & 1) + (q & 2) * 2
                        a, b = x[i], x[i + 2]
                        x[i] = (a & half) | (b & half) << np.uint64(16)
                        x[i + 2] = (a >> np.uint64(16) & half) | (b & ~half)
                    for q in range(4):
                        i = 2 * q
                        a, b = x[i], x[i + 1]
                        x[i] = (a & byte) | (b & byte) << np.uint64(8)
                        x[i + 1] = (a >> np.uint64(8) & byte) | (b & ~byte)
                    for i in range(8):
                        row = (column + j) * 8 + (2 * i if i < 4 else 2 * i - 7)
                        value = x[i]
                        if count == 8:  # a constant trip count becomes one store
                            for c in range(8):
                                out[row, k + c] = np.uint8(value >> np.uint64(8 * c))
                        else:
                            for c in range(count):
                                out[row, k + c] = np.uint8(value >> np.uint64(8 * c))


def _widths(bits: int, planar: bool) -> np.ndarray:
    return np.array(PLANES[bits] if planar else (bits,), np.int64)


def unpack_rows(words: np.ndarray, bits: int, n: int, planar: bool = False) -> np.ndarray:
    """Codes along the rows: words, integers [rows, m] of any width -> uint8 [rows, n]."""
    source = np.ascontiguousarray(words).view(np.uint8)
    assert source.shape[1] * 8 >= n * bits
    out = np.empty((len(source), n), np.uint8)
    _unpack_rows(source, _widths(bits, planar), bits, out)
    return out


def unpack_words(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Codes that do not cross words, 32 // bits in each: words, int32 [rows, m] -> uint8 [rows, n]."""
    lanes = 32 // bits
    unsigned = words.view(np.uint32)
    out = np.empty((len(words), words.shape[1] * lanes), np.uint8)
    for lane in range(lanes):
        out[:, lane::lanes] = unsigned >> np.uint32(bits * lane) & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(out[:, :n])


def unpack_columns(words: np.ndarray, bits: int, n: int, planar: bool = False) -> np.ndarray:
    """Codes down the columns, as GPTQ stores them: words, integers [m, out] of any width -> uint8 [out, n]."""
    if words.dtype.itemsize != 4:
        return unpack_rows(words.T, bits, n, planar)
    assert len(words) * 32 >= n * bits
    out = np.empty((words.shape[1], n), np.uint8)
    _unpack_columns(np.ascontiguousarray(words).view(np.uint32), _widths(bits, planar), bits, out)
    return out


def unpack_gemm(words: np.ndarray) -> np.ndarray:
    """AWQ's interleaved codes: int32 [in, out/8] -> uint8 [out, in]."""
    out = np.empty((words.shape[1] * 8, words.shape[0]), np.uint8)
    _unpack_gemm(np.ascontiguousarray(words).view(np.uint32), out)
    return out

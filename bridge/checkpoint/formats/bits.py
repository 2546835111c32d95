"""Unpacks words to one byte per code, at the speed of memory.

A row's words, one after the other, are a little-endian stream of b-bit codes, least significant bit
first, whatever the width of a word. Codes of 2, 4 and 8 bits do not cross bytes: each byte is widened to
its codes, by NumPy. With other widths,
eight codes fill b bytes, and three shift-and-mask steps spread them over the eight
bytes of a uint64:

    hgfedcba (b bits each)  ->  ....hgfe ....dcba  ->  ..hg ..fe ..dc ..ba  ->  h g f e d c b a

Planar packing (gptq_p) uses several such streams: each block of 32 codes holds the low plane's
4*w bytes, then the next plane's; a code joins the planes' fields. `widths` lists the planes' bits:
(4,) is plain 4-bit, (4, 1) planar 5-bit.

GPTQ's words run down the input features, so they are transposed first, a few rows at a time, which stay in cache.
"""

import numpy as np

from bridge.system.kernels.jit import inner, kernel

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word of AWQ's is output feature order[i] of its eight
_CHUNK = 1 << 18  # codes that are unpacked at a time: what is read and written stays in cache


def _unpack_even(source, bits, out):
    """Codes that do not cross bytes: source uint8 [rows, bytes] -> out uint8 [rows, bytes * 8 / bits]."""
    if bits == 8:
        out[:] = source
    elif bits == 4:  # hg -> h g
        wide = out.view(np.uint16)
        wide[:] = source
        wide |= wide << 4
        wide &= 0x0F0F
    else:  # hgfe -> hg..hgfe -> h.g.f.e, with other codes at the dots
        wide = out.view(np.uint32)
        wide[:] = source
        wide |= wide << 12
        wide |= wide << 6
        wide &= 0x03030303


@kernel
def _unpack_odd(source, widths, bits, out):
    """Codes that cross bytes or are planar, eight at a time: source uint8 [rows, bytes] -> out uint8 [rows, 8 * m]."""
    for row in range(out.shape[0]):
        for group in range(out.shape[1] // 8):
            plane = (group >> 2) * 4 * bits
            g = group & 3
            shift = 0
            value = np.uint64(0)
            for p in range(len(widths)):
                w = widths[p]
                first = plane + g * w
                x = np.uint64(0)
                for i in range(w):
                    x |= np.uint64(source[row, first + i]) << np.uint64(8 * i)
                value |= _spread(x, w) << np.uint64(shift)
                shift += w
                plane += 4 * w
            for i in range(8):
                out[row, group * 8 + i] = np.uint8(value >> np.uint64(8 * i))


@inner
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
def transpose(words, first, rows, out):
    """words uint32 [m, n] -> out uint32 [rows, >= m]: `rows` columns of `words` from `first` on, 16 at a time."""
    for row in range(0, rows // 16 * 16, 16):
        for i in range(words.shape[0]):
            for j in range(16):
                out[row + j, i] = words[i, first + row + j]
    for i in range(words.shape[0]):
        for row in range(rows // 16 * 16, rows):
            out[row, i] = words[i, first + row]


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


def unpack_rows(words: np.ndarray, bits: int, n: int, planar: bool = False) -> np.ndarray:
    """Codes along the rows: words, integers [rows, m] of any width -> uint8 [rows, n]."""
    source = np.ascontiguousarray(words).view(np.uint8)
    assert source.shape[1] * 8 >= n * bits
    out, nbytes = _whole_bytes(len(source), bits, n)
    if source.shape[1] < nbytes:
        source = np.pad(source, ((0, 0), (0, nbytes - source.shape[1])))
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        _unpack(source[start : start + step, :nbytes], bits, planar, out[start : start + step])
    return np.ascontiguousarray(out[:, :n])


def unpack_columns(words: np.ndarray, bits: int, n: int, planar: bool = False) -> np.ndarray:
    """Codes down the columns, as GPTQ stores them: words, integers [m, out] of any width -> uint8 [out, n]."""
    if words.dtype.itemsize != 4:
        return unpack_rows(words.T, bits, n, planar)
    length, rows = words.shape
    assert length * 32 >= n * bits
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    out, nbytes = _whole_bytes(rows, bits, n)
    step = max(16, _CHUNK // out.shape[1] // 16 * 16)
    lines = np.empty((min(step, rows), length + 16), np.uint32)  # an odd stride, in cache lines
    for start in range(0, rows, step):
        count = min(step, rows - start)
        transpose(unsigned, start, count, lines)
        _unpack(lines[:count].view(np.uint8)[:, :nbytes], bits, planar, out[start : start + count])
    return np.ascontiguousarray(out[:, :n])


def _whole_bytes(rows: int, bits: int, n: int) -> tuple[np.ndarray, int]:
    """Memory for n codes a row, in multiples of 8: uint8 [rows, m], and how many bytes they are packed in."""
    count = -(-n // 8)
    return np.empty((rows, count * 8), np.uint8), count * bits


def _unpack(source: np.ndarray, bits: int, planar: bool, out: np.ndarray) -> None:
    """source uint8 [rows, m / 8 * bits] -> out uint8 [rows, m], m a multiple of 8."""
    if bits in (2, 4, 8):
        _unpack_even(source, bits, out)
    else:
        _unpack_odd(source, np.array(PLANES[bits] if planar else (bits,)), bits, out)


def unpack_words(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Codes that do not cross words, 32 // bits in each: words, int32 [rows, m] -> uint8 [rows, n]."""
    lanes = 32 // bits
    unsigned = words.view(np.uint32)
    out = np.empty((len(words), words.shape[1] * lanes), np.uint8)
    for lane in range(lanes):
        out[:, lane::lanes] = unsigned >> np.uint32(bits * lane) & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(out[:, :n])


def unpack_gemm(words: np.ndarray, bits: int = 4) -> np.ndarray:
    """AWQ's interleaved codes: int32 [in, out * bits / 32] -> uint8 [out, in]."""
    if bits != 4:  # auto-round's: one stream
        stored = unpack_rows(words, bits, words.shape[1] * 32 // bits).reshape(len(words), -1, 8)
        return np.ascontiguousarray(stored[:, :, np.argsort(GEMM_ORDER)].reshape(len(words), -1).T)
    out = np.empty((words.shape[1] * 8, words.shape[0]), np.uint8)
    _unpack_gemm(np.ascontiguousarray(words).view(np.uint32), out)
    return out

"""Packs one byte per code into words: the inverse of `bits`, whose streams and planes these are.

Codes of 2 and 4 bits do not cross bytes: two or four of them are joined by NumPy. With other widths, eight codes, the
bytes of a uint64, are joined in three shift-and-mask steps:

    h g f e d c b a (bytes)  ->  ..hg ..fe ..dc ..ba  ->  ....hgfe ....dcba  ->  hgfedcba (b bits each)
"""

import numpy as np

from bridge.checkpoint.formats.bits import GEMM_ORDER, PLANES, transpose
from bridge.system.kernels.jit import inner, kernel

_CHUNK = 1 << 18  # codes that are packed at a time: what is read and written stays in cache


def pack_rows(codes: np.ndarray, bits: int, planar: bool = False) -> np.ndarray:
    """Codes along the rows, uint8 [rows, n] -> uint32 [rows, ceil(n * bits / 32)]."""
    rows, n = codes.shape
    padded = codes if n % 32 == 0 else np.pad(codes, ((0, 0), (0, -n % 32)))
    padded = np.ascontiguousarray(padded)
    out = np.empty((rows, padded.shape[1] // 8 * bits), np.uint8)
    step = max(1, _CHUNK // max(1, padded.shape[1]))
    for start in range(0, rows, step):
        _pack(padded[start : start + step], bits, planar, out[start : start + step])
    return np.ascontiguousarray(out.view(np.uint32)[:, : -(-n * bits // 32)])


def pack_columns(codes: np.ndarray, bits: int, planar: bool = False) -> np.ndarray:
    """Codes down the columns, as GPTQ stores them: uint8 [out, n] -> int32 [ceil(n * bits / 32), out]."""
    return transposed(pack_rows(codes, bits, planar)).view(np.int32)


def pack_gemm(codes: np.ndarray) -> np.ndarray:
    """4-bit codes uint8 [out, in] in AWQ's order: int32 [in, out/8]."""
    words = np.empty((codes.shape[0] // 8, codes.shape[1]), np.uint32)
    _pack_gemm(np.ascontiguousarray(codes), np.array(GEMM_ORDER), words)
    return transposed(words).view(np.int32)


def transposed(words: np.ndarray) -> np.ndarray:
    """uint32 [m, n] -> [n, m]."""
    out = np.empty(words.shape[::-1], np.uint32)
    transpose(words, 0, words.shape[1], out)
    return out


def _pack(codes: np.ndarray, bits: int, planar: bool, out: np.ndarray) -> None:
    """codes uint8 [rows, n], n a multiple of 32 -> out uint8 [rows, n * bits / 8]."""
    if bits == 8:
        out[:] = codes
    elif bits == 4:  # h.g. -> ..hg, with zeros at the dots
        wide = codes.view(np.uint16)
        out[:] = wide >> 4 | wide
    elif bits == 2:  # h.g.f.e. -> hgfe
        wide = codes.view(np.uint32)
        out[:] = wide >> 18 | wide >> 12 | wide >> 6 | wide
    else:
        _pack_odd(codes.view(np.uint64), np.array(PLANES[bits] if planar else (bits,)), bits, out)


@kernel
def _pack_odd(codes, widths, bits, out):
    """Codes that cross bytes or are planar, eight at a time: codes uint64 [rows, m] -> out uint8 [rows, m * bits]."""
    for row in range(out.shape[0]):
        for group in range(codes.shape[1]):
            plane = (group >> 2) * 4 * bits
            g = group & 3
            shift = 0
            for p in range(len(widths)):
                w = widths[p]
                x = joined(codes[row, group] >> np.uint64(shift), w)
                first = plane + g * w
                for i in range(w):
                    out[row, first + i] = np.uint8(x >> np.uint64(8 * i))
                shift += w
                plane += 4 * w


@inner
def joined(x, w):
    """The low w bits of eight bytes -> eight fields of w bits."""
    one = np.uint64(1)
    m = ((one << np.uint64(w)) - one) * np.uint64(0x0001000100010001)
    x = (x & m) | (x >> np.uint64(8 - w) & m << np.uint64(w))
    m = ((one << np.uint64(2 * w)) - one) * np.uint64(0x0000000100000001)
    x = (x & m) | (x >> np.uint64(16 - 2 * w) & m << np.uint64(2 * w))
    m = (one << np.uint64(4 * w)) - one
    return (x & m) | (x >> np.uint64(32 - 4 * w) & m << np.uint64(4 * w))


@kernel
def _pack_gemm(codes, order, out):
    """codes uint8 [8 * m, n] -> out uint32 [m, n]: nibble i of a word is row order[i] of its eight."""
    for block in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[block, k] = codes[8 * block + order[0], k]
        for i in range(1, 8):
            row = 8 * block + order[i]
            for k in range(out.shape[1]):
                out[block, k] |= np.uint32(codes[row, k]) << np.uint32(4 * i)

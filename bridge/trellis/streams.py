"""How states lie in a tile, and tiles in a checkpoint. All layouts are converted to one:

    words      uint16 [tile rows, tile columns, n]: a circular stream of 16n bits, from the highest of each word on
    state i    the L bits from bit i * step on; step = K * V, or 16 where each state has a word of its own
    positions  int32: weight t of a tile, value t % V of state t // V, is at row * width + column

Rows are output features. Layouts (m out, n in):

    qtip      int16 [tiles, 16K], tiles and weights in row-major order
    swizzled  the same bytes, for 16 x 16 tiles in pairs of pairs, as QTIP's kernel for hyb loads them
    exl3      int16 [n/16, m/16, 16K], pairs of words swapped, a state *ends* at bit (t+1)K
    plain     int32 [tiles, states], unpacked: blocks of td_x along in, td_y along out, V values along td_y
"""

import numpy as np

TILE = 16  # rows and columns of a tile, everywhere but in hand-made files


def row_major(rows: int, columns: int) -> np.ndarray:
    """Positions of weights that lie row after row."""
    return np.arange(rows * columns, dtype=np.int32)


def swizzled() -> np.ndarray:
    """QTIP's positions for its hyb kernel."""
    t = np.arange(TILE * TILE)
    row = (t >> 1 & 1) * 8 + (t >> 3) // 4
    column = (t >> 2 & 1) * 8 + (t >> 3) % 4 * 2 + (t & 1)
    return (row * TILE + column).astype(np.int32)


def exl3() -> np.ndarray:
    """EXL3's positions."""
    t = np.arange(TILE * TILE)
    column = 2 * (t >> 3 & 3) + (t & 1) + 8 * (t >> 1 & 1)
    row = (t >> 5) + 8 * (t >> 2 & 1)
    return (row * TILE + column).astype(np.int32)


def plain(td_x: int, td_y: int) -> np.ndarray:
    """Positions of the plain layout, in tiles of td_y rows and td_x columns."""
    t = np.arange(td_x * td_y)
    return (t % td_y * td_x + t // td_y).astype(np.int32)


def qtip_words(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """uint16 [rows, columns, n] of int16 [rows * columns * n], tiles in row-major order."""
    return stored.view(np.uint16).reshape(rows, columns, -1)


def swizzled_words(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """`qtip_words` of the swizzled layout, which has an even number of rows and columns of tiles."""
    pairs = stored.reshape(-1).view(np.uint8).reshape(rows // 2, columns // 2, 32, 2, 2, -1)
    ordered = np.ascontiguousarray(pairs.transpose(0, 4, 1, 3, 2, 5)[..., ::-1])
    return ordered.reshape(rows, columns, -1).view(">u2").astype(np.uint16)


def exl3_words(stored: np.ndarray) -> np.ndarray:
    """uint16 [m/16, n/16, 16K] of int16 [n/16, m/16, 16K], turned by 16 - K bits so that states begin at tK."""
    inputs, outputs, count = stored.shape
    words = stored.view(np.uint16).reshape(inputs, outputs, count // 2, 2)[..., ::-1].reshape(stored.shape)
    both = np.roll(words, 1, -1).astype(np.uint32) << np.uint32(16) | words
    turned = (both >> np.uint32(16 - count // 16)).astype(np.uint16)
    return np.ascontiguousarray(turned.transpose(1, 0, 2))


def plain_words(states: np.ndarray, bits: int, inputs: int) -> np.ndarray:
    """uint16 [out tiles, in tiles, states]: states [tiles, states] of `bits` bits at the top of a word each.

    inputs  tiles along in, which come first in the order of tiles
    """
    words = (states.astype(np.uint32) << np.uint32(16 - bits)).astype(np.uint16)
    return np.ascontiguousarray(words.reshape(inputs, -1, states.shape[1]).transpose(1, 0, 2))


def states_of(words: np.ndarray, step: int, bits: int) -> np.ndarray:
    """uint16 [..., states]: the states of tail-biting streams [..., n]."""
    starts = np.arange(0, words.shape[-1] * 16, step)
    ring = np.concatenate([words, words[..., :1]], -1).astype(np.uint32)
    word = starts >> 4
    windows = ring[..., word] << np.uint32(16) | ring[..., word + 1]
    return (windows >> (32 - bits - (starts & 15)).astype(np.uint32) & np.uint32(2**bits - 1)).astype(np.uint16)

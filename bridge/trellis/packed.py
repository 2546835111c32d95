"""Layers from what checkpoints store: QTIP's packed tiles, EXL3's, and plain states."""

from dataclasses import replace

import numpy as np

from bridge.errors import BridgeError
from bridge.trellis import streams
from bridge.trellis.codebooks import BitshiftCodebook
from bridge.trellis.hadamard import Rotation
from bridge.trellis.layer import TrellisLayer
from bridge.trellis.streams import TILE

EXL3_BLOCK = 128  # of EXL3's transforms; both sides are padded to it


def bits_of(name: str, numel: int, out: int, columns: int, tile: tuple[int, int], values: int) -> int:
    """K of a QTIP module, from the size of its codes. Raises BridgeError where sizes contradict each other."""
    td_x, td_y = tile
    if td_x < 1 or td_y < 1 or out % td_x or columns % td_y or td_y % values:
        raise BridgeError(
            f"{name}: a matrix of {out} x {columns} does not consist of tiles of {td_x} x {td_y} with V = {values}; "
            "take config.json and weights of one checkpoint"
        )
    bits, rest = divmod(16 * numel, out * columns)
    if rest or not 1 <= bits <= 8 or td_x * td_y * bits % 16:
        raise BridgeError(
            f"{name}: trellis holds {numel} words, which are {16 * numel / (out * columns):.4g} bits for each of "
            f"{out} x {columns} weights; the checkpoint is damaged"
        )
    return bits


def is_swizzled(book: BitshiftCodebook, tile: tuple[int, int]) -> bool:
    """Whether QTIP stores such codes in the order of its kernel."""
    usual = (book.L, book.V, book.tlut_bits, *tile) == (16, 2, 9, TILE, TILE)
    return book.decode_mode == "quantlut_sym" and usual and book.K in (2, 3, 4)


def looks_random(book: BitshiftCodebook, words: np.ndarray) -> bool:
    """Whether codes are no encoder's: their bytes may be in another order.

    An encoder scales weights to 0.9 of the codebook's deviation and chooses values of less: of 2 bits, 0.76 of its
    variance. Bytes in a wrong order give values at random, which have all of it.
    """
    return not _quieter(_values(book, words), book.lut)


def _values(book: BitshiftCodebook, words: np.ndarray) -> np.ndarray:
    """float32: the values of the states of the first 256 tiles."""
    return book.values(streams.states_of(words.reshape(-1, words.shape[-1])[:256], book.K * book.V, book.L))


def _quieter(values: np.ndarray, other: np.ndarray) -> bool:
    """Whether values have clearly less variance than others."""
    return float(np.square(values).mean()) < float(np.square(other).mean()) * (1 - 8 / np.sqrt(values.size))


def qtip_layer(
    name: str, trellis: np.ndarray, book: BitshiftCodebook, tile: tuple[int, int], su: np.ndarray, sv: np.ndarray,
    blocks: tuple[int, int] = (1, 1), bias: np.ndarray | None = None, packed: bool | None = None,
) -> TrellisLayer:  # fmt: skip
    """QTIP's own layout.

    trellis  int16, tiles flattened or not; its size gives K
    tile     (td_x, td_y), outputs and inputs
    su, sv   float32 [in], [out]
    packed   whether tiles are swizzled for QTIP's kernel where it has one; None: as the codes tell
    blocks   of the transforms on the input and the output side: tp_rank where rcp says so

    Raises BridgeError where sizes do not fit or no Hadamard matrix is known.
    """
    out, columns = len(sv), len(su)
    bits = bits_of(name, trellis.size, out, columns, tile, book.V)
    book = book if bits == book.K else replace(book, K=bits)
    rows, width = out // tile[0], columns // tile[1]
    stored = np.ascontiguousarray(trellis).reshape(-1)
    words, positions = streams.qtip_words(stored, rows, width), streams.row_major(*tile)
    if packed is not False and is_swizzled(book, tile):
        if rows % 2 or width % 2:
            raise BridgeError(f"{name}: {out} x {columns} is not a multiple of 32 x 32; the checkpoint is damaged")
        swizzled = streams.swizzled_words(stored, rows, width)
        # QTIP's first release did not swizzle 3 and 4 bits, and its configs do not tell
        if packed or not _quieter(_values(book, words), _values(book, swizzled)):
            words, positions = swizzled, streams.swizzled()
    rotations = Rotation.of(columns, name, blocks[0]), Rotation.of(out, name, blocks[1])
    step = book.K * book.V
    return TrellisLayer(name, words, step, book, positions, tile, su, sv, rotations, (out, columns), bias)


def plain_layer(
    name: str, states: np.ndarray, book: BitshiftCodebook, tile: tuple[int, int], su: np.ndarray, sv: np.ndarray,
    scale: float, bias: np.ndarray | None = None,
) -> TrellisLayer:  # fmt: skip
    """States that are not packed: see `streams`; tile = (td_x, td_y), inputs and outputs. Raises BridgeError."""
    out, columns = len(sv), len(su)
    td_x, td_y = tile
    if columns % 256 == 0 and states.shape == (columns // 256, out) and states.shape[1] != td_x * td_y // book.V:
        raise BridgeError(
            f"{name}: trellis is packed words [{columns // 256}, {out}], which cannot hold states of {book.L} bits "
            "for every weight; must be states [tiles, td_x * td_y / V]"
        )
    fits = td_x > 0 and td_y > 0 and columns % td_x == 0 and out % td_y == 0 and td_y % book.V == 0
    wanted = [columns // td_x * (out // td_y), td_x * td_y // book.V] if fits else None
    if wanted is None or list(states.shape) != wanted:
        raise BridgeError(
            f"{name}: trellis is {list(states.shape)}, blocks of {td_x} x {td_y} with V = {book.V} over "
            f"{columns} x {out} are {wanted or 'not whole'}; take config.json and weights of one checkpoint"
        )
    if states.size and not 0 <= (worst := int(states.min() if states.min() < 0 else states.max())) < 2**book.L:
        raise BridgeError(
            f"{name}: trellis holds the state {worst}, out of range for {book.L} bits; it is damaged, or packed"
        )
    words = streams.plain_words(states, book.L, columns // td_x)
    return TrellisLayer(
        name, words, 16, book, streams.plain(td_x, td_y), (td_y, td_x), su, sv * np.float32(scale), None,
        (out, columns), bias,
    )  # fmt: skip


def exl3_layer(
    name: str, trellis: np.ndarray, book: BitshiftCodebook, su: np.ndarray, sv: np.ndarray,
    bias: np.ndarray | None = None,
) -> TrellisLayer:  # fmt: skip
    """EXL3's: trellis int16 [in/16, out/16, 16K], su and sv float32 of the padded sizes."""
    out, columns = len(sv), len(su)
    rotations = Rotation(columns, EXL3_BLOCK), Rotation(out, EXL3_BLOCK)
    return TrellisLayer(
        name, streams.exl3_words(trellis), book.K, book, streams.exl3(), (TILE, TILE), su, sv, rotations,
        (out, columns), bias,
    )  # fmt: skip

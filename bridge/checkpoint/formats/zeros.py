"""GPTQ's zero points: how each tool stored them, and how to recognize that from the words.

`qzeros` holds z (v2) or z - 1 (v1), and v1 was written in more than one way:

    AutoGPTQ      subtracts 1 per code, then ORs the codes into the word unmasked: a z of 0 fills its
                  lane and all higher lanes of the word with ones, irrecoverably
    GPTQModel     subtracts a constant from the whole packed word (0x11111111 for 4 bits): a z of 0
                  borrows from the next lane, and adding the same constant restores it exactly.
                  Before 7.3.2 the constant is that of the checkpoint's default bits, even in a module
                  with other bits; since then that of the module's own bits
    GPTQModel, 3 bits
                  before 7.0.0 the three words' constants were in the wrong order; since then 1 is
                  subtracted per code, modulo 8
    auto-round, 5 to 7 bits
                  1 is subtracted per code, modulo 2^bits

Each way is a `Dialect`. Symmetric zero points are 2**(bits-1) everywhere, so their words determine the
dialect, whatever the config claims; 4 bits: 0x77777777 is v1, 0x88888888 v2. Asymmetric ones follow
the weights: codes scatter around their zero point, so in the right dialect a group's mean code is close to
it. In a dialect that is off by one, (mean - z)**2 is larger by 1 - 2 * (mean - z), which is about 1 in
the median group.
"""

from dataclasses import dataclass

import numpy as np

# GPTQModel < 7 subtracted these from the three words of 32 codes; correct is 49249249 92492492 24924924
_OLD_3BIT = np.array([0x24924924, 0x92492492, 0x49249249], np.uint32)

OWN_BITS_SINCE = (7, 3, 2)  # GPTQModel: since then, v1's constant is that of a module's own bits

# the top bits that AutoGPTQ sets if the second-highest lane or any lower one had a zero point of 0
_LOST = {2: (0xF0000000,), 3: (0xF8000000, 0xF0000000, 0xFC000000), 4: (0xFF000000,), 8: (0xFFFF0000,)}


@dataclass(frozen=True)
class Dialect:
    """How zero points are stored: `undo` is the lane width in bits of the subtracted constant, 0 for v2."""

    undo: int = 0
    old: bool = False
    planar: bool = False

    def __str__(self) -> str:
        if self.planar:
            return "planar (gptq_p)"
        return ("v1 of GPTQModel < 7.0.0" if self.old else "v1") if self.undo else "v2"


def dialects(bits: int, default_bits: int, label: str, version: tuple[int, ...] | None) -> list[Dialect]:
    """All possible dialects, the label's first. `version` is GPTQModel's, None for another writer."""
    if bits in (5, 6, 7):  # GPTQModel's are planar, auto-round's a plain stream
        choices = [Dialect(planar=True), Dialect(), Dialect(bits)]
        if version is None and label in ("gptq", "gptq_v2"):
            choices = choices[::-1] if label == "gptq" else [choices[1], choices[2], choices[0]]
        return choices
    old = version is not None and version < (7,)
    default = default_bits if default_bits in _LOST else bits
    constant = default if version is not None and version < OWN_BITS_SINCE else bits
    v1 = Dialect(constant, old=old and constant == 3)
    first = {"gptq_v2": Dialect(), "gptq_p": Dialect(planar=bits == 3)}.get(label, v1)
    others = [Dialect(), Dialect(bits), v1, Dialect(default)]
    if bits == 3:
        others += [Dialect(3, old=True), Dialect(planar=True)]
    return list(dict.fromkeys([first, *others]))


def decode(words: np.ndarray, bits: int, out: int, dialect: Dialect) -> np.ndarray:
    """qzeros, integers [G, m] -> true zero points uint8 [G, out]."""
    from bridge.checkpoint.formats.bits import unpack_rows

    if dialect.undo in (5, 6, 7):
        return (unpack_rows(words, bits, out) + np.uint8(1)) & np.uint8(2**bits - 1)
    return unpack_rows(_restore(words, dialect), bits, out, dialect.planar)


def recode(
    words: np.ndarray, bits: int, source: Dialect, target: Dialect, raised: np.ndarray | None = None
) -> np.ndarray:
    """qzeros of one dialect in another: the same shape and dtype, including padding.

    raised  bool [G, out]: zero points of 0 to change to 1, as v1 requires: only GPTQModel reads a v1 with a 0
            correctly, and all programs agree on a v1 without it

    For 2, 3, 4 and 8 bits and dialects that are not planar. v1 is written with the module's own bits.
    """
    assert bits in (2, 3, 4, 8)
    assert not source.planar
    assert target in (Dialect(), Dialect(bits))
    true = _restore(words, source)
    if raised is not None:
        true = true | _lanes(raised, bits, words)
    if target.undo == 3:
        true = _add_3bit(true, 7)
    elif target.undo:
        true = true - _ones(true.dtype, target.undo)
    return np.ascontiguousarray(true).view(words.dtype)


def _restore(words: np.ndarray, dialect: Dialect) -> np.ndarray:
    """The words as v2 stores them, unsigned."""
    unsigned = words.view(f"u{words.dtype.itemsize}")
    if dialect.undo == 3:
        if dialect.old and words.dtype.itemsize == 4:
            return unsigned + _OLD_3BIT[np.arange(words.shape[1]) % 3]
        return _add_3bit(unsigned, 1)
    if dialect.undo:
        return unsigned + _ones(unsigned.dtype, dialect.undo)  # wraps, as the subtraction did
    return unsigned


def _ones(dtype: np.dtype, bits: int) -> np.unsignedinteger:
    return dtype.type(sum(1 << i for i in range(0, dtype.itemsize * 8, bits)))


def _lanes(chosen: np.ndarray, bits: int, words: np.ndarray) -> np.ndarray:
    """Words like `words` with a 1 in each chosen lane; `chosen` is bool [G, out]."""
    stream = np.zeros((len(words), words.shape[1] * words.dtype.itemsize * 8), bool)
    stream[: len(chosen), : chosen.shape[1] * bits : bits] = chosen
    return np.packbits(stream, axis=1, bitorder="little").view(f"u{words.dtype.itemsize}")


def _add_3bit(words: np.ndarray, amount: int) -> np.ndarray:
    """Each 3-bit lane of the stream plus `amount`, modulo 8."""
    low, high = 0o11111111 * (amount & 3), 0o11111111 * (amount & 4)
    data = np.ascontiguousarray(words).view(np.uint8)
    padded = np.pad(data, ((0, 0), (0, -data.shape[1] % 3))).reshape(len(data), -1, 3)
    lanes = padded[..., 0] | padded[..., 1].astype(np.uint32) << 8 | padded[..., 2].astype(np.uint32) << 16
    lanes = ((lanes & 0o33333333) + low) ^ (lanes & 0o44444444) ^ high
    padded = np.stack([lanes & 255, lanes >> 8 & 255, lanes >> 16], axis=-1).astype(np.uint8)
    return np.ascontiguousarray(padded.reshape(len(data), -1)[:, : data.shape[1]]).view(words.dtype)


def unscaled(scales: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Zero points float32 from products s*z, which fp16 may have rounded; integers if they are near one."""
    zeros = np.divide(products, scales, out=np.zeros_like(scales), where=scales != 0)
    rounded = np.rint(zeros)
    return np.ascontiguousarray(np.where(np.abs(zeros - rounded) < 0.1, rounded, zeros), dtype=np.float32)


def symmetric_dialect(words: np.ndarray, bits: int, out: int, choices: list[Dialect]) -> Dialect | None:
    """The dialect in which every zero point is 2**(bits-1), or None if the zero points vary."""
    middle = 1 << (bits - 1)
    for dialect in choices:
        if all((decode(some, bits, out, dialect) == middle).all() for some in (words[:1], words)):
            return dialect
    return None


def lost_words(words: np.ndarray, bits: int) -> int:
    """How many words AutoGPTQ filled with ones from a zero point of 0 upwards: their zero points are lost.

    In v1, a lane of ones can only be 0 - 1. If only the topmost lane is ones, no zero point is lost.
    """
    if words.dtype.itemsize != 4 or bits not in _LOST:
        return 0
    masks = np.resize(np.array(_LOST[bits], np.uint32), words.shape[1])
    return int(np.count_nonzero((words.view(np.uint32) & masks) == masks))


def code_means(codes: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean code float32 [out, g], the g groups that occur) of codes uint8 [out, k] in groups [k]."""
    order = np.argsort(group, kind="stable")
    present, first, count = np.unique(group[order], return_index=True, return_counts=True)
    return np.add.reduceat(codes[:, order], first, axis=1, dtype=np.float32) / count, present

"""The codebooks of trellis-coded weights: which values a state stands for.

A state has L bits and stands for V values. Computed modes need no table; the others look up `tlut`, float [2^Q, V]:

    mode          values of state x
    1mad          z = 34038481 x + 76625530 mod 2^32; (sum of z's four bytes - 510) / 147.800537109375
    2mad          z = 264435761 x + 1013904223 mod 2^32; z += z * 1664525 >> 32; then as 1mad
    3inst         z = 89226354 x + 64248484 mod 2^32; z = z & 0x8FFF8FFF ^ 0x3B603B60; its two halves added in fp16
    mcg           as 3inst, z = m x with the tensor's own multiplier m                (EXL3)
    mul1          z = m x; (1024 + sum of z's four bytes) * h(0x1EEE) + h(0xC931), one rounding to fp16   (EXL3)
    lut           tlut[x], Q = L
    quantlut      y = x (x + 1); tlut[y >> 16 - Q & 2^Q - 1]
    quantlut_sym  y = x (x + 1); tlut[y >> 15 - Q & 2^Q - 1], the first value negated if bit 15 of y is set; "hyb"

Sources: Tseng et al. 2024 (QTIP, arXiv 2406.11235) for all but mcg and mul1, which are exllamav3's.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bridge.errors import BridgeError

MAX_L = 16
_QTIP_COMPUTED = ("1mad", "2mad", "3inst")
EXL3_MODES = ("mcg", "mul1")  # besides 3inst
LOOKED_UP = ("lut", "quantlut", "quantlut_sym")
COMPUTED = _QTIP_COMPUTED + EXL3_MODES
QTIP_MODES = _QTIP_COMPUTED + LOOKED_UP
MODES = COMPUTED + LOOKED_UP
BYTES_MEAN, BYTES_SCALE = 510, np.float32(147.800537109375)  # of a sum of four bytes
HALVES_MASK, HALVES_FLIP = 0x8FFF8FFF, 0x3B603B60
MUL1_FACTOR, MUL1_ADDEND = (float(np.uint16(bits).view(np.float16)) for bits in (0x1EEE, 0xC931))
_AFFINE = {"1mad": (34038481, 76625530), "2mad": (264435761, 1013904223), "3inst": (89226354, 64248484)}
_MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
SECOND_MAD = 1664525

# mean squared error over variance when Gaussian weights are coded with 1 to 8 bits, L = 16: measured with the encoder
# of this project's tests; computed modes agree within 5%. The bound is 4^-K
_DISTORTION = (0.288, 0.070, 0.0175, 0.0045, 0.00114, 0.0003, 9e-5, 2.1e-5)
_DISTORTION_OF_TABLES = {2: 0.071, 3: 0.0185, 4: 0.0056}  # of 512 pairs of values


@dataclass(frozen=True, eq=False)
class BitshiftCodebook:
    """The values of a bitshift trellis's states.

    L            bits of a state, 1 to 16
    K            bits per weight
    V            values of a state
    tlut_bits    Q: the table has 2^Q rows; 0 for computed modes
    decode_mode  see the module's head; "hyb" is quantlut_sym
    tlut         float [2^Q, V] for modes that look up; [2^Q] means V = 1
    multiplier   of mcg and mul1, where it is not the usual one
    name         whose codebook it is, for messages

    Raises BridgeError for a mode that does not exist, numbers out of range, and a table missing or of another shape.
    """

    L: int = 16
    K: int = 2
    V: int = 1
    tlut_bits: int = 0
    decode_mode: str = "1mad"
    tlut: Any = field(default=None, repr=False)
    multiplier: int | None = None
    name: str = "codebook"

    def __post_init__(self) -> None:
        mode = str(self.decode_mode).lower()
        mode = "quantlut_sym" if mode == "hyb" else mode
        if mode not in MODES:
            raise self._error(f"unknown decode mode {self.decode_mode!r}: choose one of {', '.join(MODES)}")
        object.__setattr__(self, "decode_mode", mode)
        if not 1 <= self.L <= MAX_L:
            raise self._error(f"L = {self.L}; must be between 1 and {MAX_L}")
        if self.V not in (1, 2) or (mode in COMPUTED and self.V != 1) or (mode == "quantlut_sym" and self.V != 2):
            raise self._error(f"V = {self.V} does not fit {mode}; use the config that came with the model")
        if not 1 <= self.K <= 8 or self.K * self.V > 16:
            raise self._error(f"K = {self.K} with V = {self.V}; must be 1 to 8 bits a weight and at most 16 a step")
        if mode not in LOOKED_UP:
            return
        width = self.tlut_bits
        if width < 1 or (mode == "lut" and width != self.L) or width > (15 if mode == "quantlut_sym" else 16):
            raise self._error(f"tlut_bits = {width} does not fit {mode} and L = {self.L}; use the model's config")
        if self.tlut is None:
            raise self._error(
                f"{mode} needs tlut, a table of {2**width} x {self.V} values; is the checkpoint complete?"
            )
        table = self.tlut.float().cpu().numpy() if hasattr(self.tlut, "cpu") else np.asarray(self.tlut)
        if table.shape not in ((2**width, self.V), *([(2**width,)] if self.V == 1 else [])):
            wanted = [2**width, self.V]
            raise self._error(f"tlut is {list(table.shape)} where {mode} wants {wanted}; the checkpoint is damaged")
        table = np.ascontiguousarray(table, np.float32).reshape(-1, self.V)
        if not np.isfinite(table).all():
            raise self._error("tlut holds NaN or infinite values; the checkpoint is damaged")
        object.__setattr__(self, "tlut", table)

    def _error(self, fact: str) -> BridgeError:
        return BridgeError(f"{self.name}: {fact}")

    @property
    def affine(self) -> tuple[int, int]:
        """(a, b): of a computed mode, z = a x + b mod 2^32."""
        if self.decode_mode in _AFFINE:
            return _AFFINE[self.decode_mode]
        return (self.multiplier or _MULTIPLIERS[self.decode_mode]) & 0xFFFFFFFF, 0

    def values(self, states: Any) -> np.ndarray:
        """float32 [..., V] of states [...], integers. Raises BridgeError where one has more than L bits."""
        x = np.asarray(states)
        if x.size and not 0 <= (worst := int(x.min() if x.min() < 0 else x.max())) < 2**self.L:
            raise self._error(
                f"state {worst} is out of range, {self.L} bits hold 0..{2**self.L - 1}; damaged, or packed"
            )
        x = x.astype(np.uint64)
        if self.decode_mode == "lut":
            return self.tlut[x]
        if self.decode_mode in LOOKED_UP:
            y = x * (x + 1)
            signed = self.decode_mode == "quantlut_sym"
            values = self.tlut[y >> np.uint64(16 - signed - self.tlut_bits) & np.uint64(2**self.tlut_bits - 1)]
            if signed:
                values[..., 0] *= np.where(y & np.uint64(0x8000), np.float32(-1), np.float32(1))
            return values
        a, b = self.affine
        z = (x * np.uint64(a) + np.uint64(b)) & np.uint64(0xFFFFFFFF)
        if self.decode_mode == "2mad":
            z = ((z * np.uint64(SECOND_MAD) >> np.uint64(32)) + z) & np.uint64(0xFFFFFFFF)
        return self._finished(z.astype(np.uint32))[..., None]

    def _finished(self, z: np.ndarray) -> np.ndarray:
        if self.decode_mode in ("3inst", "mcg"):
            halves = np.ascontiguousarray(z & np.uint32(HALVES_MASK) ^ np.uint32(HALVES_FLIP)).view(np.float16)
            return (halves[..., ::2] + halves[..., 1::2]).astype(np.float32).reshape(z.shape)
        total = np.ascontiguousarray(z).view(np.uint8).reshape(*z.shape, 4).sum(-1, dtype=np.int32)
        if self.decode_mode == "mul1":  # exact in float32 except for the rounding to fp16
            product = np.float32(MUL1_FACTOR) * (1024 + total).astype(np.float32) + np.float32(MUL1_ADDEND)
            return product.astype(np.float16).astype(np.float32)
        return (total - BYTES_MEAN).astype(np.float32) / BYTES_SCALE

    @cached_property
    def lut(self) -> np.ndarray:
        """float32 [2^L, V]: the values of every state."""
        return np.ascontiguousarray(self.values(np.arange(2**self.L)))

    def recons(self, states: Any) -> np.ndarray:
        """float32 [V, blocks, tile]: the values of states [blocks, tile]."""
        return np.ascontiguousarray(np.moveaxis(self.values(states), -1, 0))

    def unpack_trellis(self, packed: Any, weights: int) -> np.ndarray:
        """uint16 [tiles, weights / V]: the states of tail-biting bit streams.

        packed   int16 [tiles, weights * K / 16], bits from the highest of each word on
        weights  in a tile

        Raises BridgeError where the words are not those of K bits a weight.
        """
        from bridge.trellis.streams import states_of

        words = np.asarray(packed)
        if words.dtype.itemsize != 2 or words.ndim != 2 or words.shape[1] * 16 != weights * self.K:
            raise self._error(
                f"trellis is {words.dtype} {list(words.shape)}, {self.K} bits of {weights} weights are 16-bit words "
                f"[tiles, {weights * self.K / 16:g}]; take config.json and weights of one checkpoint"
            )
        return states_of(words.view(np.uint16), self.K * self.V, self.L)

    @property
    def distortion(self) -> float:
        """Mean squared error over variance when Gaussian weights are coded with it."""
        usual = _DISTORTION[self.K - 1]
        return _DISTORTION_OF_TABLES.get(self.K, usual) if self.decode_mode.startswith("quantlut") else usual

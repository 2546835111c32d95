"""HIGGS: vectors of a grid, fitted to the normal distribution, between Hadamard transforms (Malinovskii et al. 2024).

    weight    int16 [out * b / 16, in]  codes of b = 2, 3, 4 bits, in the order of FLUTE's kernel, see below
    scales    float [out, in / group]
    tables2   float [2^b, 2^b, 2]       the values of the codes of columns 2 k and 2 k + 1, as a pair; where scales are
                                        BF16, BF16 that is labelled F16
    tables    float [2^b]               those of one code, where the grid has one dimension; not needed
    bias      float [out]               optional

    stored = grid values * scales,   W = stored * H,   H: Sylvester-Hadamard / sqrt(size) in blocks of hadamard_size

FLUTE's order takes two columns, k even and k + 1, and n P output features at a time, n = 16 / b (16 for 3 bits):
features n P c + P j + p for j = 0, 1, ..

2, 4 bits   word [P c + p, k] has n codes from the lowest bits on: those of columns k + 1 and k in turn, for
            j = 0, 1, .. n / 2 - 1; word [P c + p, k + 1] has those of the other j
3 bits      P = 32; codes of columns k + 1, k in turn, j = 0 3 6 9 12 1 4 7 10 13 2 5 8 11 14 15, are 96 bits:

            bits 0..15   16..29    30..45   46..59    60..75   76..89    90 91   92 93   94 95
            words    a   low of d      b    low of e      c    low of f  upper two of d, e, f

            a, b, c are words of column k, d, e, f of column k + 1; a and d are at [P c + p], b and e at
            [R + 2 P c + p], c and f at [R + 2 P c + P + p], where R = out / 16

P follows from the kernel that the config names for each module, tune_metadata: {template_id, num_bits, ..}: it is 64
for the first third of every 12 ids (48 for 4 bits), else 32, in releases 0.2.6 to 0.4.2.

No block type holds such codes: they come as floats. The grid's error is measured on pairs of normal numbers, which the
transforms make of weights: 0.0078, 0.030 and 0.11 of the variance for 4, 3 and 2 bits. Learned from the flute-kernel
package 0.4.2 (utils.py, integrations/higgs.py, data/*.pth; Apache-2.0) and transformers' integrations/higgs.py.
"""

import math
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, module_info
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number
from bridge.trellis.hadamard import Rotation

_SIZE = 512  # of the transform, if the config does not say
_TEMPLATES = {2: 12, 3: 12, 4: 48}  # after so many, P repeats
_ORDER_OF_THREE = (0, 3, 6, 9, 12, 1, 4, 7, 10, 13, 2, 5, 8, 11, 14, 15)


class HiggsReader(Reader):
    """Reads HIGGS checkpoints."""

    parts: ClassVar = ("weight", "scales", "tables", "tables2", "bias")
    required: ClassVar = ("tables2", "weight", "scales")
    plain: ClassVar = frozenset({"weight", "bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        size = whole_number(raw.get("hadamard_size", _SIZE))
        if size is None or size < 2 or size & (size - 1):
            raise BridgeError(f"{quant.source}: hadamard_size is {raw['hadamard_size']!r}, not a power of two; mend it")
        bits, vectors = f"{whole_number(raw.get('bits'))} bits", f"vectors of {raw.get('p', 2)}"
        claims = bits, vectors, f"Hadamard blocks of {size}"
        return replace(quant, title="HIGGS", claims=claims, raw={**raw, "hadamard_size": size})

    def claimed_bits(self, module: str) -> int | None:
        return whole_number(self.quant.raw.get("bits"))

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales, pairs = tensors["weight"], tensors["scales"], tensors["tables2"]
        bits = round(math.sqrt(pairs.size / 2)).bit_length() - 1
        check_shapes(weight.is_matrix and scales.is_matrix and bits in (2, 3, 4), name, tensors)
        (words, columns), (out, groups) = weight.shape, scales.shape
        lane = self._lane(name, bits)
        fits = weight.dtype == "I16" and words * 16 == out * bits and columns % groups == 0 and scales.floating
        fits = fits and pairs.size == 2 * 4**bits and pairs.dtype in ("F16", "BF16", "F32")
        fits = fits and columns % self.quant.raw["hadamard_size"] == 0
        check_shapes(fits and out % (16 * lane if bits == 3 else 16 // bits * lane) == 0, name, tensors)
        return module_info(name, tensors, bits, columns // groups, (out, columns))

    def _lane(self, name: str, bits: int) -> int:
        """P of a module's kernel."""
        number = whole_number(table(table(self.quant.raw.get("tune_metadata")).get(name)).get("template_id"))
        if number is None or number < 0:
            raise BridgeError(
                f"{self.quant.source}: tune_metadata does not name the kernel (template_id) of {name}, by which its "
                "codes are ordered; take the config.json that came with the model"
            )
        period = _TEMPLATES[bits]
        return 64 if number % period < period // 3 and bits != 3 else 32

    def in_words(self) -> str:
        kinds = (f"grid codes of {m.bits} bits in groups of {m.group_size}" for m in self.modules.values())
        return f"{counted(kinds)}, Hadamard blocks of {self.quant.raw['hadamard_size']}"

    def read_all_rows(self, name: str) -> DecodedTensor:
        info, size = self.modules[name], int(self.quant.raw["hadamard_size"])
        (out, columns), words = info.shape, self.part(name, "weight").view(np.uint16)
        codes = _threes(words) if info.bits == 3 else _evens(words, info.bits, self._lane(name, info.bits))
        grid = self._grid(name, info).reshape(-1, 2)
        values = np.take(grid, codes[:, ::2].astype(np.uint16) << info.bits | codes[:, 1::2], 0).reshape(out, columns)
        share = _distortion(grid.tobytes())
        values *= np.repeat(self.scales(name), info.group_size, axis=1)
        weights = Rotation(columns, size).rotate(values)
        return DecodedTensor(name, info.bits, weights, share, "grid codes", size, bias=self.bias(name))

    def _grid(self, name: str, info: ModuleInfo) -> np.ndarray:
        """float32: the pairs of values."""
        if info.tensors["tables2"].dtype == "F16" and info.tensors["scales"].dtype == "BF16":
            bits = self.part(name, "tables2").view(np.uint16).astype(np.uint32)
            return (bits << 16).view(np.float32)
        return self.scales(name, "tables2")


@cache
def _distortion(grid: bytes) -> float:
    """The mean squared error of rounding normal numbers to a grid, float32 [n, 2]."""
    pairs = np.frombuffer(grid, np.float32).reshape(-1, 2)
    x = np.random.default_rng(0).normal(size=(1 << 14, 2)).astype(np.float32)
    nearest = (np.square(pairs).sum(1) - 2 * x @ pairs.T).argmin(1)
    return float(np.square(x - pairs[nearest]).mean())


def _evens(words: np.ndarray, bits: int, lane: int) -> np.ndarray:
    """Codes of 2 or 4 bits: uint16 [out * bits / 16, in] -> uint8 [out, in]."""
    rows, columns = words.shape
    count = 16 // bits
    stored = words.reshape(rows // lane, lane, columns // 2, 2)
    codes = np.empty((rows // lane, 2, count // 2, lane, columns // 2, 2), np.uint8)
    for i in range(count):
        part = (stored >> np.uint16(bits * i) & np.uint16((1 << bits) - 1)).astype(np.uint8)
        codes[:, :, i // 2, :, :, 1 - i % 2] = part.transpose(0, 3, 1, 2)
    return codes.reshape(rows * count, columns)


def _threes(words: np.ndarray) -> np.ndarray:
    """Codes of 3 bits: uint16 [out * 3 / 16, in] -> uint8 [out, in]."""
    lane, (rows, columns) = 32, words.shape
    first, others = words[: rows // 3], words[rows // 3 :]
    shape = rows // 3 // lane, lane, columns // 2, 2
    others = others.reshape(shape[0], 2, *shape[1:])
    planes = [first.reshape(shape), others[:, 0], others[:, 1]]
    codes = np.empty((shape[0], 16, lane, columns // 2, 2), np.uint8)
    for n, plane in enumerate(planes):  # of 30 bits, ten codes, and two bits of the last two
        even, odd = plane[..., 0].astype(np.uint32), plane[..., 1].astype(np.uint32)
        ten = even | (odd & 0x3FFF) << 16
        for i in range(10):
            index = 10 * n + i
            codes[:, _ORDER_OF_THREE[index // 2], :, :, 1 - index % 2] = (ten >> 3 * i & 7).astype(np.uint8)
    a, b, c = (plane[..., 1] >> np.uint16(14) for plane in planes)
    codes[:, 15, :, :, 1] = a | (b & 1) << 2
    codes[:, 15, :, :, 0] = b >> 1 | c << 1
    return codes.reshape(-1, columns)

"""EXL2 (exllamav2): codes of 2 to 8 bits, which change from group to group of columns; symmetric, with act-order.

    q_weight     int32 [words, out]      the codes of each group: a stream of its bits down the words of a column of
                                         this matrix, least significant first; groups follow each other
    q_groups     int16 [2 * G]           of each group: its bits, its first row in q_weight
    q_scale      int32 [G, out / 8]      codes of scales, 4 bits each, the first in the lowest bits
    q_scale_max  half  [G]
    q_invperm    int32 or int16 [in]     where the stored codes of each input feature are
    q_perm       the inverse; old files have it too
    bias         half [out]              optional

    W[o, k] = scale[g, o] * (q - 2^(bits_g - 1)),   scale = (q_scale + 1)^2 * q_scale_max / 256

with both products rounded to half floats. out is padded to a multiple of 32 with zeros. The head is coded too, in
groups of head_bits and a few of more; with head_bits 16 it is floats. Groups usually are of 32 to 128 columns; they are
cut to the greatest common divisor here, with the scale repeated.

Learned from exllamav2's q_matrix.cu, pack_tensor.cu and adaptivegptq.py (MIT).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_permutation, check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor, column_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig, bits_claims
from bridge.errors import BridgeError

_WIDTHS = (2, 3, 4, 5, 6, 8)
_SLACK = 0.5  # of the average bits: scales count in the label, and allocation leaves some


@dataclass(frozen=True)
class _Groups:
    """The groups of a module: bits, first row of words and number of columns of each, int64 [G]."""

    bits: np.ndarray
    first: np.ndarray
    columns: np.ndarray


class Exl2Reader(Reader):
    """Reads EXL2 checkpoints."""

    parts: ClassVar = ("q_weight", "q_groups", "q_scale", "q_scale_max", "q_invperm", "q_perm", "bias")
    required: ClassVar = ("q_weight", "q_groups", "q_scale", "q_scale_max", "q_invperm")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._groups: dict[str, _Groups] = {}
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        return replace(quant, title="EXL2", claims=(*bits_claims(quant), "act-order"), desc_act=True)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        words, table, scale, largest, order = (tensors[part] for part in self.required)
        check_shapes(words.is_matrix and words.dtype == "I32" and words.shape[1] % 8 == 0, name, tensors)
        count, columns, out = table.size // 2, order.size, words.shape[1]
        fits = scale.shape == (count, out // 8) and scale.dtype == "I32" and table.size == 2 * count
        fits = fits and largest.shape == (count,) and largest.floating
        fits = fits and table.dtype in ("I16", "I32") and order.dtype in ("I16", "I32") and min(count, columns) > 0
        check_shapes(fits, name, tensors)
        groups = self._groups[name] = self._read_groups(name, tensors, words.shape[0], columns)
        size = math.gcd(*groups.columns[:-1].tolist()) or columns
        return module_info(name, tensors, int(groups.bits.max()), size, (out, columns))

    def _read_groups(self, name: str, tensors: dict[str, TensorInfo], words: int, columns: int) -> _Groups:
        info = tensors["q_groups"]
        bits, first = self.store.read(info.name).reshape(-1, 2).astype(np.int64).T
        first &= 0xFFFF
        length = np.diff(first, append=words)
        held = length * 32 // np.maximum(bits, 1)
        held[-1] = columns - held[:-1].sum()
        fits = np.isin(bits, _WIDTHS).all() and first[0] == 0 and min(length.min(), held.min()) > 0
        if not fits or (held * bits > length * 32).any():
            raise BridgeError(
                f"{info.file}: the bits and rows of {info.name} do not add up to {columns} columns; the checkpoint is "
                "damaged"
            )
        return _Groups(bits, first, held)

    def disagreements(self) -> list[str]:
        claimed, average, wrong = self.quant.raw.get("bits"), self._average(), []
        if claimed is not None and average is not None and abs(average - claimed) > _SLACK:
            wrong.append(f"the codes have {average:.3g} bits on average, but the label says {claimed}")
        head = next((groups for name, groups in self._groups.items() if name.endswith("lm_head")), None)
        claimed = self.quant.raw.get("head_bits")
        if head is not None and claimed is not None and head.bits.min() != claimed:  # a few groups have more
            wrong.append(f"the head has codes of {head.bits.min()} bits, but the label says {claimed}")
        return wrong

    def _average(self) -> float | None:
        """Bits a weight in all modules but the head."""
        layers = [(g, self.modules[n].shape[0]) for n, g in self._groups.items() if not n.endswith("lm_head")]
        weights = sum(int(g.columns.sum()) * out for g, out in layers)
        return sum(int((g.columns * g.bits).sum()) * out for g, out in layers) / weights if weights else None

    def in_words(self) -> str:
        used = np.unique(np.concatenate([groups.bits for groups in self._groups.values()]))
        average = self._average()
        some = f"{average:.3g} bits on average, " if average is not None else ""
        return f"{some}groups of {', '.join(map(str, used))} bits"

    def group_order(self, name: str) -> np.ndarray | None:
        info = self.modules[name]
        return self._order(name, self._positions(name), info.group_size)

    def _positions(self, name: str) -> np.ndarray:
        """int64 [in]: where the codes of each input feature are."""
        positions = self.part(name, "q_invperm").reshape(-1).astype(np.int64) & 0xFFFF_FFFF
        positions &= 0xFFFF if self.modules[name].tensors["q_invperm"].dtype == "I16" else -1
        check_permutation(positions, len(positions), self.modules[name].tensors["q_invperm"])
        return positions

    @staticmethod
    def _order(name: str, positions: np.ndarray, size: int) -> np.ndarray | None:
        group = (positions // size).astype(np.int32)
        return None if column_group_size(group) else group

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_columns, unpack_rows

        info, groups = self.modules[name], self._groups[name]
        out, columns = info.shape
        words = self.part(name, "q_weight", rows, axis=1)
        codes = np.empty((words.shape[1], columns), np.uint8)
        start = 0
        for bits, first, held in zip(groups.bits, groups.first, groups.columns, strict=True):
            length = -(-int(held * bits) // 32)
            codes[:, start : start + held] = unpack_columns(words[first : first + length], int(bits), int(held))
            start += held
        steps = (unpack_rows(self.part(name, "q_scale"), 4, out).astype(np.float16) + 1) ** 2
        largest = (self.scales(name, "q_scale_max") / 256).astype(np.float16)
        scales = (steps * largest[:, None]).astype(np.float32).T
        scales = scales if rows is None else scales[rows]
        parts = -(-groups.columns // info.group_size)  # the groups of one size that each is cut to
        scales = np.ascontiguousarray(np.repeat(scales, parts, axis=1))
        zeros = np.repeat((1 << (groups.bits - 1)).astype(np.float32), parts)
        zeros = np.ascontiguousarray(np.broadcast_to(zeros, scales.shape))
        positions = self._positions(name)
        codes = np.ascontiguousarray(codes[:, positions])
        order = self._order(name, positions, info.group_size)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, order, self.bias(name, rows))

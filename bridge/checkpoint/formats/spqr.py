"""SpQR: 3-bit integers in groups of 16 with quantized scales, and outliers apart (Dettmers et al. 2023).

    dense_weights  int64 [tiles * 16]   a word for each row of a tile of 16 x 16; tiles along the row first
    row_offsets    int32 [out + 1]      where the outliers of each row begin; or [out / 16 + 1], of 16 rows each, whose
                                        outliers take turns, with zeros for rows that have fewer
    col_vals       int32 [n]            outliers: the column in the lower half, a half float in the upper one
    in_perm        int32 [in / 2]       two unsigned 16-bit numbers each, the first in the lower half: the input
                                        feature of each stored column; may be empty

    bit     0      3      6      9       ..      54        62
            scale  zero   code 0 code 1  ..      8 bits of the tile's scales, rows 2 n and 2 n + 1 having byte n

The tile's scales are four halves, ss, zs, sz, zz from the lowest bits on, and with each operation rounded to a half

    s = ss * (scale - sz),   z = zs * (zero - zz),   stored[o, j] = s * (code - z) + outlier
    W[:, in_perm[j]] = stored[:, j]

A block has no place for outliers: the weights come as floats. Learned from SpQR's spqr_cuda.cpp and common.cuh, the
spqr_quant package 0.2.0 (Apache-2.0) and transformers' integrations/spqr.py.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, distortion_of
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_permutation, check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import whole_number

_TILE = 16
_SETTINGS = {"bits": 3, "beta1": _TILE, "beta2": _TILE}


class SpqrReader(Reader):
    """Reads SpQR checkpoints."""

    parts: ClassVar = ("dense_weights", "row_offsets", "col_vals", "in_perm", "bias")
    required: ClassVar = ("dense_weights", "row_offsets", "col_vals")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._outliers = 0
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        for key, only in _SETTINGS.items():
            if whole_number(quant.raw.get(key, only)) != only:
                raise BridgeError(
                    f"{quant.source}: {key} is {quant.raw[key]!r}; SpQR's layout has {only} alone; convert the "
                    "unquantized model instead"
                )
        return replace(quant, title="SpQR", claims=("3 bits", "groups of 16", "outliers"), bits=3, group_size=_TILE)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        words, offsets, values = (tensors[part] for part in self.required)
        order = tensors.get("in_perm")
        fits = words.dtype == "I64" and offsets.dtype == "I32" and values.dtype in ("I32", "F32")
        fits = fits and all(len(t.shape) == 1 for t in (words, offsets, values, *([order] if order else [])))
        fits = fits and (order is None or order.dtype == "I32") and offsets.shape[0] >= 2
        check_shapes(fits and words.shape[0] % _TILE == 0, name, tensors)
        tiles, count = words.shape[0] // _TILE, offsets.shape[0] - 1
        columns = 2 * order.shape[0] if order else 0
        by_row = -(-count // _TILE) * -(-columns // _TILE) == tiles if columns else not self._take_turns(offsets.name)
        down = -(-count // _TILE) if by_row else count
        fits = tiles % down == 0 and (columns == 0 or -(-columns // _TILE) == tiles // down)
        check_shapes(fits, name, tensors)
        self._outliers += values.shape[0]
        shape = count if by_row else count * _TILE, columns or tiles // down * _TILE
        return module_info(name, tensors, 3, _TILE, shape)

    def _take_turns(self, offsets: str) -> bool:
        """Whether these are the offsets of 16 rows each."""
        return not (np.diff(self.store.read(offsets)) % _TILE).any()

    def in_words(self) -> str:
        weights = sum(m.shape[0] * m.shape[1] for m in self.modules.values())
        return f"{super().in_words()}, outliers beside {self._outliers / max(1, weights):.2%} of the weights"

    def read_all_rows(self, name: str) -> DecodedTensor:
        info = self.modules[name]
        (out, columns), half = info.shape, np.float16
        tiles = self.part(name, "dense_weights").view(np.uint64).reshape(-1, -(-columns // _TILE), _TILE)
        pairs = (tiles[:, :, ::2] | tiles[:, :, 1::2]) >> np.uint64(54)
        ss, zs, sz, zz = np.moveaxis(pairs.astype(np.uint8).view(half), -1, 0)[..., None]

        def field(number: int) -> np.ndarray:
            return (tiles >> np.uint64(3 * number) & np.uint64(7)).astype(half)

        with np.errstate(over="ignore", invalid="ignore"):
            scale, zero = ss * (field(0) - sz), zs * (field(1) - zz)  # [down, along, 16]
            weights = np.stack([scale * (field(2 + j) - zero) for j in range(_TILE)], axis=3).astype(np.float32)
        rows = np.ascontiguousarray(weights.transpose(0, 2, 1, 3)).reshape(-1, tiles.shape[1] * _TILE)
        stored = rows[:out, :columns]
        if not np.isfinite(stored).all():
            raise BridgeError(f"{info.file}: {name} has scales that are not finite; the checkpoint is damaged")
        noise = float(np.square(scale.astype(np.float64)).sum() * _TILE / 12)
        self._add_outliers(name, stored)
        order = self._order(name, columns)
        if order is not None:
            placed = np.empty_like(stored)
            placed[:, order] = stored
            stored = placed
        share = distortion_of(noise, stored)
        return DecodedTensor(name, 3, np.ascontiguousarray(stored), share, "codes with outliers", bias=self.bias(name))

    def _add_outliers(self, name: str, stored: np.ndarray) -> None:
        info = self.modules[name]
        out, columns = info.shape
        offsets, values = self.part(name, "row_offsets").astype(np.int64), self.part(name, "col_vals").view(np.uint32)
        counts = np.diff(offsets)
        if offsets[0] or (counts < 0).any() or offsets[-1] != len(values):
            raise BridgeError(
                f"{info.file}: {name}.row_offsets do not go from 0 to {len(values)} outliers; the checkpoint is damaged"
            )
        row = np.repeat(np.arange(len(counts)), counts)
        if len(counts) != out:
            row = row * _TILE + np.arange(len(values)) % _TILE
        column = (values & 0xFFFF).astype(np.int64)
        added = (values >> 16).astype(np.uint16).view(np.float16).astype(np.float32)
        if (column >= columns).any() or not np.isfinite(added).all():
            raise BridgeError(f"{info.file}: {name}.col_vals has no valid outliers; the checkpoint is damaged")
        np.add.at(stored, (row, column), added)

    def _order(self, name: str, columns: int) -> np.ndarray | None:
        info = self.modules[name]
        if "in_perm" not in info.tensors or 0 in info.tensors["in_perm"].shape:
            return None
        order = self.part(name, "in_perm").view(np.uint16).astype(np.int64)
        check_permutation(order, columns, info.tensors["in_perm"])
        return order

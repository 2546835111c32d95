"""SINQ: integers with a scale for each row of a group and another for each column (Müller et al. 2025).

    W_q               uint8 or int32       the codes [out * G, group], packed down the rows as `hqq` packs them;
                                           5 bits in sixths of an int32, 6 in fifths
    meta.scale        float [out * G, 1]
    meta.zero         float [out * G, 1], or one for all
    meta.scale2       float [1, in]        the columns' scales
    bias              float [out]          optional
    meta.scale, meta.zero may be coded: .x uint8 [a, b], .s and .m float [1, b]: x * s + m, in halves if these are

    W[o, k] = (q - zero[o, g]) * scale[o, g] * scale2[k]

Tiles (tiling_mode 2D) are squares of `group` rows and columns, in the order of rows of tiles: scale and zero are
[tiles, group, 1], scale2 [tiles, 1, group]. Methods nf4 and nf3 have a level of a table in place of q, from -1 to 1,
and multiply in halves if the scales are.
model.safetensors.index.json.meta.json holds what is no tensor: {module: {meta: {shape, nbits, packing, method, ..}}}.
The older qmodel.pt holds all in one table for each module; `torch_store` makes tensors of its numbers and texts, whose
names then lack "meta.".

A block has no place for the columns' scales: weights with such scales come as floats, others keep their codes. Where
gate_proj, up_proj and down_proj are all that a module has, each column of down_proj is fed by a row of up_proj times
a value of gate_proj's: the columns' scales of down_proj are read into the rows of up_proj, and its codes stay.
Learned from the sinq package 0.2.0 (quantizer.py, dual_shift.py, patch_model.py; Apache-2.0).
"""

import math
import re
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, distortion_of, level_noise, rounding_distortion
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, finite_scales
from bridge.checkpoint.formats.hqq import PACKINGS, unpack_lanes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, in_words, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import integers, table, whole_number
from bridge.system.storage.files import read_json

_SIDECAR = "model.safetensors.index.json.meta.json"
_SCALES, _ZEROS, _COLUMNS = "meta.scale", "meta.zero", "meta.scale2"
_LEVELS = {  # quantiles of the normal distribution
    "nf4": (
        -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
    ),
    "nf3": (-1, -0.5350227355957031, -0.246931403875351, 0, 0.1833375245332718, 0.3819939494132996,
            0.6229856610298157, 1),
}  # fmt: skip


_EXPERTS = re.compile(r"(^|\.)(gate_up|down)_(W_q|meta)\.\d+")
_ATTRIBUTES = ("shape", "nbits", "packing", "method")  # what describes a module
_PARTS = (_COLUMNS, *(f"{part}{coded}" for part in (_SCALES, _ZEROS) for coded in ("", ".x", ".s", ".m")))
_BARE = {part.removeprefix("meta."): part for part in _PARTS}  # their names in qmodel.pt


class SinqReader(Reader):
    """Reads SINQ checkpoints."""

    parts: ClassVar = ("W_q", "bias", *_PARTS, *_ATTRIBUTES)
    settings: ClassVar = frozenset({"axis", "group_size", "view_as_float", "shape"})  # of qmodel.pt; of coded scales

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        folder = next(iter(store.files)).parent
        self._metadata = read_json(folder / _SIDECAR, optional=True)
        self._source = folder / _SIDECAR
        experts = next((info for name, info in store.tensors.items() if _EXPERTS.search(name)), None)
        if experts is not None:
            raise BridgeError(
                f"{experts.file}: {experts.name} is of SINQ's stacked experts, whose packing the file does not tell; "
                "quantize the model again with one linear layer an expert, or convert the unquantized model"
            )
        super().__init__(store, quant)
        self._children = {
            name.removesuffix(".down_proj"): set[str]() for name in self.modules if name.endswith(".down_proj")
        }
        for name in store.tensors:
            while name:
                name, _, child = name.rpartition(".")
                if name in self._children:
                    self._children[name].add(child)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        bits, size = whole_number(raw.get("nbits")), whole_number(raw.get("group_size"))
        claims = (f"{bits} bits" if bits else "no number of bits", *([f"groups of {size}"] if size else []))
        method = raw.get("method")
        return replace(quant, title="SINQ", claims=(*claims, *([str(method)] if method else [])))

    def claimed_bits(self, module: str) -> int | None:
        return whole_number(self.quant.raw.get("nbits"))

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, dot, part = name.partition(".meta.")
        if dot:
            return module, f"meta.{part}"
        for bare, part in _BARE.items():
            if name.endswith(f".{bare}"):
                return name.removesuffix(f".{bare}"), part
        return Reader.split(name)

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        return "W_q" not in tensors and not any(part.startswith("meta.") for part in tensors)

    def part(self, name: str, part: str, some: np.ndarray | None = None, axis: int = 0) -> np.ndarray:
        stored = self.store.read(self.modules[name].tensors[part].name)
        return stored if some is None else np.take(stored, some, axis)

    def scales(self, name: str, part: str = "scales") -> np.ndarray:
        return finite_scales(self.store, self.modules[name].tensors[part].name)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        coded = (part for part in (_SCALES, _ZEROS) if f"{part}.x" in tensors)
        plain = (part for part in (_SCALES, _ZEROS) if f"{part}.x" not in tensors)
        return "W_q", *plain, *(f"{part}.{suffix}" for part in coded for suffix in "xsm")

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        meta, codes = self._meta(name, tensors), tensors["W_q"]
        (out, columns), packing = meta["shape"], str(meta.get("packing"))
        runs, shifts = self._count(tensors, _SCALES), self._count(tensors, _ZEROS)
        check_shapes(packing in PACKINGS and min(runs, shifts) > 0 and out * columns % runs == 0, name, tensors)
        width, lanes, word = PACKINGS[packing]
        size = out * columns // runs
        rows = -(-runs // lanes)
        plain = codes.nbytes == out * columns  # written for a GPU's kernel, whatever the packing
        fits = columns % size == 0 and shifts in (1, runs) and (plain or codes.nbytes == rows * size * word.itemsize)
        scale2, tiled = tensors.get(_COLUMNS), self._tiled(tensors)
        if scale2 is not None:
            fits = fits and scale2.floating and scale2.size == (runs if tiled else columns)
        check_shapes(fits and not (tiled and out % size), name, tensors)
        bits = min(width, math.ceil(float(meta.get("nbits") or width)))
        return module_info(name, tensors, bits, size, (out, columns))

    def _meta(self, name: str, tensors: dict[str, TensorInfo] | None = None) -> dict[str, Any]:
        """What the file beside the index, or qmodel.pt's table, says of a module."""
        tensors = tensors or self.modules[name].tensors
        meta: dict[str, Any] = {part: self._value(info) for part, info in tensors.items() if part in _ATTRIBUTES}
        meta = meta or table(table(self._metadata.get(name)).get("meta"))
        bits = meta.get("nbits")
        known = integers(meta.get("shape"), 2, least=1) and isinstance(bits, int | float | None)
        if not known or not math.isfinite(bits or 0):
            raise BridgeError(
                f"{self._source}: does not give the shape of {name}; download this file too, it belongs to the weights"
            )
        return meta

    def _value(self, info: TensorInfo) -> object:
        """A number, a text or a list of qmodel.pt."""
        values = self.store.read(info.name)
        if info.name.endswith((".packing", ".method")):
            return bytes(values.astype(np.uint8).tolist()).decode("ascii", "replace")
        return values.tolist()

    def _count(self, tensors: dict[str, TensorInfo], part: str) -> int:
        """How many scales or zero points there are; 0 if their dtypes are wrong."""
        info = tensors.get(f"{part}.x") or tensors[part]
        if f"{part}.x" not in tensors:
            return info.size if info.floating or part == _ZEROS else 0
        fits = len(info.shape) == 2 and info.dtype == "U8"
        fits = fits and all(tensors[f"{part}.{p}"].size == info.shape[1] for p in "sm")
        return info.size if fits else 0

    @staticmethod
    def _tiled(tensors: dict[str, TensorInfo]) -> bool:
        """Whether the scales are those of square tiles."""
        scale2 = tensors.get(_COLUMNS)
        return scale2 is not None and len(scale2.shape) == 3

    def _levels(self, name: str) -> str:
        method = str(self._meta(name).get("method")).lower()
        return next((kind for kind in _LEVELS if kind in method), "")

    def _folded_scales(self, down: str) -> np.ndarray | None:
        """float32 [in]: the columns' scales of a down_proj that are in the rows of the up_proj beside it, else None."""
        if not self.folding or not down.endswith(".down_proj") or down not in self.modules or self._levels(down):
            return None
        tensors, mlp = self.modules[down].tensors, down.removesuffix(".down_proj")
        up = self.modules.get(f"{mlp}.up_proj")
        if up is None or self._children[mlp] != {"gate_proj", "up_proj", "down_proj"} or self._tiled(tensors):
            return None
        if _COLUMNS not in tensors or up.shape[0] != self.modules[down].shape[1]:
            return None
        scales = self.scales(down, _COLUMNS).reshape(-1)
        return scales if (scales > 0).all() else None

    def refit(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        if name.endswith(".up_proj"):
            return self._folded_scales(f"{name.removesuffix('up_proj')}down_proj"), None
        scales = self._folded_scales(name)
        return None, None if scales is None else 1 / scales

    def in_words(self) -> str:
        kinds = (self._levels(name).upper() or "integers" for name in self.modules)
        columns = sum(_COLUMNS in m.tensors for m in self.modules.values())
        tiles = sum(self._tiled(m.tensors) for m in self.modules.values())
        words = [in_words(self.modules.values()), counted(kinds), f"scales of columns in {columns}"]
        moved = sum(self.refit(name)[1] is not None for name in self.modules)
        words += [f"square tiles in {tiles}"] if tiles else []
        words += [f"those of {moved} down_proj are in the rows of up_proj"] if moved else []
        return ", ".join(words)

    def read_all_rows(self, name: str) -> GroupedTensor | DecodedTensor:
        rows, columns = self.refit(name)
        t = self._stored(name, columns is None)
        if rows is None:
            return t
        bias = None if t.bias is None else t.bias * rows
        if isinstance(t, DecodedTensor):
            return replace(t, weights=t.weights * rows[:, None], bias=bias)
        return replace(t, scales=t.scales * rows[:, None], bias=bias)

    def _stored(self, name: str, with_columns: bool) -> GroupedTensor | DecodedTensor:
        """A module as it is stored, with or without its columns' scales."""
        info = self.modules[name]
        (out, columns), size, kind = info.shape, info.group_size, self._levels(name)
        stored, runs = self.part(name, "W_q"), out * columns // size
        if stored.nbytes == out * columns:
            rows = stored.reshape(-1).view(np.uint8).reshape(runs, size)
        else:
            rows = unpack_lanes(stored, size, self._meta(name)["packing"])[:runs]
        levels = np.array(_LEVELS.get(kind, np.arange(1 << info.bits)), np.float32)
        if rows.max() >= len(levels):
            raise BridgeError(
                f"{info.file}: {name} has the code {rows.max()}, beyond {len(levels)} levels; the checkpoint is damaged"
            )
        scales, zeros = (self._values(name, part).reshape(-1, 1) for part in (_SCALES, _ZEROS))
        zeros = np.broadcast_to(zeros, scales.shape)
        scaled = with_columns and _COLUMNS in info.tensors
        per_column = self.scales(name, _COLUMNS) if scaled else np.ones((1, columns), np.float32)
        if self._tiled(info.tensors):  # rows of the codes are rows of the matrix, cut; those of the scales are not
            down, along = out // size, columns // size
            scales, zeros = (x.reshape(down, along, size).swapaxes(1, 2).reshape(runs, 1) for x in (scales, zeros))
            wide = per_column.reshape(down, along * size).repeat(size, axis=0)
        else:
            wide = per_column.reshape(1, columns)
        bias = self.bias(name)
        if not kind and (wide == 1).all():
            scales, zeros = (np.ascontiguousarray(x.reshape(out, -1)) for x in (scales, zeros))
            codes = np.ascontiguousarray(rows.reshape(out, columns))
            return GroupedTensor(name, info.bits, codes, scales, zeros, size, bias=bias)
        exact = np.float16 if kind and self._halves(name) else np.float32  # as the tool computes levels
        chosen = (levels.astype(exact)[rows] - zeros.astype(exact)) * scales.astype(exact)
        weights = (chosen.reshape(out, columns) * wide.astype(exact)).astype(np.float32)
        errors = level_noise(levels).astype(np.float32)[rows] if kind else np.float32(1 / 12)
        steps = np.broadcast_to(scales, rows.shape).reshape(out, columns) * wide
        noise = float((np.square(steps) * (errors.reshape(out, columns) if kind else errors)).sum(dtype=np.float64))
        coding = f"{kind.upper()}'s levels" if kind else "codes with scales of columns"
        share = rounding_distortion(noise, weights) if kind else distortion_of(noise, weights)
        return DecodedTensor(name, info.bits, weights, share, coding, bias=bias)

    def _halves(self, name: str) -> bool:
        tensors = self.modules[name].tensors
        return (tensors.get(_SCALES) or tensors[f"{_SCALES}.s"]).dtype == "F16"

    def _values(self, name: str, part: str) -> np.ndarray:
        """float32: a module's scales or zero points, decoded if they are stored as codes."""
        tensors = self.modules[name].tensors
        if f"{part}.x" in tensors:
            step, least = (self.scales(name, f"{part}.{suffix}").reshape(-1) for suffix in "sm")
            if tensors[f"{part}.s"].dtype == "F16":
                step, least = step.astype(np.float16), least.astype(np.float16)
            return (self.part(name, f"{part}.x") * step + least).astype(np.float32)
        if tensors[part].floating:
            return self.scales(name, part)
        return self.part(name, part).astype(np.float32)

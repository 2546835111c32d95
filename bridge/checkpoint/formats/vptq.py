"""VPTQ: vectors of a codebook, and of a second one for what they leave (Liu et al. 2024), down the output features.

    indices                   int32 [B, rows, words]   packed; or int16 [B, rows, g], not packed
    res_indices               int16 [B, rows, g]       only not packed, where there is a second codebook
    centroids.weight          float [B, n * v]         n vectors of v weights for each of B runs of g columns
    res_centroids.weight      float [B, m * v]         optional: added to them
    outlier_indices           int16 [1, rows', c]      optional: the first c columns have a codebook of their own
    outlier_centroids.weight  float [1, n' * v']
    perm                      int16, int64 [in]        optional: the input feature of each stored column
    weight_scale, weight_bias float [in]               optional
    bias                      float [out]              optional

    stored[v i .. v i + v, j] = centroids[index i of column j] + res_centroids[its second index]
    W[:, k] = stored[:, position of k in perm] * weight_scale[k] + weight_bias[k]

A packed row is a stream of g numbers, least significant bit first: log2(n) bits of the index, then log2(m) of the
second. 16-bit numbers are unsigned, and may be stored as halves. out is padded to multiples of v. n, m and v are those
of the config, for each module: {vector_lens: [v', v], num_centroids: [n', n], num_res_centroids: [-1, m], ..}.

No block type holds such codes: they come as floats. Their noise is taken as the least for so many bits, see `aqlm`.
Learned from the vptq package 0.0.5 (layers/vqlinear.py, ops/quant_gemm.py, utils/pack.py; MIT).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor, distortion_of
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_permutation, check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, module_info
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import integers, table, whole_number

_BOOK, _SECOND, _OUTLIERS = "centroids.weight", "res_centroids.weight", "outlier_centroids.weight"
_KEYS = ("vector_lens", "num_centroids", "num_res_centroids")


@dataclass(frozen=True)
class _Books:
    """The codebooks of a module: vectors of `length`; `outliers` columns have vectors of `outlier_length`."""

    length: int
    words: int
    second: int  # words of the second codebook, or 0
    outliers: int
    outlier_length: int

    @property
    def bits(self) -> tuple[int, int]:
        """The bits of an index into the first codebook, and into the second; 0 without one."""
        return math.ceil(math.log2(self.words)), math.ceil(math.log2(self.second)) if self.second else 0

    @property
    def rate(self) -> float:
        """Bits a weight, without outliers."""
        return sum(self.bits) / self.length


class VptqReader(Reader):
    """Reads VPTQ checkpoints."""

    parts: ClassVar = (
        "indices", "res_indices", "outlier_indices", _BOOK, _SECOND, _OUTLIERS, "perm", "weight_scale", "weight_bias",
        "bias",
    )  # fmt: skip
    required: ClassVar = ("indices", _BOOK)

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._books: dict[str, _Books] = {}
        super().__init__(store, quant)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        layers = sum(len(table(quant.raw.get(key))) for key in ("config_for_layers", "shared_layer_config"))
        return replace(quant, title="VPTQ", claims=(f"codebooks of {layers} layers",))

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        module, _, part = name.rpartition(".")
        outer, _, book = module.rpartition(".")
        return (outer, f"{book}.weight") if f"{book}.weight" in (_BOOK, _SECOND, _OUTLIERS) else (module, part)

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        settings = self._settings(name, tensors)
        (outlier_length, length), (outlier_words, words), (_, second) = (settings[key] for key in _KEYS)
        index, book, outlier = tensors["indices"], tensors[_BOOK], tensors.get("outlier_indices")
        fits = len(index.shape) == 3 and 0 not in index.shape and book.is_matrix and length >= 1 and words >= 2
        check_shapes(fits, name, tensors)
        count, rows, stored = index.shape
        books = _Books(length, words, max(0, second), outlier.shape[-1] if outlier else 0, outlier_length)
        columns = next((tensors[p].size for p in ("weight_scale", "perm") if p in tensors), None)
        columns = columns or whole_number(settings.get("in_features"))
        if columns is None or columns <= 0:
            columns = count * (whole_number(settings.get("group_size")) or 0) + books.outliers
        size = (columns - books.outliers) // count
        packed = index.dtype == "I32"
        fits = size > 0 and size * count + books.outliers == columns and book.shape == (count, words * length)
        fits = fits and stored == (-(-size * sum(books.bits) // 32) if packed else size)
        fits = fits and (packed or index.dtype in ("I16", "F16")) and sum(books.bits) <= 32
        if books.second:
            fits = fits and _SECOND in tensors and tensors[_SECOND].shape == (count, books.second * length)
            fits = fits and (packed or ("res_indices" in tensors and tensors["res_indices"].shape == index.shape))
        if outlier:
            high = rows * length
            fits = fits and len(outlier.shape) == 3 and _OUTLIERS in tensors and outlier_length > 0
            fits = fits and tensors[_OUTLIERS].shape == (1, outlier_words * outlier_length)
            fits = fits and abs(outlier.shape[1] * outlier_length - high) < max(length, outlier_length)
        vectors = [tensors[p] for p in ("weight_scale", "weight_bias", "perm") if p in tensors]
        check_shapes(fits and all(v.size == columns for v in vectors), name, tensors)
        out = whole_number(settings.get("out_features"))
        out = tensors["bias"].shape[0] if "bias" in tensors and tensors["bias"].shape else out or rows * length
        check_shapes(rows * length - length < out <= rows * length, name, tensors)
        self._books[name] = books
        return module_info(name, tensors, math.ceil(books.rate), 0, (out, columns))

    def _settings(self, name: str, tensors: dict[str, TensorInfo]) -> dict[str, Any]:
        """The config's entry for a module."""
        layer_config = table(self.quant.raw.get("config_for_layers")).get(name)
        shared = table(self.quant.raw.get("shared_layer_config"))
        settings = layer_config or next((shared[part] for part in reversed(name.split(".")) if part in shared), None)
        if not all(integers(table(settings).get(key), 2) for key in _KEYS):
            raise BridgeError(
                f"{self.quant.source}: {name} has no vector_lens, num_centroids and num_res_centroids of two numbers "
                "each; take the config.json that came with the model"
            )
        return table(settings)

    def in_words(self) -> str:
        words = []
        for books in self._books.values():
            second = f" and {books.second}" if books.second else ""
            outliers = f" with {books.outliers} outlier columns" if books.outliers else ""
            words.append(
                f"codebooks of {books.words}{second} vectors of {books.length} at {books.rate:.3g} bits{outliers}"
            )
        return counted(words)

    def read_all_rows(self, name: str) -> DecodedTensor:
        info, books = self.modules[name], self._books[name]
        out, columns = info.shape
        first, second = self._indices(name, books)
        weights = self._vectors(name, _BOOK, first, books.length)[:out]
        if second is not None:
            weights += self._vectors(name, _SECOND, second, books.length)[:out]
        if books.outliers:
            index = self._numbers(name, "outlier_indices")
            weights = np.concatenate(
                [self._vectors(name, _OUTLIERS, index, books.outlier_length)[:out], weights], axis=1
            )
        if "perm" in info.tensors:
            perm = self._numbers(name, "perm") if info.tensors["perm"].dtype != "I64" else self.part(name, "perm")
            check_permutation(perm.reshape(-1), columns, info.tensors["perm"])
            weights = weights[:, np.argsort(perm.reshape(-1))]
        if "weight_scale" in info.tensors:
            weights = weights * self.scales(name, "weight_scale").reshape(-1)
        share = 4.0**-books.rate
        noise = share / (1 - share) * float(np.square(weights, dtype=np.float64).sum())
        if "weight_bias" in info.tensors:
            weights = weights + self.scales(name, "weight_bias").reshape(-1)
        weights = np.ascontiguousarray(weights, np.float32)
        share = distortion_of(noise, weights)
        return DecodedTensor(name, info.bits, weights, share, "codebooks", books.length, bias=self.bias(name))

    def _indices(self, name: str, books: _Books) -> tuple[np.ndarray, np.ndarray | None]:
        """The indices int64 [B, rows, g] into the first codebooks and into the second ones."""
        info = self.modules[name].tensors
        if info["indices"].dtype != "I32":
            return self._numbers(name, "indices"), self._numbers(name, "res_indices") if books.second else None
        words = self.part(name, "indices").view(np.uint32).astype(np.uint64)
        first, second = books.bits
        size = (self.modules[name].shape[1] - books.outliers) // len(words)
        offsets = np.arange(size) * (first + second)
        words = np.concatenate([words, np.zeros_like(words[:, :, :1])], axis=2)
        pairs = words[:, :, offsets // 32] | words[:, :, offsets // 32 + 1] << np.uint64(32)
        numbers = (pairs >> (offsets % 32).astype(np.uint64)).astype(np.int64)
        return numbers & (1 << first) - 1, numbers >> first & (1 << second) - 1 if second else None

    def _numbers(self, name: str, part: str) -> np.ndarray:
        """int64 of unsigned 16-bit numbers, whatever 16-bit dtype they are stored as."""
        return self.part(name, part).view(np.uint16).astype(np.int64)

    def _vectors(self, name: str, part: str, index: np.ndarray, length: int) -> np.ndarray:
        """float32 [rows * length, B * g]: the vectors of indices [B, rows, g], each down a column."""
        books = self.scales(name, part)
        books = books.reshape(len(books), -1, length)
        if index.max() >= books.shape[1]:
            raise BridgeError(
                f"{self.modules[name].file}: {name} has the index {index.max()}, beyond {books.shape[1]} vectors; "
                "the checkpoint is damaged"
            )
        runs = [book[i].transpose(0, 2, 1).reshape(-1, i.shape[1]) for book, i in zip(books, index, strict=True)]
        return np.concatenate(runs, axis=1)

"""AQLM: a sum of codebooks' vectors (Egiazarian et al. 2024), as the aqlm package and transformers store it.

    codes       intN [out / og, in / ig, M]     numbers of vectors, modulo 2^nbits: the upper half of them is negative
    codebooks   float [M, 2^nbits, og, ig]      vectors; og is 1 in all known models
    scales      float [out / og, in / ig or 1, 1, 1]
    bias        float [out]                     optional

    W[o, k .. k + ig] = scale * sum over m of codebooks[m, codes[.., m]]

N is 8, 16 or 32, the least that holds nbits. Scales for each run of ig columns are those of the trainer's scale_nbits.
A forward pass on a CPU turns codes of 8 bits, for good: [in / ig, out / og, M]. The scales' shape shows this where
out / og is not in / ig; where it is, the model's other layers, which the same pass transposed.

No block type holds such codes: they come as floats. Their noise is taken to be the least that codes of so many bits can
have on Gaussian weights, 4^-bits of the variance (Shannon's rate-distortion function), so that types are not chosen too
small. Learned from the aqlm package 1.1.7 (inference.py, utils.py) and its repository's convert_to_hf.py and aq.py.
"""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, counted, module_info, modules_with
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import whole_number

_CODES = {"I8": 8, "I16": 16, "I32": 32}


class AqlmReader(Reader):
    """Reads AQLM checkpoints."""

    parts: ClassVar = ("codes", "codebooks", "scales", "bias")
    required: ClassVar = ("codes", "codebooks", "scales")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._transposed: set[str] = set()
        super().__init__(store, quant)
        if self._transposed:
            candidates = {n: m.tensors["codes"].shape for n, m in self.modules.items() if _transposable(m.tensors)}
            self._transposed.update(n for n, (rows, runs, _) in candidates.items() if rows == runs)
            count = len(self._transposed)
            self.notes.append(f"a pass on a CPU turned the codes of {count} layers; they are turned back")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        books = f"{raw.get('num_codebooks', 1)} codebooks of {raw.get('nbits_per_codebook', 16)} bits"
        return replace(quant, title="AQLM", claims=(books, f"vectors of {raw.get('in_group_size', 8)}"))

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes, books, scales = (tensors[part] for part in self.required)
        fits = len(codes.shape) == 3 and len(books.shape) == 4 and 0 not in (*codes.shape, *books.shape)
        check_shapes(fits, name, tensors)
        rows, runs, count = codes.shape
        if _transposable(tensors) and scales.shape[:1] == (runs,) != (rows,):
            rows, runs = runs, rows
            self._transposed.add(name)
        words, og, ig = books.shape[1:]
        fits = books.shape[0] == count and books.floating and scales.floating and codes.dtype in _CODES
        fits = fits and words & (words - 1) == 0 and words <= 1 << _CODES[codes.dtype]
        check_shapes(fits and scales.shape in ((rows, 1, 1, 1), (rows, runs, 1, 1)), name, tensors)
        bits = math.ceil(count * math.log2(words) / (og * ig))
        return module_info(name, tensors, max(1, bits), 0, (rows * og, runs * ig))

    def disagreements(self) -> list[str]:
        keys = (("num_codebooks", 1), ("nbits_per_codebook", 16), ("out_group_size", 1), ("in_group_size", 8))
        count, bits, *sizes = (whole_number(self.quant.raw.get(key, usual)) for key, usual in keys)
        meant = (count, None if bits is None or not 0 < bits < 32 else 1 << bits, *sizes)
        shapes = (m.tensors["codebooks"].shape for m in self.modules.values())
        return modules_with(f"codebooks {list(s)}, but the label says {list(meant)}" for s in shapes if s != meant)

    def _rate(self, name: str) -> float:
        """Bits a weight, without scales and codebooks."""
        count, words, og, ig = self.modules[name].tensors["codebooks"].shape
        return count * math.log2(words) / (og * ig)

    def in_words(self) -> str:
        return counted(
            "{0} codebook{s} of {1} vectors of {3} at {rate:.3g} bits".format(
                *m.tensors["codebooks"].shape, rate=self._rate(name), s="s" * (m.tensors["codebooks"].shape[0] != 1)
            )
            for name, m in self.modules.items()
        )

    def read(self, name: str, rows: np.ndarray | None = None) -> DecodedTensor:
        info = self.modules[name]
        books, scales = self.scales(name, "codebooks"), self.scales(name, "scales")
        og = books.shape[2]
        groups = None if rows is None else np.unique(rows // og)  # of rows, which share their vectors
        transposed = name in self._transposed
        codes = self.part(name, "codes", groups, axis=int(transposed))
        codes = codes.swapaxes(0, 1) if transposed else codes
        words = books.shape[1]
        if max(codes.max(), -1 - codes.min()) >= max(1, words // 2):
            raise BridgeError(
                f"{info.file}: {name}.codes are from {codes.min()} to {codes.max()}, beyond {words} vectors; "
                "the checkpoint is damaged"
            )
        unsigned = np.dtype(f"u{codes.dtype.itemsize}")
        codes = codes.view(unsigned) & unsigned.type(words - 1)
        vectors = np.take(books[0], codes[:, :, 0], 0)
        for m in range(1, len(books)):
            vectors += np.take(books[m], codes[:, :, m], 0)
        vectors *= scales if groups is None else scales[groups]  # [rows, runs, og, ig]
        weights = np.ascontiguousarray(vectors.transpose(0, 2, 1, 3)).reshape(-1, info.shape[1])
        if groups is not None and rows is not None:
            weights = weights[np.searchsorted(groups, rows // og) * og + rows % og]
        share = 4.0 ** -self._rate(name)
        return DecodedTensor(name, info.bits, weights, share, "codebooks", bias=self.bias(name, rows))


def _transposable(tensors: dict[str, TensorInfo]) -> bool:
    """Whether a pass on a CPU would transpose a module's codes."""
    return tensors["codebooks"].shape[1:2] == (256,)

"""Marlin: symmetric 4- and 8-bit codes in the order in which a GPU kernel loads them, sorted into rows here.

    B, or qweight   int32 [in/16, out*b/2]   codes (AutoGPTQ, vLLM; AutoAWQ)
    s, or scales    float [G, out]
    bias            float [out]              optional

A run of 1024 codes, 4 tiles of 16 input by 16 output features, serves a warp: thread t of 32 loads 8 codes of
each tile. They are in the rows and columns that the tensor cores' 16 x 8 fragment assigns to the thread:

    input feature    2 * (t % 4) + {0, 1, 8, 9}
    output feature   t // 4 + {0, 8}

and are ordered within a word so that one mask selects two of the fragment's halves: even before odd. Scales are in the
order of a thread's outputs: 8 x 8 transposed over 64 features, or with one group a row, pairs of 8 features apart. The
zero point is 2^(b-1).
"""

from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError

_IN_WORD = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}


def tile_order(bits: int) -> np.ndarray:
    """int64 [1024]: the weight at each place of a run of 4 tiles; a tile counts 16 * input + output feature."""
    thread, tile, e = np.ogrid[:32, :4, :8]
    feature_in = 2 * (thread % 4) + e % 2 + 8 * (e // 2 % 2)
    feature_out = thread // 4 + 8 * (e // 4)
    order = 256 * tile + 16 * feature_in + feature_out
    return order.reshape(-1, len(_IN_WORD[bits]))[:, _IN_WORD[bits]].reshape(-1)


class MarlinReader(Reader):
    """Reads GPTQ and AWQ checkpoints in Marlin's layout."""

    short: ClassVar = "marlin"
    parts: ClassVar = ("B", "qweight", "s", "scales", "qzeros", "g_idx", "bias")
    claim: ClassVar = {"title": "Marlin", "sym": True}

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return ("qweight", "scales") if "qweight" in tensors else ("B", "s")

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales = (tensors[part] for part in self.required_parts(tensors))
        for part in ("qzeros", "g_idx"):
            if part in tensors and tensors[part].nbytes:
                raise BridgeError(
                    f"{tensors[part].file}: {name} has {part}, which Marlin's layout on disk lacks; if config.json "
                    "names the wrong layout, set checkpoint_format to gptq (AWQ: version to gemm)"
                )
        check_shapes(weight.is_matrix and scales.is_matrix, name, tensors)
        (rows, words), (groups, out) = weight.shape, scales.shape
        bits, columns = 2 * words // out, 16 * rows
        size = columns // groups
        fits = weight.dtype == "I32" and scales.floating and bits in _IN_WORD and 2 * words == out * bits
        fits = fits and out % 64 == 0 and columns % groups == 0
        fits = fits and (groups == 1 or size == self.quant.group_size or size & (size - 1) == 0)
        check_shapes(fits, name, tensors)
        return module_info(name, tensors, bits, size, (out, columns))

    def read_all_rows(self, name: str) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_rows

        info = self.modules[name]
        out, columns = info.shape
        weight_part, scale_part = self.required_parts(info.tensors)
        words = self.part(name, weight_part)
        stored = unpack_rows(words, info.bits, 16 * out).reshape(-1, 1024)
        codes = stored[:, np.argsort(tile_order(info.bits))]
        codes = codes.reshape(columns // 16, out // 16, 16, 16).transpose(1, 3, 0, 2).reshape(out, columns)
        scales = self.scales(name, scale_part)
        if len(scales) > 1:
            scales = scales.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, out)
        else:
            scales = scales.reshape(-1, 4, 4, 2).swapaxes(1, 2).reshape(-1, out)
        notes = []
        if info.bits != self.quant.bits:
            notes.append(f"{name}: stored with {info.bits} bits but the config says {self.quant.bits}")
        claimed = self.quant.group_size if 0 < self.quant.group_size < columns else columns
        if info.group_size != claimed:
            notes.append(f"{name}: groups of {info.group_size} but the config says {self.quant.group_size}")
        scales = np.ascontiguousarray(scales.T)
        zeros, bias = np.full(scales.shape, 2 ** (info.bits - 1), np.float32), self.bias(name)
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=bias, notes=tuple(notes))

"""The first GPTQ tools: IST-DASLab/gptq, GPTQ-for-LLaMa, and whatever carries GPTQ tensors and no config.

    qweight  int32 [in*b/32, out]          codes, as in `gptq`
    scales   float [out, 1] or [G, out]
    zeros    as scales                     s*z: W = s*q - zeros
    bias     float [out]                   written always, of zeros where the layer has none
    g_idx    int32 [in]                    group of each input feature; absent before April 2023

IST-DASLab's Quant3Linear has 3 bits and one group a row; GPTQ-for-LLaMa had 2, 3, 4 and 8 bits in the same
way until March 2023. Its later files store qzeros as AutoGPTQ does and are read as GPTQ v1. Neither tool
wrote a config: bits and group size are found from the shapes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.config import QuantConfig, reader_class
from bridge.checkpoint.gptq import GptqReader
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.reader import ModuleInfo, contradiction, fit_group_size
from bridge.checkpoint.store import Store, TensorInfo
from bridge.checkpoint.zeros import unscaled
from bridge.errors import BridgeError

_BITS = (2, 3, 4, 8)


class FloatZerosReader(GptqReader):
    """Reads GPTQ codes whose zero points are stored as floats, times their scale."""

    parts: ClassVar = ("qweight", "zeros", "scales", "g_idx", "bias")
    required: ClassVar = ("qweight", "zeros", "scales")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        return replace(quant, title="GPTQ with float zero points")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        super().__init__(store, quant)
        self.format = "gptq with float zeros"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, zeros, scales = (tensors[p] for p in ("qweight", "zeros", "scales"))
        bits, g_idx = self.quant.bits, tensors.get("g_idx")
        fits = len(weight.shape) == len(scales.shape) == 2 and weight.dtype == "I32" and 0 not in weight.shape
        if not fits or not zeros.floating or zeros.shape != scales.shape:
            raise contradiction(name, tensors)
        (rows, out), columns = weight.shape, weight.shape[0] * 32 // bits
        groups = 1 if scales.shape == (out, 1) else scales.shape[0]
        size = fit_group_size(columns, groups, self.quant.group_size)
        if scales.shape not in ((out, 1), (groups, out)) or columns * bits != rows * 32:
            raise contradiction(name, tensors)
        if (g_idx and g_idx.shape != (columns,)) or (size is None and not g_idx):
            raise contradiction(name, tensors)
        if "bias" in tensors and tensors["bias"].shape != (out,):
            raise contradiction(name, tensors)
        nbytes = sum(t.nbytes for t in tensors.values())
        return ModuleInfo(name, bits, size or -(-columns // groups), (out, columns), nbytes, tensors)

    def read(self, name: str) -> GroupedTensor:
        from bridge.checkpoint.bits import unpack_columns

        info = self.modules[name]
        notes: list[str] = []
        size, order = self._groups(name, notes)
        scales, products = self.scales(name), self.scales(name, "zeros")
        if scales.shape != (info.shape[0], 1):
            scales, products = (np.ascontiguousarray(x.T) for x in (scales, products))
        if (products[scales == 0] != 0).any():
            raise BridgeError(
                f"{info.file}: {name} has zeros where the scale is 0, which are no group's zero point; "
                "the checkpoint is damaged"
            )
        return GroupedTensor(
            name=name,
            bits=info.bits,
            codes=unpack_columns(self.part(name, "qweight"), info.bits, info.shape[1]),
            scales=scales,
            zeros=unscaled(scales, products),
            group_size=size,
            group_of_column=order,
            bias=self.bias(name),
            notes=tuple(notes),
        )

    def _stored_groups(self, name: str) -> int:
        info = self.modules[name]
        stored = info.tensors["scales"].shape
        return 1 if stored == (info.shape[0], 1) else stored[0]


def recognise(store: Store, quant: QuantConfig, config: dict[str, Any]) -> QuantConfig:
    """`quant`, or what the tensors say where it says nothing: HQQ, llm-awq, float zero points or GPTQ.

    `config` is config.json. Raises BridgeError where tensors speak for two formats at once.
    """
    if quant.method is None:
        parts = {name.rpartition(".")[2] for name in store.tensors}
        for mark, method in (("W_q", "hqq"), ("scaled_zeros", "awq")):
            if mark in parts:
                return reader_class(method).complete(
                    replace(quant, method=method), "llm-awq" if method == "awq" else ""
                )
    modules = [name.removesuffix(".qweight") for name in store.tensors if name.endswith(".qweight")]
    if quant.method not in (None, "gptq") or not modules:
        return quant
    products = [m for m in modules if f"{m}.zeros" in store.tensors]
    both = [m for m in products if f"{m}.qzeros" in store.tensors]
    if both:
        raise BridgeError(
            f"{store.tensors[f'{both[0]}.zeros'].file}: {both[0]} has zeros and qzeros, and only one can be right; "
            "the checkpoint is damaged"
        )
    if products:
        bits = _bits_of_width(store, modules, config) or (quant.bits if quant.labelled else None)
        if bits is None:
            raise BridgeError(
                f"{store.tensors[f'{products[0]}.qweight'].file}: the bits of {products[0]}.qweight cannot be told "
                "without config.json's hidden_size; give the model's own config.json"
            )
        shape = store.tensors[f"{products[0]}.zeros"].shape
        size = quant.group_size if quant.labelled else -1 if shape[-1:] == (1,) else 128
        return FloatZerosReader.complete(replace(quant, method="gptq-float-zeros", bits=bits, group_size=size), "")
    return quant if quant.labelled else _from_shapes(store, modules) or quant


def _bits_of_width(store: Store, modules: list[str], config: dict[str, Any]) -> int | None:
    """Bits of a code where no g_idx gives a layer's width: most layers of a decoder are hidden_size wide."""
    rows = Counter(store.tensors[f"{m}.qweight"].shape[0] for m in modules if store.tensors[f"{m}.qweight"].shape)
    for m in modules:
        g_idx = store.tensors.get(f"{m}.g_idx")
        if g_idx and len(g_idx.shape) == 1:
            rows, config = Counter([store.tensors[f"{m}.qweight"].shape[0]]), {"hidden_size": g_idx.shape[0]}
            break
    width = next((config[key] for key in ("hidden_size", "n_embd", "d_model") if type(config.get(key)) is int), 0)
    stored = rows.most_common(1)[0][0] * 32 if rows else 0
    return next((bits for bits in _BITS if width > 0 and bits * width == stored), None)


def _from_shapes(store: Store, modules: list[str]) -> QuantConfig | None:
    """The config of tensors that can only be GPTQ's, in most modules; None where they may be another format's."""
    found: Counter[tuple[int, int]] = Counter()
    for module in modules:
        parts = [store.tensors.get(f"{module}.{part}") for part in ("qweight", "qzeros", "scales")]
        if all(part and len(part.shape) == 2 and 0 not in part.shape for part in parts):
            (rows, out), (groups, words), scales = (part.shape for part in parts if part)
            bits = words * 32 // out
            columns = rows * 32 // bits if bits in _BITS else 0
            size = fit_group_size(columns, groups, 128)
            if size and scales == (groups, out) and bits * out == words * 32:
                found[bits, -1 if groups == 1 else size] += 1
    if found.total() * 2 <= len(modules):
        return None
    bits, size = found.most_common(1)[0][0]
    quant = QuantConfig(method="gptq", bits=bits, group_size=size, sym=False, checkpoint_format="gptq")
    return replace(quant, title="GPTQ")

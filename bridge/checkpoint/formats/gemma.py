"""Gemma's packed weights (quant_method gemma): symmetric integers of 2, 4 and 8 bits, embeddings too.

    weight                  uint8 [out, in / 4] or [out, in / 2], or int8 [out, in]    2, 4, 8 bits
    weight_scale            float [out, 1]
    embedding_quantized     as weight, one row a token
    embedding_scale         float [tokens, B]      B blocks of consecutive columns
    bias                    float [out]            optional
    input_activation_scale, output_activation_scale        of activations: not needed

    W[o, k] = scale * (q - 2^(b - 1)), the first code of a byte in its lowest bits; int8 is in two's complement

Whether bytes hold 2 or 4 bits is said by config.json: num_bits, or the first pattern of module_quant_configs that is
found in the module's name. Learned from transformers' integrations/gemma_quant.py, whose own functions decode the
blocks of the tests.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import check_shapes
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import whole_number
from bridge.system.patterns import matched, pattern_problem

_WEIGHT, _EMBEDDING = ("weight", "weight_scale"), ("embedding_quantized", "embedding_scale")


class GemmaReader(Reader):
    """Reads Gemma's packed weights."""

    parts: ClassVar = (*_WEIGHT, *_EMBEDDING, "bias")
    plain: ClassVar = frozenset({"weight", "bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        bits, rules = quant.raw.get("num_bits", 4), quant.raw.get("module_quant_configs") or {}
        if not isinstance(rules, dict) or any(pattern_problem(r) or not isinstance(c, dict) for r, c in rules.items()):
            raise BridgeError(f"{quant.source}: module_quant_configs is not a table of patterns; correct the file")
        widths = {whole_number(n) for n in (bits, *(change.get("num_bits", bits) for change in rules.values()))}
        if not widths <= {2, 4, 8}:
            raise BridgeError(f"{quant.source}: num_bits must be 2, 4 or 8, here and there; correct the file")
        claims = (f"{' and '.join(map(str, sorted(n for n in widths if n)))} bits", "symmetric")
        return replace(quant, title="Gemma's packed weights", bits=int(bits), claims=claims)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return _EMBEDDING[::-1] if tensors.keys() & {*_EMBEDDING} else _WEIGHT[::-1]

    def claimed_bits(self, module: str) -> int:
        rules = self.quant.raw.get("module_quant_configs") or {}
        overrides = (change for rule, change in rules.items() if matched("search", rule, module, self.quant.source))
        override: dict[str, object] = next(overrides, {})
        return whole_number(override.get("num_bits")) or self.quant.bits

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        scale, codes = (tensors[part] for part in self.required_parts(tensors))
        bits = 8 if codes.dtype == "I8" else self.claimed_bits(name)
        fits = codes.dtype == "I8" or (codes.dtype == "U8" and bits < 8)
        check_shapes(fits and codes.is_matrix and scale.is_matrix and scale.floating, name, tensors)
        out, columns = codes.shape[0], codes.shape[1] * (8 // bits)
        check_shapes(scale.shape[0] == out and columns % scale.shape[1] == 0, name, tensors)
        return module_info(name, tensors, bits, columns // scale.shape[1], (out, columns))

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        info = self.modules[name]
        scale_part, part = self.required_parts(info.tensors)
        stored, scales = self.part(name, part, rows).view(np.uint8), self.scales(name, scale_part)
        if info.bits == 8:
            codes = stored ^ np.uint8(128)
        else:
            shifts = np.arange(0, 8, info.bits, dtype=np.uint8)
            codes = ((stored[:, :, None] >> shifts) & np.uint8(2**info.bits - 1)).reshape(len(stored), -1)
        scales = scales if rows is None else np.ascontiguousarray(scales[rows])
        zeros = np.full_like(scales, 1 << (info.bits - 1))
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=self.bias(name, rows))

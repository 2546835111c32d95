"""ggml's type numbers as the `gguf` package has them, and those of `tensor_types` that it does not know yet.

Imported instead of the package where files are written, or read with it: its reader and writer then know these types
too. What only needs names and sizes has them in `tensor_types.py`.
"""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from bridge.blocks.tensor_types import TENSOR_TYPES

for _type in TENSOR_TYPES:
    if _type.name not in GGMLQuantizationType.__members__:
        _member = int.__new__(GGMLQuantizationType, _type.number)
        _member._name_, _member._value_ = _type.name, _type.number
        GGMLQuantizationType._member_map_[_type.name] = _member
        GGMLQuantizationType._value2member_map_[_type.number] = _member
        GGML_QUANT_SIZES[_member] = _type.size, _type.nbytes

__all__ = ["GGML_QUANT_SIZES", "GGMLQuantizationType"]

"""ggml's type numbers as the `gguf` package has them, and those that it does not know yet.

Imported instead of the package where files are written, or read with it: its reader and writer then know these types
too. What only needs names and sizes has them in `tensor_types.py`.
"""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_NEWER = {"Q2_0": (42, 64, 18)}  # number, weights and bytes in a block

for _name, (_number, _size, _nbytes) in _NEWER.items():
    if _name not in GGMLQuantizationType.__members__:
        _member = int.__new__(GGMLQuantizationType, _number)
        _member._name_, _member._value_ = _name, _number
        GGMLQuantizationType._member_map_[_name] = _member
        GGMLQuantizationType._value2member_map_[_number] = _member
        GGML_QUANT_SIZES[_member] = _size, _nbytes

__all__ = ["GGML_QUANT_SIZES", "GGMLQuantizationType"]

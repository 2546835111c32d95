"""Values of metadata with their GGUF types."""

from typing import Any

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue


def typed(value: Any) -> GGUFValue:
    """A value with its GGUF type: counts are unsigned, numbers 32 bits wide."""
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    if isinstance(value, list):
        sub = GGUFValueType.INT32 if type(value[0]) is int else kinds[type(value[0])]
        return GGUFValue(value, GGUFValueType.ARRAY, sub)
    return GGUFValue(value, kinds[type(value)])

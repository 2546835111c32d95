"""ggml's types of tensors, for what only reads files: the `gguf` package, which has the same, takes 0.1 s to import.

A type that is not in the table is looked up there: a later version may have it.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bridge.blocks.ggml import GGMLQuantizationType


class TensorType(NamedTuple):
    """A type as `gguf` has it."""

    name: str
    number: int  # in files
    size: int  # weights in a block
    nbytes: int  # bytes in a block


FLOAT_TYPES = ("F32", "F16", "BF16")  # that a GGUF has weights in
_TABLE = [
    TensorType(*row)
    for row in (
        ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34), ("Q8_1", 9, 32, 40), ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176), ("Q6_K", 14, 256, 210), ("Q8_K", 15, 256, 292),
        ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18), ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4), ("I64", 27, 1, 8), ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56), ("BF16", 30, 1, 2), ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36), ("Q1_0", 41, 128, 18), ("Q2_0", 42, 64, 18),
    )
]  # fmt: skip
_BY_NAME = {type.name: type for type in _TABLE}
_BY_NUMBER = {type.number: type for type in _TABLE}


def type_named(name: str) -> TensorType | None:
    """The type of a name; None where neither the table nor `gguf` has it."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    from bridge.blocks.ggml import GGMLQuantizationType

    return _of_gguf(GGMLQuantizationType.__members__.get(name))


def type_numbered(number: int) -> TensorType | None:
    """The type of a number in a file; None where neither the table nor `gguf` has it."""
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    from bridge.blocks.ggml import GGMLQuantizationType

    return _of_gguf(next((type for type in GGMLQuantizationType if type == number), None))


def _of_gguf(type: "GGMLQuantizationType | None") -> TensorType | None:
    from bridge.blocks.ggml import GGML_QUANT_SIZES

    return None if type is None else TensorType(type.name, int(type), *GGML_QUANT_SIZES[type])

"""ggml's types of tensors: the one list of them, from which the rooms' tables of block types are made.

A table of our own, because the `gguf` package, which has the same, takes 0.1 s to import. A type that is not in it is
looked up there: a later version may have it.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


class TensorType(NamedTuple):
    """A type as `gguf` has it, and where the record of a block type is."""

    name: str
    number: int  # in files
    size: int  # weights in a block
    nbytes: int  # bytes in a block
    folder: str = ""  # of the module in bridge/blocks/ that has the name of the type
    use: str = ""  # of a block type: the table of bridge/blocks/__init__.py that it is in, or only read


FLOAT_TYPES = ("F32", "F16", "BF16")  # that a GGUF has weights in
TENSOR_TYPES = [
    TensorType(*row)
    for row in (
        ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("BF16", 30, 1, 2), ("F64", 28, 1, 8), ("I8", 24, 1, 1), ("I16", 25, 1, 2),
        ("I32", 26, 1, 4), ("I64", 27, 1, 8), ("Q8_1", 9, 32, 40), ("Q8_K", 15, 256, 292),
        # in order of bits per weight, K-quants first among equals
        ("Q2_K", 10, 256, 84, "k_quants", "BLOCKS"),
        ("Q3_K", 11, 256, 110, "k_quants", "BLOCKS"),
        ("Q4_K", 12, 256, 144, "k_quants", "BLOCKS"),
        ("Q4_0", 2, 32, 18, "integers", "BLOCKS"),
        ("Q4_1", 3, 32, 20, "integers", "BLOCKS"),
        ("Q5_K", 13, 256, 176, "k_quants", "BLOCKS"),
        ("Q5_0", 6, 32, 22, "integers", "BLOCKS"),
        ("Q5_1", 7, 32, 24, "integers", "BLOCKS"),
        ("Q6_K", 14, 256, 210, "k_quants", "BLOCKS"),
        ("Q8_0", 8, 32, 34, "integers", "BLOCKS"),
        ("MXFP4", 39, 32, 17, "small", "FP4"),
        ("NVFP4", 40, 64, 36, "small", "FP4"),
        ("Q2_0", 42, 64, 18, "integers", "NEWER"),
        ("IQ1_S", 19, 256, 50, "codebook", "ROUNDED"),
        ("IQ1_M", 29, 256, 56, "codebook", "ROUNDED"),
        ("TQ1_0", 34, 256, 54, "small", "ROUNDED"),
        ("TQ2_0", 35, 256, 66, "small", "ROUNDED"),
        ("IQ2_XXS", 16, 256, 66, "codebook", "ROUNDED"),
        ("IQ2_XS", 17, 256, 74, "codebook", "ROUNDED"),
        ("IQ2_S", 22, 256, 82, "codebook", "ROUNDED"),
        ("IQ3_XXS", 18, 256, 98, "codebook", "ROUNDED"),
        ("IQ3_S", 21, 256, 110, "codebook", "ROUNDED"),
        ("IQ4_XS", 23, 256, 136, "codebook", "ROUNDED"),
        ("IQ4_NL", 20, 32, 18, "codebook", "ROUNDED"),
        ("Q1_0", 41, 128, 18, "integers", "only read"),
    )
]  # fmt: skip
_BY_NAME = {type.name: type for type in TENSOR_TYPES}
_BY_NUMBER = {type.number: type for type in TENSOR_TYPES}


def type_named(name: str) -> TensorType | None:
    """The type of a name; None where neither the table nor `gguf` has it."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    from gguf import GGMLQuantizationType

    return _of_gguf(GGMLQuantizationType.__members__.get(name))


def type_numbered(number: int) -> TensorType | None:
    """The type of a number in a file; None where neither the table nor `gguf` has it."""
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    from gguf import GGMLQuantizationType

    return _of_gguf(next((type for type in GGMLQuantizationType if type == number), None))


def _of_gguf(type: "GGMLQuantizationType | None") -> TensorType | None:
    from gguf import GGML_QUANT_SIZES

    return None if type is None else TensorType(type.name, int(type), *GGML_QUANT_SIZES[type])

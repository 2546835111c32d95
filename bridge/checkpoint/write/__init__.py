"""Writes checkpoints of quantized layers, and lists the formats that can be written.

written (in formats/)          what a format's record says; the record itself is in the module of the format's reader
block_words                    codes of GGUF blocks as words of a checkpoint, without a byte for each code in between
writer, report                 layers in any order to a folder with all other tensors of the model; what was written
"""

from collections.abc import Sequence

from bridge.checkpoint.formats import awq, compressed, gptq, hqq, mlx, modelopt
from bridge.checkpoint.formats.written import WrittenFormat

FORMATS: dict[str, WrittenFormat] = {
    written.name: written
    for written in (
        gptq.V1, gptq.V2, gptq.PLANAR, awq.GEMM, compressed.PACKED, mlx.WRITTEN, hqq.WRITTEN, modelopt.WRITTEN,
    )
}  # fmt: skip
QUANTIZED = [name for name, written in FORMATS.items() if written.by_quantize]  # of `quantize --format`


def in_words(names: Sequence[str]) -> str:
    """Formats by name, and "floats", with their hints: for help texts."""
    hints = {name: f" ({written.hint})" for name, written in FORMATS.items() if written.hint}
    *first, last = (f"{name}{hints.get(name, '')}" for name in names)
    return f"{', '.join(first)} or {last}"

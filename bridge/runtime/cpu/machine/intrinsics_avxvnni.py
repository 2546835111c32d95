"""AVX2 with AVX-VNNI (Alder Lake and later, Zen 5): vpdpbusd on 8 lanes."""

from bridge.runtime.cpu.machine.intrinsics_avx2 import emit_look_up, emit_row_dots
from bridge.runtime.cpu.machine.intrinsics_avx512 import vpdpbusd

NAME = "avxvnni"
LANES = 8
WIDTHS = (1, 4)  # columns of x at once, as the registers allow
BYTE_SHIFTS = False
PAIRED = False
SIGNED_DOTS = False
ROW_BITS = 7
UNPACKS = False
FUSES_SCALES = False
INDEX_BITS = 0

__all__ = [
    "BYTE_SHIFTS", "FUSES_SCALES", "INDEX_BITS", "LANES", "NAME", "PAIRED", "ROW_BITS", "SIGNED_DOTS",
    "UNPACKS", "WIDTHS", "emit_dots", "emit_look_up", "emit_row_dots",
]  # fmt: skip

_INSTRUCTION = "llvm.x86.avx512.vpdpbusd.256"


def emit_dots(v, parts, words, x, places, bits):
    return vpdpbusd(v, _INSTRUCTION, parts, words, x, places)

"""AVX-512 with VNNI and VBMI (Ice Lake and later, Zen 4): vpermb looks up a table of 64 bytes.

It reads the low six bits of each byte and takes no notice of the others, so that codes need not be masked, nor shifted
down where they lie in those six bits: the table holds an entry for every value of the bits around them.
"""

from __future__ import annotations

from bridge.runtime.cpu.machine.intrinsics_avx512 import emit_dots, emit_look_up, emit_row_dots
from bridge.system.kernels import ir

NAME = "avx512vbmi"
LANES = 16
WIDTHS = (1, 4, 8)  # columns of x at once, as the registers allow
BYTE_SHIFTS = False
PAIRED = False
SIGNED_DOTS = False
UNPACKS = False
ROW_BITS = 7
FUSES_SCALES = False
INDEX_BITS = 6

__all__ = [
    "BYTE_SHIFTS", "FUSES_SCALES", "INDEX_BITS", "LANES", "NAME", "PAIRED", "ROW_BITS", "SIGNED_DOTS",
    "UNPACKS", "WIDTHS", "emit_blend", "emit_dots", "emit_look_up", "emit_permute", "emit_row_dots",
]  # fmt: skip

_A_WHERE_C_ELSE_B = 0xE4  # vpternlogd's truth table


def emit_blend(v, a, b, mask):
    table = ir.Constant(ir.I32, _A_WHERE_C_ELSE_B)
    return v.call("llvm.x86.avx512.pternlog.d.512", v.ints, a, b, mask, table)


def emit_permute(v, table, indices):
    return v.call("llvm.x86.avx512.permvar.qi.512", v.bytes, table, indices)

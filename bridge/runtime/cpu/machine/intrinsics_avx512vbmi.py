"""AVX-512 with VNNI and VBMI (Ice Lake and later, Zen 4): vpermb looks up a table of 64 bytes.

It reads the low six bits of each byte and takes no notice of the others, so that codes need not be masked, nor shifted
down where they lie in those six bits: the table holds an entry for every value of the bits around them.
"""

from dataclasses import replace

from bridge.runtime.cpu.machine.intrinsics_avx512 import ISA as AVX512
from bridge.system.kernels import ir

_A_WHERE_C_ELSE_B = 0xE4  # vpternlogd's truth table


def emit_blend(v, a, b, mask):
    table = ir.Constant(ir.I32, _A_WHERE_C_ELSE_B)
    return v.call("llvm.x86.avx512.pternlog.d.512", v.ints, a, b, mask, table)


def emit_permute(v, table, indices):
    return v.call("llvm.x86.avx512.permvar.qi.512", v.bytes, table, indices)


ISA = replace(AVX512, emit_blend=emit_blend, emit_permute=emit_permute, index_bits=6)

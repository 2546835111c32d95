"""AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned codes with 64 int8 values and adds fours into 16 int32."""

from __future__ import annotations

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import row_dots
from bridge.system.kernels import ir

_INSTRUCTION = "llvm.x86.avx512.vpdpbusd.512"


def emit_look_up(v, table, codes):
    return v.call("llvm.x86.avx512.pshuf.b.512", v.bytes, table, codes)


def emit_dots(v, parts, words, x, places, bits):
    return vpdpbusd(v, _INSTRUCTION, parts, words, x, places)


def vpdpbusd(v, instruction, parts, words, x, places) -> list[ir.Value]:
    """Word by word, so that a word's vector is used by all columns while it is in a register."""
    parts = list(parts)
    for k, word in enumerate(words):
        code = word()
        for c in range(len(parts)):
            parts[c] = v.call(instruction, v.ints, parts[c], code, v.broadcast(x, places[c][k]))
    return parts


def emit_row_dots(v, rows, x, places, bits):
    """Without VNNI: sums of int16 are interleaved in fewer instructions."""
    return row_dots(v, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512", rows, x, places, bits)


ISA = InstructionSet(16, (1, 4, 8), emit_look_up, emit_dots, emit_row_dots=emit_row_dots, row_bits=7)

"""AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned codes with 64 int8 values and adds fours into 16 int32."""

from __future__ import annotations

from functools import partial

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import emit_pairs, row_dots
from bridge.system.kernels import ir

MULTIPLY, WIDEN = "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"


def emit_look_up(v, table, codes):
    return v.call("llvm.x86.avx512.pshuf.b.512", v.bytes, table, codes)


def vpdpbusd(instruction, v, parts, words, x, places, bits) -> list[ir.Value]:
    """Word by word, so that a word's vector is used by all columns while it is in a register."""
    parts = list(parts)
    for k, word in enumerate(words):
        code = word()
        for c in range(len(parts)):
            parts[c] = v.call(instruction, v.ints, parts[c], code, v.broadcast(x, places[c][k]))
    return parts


ISA = InstructionSet(
    16, (1, 4, 8), emit_look_up, partial(vpdpbusd, "llvm.x86.avx512.vpdpbusd.512"), row_bits=7,
    emit_row_dots=partial(row_dots, MULTIPLY, WIDEN),  # without VNNI: int16 are interleaved in fewer instructions
    emit_pairs=partial(emit_pairs, WIDEN),
)  # fmt: skip

"""AVX2 with AVX-VNNI (Alder Lake and later, Zen 5): vpdpbusd on 8 lanes."""

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import emit_look_up, emit_row_dots
from bridge.runtime.cpu.machine.intrinsics_avx512 import vpdpbusd

_INSTRUCTION = "llvm.x86.avx512.vpdpbusd.256"


def emit_dots(v, parts, words, x, places, bits):
    return vpdpbusd(v, _INSTRUCTION, parts, words, x, places)


ISA = InstructionSet(8, (1, 4), emit_look_up, emit_dots, emit_row_dots=emit_row_dots, row_bits=7)

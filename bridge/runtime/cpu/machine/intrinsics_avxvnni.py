"""AVX2 with AVX-VNNI (Alder Lake and later, Zen 5): vpdpbusd on 8 lanes."""

from functools import partial

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import ISA as AVX2
from bridge.runtime.cpu.machine.intrinsics_avx512 import vpdpbusd

_dots = partial(vpdpbusd, "llvm.x86.avx512.vpdpbusd.256")
ISA = InstructionSet(
    8, (1, 4), AVX2.emit_look_up, _dots, emit_row_dots=AVX2.emit_row_dots, emit_pairs=AVX2.emit_pairs, row_bits=7
)

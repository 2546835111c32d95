"""AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned codes with 64 int8 values and adds fours into 16 int32.

Products of int32 take two instructions of one port on Intel's processors, those of float32 one of either of two.
"""

from __future__ import annotations

from functools import partial

from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.runtime.cpu.machine.intrinsics_avx2 import emit_pairs, row_dots
from bridge.system.kernels import ir

VPDPBUSD = "llvm.x86.avx512.vpdpbusd.512"
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


def vpdpbusd_tile(
    instruction, v, parts, words, x, places, bits, scales=None, magnitude=0, starts=None
) -> list[list[ir.Value]]:
    """`Emitter.tile_dots` without scales and starts."""
    totals = [list(row) for row in parts]
    for total, row in zip(totals, words, strict=True):
        for k, word in enumerate(row):
            code = word()
            for c in range(len(total)):
                values = v.splat(0x01010101) if x is None else v.broadcast(x, places[c][k])
                unsigned, signed = (values, code) if magnitude else (code, values)
                total[c] = v.call(instruction, v.ints, total[c], unsigned, signed)
    return totals


ISA = InstructionSet(
    16, (1, 4, 8), emit_look_up, partial(vpdpbusd, VPDPBUSD), emit_tile=partial(vpdpbusd_tile, VPDPBUSD),
    row_bits=7, float_scales=True, scales_codes=True,
    emit_row_dots=partial(row_dots, MULTIPLY, WIDEN),  # without VNNI: int16 are interleaved in fewer instructions
    emit_pairs=partial(emit_pairs, WIDEN),
)  # fmt: skip

"""Arm NEON with the dot-product extension: sdot multiplies 16 int8 codes with 16 int8 values into 4 int32.

Codes of up to 6 bits can be read as signed; those of 8 bits are stored less 128 (layout.py), and so are entries of
tables: their zero point is off.
"""

from bridge.runtime.cpu.machine.instruction_set import InstructionSet


def emit_look_up(v, table, codes):
    return v.call("llvm.aarch64.neon.tbl1.v16i8", v.bytes, table, codes)


def emit_dots(v, parts, words, x, places, bits):
    parts = list(parts)
    for k, word in enumerate(words):
        codes = v.builder.bitcast(word(), v.bytes)
        for c in range(len(parts)):
            values = v.builder.bitcast(v.word_of_quad(x, places[c][k], v.ints), v.bytes)
            parts[c] = v.call("llvm.aarch64.neon.sdot.v4i32.v16i8", v.ints, parts[c], codes, values)
    return parts


ISA = InstructionSet(4, (1, 4), emit_look_up, emit_dots, byte_shifts=True, signed_dots=True)

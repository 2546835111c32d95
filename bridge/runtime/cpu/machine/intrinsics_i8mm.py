"""Arm NEON with the matrix extension: smmla multiplies two rows of 8 codes with two columns of x, into 2 x 2 int32.

Prompts alone use it; a single vector is multiplied as on NEON. Columns come in pairs: what holds four rows of a column
elsewhere holds two rows of both here (`Emitter.paired`), and the int8 values of both lie side by side, 8 bytes of one
after 8 of the other (activations.py), so that a load brings what one instruction takes.
"""

from dataclasses import replace

from bridge.runtime.cpu.machine import intrinsics_neon as neon


def emit_dots(v, parts, words, x, places, bits):
    if not v.paired:
        return neon.emit_dots(v, parts, words, x, places, bits)
    parts = list(parts)
    word_at = {offset: k for k, offset in enumerate(places[0])}
    for offset in (each for each in places[0] if each % 8 == 0):
        k = word_at[offset]
        first, second = words[k](), words[word_at[offset + 4]]()
        rows = [v.builder.bitcast(v.zipped(first, second, half), v.bytes) for half in (0, 1)]
        for c in range(0, len(parts), 2):
            values = v.builder.load(v.pointer(x, places[c][k], v.bytes), align=4)  # of the next column too
            for half in (0, 1):
                parts[c + half] = v.call(
                    "llvm.aarch64.neon.smmla.v4i32.v16i8", v.ints, parts[c + half], rows[half], values
                )
    return parts


ISA = replace(neon.ISA, widths=(1, 4, 8), emit_dots=emit_dots, paired=True)  # with NEON's layout

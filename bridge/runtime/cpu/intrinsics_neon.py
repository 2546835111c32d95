"""Arm NEON with the dot-product extension: sdot multiplies 16 int8 codes with 16 int8 values into 4 int32.

Codes of up to 6 bits can be read as signed; those of 8 bits are made signed by flipping their top bit, which
takes their zero point of 128 off.
"""

import numpy as np
from llvmlite import ir

NAME = "neon"
LANES = 4
WIDTHS = (1, 4)  # columns of x at once, as the registers allow
FEATURES = ("neon", "dotprod")
SIGNED_DOTS = True

_I8 = ir.VectorType(ir.IntType(8), 4 * LANES)


def emit_look_up(v, table, codes):
    return v.call("llvm.aarch64.neon.tbl1.v16i8", v.bytes, table, codes)


def emit_dots(v, parts, words, x, places, bits):
    parts = list(parts)
    for k, word in enumerate(words):
        code = word() if bits < 8 else v.builder.xor(word(), v.splat(-0x7F7F7F80))  # 0x80808080
        codes = v.builder.bitcast(code, _I8)
        for c in range(len(parts)):
            values = v.builder.bitcast(v.broadcast(x, places[c][k]), _I8)
            parts[c] = v.call("llvm.aarch64.neon.sdot.v4i32.v16i8", v.ints, parts[c], codes, values)
    return parts


def twin_dots(part, codes, quads, bits):
    total = part.astype(np.int64)
    for code, quad in zip(codes, quads, strict=True):
        signed = (code ^ 0x80).view(np.int8) if bits == 8 else code.view(np.int8)
        total += signed.astype(np.int64) @ quad.astype(np.int64)
    return total.astype(np.int32)

"""AVX-512 with VNNI and VBMI (Ice Lake and later, Zen 4): vpermb looks up a table of 64 bytes.

It reads the low six bits of each byte and takes no notice of the others, so that codes need not be masked, nor shifted
down where they lie in those six bits: the table holds an entry for every value of the bits around them.
"""

from dataclasses import replace

from bridge.runtime.cpu.machine.intrinsics_avx512 import ISA as AVX512
from bridge.runtime.cpu.machine.operands import Permuted
from bridge.system.kernels import ir

_A_WHERE_C_ELSE_B = 0xE4  # vpternlogd's truth table


def emit_blend(v, a, b, mask):
    table = ir.Constant(ir.I32, _A_WHERE_C_ELSE_B)
    return v.call("llvm.x86.avx512.pternlog.d.512", v.ints, a, b, mask, table)


def emit_permute(v, table, indices):
    return v.call("llvm.x86.avx512.permvar.qi.512", v.bytes, table, indices)


def emit_dots(v, parts, words, x, places, bits):
    """As AVX-512's, but of one column, eight words that are looked up have two sums.

    Look-ups and multiplications fill three ports; one sum, which waits four cycles for each word, leaves them empty at
    times. Words of other types take fewer ports, and pay for the addition.
    """
    if len(parts) > 1 or len(words) < 8 or not isinstance(words[0], Permuted):
        return AVX512.emit_dots(v, parts, words, x, places, bits)
    sums = [parts[0], v.zero()]
    for k, word in enumerate(words):
        (sums[k % 2],) = AVX512.emit_dots(v, [sums[k % 2]], [word], x, [[places[0][k]]], bits)
    return [v.add(*sums)]


ISA = replace(AVX512, emit_dots=emit_dots, emit_blend=emit_blend, emit_permute=emit_permute, index_bits=6)

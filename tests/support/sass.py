"""Machine code, from its bits: which loads are issued before what they bring is needed; how long a loop is.

From compute capability 7.0 on an instruction has 16 bytes. Bits 0 to 8 are the operation, 9 to 11 say whether its
second operand is a register, 16 to 23 are the register of the result, 24 to 31, 32 to 39 and 64 to 71 those of the
operands. Loads have their width in bits 73 to 75, and in 84 to 86 whether the L1 cache keeps what they bring. A branch
goes, from the next instruction, as many times 4 bytes further as bits 16 to 23 say, and 256 times those from 34 on.
"""

from __future__ import annotations

import struct

_LOAD, _NOT_KEPT, _WIDTHS = 0x181, 5, {4: 1, 5: 2, 6: 4}
_LOGIC, _PERMUTE, _SHIFT, _DOT = 0x012, 0x016, 0x019, 0x026
_BRANCH, _MMA, _FUSED = 0x147, 0x03C, 0x023
_REGISTER = 1
_PROGRAM, _EXECUTABLE = 1, 4  # a section's type and one of its flags


def _code(cubin: bytes) -> list[int]:
    """The instructions of the kernel in a cubin, an ELF file; what it calls is shorter."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    start, length = max((h[4:] for h in headers if h[1] == _PROGRAM and h[2] & _EXECUTABLE), key=lambda part: part[1])
    return [int.from_bytes(cubin[at : at + 16], "little") for at in range(start, start + length, 16)]


def weight_loads(cubin: bytes) -> tuple[int, int]:
    """Loads of weights, which the L1 cache does not keep: how many are issued before arithmetic needs one, and all."""
    loaded: set[int] = set()
    before, every = 0, 0
    needed = False
    for word in _code(cubin):
        operation = word & 0x1FF
        if operation == _LOAD and word >> 84 & 7 == _NOT_KEPT:
            every += 1
            before += not needed
            first = word >> 16 & 0xFF
            loaded.update(range(first, first + _WIDTHS.get(word >> 73 & 7, 1)))
        elif operation in (_LOGIC, _PERMUTE, _SHIFT, _DOT):
            operands = {word >> 24 & 0xFF, word >> 64 & 0xFF}
            if word >> 9 & 7 == _REGISTER:
                operands.add(word >> 32 & 0xFF)
            needed |= bool(operands & loaded)
    return before, every


def fused_sums(cubin: bytes) -> int:
    """Multiplications of float32 whose results are added without being rounded."""
    return sum(word & 0x1FF == _FUSED for word in _code(cubin))


def mma_loop(cubin: bytes) -> int:
    """Instructions of the innermost loop that has products of halves on tensor cores."""
    code = _code(cubin)
    cores = [at for at, word in enumerate(code) if word & 0x1FF == _MMA]
    lengths = []
    for at, word in enumerate(code):
        if word & 0x1FF == _BRANCH:
            upper = word >> 34 & 0x3FFFFFFF
            further = ((upper - (1 << 30) if upper >> 29 else upper) << 8) + (word >> 16 & 0xFF)
            first = at + 1 + further // 4
            if any(first <= core <= at for core in cores):
                lengths.append(at + 1 - first)
    return min(lengths)

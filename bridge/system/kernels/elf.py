"""Object code of C functions, put into memory without LLVM, which takes 60 ms to import.

LLVM writes this project's for x86-64 and Linux so that it can be anywhere: an ELF file whose sections refer to each
other and to functions of the C library by whole addresses (R_X86_64_64 of the System V ABI's AMD64 supplement, 4.4).
Whatever is otherwise is left to LLVM's own loader: `load` returns None.
"""

import ctypes
import mmap
import os
import struct
import sys
from functools import cache
from typing import Any, NamedTuple

_HEADER, _SYMBOL, _RELOCATION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_LITTLE_ENDIAN_64 = b"\x7fELF\x02\x01"
_OBJECT_FILE, _X86_64 = 1, 62
_SYMBOLS, _RELOCATIONS, _ZEROS, _FRAMES = 2, 4, 8, 0x70000001  # types of sections
_ALLOCATED = 2  # a section's flag
_ELSEWHERE = 0  # a symbol's section
_WHOLE_ADDRESS = 1  # a relocation

_memory: list[mmap.mmap] = []  # for as long as the process lives


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int
    item: int


_SECTION = struct.Struct("<IIQQQQIIQQ")


def load(name: str, code: bytes) -> int | None:
    """The address of a function of an object file, where it can run; None where LLVM has to do it."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not code.startswith(_LITTLE_ENDIAN_64):
        return None
    _, kind, machine, _, _, _, table_at, *_, size, count, _ = _HEADER.unpack_from(code)
    if (kind, machine, size) != (_OBJECT_FILE, _X86_64, _SECTION.size):
        return None
    sections = [_Section(*_SECTION.unpack_from(code, table_at + i * size)) for i in range(count)]
    # no frames, which exceptions pass through: nothing is raised
    offsets, end = {}, 0  # of sections in memory
    for i, section in enumerate(sections):
        if section.flags & _ALLOCATED and section.kind != _FRAMES:
            offsets[i] = -(-end // max(1, section.alignment)) * max(1, section.alignment)
            end = offsets[i] + section.nbytes
    memory = mmap.mmap(-1, max(1, end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for i, offset in offsets.items():
        if sections[i].kind != _ZEROS:
            memory[offset : offset + sections[i].nbytes] = _contents(code, sections[i])
    symbols: dict[str, int | None] = {}
    tables: dict[int, list[int | None]] = {}  # the addresses of a table's symbols
    for i, table in enumerate(sections):
        if table.kind == _SYMBOLS:
            names = _contents(code, sections[table.link])
            tables[i] = []
            for label, _, _, where, value, _ in _SYMBOL.iter_unpack(_contents(code, table)):
                spelled = names[label : names.index(b"\0", label)].decode()
                symbols[spelled] = base + offsets[where] + value if where in offsets else None
                if where == _ELSEWHERE:
                    symbols[spelled] = _library(spelled)
                tables[i].append(symbols[spelled])
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in offsets:
            for position, what, addend in _RELOCATION.iter_unpack(_contents(code, section)):
                target = tables[section.link][what >> 32]
                if what & 0xFFFFFFFF != _WHOLE_ADDRESS or target is None:
                    return None
                struct.pack_into("<Q", memory, offsets[section.info] + position, target + addend)
    if symbols.get(name) is None or _process().mprotect(
        ctypes.c_void_p(base), len(memory), mmap.PROT_READ | mmap.PROT_EXEC
    ):
        return None
    _memory.append(memory)
    return symbols[name]


def _contents(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.nbytes]


@cache
def _process() -> Any:
    return ctypes.CDLL(None)


@cache
def _library(name: str) -> int | None:
    """The address of a function of the C library; None where it has none of that name."""
    function = getattr(_process(), name, None) if name else None
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value

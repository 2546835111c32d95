"""PTX text -> kernels as basic blocks of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_STATEMENT = re.compile(r"\s*(?:([{}])|(\$?[A-Za-z_]\w*):(?!:)|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)", re.S)
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]")
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(?:\.\w+[^{]*)?\{", re.S)
_PARAM = re.compile(r"\.param\s+\.(\w+)\s+(\w+)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)

WARP_WIDE = ("shfl.sync", "vote.sync", "bar.warp.sync", "mma.sync")


@dataclass(frozen=True)
class Instruction:
    """`opcode` with its modifiers; operands as written, vectors as tuples; `guard` (wanted value, predicate)."""

    opcode: str
    operands: tuple[str | tuple[str, ...], ...]
    guard: tuple[bool, str] | None
    text: str


@dataclass
class Kernel:
    """One entry. A block ends before a label and after a jump; what waits for other lanes is a block of its own."""

    name: str
    parameters: list[tuple[str, str]]  # (type, name)
    shared: list[tuple[str, int, int]]  # (name, bytes, alignment)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """The one kernel of a PTX module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    (entry,) = _ENTRY.finditer(text)
    if re.search(r"\.func\b", text):
        raise ValueError("functions beside the kernel are not known")
    shared = [(name, int(size), int(align)) for align, name, size in _SHARED.findall(text)]
    kernel = Kernel(entry[1], _PARAM.findall(entry[2]), shared)
    at, depth, open_block = entry.end(), 1, False
    while depth:
        found = _STATEMENT.match(text, at)
        if found is None:
            raise ValueError(f"not understood: {text[at : at + 80]!r}")
        at = found.end()
        brace, label, statement = found.groups()
        if brace:
            depth += 1 if brace == "{" else -1
        elif label:
            kernel.labels[label] = len(kernel.blocks)
            open_block = False
        elif declared := _REGISTERS.match(statement.strip()):
            for name, count in re.findall(r"([%\w]+)(?:<(\d+)>)?", declared[2]):
                names = [f"{name}{i}" for i in range(int(count))] if count else [name]
                kernel.registers |= dict.fromkeys(names, declared[1])
        elif not statement.strip() or statement.strip().startswith((".loc", ".pragma")):
            continue
        else:
            instruction = _instruction(statement.strip())
            alone = instruction.opcode == "bar.sync" or instruction.opcode.startswith(WARP_WIDE)
            if not open_block or alone:
                kernel.blocks.append([])
            kernel.blocks[-1].append(instruction)
            open_block = not alone and not instruction.opcode.startswith(("bra", "ret", "exit"))
    kernel.blocks.append([Instruction("ret", (), None, "the end")])
    return kernel


def _instruction(statement: str) -> Instruction:
    guard = None
    rest = statement
    if found := _GUARD.match(rest):
        guard = (not found[1], found[2])
        rest = rest[found.end() :]
    opcode, _, rest = rest.partition(" ") if " " in rest else rest.partition("\t")
    operands = []
    for vector, pair, plain in re.findall(r"\{([^}]*)\}|(%\w+\|%\w+)|([^,\s][^,]*)", rest.strip()):
        if vector:
            operands.append(tuple(part.strip() for part in vector.split(",")))
        elif pair:
            operands.append(tuple(pair.split("|")))
        else:
            operands.append(plain.strip())
    return Instruction(opcode.strip(), tuple(operands), guard, statement)

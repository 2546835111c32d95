"""A table of calls (program.py) run as AArch64 machine code under qemu, beside this machine.

The calls' functions are compiled for AArch64; what they point to is copied to a file, with
addresses moved to where the program under qemu maps it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bridge.runtime.cpu.ops.program import ITEMS, Program
from bridge.system.cpu.machine import Machine
from bridge.system.kernels import compiler
from bridge.system.kernels.jit import CFunction
from scripts.arm import emit

PLACE = 1 << 36  # where everything is under qemu
MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
DECLARATIONS
int main(int count, char **names) {
    FILE *file = fopen(names[1], "rb");
    char *all = mmap((void *)PLACEL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (all != (char *)PLACEL || !file || fread(all, 1, SIZE, file) != SIZE) return 1;
    CALLS
    return fwrite(all, 1, SIZE, stdout) != SIZE;
}
"""


def object_file(function: CFunction) -> bytes:
    """A C function for AArch64."""
    return compiler.object_code(function, Machine("aarch64-linux-gnu", "neoverse-n1", emit.features("neon")))


def arrays_below(thing: Any, seen: set[int]) -> Iterator[np.ndarray]:
    """The memory of all arrays that an object's attributes and items lead to."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        if isinstance(thing.base, np.ndarray):
            yield from arrays_below(thing.base, seen)
        else:
            yield thing
        return
    items = list(thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ())
    if type(thing).__module__.startswith(("bridge.", "tests.")):
        items += getattr(thing, "__dict__", {}).values()
    for item in items:
        yield from arrays_below(item, seen)


def run_on_arm(program: Program, folder: Path, *roots: Any) -> None:
    """Make the program's calls under qemu: the arrays that it and `roots` lead to are then as if it had run here."""
    arrays = [a for a in arrays_below([*roots, program._rows, program._referenced], set()) if a.nbytes]
    starts = np.array([a.ctypes.data for a in arrays], np.int64)
    ends = starts + [a.nbytes for a in arrays]
    sizes = np.array([-(-a.nbytes // 64) * 64 for a in arrays])
    places = PLACE + np.concatenate([[0], np.cumsum(sizes)[:-1]])

    def moved(words: np.ndarray) -> np.ndarray:
        out = words.copy()
        for start, end, place in zip(starts, ends, places, strict=True):
            inside = (words >= start) & (words < end)
            out[inside] += place - start
        return out

    image = np.zeros(sizes.sum(), np.uint8)
    for array, place in zip(arrays, places - PLACE, strict=True):
        flat = array.reshape(-1)
        raw = (moved(flat) if array.dtype == np.int64 else flat).view(np.uint8)
        image[place : place + array.nbytes] = raw
    rows = [[row[0] if isinstance(row[0], CFunction) else row[0](), *row[1:]] for row in program._rows if row[ITEMS]]
    rows = [[row[0], *(word(program.tokens) if callable(word) else word for word in row[1:])] for row in rows]
    functions = {function.name: function for function, *_ in rows}
    names = {name: f"f{i}" for i, name in enumerate(functions)}
    calls = []
    for function, *words in rows:
        given = ", ".join(f"{word}L" for word in moved(np.array(words[:7], np.int64)))
        calls.append(f"{names[function.name]}({given}, 0, {words[ITEMS - 1]});")
    declared = [f'void {short}({", ".join(["long"] * 9)}) __asm__("{name}");' for name, short in names.items()]
    text = MAIN.replace("DECLARATIONS", "\n".join(declared)).replace("CALLS", "\n    ".join(calls))
    (folder / "main.c").write_text(text.replace("PLACE", str(PLACE)).replace("SIZE", str(image.size)))
    for name, short in names.items():
        (folder / f"{short}.o").write_bytes(object_file(functions[name]))
    image.tofile(folder / "image")
    command = ["aarch64-linux-gnu-gcc", "-O1", "-static"]
    objects = [f"{short}.o" for short in names.values()]
    subprocess.run([*command, "main.c", *objects, "-lm", "-o", "program"], cwd=folder, check=True)
    run = ["qemu-aarch64-static", "-cpu", "max", str(folder / "program"), "image"]
    found = np.frombuffer(subprocess.run(run, cwd=folder, check=True, capture_output=True).stdout, np.uint8)
    for array, place in zip(arrays, places - PLACE, strict=True):
        if array.flags.writeable and array.dtype != np.int64:
            array.reshape(-1).view(np.uint8)[:] = found[place : place + array.nbytes]

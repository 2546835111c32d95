"""Object code in memory without LLVM's loader, against LLVM's loader; and a start that imports no LLVM."""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.system.kernels import compiler, elf, object_code
from bridge.system.kernels.jit import c_function
from bridge.system.kernels.memory import allocate, array_at, free
from bridge.system.kernels.object_code import ARGUMENTS
from scripts import build_objects
from tests.conftest import CHECKPOINT, PATIENCE, linux
from tests.system.test_object_code import ELSEWHERE

here = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="LLVM's loader does it on other systems"
)

WEIGHTS = np.array([0.25, 3.5, -1.0, 7.0, 0.125, 2.0, -4.0, 9.0], np.float32)


def _weighted(values, count, out, _0, _1, _2, _3, first, last):
    """out[i] = values[i] * WEIGHTS[i % 8], by way of memory of its own: constants, and calls of the C library."""
    held = allocate(4 * count)
    mine = array_at(held, count, np.float32)
    for i in range(count):
        mine[i] = 0
    for i in range(first, last):
        mine[i] = array_at(values, count, np.float32)[i] * WEIGHTS[i % 8]
    for i in range(count):
        array_at(out, count, np.float32)[i] = mine[i]
    free(held)


def called(address: int, values: np.ndarray) -> list[float]:
    out = np.zeros_like(values)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * ARGUMENTS)(address)
    function(values.ctypes.data, len(values), out.ctypes.data, 0, 0, 0, 0, 0, len(values))
    return list(out.tolist())


@here
def test_code_computes_what_it_does_where_llvm_loads_it() -> None:
    function = c_function(_weighted, "loaded")
    code = compiler.object_code(function)
    values = np.arange(1, 101, dtype=np.float32)
    address = elf.load(function.name, code)
    assert address is not None
    expected = (values * np.tile(WEIGHTS, 13)[:100]).tolist()
    assert called(address, values) == expected
    assert called(object_code._loaded_by_llvm(function.name, code), values) == expected
    assert elf.load(function.name, code) != address  # memory of its own


@linux
@here
def test_code_can_be_run_and_not_changed() -> None:
    function = c_function(_weighted, "kept")
    address = elf.load(function.name, compiler.object_code(function))
    assert address is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("its memory is not mapped")


@here
def test_what_is_not_known_is_left_to_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    function = c_function(_weighted, "strange")
    code = compiler.object_code(function)
    assert elf.load("another name", code) is None
    assert elf.load(function.name, b"\xcf\xfa\xed\xfe" + code) is None  # Mach-O's beginning
    assert elf.load(function.name, code[:18] + struct.pack("<H", 183) + code[20:]) is None  # for Arm
    assert elf.load(function.name, code.replace(b"\0malloc\0", b"\0nalloc\0")) is None  # no function of the C library
    monkeypatch.setattr(elf, "_WHOLE_ADDRESS", 2)  # as if all relocations were of another kind
    assert elf.load(function.name, code) is None
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "win32")
    assert elf.load(function.name, code) is None
    monkeypatch.undo()
    monkeypatch.setattr(object_code.elf, "load", lambda name, code: None)
    assert called(object_code._loaded(function.name, code), np.ones(8, np.float32)) == WEIGHTS.tolist()


@here
def test_memory_that_may_not_be_run_is_left_to_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    function = c_function(_weighted, "refused")

    class Refusing:
        def mprotect(self, *_: Any) -> int:
            return -1

    code = compiler.object_code(function)
    process = elf._process()
    monkeypatch.setattr(elf, "_library", lambda name: getattr(process, name, None) and 1)
    monkeypatch.setattr(elf, "_process", Refusing)
    assert elf.load(function.name, code) is None


@here
def test_object_code_for_arm_is_no_code_for_here() -> None:
    program = f"{ELSEWHERE}\nprint(__import__('bridge.system.kernels.elf').system.kernels.elf.load('walk', code))"
    described = build_objects.machine_of("neon")
    done = subprocess.run([sys.executable, "-c", program, *described], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == ["True", "183", "None"], done.stderr


START = """
import sys
from bridge.runtime.model import Model
text = "".join(Model.load(sys.argv[1]).generate("the", max_tokens=3, temperature=0))
print(sorted({"llvmlite.binding", "llvmlite.ir", "numba", "tokenizers", "concurrent.futures"} & set(sys.modules)))
"""


@here
def test_a_warm_start_imports_no_compiler(tmp_path: Path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START, tmp_path / "m.gguf"], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"

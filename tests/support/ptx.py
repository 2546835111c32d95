"""Kernels compiled as for a GPU, without one: PTX by libNVVM, machine code and what it needs by nvJitLink."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.system.storage import kernel_cache

if TYPE_CHECKING:
    from bridge.cuda.toolchain.launch import Kernel


@dataclass(frozen=True)
class Compiled:
    """A kernel for one compute capability; stack and spills are bytes."""

    ptx: str
    registers: int
    stack: int
    spills: int


@cache
def unavailable() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as problem:
        return f"no CUDA compiler (the cu13 extra brings it): {type(problem).__name__}"
    return None


def compiled(kernel: Kernel, capability: tuple[int, int]) -> Compiled:
    """Compile a kernel as `Kernel.warm` does, for a capability, for instance (9, 0)."""
    return assembled(ptx_of(kernel, capability), capability, kernel.registers)


@cache
def ptx_of(kernel: Kernel, capability: tuple[int, int]) -> str:
    """A kernel as PTX, compiled once for all processes of a run, and those that follow.

    It is kept with compiled kernels, under what it is made of and by.
    """
    from bridge.cuda.toolchain import compiler

    made_by = str(compiler.folder(capability)), np.__version__, sys.version  # a folder for the versions of packages
    file = f"ptx.{kernel.name}-{kernel_cache.digest(compiler.digest(kernel), *made_by)}"
    if (kept := kernel_cache.load(file)) is None:
        kept = compiler.ptx_of(kernel, capability).encode()
        kernel_cache.note(file, kept)
    return kept.decode()


def assembled(ptx: str, capability: tuple[int, int], registers: int | None = None) -> Compiled:
    """PTX, for this capability or an older one, as machine code; a kernel has as many registers as it asks for."""
    linker = _linker(ptx, capability, registers)
    linker.link("cubin")
    log = str(linker.get_info_log()) + str(linker.get_error_log())

    def total(pattern: str) -> int:
        found = re.findall(pattern, log)
        assert found, log
        return sum(map(int, found))

    spills = total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads")
    return Compiled(ptx, total(r"Used (\d+) registers"), total(r"(\d+) bytes stack frame"), spills)


def machine_code(ptx: str, capability: tuple[int, int], registers: int) -> bytes:
    """The same as a cubin."""
    return bytes(_linker(ptx, capability, registers).link("cubin").code)


def _linker(ptx: str, capability: tuple[int, int], registers: int | None) -> Any:
    from bridge.cuda.toolchain.launch import MAX_REGISTERS
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(
        arch=f"sm_{capability[0]}{capability[1]}", max_register_count=registers or MAX_REGISTERS, ptxas_options=["-v"]
    )
    return Linker(ObjectCode.from_ptx(ptx.encode()), options=options)

"""Object code of C functions: found in the cache, or in what came with the package, or compiled; and loaded.

A wheel holds the code for common types, made by scripts/build_objects.py: one archive for each instruction set, whose
comment lists what a machine must have.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from bridge.errors import BridgeError
from bridge.system.cpu import machine
from bridge.system.cpu.fork_locks import ForkLock
from bridge.system.cpu.machine import host
from bridge.system.kernels import closure, elf
from bridge.system.storage import kernel_cache

ARGUMENTS = 9  # int64, of a C function: seven, and the range that the call is for


class Named(Protocol):
    """A C function (`bridge.system.kernels.jit`): its name, and the modules that its code depends on."""

    name: str
    modules: frozenset[str]


_addresses: dict[str, int] = {}  # by the functions' names
_compiled: dict[str, bytes] = {}  # by others for this process, not loaded yet
_lock = ForkLock()


def address_of(function: Named, compile: Callable[[], bytes]) -> int:
    """Where the code of a C function is in this process: from the cache, or compiled and kept there."""
    with _lock:
        if function.name not in _addresses:
            code = _compiled.pop(function.name, None) or kernel_cache.load(cached_name(function)) or _bundled(function)
            if code is None:
                code = compile()
                kernel_cache.save(cached_name(function), code)
            _addresses[function.name] = _loaded(function.name, code)
        return _addresses[function.name]


def known(function: Named) -> bool:
    """Whether a C function has been compiled."""
    if function.name in _addresses or function.name in _compiled:
        return True
    return kernel_cache.has(cached_name(function)) or _bundled(function) is not None


def keep(function: Named, code: bytes) -> None:
    """Keep what another process has compiled."""
    _compiled[function.name] = code
    kernel_cache.save(cached_name(function), code)


def cached_name(function: Named) -> str:
    """The name of the file in which the code of a function for this machine is kept."""
    sources = closure.digest(function.modules)
    return f"{function.name}-{kernel_cache.digest(sources, function.name, *host(), *_versions())}.o"


def bundle(target: str) -> str:
    """The name of the archive of a target's object code."""
    return f"{sys.platform}-{target}.zip"


def bundled_name(function: Named) -> str:
    """The name of a function's code in an archive."""
    return f"{function.name}-{kernel_cache.digest(closure.digest(function.modules), function.name)}.o"


def _bundled(function: Named) -> bytes | None:
    """A function's code as it came with the package, if it did."""
    archive = _archive()
    with suppress(KeyError):  # not of a common type, or its sources were changed
        return archive.read(bundled_name(function)) if archive is not None else None
    return None


@cache
def _archive() -> Any:
    """The archive for this machine; None where there is none."""
    folder = Path(__file__).parents[2] / "objects"
    if not folder.is_dir():
        return None
    import io
    import zipfile

    from bridge.system.cpu import targets

    with suppress(OSError, BridgeError):  # none for this instruction set
        data = (folder / bundle(targets.chosen())).read_bytes()  # a forked process would share a file's position
        archive = zipfile.ZipFile(io.BytesIO(data))
        if machine.features().issuperset(archive.comment.decode().split(",")):
            return archive
    return None


@cache
def _versions() -> tuple[str, ...]:
    """Of what compiles; Numba's is in a folder's name beside llvmlite, as importlib.metadata takes 20 ms to import."""
    import llvmlite

    beside = os.listdir(Path(llvmlite.__file__).parent.parent)
    versions = [name for name in beside if name.startswith("numba-") and name.endswith(".dist-info")]
    if not versions:
        from importlib.metadata import version

        versions = [version("numba")]
    return llvmlite.__version__, *versions


def _loaded(symbol: str, code: bytes) -> int:
    address = elf.load(symbol, code)
    return _loaded_by_llvm(symbol, code) if address is None else address


def _loaded_by_llvm(symbol: str, code: bytes) -> int:
    import llvmlite.binding as llvm

    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


@cache
def _engine() -> Any:
    """LLVM's loader of object code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), processor)

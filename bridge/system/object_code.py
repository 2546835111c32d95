"""Object code of C functions, found in the cache or compiled, and loaded by llvmlite alone."""

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import llvmlite
import llvmlite.binding as llvm

from bridge.system import closure, kernel_cache
from bridge.system.fork_locks import ForkLock
from bridge.system.machine import host

if TYPE_CHECKING:
    from bridge.system.jit import CFunction

_addresses: dict[str, int] = {}  # by the functions' names
_compiled: dict[str, bytes] = {}  # by others for this process, not loaded yet
_lock = ForkLock()


def address_of(function: "CFunction") -> int:
    """Where the code of a C function is in this process: from the cache, or compiled and kept there."""
    with _lock:
        if function.name not in _addresses:
            code = _compiled.pop(function.name, None) or kernel_cache.load(kept_as(function))
            if code is None:
                from bridge.system import compiler

                code = compiler.object_code(function, host())
                kernel_cache.save(kept_as(function), code)
            _addresses[function.name] = _loaded(function.name, code)
        return _addresses[function.name]


def known(function: "CFunction") -> bool:
    """Whether a C function has been compiled."""
    return function.name in _addresses or function.name in _compiled or kernel_cache.has(kept_as(function))


def keep(function: "CFunction", code: bytes) -> None:
    """Keep what another process has compiled."""
    _compiled[function.name] = code
    kernel_cache.save(kept_as(function), code)


def kept_as(function: "CFunction") -> str:
    """The name under which the code of a function for this machine is kept."""
    sources = closure.digest(function.modules)
    return f"{function.name}-{kernel_cache.digest(sources, function.name, *host(), *_versions())}"


@cache
def _versions() -> tuple[str, str]:
    return version("numba"), llvmlite.__version__


@cache
def _engine() -> Any:
    """LLVM's loader of object code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), processor)


def _loaded(symbol: str, code: bytes) -> int:
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))

"""What Numba makes of the functions of `jit`: the only module that imports it for kernels of the CPU.

A C function becomes object code that needs neither Numba nor Python: Numba lowers the function, and what it leaves is
linked, optimized as Numba does it, and compiled for any machine. Numba's own C callbacks print exceptions and count
references, and so contain calls into both. Here, whatever a C function calls raises nothing, and its arrays, which do
not own their memory, are not counted.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import caching, codegen, config, registry
from numba.core import compiler as numba_compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.types import int64, void
from numba.core.typing.templates import builtin_registry
from numba.extending import intrinsic

from bridge.errors import BridgeError
from bridge.system.cpu.machine import Machine, host, unseen_features
from bridge.system.kernels import closure, compiling
from bridge.system.kernels.object_code import ARGUMENTS, Named
from bridge.system.storage import kernel_cache

if hasattr(os, "register_at_fork"):  # a fork waits for a thread that compiles: no one would finish it in the child
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
if unseen_features():
    config.CPU_FEATURES = host().features  # type: ignore[attr-defined]


class Deferred(Protocol):
    """A function that `bridge.system.kernels.jit` wants made, how, and the modules that its code depends on."""

    py_func: Callable[..., Any]
    options: dict[str, Any]
    modules: frozenset[str]


class CFunction(Named, Protocol):
    """A C function of `bridge.system.kernels.jit`."""

    py_func: Callable[..., Any]


def intrinsic_of(deferred: Deferred) -> Any:
    """Numba's intrinsic for a function that emits code."""
    make = intrinsic(**deferred.options) if deferred.options else intrinsic
    return make(deferred.py_func)


def dispatcher_of(deferred: Deferred) -> Any:
    """Numba's dispatcher for a function."""
    options = dict(deferred.options)
    cached = options.pop("cache", False)
    dispatcher: Any = numba.njit(**options)(deferred.py_func)
    if dispatcher is not deferred.py_func:  # as it is with NUMBA_DISABLE_JIT
        dispatcher._compiler.compile = _timed(dispatcher._compiler.compile)
        if cached and closure.sources(deferred.modules):
            try:
                dispatcher._cache = _Cache(deferred)
            except BridgeError as problem:  # there is no home folder
                kernel_cache.say_unusable(problem)
    return dispatcher


def type_of(compiled: Any) -> Any:
    """The type of a dispatcher or an intrinsic in compiled code."""
    context = registry.cpu_target.typing_context
    context.install_registry(builtin_registry)  # it has the intrinsics that were made just now
    return context.resolve_value_type(compiled)


def _timed(compile: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        with compiling.kernel():
            return compile(*arguments, **named)

    return timed


# what Numba keeps


_VERSIONS = numba.__version__, llvm.llvm_version_info, np.__version__


class _Locator:
    """The folder of a module's kernels, named after what they depend on; its files, after a function and its line."""

    def __init__(self, deferred: Deferred) -> None:
        self.line = deferred.py_func.__code__.co_firstlineno
        digest = kernel_cache.digest(closure.digest(deferred.modules), *_VERSIONS)
        self.path = kernel_cache.folder() / f"{deferred.py_func.__module__}-{digest}"

    def ensure_cache_path(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self.path)

    def get_source_stamp(self) -> str:
        return ""  # the folder is of these sources alone

    def get_disambiguator(self) -> str:
        return str(self.line)


class _Implementation(caching.CompileResultCacheImpl):
    def __init__(self, locator: _Locator, name: str) -> None:
        self._lineno, self._locator = locator.line, locator
        self._filename_base = self.get_filename_base(name, "")


class _Cache(caching.FunctionCache):
    """Numba's cache, where whatever is wrong with an entry makes it a miss."""

    def __init__(self, deferred: Deferred) -> None:
        locator = _Locator(deferred)
        self._impl_class = lambda function: _Implementation(locator, function.__qualname__)
        super().__init__(deferred.py_func)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(OSError):
            if not kernel_cache.trusted(Path(self.cache_path)):
                return None
            try:
                entry = super().load_overload(sig, target_context)
            except Exception:  # a file that was cut or changed: pickle raises anything
                self._remove()
                return None
            if entry is not None:
                kernel_cache.used(Path(self.cache_path))
            return entry
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            if kernel_cache.ready():
                super().save_overload(sig, data)
        except OSError as problem:
            kernel_cache.say_unusable(problem)
        except Exception:  # its index cannot be read
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self.flush()


# object code

_COUNTS = "incref", "decref", "MemInfo_call_dtor"  # of arrays that own their memory: there are none
_UNCOUNTED = "\n".join(f"define void @NRT_{name}(ptr %0) {{ ret void }}" for name in _COUNTS)
_FOREIGN = ("NRT_", "Py", "_Py", "numba")


class _Lowered(_FunctionCompiler):
    """Compiles to LLVM's code for `object_code`, and no further."""

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        return flags


def object_code(function: CFunction, machine: Machine | None = None) -> bytes:
    """The object file of a C function, whose symbol is the function's name, for a machine; None: this one."""
    with compiling.kernel(), global_compiler_lock:
        module, processor = _optimized(function, machine or host())
        return bytes(processor.emit_object(module))


def answer(function: CFunction) -> bytes | None:
    """What a process of `compile_ahead` answers: object code for this machine; None where that failed."""
    try:
        return object_code(function)
    except Exception:
        return None


def assembly(function: CFunction, machine: Machine) -> str:
    """The assembly of a C function for a machine, as text."""
    with global_compiler_lock:
        module, processor = _optimized(function, machine)
        return str(processor.emit_assembly(module))


def _optimized(function: CFunction, machine: Machine) -> tuple[Any, Any]:
    lowering = _Lowered(
        function.py_func, registry.cpu_target, {"nopython": True, "error_model": "numpy"}, {}, numba_compiler.Compiler
    )
    with _no_function_passes(), _for_elsewhere(machine):
        result = lowering.compile((int64,) * ARGUMENTS, void)
    library = result.library
    callee = result.fndesc.llvm_func_name
    arguments = ", ".join(f"i64 %{i}" for i in range(ARGUMENTS))
    module = llvm.parse_assembly(f"""
        declare i32 @"{callee}"(ptr, ptr, {", ".join(["i64"] * ARGUMENTS)})
        {_UNCOUNTED}
        define void @"{function.name}"({arguments}) {{
            %result = alloca ptr
            %problem = alloca ptr
            %status = call i32 @"{callee}"(ptr %result, ptr %problem, {arguments})
            ret void
        }}""")
    module.triple = machine.triple
    processor = _processor(machine)
    module.data_layout = str(processor.target_data)
    module.link_in(library._final_module, preserve=True)
    for other in dict.fromkeys(library._linking_libraries):
        module.link_in(other._get_module_for_linking(), preserve=True)
    for symbol in (*module.functions, *module.global_variables):
        if not symbol.is_declaration and symbol.name != function.name:
            symbol.linkage = "internal"
    _optimize(module, processor)
    missing = [f.name for f in (*module.functions, *module.global_variables) if f.is_declaration]
    if foreign := [name for name in missing if name.startswith(_FOREIGN)]:
        raise AssertionError(f"{function.name}: its code needs {', '.join(foreign)}; it must not allocate or raise")
    return module, processor


@contextmanager
def _no_function_passes() -> Iterator[None]:
    """Leave out LLVM's passes over each function by itself: those over the whole do it again, and this is a fifth of
    the time that a C function takes."""
    original = codegen.CPUCodeLibrary._optimize_functions

    def optimize_functions(library: Any, module: Any) -> None:
        module.data_layout = library._codegen._data_layout

    codegen.CPUCodeLibrary._optimize_functions = optimize_functions
    try:
        yield
    finally:
        codegen.CPUCodeLibrary._optimize_functions = original


@contextmanager
def _for_elsewhere(machine: Machine) -> Iterator[None]:
    """For another kind of machine, Numba compiles no function to this one's code, which may not have what it needs.

    Nothing can then run in this process that uses these functions: it is one that compiles for other machines alone.
    """
    if machine.triple == llvm.get_process_triple():
        yield
        return
    kinds = codegen.JITCPUCodegen, codegen.JITCPUCodegen, codegen.JITCodeLibrary
    names = "_add_module", "set_env", "_finalize_specific"
    originals = [getattr(kind, name) for kind, name in zip(kinds, names, strict=True)]
    for kind, name in zip(kinds, names, strict=True):
        setattr(kind, name, lambda *_: None)
    try:
        yield
    finally:
        for kind, name, function in zip(kinds, names, originals, strict=True):
            setattr(kind, name, function)


@cache
def _processor(machine: Machine) -> Any:
    """LLVM's target machine, with the options of Numba's own: what it emits is loaded into a process."""
    if machine.triple == llvm.get_process_triple():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(machine.triple)
    return target.create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3, jit=True, codemodel="jitdefault",
        reloc="static" if target.name.startswith("x86") else "default",
    )  # fmt: skip


def _optimize(module: Any, processor: Any) -> None:
    """Numba's two passes: one that inlines, one that does all."""
    cheap = codegen.create_pass_builder(processor, opt=0)
    passes = cheap.getModulePassManager()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_jump_threading_pass()
    passes.run(module, cheap)
    full = codegen.create_pass_builder(processor, opt=3, loop_vectorize=True)
    full.getModulePassManager().run(module, full)
    module.verify()

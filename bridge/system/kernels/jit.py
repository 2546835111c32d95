"""Functions that Numba compiles, as this project uses it: made here, compiled when they are first needed.

Decorating costs nothing, and Numba, which takes half a second to import, is loaded when something must be compiled:
`compiler` does that. What was compiled before is found in the cache (`storage.kernel_cache`): of C
functions the object code, which `object_code` loads without Numba.

    kernel      for Python to call with arrays; kept in Numba's cache
    inner       for other compiled functions alone; so are `uncounted` and `inlined`
    c_function  a C function of nine int64: what a table of calls (program.py) and the threads of `pool` call
    intrinsic   a function that emits LLVM's code, as numba.extending.intrinsic

Modules with kernels take Numba's own modules from here too, as `types` and `cgutils`, for the same reason.
"""

import ctypes
import importlib
import types as python_types
from collections.abc import Callable
from functools import cache, cached_property, wraps
from typing import Any

from bridge.system.kernels import compiling, object_code
from bridge.system.kernels.object_code import ARGUMENTS


def _compiler() -> Any:
    """The module that imports Numba."""
    with compiling.loading():
        return importlib.import_module("bridge.system.kernels.compiler")


class _Module:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


types: Any = _Module("numba.core.types")
cgutils: Any = _Module("numba.core.cgutils")
arrayobj: Any = _Module("numba.np.arrayobj")


class Deferred:
    """What Numba makes of a function: `compiled`, as soon as it is asked for. Compiled code may name it instead.

    py_func  the function
    options  of numba.njit or numba.extending.intrinsic
    modules  those that its code depends on, with all that they import: its own, and those of what it was given
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.py_func, self.options = function, options
        self.modules = frozenset([function.__module__])
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    @cached_property
    def compiled(self) -> Any:
        return _compiler().dispatcher_of(self)

    @property
    def _numba_type_(self) -> Any:
        """What Numba asks for where compiled code names the function."""
        return _compiler().type_of(self.compiled)


class Compiled(Deferred):
    """A function that Numba compiles for the types that it is called with."""

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)


class Intrinsic(Deferred):
    """A function that emits LLVM's code where compiled code calls it."""

    @cached_property
    def compiled(self) -> Any:
        return _compiler().intrinsic_of(self)


class CFunction:
    """A C function of nine int64 that returns nothing, made of a function of Python; it is called without the GIL.

    It raises nothing, and allocates nothing but by `memory.allocate`: its object code knows nothing of
    Python, and only the C library's functions.
    """

    def __init__(self, function: Callable[..., Any], name: str, modules: frozenset[str]) -> None:
        self.py_func, self.name, self.modules = function, name, modules
        self.recipe: tuple[str, str, tuple[Any, ...]] | None = None  # set by `maker`

    def __reduce__(self) -> Any:
        """Another process makes it as it was made here."""
        return _remade, self.recipe

    @property
    def weight(self) -> int:
        """The longer, the longer it may take to compile: the size of what it is made of."""
        parts = (value for value in self.py_func.__globals__.values() if isinstance(value, Deferred))
        return len(self.py_func.__code__.co_code) + sum(len(part.py_func.__code__.co_code) for part in parts)

    @cached_property
    def address(self) -> int:
        """Where its code is, in this process."""
        return object_code.address_of(self, lambda: _compiler().object_code(self))

    @cached_property
    def ctypes(self) -> Any:
        """The function that Python calls with all nine arguments."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * ARGUMENTS)(self.address)

    def __call__(self, *arguments: int) -> None:
        self.ctypes(*arguments, *[0] * (ARGUMENTS - len(arguments)))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for speed: cached on disk, GIL released, division by zero as in IEEE 754."""
    return Compiled(function, cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)


def inner(function: Callable[..., Any], fastmath: Any = False) -> Any:
    """Compile a function that only kernels call: no entry from Python, no cache entry of its own."""
    return Compiled(function, **_INNER, fastmath=fastmath)


def uncounted(function: Callable[..., Any]) -> Any:
    """Like `inner`, for what takes slices of arrays in the innermost loops, and makes and returns none.

    References to arrays are counted otherwise, slices' too, atomically: a fifth of the time of such loops.
    """
    return Compiled(function, **_INNER, _nrt=False)


def inlined(function: Callable[..., Any]) -> Any:
    """Like `inner`, for what sits in the innermost loops: a call with ten arrays costs 50 ns otherwise."""
    return Compiled(function, **_INNER, forceinline=True)


_INNER: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True
}  # fmt: skip


def intrinsic(function: Any = None, **options: Any) -> Any:
    """As numba.extending.intrinsic, with or without options."""
    if function is None:
        return lambda function: Intrinsic(function, **options)
    return Intrinsic(function, **options)


def c_function(function: Callable[..., Any], suffix: str = "c", **scope: Any) -> CFunction:
    """`function` of nine int64, some of its globals set (see `specialize`), as a C function.

    Within its module the suffix says all of what it is specialized with: its code is kept under that name, and under
    the digest of the sources that it depends on.
    """
    clone = _copy(function, suffix, scope)
    return CFunction(clone, f"{clone.__module__}.{clone.__qualname__}", _modules(function, scope))


def maker(make: Callable[..., CFunction]) -> Callable[..., CFunction]:
    """For functions that make C functions: one for the same arguments, and another process can make it too."""

    @cache
    @wraps(make)
    def cached(*arguments: Any) -> CFunction:
        function = make(*arguments)
        function.recipe = function.recipe or (make.__module__, make.__name__, arguments)
        return function

    return cached


def _remade(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments)


UNSET: Any = None  # what a module's top has for functions that `specialize` sets


def specialize(function: Callable[..., Any], suffix: str, compile: Callable[..., Any] = kernel, **scope: Any) -> Any:
    """Compile `function` with some of its globals set to constants or compiled functions.

    The copy is named `function_suffix`, and so is its cache entry.

    Why constants come this way, as globals whose values at the module's top are placeholders: LLVM turns a loop into
    vectors where its trip count and limits are known, and an argument is not known (Numba's `literally` takes no
    floats, and tuples of literals do not stay literal). A closure would be clearer, but is compiled again in every
    process: compiled functions in its cells hash differently, so that the disk cache misses. Type checkers see the
    placeholders, which are of the constants' types.
    """
    compiled = compile(_copy(function, suffix, scope))
    compiled.modules = _modules(function, scope)
    return compiled


def _modules(function: Callable[..., Any], scope: dict[str, Any]) -> frozenset[str]:
    """The modules of a function and of those that it is given."""
    dependencies = (value.modules for value in scope.values() if isinstance(value, Deferred))
    return frozenset([function.__module__]).union(*dependencies)


def _copy(function: Callable[..., Any], suffix: str, scope: dict[str, Any]) -> python_types.FunctionType:
    assert isinstance(function, python_types.FunctionType)
    name = f"{function.__name__}_{suffix}"
    clone = python_types.FunctionType(function.__code__, {**function.__globals__, **scope}, name, function.__defaults__)
    clone.__module__ = function.__module__
    clone.__qualname__ = name
    return clone


def from_plain(function: Callable[..., Any], compile: Callable[..., Any] = kernel) -> Any:
    """Compile a plain function of `bridge.blocks`, and the plain functions it calls."""
    assert isinstance(function, python_types.FunctionType)
    callees = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    compiled = {name: from_plain(f, compile) for name, f in callees.items() if isinstance(f, python_types.FunctionType)}
    return specialize(function, "compiled", compile, **compiled)

"""Numba, as this project uses it: compiled once per machine, cached, never holding the GIL.

Imported only by modules that hold kernels; `import bridge` and `--help` never come here, since
numba alone takes most of a second to import.

The compile cache lives in a folder named after a digest of our own sources, because numba's cache
does not notice edits in a file that a kernel merely calls into. It depends on what the sources say, not on where they
are: a checkout and an installed copy share it. It is in the user's cache folder, or in NUMBA_CACHE_DIR where that is
set. In the user's cache folder, caches of other sources are removed, but for those used last and those that a process
holds.
"""

import hashlib
import os
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import llvmlite.binding
import numba
import numpy as np
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock

import bridge
from bridge.errors import BridgeError
from bridge.system import compiling, targets
from bridge.system.cache import cache_folder, paths
from bridge.system.folder_locks import lock_shared, remove_if_unlocked
from bridge.system.text import tell

_CHOSEN = os.environ.get("NUMBA_CACHE_DIR")
_KEPT_CACHES = 3  # caches of other checkouts or versions that are not removed

if hasattr(os, "register_at_fork"):  # a fork waits for a thread that compiles: no one would finish it in the child
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


if _unseen := targets.unseen_features():
    _seen = llvmlite.binding.get_host_cpu_features().flatten().split(",")
    _told = [feature for feature in _seen if feature and feature[1:] not in _unseen]
    numba.config.CPU_FEATURES = ",".join([*_told, *(f"+{name}" for name in _unseen)])  # type: ignore[attr-defined]


class _Listener(event.Listener):
    """Tells `compiling` what numba does."""

    def on_start(self, event: Any) -> None:
        if event.kind == _LOCK:
            compiling.begin()
        else:
            compiling.step()

    def on_end(self, event: Any) -> None:
        if event.kind == _LOCK:
            compiling.end()


_LOCK, _PASS = "numba:compiler_lock", "numba:run_pass"  # held while a kernel is compiled or loaded; compiled only
_listener = _Listener()
for _kind in (_LOCK, _PASS):
    event.register(_kind, _listener)


def _folders() -> list[Path]:
    """The packages that hold kernels."""
    return [Path(bridge.__file__).parent, *(Path(folder) / "cuda" for folder in bridge.__path__)]


def _cache_dir() -> Path:
    """The compile cache of exactly these sources and this numba."""
    made_by = sys.version, numba.__version__, llvmlite.__version__, np.__version__
    digest = hashlib.sha256(repr(made_by).encode())
    for folder in _folders():
        for source in sorted(folder.rglob("*.py")):
            digest.update(f"{source.relative_to(folder)}\n".encode() + source.read_bytes())
    return (Path(_CHOSEN) if _CHOSEN else cache_folder() / "numba") / digest.hexdigest()[:16]


class CacheLocator:
    """Where numba caches a function of ours: named by its module's place in the package, not by the package's place.

    Numba asks for the methods (NUMBA_CACHE_LOCATOR_CLASSES).
    """

    folder: Path  # of the cache

    def __init__(self, path: Path, line: int) -> None:
        self.path, self.line = path, line

    @classmethod
    def from_function(cls, function: Any, file: str) -> Self | None:
        """None for functions that are not ours."""
        source = Path(file)
        for folder in _folders():
            if source.is_relative_to(folder):
                return cls(cls.folder / source.relative_to(folder).parent, function.__code__.co_firstlineno)
        return None

    def ensure_cache_path(self) -> None:
        """Make the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        """The folder."""
        return str(self.path)

    def get_source_stamp(self) -> str:
        """The same for all: the cache is of these sources alone."""
        return ""

    def get_disambiguator(self) -> str:
        """What tells functions of the same name apart."""
        return str(self.line)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)  # several processes may come here at once
    return folder


def _prune(keep: Path) -> None:
    """Drop compile caches of sources that have not been used for longest, but none that a process holds."""
    with suppress(OSError):  # another process prunes as well
        others = sorted((p for p in paths("numba") if p != keep), key=lambda p: p.stat().st_mtime)
        for old in others[:-_KEPT_CACHES]:
            remove_if_unlocked(old)


try:
    CacheLocator.folder = _cache_dir()
    _new = not CacheLocator.folder.exists()
    _, _held = lock_shared(lambda: _made(CacheLocator.folder))  # until the process ends
    with suppress(OSError):  # a cache that came with the machine, read-only
        os.utime(CacheLocator.folder)  # its last use
    if _new and not _CHOSEN:
        _prune(CacheLocator.folder)
    numba.config.CACHE_DIR = str(CacheLocator.folder)  # type: ignore[attr-defined]  # for CUDA's kernels
    _others = "UserProvidedCacheLocator,InTreeCacheLocator,UserWideCacheLocator,IPythonCacheLocator,ZipCacheLocator"
    numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.CacheLocator,{_others}"  # type: ignore[attr-defined]
except (OSError, BridgeError) as problem:  # a read-only home, or none
    tell(f"compile cache: {problem}; every process compiles its kernels again")
    _temporary = tempfile.TemporaryDirectory(prefix="gguf-bridge-")  # numba refuses to have none
    numba.config.CACHE_DIR = _temporary.name  # type: ignore[attr-defined]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for speed: cached on disk, GIL released, division by zero as in IEEE 754."""
    options: Any = {"no_cfunc_wrapper": True}  # a second way in, which takes time to compile
    return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)


def inner(function: Callable[..., Any], fastmath: Any = False) -> Any:
    """Compile a function that only kernels call: no entry from Python, no cache entry of its own."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "fastmath": fastmath}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)


def uncounted(function: Callable[..., Any]) -> Any:
    """Like `inner`, for what takes slices of arrays in the innermost loops, and makes and returns none.

    References to arrays are counted otherwise, slices' too, atomically: a fifth of the time of such loops.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Like `inner`, for what sits in the innermost loops: a call with ten arrays costs 50 ns otherwise."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)


def specialize(function: Callable[..., Any], suffix: str, compile: Callable[..., Any] = kernel, **scope: Any) -> Any:
    """Compile `function` with some of its globals set to constants or compiled functions.

    The copy is named `function_suffix`, and so is its cache entry.

    Why constants come this way, as globals whose values at the module's top are placeholders: LLVM turns a loop into
    vectors where its trip count and limits are known, and an argument is not known (Numba's `literally` takes no
    floats, and tuples of literals do not stay literal). A closure would be clearer, but is compiled again in every
    process: compiled functions in its cells hash differently, so that the disk cache misses. Type checkers see the
    placeholders, which are of the constants' types.
    """
    assert isinstance(function, types.FunctionType)
    name = f"{function.__name__}_{suffix}"
    clone = types.FunctionType(function.__code__, {**function.__globals__, **scope}, name, function.__defaults__)
    clone.__module__ = function.__module__
    clone.__qualname__ = name
    return compile(clone)


def from_plain(function: Callable[..., Any], compile: Callable[..., Any] = kernel) -> Any:
    """Compile a plain function of `bridge.blocks`, and the plain functions it calls."""
    assert isinstance(function, types.FunctionType)
    callees = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    compiled = {name: from_plain(f, compile) for name, f in callees.items() if isinstance(f, types.FunctionType)}
    return specialize(function, "compiled", compile, **compiled)

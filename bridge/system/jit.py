"""Numba, as this project uses it: compiled once per machine, cached, never holding the GIL.

Imported only by modules that hold kernels; `import bridge` and `--help` never come here, since
numba alone takes most of a second to import.

The compile cache lives in a folder named after a digest of our own sources, because numba's cache
does not notice edits in a file that a kernel merely calls into. NUMBA_CACHE_DIR, where set, wins. Caches of other
sources are removed, but for those used last and those that a process holds.
"""

import hashlib
import os
import tempfile
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

import bridge
from bridge.errors import BridgeError
from bridge.system.cache import cache_folder, paths
from bridge.system.folder_locks import lock_shared, remove_if_unlocked
from bridge.system.text import tell

_KEPT_CACHES = 3  # caches of other checkouts or versions that are not removed

if hasattr(os, "register_at_fork"):  # a fork waits for a thread that compiles: no one would finish it in the child
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


def _cache_dir() -> Path:
    """The compile cache of exactly these sources, under the user's cache folder."""
    digest = hashlib.sha256()
    folders = [Path(bridge.__file__).parent, *(Path(folder) / "cuda" for folder in bridge.__path__)]
    for source in sorted({source for folder in folders for source in folder.rglob("*.py")}):
        status = source.stat()
        digest.update(f"{source}:{status.st_mtime_ns}:{status.st_size}\n".encode())
    return cache_folder() / "numba" / digest.hexdigest()[:16]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)  # several processes may come here at once
    return folder


def _prune(keep: Path) -> None:
    """Drop compile caches of sources that have not been used for longest, but none that a process holds."""
    with suppress(OSError):  # another process prunes as well
        others = sorted((p for p in paths("numba") if p != keep), key=lambda p: p.stat().st_mtime)
        for old in others[:-_KEPT_CACHES]:
            remove_if_unlocked(old)


first_run = False  # whether nothing has been compiled on this machine yet, as far as the cache's folder tells
if not os.environ.get("NUMBA_CACHE_DIR"):
    try:
        _dir = _cache_dir()
        first_run = not _dir.exists()
        _, _held = lock_shared(lambda: _made(_dir))  # until the process ends
        with suppress(OSError):  # a cache that came with the machine, read-only
            os.utime(_dir)  # its last use
        if first_run:
            _prune(_dir)
        numba.config.CACHE_DIR = str(_dir)  # type: ignore[attr-defined]
    except (OSError, BridgeError) as problem:  # a read-only home, or none
        tell(f"compile cache: {problem}; every process compiles its kernels again")
        _temporary = tempfile.TemporaryDirectory(prefix="gguf-bridge-")  # numba refuses to have none
        numba.config.CACHE_DIR = _temporary.name  # type: ignore[attr-defined]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for speed: cached on disk, GIL released, division by zero as in IEEE 754."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call: no entry from Python, no cache entry of its own."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
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

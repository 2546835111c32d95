"""Compiled kernels, kept between runs.

    kernels/NAME-DIGEST.o        object code of a C function, behind the digest of its bytes
    kernels/sources-DIGEST.json  digests of sources (`closure`), behind the digest of its bytes
    kernels/MODULE-DIGEST/       what Numba keeps of a module's other kernels

They are in the cache folder (`cache`), or in NUMBA_CACHE_DIR where that is set. DIGEST covers what the
code depends on: the sources that its module imports (`closure`), the versions of what compiles, and the CPU. So an edit
or an update compiles again what it changed.

Code is run, so nobody else may have written it: a folder or file that belongs to another user (but root), or that
others can write, counts as absent. So does a damaged one. Where the folder cannot be written, or its disk is full, each
process compiles for itself; a line says so.
"""

import hashlib
import os
import shutil
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from bridge.errors import BridgeError
from bridge.system.storage.cache import cache_folder, owned, paths
from bridge.system.text import tell

_AGE = 60 * 86400  # seconds without use, after which an entry is removed
_MOST = 1 << 29  # bytes of all entries; those used last are kept
_DAY = 86400


def folder() -> Path:
    """Where kernels are; it need not exist yet. BridgeError where the user has no home folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen) if chosen else cache_folder() / "kernels"


def load(name: str) -> bytes | None:
    """The contents of the file of this name; None where there is none that can be trusted."""
    with suppress(OSError, BridgeError):
        path = folder() / name
        if trusted(path):
            data = path.read_bytes()
            digest, contents = data[:32], data[32:]
            if hashlib.sha256(contents).digest() == digest:
                used(path)
                return contents
    return None


def has(name: str) -> bool:
    """Whether there is a file of this name, in good order or not."""
    with suppress(OSError, BridgeError):
        return trusted(folder() / name)
    return False


def save(name: str, contents: bytes) -> None:
    """Keep a file under a name, whole or not at all."""
    try:
        target = folder() if ready() else None
        if target is not None:
            replace(target / name, _sealed(contents))
    except OSError as problem:
        say_unusable(problem)


def note(name: str, contents: bytes) -> None:
    """`save` of a file that saves little time: where it cannot be kept, no line says so."""
    with suppress(OSError, BridgeError):
        _existing_folder()
        replace(folder() / name, _sealed(contents))


def _sealed(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest() + contents


def replace(path: Path, data: bytes) -> None:
    """Write a file in one step. Raises OSError."""
    making = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.replace(making, path)
    except OSError:
        with suppress(OSError):
            making.unlink()
        raise


@cache  # once a process
def ready() -> bool:
    """Make the folder, and remove old entries; False, and a line says why, where kernels cannot be kept in it."""
    try:
        _prune(_existing_folder())
        return True
    except (OSError, BridgeError) as problem:
        say_unusable(problem)
        return False


def _existing_folder() -> Path:
    """The folder, made if need be. Raises OSError and BridgeError."""
    path = folder()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not owned(os.stat(path)):
        raise BridgeError(f"{path} belongs to another user, or others can write there")
    return path


_say = cache(tell)


def say_unusable(problem: Exception) -> None:
    """Say once that kernels are compiled for this process alone."""
    _say(f"compiled kernels: {problem}; every process compiles its kernels again")


def used(path: Path) -> None:
    """Note that an entry was used, to the day."""
    with suppress(OSError):  # a cache that came with the machine, read-only
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)


def _prune(kernels: Path) -> None:
    """Remove what has not been used for long, and the oldest of what is too much."""
    entries = []
    for path in paths("kernels", kernels) + paths("numba"):
        with suppress(OSError):
            nbytes = sum(file.stat().st_size for file in [path, *path.rglob("*")])
            entries.append((path.stat().st_mtime, nbytes, path))
    total, now = 0, time.time()
    for used_at, nbytes, path in sorted(entries, reverse=True):
        total += nbytes
        if now - used_at > _AGE or total > _MOST:
            with suppress(OSError):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def trusted(entry: Path) -> bool:
    """Whether nobody but this user and root can have made or changed an entry. Raises OSError."""
    return owned(os.stat(entry.parent)) and owned(os.stat(entry))


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits for all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

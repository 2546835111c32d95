"""The cache folder: what is stored between runs, and how it is listed and removed.

    ~/.cache/gguf-bridge/            or $XDG_CACHE_HOME/gguf-bridge
        numba/DIGEST/                compiled kernels (`jit`), unless NUMBA_CACHE_DIR is set
        models/NAME-DIGEST/          GGUFs made from checkpoints for `run` (`bridge.conversion.cache`)

An entry is a file or folder in one of these folders. A process that uses an entry locks its folder
(`bridge.system.folder_locks`), and a locked entry is not removed.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bridge.system.folder_locks import remove_if_unlocked


def cache_folder() -> Path:
    """The folder; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gguf-bridge"


@dataclass(frozen=True)
class Entry:
    """An entry of the cache. `used` is the time of its last use, in seconds since 1970."""

    kind: str  # "models", "numba", ...
    path: Path
    nbytes: int
    used: float


def entries() -> list[Entry]:
    """All entries, largest first."""
    found = [_entry(path) for path in cache_folder().glob("*/*")]
    return sorted(found, key=lambda entry: (-entry.nbytes, entry.path))


def _entry(path: Path) -> Entry:
    nbytes, used = 0, 0.0
    with suppress(OSError):  # removed by another process meanwhile
        used = path.stat().st_mtime
    for file in [path, *path.rglob("*")]:
        with suppress(OSError):
            nbytes += file.stat().st_size if file.is_file() else 0
    return Entry(path.parent.name, path, nbytes, used)


def remove(entry: Entry) -> bool:
    """Remove an entry unless a process is using it; returns whether it is gone."""
    if entry.path.is_dir() and not entry.path.is_symlink():
        remove_if_unlocked(entry.path)
    else:
        with suppress(OSError):
            entry.path.unlink()
    return not os.path.lexists(entry.path)

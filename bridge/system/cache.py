"""The folder of everything that is kept between runs, and what is in it.

    ~/.cache/gguf-bridge/            or $XDG_CACHE_HOME/gguf-bridge
        numba/DIGEST/                compiled kernels (`jit`); NUMBA_CACHE_DIR, where set, is used instead
        models/NAME-DIGEST/          GGUFs made of checkpoints for `run` (`converted_cache`)

An entry is whatever stands in one of these folders. A process that uses an entry holds its folder (see `held`), and an
entry that is held is not removed.
"""

from __future__ import annotations

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
    """Something that is kept. `used` is when it was used last, in seconds since 1970."""

    kind: str  # "models", "numba", ...
    path: Path
    nbytes: int
    used: float


def entries() -> list[Entry]:
    """All that is kept, largest first."""
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
    """Remove an entry that no process holds; returns whether it is gone."""
    if entry.path.is_dir() and not entry.path.is_symlink():
        remove_if_unlocked(entry.path)
    else:
        with suppress(OSError):
            entry.path.unlink()
    return not os.path.lexists(entry.path)

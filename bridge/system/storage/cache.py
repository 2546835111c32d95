"""The cache folder: what is stored between runs, and how it is listed and removed.

    ~/.cache/gguf-bridge/            or $XDG_CACHE_HOME/gguf-bridge
        kernels/NAME-DIGEST[.o]      compiled kernels (`kernel_cache`), in NUMBA_CACHE_DIR where that is set
        kernels/sources-DIGEST.json  digests of sources (`closure`)
        numba/DIGEST/                those of versions before 0.3
        cubins/CAPABILITY-DIGEST/    machine code for GPUs (`cuda/toolchain/compiler.py`); also below NUMBA_CACHE_DIR
        models/NAME-DIGEST/          GGUFs made from checkpoints for `run` (`bridge.conversion.cache`)

An entry is a file or folder in one of these folders. A process that uses an entry locks its folder
(`bridge.system.storage.folder_locks`), and a locked entry is not removed; kernels are read at once, and need no lock.
"""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError
from bridge.system.storage.folder_locks import remove_if_unlocked

# of entries; what else is there is not ours
_NAMES = {
    "kernels": r"[\w.]+-[0-9a-f]{16}(\.(o|json)(\.[0-9]+\.part)?)?",
    "numba": r"[0-9a-f]+",
    "cubins": r"[0-9.]+-[0-9a-f]{12}",
    "models": r".+-[0-9a-f]{12}",
}


def cache_folder() -> Path:
    """The folder; it need not exist yet. BridgeError where the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gguf-bridge"
    except RuntimeError:
        raise BridgeError("there is no home folder for the cache; set HOME or XDG_CACHE_HOME") from None


@dataclass(frozen=True)
class Entry:
    """An entry of the cache. `used` is the time of its last use, in seconds since 1970."""

    kind: str  # a key of _NAMES
    path: Path
    nbytes: int
    used: float


def entries() -> list[Entry]:
    """All entries, largest first."""
    listed = [_entry(kind, path) for kind in _NAMES for path in paths(kind)]
    return sorted(listed, key=lambda entry: (-entry.nbytes, entry.path))


def paths(kind: str, folder: Path | None = None) -> list[Path]:
    """The paths of all entries of a kind, in the cache folder or where they are kept instead."""
    folder = folder or cache_folder() / kind
    return [path for path in folder.glob("*") if re.fullmatch(_NAMES[kind], path.name)]


def owned(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written a file, or can write into a folder of this status."""
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are the user's
        return True
    shared = status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    return status.st_uid in (os.geteuid(), 0) and not shared


def _entry(kind: str, path: Path) -> Entry:
    nbytes, used = 0, 0.0
    with suppress(OSError):  # removed by another process meanwhile
        used = path.stat().st_mtime
    for file in [path, *path.rglob("*")]:
        with suppress(OSError):
            nbytes += file.stat().st_size if file.is_file() else 0
    return Entry(kind, path, nbytes, used)


def remove(entry: Entry) -> bool:
    """Remove an entry unless a process is using it; returns whether it is gone."""
    if entry.path.is_dir() and not entry.path.is_symlink():
        remove_if_unlocked(entry.path)
    else:
        with suppress(OSError):
            entry.path.unlink()
    return not os.path.lexists(entry.path)

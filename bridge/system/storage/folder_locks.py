"""Folders that a process works in, locked against removal by others until it has ended.

A folder is locked as a whole (flock, shared) by each process that uses it; the system releases the lock when the
process ends, kill -9 included. Where the system cannot lock folders (Windows, some network file systems), nobody knows
what is in use, and nothing is removed.
"""

import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_shared(make: Callable[[], Path]) -> tuple[Path, int | None]:
    """The folder that `make` makes or finds, locked until the handle is closed; no handle where none can be locked."""
    while True:
        folder = make()
        if fcntl is None:
            return folder, None
        with suppress(FileNotFoundError):  # removed before it was locked: made again
            handle = os.open(folder, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(folder)):
                    return folder, handle
            os.close(handle)


def remove_if_unlocked(folder: Path) -> None:
    """Remove a folder that no process has locked."""
    if fcntl is None:
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A new folder next to `path` for what will be renamed to it; removed at the end.

    Those of processes that were killed while they wrote to the same path are removed first. Missing folders above
    `path` are made, and stay only if something was written into them. A KeyboardInterrupt without words gets some: that
    nothing is left of what was being written. Raises OSError where no folder can be made there.
    """
    import tempfile

    def make() -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(after, before, path.parent))

    missing = [above for above in path.parents if not above.exists()]
    before, after = f".{path.name}.", ".unfinished"
    for left in path.parent.glob(f"{glob.escape(before)}*{after}"):
        remove_if_unlocked(left)
    folder, handle = lock_shared(make)
    try:
        yield folder
    finally:
        stop = sys.exc_info()[1]  # also where an __exit__ that an interrupt calls closes this
        if isinstance(stop, KeyboardInterrupt) and not stop.args:
            stop.args = ("stopped; nothing half-written was left behind",)
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)
        with suppress(OSError):  # not empty
            for above in missing:
                above.rmdir()

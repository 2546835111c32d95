"""The rule for every file that a command writes.

A file that exists is replaced with `force` alone. An output is never
    a link, a device or a pipe
    a file that the run reads, by any name: hard links and links to it are found
    another output of the run
    below something that is not a folder; folders that are missing are made (`folder_locks.temporary_beside`)
    in the folder of a checkpoint that is read, unless it is a *.gguf that is new or replaces a GGUF
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bridge.errors import BridgeError, parameter
from bridge.system.storage.files import expect_name, files_below

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class ProtectedPaths:
    """Paths that no output may have.

    files    files that the run reads, and its other outputs; they need not exist
    folders  of checkpoints that the run reads
    """

    files: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()

    def with_files(self, files: Iterable[Path | None]) -> Self:
        """The same protected paths and more files; None is left out."""
        return replace(self, files=(*self.files, *(file for file in files if file is not None)))

    def has(self, path: Path) -> bool:
        """Whether a file is one of them, by its place or its inode."""
        places = {_resolved(file) for file in self.files}
        return _resolved(path) in places or (path.exists() and any(_same(file, path) for file in self._all()))

    def folder_of(self, path: Path) -> Path | None:
        """The checkpoint's folder that a file is in, however deep."""
        return next((folder for folder in self.folders if _resolved(path).is_relative_to(folder.resolve())), None)

    def _all(self) -> Iterator[Path]:
        yield from self.files
        for folder in self.folders:
            yield from (file for file in files_below(folder) if file.suffix != ".gguf")


NOTHING = ProtectedPaths()


def check_outputs(paths: Iterable[Path | None], force: bool, protected: ProtectedPaths = NOTHING) -> None:
    """BridgeError unless each of these files can be made (or, with `force`, replaced); None is left out."""
    for path in paths:
        if path is not None:
            _check(path, force, protected)
            protected = protected.with_files([path])


def check_parents(path: Path) -> None:
    """BridgeError unless the folders above an output are folders, or missing: those are made when it is written."""
    above = next(folder for folder in path.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise BridgeError(f"{above}: is not a folder; give another output")


def _check(path: Path, force: bool, protected: ProtectedPaths) -> None:
    expect_name(path)
    if path.is_dir():
        raise BridgeError(f"{path}: is a folder; give the name of the file to write")
    check_parents(path)
    if path.is_symlink():
        raise BridgeError(
            f"{path}: is a link to {os.readlink(path)}; links are neither followed nor replaced; give another name"
        )
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise BridgeError(f"{path}: is a device or a pipe, which is not replaced; give another name")
    folder = protected.folder_of(path)
    if folder is not None and (path.suffix != ".gguf" or (path.exists() and not _is_gguf(path))):
        raise BridgeError(
            f"{path}: is in the checkpoint's folder {folder}, where only *.gguf files are written and only GGUFs "
            "replaced; choose another folder"
        )
    if protected.has(path):
        raise BridgeError(f"{path}: this run reads or writes that file already; give another name")
    if path.exists() and not force:
        raise BridgeError(f"{path}: exists; {parameter('force', True)} replaces it")


def _resolved(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _same(file: Path, path: Path) -> bool:
    try:
        return path.samefile(file)
    except OSError:
        return False


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False

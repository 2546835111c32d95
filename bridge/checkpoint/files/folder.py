"""Writes a checkpoint folder, which never exists half-written under its final name.

Files are written to a temporary folder next to the target (see `folder_locks`), which is synced and renamed at the end.
The callers write the weights; the model's other files are copied here.
"""

import filecmp
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Protocol, Self

from bridge.checkpoint.files.weight_files import NOT_WEIGHTS, OTHER_WEIGHTS, WEIGHTS, belongs
from bridge.errors import BridgeError, parameter
from bridge.system.storage.files import disk_errors, expect_name, expect_regular, files_below, sync_folder
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.storage.outputs import check_parents


class Source(Protocol):
    """What a folder is written from: its folder or file, the folder of its config, and the files that hold weights."""

    @property
    def path(self) -> Path: ...
    @property
    def home(self) -> Path: ...
    @property
    def files(self) -> list[Path]: ...


class CheckpointFolder:
    """The new folder. Use as a context manager: leaving it without `finish` removes everything written.

    ckpt   the source
    path   the folder's final name
    force  whether a checkpoint of that name may be replaced

    folder    the temporary folder
    left_out  files with other weights than those of the checkpoint, which were not copied

    Raises BridgeError for a target that cannot or must not be written.
    """

    def __init__(self, ckpt: Source, path: Path, force: bool) -> None:
        self.path = path
        self.left_out: list[str] = []
        self._ckpt, self._force = ckpt, force
        check_folder(ckpt, path, force)
        self._temporaries = ExitStack()
        with disk_errors(path, "the folder", "folder"):
            self._temporary = self._temporaries.enter_context(temporary_beside(path))
            self.folder = self._temporary / path.name
            self.folder.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporaries.close()

    def finish(self) -> None:
        """Sync and rename into place."""
        check_folder(self._ckpt, self.path, self._force)  # again: quantizing may have taken hours
        for folder, _, _ in os.walk(self.folder):
            sync_folder(Path(folder))
        old = self._temporary.with_suffix(".old")  # other runs do not remove this name
        replaced = self.path.exists()
        if replaced:
            self.guard(lambda: os.rename(self.path, old), "the folder")
        try:
            os.rename(self.folder, self.path)
        except BaseException as problem:
            if replaced and not self.path.exists():
                os.rename(old, self.path)
            if isinstance(problem, OSError):
                raise BridgeError(f"{self.path}: cannot be renamed into place ({problem.strerror})") from problem
            raise
        sync_folder(self.path.parent)
        with suppress(OSError):  # there may be none
            os.rename(old, self._temporary / "old")

    def copy_rest(self, replaced: Collection[Path]) -> None:
        """Copy the model's other files (configs, tokenizer) that are not there yet, but no other weights.

        replaced  files of the source that new ones replace
        """
        for root in dict.fromkeys([self._ckpt.home, *([self._ckpt.path] if self._ckpt.path.is_dir() else [])]):
            for file in files_below(root):
                target = self.folder / file.relative_to(root)
                if file in replaced or target.exists():
                    continue
                if self.foreign(file):
                    self.left_out.append(str(file.relative_to(root)))
                    continue
                self.guard(lambda: self._copy_file(file, target), file.name)  # noqa: B023

    def foreign(self, file: Path) -> bool:
        """Whether a file holds other weights than those read, or their index."""
        return file.name.endswith(".index.json") or (
            file.suffix in (*WEIGHTS, *OTHER_WEIGHTS) and file.name not in NOT_WEIGHTS
        )

    def _copy_file(self, file: Path, target: Path) -> None:
        expect_regular(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        with open(target, "rb+") as copy:
            sync(copy)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a whole file of the new folder."""
        with disk_errors(self.path, name, "folder"), open(self.folder / name, "xb") as out:
            out.write(data)
            sync(out)

    def guard(self, action: Callable[[], object], what: str) -> None:
        """Call `action`, which writes; turn a full disk into a one-line error."""
        with disk_errors(self.path, what, "folder"):
            action()


def check_folder(ckpt: Source, path: Path, force: bool, reads: Iterable[Path] = ()) -> None:
    """BridgeError unless a checkpoint's folder of that name can be made (or, with `force`, replaced).

    reads  further files that the run reads
    """
    expect_name(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise BridgeError(f"{path}: is a {'link' if path.is_symlink() else 'file'}; give the folder to write")
    if path.name in ("", ".."):
        raise BridgeError(f"{path}: is no name that a new folder can take; give another")
    if path.suffix.lower() == ".gguf":
        raise BridgeError(f"{path}: a checkpoint is a folder; give a name without .gguf, or `gguf-bridge convert`")
    check_parents(path)
    target = path.resolve()
    for source in {ckpt.path.resolve(), ckpt.home.resolve()}:
        if target == source or source in target.parents or target in source.parents:
            raise BridgeError(f"{path}: overlaps the source {source}; give another folder to write")
    for file in reads:
        expect_name(file)
        if target in file.resolve().parents:
            raise BridgeError(f"{path}: holds {file.name}, which this run reads; give another folder to write")
    if path.is_dir() and any(path.iterdir()):
        if not force:
            raise BridgeError(f"{path}: exists; {parameter('force', True)} replaces it")
        if not (path / "config.json").exists():
            raise BridgeError(
                f"{path}: is not a checkpoint folder; {parameter('force', True)} only replaces checkpoints. "
                "Choose another output"
            )
        if (stray := _stray(path, ckpt)) is not None:
            raise BridgeError(
                f"{stray}: is not a checkpoint's file; {parameter('force', True)} would remove it with {path}. "
                "Move it, or choose another output"
            )


def _stray(folder: Path, ckpt: Source) -> Path | None:
    """A file that is not a checkpoint's by its name, nor copied from `ckpt` by an earlier run."""
    root = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent
    weights = {file.relative_to(root).with_suffix(".safetensors") for file in ckpt.files}
    for parent, below, names in os.walk(folder):
        links = [name for name in below if (Path(parent) / name).is_symlink()]
        for file in (Path(parent) / name for name in sorted([*names, *links])):
            name = file.relative_to(folder)
            is_checkpoint_file = belongs(name.as_posix()) or name in weights
            if not is_checkpoint_file and not _copied(file, [ckpt.home / name, root / name]):
                return file
    return None


def _copied(file: Path, sources: Iterable[Path]) -> bool:
    """Whether a file has the contents of one of these."""
    if not file.is_file():
        return False
    return any(source.is_file() and filecmp.cmp(file, source, shallow=False) for source in sources)


def sync(file: IO[bytes]) -> None:
    """Write buffered data to disk."""
    file.flush()
    os.fsync(file.fileno())

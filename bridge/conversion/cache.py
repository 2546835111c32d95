"""The cache of GGUFs made from checkpoints, for `run` and `chat`.

    models/NAME-DIGEST/          in the cache folder, locked by the processes that use it
        NAME.gguf                as `convert` makes it without options
        checkpoints.json         where its contents were seen: folder -> {file: [bytes, time of change, inode]},
                                 and what converted it; the GGUF's own bytes and time
        lock                     locked by the process that converts

DIGEST covers the contents of all files that a conversion reads, and the sources and versions that decide what it
writes. Hashing the files takes seconds, so a folder whose files have the sizes, times and inodes noted in
checkpoints.json is assumed to have those contents, as git does. A GGUF that is not as it was made, or that another user
has made, is made anew. A second process that needs the same GGUF waits for the first to finish.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.checkpoint.files.hub import kind_of, model_name, resolve_model
from bridge.checkpoint.files.weight_files import CONFIGS, WEIGHTS, config_folder
from bridge.conversion.converter import convert
from bridge.errors import BridgeError
from bridge.models import architecture
from bridge.models.tokenizer.gguf_tokenizer import check_chat_template
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import closure
from bridge.system.progress import Progress
from bridge.system.storage.cache import cache_folder, owned
from bridge.system.storage.files import files_below, read_json, write_text
from bridge.system.storage.folder_locks import lock_shared, remove_if_unlocked
from bridge.system.storage.kernel_cache import digest
from bridge.system.text import percent, size_text, tell, took_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NOTES, _MADE = "checkpoints.json", "gguf"
_in_use: list[int] = []  # handles of locked folders, until the process ends


@thread_limit()
def converted(
    checkpoint: str | Path,
    config: str | Path | None = None,
    runnable: Collection[str] = (),
    progress: Progress | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
) -> Path:
    """The GGUF of a checkpoint, converted unless it is in the cache, or the one that a Hub repository has instead;
    progress goes to standard error.

    checkpoint, config, progress  as for `convert`
    runnable                      GGUF architectures; others are refused before anything is converted
    messages                      a conversation; a chat template that refuses it is refused before, too

    Raises BridgeError as `convert` does, and if the cache folder cannot be written.
    """
    home = resolve_model(checkpoint, config)
    if kind_of(home, config) == "gguf":
        return home
    arch = architecture(config_folder(home, config))
    if runnable and arch not in runnable:
        raise BridgeError(
            f"{checkpoint}: this program cannot run the architecture {arch}, llama.cpp can; "
            f"`gguf-bridge convert {checkpoint}` makes a GGUF for it"
        )
    files = _files(home, Path(config) if config is not None else None)
    seen = {"by": _converter(), **{name: _status(file) for name, file in files.items()}}
    models = cache_folder() / "models"
    ours = [entry for entry in sorted(models.glob("*")) if _is_own(entry)]
    folder = next((entry for entry in ours if _notes(entry).get(str(home.resolve())) == seen), None)
    name = model_name(str(checkpoint))
    if folder is None:
        digest = _digest(files)
        folder = next(iter(sorted(models.glob(f"*-{digest}"))), models / f"{name}-{digest}")
    _, handle = _hold_entry(folder)
    try:
        with _locked(folder / "lock"):
            path = next(iter(folder.glob("*.gguf")), folder / f"{name}.gguf")
            notes = _notes(folder)
            if not _is_own(path) or notes.get(_MADE) != _status(path)[:2]:
                if messages is not None:
                    check_chat_template(config_folder(home, config), messages)
                damaged = "the cached GGUF has changed since it was made; " if path.exists() else ""
                tell(f"{damaged}converting {checkpoint}; the GGUF is cached, see `gguf-bridge cache`")
                _convert(home, path, config, progress)
            now = {**notes, str(home.resolve()): seen, _MADE: _status(path)[:2]}
            if now != notes:
                write_text(folder / _NOTES, json.dumps(now, indent=1) + "\n")
    except BaseException:
        if handle is not None:
            os.close(handle)
        if not any(folder.glob("*.gguf")):
            remove_if_unlocked(folder)
        raise
    if handle is not None:
        _in_use.append(handle)
    with suppress(OSError):
        os.utime(folder)  # time of last use
    return path


def _convert(home: Path, path: Path, config: str | Path | None, progress: Progress | None) -> None:
    report = convert(home, path, config=config, progress=progress, force=True, mmproj_type="none")
    total = report.total()
    codes_note = f"{percent(total.kept / total.weights, 4)} of its codes kept, " if total else ""
    took = took_text(report.seconds - report.compile_seconds, report.compile_seconds)
    tell(f"{codes_note}{size_text(report.output_bytes)} in {took}")


def _files(home: Path, config: Path | None) -> dict[str, Path]:
    """The files that a conversion reads, by name in the checkpoint; no pipes and devices, which may never end."""
    files = {home.name: home} if home.is_file() else {}
    for root in [home] if config is None else [home, config]:
        for file in files_below(root):
            if file.name.endswith((*WEIGHTS, *CONFIGS)) and file.is_file():
                files[f"{'config/' if root == config else ''}{file.relative_to(root).as_posix()}"] = file
    return files


def _status(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _digest(files: dict[str, Path]) -> str:
    """Twelve hexadecimal digits for all contents."""

    def contents(file: Path) -> bytes:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()

    total = hashlib.sha256(_converter().encode())
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, digest in zip(files, pool.map(contents, files.values()), strict=True):
            total.update(name.encode("utf-8", "surrogateescape") + b"\0" + digest)
    return total.hexdigest()[:12]


@cache
def _converter() -> str:
    """What decides a GGUF's bytes: this program's sources, and the versions of what writes metadata and computes."""
    versions = bridge.__version__, version("gguf"), np.__version__
    return digest(closure.digest(frozenset([convert.__module__])), *versions)


def _is_own(path: Path) -> bool:
    """Whether a file or folder is there, and is this user's or root's."""
    try:
        return not hasattr(os, "geteuid") or path.stat().st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def _notes(folder: Path) -> dict[str, Any]:
    """An entry's checkpoints.json; empty if it cannot be read."""
    try:
        return read_json(folder / _NOTES, optional=True)
    except BridgeError:
        return {}


def _hold_entry(folder: Path) -> tuple[Path, int | None]:
    def made() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_own(folder):
            raise BridgeError(
                f"{folder}: belongs to another user; remove it, or set XDG_CACHE_HOME to a folder of yours"
            )
        if not owned(folder.stat()):  # others could exchange the GGUF
            folder.chmod(0o700)
        return folder

    try:
        return lock_shared(made)
    except OSError as problem:
        raise BridgeError(
            f"{folder}: cannot be created ({problem.strerror}); set XDG_CACHE_HOME to a folder with free space, or "
            "convert to a file with `gguf-bridge convert` and run that"
        ) from problem


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system releases it when the process ends, however that happens."""
    if fcntl is None:  # two processes may convert at once, each to its own file; the last one's remains
        yield
        return
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as problem:
        raise BridgeError(f"{file}: cannot be opened ({problem.strerror}); remove it") from problem
    try:
        with suppress(OSError):  # a file system without locks: as on Windows
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell("waiting for another process that is converting it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

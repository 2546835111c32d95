"""Small files that come with a model, checks of files to be read, and writing that leaves nothing half-done."""

import errno
import glob
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.text import nearest

MAX_SMALL = 100_000_000  # bytes; the safetensors library's limit for a header. Vocabularies have up to 40 MB
HEAD = 256  # bytes of a file that tell what it is
_POINTER = b"version https://git-lfs.github.com/spec/"
TORCH_STARTS = (b"PK\3\4", b"\x80\2")  # a zip archive, a pickle
# llama.cpp's formats until August 2023: the number that they begin with, little-endian
OLD_GGML = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla"}


def expanded(path: str | Path) -> Path:
    """A path with ~ and ~user replaced. Raises BridgeError if there is no such user, and as `expect_name` does."""
    try:
        full = Path(path).expanduser()
    except RuntimeError:
        raise BridgeError(f"{path}: there is no such user's folder; give the path in full") from None
    expect_name(full)
    return full


def expect_name(path: Path) -> None:
    """BridgeError where no file can have this name: it is too long, or holds a NUL character."""
    try:
        os.lstat(path)
    except ValueError as problem:
        raise BridgeError(f"{path}: no file can have this name ({problem}); give another one") from None
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            raise BridgeError(f"{path}: no file can have this name, which is too long; give a shorter one") from None


def expect_regular(file: Path) -> None:
    """BridgeError where a file is a pipe, a device or a folder: the first two may never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise BridgeError(f"{file}: is not a regular file; put the model's own file in its place")


def refuse_pointer(file: Path) -> None:
    """BridgeError where a file is not a regular one, or came in place of the file itself: a Git LFS pointer, which a
    clone without git-lfs has, or an HTML page, which a download that was refused leaves."""
    expect_regular(file)
    head = _head(file)
    if head.startswith(_POINTER) or _is_page(head):
        raise BridgeError(f"{file}: {kind_of_contents(head)}")


def kind_of_contents(head: bytes) -> str | None:
    """What a file is whose first bytes are these, and the way out, for messages; None: nothing that is known here."""
    if head.startswith(_POINTER):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
    if _is_page(head):
        return (
            "is an HTML page, not the file itself; download it again: a gated model needs `hf auth login`, and the "
            "address of a file has /resolve/ where that of its page has /blob/"
        )
    if head[:4] in OLD_GGML:
        return (
            f"is a GGML file ({OLD_GGML[head[:4]]}), llama.cpp's format before GGUF (August 2023), which is no longer "
            "read; look for the model as GGUF, or convert the original checkpoint"
        )
    if head[:4] == b"GGUF":
        return "is a GGUF; give it a name that ends in .gguf"
    if is_safetensors(head):
        return (
            "is a safetensors file; give it a name that ends in .safetensors, and the folder of the checkpoint that "
            "it belongs to"
        )
    if head.startswith(TORCH_STARTS):
        return "is a file of torch or a zip archive, not a GGUF file; give the folder of the checkpoint, or unpack it"
    return None


def is_safetensors(head: bytes) -> bool:
    """Whether a file whose first bytes are these begins like safetensors: with a header's length and the header."""
    return head[8:10] == b'{"' and int.from_bytes(head[:8], "little") <= MAX_SMALL


def _is_page(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html"))


def _head(file: Path) -> bytes:
    with open(file, "rb") as stream:
        return stream.read(HEAD)


def first_bytes(file: Path) -> bytes:
    """The bytes by which `kind_of_contents` knows a file; none where it cannot be read."""
    try:
        return _head(file)
    except OSError:
        return b""


def files_below(folder: Path) -> Iterator[Path]:
    """All files of a folder, without hidden folders (.git, .cache), in order; none where it is a file."""
    for parent, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names))


def shards_of(name: str, suffix: str = r"\..*") -> list[str]:
    """The names of all files of which one is name-00001-of-00003.gguf; none for other files.

    suffix  a pattern of it
    """
    shard = re.fullmatch(rf"(.*)-\d{{5}}-of-(\d{{5}})({suffix})", name)
    return [f"{shard[1]}-{i:05}-of-{shard[2]}{shard[3]}" for i in range(1, int(shard[2]) + 1)] if shard else []


def without_shard(name: str) -> str:
    """The name that all of several files share, with or without a suffix."""
    return re.sub(r"-\d{5}-of-\d{5}(?=\.|$)", "", name)


def missing(path: Path) -> BridgeError:
    """No such file; where it is a GGUF that was split, the first shard is named."""
    first = min(path.parent.glob(f"{glob.escape(path.stem)}-00001-of-*.gguf"), default=None)
    return BridgeError(f"{path}: no such file" + (f"; it was split: give {first}" if first else near_names(path)))


def near_names(path: Path) -> str:
    """What follows the error of a path that does not exist: the most similar names in its folder, if there are any."""
    try:
        beside = {file.stem: file.name for file in path.parent.iterdir() if not file.name.startswith(".")}
    except (OSError, ValueError):
        return ""
    names = nearest(path.name, beside.values(), 2) or [beside[stem] for stem in nearest(path.name, beside, 2)]
    return f"; did you mean {' or '.join(str(path.with_name(name)) for name in names)}?" if names else ""


def read_small(file: Path) -> bytes:
    """The bytes of a file that comes with the weights.

    Raises FileNotFoundError, and BridgeError where it cannot be read, is not a regular file or exceeds MAX_SMALL.
    """
    try:
        refuse_pointer(file)
        with open(file, "rb") as stream:
            data = stream.read(MAX_SMALL + 1)  # files that the system generates (/proc) report no size
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise BridgeError(f"{file}: cannot be read ({problem.strerror})") from problem
    if len(data) > MAX_SMALL:
        raise BridgeError(
            f"{file}: has more than {MAX_SMALL // 10**6} MB, which is too large for it; download it again"
        )
    return data


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object, with or without a byte order mark.

    optional  {} where there is no such file

    Raises BridgeError if the file is missing, cannot be read or is something else.
    """
    try:
        content = _json_of(file)
    except FileNotFoundError:
        if optional:
            return {}
        raise BridgeError(f"{file}: not found; is this the folder of a whole checkpoint?") from None
    if not isinstance(content, dict):
        raise BridgeError(f"{file}: not a JSON object but a {type(content).__name__}; download it again")
    return content


def read_json_objects(file: Path) -> list[dict[str, Any]]:
    """A JSON list of objects, [] where there is no such file; raises BridgeError if it is something else."""
    try:
        content = _json_of(file)
    except FileNotFoundError:
        return []
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise BridgeError(f"{file}: not a JSON list of objects; download it again")
    return content


def _json_of(file: Path) -> Any:
    try:
        return json.loads(read_small(file).decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise BridgeError(f"{file}: not JSON ({problem}); download it again") from None


@contextmanager
def disk_errors(path: Path, what: str, instead: str) -> Iterator[None]:
    """Turn an OSError into one line: `what` could not be written, give another `instead`."""
    try:
        yield
    except OSError as problem:
        free = ""
        with suppress(OSError):
            free = f"; {shutil.disk_usage(path.parent).free / 1e9:.2f} GB free there"
        reason = problem.strerror or "the disk took only a part of it"  # numpy's tofile gives no reason
        raise BridgeError(
            f"{path}: writing {what} failed ({reason}{free}); make room or give another {instead}. "
            "Nothing half-written was left behind"
        ) from problem


def read_text(path: Path) -> str:
    """A file's text; BridgeError where it cannot be read."""
    expect_name(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        near = near_names(path) if isinstance(problem, FileNotFoundError) else ""
        raise BridgeError(f"{path}: {getattr(problem, 'strerror', None) or 'not UTF-8'}{near}") from problem


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all; BridgeError where that fails."""
    try:
        with temporary_beside(path) as folder:
            with open(folder / path.name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(folder / path.name, path)
    except OSError as problem:
        raise BridgeError(
            f"{path}: cannot be written ({problem.strerror}); make room or give another name"
        ) from problem


def put_in_place(finished: Path, target: Path) -> None:
    """Rename a finished file over `target`. Raises BridgeError where the system does not allow that, as Windows while a
    program has `target` open or mapped."""
    try:
        os.replace(finished, target)
    except PermissionError as problem:
        raise BridgeError(
            f"{target}: cannot be replaced ({problem.strerror}); close what has it open, or give another name"
        ) from problem


def sync_folder(folder: Path) -> None:
    """Make renames last through a crash, where the system lets folders be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""What a module's compiled functions depend on: the sources of all that it imports, directly or not.

Found in the text, so that nothing is imported and no source is parsed: some eighty files are read in ten milliseconds.
A digest is kept with the kernels, under the times and sizes of all files and folders that were looked at.

Import statements anywhere count, those in functions too, and the modules whose names begin as the text that
`import_module` is given. A package's __init__ counts where a name is imported out of it, not for its modules' sake. A
file that only looks as if it were imported (in a docstring, for type checkers) counts as well: a kernel is then
compiled once more than it must be.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import bridge
from bridge.system.storage import kernel_cache

# they say, store and load what was compiled; how it is compiled, jit.py and compiler.py decide
TOOLS = frozenset(
    "bridge." + name
    for name in (
        "errors", "system.cpu.cpus", "system.cpu.fork_locks", "system.cpu.numa", "system.cpu.row_threads",
        "system.kernels.closure",
        "system.kernels.compile_ahead", "system.kernels.compiling", "system.kernels.elf", "system.kernels.object_code",
        "system.kernels.worker", "system.options", "system.progress", "system.status_line", "system.storage.cache",
        "system.storage.files",
        "system.storage.folder_locks", "system.storage.kernel_cache", "system.text",
    )
)  # fmt: skip
_IMPORTS = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.MULTILINE
)
_BY_NAME = re.compile(r"import_module\(\s*f?[\"']([\w.]*)")
_SETTLED = 2_000_000_000  # nanoseconds: a file that changed less than that ago may change again in the same instant
_looked_at: dict[str, list[int]] = {}  # what decides a digest: files and folders, with their `_stamp`


@cache
def sources(modules: frozenset[str]) -> dict[str, Path]:
    """The files of modules and of those of this project that they import, by their names."""
    files: dict[str, Path] = {}
    wanted = list(modules)
    while wanted:
        name = wanted.pop()
        path = None if name in files else _file(name)
        if path is not None:
            files[name] = path
            wanted += _imports(path)
    return dict(sorted(files.items()))


@cache
def digest(modules: frozenset[str]) -> str:
    """A digest of the contents of `sources`."""
    key, digests = " ".join(sorted(modules)), _stored_digests()
    if key not in digests:
        total = hashlib.sha256()
        for name, path in sources(modules).items():
            total.update(f"{name}\n".encode() + _digest(path))
        digests[key] = total.hexdigest()
        _store_digests(digests)
    return digests[key]


@cache
def _stored_digests() -> dict[str, str]:
    """The digests that earlier processes kept, if nothing that they looked at has changed."""
    with suppress(ValueError, TypeError, OSError):
        stamps, digests = json.loads(kernel_cache.load(_file_name()) or b"")
        if all(_stamp(path) == stamp for path, stamp in stamps.items()):
            _looked_at.update(stamps)
            return dict(digests)
    return {}


def _store_digests(digests: dict[str, str]) -> None:
    """Keep digests, unless a file was changed just now."""
    changed = (moment for *moments, _ in _looked_at.values() for moment in moments)
    if max(changed, default=0) < time.time_ns() - _SETTLED:
        kernel_cache.note(_file_name(), json.dumps([_looked_at, digests]).encode())


def _file_name() -> str:
    return f"sources-{kernel_cache.digest(bridge.__path__)}.json"


def _stamp(path: str | Path) -> list[int]:
    """When a file or folder was changed, in nanoseconds, and its size."""
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]


@cache
def _digest(path: Path) -> bytes:
    return hashlib.sha256(_contents(path)).digest()


@cache
def _contents(path: Path) -> bytes:
    _looked_at[str(path)] = _stamp(path)
    return path.read_bytes()


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The modules that a file may import, of this project or not."""
    text = _contents(path).decode()
    imports = {name for prefix in _BY_NAME.findall(text) for name in _modules(prefix)}
    for package, names, modules in _IMPORTS.findall(text):
        if package:
            names = re.sub(r"#[^\n]*", "", names)
            if "*" in names:
                imports.add(package)
            for name in re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", names):
                submodule = f"{package}.{name}"
                imports.add(submodule if _file(submodule) is not None else package)
        else:
            imports.update(re.findall(r"([\w.]+)(?:[ \t]+as[ \t]+\w+)?", modules.partition("#")[0]))
    return tuple(sorted(imports))


def _modules(prefix: str) -> Iterator[str]:
    """The modules of this project whose names begin so, those in subfolders too."""
    package, _, begin = prefix.rpartition(".")
    for folder in _folders(package):
        for name in _names(folder):
            if name.startswith(begin) and name.endswith(".py"):
                yield f"{package}.{name.removesuffix('.py')}"
            elif name.startswith(begin) and "__init__.py" in _names(folder / name):
                yield from _modules(f"{package}.{name}.")


@cache
def _file(name: str) -> Path | None:
    """The file of a module of this project; None for others, and for `bridge` itself, which only lists names."""
    package, _, last = name.rpartition(".")
    if name in TOOLS or not package:
        return None
    for folder in _folders(package):
        names = _names(folder)
        if f"{last}.py" in names:
            return folder / f"{last}.py"
        if last in names and "__init__.py" in _names(folder / last):
            return folder / last / "__init__.py"
    return None


@cache
def _names(folder: Path) -> frozenset[str]:
    """What is in a folder; nothing where it is none."""
    with suppress(OSError):
        _looked_at[str(folder)] = _stamp(folder)
        return frozenset(os.listdir(folder))
    return frozenset()


@cache
def _folders(package: str) -> tuple[Path, ...]:
    """Where a package's modules are: of `bridge`, or of one that has been imported from beside it."""
    top, *rest = package.split(".")
    if top == "bridge":
        return tuple(Path(folder, *rest) for folder in bridge.__path__)
    beside = getattr(sys.modules.get(top), "__path__", []) if top in ("scripts", "tests") else []
    return tuple(Path(folder, *rest) for folder in beside)

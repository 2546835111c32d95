"""Proofs that are kept from one run to the next: a pytest plugin.

A test with the mark `proof` does nothing but compile, execute and compare: whether it passes depends on sources, on
installed packages and on the CPU alone. With BRIDGE_TEST_CACHE=folder, its passing is noted there with a digest of all
these; a later run in which the digest is the same skips the test, and says so. Without the variable, all tests run.

The digest is of
    the test's name
    the files that its module, its fixtures and the conftest.py above it may import, and those that the mark names
    Python, the installed packages, the CPU and the variables of the environment that change what is compiled

mark: `proof("docs/formats.md", "tests/data/*.json")` names what a test reads or runs besides, from the project's root.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import pytest

from tests.support.closure import ROOT, closure

FOLDER = "BRIDGE_TEST_CACHE"
_PLACES = (FOLDER, "BRIDGE_SHARED", "NUMBA_CACHE_DIR")  # variables that change nothing
_KEPT = 8  # digests of a test: other branches' and machines'
_SAME = "proved before with the same sources"
_digest = pytest.StashKey[str]()
_passed = pytest.StashKey[bool]()


@cache
def _imported(file: Path) -> frozenset[Path]:
    """What a file of ours may import, with the file itself."""
    return closure(".".join(file.relative_to(ROOT).with_suffix("").parts))


@cache
def _content(file: Path, nbytes: int, changed: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def _software() -> str:
    """What is installed, and the machine it runs on."""
    packages = sorted({path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")})
    cpu = platform.machine(), llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    return repr((sys.version, sys.platform, cpu, packages))


def _settings() -> str:
    """Variables of the environment that may change what is compiled."""
    names = (name for name in os.environ if name.startswith(("BRIDGE_", "CUDA_", "NUMBA_")) and name not in _PLACES)
    return repr([(name, os.environ[name]) for name in sorted(names)])


def _name(item: pytest.Item) -> str:
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"  # item.nodeid has the group for pytest-xdist in it


def _read_by(item: pytest.Function, mark: pytest.Mark) -> set[Path]:
    """The files that a test's outcome depends on, with those that the mark names."""
    fixtures = [f for found in item._fixtureinfo.name2fixturedefs.values() for f in found]
    sources = {item.path, *(Path(f.func.__code__.co_filename) for f in fixtures)}
    named = {path for pattern in mark.args for path in ROOT.glob(pattern)}
    assert named or not mark.args, f"{item.nodeid}: {mark.args} are no files of the project"
    programs = [path for path in sources | named if path.suffix == ".py" and path.is_relative_to(ROOT)]
    conftests = {path for folder in item.path.parents if (path := folder / "conftest.py").is_file()}
    return named.union(conftests, *map(_imported, programs))


def digest_of(item: pytest.Function, mark: pytest.Mark) -> str:
    """Of a test and all that its outcome depends on, as it is now."""
    digest = hashlib.sha256("\n".join((_name(item), _software(), _settings())).encode())
    for path in sorted(_read_by(item, mark)):
        stat = path.stat()
        content = _content(path, stat.st_size, stat.st_mtime_ns)
        digest.update(f"\n{os.path.relpath(path, ROOT)} {content}".encode())
    return digest.hexdigest()


def _entry(item: pytest.Item) -> Path:
    """The file with a test's digests, one a line."""
    return Path(os.environ[FOLDER]) / f"{hashlib.sha256(_name(item).encode()).hexdigest()[:32]}.txt"


def _digests(entry: Path) -> list[str]:
    try:
        return entry.read_text("ascii").splitlines()
    except (OSError, ValueError):  # none, or damaged
        return []


def _note(entry: Path, digest: str) -> None:
    """Add a digest; one that another process adds at the same time may be lost."""
    lines = [line for line in _digests(entry) if line != digest]
    entry.parent.mkdir(parents=True, exist_ok=True)
    made = entry.with_suffix(f".{os.getpid()}")
    made.write_text("\n".join([*lines[1 - _KEPT :], digest, ""]), "ascii")
    made.replace(entry)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "proof(*files): its outcome depends on sources alone; see tests/support/proofs.py"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Digests are taken now, of what has just been imported."""
    if not os.environ.get(FOLDER):
        return
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("proof")) is not None:
            item.stash[_digest] = digest_of(item, mark)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    digest = item.stash.get(_digest, None)
    if digest is not None and digest in _digests(_entry(item)):
        pytest.skip(f"{_SAME}: {digest[:16]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Notes a test that has passed, if what it depends on is still the same."""
    report = yield
    mark = item.get_closest_marker("proof")
    if _digest in item.stash and isinstance(item, pytest.Function) and mark is not None:
        if report.when == "call":
            item.stash[_passed] = report.passed and not hasattr(report, "wasxfail")
        elif report.when == "teardown" and report.passed and item.stash.get(_passed, False):
            with suppress(OSError):  # a read-only folder, or a full disk: proved again next time
                if digest_of(item, mark) == item.stash[_digest]:
                    _note(_entry(item), item.stash[_digest])
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if known := sum(_SAME in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{known} of the skipped tests were {_SAME}, as {os.environ[FOLDER]} says")

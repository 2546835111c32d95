"""What compiled kernels are kept under, and that a damaged, full or foreign cache harms nothing."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.system.kernels import closure
from bridge.system.kernels.jit import CFunction, c_function, inner, kernel
from bridge.system.kernels.memory import array_at, stack
from bridge.system.storage import cache, kernel_cache
from tests.conftest import PATIENCE, ROOT, posix
from tests.support.kernel_modules import COMPILES, GUARD

# what a kernel depends on


def imported_by(path: Path) -> set[str]:
    """The modules of this project that a file's import statements name, read by Python's own parser."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                found.add(own if closure._file(own) is not None else str(node.module))
    return {name for name in found if closure._file(name) is not None}


@pytest.mark.parametrize("module", COMPILES)
def test_the_sources_of_a_kernel_are_those_that_its_modules_import(module: str) -> None:
    sources = closure.sources(frozenset([module]))
    assert module in sources
    for path in sources.values():
        assert imported_by(path) <= set(sources)
        for prefix in closure._BY_NAME.findall(path.read_text()):
            assert set(closure._modules(prefix)) <= set(sources), "a module that is imported by name"


def test_what_is_imported_while_a_kernel_is_compiled_is_among_its_sources(tmp_path: Path) -> None:
    """In a fresh process for each module, where packages import nothing of their own accord."""
    sources = {module: sorted(closure.sources(frozenset([module]))) for module in COMPILES}
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", GUARD, repr(sources), repr(list(bridge.__path__)), repr(sorted(closure.TOOLS))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reports: dict[str, list[str]] = dict(ast.literal_eval(line) for line in done.stdout.splitlines())
    assert {module: sorted(names) for module, names in reports.items()} == {module: [] for module in COMPILES}


def copied(folder: Path) -> Path:
    """A copy of the sources."""
    for package in ("bridge", "cuda"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


STEPS = """
from bridge.runtime.cpu.forms import rowmajor; from bridge.runtime.cpu.ops import decoder_ops
from bridge.system.kernels import compiling, half
import numpy as np
decoder_ops.function("scale").address
half.half_bits(np.ones(3, np.float32))
print(compiling.steps())
"""


def steps_of(tree: Path, home: Path, code: str = STEPS, **variables: str) -> int:
    """How many kernels a process compiles with these sources and this cache."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | variables
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_change_compiles_what_depends_on_it_and_nothing_else(tmp_path: Path) -> None:
    home, tree = tmp_path / "home", copied(tmp_path / "tree")
    first = steps_of(ROOT, home)
    assert first > 1
    assert steps_of(tree, home) == 0  # a copy shares them
    for text in ("bridge/cli/use/run.py", "bridge/errors.py", "bridge/runtime/model.py", "bridge/__init__.py"):
        (tree / text).write_text((tree / text).read_text() + "\n# another help text\n")
    assert steps_of(tree, home) == 0
    changed = tree / "bridge" / "system" / "kernels" / "half.py"
    changed.write_text(changed.read_text() + "\n")
    assert 0 < steps_of(tree, home) < first
    assert steps_of(tree, home) == 0
    changed = tree / "bridge" / "system" / "kernels" / "jit.py"
    changed.write_text(changed.read_text() + "\n")
    assert steps_of(tree, home) == first
    assert steps_of(ROOT, home) == 0  # what others need is kept


DIGEST = """
from bridge.system.kernels import closure
closure._SETTLED = 0
closure.digest(frozenset(["bridge.system.kernels.half"]))
print(closure.digest(frozenset(["bridge.system.kernels.half"])), closure.sources.cache_info().misses)
"""


def digest_of(tree: Path, home: Path) -> tuple[str, bool]:
    """The digest of half.py's sources, and whether they were read for it."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(tree)}
    digest, read = subprocess.check_output([sys.executable, "-c", DIGEST], cwd=home, env=environment, text=True).split()
    return digest, read != "0"


def test_sources_are_read_again_when_one_of_them_or_a_folder_has_changed(tmp_path: Path) -> None:
    home, tree = tmp_path, copied(tmp_path / "tree")
    subprocess.run([sys.executable, "-m", "compileall", "-q", tree], check=True)  # imports change folders otherwise
    first, read = digest_of(tree, home)
    assert read
    assert digest_of(tree, home) == (first, False)
    changed = tree / "bridge" / "system" / "kernels" / "half.py"
    before = changed.stat()
    changed.write_bytes(changed.read_bytes().replace(b"half", b"HALF", 1))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a package's installer may set it
    second, read = digest_of(tree, home)
    assert read
    assert second != first
    (tree / "bridge" / "system" / "new.py").write_text("")
    assert digest_of(tree, home) == (second, True)
    assert digest_of(tree, home) == (second, False)
    (kept,) = (home / "gguf-bridge" / "kernels").glob("sources-*.json")
    kept.write_bytes(kept.read_bytes().replace(second[:8].encode(), b"00000000"))
    assert digest_of(tree, home) == (second, True)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A cache with kernels of both kinds, and how many had to be compiled for it."""
    home = tmp_path_factory.mktemp("filled")
    return home, steps_of(ROOT, home)


def test_another_cpu_has_kernels_of_its_own(filled: tuple[Path, int], tmp_path: Path) -> None:
    home = shutil.copytree(filled[0], tmp_path / "home")
    assert steps_of(ROOT, home, NUMBA_CPU_NAME="x86-64" if "x86" in os.uname().machine else "generic") > 0
    assert steps_of(ROOT, home) == 0


def test_a_chosen_cache_is_used(tmp_path: Path) -> None:
    chosen = str(tmp_path / "chosen")
    assert steps_of(ROOT, tmp_path / "home", NUMBA_CACHE_DIR=chosen) > 0
    assert steps_of(ROOT, tmp_path / "home", NUMBA_CACHE_DIR=chosen) == 0
    assert not (tmp_path / "home").exists()


# a damaged, full or foreign cache


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels for this test alone."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for remembers in (kernel_cache.ready, kernel_cache._say):
        remembers.cache_clear()
    yield tmp_path / "gguf-bridge" / "kernels"
    for remembers in (kernel_cache.ready, kernel_cache._say):
        remembers.cache_clear()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(b"garbage\n"),
    "one byte": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:]),
}


@pytest.mark.parametrize(
    ("what", "damage"),
    [("*.o", damage) for damage in DAMAGES]
    + [("*/*.nbi", "empty"), ("*/*.nbi", "garbage"), ("*/*.nbc", "half"), ("*/*.nbc", "garbage")],
)
def test_a_damaged_entry_is_compiled_again(what: str, damage: str, filled: tuple[Path, int], tmp_path: Path) -> None:
    home, first = tmp_path / "home", filled[1]
    shutil.copytree(filled[0], home)
    files = list((home / "gguf-bridge" / "kernels").glob(what))
    assert files
    for file in files:
        DAMAGES[damage](file)
    assert 0 < steps_of(ROOT, home) < first
    assert steps_of(ROOT, home) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_costs_the_cache_and_nothing_else(
    number: int, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kernel_cache, "replace", full)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    twice = kernel(_twice)
    assert twice(3) == 6
    kernel_cache.save("bridge.x-0123456789abcdef.o", b"code")
    kernel_cache.save("bridge.y-0123456789abcdef.o", b"code")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert os.strerror(number) in said[0]
    assert said[0].endswith("every process compiles its kernels again")


def _twice(x):
    return 2 * x


@posix
def test_what_others_may_have_written_is_not_run(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bridge.x-0123456789abcdef.o"
    kernel_cache.save(name, b"code")
    assert kernel_cache.load(name) == b"code"
    file = own / name
    for path, mode in ((own, 0o777), (own, 0o770), (file, 0o666)):
        kept = path.stat().st_mode
        path.chmod(mode)
        assert kernel_cache.load(name) is None
        path.chmod(kept)
    own.chmod(0o1777)  # as /tmp: others can add files, but change none
    assert kernel_cache.load(name) == b"code"
    own.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert (kernel_cache.load(name) is None) == (os.getuid() != 0)  # root's are everybody's


@posix
def test_a_folder_that_others_can_write_is_neither_read_nor_written(tmp_path: Path) -> None:
    first = steps_of(ROOT, tmp_path)
    kernels = tmp_path / "gguf-bridge" / "kernels"
    kernels.chmod(0o777)
    before = sorted(kernels.rglob("*"))
    assert steps_of(ROOT, tmp_path) == first
    assert sorted(kernels.rglob("*")) == before


def test_old_entries_are_removed_by_age_and_size(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.mkdir(parents=True)
    now = time.time()
    for days, name in ((100, "old"), (10, "large"), (5, "kept"), (0, "new")):
        entry = own / f"bridge.{name}-0123456789abcdef.o"
        entry.write_bytes(bytes(60))
        os.utime(entry, (now - 86400 * days,) * 2)
    (own / "mine.txt").write_text("mine")
    before = own.parent / "numba" / "0123456789abcdef"  # of an earlier version
    before.mkdir(parents=True)
    os.utime(before, (1e9, 1e9))
    monkeypatch.setattr(kernel_cache, "_MOST", 150)
    kernel_cache.save("bridge.now-0123456789abcdef.o", b"")
    assert {path.name.partition("-")[0] for path in own.iterdir()} == {
        "bridge.kept", "bridge.new", "bridge.now", "mine.txt"
    }  # fmt: skip
    assert not before.exists()


# C functions


def _sum(values, count, out, _0, _1, _2, _3, first, last):
    """out[i] = the sum of the first i values, by way of the stack."""
    held = array_at(_space(), 8, np.float64)
    for i in range(first, last):
        held[0] = 0
        for v in array_at(values, count, np.float64)[:i]:
            held[0] += v
        array_at(out, last, np.float64)[i] = held[0]


_space: Any = None


def test_a_c_function_computes_what_its_python_does() -> None:
    function = c_function(_sum, "test", _space=stack(64))
    assert isinstance(function, CFunction)
    values, out = np.arange(5.0), np.zeros(6)
    function.ctypes(values.ctypes.data, 5, out.ctypes.data, 0, 0, 0, 0, 0, 6)
    assert out.tolist() == [0, 0, 1, 3, 6, 10]


def _allocates(x, _0, _1, _2, _3, _4, _5, first, last):
    made = np.zeros(last)
    made[0] = x
    array_at(x, 1, np.float64)[0] = made.sum()


def test_a_c_function_that_needs_numba_at_run_time_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"its code needs NRT_MemInfo_alloc.*; it must not allocate or raise"):
        _ = c_function(_allocates).address


def test_kernels_that_a_kernel_is_given_count_with_their_modules() -> None:
    given = inner(_twice)
    given.modules = frozenset(["bridge.encode.carrying.carry_fit"])
    function = c_function(_sum, "given", _space=given)
    assert function.modules == {__name__, "bridge.encode.carrying.carry_fit"}


def test_kernels_are_entries_that_can_be_removed(own: Path) -> None:
    kernel_cache.save("bridge.x-0123456789abcdef.o", b"code")
    (entry,) = cache.entries()
    assert (entry.kind, entry.nbytes) == ("kernels", 32 + 4)
    assert cache.remove(entry)
    assert cache.entries() == []

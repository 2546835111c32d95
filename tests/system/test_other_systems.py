"""What other systems lack: the modules, signals and functions that POSIX or Linux alone has."""

from __future__ import annotations

import ast
import builtins
import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import bridge
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.system.cpu import memory
from bridge.system.storage import files, folder_locks
from tests.conftest import CHECKPOINT, ROOT, posix

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('fcntl', 'pty', 'termios', 'resource', 'readline')))\n"


def python(code: str, *arguments: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_converts_without_posix_modules(tmp_path: Path) -> None:
    code = WITHOUT + "from bridge.cli import main; sys.exit(main(['convert', *sys.argv[1:]]))"
    python(code, CHECKPOINT, tmp_path / "m.gguf")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.exhaustive
def test_the_tests_of_the_command_line_are_collected_without_posix_modules() -> None:
    code = (
        WITHOUT
        + "import pytest; sys.exit(pytest.main(['tests/cli', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    assert "tests/cli/test_process.py" in python(code)


def test_tests_with_terminals_can_be_imported_without_posix_modules() -> None:
    code = WITHOUT + "import signal; del signal.SIGHUP\nimport tests.cli.test_chat as c, tests.cli.test_process\n"
    code += "print(c.needs_terminal.args)"
    assert python(code) == "(True,)\n"


def test_pages_stay_where_the_system_takes_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_DONTNEED", raising=False)
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    tensor = bridge.open_gguf(tmp_path / "m.gguf")["blk.0.ffn_up.weight"]
    assert isinstance(tensor, QuantTensor)
    before = tensor.raw.copy()
    tensor.release_raw()
    np.testing.assert_array_equal(tensor.raw, before)


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_locks, "fcntl", None)
    left = tmp_path / ".out.1.unfinished"
    left.mkdir()
    with folder_locks.temporary_beside(tmp_path / "out") as folder:
        assert folder.is_dir()
    assert [f.name for f in tmp_path.iterdir()] == [left.name]


def test_a_file_that_is_open_elsewhere_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    bridge.convert(CHECKPOINT, path)
    before, replace = path.read_bytes(), os.replace

    def denied(made: Path, target: Path) -> None:
        if target == path:
            raise PermissionError(13, "Access is denied")
        replace(made, target)

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(BridgeError, match=r"m\.gguf: cannot be replaced \(Access is denied\); close what has it open"):
        bridge.convert(CHECKPOINT, path, type="Q8_0", force=True)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def test_folders_that_cannot_be_opened_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    files.sync_folder(tmp_path)


def test_memory_is_not_known_where_no_file_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "read_text", missing)
    assert memory.free_memory() is None
    assert memory.resident() > 0


@pytest.mark.parametrize("problem", [TypeError, OSError, AttributeError])
def test_a_c_library_without_thresholds_is_left_alone(
    problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def library(name: object) -> None:
        asked.append(name)
        raise problem

    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.setattr(ctypes, "CDLL", library)
    memory.tune_malloc()
    assert asked == [None]


def test_large_arrays_are_numpys_where_pages_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MADV_NOHUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS"):
        monkeypatch.delattr(mmap, name, raising=False)
    zeros = memory.zeros_filled_later((2, 3 << 20), np.uint8)
    assert zeros.shape == (2, 3 << 20)
    assert zeros.flags.writeable
    assert not zeros[:, ::4096].any()


# names and paths that POSIX or Linux alone has, and what says that a test needs them
LACKING = {"fork", "mkfifo", "SIGKILL", "SIGHUP", "SIGBUS", "getrusage", "setrlimit", "openpty", "flock"}
PATHS = ("/dev/zero", "/proc/self")
GUARDS = re.compile(r"posix|linux|skipif|needs_terminal|importorskip|sys\.platform|hasattr|resource\.")


def test_tests_say_what_other_systems_lack() -> None:
    unguarded = []
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if file == Path(__file__) or re.search("^(pytestmark|pytest.importorskip)", text, re.M):
            continue
        for part in ast.parse(text).body:
            if not isinstance(part, ast.FunctionDef) or not part.name.startswith("test_"):
                continue
            used = {node.attr for node in ast.walk(part) if isinstance(node, ast.Attribute)} & LACKING
            used |= {path for path in PATHS if path in ast.unparse(part)}
            if used and not GUARDS.search(ast.unparse(part)):
                unguarded.append((file.name, part.name, used))
    assert not unguarded


def test_a_folder_is_no_file_where_opening_one_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", denied)
    with pytest.raises(BridgeError, match="is a folder, not a GGUF file"):
        bridge.open_gguf(tmp_path)


def test_every_system_and_python_runs_make_test() -> None:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["test"]
    systems = {"ubuntu-latest", "ubuntu-24.04-arm", "macos-14", "windows-latest"}
    assert set(job["strategy"]["matrix"]["os"]) == systems
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command.startswith("make test PYTHON=python EXTRAS=")


WINDOWS = """
import ctypes, sys
import numba, numpy as np
libc = ctypes.CDLL(None)
calls = []
class Windows:
    malloc, free = libc.malloc, libc.free
    AcquireSRWLockExclusive = libc.pthread_mutex_lock
    ReleaseSRWLockExclusive = libc.pthread_mutex_unlock
    SleepConditionVariableSRW = libc.pthread_cond_wait
    WakeAllConditionVariable = libc.pthread_cond_broadcast
    SwitchToThread = libc.sched_yield
def library(name):
    calls.append(name)
    return Windows
import bridge.system.kernels.jit
ctypes.WinDLL, sys.platform = library, "win32"
import bridge.system.threads.waiting
sys.platform = "linux"
from bridge.runtime import QuantTensor
from bridge.system.threads import pool
import time
matrix = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
tensor = QuantTensor("w", "F32", matrix.shape, matrix.view(np.uint8).reshape(-1))
x = matrix[0]
alone = (pool.set_num_threads(1), tensor.matvec(x))[1]
pool.set_num_threads(3)
for pause in (0, 0.01, 0.01):
    time.sleep(pause)  # workers fall asleep
    assert (tensor.matvec(x) == alone).all()
assert pool.get_pool().state
print(sorted(set(calls)))
"""


@posix
@pytest.mark.skipif(
    sys.platform != "linux", reason="pthreads stand in for Windows' functions, in x86's and Arm's calls"
)
def test_threads_wait_with_windows_functions(tmp_path: Path) -> None:
    """Functions of pthreads and libc in the places of Windows': their first arguments mean the same."""
    assert python(WINDOWS, NUMBA_CACHE_DIR=str(tmp_path)) == "['kernel32', 'msvcrt']\n"

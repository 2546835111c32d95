"""What other systems lack: the modules, signals and functions that POSIX or Linux alone has."""

from __future__ import annotations

import builtins
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import bridge
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.system import folder_locks
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
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test PYTHON=python"]


WINDOWS = """
import ctypes, sys
import numba, numpy as np
libc = ctypes.CDLL(None)
calls = []
class Kernel32:
    AcquireSRWLockExclusive = libc.pthread_mutex_lock
    ReleaseSRWLockExclusive = libc.pthread_mutex_unlock
    SleepConditionVariableSRW = libc.pthread_cond_wait
    WakeAllConditionVariable = libc.pthread_cond_broadcast
    SwitchToThread = libc.sched_yield
def library(name):
    calls.append(name)
    return Kernel32
import bridge.system.jit
ctypes.WinDLL, sys.platform = library, "win32"
import bridge.system.waiting
sys.platform = "linux"
from bridge.runtime import QuantTensor
from bridge.system import pool
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
print(set(calls))
"""


@posix
@pytest.mark.skipif(
    sys.platform != "linux", reason="pthreads stand in for Windows' functions, in x86's and Arm's calls"
)
def test_threads_wait_with_windows_functions(tmp_path: Path) -> None:
    """Functions of pthreads in the places of kernel32's: their first arguments mean the same."""
    assert python(WINDOWS, NUMBA_CACHE_DIR=str(tmp_path)) == "{'kernel32'}\n"

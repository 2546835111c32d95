"""A model in a process that forks, and a file that another program shortens: each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.system.cpu.fork_locks import ForkLock
from tests.conftest import CHECKPOINT, ROOT, posix


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shared") / "model.gguf"
    bridge.convert(CHECKPOINT, out)
    return out


def outcome(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


FORK = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor  # Python does not free what a thread holds that imports a module
import bridge

model = bridge.Model.load(sys.argv[1], context=4096)
expected = list(model.generate_tokens("The city", 3, temperature=0))

def generate():
    while True:  # a text may end early
        list(model.generate_tokens("The tower", 4000))

threading.Thread(target=generate, daemon=True).start()
for _ in range(4):
    while not model._shared.lock._lock.locked():
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends a child that waits for ever
        found = list(model.generate_tokens("The city", 3, temperature=0))
        os._exit(0 if found == expected else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@posix
def test_a_forked_child_generates_while_a_thread_of_its_parent_does(path: Path) -> None:
    assert outcome(FORK, path).stdout.split() == ["0"] * 4


@posix
def test_a_lock_that_the_parent_holds_is_free_in_the_child() -> None:
    lock = ForkLock()
    with lock:
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            with lock:
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@posix
def test_a_property_that_a_thread_computes_is_computed_in_a_child_too() -> None:
    class Slow:
        @cached_property
        def value(self) -> int:
            if os.getpid() == parent:
                computing.set()
                wait.wait()
            return 1

    computing, wait, slow, parent = threading.Event(), threading.Event(), Slow(), os.getpid()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    computing.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        os._exit(1 - Slow().value)
    wait.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SHORTENED = """
import os, sys
import numpy as np
import bridge

file = bridge.open_gguf(sys.argv[1], load=sys.argv[2])
model = bridge.Model.load(sys.argv[1], load=sys.argv[2])
os.truncate(sys.argv[1], 4096)
name = next(name for name in file if name.endswith("ffn_up.weight"))
y = file[name].matvec(np.ones(file[name].shape[1], np.float32))
print(y.sum(), *model.generate_tokens("The city", 4, temperature=0))
"""


@posix
@pytest.mark.parametrize("load", ["memory", "mmap"])
def test_a_file_that_is_truncated_while_open_must_be_in_memory(load: str, path: Path, tmp_path: Path) -> None:
    """Mapped, its last pages are gone: the limit that the documentation names."""
    copy = tmp_path / "model.gguf"
    copy.write_bytes(path.read_bytes())
    done = outcome(SHORTENED, copy, load)
    if load == "mmap":
        assert done.returncode == -signal.SIGBUS
        return
    assert done.returncode == 0, done.stderr
    tensor = next(tensor for name, tensor in bridge.open_gguf(path).items() if name.endswith("ffn_up.weight"))
    y = tensor.matvec(np.ones(tensor.shape[1], np.float32)).sum()
    tokens = bridge.Model.load(path).generate_tokens("The city", 4, temperature=0)
    assert done.stdout.split() == [str(y), *map(str, tokens)]


def test_a_file_in_memory_has_the_tensors_of_a_mapped_one(path: Path) -> None:
    mapped, read = bridge.open_gguf(path), bridge.open_gguf(path, load="memory")
    assert list(mapped) == list(read)
    for name, tensor in mapped.items():
        np.testing.assert_array_equal(tensor.raw, read[name].raw)
    weight = next(tensor for name, tensor in read.items() if name.endswith("ffn_up.weight"))
    before = weight.raw.copy()
    weight.prepare().release_raw()
    np.testing.assert_array_equal(weight.raw, before)


def test_an_unknown_way_of_loading_is_refused(path: Path) -> None:
    with pytest.raises(BridgeError, match="unknown load 'disk': choose mmap or memory"):
        bridge.open_gguf(path, load="disk")


def test_a_file_larger_than_the_memory_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def fileno(self):
            return self._file.fileno()

        def read(self):
            raise MemoryError

    monkeypatch.setattr("builtins.open", lambda name, mode, _open=open: Huge(_open(name, mode)))
    with pytest.raises(BridgeError, match=r"takes more memory than there is; use load='mmap'"):
        bridge.open_gguf(path, load="memory")

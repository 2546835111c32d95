"""Folders that processes work in: what a killed one left is removed by the next, what a living one holds is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import bridge
from bridge.conversion.writing.report import Report
from bridge.system.storage.folder_locks import lock_shared, remove_if_unlocked, temporary_beside
from tests.conftest import CHECKPOINT, ROOT

pytest.importorskip("fcntl", reason="folders cannot be locked here")

KILLED = """
import os, pathlib, sys
import bridge
from bridge.conversion.writing.report import Report
os.fsync = lambda _: os.kill(os.getpid(), 9)
source, out = map(pathlib.Path, sys.argv[1:])
"""
WRITING = {
    "a GGUF": "bridge.convert(source, out)",
    "shards": "bridge.convert(source, out, split_max_size=10**6)",
    "a report": "Report([], 0.0, '', '', [], 0).save(out)",
    "a checkpoint": "bridge.repack(source, out)",
}


@contextmanager
def process(code: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed a line; killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            running.stdout.readline()
            yield running
        finally:
            running.kill()


@pytest.mark.parametrize("what", WRITING)
def test_what_a_killed_process_left_is_removed_by_the_next_run_to_the_same_target(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED + WRITING[what], str(CHECKPOINT), str(out)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    left = os.listdir(tmp_path)
    assert len(left) == 1
    assert left != ["out"]
    other = tmp_path / left[0].replace(".out.", ".other.")
    other.mkdir()
    exec(WRITING[what], {"source": CHECKPOINT, "out": out, "bridge": bridge, "Report": Report})
    assert other.is_dir()  # of another target
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".out")]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    code = "import pathlib, sys, time; from bridge.system.storage.folder_locks import temporary_beside\n"
    code += "with temporary_beside(pathlib.Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(600)"
    with process(code, tmp_path / "out") as running:
        (theirs,) = tmp_path.iterdir()
        with temporary_beside(tmp_path / "out") as ours:
            assert {theirs, ours} == set(tmp_path.iterdir())
        assert [theirs] == list(tmp_path.iterdir())
        running.kill()
        running.wait()
        with temporary_beside(tmp_path / "out") as ours:
            assert [ours] == list(tmp_path.iterdir())


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    made = []

    def make() -> Path:
        folder = tmp_path / "cache"
        folder.mkdir(exist_ok=True)
        made.append(folder)
        if len(made) == 1:
            remove_if_unlocked(folder)
        return folder

    folder, handle = lock_shared(make)
    assert len(made) == 2
    remove_if_unlocked(folder)
    assert folder.is_dir()
    assert handle is not None
    os.close(handle)
    remove_if_unlocked(folder)
    assert not folder.exists()


def test_only_folders_themselves_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".out.link.unfinished").symlink_to(tmp_path / "folder")
    (tmp_path / ".out.file.unfinished").write_text("mine")
    with temporary_beside(tmp_path / "out"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".out.file.unfinished", ".out.link.unfinished", "folder"]

"""One model distributed over processes; one of them is killed during the conversion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from tests.conftest import CHECKPOINT, PATIENCE, ROOT

pytest.importorskip("distributed", reason="the extra dask is not installed")
SPLIT = 300_000


def test_a_killed_workers_shards_are_made_by_the_other(tmp_path: Path) -> None:
    plan_checkpoint(CHECKPOINT, out=tmp_path / "plan.json", split_max_size=SPLIT)
    whole = bridge.convert(CHECKPOINT, tmp_path / "whole.gguf", split_max_size=SPLIT).outputs
    (tmp_path / "out").mkdir()
    command = [
        sys.executable,
        ROOT / "scripts" / "convert_on_dask.py",
        tmp_path / "plan.json",
        tmp_path / "out" / "m.gguf",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()  # the first shard is done, its worker is at the next
    assert first.startswith("wrote "), process.communicate()[1]
    workers = [p for p in psutil.Process(process.pid).children(recursive=True) if is_worker(p)]
    assert len(workers) == 2
    workers[0].kill()
    rest, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert len((first + rest).splitlines()) == len(whole) > 5
    made = sorted((tmp_path / "out").iterdir())
    assert [p.read_bytes() for p in made] == [p.read_bytes() for p in whole]


def is_worker(process: psutil.Process) -> bool:
    """Dask's worker processes are spawned by multiprocessing, as its resource tracker is not."""
    return "spawn_main" in " ".join(process.cmdline())

"""The layers of a checkpoint written by several processes, one of which is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import bridge
from tests.conftest import CHECKPOINT, PATIENCE, ROOT
from tests.scripts.test_convert_on_dask import is_worker

pytest.importorskip("distributed", reason="the extra dask is not installed")
LAUNCH = """
import sys
from bridge.conversion.checkpoints import cluster_layers
cluster_layers._PART = 1 << 16
from scripts.quantize_on_dask import run_on_cluster
sys.exit(run_on_cluster("repack"))
"""


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_layers_of_a_cluster_are_those_of_one_process(format: str, tmp_path: Path) -> None:
    source = tmp_path / "awq"
    bridge.repack(CHECKPOINT, source, "awq")
    done = bridge.repack(source, tmp_path / "whole", format)
    script = ROOT / "scripts" / "repack_on_dask.py"
    command = [sys.executable, script, source, tmp_path / "parts", "--format", format]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    assert same_files(tmp_path / "whole", tmp_path / "parts")
    assert found.stdout.splitlines()[: len(done.table())] == done.table()


def test_a_killed_workers_layers_are_written_by_the_other(tmp_path: Path) -> None:
    bridge.repack(CHECKPOINT, tmp_path / "whole", "hqq")
    command = [sys.executable, "-c", LAUNCH, CHECKPOINT, tmp_path / "parts", "--format", "hqq"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    workers: list[psutil.Process] = []
    while len(workers) < 2 and process.poll() is None:
        workers = [p for p in psutil.Process(process.pid).children(recursive=True) if is_worker(p)]
    assert len(workers) == 2, process.communicate()[1]
    while process.poll() is None and not [*tmp_path.glob("*parts*")]:  # the folder is there: layers are being written
        pass
    workers[0].kill()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert same_files(tmp_path / "whole", tmp_path / "parts")


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have the same files, with the same bytes."""
    first, second = (
        {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} for folder in (one, other)
    )
    return first == second

"""A command for a machine with a GPU, run in a copy with nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu import rehearsal, stand_in

SEEN = """
import ctypes, os, pathlib, socket
print("files", sorted(p.name for p in pathlib.Path().iterdir()))
print("home", list(pathlib.Path.home().iterdir()), "variables", sorted(n for n in os.environ if n.startswith("MINE")))
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print("driver", version.value)
print("network", [name for _, name in socket.if_nameindex() if name != "lo"])
(pathlib.Path(os.environ["OUT"]) / "result.json").write_text("{}")
raise SystemExit(3)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder under git with a tracked file, one that is not, and an ignored folder."""
    if (reason := stand_in.unavailable()) is not None:
        pytest.skip(reason)
    root = tmp_path / "root"
    (root / ".kit").mkdir(parents=True)
    for name in ("tracked", "untracked", ".kit/brought", ".gitignore"):
        (root / name).write_text(".kit/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "tracked", ".gitignore"], cwd=root, check=True)
    monkeypatch.setattr(rehearsal, "ROOT", root)
    monkeypatch.setenv("MINE", "1")
    return root


def test_a_command_sees_tracked_and_carried_files_an_empty_home_and_the_driver(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["--python", sys.executable, "--carry", ".kit", "--", "python", "-c", SEEN]
    assert rehearsal.main(command) == 3
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "files ['.gitignore', '.kit', 'tracked']"
    assert lines[1] == "home [] variables []"
    assert lines[2] == "driver 13000"
    assert lines[3] == "network []" or not rehearsal.without_network()
    assert lines[4] == "exit code 3; left in $OUT:"
    assert lines[5].split() == ["2", "result.json"]


def test_a_command_that_does_not_end_is_ended_with_all_that_it_has_started(root: Path) -> None:
    endless = "import subprocess; subprocess.run(['sleep', '3600.25'])"
    command = ["--python", sys.executable, "--seconds", "2", "--", "python", "-c", endless]
    assert rehearsal.main(command) == rehearsal.TIME_WAS_UP
    running = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [line for line in running if b"3600.25" in line and b"-c" not in line]


def test_an_interpreter_that_does_not_exist_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rehearsal.main(["--python", "nowhere/python", "--", "true"])
    assert "--python nowhere/python: no such program" in capsys.readouterr().err

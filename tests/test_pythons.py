"""The Pythons that are supported are the same everywhere, and each gets what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import CHECKPOINT, ROOT, posix

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SUPPORTED = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(python: str) -> list[Requirement]:
    """What constraints.txt gives this Python."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    every = [Requirement(line) for line in lines if not line.startswith("#")]
    return [pin for pin in every if pin.marker is None or pin.marker.evaluate({"python_version": python})]


@pytest.mark.parametrize("python", SUPPORTED)
def test_each_python_gets_one_version_of_a_package_and_a_numpy_that_numba_allows(python: str) -> None:
    names = [pin.name for pin in pins(python)]
    assert len(names) == len(set(names))
    (numpy,) = (Version(str(pin.specifier).removeprefix("==")) for pin in pins(python) if pin.name == "numpy")
    wanted = [Requirement(text) for text in [*PROJECT["project"]["dependencies"], *(requires("numba") or [])]]
    (ours, numbas) = (requirement.specifier for requirement in wanted if requirement.name == "numpy")
    assert numpy in ours & numbas


def test_sources_are_checked_for_the_oldest_python_and_the_docs_name_it_and_the_newest() -> None:
    oldest, newest = SUPPORTED[0], SUPPORTED[-1]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"  # no upper bound: what is newer may work
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"with Python {oldest} to {newest}:" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {oldest} to {newest} " in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_workflows_run_on_every_supported_python(file: Path) -> None:
    """Of a release, the files that were built are tried on each; what publishes them needs one."""
    jobs: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    tests = {"try"} if file.stem == "release" else set(jobs)
    assert {name: jobs[name]["strategy"]["matrix"]["python"] for name in tests} == dict.fromkeys(tests, SUPPORTED)


def test_sources_compile_without_a_warning() -> None:
    """Such as one of an escape that a newer Python does not know, or of a `return` in `finally`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in ("bridge", "cuda"):
            for file in (ROOT / folder).rglob("*.py"):
                compile(file.read_text(encoding="utf-8"), file, "exec")


def test_a_conversion_warns_of_nothing(tmp_path: Path) -> None:
    """Neither do the packages that it uses, whatever the warning."""
    command = [sys.executable, "-W", "default", "-m", "bridge.cli", "convert", CHECKPOINT, tmp_path / "out.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_short_list_names_tests_that_are_there() -> None:
    listed = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(listed) > 5
    for file, name in listed:
        assert f"def {name or 'test_'}" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


@posix
@pytest.mark.parametrize("running", ["all", "pyenv's", "older", "none"])
def test_another_python_is_the_newest_one_that_runs(running: str, tmp_path: Path) -> None:
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    newest, second = [version for version in reversed(SUPPORTED) if version != own][:2]
    programs = {
        "all": tmp_path / f"python{newest}",  # on PATH
        "pyenv's": tmp_path / "versions" / f"{newest}.1" / "bin" / "python",
        "older": tmp_path / "versions" / f"{second}.0" / "bin" / "python",
    }
    order = [*programs, "none"]
    statuses = {tmp_path / f"python{version}": 1 for version in SUPPORTED}  # those of this machine are not found
    statuses |= {program: int(order.index(name) < order.index(running)) for name, program in programs.items()}
    for program, status in statuses.items():
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}", "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run(ROOT / ".ci" / "other-python", capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(programs.get(running, ""))

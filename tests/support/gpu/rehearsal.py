"""A command for a machine with a GPU, run here as there: in a copy of the tracked files, and with nothing else.

    python -m tests.support.gpu.rehearsal --python PYTHON [--site FOLDER] [--carry FOLDER]... -- COMMAND...

COMMAND runs in the copy with an empty HOME, an empty folder $OUT, without a network (`unshare -n`, where that is
allowed), with few other variables, PYTHON as `python` and `python3`, and the stand-ins for CUDA (stand_in.py). Its
output is shown as it comes. The end lists the files that are left in $OUT; the exit code is the command's, 124 if it
was ended as time was up. PYTHON is an interpreter with the packages of that machine, PyTorch's CUDA build among them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.gpu import stand_in

ROOT = Path(__file__).resolve().parents[3]
TIME_WAS_UP = 124  # as of timeout(1)
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit code."""
    parser = argparse.ArgumentParser(
        description="run a command as on a machine with a GPU: a copy, nothing else, stand-ins"
    )
    parser.add_argument("--python", required=True, help="the interpreter with the packages of that machine")
    parser.add_argument("--site", type=Path, help="a folder of more packages")
    parser.add_argument("--carry", action="append", default=[], metavar="FOLDER", help="an ignored folder to copy too")
    parser.add_argument("--seconds", type=float, default=600, help="limit for the command; default: %(default)s")
    parser.add_argument("command", nargs="+", help="the command with its arguments, after --")
    a = parser.parse_args(arguments)
    python = str(Path(a.python).absolute())  # not resolved: a link in a virtual environment means its packages
    if not shutil.which(python):
        parser.error(f"--python {a.python}: no such program")
    if (reason := stand_in.unavailable(python)) is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        for part in ("tree", "home", "out", "tmp", "bin", "lib"):
            (folder / part).mkdir()
        copy_tree(ROOT, folder / "tree", a.carry)
        code = run(a.command, folder, environment(folder, python, a.site), a.seconds)
        print(f"exit code {code}; left in $OUT:")
        for path in sorted(p for p in (folder / "out").rglob("*") if p.is_file()):
            print(f"{path.stat().st_size:12,} {path.relative_to(folder / 'out')}")
    return code


def copy_tree(root: Path, to: Path, carried: Sequence[str] = ()) -> None:
    """Copy the files that git tracks, as they are now, and further folders of `root`, into a folder that exists."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():  # it may be deleted, or a link to nowhere
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    for name in carried:
        shutil.copytree(root / name, to / name, dirs_exist_ok=True)


def environment(folder: Path, python: str, site: Path | None = None) -> dict[str, str]:
    """All variables of the command; `folder` has home, out, tmp, bin and lib."""
    for name in ("python", "python3"):  # not links: a virtual environment is found by the interpreter's own path
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        program.chmod(0o755)
    found = {
        "PATH": os.pathsep.join([str(folder / "bin"), str(Path(python).parent), _SYSTEM]),
        "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "OUT": str(folder / "out"), "LANG": "C.UTF-8",
    }  # fmt: skip
    if site is not None:
        found["PYTHONPATH"] = str(site.resolve())
    return found | stand_in.environment(folder / "lib", python)


def without_network() -> list[str]:
    """What comes before a command so that it has no network; nothing where that is not allowed."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
            return command
    print("the network cannot be taken away here: unshare is missing or not allowed", file=sys.stderr)
    return []


def run(command: Sequence[str], folder: Path, variables: dict[str, str], seconds: float) -> int:
    """Run a command in the copy; its exit code, or TIME_WAS_UP, when all that it has started is ended too."""
    # the network is taken away before anything is preloaded
    preloading = [f"{name}={variables[name]}" for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if name in variables]
    others = {name: value for name, value in variables.items() if not name.startswith("LD_")}
    started = subprocess.Popen(
        [*without_network(), "env", *preloading, *command], cwd=folder / "tree", env=others, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        return TIME_WAS_UP
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


if __name__ == "__main__":
    sys.exit(main())

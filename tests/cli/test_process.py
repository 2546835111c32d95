"""The program as a process: imports, help, streams, encodings, signals, a full disk, and --debug."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import bridge
from bridge.cli import main
from tests.conftest import CHECKPOINT, PATIENCE, ROOT, linux, posix
from tests.support.command_line import OLD, bridge_process, contents, one_line, types
from tests.support.terminal import needs_terminal, open_terminal


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import bridge", {"numpy", "gguf", "numba", "torch", "transformers"}),
        (
            "from bridge.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            {"numpy", "gguf", "difflib", "bridge.cli.use.run", "torch", "transformers"},
        ),
        ("from bridge.cli import main; main(['inspect', '.'])", {"numba", "torch", "transformers"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code, heavy):
    done = python("-c", f"{code}\nimport sys; sys.stderr.write(' '.join({heavy} & set(sys.modules)))")
    assert re.sub(r"error: config.json: not found; .*\n", "", done.stderr) == ""


def test_run_imports_no_converter(tmp_path):
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    words = ["run", str(tmp_path / "m.gguf"), "-p", "KING", "-n", "1", "--temp", "0"]
    heavy = {"gguf", "jinja2", "numpy.random", "difflib", "bridge.cli.files.convert", "bridge.checkpoint", "torch"}
    for _ in range(2):  # the first may compile, with Numba
        code = f"from bridge.cli import main; main({words}); import sys; print({heavy} & {{*sys.modules}})"
        done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.exhaustive  # all that is imported is compiled anew
def test_without_asserts_and_docstrings(tmp_path, small_model):
    """Python's -OO: the same file is made, and what transformers cannot do is said before anything is read."""
    cli, (made, usual) = ["-OO", "-m", "bridge.cli"], (tmp_path / "made.gguf", tmp_path / "usual.gguf")
    bridge.convert(CHECKPOINT, usual)
    done = python(*cli, "convert", CHECKPOINT, made)
    assert (done.returncode, done.stderr) == (0, "")
    assert made.read_bytes() == usual.read_bytes()
    for command in (["inspect", CHECKPOINT], ["run", made, "-p", "KING", "-n", "1"]):
        assert python(*cli, *command).returncode == 0
    done = python(*cli, "quantize", small_model, tmp_path / "q.gguf", "--calibrate", tmp_path / "text.txt")
    assert (done.returncode, "unset PYTHONOPTIMIZE=2" in one_line(done.stderr)) == (2, True)


END = """
import atexit, sys, threading, time
from bridge import cli

def main():
    atexit.register(print, "at the end")
    threading.Thread(target=lambda: (time.sleep(0.2), print("in a thread"))).start()
    print("first")
    if len(sys.argv) > 1:
        raise SystemExit(sys.argv[1])
    return 3

class Freed:
    def __del__(self):
        print("freed")

freed, cli.main = Freed(), main
cli.entry_point()
"""


def test_a_process_ends_with_all_that_is_to_be_done_and_frees_nothing():
    done = python("-c", END)
    assert (done.returncode, done.stdout, done.stderr) == (3, "first\nin a thread\nat the end\n", "")
    done = python("-c", END, "another end")  # as any other
    assert (done.returncode, done.stderr) == (1, "another end\n")
    assert done.stdout == "first\nin a thread\nat the end\nfreed\n"


def test_functions_of_the_package_are_functions_whatever_was_imported_before():
    code = "import bridge.conversion.converter, bridge.conversion.writing.verify\n"
    code += "assert callable(bridge.convert) and callable(bridge.verify)"
    assert python("-c", code).stderr == ""
    assert python("-c", "import bridge; bridge.verify; assert callable(bridge.convert)").stderr == ""


def test_the_package_can_be_looked_at_without_torch():
    code = "import sys; sys.modules.update(torch=None, transformers=None)\n"
    code += "import bridge, inspect, pydoc; print(*dir(bridge)); inspect.getmembers(bridge); pydoc.render_doc(bridge)"
    done = python("-c", code)
    assert done.stderr == ""
    assert {"Budget", "Calibration", "Model", "QuantTensor", "Report", "convert", "nn"} <= set(done.stdout.split())


@linux
def test_a_folder_whose_name_is_not_utf_8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/mod\xe9le"
    shutil.copytree(os.fsencode(CHECKPOINT), folder)
    command = [os.fsencode(sys.executable), b"-m", b"bridge.cli", b"convert", folder, folder + b"/\xe9.gguf"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\nwrote " in done.stdout


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge.cli", "inspect", str(CHECKPOINT)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


@posix
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(tmp_path, closed):
    command = f"{sys.executable} -m bridge.cli convert {CHECKPOINT} {tmp_path}/out.gguf --type Q4_0 {closed}"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 0
    assert types(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == "Q4_0"


@needs_terminal
def test_progress_shows_on_a_terminal_sparsely_in_a_pipe_and_where_it_is_off_nowhere(tmp_path):
    command = [sys.executable, "-m", "bridge.cli", "convert", str(CHECKPOINT), str(tmp_path / "a.gguf"), "--force"]
    ours, theirs = open_terminal()
    usual = {name: value for name, value in os.environ.items() if name != "BRIDGE_PROGRESS"}
    done = subprocess.run(command, cwd=ROOT, env=usual, stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert shown.startswith("\rconvert: starting\r")
    assert f"\rreading {CHECKPOINT}"[:79] in shown
    into_pipe = subprocess.run(command, cwd=ROOT, env=usual, capture_output=True, text=True, check=False).stderr
    assert all(line.isprintable() for line in into_pipe.splitlines())
    assert len(into_pipe.splitlines()) < shown.count("\r") / 2
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stderr == b""  # BRIDGE_PROGRESS=0


@posix
@pytest.mark.parametrize(
    ("limit", "options", "exists"),
    [(20_000, [], True), (1_000_000, [], False), (300_000, ["--split-max-size=500K"], True)],
)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(model, tmp_path, limit, options, exists):
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "out.gguf"
    bridge.convert(model, out)  # so that no kernel is compiled, whose cache is a file too
    out.write_bytes(OLD) if exists else out.unlink()
    before = contents(tmp_path)
    code = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nrun()"
    _, error = (process := bridge_process(code, "convert", model, out, "--force", *options)).communicate()
    assert process.returncode == 2
    assert "out.gguf: writing " in one_line(error)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"model", *(["out.gguf"] if exists else [])})


SLOWLY = """
import importlib
conversion = importlib.import_module("bridge.conversion.writing.executor").Executor
make = conversion.make
conversion.make = lambda self, tensor: (time.sleep(0.3), make(self, tensor))[1]
run()
"""


@posix
@pytest.mark.parametrize(("name", "exists"), [("SIGINT", False), ("SIGTERM", True), ("SIGHUP", True)])
def test_an_interrupt_leaves_what_was_there_and_nothing_else(model, tmp_path, name, exists):
    sent = getattr(signal, name)
    out = tmp_path / "out.gguf"
    if exists:
        out.write_bytes(OLD)
    before = contents(tmp_path)
    process = bridge_process(SLOWLY, "convert", model, out, "--force", "--threads=1")
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob(".out.gguf.*/out.gguf")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(sent)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + sent
    assert error == "stopped; nothing half-written was left behind\n"
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"model", *(["out.gguf"] if exists else [])})


@pytest.mark.parametrize("split", [None, 500_000])
def test_a_progress_callback_may_stop_the_conversion(model, tmp_path, split):
    def stop(done: int, total: int, _name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    (tmp_path / "out.gguf").write_bytes(OLD)
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bridge.convert(model, tmp_path / "out.gguf", force=True, split_max_size=split, progress=stop)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_debug_shows_where_an_error_comes_from(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), "--debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: ")


def test_a_mistake_of_our_own_is_one_line_too(model, refused, monkeypatch):
    monkeypatch.setattr("bridge.cli.files.describe.facts_of", lambda *_: 1 // 0)
    assert "unexpected ZeroDivisionError" in refused("inspect", model)

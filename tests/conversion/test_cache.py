"""`run` with a checkpoint: what is converted is kept, named by its contents, made once, listed and cleared."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import bridge
from bridge.cli import main
from bridge.conversion import cache as cache_module
from bridge.conversion.cache import converted
from bridge.errors import BridgeError
from bridge.system.kernels import closure
from bridge.system.storage import kernel_cache
from tests.conftest import CHECKPOINT, PATIENCE, ROOT, posix


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own; kernels that are compiled already are found where they are."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernel_cache.folder()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf-bridge"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "shakespeare-gptq"))


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """release(): let go of the entries that this process uses, as its end would."""
    handles: list[int] = []
    monkeypatch.setattr("bridge.conversion.cache._in_use", handles)

    def close() -> None:
        while handles:
            os.close(handles.pop())

    return close


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "models").glob("*/*.gguf"))


def test_python_loads_what_run_takes(cache, model, tmp_path):
    bridge.convert(model, tmp_path / "here.gguf")
    with bridge.Model.load(tmp_path / "here.gguf") as own, bridge.Model.load(model, context=64) as made:
        assert made.path in kept(cache)
        assert made.context == 64
        assert list(made.generate("KING", 3, temperature=0)) == list(own.generate("KING", 3, temperature=0))
    with pytest.raises(BridgeError, match="path is of type int; must be a path"):
        bridge.Model.load(5)


def test_run_converts_a_checkpoint_once_and_keeps_the_gguf(cache, model, tmp_path, capsys):
    bridge.convert(model, tmp_path / "here.gguf")
    printed = []
    for _ in range(2):
        assert main(["run", str(model), "-p", "KING", "-n", "3", "--temp", "0"]) == 0
        printed.append(capsys.readouterr())
    (path,) = kept(cache)
    assert path.name == "shakespeare-gptq.gguf"
    assert path.parent.name.startswith("shakespeare-gptq-")
    assert path.read_bytes() == (tmp_path / "here.gguf").read_bytes()
    assert printed[0].out == printed[1].out
    assert printed[0].out.startswith("KING")
    assert "100% of its codes kept" in printed[0].err
    assert "converting" not in printed[1].err


def test_an_entry_is_named_by_contents(cache, model, tmp_path, release):
    first = converted(model)
    other = Path(shutil.copytree(model, tmp_path / "elsewhere"))  # a copy, with other times
    assert converted(other) == first
    config = model / "generation_config.json"
    config.write_text(config.read_text().replace("{", '{"top_k": 7,', 1))
    second = converted(model)
    assert second != first
    assert converted(other) == first
    assert len(kept(cache)) == 2


def test_a_hub_ids_entry_is_named_by_the_repository(cache, tmp_path, monkeypatch, release, capsys):
    snapshot = tmp_path / "hub" / "models--org--bard-gptq" / "snapshots" / ("0123456789" * 4)
    shutil.copytree(CHECKPOINT, snapshot)
    asked = []
    monkeypatch.setattr("bridge.conversion.cache.resolve_model", lambda name, config: asked.append(name) or snapshot)
    path = converted("org/bard-gptq")
    assert path.name == "bard-gptq.gguf"
    assert converted("org/bard-gptq") == path
    assert asked == ["org/bard-gptq"] * 2
    assert "converting org/bard-gptq;" in capsys.readouterr().err


def test_contents_are_read_again_only_where_a_file_was_touched(cache, model, monkeypatch, release):
    first = converted(model)
    read = []
    digest = bridge.conversion.cache._digest  # type: ignore[attr-defined]
    monkeypatch.setattr("bridge.conversion.cache._digest", lambda files: read.append(1) or digest(files))
    assert converted(model) == first
    assert not read
    os.utime(model / "model.safetensors")
    assert converted(model) == first  # the same contents
    assert converted(model) == first
    assert read == [1]
    monkeypatch.setattr("bridge.conversion.cache._converter", lambda: "other sources")
    assert converted(model) != first  # they may convert otherwise


def test_the_cache_is_listed_and_cleared_but_for_what_is_in_use(cache, model, release, capsys):
    converted(model)
    kernels = [cache / "kernels" / "bridge.x-0123456789abcdef.o", cache / "kernels" / "bridge.y-0123456789abcdef"]
    kernels[1].mkdir(parents=True)
    (kernels[1] / "kernel.nbc").write_bytes(bytes(1000))
    kernels[0].write_bytes(bytes(500))
    (path,) = kept(cache)
    name = path.parent.name
    capsys.readouterr()
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["models", name, "2.4", "MB"]
    assert lines[2].split()[:4] == ["kernels", "2", "of", "this"]
    assert lines[-1].endswith(f"in {cache}")
    assert main(["cache", "--clear", "nothing"]) == 2
    assert "no such entry" in capsys.readouterr().err
    assert main(["cache", "--clear", "shakespeare-gptq"]) == 0  # this process uses it
    assert f"not removed: {name}, a process is using it" in capsys.readouterr().out
    assert path.exists()
    release()
    assert main(["cache", "--clear", "shakespeare-gptq"]) == 0
    assert not path.parent.exists()
    assert all(kernel.exists() for kernel in kernels)
    converted(model)
    release()
    assert main(["cache", "--clear", "shakespeare-gptq", "--kernels"]) == 0
    assert not any(kernel.exists() for kernel in kernels)
    assert not path.parent.exists()
    kernels[1].mkdir(parents=True)
    assert main(["cache", "--clear", "--kernels"]) == 0
    assert list(cache.glob("*/*")) == []
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"0.0 MB in {cache}\n"


KILLED = """
import os, signal, sys
from bridge.conversion import cache as cache_module
from bridge.conversion.cache import converted
def progress(done, total, name):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
converted(sys.argv[1], progress=progress)
"""


@posix
def test_a_killed_conversion_leaves_no_half_file_and_the_next_makes_it(cache, model, release):
    done = subprocess.run([sys.executable, "-c", KILLED, model], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert kept(cache) == []
    assert list((cache / "models").glob("*/.*.unfinished"))
    path = converted(model)
    assert kept(cache) == [path]
    assert not list(path.parent.glob(".*"))
    bridge.open_gguf(path)


def test_a_conversion_that_fails_leaves_nothing(cache, model):
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(BridgeError):
        converted(model)
    assert list(cache.rglob("*")) == [cache / "models"]


def test_two_processes_at_once_convert_once(cache, model):
    code = "import sys; from bridge.conversion.cache import converted; print(converted(sys.argv[1]))"
    command = [sys.executable, "-c", code, model]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ended = [process.communicate(timeout=PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert ended[0][0] == ended[1][0] == f"{kept(cache)[0]}\n"
    assert sum("codes kept" in error for _, error in ended) == 1


@posix
def test_who_comes_while_another_converts_waits(cache, model, release, capsys):
    import fcntl
    import threading

    path = converted(model)
    with open(path.parent / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        begun = time.perf_counter()
        assert converted(model) == path
        assert time.perf_counter() - begun > 0.2
    assert "waiting for another process that is converting it" in capsys.readouterr().err


def test_without_locks_it_is_converted_once_and_kept(cache, model, release, monkeypatch):
    for module in ("conversion.cache", "system.storage.folder_locks"):
        monkeypatch.setattr(f"bridge.{module}.fcntl", None)
    path = converted(model)
    made = path.stat().st_mtime_ns
    assert converted(model) == path
    assert path.stat().st_mtime_ns == made
    assert main(["cache", "--clear"]) == 0
    assert path.exists()  # nobody knows whether it is in use


def test_what_this_program_does_not_run_is_refused_before_it_is_converted(cache, model):
    with pytest.raises(BridgeError, match=r"this program cannot run the architecture qwen3, llama.cpp can; "):
        converted(model, runnable=["llama"])
    assert not cache.exists()


@pytest.mark.parametrize("name", ["no/such/folder", "nothing.gguf"])
def test_what_is_neither_a_gguf_nor_a_checkpoint_is_refused(cache, name, tmp_path, capsys):
    assert main(["run", str(tmp_path / name), "-p", "x"]) == 2
    assert "no such f" in capsys.readouterr().err
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_one_line(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BridgeError, match=r"cannot be created .*; set XDG_CACHE_HOME"):
        converted(model)


def test_a_gguf_without_the_ending_runs_as_it_is(cache, model, tmp_path, capsys):
    bridge.convert(model, tmp_path / "m.gguf")
    (tmp_path / "m.gguf").rename(tmp_path / "blob")
    assert main(["run", str(tmp_path / "blob"), "-p", "KING", "-n", "1", "--temp", "0"]) == 0
    assert not cache.exists()
    capsys.readouterr()


def test_an_entry_whose_notes_are_damaged_is_found_by_its_contents(cache, model, release):
    path = converted(model)
    (path.parent / "checkpoints.json").write_text("{")
    assert converted(model) == path
    assert kept(cache) == [path]


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "emptied"])
def test_a_damaged_gguf_is_made_anew(cache, model, release, capsys, damage):
    path = converted(model)
    whole = path.read_bytes()
    found = {"truncated": whole[:-100], "overwritten": whole[:500] + bytes(100) + whole[600:], "emptied": b""}
    path.write_bytes(found[damage])
    release()
    capsys.readouterr()
    assert main(["run", str(model), "-p", "KING", "-n", "1"]) == 0
    assert "the cached GGUF has changed since it was made; converting" in capsys.readouterr().err
    assert path.read_bytes() == whole
    assert converted(model) == path
    assert capsys.readouterr().err == ""


@posix
def test_pipes_and_devices_in_a_checkpoints_folder_are_not_read(cache, model, release):
    path = converted(model)
    os.mkfifo(model / "notes.txt")
    (model / "zero.txt").symlink_to("/dev/zero")
    (model / "nothing.txt").symlink_to("nowhere")
    os.utime(model / "config.json")  # contents are read again
    assert converted(model) == path


@posix
def test_a_lock_file_is_not_opened_through_a_link(cache, model, release, tmp_path):
    path = converted(model)
    (tmp_path / "precious").write_text("of years")
    (path.parent / "lock").unlink()
    (path.parent / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(BridgeError, match=r"lock: cannot be opened \(.*\); remove it"):
        converted(model)
    assert (tmp_path / "precious").read_text() == "of years"


@posix
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_error(cache, model, release, monkeypatch, code):
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    path = converted(model)
    assert converted(model) == path
    assert main(["cache", "--clear"]) == 0
    assert path.exists()  # nobody knows whether it is in use


def test_clearing_the_cache_removes_its_own_entries_alone(cache, release):
    for name in ("models/Qwen3-8B/thesis.tex", "docs/notes/a.txt", "kernels/mine/b.txt", "models/letters.txt"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text("of years")
    (cache / "models" / "Qwen3-8B-0123456789ab").mkdir()
    (cache / "kernels" / "bridge.x-0123456789abcdef").mkdir()
    (cache / "numba" / "0123456789abcdef").mkdir(parents=True)  # of an earlier version
    assert main(["cache", "--clear"]) == 0
    assert (cache / "kernels" / "bridge.x-0123456789abcdef").exists()  # compiled kernels are kept
    assert main(["cache", "--kernels"]) == 2
    assert main(["cache", "--clear", "--kernels"]) == 0
    assert len([file for file in cache.rglob("*") if file.is_file()]) == 4
    assert not (cache / "models" / "Qwen3-8B-0123456789ab").exists()
    assert not (cache / "kernels" / "bridge.x-0123456789abcdef").exists()
    assert not (cache / "numba" / "0123456789abcdef").exists()


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@posix
def test_a_gguf_that_another_user_put_there_is_not_run(cache, model, monkeypatch):
    path = converted(model)
    before, status = path.read_bytes(), path.stat()
    path.unlink()
    path.write_bytes(before[:-1] + b"x")  # as large and as old
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with monkeypatch.context() as patch:
        given_away(path, patch)
        assert not cache_module._is_own(path)
    if os.geteuid() == 0:
        assert converted(model).read_bytes() == before


@posix
def test_an_entry_of_another_user_is_refused_and_one_that_others_can_write_is_closed(cache, model, monkeypatch):
    path = converted(model)
    path.parent.chmod(0o777)
    assert converted(model) == path
    assert path.parent.stat().st_mode & 0o022 == 0
    given_away(path.parent, monkeypatch)
    with pytest.raises(BridgeError, match="belongs to another user; remove it, or set XDG_CACHE_HOME"):
        converted(model)


def test_the_sources_that_convert_are_part_of_the_name(monkeypatch):
    made = cache_module._converter.__wrapped__()
    assert made == cache_module._converter.__wrapped__()
    monkeypatch.setattr(cache_module.closure, "digest", lambda modules: "changed")
    assert cache_module._converter.__wrapped__() != made
    sources = closure.sources(frozenset(["bridge.conversion.converter"]))
    assert {"bridge.encode.carrying.carry", "bridge.blocks.k_quants.q4_k", "bridge.conversion.planning.planner"} <= set(
        sources
    )
    assert "bridge.cli.files.convert" not in sources


RUNS = """
import sys
from bridge.conversion import cache as cache_module
from bridge.conversion.cache import converted
from bridge.runtime.model import Model
model = Model.load(converted(sys.argv[1]))
print("loaded", flush=True)
sys.stdin.read()
print("".join(model.generate("KING", max_tokens=3)))
"""


def test_the_cache_is_cleared_while_a_model_runs(cache, model):
    command, pipe = [sys.executable, "-c", RUNS, str(model)], subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout
    assert process.stdout.readline() == "loaded\n"
    assert main(["cache", "--clear"]) == 0
    (path,) = kept(cache)
    text, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, text != "") == (0, True), errors
    assert main(["cache", "--clear"]) == 0
    assert not path.exists()


NO_HOME = """
import pwd, sys
def unknown(_):
    raise KeyError
pwd.getpwuid = unknown
from bridge.cli import main
sys.exit(main(sys.argv[1:]))
"""


@posix
@pytest.mark.parametrize("home", ["none", "file", "read-only"])
def test_without_a_home_folder(model, tmp_path, home):
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    if home == "file":
        (tmp_path / "home").write_text("")
        env["HOME"] = str(tmp_path / "home")
    elif home == "read-only":
        env["HOME"] = "/proc"  # where not even root makes a folder

    def run(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-c", NO_HOME, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        return done.returncode, done.stderr

    if home == "none":
        code, error = run("inspect", model)
        assert (code, error.count("\n")) == (0, 1), error
        assert "every process compiles its kernels again" in error
    code, error = run("run", model, "-p", "KING", "-n", "1")
    assert (code, "Traceback" in error) == (2, False)
    assert error.splitlines()[-1].startswith("error: ")
    assert "XDG_CACHE_HOME" in error.splitlines()[-1]
    code, error = run("cache")
    assert (code, "Traceback" in error) == (2 if home == "none" else 0, False)

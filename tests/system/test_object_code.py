"""Object code that came with the package, and C functions that other processes compile."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.runtime.cpu.ops import decoder_ops
from bridge.system.cpu import machine, targets
from bridge.system.kernels import compile_ahead, compiler, compiling, object_code
from bridge.system.kernels.jit import CFunction
from bridge.system.storage import kernel_cache
from scripts import build_objects
from tests.conftest import PATIENCE, ROOT


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is loaded or kept, and the cache is this test's own."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(object_code, "_compiled", {})
    monkeypatch.setattr(object_code, "_addresses", {})
    kernel_cache.ready.cache_clear()
    yield tmp_path
    kernel_cache.ready.cache_clear()


def renamed(function: CFunction) -> CFunction:
    """The same under another name, as a process loads each name once."""
    made = CFunction(function.py_func, f"{function.name}_again", function.modules)
    made.recipe = function.recipe
    return made


def test_functions_are_compiled_by_other_processes_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "usable_cpus", lambda: 2)
    monkeypatch.setattr(compile_ahead, "_EACH", 1)
    functions = [renamed(decoder_ops.function(name)) for name in ("scale", "add")]
    told: list[tuple[int, int]] = []
    keep = object_code.keep
    steps = compiling.steps()

    def refuse(*_: Any) -> bytes:
        raise AssertionError("compiled here")

    monkeypatch.setattr(compiling, "_elsewhere", (0, 0))
    monkeypatch.setattr(object_code, "keep", lambda *code: (told.append(compiling.elsewhere()), keep(*code)))
    compile_ahead.compile_all(functions)
    assert compiling.steps() == steps + 2
    assert (0, 2) in told
    assert compiling.elsewhere() == (2, 2)
    assert all(kernel_cache.has(object_code.cached_name(function)) for function in functions)
    assert object_code._compiled.keys() == {function.name for function in functions}
    monkeypatch.setattr(compiler, "object_code", refuse)
    compile_ahead.compile_all(functions)  # nothing is left to do


def test_a_process_without_numba_has_even_one_function_compiled_by_another(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from bridge.runtime.cpu.ops import decoder_ops\n"
        "from bridge.system.kernels import compile_ahead, compiling\n"
        "function = decoder_ops.function('scale')\n"
        "compile_ahead.compile_all([function])\n"
        "assert function.address and compiling.steps() == 1 and 'numba' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=PATIENCE)


def test_a_process_that_is_killed_leaves_the_function_to_whoever_needs_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "usable_cpus", lambda: 2)
    monkeypatch.setattr(compile_ahead, "_EACH", 1)
    monkeypatch.setattr("bridge.system.kernels.worker.Worker._started", lambda self: subprocess.Popen(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ))  # fmt: skip
    function = decoder_ops.function("scale")
    compile_ahead.compile_all([function, decoder_ops.function("add")])
    assert not object_code._compiled
    values = np.ones(4, np.float32)
    half = int(np.array(0.5).view(np.int64))
    function.ctypes(values.ctypes.data, 4, half, 0, 0, 0, 0, 0, 1)
    assert values.tolist() == [0.5] * 4


def test_where_no_process_can_be_started_nothing_is_compiled_ahead(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(compile_ahead, "usable_cpus", lambda: 2)
    monkeypatch.setattr(compile_ahead, "_EACH", 1)
    monkeypatch.setattr("bridge.system.kernels.worker.Worker._started", refused)
    compile_ahead.compile_all([decoder_ops.function("scale"), decoder_ops.function("add")])
    assert not object_code._compiled


def test_what_came_with_the_package_is_used_as_long_as_its_sources_are_the_same(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = decoder_ops.function("scale")
    objects = fresh / "package" / "objects"
    objects.mkdir(parents=True)
    module = Path(object_code.__file__).relative_to(ROOT / "bridge")
    monkeypatch.setattr(object_code, "__file__", str(fresh / "package" / module))

    def bundle(name: str, features: str) -> None:
        with zipfile.ZipFile(objects / object_code.bundle(targets.chosen()), "w") as archive:
            archive.comment = features.encode()
            archive.writestr(name, b"code")
        object_code._archive.cache_clear()

    try:
        name, there = object_code.bundled_name(function), next(iter(machine.features()))
        bundle(name, there)
        assert object_code._bundled(function) == b"code"
        assert object_code.known(function)
        bundle(name, f"{there},a-feature-of-the-future")
        assert object_code._bundled(function) is None
        bundle(name, there)
        monkeypatch.setattr(object_code.closure, "digest", lambda modules: "changed")
        assert object_code._bundled(function) is None
        assert not object_code.known(function)
    finally:
        object_code._archive.cache_clear()


ELSEWHERE = """
import sys
from bridge.system.cpu import machine
from bridge.system.kernels import compiler
from bridge.system.threads import pool
made_for = machine.Machine(*sys.argv[1:])
machine.host = lambda: made_for
code = compiler.object_code(pool.function("walk"), made_for)
print(code[:4] == b"\\x7fELF", int.from_bytes(code[18:20], "little"))
"""


@pytest.mark.parametrize(("target", "number"), [("avx512vbmi", 62), ("i8mm", 183)])
def test_object_code_is_made_for_machines_that_are_not_here(target: str, number: int) -> None:
    """ELF's header says for which; in a process of its own, as what is compiled for another machine stays."""
    described = build_objects.machine_of(target)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *described], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"True {number}\n", done.stderr


@pytest.mark.exhaustive  # minutes
def test_a_bundle_holds_what_a_model_of_common_types_calls(tmp_path: Path) -> None:
    target = targets.chosen()
    if target not in build_objects.CPUS:
        pytest.skip(f"{target} has no bundle")
    command = [sys.executable, str(ROOT / "scripts" / "build_objects.py"), str(tmp_path), target]
    subprocess.run(command, check=True, timeout=PATIENCE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with zipfile.ZipFile(tmp_path / object_code.bundle(target)) as archive:
        names = set(archive.namelist())
    assert {object_code.bundled_name(function) for function in build_objects.functions(target)} <= names

"""Compiling kernels: what it takes is measured and said, speeds leave it out, and its results are shared."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

import bridge
from bridge.blocks.read import READ
from bridge.cli import main
from bridge.cli.use.run import without_pauses
from bridge.system.kernels import compiling
from bridge.system.kernels.jit import inner
from tests.conftest import ROOT


def test_the_clock_stands_still_while_a_kernel_is_compiled() -> None:
    function = inner(lambda x: x + 1)
    started, clock, spent, steps = time.perf_counter(), compiling.clock(), compiling.seconds(), compiling.steps()
    function.compiled.compile("int64(int64)")
    assert compiling.steps() > steps
    assert 0 < compiling.seconds() - spent <= time.perf_counter() - started
    assert compiling.clock() - clock < time.perf_counter() - started
    assert not compiling.active()


def test_the_clock_stands_still_while_the_compiler_is_imported() -> None:
    clock, spent, started = compiling.clock(), compiling.seconds(), time.perf_counter()
    with compiling.loading():
        time.sleep(0.05)
    assert compiling.seconds() == spent  # nothing was compiled
    assert compiling.clock() - clock <= time.perf_counter() - started - 0.05


def test_how_many_kernels_others_compile_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_elsewhere", (0, 0))
    counts = []
    with compiling.kernels_elsewhere(3) as report:
        report(2)
        counts.append((compiling.active(), compiling.elsewhere()))
    with suppress(KeyError), compiling.kernels_elsewhere(2):
        counts.append((compiling.active(), compiling.elsewhere()))
        raise KeyError  # those that are missing are not waited for
    counts.append((compiling.active(), compiling.elsewhere()))
    assert counts == [(True, (2, 3)), (True, (3, 5)), (False, (5, 5))]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_reply_begins_when_the_kernels_of_its_second_piece_are_compiled(compiles: bool) -> None:
    made = []

    def pieces():
        for piece in "abc":
            if compiles:
                with compiling.kernel():
                    pass
            made.append(piece)
            yield piece

    shown = []
    for piece in without_pauses(pieces(), None):
        shown.append((piece, "".join(made)))
    assert shown == [("a", "ab" if compiles else "a"), ("b", "ab"), ("c", "abc")]


def test_after_a_warmup_nothing_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = tmp_path / "model.gguf"
    bridge.convert(ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym", gguf)
    assert main(["warmup", str(gguf)]) == 0
    assert "the kernels for this CPU" in capsys.readouterr().out
    steps, seconds = compiling.steps(), compiling.seconds()
    assert main(["run", str(gguf), "-p", "Once upon a time", "-n", "4"]) == 0
    assert main(["run", str(gguf), "-p", "Once", "-n", "4"]) == 0
    assert main(["warmup", str(gguf)]) == 0
    assert compiling.steps() == steps
    assert compiling.seconds() == seconds  # loading is not compiling
    assert "were compiled before" in capsys.readouterr().out


def test_what_rounds_to_a_type_is_compiled_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bridge.blocks.read.READ", {name: READ[name] for name in ("Q8_0", "MXFP4")})
    assert main(["warmup"]) == 0
    steps = compiling.steps()
    assert main(["warmup"]) == 0
    assert compiling.steps() == steps

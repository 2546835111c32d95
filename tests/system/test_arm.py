"""What an Arm CPU has, as Linux and macOS tell it; both are pretended."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bridge.system.cpu import arm, cpus, machine, targets

GRAVITON_2, GRAVITON_4 = (0xEFFFFFFF & ~(1 << 30), 0), (0xEFFFFFFF, 1 << 13 | 1)


class Library:
    """A C library with getauxval or sysctlbyname."""

    def __init__(self, words: dict[int, int] | None = None, settings: dict[bytes, int] | None = None) -> None:
        self.settings = settings or {}

        def getauxval(word: int) -> int:
            assert words is not None
            return words.get(word, 0)

        self.getauxval: Any = getauxval

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, length: int) -> int:
        if name not in self.settings:
            return -1
        ctypes.memmove(value, self.settings[name].to_bytes(4, "little"), 4)
        return 0


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pretend(system, library): an Arm CPU under that system, which LLVM sees nothing of."""

    def run(system: str, library: Library) -> None:
        for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "BRIDGE_CPU"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(platform, "machine", lambda: "arm64" if system == "darwin" else "aarch64")
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(machine, "_present", set)
        monkeypatch.setattr(subprocess, "Popen", None)
        arm.features.cache_clear()
        machine.features.cache_clear()

    yield run
    monkeypatch.undo()
    arm.features.cache_clear()
    machine.features.cache_clear()


@pytest.mark.parametrize(
    ("words", "names"), [(GRAVITON_2, ["neon", "portable"]), (GRAVITON_4, ["i8mm", "neon", "portable"])]
)
def test_linux_tells_by_bits(pretend: Any, words: tuple[int, int], names: list[str]) -> None:
    pretend("linux", Library(dict(zip((16, 26), words, strict=True))))
    assert targets.available() == names
    assert machine.unseen_features() == sorted(arm.features()) != []


M1 = {b"hw.optional.neon": 1, b"hw.optional.arm.FEAT_DotProd": 1, b"hw.optional.arm.FEAT_I8MM": 0}


@pytest.mark.parametrize("i8mm", [0, 1])
def test_macos_tells_by_name(pretend: Any, i8mm: int) -> None:
    pretend("darwin", Library(settings=M1 | {b"hw.optional.arm.FEAT_I8MM": i8mm}))
    assert targets.available() == ["i8mm"] * i8mm + ["neon", "portable"]


def test_an_arm_cpu_that_windows_runs_on_is_what_llvm_sees(pretend: Any) -> None:
    pretend("win32", Library())
    assert arm.features() == frozenset()


def test_a_users_description_of_the_cpu_is_left_alone(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("linux", Library(dict(zip((16, 26), GRAVITON_4, strict=True))))
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+neon,+dotprod")
    assert machine.unseen_features() == []
    assert targets.available() == ["neon", "portable"]


@pytest.mark.parametrize(("settings", "threads"), [({b"hw.perflevel0.physicalcpu": 6}, 6), ({}, 10)])
def test_a_mac_works_on_its_performance_cores(
    pretend: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[bytes, int], threads: int
) -> None:
    pretend("darwin", Library(settings=settings))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(cpus, "_quota", lambda: float("inf"))
    assert cpus.usable_cpus() == threads

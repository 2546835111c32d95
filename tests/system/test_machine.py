"""What LLVM says of the CPU is asked once for each kind of CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from bridge.system.cpu import machine
from bridge.system.storage import kernel_cache
from tests.conftest import posix

Asked = Callable[[str | None], bool]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """asked(modalias): whether LLVM has to say what the CPU is, where Linux calls it so; None: where it does not."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_MODALIAS", tmp_path / "modalias")
    calls = []
    name = llvm.get_host_cpu_name()
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: calls.append(1) or name)

    def ask(modalias: str | None) -> bool:
        calls.clear()
        (tmp_path / "modalias").unlink(missing_ok=True)
        if modalias is not None:
            (tmp_path / "modalias").write_text(modalias)
        machine._seen_by_llvm.cache_clear()
        triple, cpu, features = machine._seen_by_llvm()
        assert (triple, cpu) == (llvm.get_process_triple(), name)
        assert features == dict(llvm.get_host_cpu_features().items())
        return bool(calls)

    yield ask
    machine._seen_by_llvm.cache_clear()


X86 = "cpu:type:x86,ven0002fam0019mod0001:feature:,0000,0001"


@posix
def test_a_kind_of_cpu_is_described_once(asked: Asked) -> None:
    assert [asked(X86), asked(X86)] == [True, False]
    assert [asked(X86 + ",0002"), asked(X86 + ",0002"), asked(X86)] == [True, False, False]


def test_where_linux_has_no_name_for_the_kind_llvm_is_asked(asked: Asked) -> None:
    for modalias in (None, "", "cpu:type:aarch64:feature:,0000,0001"):
        assert [asked(modalias), asked(modalias)] == [True, True]


@posix
def test_a_damaged_description_is_made_again(asked: Asked) -> None:
    assert asked(X86)
    (kept,) = kernel_cache.folder().glob("cpu-*.json")
    for contents in (b"", kept.read_bytes()[:-3], kernel_cache._sealed(b"not JSON"), kernel_cache._sealed(b"[1, 2]")):
        kept.write_bytes(contents)
        assert [asked(X86), asked(X86)] == [True, False]

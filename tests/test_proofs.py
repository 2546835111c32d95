"""Proofs are skipped only where nothing that they depend on has changed: tests/support/proofs.py on a small project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.closure import closure
from tests.support.places import PATIENCE, ROOT

PACKAGE = """
from pathlib import Path
_LAZY = {"late": "bridge.lazy", "later": "bridge.lazier"}
__path__.append(str(Path(__file__).parent.parent))
def __getattr__(name):
    import importlib
    if name not in _LAZY:
        raise AttributeError(name)
    return getattr(importlib.import_module(_LAZY[name]), name)
"""
VALUE = "late = later = value = 1\n"
PROOF = "import pytest\npytestmark = pytest.mark.proof\n"
CASES = {  # the source that a proof depends on, and the proof
    "bridge/plain.py": "import bridge.plain\ndef test(): assert bridge.plain.value",
    "bridge/member.py": "from bridge import member\ndef test(): assert member.value",
    "bridge/inner.py": "def test():\n    from bridge.inner import value\n    assert value",
    "bridge/lazy.py": "from bridge import late\ndef test(): assert late",
    "bridge/lazier.py": "import bridge as b\ndef test(): assert b.later",
    "bridge/some_kind.py": "from importlib import import_module\ndef test(): import_module(f'bridge.some_{\"kind\"}')",
    "bridge/patched.py": "def test(monkeypatch): monkeypatch.setattr('bridge.patched.value', 2)",
    "bridge/child.py": "PROGRAM = 'import bridge.child'\ndef test(): exec(PROGRAM)",
    "bridge/behind.py": "import bridge.before\ndef test(): assert bridge.before.value",
    "cuda/kernel.py": "from bridge.cuda.kernel import value\ndef test(): assert value",
    "scripts/tool.py": "import sys\nsys.path.append('scripts')\nimport tool\ndef test(): assert tool.value",
    "docs/table.md": "pytestmark = pytest.mark.proof('docs/*.md')\ndef test(): assert open('docs/table.md').read()",
    "tests/given.py": "def test(of_ours): assert of_ours",
}
KNOWN = "\n".join(f"def test_{i}(): pass" for i in range(5))  # they depend on no other source
NEVER = """
import bridge.plain
def test_fails(): assert not bridge.plain.value
def test_skips(): pytest.skip()
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_ends_badly(broken): pass
def test_edits(): open("bridge/plain.py", "a").write("# edited")
"""
ORDINARY = "def test(): pass"


def name_of(source: str) -> str:
    return "test_" + re.sub(r"\W", "_", source)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a proof for each source, more proofs, and a test that is none."""
    root = tmp_path / "project"
    for name in ("closure", "places", "proofs"):
        file = root / "tests" / "support" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "support" / f"{name}.py", file)
    for name in ("tests", "tests/support"):
        (root / name / "__init__.py").touch()
    (root / "tests" / "conftest.py").write_text(
        "pytest_plugins = ['tests.support.proofs']\nfrom tests.given import of_ours as of_ours"
    )
    for source, proof in CASES.items():
        (root / source).parent.mkdir(exist_ok=True)
        (root / source).write_text(VALUE)
        (root / "tests" / f"{name_of(source)}.py").write_text(PROOF + proof)
    (root / "bridge" / "__init__.py").write_text(PACKAGE)
    (root / "bridge" / "before.py").write_text("from .behind import value")
    (root / "tests" / "given.py").write_text("import pytest\n@pytest.fixture\ndef of_ours(): return 1\n")
    (root / "tests" / "test_known.py").write_text(PROOF + KNOWN)
    (root / "tests" / "test_never.py").write_text(PROOF + NEVER)
    (root / "tests" / "test_ordinary.py").write_text(ORDINARY)
    return root


def outcomes(root: Path, store: Path | None, **variables: str) -> tuple[dict[str, str], str]:
    """What became of each test, and all that pytest says."""
    environment = os.environ | {"PYTHONPATH": str(root)} | variables
    environment.pop("BRIDGE_TEST_CACHE", None)
    if store is not None:
        environment["BRIDGE_TEST_CACHE"] = str(store)
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    found = re.findall(r"^tests/(\w+)\.py::(\w+) ([A-Z]+)", done.stdout, re.M)
    return {f"{file}::{test}": outcome for file, test, outcome in found}, done.stdout


def skipped(root: Path, store: Path | None, **variables: str) -> set[str]:
    return {name for name, outcome in outcomes(root, store, **variables)[0].items() if outcome == "SKIPPED"}


def test_a_proof_is_skipped_until_something_that_it_depends_on_changes(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    cases = {f"{name_of(source)}::test" for source in CASES}
    known = {f"test_known::test_{i}" for i in range(5)}
    found, said = outcomes(project, store)
    assert found == dict.fromkeys({*cases, *known, "test_ordinary::test", "test_never::test_edits"}, "PASSED") | {
        "test_never::test_fails": "FAILED", "test_never::test_skips": "SKIPPED",
        "test_never::test_is_expected_to_fail": "XFAIL", "test_never::test_ends_badly": "ERROR",
    }  # fmt: skip
    assert "proved before" not in said

    found, said = outcomes(project, store)
    itself = {"test_never::test_skips"}
    edited = {f"{name_of('bridge/plain.py')}::test"}
    assert {name for name, outcome in found.items() if outcome == "SKIPPED"} == (cases - edited) | known | itself
    assert "proved before with the same sources: " in said
    assert f"{len(cases) - 1 + len(known)} of the skipped tests were proved before" in said
    assert skipped(project, None) == itself
    assert skipped(project, store, NUMBA_OPT="1") == itself

    for source in CASES:
        with (project / source).open("a") as file:
            file.write("# changed\n")
    assert skipped(project, store) == known | itself


def test_entries_that_are_damaged_or_another_tests_prove_nothing(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for file in (project / "tests").glob("test_*.py"):
        if file.name != "test_known.py":
            file.unlink()
    assert skipped(project, store) == set()
    entries = sorted(store.iterdir())
    contents = [entry.read_text() for entry in entries]
    assert len(set(contents)) == 5
    for entry, damage in zip(
        entries, (b"", b"\xff\xfe\0", contents[2][:20].encode(), contents[4].encode()), strict=False
    ):
        entry.write_bytes(damage)
    assert len(skipped(project, store)) == 1
    for entry, content in zip(entries, contents, strict=True):  # proved again
        assert content in entry.read_text()


def test_a_store_that_cannot_be_written_to_keeps_nothing(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("a file")
    found, _ = outcomes(project, store)
    assert found["test_known::test_0"] == "PASSED"


def test_the_closure_of_a_module_of_the_project() -> None:
    def names(module: str) -> set[str]:
        return {path.relative_to(ROOT).as_posix() for path in closure(module)}

    assert names("bridge.errors") == {"bridge/__init__.py", "bridge/errors.py"}
    assert "bridge/runtime/cpu/machine/intrinsics_neon.py" in names(
        "bridge.system.cpu.targets"
    )  # import_module(f"bridge...{name}")
    assert {"cuda/toolchain/launch.py", "bridge/blocks/k_quants/q4_k.py", "bridge/system/kernels/jit.py"} <= (
        matvec := names("bridge.cuda.product.matvec")
    )
    assert not {"bridge/conversion/converter.py", "bridge/cli/__init__.py"} & matvec  # `bridge` has them as lazy names
    with pytest.raises(ValueError, match="numpy is no module of"):
        closure("numpy")

"""The shape of the project: which part may import which, and what must never stand in cuda/."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# a part -> the parts of ours that it may import; modules beside them (errors, jit, ...) are free to all but blocks
ALLOWED = {
    "blocks": set(),
    "checkpoint": set(),
    "mapping": {"blocks", "checkpoint"},
    "models": set(),
    "runtime": {"blocks"},
}


def imported(module: Path) -> set[str]:
    """The dotted names of ours that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("bridge.")}


@pytest.mark.parametrize("part", ALLOWED)
def test_arrows_never_run_upward(part):
    for module in sorted((ROOT / "bridge" / part).rglob("*.py")):
        for name in imported(module):
            other = name.split(".")[1]
            assert other not in set(ALLOWED) - ALLOWED[part] - {part}, f"{module.name} imports {name}"
            if part == "blocks":
                assert other == "blocks", f"{module.name} imports {name}"


def test_nothing_in_cuda_shadows_nvidias_namespace():
    folder = ROOT / "cuda"
    shadowing = ["__init__.py", "core.py", "core", "pathfinder.py", "pathfinder", "bindings.py", "bindings"]
    assert not [name for name in shadowing if (folder / name).exists()]


def test_every_package_is_installed():
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("packages = [")[1].split("]")[0]
    packages = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "bridge").rglob("__init__.py")}
    assert {name.strip().strip('"') for name in listed.split(",") if name.strip()} >= packages

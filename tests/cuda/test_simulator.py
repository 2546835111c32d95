"""The kernels in Numba's CUDA simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import proofs
from tests.support.places import ROOT

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


CASES = sorted((ROOT / "tests" / "simulator").glob("*_cases.py"))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            path, id=path.stem, marks=pytest.mark.proof(f"tests/simulator/{path.name}", "tests/simulator/conftest.py")
        )
        for path in CASES
    ],
)
def test_all_cases_hold_in_the_simulator(cases: Path) -> None:
    """In a process of its own: the simulator is chosen before Numba is imported, and importing torch costs seconds.

    None of the cases may be skipped, or taken as proved: they are proved together, by this test.
    """
    environment = {name: value for name, value in os.environ.items() if name != proofs.FOLDER}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
        cwd=ROOT,
        env=environment | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout

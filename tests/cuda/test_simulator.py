"""The kernels in Numba's CUDA simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


CASES = sorted((ROOT / "tests" / "simulator").glob("*_cases.py"))


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_all_cases_hold_in_the_simulator(cases: Path) -> None:
    """In a process of its own: the simulator is chosen before Numba is imported, and importing torch costs seconds.

    None of the cases may be skipped.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout

"""The kernels in Numba's CUDA simulator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


def test_all_cases_hold_in_the_simulator() -> None:
    """In one process of its own: the simulator is chosen before Numba is imported, and importing torch costs seconds.

    None of the cases may be skipped.
    """
    cases = map(str, sorted((ROOT / "tests" / "simulator").glob("*_cases.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *cases],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout

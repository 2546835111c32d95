"""Test files that must run in Numba's CUDA simulator, which is chosen before Numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np

from tests.conftest import ROOT


def run_cases(name: str) -> None:
    """Run tests/simulator/<name> in a process of its own; all of it must pass, and nothing be skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(ROOT / "tests" / "simulator" / name)],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def on_host(memory: Any) -> np.ndarray:
    """The contents of device memory as a plain array: the simulator wraps its arrays."""
    return np.asarray(memory.copy_to_host() if hasattr(memory, "copy_to_host") else memory)

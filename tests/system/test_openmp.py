"""OpenMP's threads sleep when they have nothing to do."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code", ["import bridge.quantize", "import bridge.nn", "import bridge.cli; bridge.cli.main(['inspect', 'none'])"]
)
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_openmp_is_told_before_torch_is_loaded(code: str, given: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    code = f"{code}\nimport os, sys; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split()[-2:] == ["False", given or "PASSIVE"]

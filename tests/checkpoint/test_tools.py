"""Checkpoints that other tools wrote (tests/support/make_tools.py) are the floats that these tools compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from tests.conftest import ROOT

FOLDERS = sorted((ROOT / "tests" / "data" / "tools").iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_those_that_the_tool_computes(folder: Path) -> None:
    expected = dict(np.load(folder / "expected.npz"))
    rows = np.array([9, 2, 3])
    with open_checkpoint(folder) as checkpoint:
        floats = {name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")}
        assert {*checkpoint.modules} | floats == {*expected}
        assert not [note for note in checkpoint.notes if "unknown purpose" in note]
        for name, values in expected.items():
            if name in checkpoint.modules:
                weights = checkpoint.read_module(name).dequantize()
                some = checkpoint.read_module(name, rows).dequantize()
                assert checkpoint.read_module(name).noise() > 0
            else:
                weights = checkpoint.read_float(f"{name}.weight")
                some = np.concatenate([checkpoint.read_float(f"{name}.weight", (r, r + 1)) for r in rows])
            error = np.square(weights - values, dtype=np.float64).sum() / np.square(values, dtype=np.float64).sum()
            assert error <= 1e-12, name
            assert np.array_equal(some, weights[rows]), name

"""A layer's codes do not depend on how many threads its rows are divided among."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.quantize import Method, superblocks
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.hessian import Hessian
from bridge.system.cpu import row_threads


def codes(threads: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Of rows that are many enough for each thread to have some."""
    monkeypatch.setattr(row_threads, "usable_cpus", lambda: threads)
    monkeypatch.setattr(row_threads, "_pool", row_threads._Pool())
    random = torch.Generator().manual_seed(0)
    x = torch.randn(600, 256, generator=random)
    hessian = Hessian("layer", 256)
    hessian.add(x, x + 0.1 * torch.randn(600, 256, generator=random))
    weight = torch.randn(1100, 256, generator=random)
    return Method(superblocks("Q4_K"), sweeps=1).layer(LayerInput("layer", weight, hessian))[1].codes


def test_sixteen_threads_on_any_number_of_cores_give_the_codes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_array_equal(codes(16, monkeypatch), codes(1, monkeypatch))

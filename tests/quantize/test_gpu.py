"""Calibration on a GPU, by tensors in disguise: they lie on the CPU, and meet its tensors in copies alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize import Method, quantize_block, superblocks
from bridge.quantize.model.block_inputs import ActivationStore, BlockInputs
from bridge.quantize.settings import Calibration


def quantized(device: str) -> tuple[list[np.ndarray], set[torch.device]]:
    """The codes of two layers, and where the inputs of the second block were kept."""
    random = torch.Generator().manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False))
    for layer in (block[0], block[2]):
        values = torch.randn(layer.weight.shape, generator=random)  # type: ignore[union-attr, arg-type]
        layer.weight = nn.Parameter(values.to(device), requires_grad=False)
    batches = [BlockInputs(torch.randn(200, 64, generator=random).to(device)) for _ in range(2)]
    method = Method(superblocks("Q4_0"), alpha=0.0)
    codes = [done.codes for _, done in quantize_block(block, batches, method.layer)]
    places = set()
    with ActivationStore(None) as store:
        for batch in batches:
            batch.store = store
            batch.advance(batch.run(block))
            assert batch.value().device == batches[0].value().device == torch.device(device)
            places.add(batch.x._x.device)
    return codes, places


def test_a_gpu_gives_the_codes_of_the_cpu_and_keeps_activations_in_the_hosts_memory() -> None:
    from tests.support.gpu.disguise import disguised_gpu

    expected, _ = quantized("cpu")
    with disguised_gpu():
        found, places = quantized("cuda:0")
    assert places == {torch.device("cpu")}
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_auto_is_the_gpu_where_there_is_one() -> None:
    options: dict[str, Any] = {"text": None, "method": "gptq"}
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert Calibration(**options, device="auto").device == "cuda"
        assert Calibration(**options, device="cuda:1").device == "cuda:1"
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert Calibration(**options, device="auto").device == "cpu"
        with pytest.raises(BridgeError, match="sees no GPU"):
            Calibration(**options, device="cuda")
    with pytest.raises(BridgeError, match="choose cpu, cuda or auto"):
        Calibration(**options, device="tpu")

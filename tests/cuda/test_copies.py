"""Copies of what lies on a GPU: deep ones share its memory, pickled ones are uploaded again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.nn import QuantExperts, QuantLinear
from bridge.nn.quant_experts import ExpertStack, Gated
from bridge.trellis import BitshiftCodebook
from bridge.trellis.gemm import layer_of
from tests.support.encode_trellis import Coding, plain_tensors
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.disguise import disguised_gpu
from tests.support.random_blocks import random_matrix

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


def quantized() -> Any:
    return random_matrix(TYPES["Q4_0"], 6, 64)[0]


def trellis() -> Any:
    tensors, _ = plain_tensors("m", (32, 64), Coding("1mad"))
    words, su, sv = (tensors[f"m.{part}"] for part in ("trellis", "SU", "SV"))
    return layer_of(words, BitshiftCodebook(), 16, 16, 32.0, su, sv)


def stack() -> ExpertStack:
    networks = [tuple(random_matrix(TYPES["Q4_0"], 64, 64, seed=3 * e + part)[0] for part in range(3)) for e in (0, 1)]
    return ExpertStack(networks, Gated(torch.nn.functional.silu), tuple(torch.ones(2, 64) for _ in range(3)))


def test_a_layer_of_experts_on_a_gpu_is_copied_and_saved_for_any_device() -> None:
    here = QuantExperts(stack())
    with disguised_gpu():
        moved = QuantExperts(stack()).to("cuda:0")
        again = copy.deepcopy(moved)
        for one, other in zip(again.tensor.networks, moved.tensor.networks, strict=True):
            assert all(a is b for a, b in zip(one, other, strict=True))
        assert str(again.place.device) == again.tensor.device == "cuda:0"
        state = moved.__getstate__()
    state["_buffers"] = here._buffers  # as torch.load(map_location="cpu") makes them
    loaded = QuantExperts.__new__(QuantExperts)
    loaded.__setstate__(pickle.loads(pickle.dumps(state)))
    given = torch.ones(1, 64), torch.tensor([[1]]), torch.tensor([[0.5]])
    torch.testing.assert_close(loaded(*given), here(*given))


@pytest.mark.parametrize("make", [quantized, trellis])
def test_a_deep_copy_shares_the_weights_and_a_pickled_one_has_its_own(make: Any) -> None:
    with pretended_gpu():
        there = make().to("cuda")
        for one in (there, there.to("cpu")):
            assert copy.deepcopy([one])[0] is one
            again = pickle.loads(pickle.dumps(one))
            assert again is not one
            assert (again.name, again.type, again.shape) == (one.name, one.type, one.shape)
            np.testing.assert_array_equal(again.to("cpu").dequantize(), one.to("cpu").dequantize())
        assert pickle.loads(pickle.dumps(there)).device == "cuda:0"


@pytest.mark.parametrize("make", [quantized, trellis])
def test_what_was_prepared_is_again_when_it_has_been_pickled(make: Any) -> None:
    x, tensor = np.ones((2, 64), np.float32), make()
    unprepared = pickle.loads(pickle.dumps(tensor))
    expected = tensor.prepare().matmul(x)
    again = pickle.loads(pickle.dumps(tensor))
    np.testing.assert_array_equal(again.matmul(x), expected)
    if make is quantized:
        assert (unprepared.prepared, again.prepared) == (False, True)
    else:
        assert ["_fused" in one.__dict__ for one in (unprepared, again)] == [False, True]


@pytest.mark.parametrize("make", [quantized, trellis])
def test_the_repacked_copy_is_given_back_on_a_gpu_and_made_again_on_the_cpu(make: Any) -> None:
    tensor = make()
    layer = QuantLinear(tensor.prepare())
    kept = weakref.ref(tensor._engine if make is quantized else tensor._fused)
    with disguised_gpu():
        layer.to("cuda:0")
        gc.collect()
        assert kept() is None
        assert not tensor.prepared
        assert layer.to("cpu").tensor is tensor
    assert tensor.prepared
    other = QuantLinear(make())
    with disguised_gpu():
        other.to("cuda:0").to("cpu")
    assert not other.tensor.prepared


@pytest.mark.parametrize("make", [quantized, trellis])
def test_a_module_on_a_gpu_is_copied_and_saved_for_any_device(make: Any) -> None:
    here = QuantLinear(make())
    with disguised_gpu():
        moved = QuantLinear(make()).to("cuda:0")
        again = copy.deepcopy(moved)
        assert again.tensor is moved.tensor
        assert again.number != moved.number
        assert str(again.place.device) == "cuda:0"
        state = moved.__getstate__()
    state["_buffers"] = here._buffers  # as torch.load(map_location="cpu") makes them
    file = io.BytesIO()
    loaded = QuantLinear.__new__(QuantLinear)
    loaded.__setstate__(pickle.loads(pickle.dumps(state)))
    torch.save(loaded, file)
    file.seek(0)
    last = torch.load(file, weights_only=False)
    assert type(last.tensor) is type(here.tensor)
    torch.testing.assert_close(last(torch.ones(1, 64)), here(torch.ones(1, 64)))

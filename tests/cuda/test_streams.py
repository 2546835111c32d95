"""Weights that are used on other streams than their upload's: torch is told, and nothing of an upload is left to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bridge.blocks import TYPES
from bridge.runtime.quant_tensor import QuantTensor
from bridge.trellis import BitshiftCodebook
from bridge.trellis.gemm import layer_of
from tests.support.cuda_driver import H200, Driver
from tests.support.encode_trellis import Coding, plain_tensors
from tests.support.gpu.disguise import OnCuda, disguised_gpu
from tests.support.random_blocks import random_matrix

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def floats(type: str) -> QuantTensor:
    """Ones [6, 64]."""
    return QuantTensor("w", type, (6, 64), torch.ones(6, 64, dtype=FLOATS[type]).view(torch.uint8).numpy().reshape(-1))


def of_type(type: str) -> Callable[[Any], tuple[Any, list[Any]]]:
    def make(device: Any) -> tuple[Any, list[Any]]:
        from bridge.cuda.tensor import CudaTensor

        tensor: Any = CudaTensor(random_matrix(TYPES[type], 6, 64)[0] if type in TYPES else floats(type), device)
        return tensor, [tensor.matrix.buffer if type in TYPES else tensor.matrix.weight]

    return make


def trellis(device: Any) -> tuple[Any, list[Any]]:
    from bridge.cuda.trellis_layer import CudaTrellisLayer

    tensors, _ = plain_tensors("m", (32, 64), Coding("1mad"))
    words, su, sv = (tensors[f"m.{part}"] for part in ("trellis", "SU", "SV"))
    layer = CudaTrellisLayer(layer_of(words, BitshiftCodebook(), 16, 16, 32.0, su, sv), device)
    fused = layer._fused
    return layer, [fused.words, fused.table, fused.bases, fused.members, fused.places, layer._su, layer._sv]


USES: dict[str, Callable[[Any], Any]] = {
    "matvec": lambda w: w.matvec(torch.ones(w.shape[1])),
    "matmul": lambda w: w.matmul(torch.ones(3, w.shape[1])),
    "matmul, tensor cores": lambda w: w.matmul(torch.ones(30, w.shape[1])),
    "matmul, floats": lambda w: w.matmul(torch.ones(100, w.shape[1], dtype=torch.float16)),
    "affine": lambda w: w.affine(torch.ones(3, w.shape[1]), torch.ones(w.shape[0])),
    "dequantize": lambda w: w.dequantize(),
    "rows": lambda w: w.rows(torch.tensor([1])),
}
OF_TRELLIS = "matvec", "matmul", "matmul, tensor cores"


@pytest.mark.parametrize(
    ("make", "use"),
    [
        *(pytest.param(of_type(type), use, id=f"{type}, {use}") for type in ("Q4_0", "F16") for use in USES),
        *(pytest.param(trellis, use, id=f"trellis, {use}") for use in OF_TRELLIS),
    ],
)
def test_torch_is_told_once_of_each_stream_that_uses_weights(make: Any, use: str, driver: Driver) -> None:
    """Otherwise what is dropped while a product of that stream is queued becomes the next tensor's memory."""
    from bridge.cuda.toolchain import device as devices

    tensor, held = make(devices.Device(0, *H200))
    assert driver.recorded == []
    for stream in (7, 11, 7, 7, 11, 11):
        with mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=stream)):
            USES[use](tensor)
        assert (held[0].data_ptr(), stream) in driver.recorded
    assert sorted(driver.recorded) == sorted((part.data_ptr(), stream) for part in held for stream in (7, 11))


def test_torch_is_told_of_each_stream_that_uses_the_weights_of_experts(driver: Driver) -> None:
    from bridge.cuda.product.experts import ExpertMatrices
    from bridge.cuda.toolchain import device as devices

    stack = ExpertMatrices([[random_matrix(TYPES["Q4_0"], 6, 64, e)[0]] for e in range(2)], devices.Device(0, *H200))
    for stream in (7, 11, 7):
        with mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=stream)):
            stack.multiply(stack.records(torch.ones(1, 64), "int8"), torch.tensor([1]))
    assert driver.recorded == [(stack.buffer.data_ptr(), stream) for stream in (7, 11)]


def test_a_stream_that_is_captured_is_told_of_once_it_runs(driver: Driver) -> None:
    """torch forgets what it is told during a capture."""
    from bridge.cuda.toolchain import device as devices

    tensor, held = of_type("Q4_0")(devices.Device(0, *H200))
    USES["matvec"](tensor)
    driver.recorded.clear()
    with mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=7)):
        with mock.patch.object(devices, "capturing", return_value=True):
            USES["matvec"](tensor)
        assert driver.recorded == []
        USES["matvec"](tensor)
    assert driver.recorded == [(held[0].data_ptr(), 7)]


@pytest.mark.parametrize("type", FLOATS)
def test_an_upload_of_floats_ends_with_copies_from_the_host_which_torch_waits_for(type: str) -> None:
    """What the GPU would round is queued on the upload's stream, and another one would read it too soon."""
    from bridge.cuda.forms.matrix import FloatMatrix
    from bridge.cuda.toolchain.device import require

    queued: list[str] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = function._schema
            on_gpu = [isinstance(part, OnCuda) for part in args]
            if any(on_gpu) and not any(
                result.alias_info and not result.alias_info.is_write for result in schema.returns
            ):
                rounds = function is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype
                queued.append(f"{schema.name}{' of the host' * (on_gpu == [True, False])}{', rounded' * rounds}")
            return function(*args, **kwargs or {})

    with disguised_gpu(), mock.patch("bridge.cuda.forms.matrix._FLOATS", 4 * 64), Seen():
        FloatMatrix(floats(type), require("cuda"))
    assert queued == ["aten::copy_ of the host"] * 2

"""Steps captured in CUDA graphs, on the machine of tests/support/gpu: what is recorded, replayed and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.reader import open_gguf
from bridge.runtime.sampling import Sampler, Sampling
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.memory import GpuError
from tests.support.random_blocks import random_matrix
from tests.support.tiny_gguf import write_decoder

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("Q4_0"),
    pytest.mark.proof,
]


@pytest.fixture
def gpu() -> Iterator[Any]:
    with pretended_gpu(graphs=True, overlapping=True) as launches:
        yield launches


def decoder(path: Path, **options: Any) -> Any:
    from bridge.cuda.decoder import Decoder

    options = {"types": {"output": "F16"}} | options  # one product is torch's
    file = open_gguf(write_decoder(path / "tiny.gguf", **options))
    made = Decoder(file, read_config(file.metadata, file.path), 11, "f16", "f32", "cuda")
    made.prepare()
    return made


def test_captured_steps_make_the_tokens_that_launches_make(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.cuda.decoder._GRAPHS", 2)
    device = decoder(tmp_path)
    prompt = list(range(9))
    # more ways of sampling than graphs are kept for, and one of them again
    hows = [Sampling(0), Sampling(0.9, 3, 0.95, 0.02, seed=1), Sampling(0.9, 0, seed=2), Sampling(1.0, 3, seed=3)]
    drawn = []
    for how in hows:
        drawn.append(list(device.draw(prompt, Sampler(how))))
        assert len(drawn[-1]) == 3
    assert list(device._captured) == [None, 3]
    on_host = Sampling(0.9, 3, seed=4, repeat_penalty=3.0, logit_bias={4: 2.0})
    captured = list(device.draw(prompt, Sampler(on_host, logprobs=2)))
    with pytest.MonkeyPatch.context() as patch:  # nothing is launched but the graph
        patch.setattr(device, "_launch", None)
        assert captured == list(device.draw(prompt, Sampler(on_host)))
    device.graphs = False
    for how, tokens in ((hows[0], drawn[0]), (hows[1], drawn[1]), (on_host, captured)):
        assert list(device.draw(prompt, Sampler(how))) == tokens
    device.graphs = True
    device.build()
    assert device.cache.length == 0  # a row that holds nothing is there for the first run
    assert list(device.draw(prompt, Sampler(hows[1]))) == drawn[1]
    assert len(gpu.dependent) > 100


@pytest.mark.parametrize(
    "how", [Sampling(0), Sampling(0.9, 3, seed=1), Sampling(0, repeat_penalty=2.0)], ids=["greedy", "drawn", "on host"]
)
def test_a_captured_step_whose_logits_are_not_finite_is_an_error(how: Sampling, gpu: Any, tmp_path: Path) -> None:
    device = decoder(tmp_path)
    output = device.weights.stack([(device.weights.model.output, None)]).parts[0][1].weight
    stream = device.draw(list(range(5)), Sampler(how))
    next(stream)
    output[7] = float("nan")
    with pytest.raises(BridgeError, match="for the next token: the file is damaged"):
        list(stream)
    output[7] = 0
    assert len(list(device.draw(list(range(9)), Sampler(how)))) == 3


def test_a_capture_changes_nothing_and_its_replay_reads_what_is_there_then(gpu: Any, tmp_path: Path) -> None:
    from bridge.cuda.toolchain.launch import captured

    state, x, y = torch.zeros(4, dtype=torch.int32), torch.ones(3), torch.zeros(3)

    def step() -> None:
        state.add_(1)
        y.copy_(x * 2 + y)

    graph = captured(step, state)
    assert state.tolist() == [0] * 4
    assert y.tolist() == [2] * 3  # the run before the capture, not the capture
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert y.tolist() == [22] * 3
    assert state.tolist() == [2] * 4


def test_products_of_a_tensor_can_be_captured_once_they_have_run(gpu: Any) -> None:
    tensor, weights = random_matrix(BLOCKS["Q4_0"], 4, 96)
    moved = tensor.to("cuda")
    x = torch.zeros(96)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(GpuError, match="is compiled while a graph is captured"),
        torch.cuda.graph(graph),
    ):
        moved.matvec(x)
    moved.matvec(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moved.matvec(x)
    x.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal(96).astype(np.float32)))
    graph.replay()
    torch.testing.assert_close(y, torch.from_numpy(x.numpy() @ weights.T).float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("type", ["Q4_0", "F16"])
def test_look_ups_of_rows_can_be_captured_and_rows_that_are_not_there_are_nan(type: str, gpu: Any) -> None:
    raw = random_matrix(BLOCKS["Q4_0"], 4, 96)[0] if type == "Q4_0" else _halves(4, 96)
    moved, wanted = raw.to("cuda"), raw.dequantize()
    ids = torch.tensor([3, 0, 1, 1])
    moved.rows(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moved.rows(ids)
    ids.copy_(torch.tensor([2, 4, -1, 2**32]))
    graph.replay()
    torch.testing.assert_close(found[0], torch.from_numpy(wanted[2]))
    assert found.isnan().all(-1).tolist() == [False, True, True, True]


def test_a_gradient_of_a_tensor_s_input_can_be_captured_once_it_has_run(gpu: Any) -> None:
    """Its look-ups of rows took numbers from the host."""
    from bridge.nn.torch_ops import number_of, product_gradient

    tensor, weights = random_matrix(BLOCKS["Q4_0"], 4, 96)
    moved, y = tensor.to("cuda"), torch.zeros(2, 4)
    backward, number = product_gradient._init_fn, number_of(moved)
    backward(y, number, 96)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(y, number, 96)
    y.copy_(torch.tensor([[1.0, -2, 3, 0.5], [0, 1, 0, 0]]))
    graph.replay()
    torch.testing.assert_close(found, (y.double() @ torch.from_numpy(weights)).float())


def _halves(rows: int, columns: int) -> QuantTensor:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16)
    return QuantTensor("w", "F16", (rows, columns), values.reshape(-1).view(np.uint8))


def test_what_may_not_happen_in_a_capture_is_an_error_here_too(gpu: Any) -> None:
    from bridge.cuda.norm import activation_kernel

    x = torch.ones(3)
    for wrong in (
        lambda: x.sum().item(),
        torch.cuda.synchronize,
        lambda: torch.cuda.Event().synchronize(),
        lambda: activation_kernel(True).launch(1, 32, 0),
    ):
        with pytest.raises(GpuError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrong()

"""Layers with a state on a GPU that NumPy plays: what the formulas say, however the tokens are read."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import CONVOLUTION, DELTA, MAMBA, MAMBA1
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.layers.layers import Recurrent
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.plain_recurrent import SHAPES, plain_layer, random_layer

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("recurrent"),
    pytest.mark.proof,
]

LAUNCHES = {CONVOLUTION: 1, DELTA: 3, MAMBA: 3, MAMBA1: 3}
ALL = SHAPES | {
    "a delta net, heads of 40": RecurrentConfig(DELTA, (True,), 4, 2 * 1 * 40 + 2 * 36, 2, 1, 40, 36),
    "Mamba": RecurrentConfig(MAMBA1, (True,), 4, 76, 1, 1, 16, 76, rank=5),
    "Mamba, states of 6": RecurrentConfig(MAMBA1, (True,), 3, 40, 1, 1, 6, 40, rank=33),
}
EPS = 1e-5


class OnDevice:
    """A layer and its state, read in parts."""

    def __init__(self, c: RecurrentConfig, layer: Recurrent):
        from bridge.cuda.recurrent.layer import DeviceRecurrent, DeviceState
        from bridge.cuda.toolchain.device import require

        device = require("cuda")
        matrices = [torch.from_numpy(matrix.dequantize()) for matrix in layer.second]
        second = [lambda x, w=w: x @ w.T for w in matrices]
        self.layer, self.state = DeviceRecurrent(layer, c, EPS, device, second), DeviceState(c, device)

    def read(self, inputs: list[np.ndarray], first: int, stop: int, dependent: bool = False) -> np.ndarray:
        rows = [torch.from_numpy(part[first:stop]) for part in inputs]
        return self.layer.advance(rows, self.state.tails[0], self.state.heads[0], dependent).numpy()


def check(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shape", ALL)
def test_a_layer_is_that_of_the_formulas_however_its_tokens_are_read(shape: str) -> None:
    c = ALL[shape]
    layer, inputs = random_layer(c, 40)
    expected = plain_layer(c, layer, inputs, EPS)
    with pretended_gpu() as gpu:
        device = OnDevice(c, layer)
        check(device.read(inputs, 0, 40), expected)
        assert len(gpu.names) == LAUNCHES[c.kind]
        device.state.reset()
        cuts = [0, 1, 6, 7, 8, 31, 40]  # fewer tokens than the convolution sees, and more than are loaded together
        check(np.concatenate([device.read(inputs, *cut) for cut in pairwise(cuts)]), expected)


@pytest.mark.parametrize("shape", ["a short convolution", "a delta net", "Mamba-2", "Mamba"])
def test_launches_that_may_begin_early_wait_for_those_before_and_give_the_same(shape: str) -> None:
    c = ALL[shape]
    layer, inputs = random_layer(c, 5)
    with pretended_gpu(overlapping=True) as gpu:
        device = OnDevice(c, layer)
        found = [device.read(inputs, *cut, dependent=True) for cut in ((0, 4), (4, 5))]
        assert gpu.dependent == gpu.names
    check(np.concatenate(found), plain_layer(c, layer, inputs, EPS))


def test_mamba_2_without_a_norm_is_two_launches() -> None:
    c = ALL["Mamba-2"]
    layer, inputs = random_layer(c, 3)
    layer.norm = None
    with pretended_gpu() as gpu:
        check(OnDevice(c, layer).read(inputs, 0, 3), plain_layer(c, layer, inputs, EPS))
        assert len(gpu.names) == 2


@pytest.mark.parametrize("shape", ["a short convolution", "a delta net", "a delta net, joined"])
def test_inputs_may_be_parts_of_longer_rows(shape: str) -> None:
    c = ALL[shape]
    layer, inputs = random_layer(c, 3)
    expected = plain_layer(c, layer, inputs, EPS)
    widths = [part.shape[1] for part in inputs]
    parts = np.split(np.concatenate([np.ones((3, 5), np.float32), *inputs], 1), np.cumsum([5, *widths[:-1]]), 1)[1:]
    with pretended_gpu():
        check(OnDevice(c, layer).read(parts, 0, 3), expected)


@pytest.mark.parametrize("shape", ["a short convolution", "a delta net", "Mamba"])
def test_a_state_goes_back_to_what_was_saved(shape: str) -> None:
    c = ALL[shape]
    layer, inputs = random_layer(c, 9)
    expected = plain_layer(c, layer, inputs, EPS)
    with pretended_gpu():
        device = OnDevice(c, layer)
        device.read(inputs, 0, 4)
        snapshot = device.state.save()
        assert snapshot.nbytes == 4 * (c.heads * c.key_dim * c.value_dim + (c.kernel - 1) * c.channels)
        device.read(inputs, 4, 8)
        device.state.restore(snapshot)
        check(device.read(inputs, 4, 9), expected[4:])


def test_a_prompt_that_is_read_again_costs_no_copy_of_another_state() -> None:
    from bridge.cuda.attention.kv_cache import KVCache
    from bridge.cuda.toolchain.device import require

    config: Any = SimpleNamespace(latent=None, recurrent=ALL["Mamba-2"], stored={})
    with pretended_gpu():
        cache = KVCache(config, 16)
        cache.reserve(require("cuda"))
        for count in (2, 2, 2, 2, 0, 0):
            cache.advance(count)
            cache.remember()
        assert [cache.reach(count) for count in (1, 3, 5, 7)] == [0, 2, 4, 6]


def test_after_a_step_of_several_tokens_the_length_may_be_that_after_any() -> None:
    """Set down and up until tokens follow; then what lies beyond is forgotten."""
    from bridge.cuda.attention.kv_cache import KVCache
    from bridge.cuda.toolchain.device import require

    config: Any = SimpleNamespace(latent=None, recurrent=ALL["Mamba-2"], stored={})
    with pretended_gpu():
        cache = KVCache(config, 16)
        cache.reserve(require("cuda"))
        cache.reserve_step(3)
        assert cache.state is not None
        cache.advance(2)
        for after, state in zip((3, 4, 5), (*cache.passed, cache.state), strict=True):
            state.memory.fill_(after)
        cache.stepped(3)
        assert [cache.reach(count) for count in (2, 3, 4, 5, 6)] == [0, 3, 4, 5, 5]
        for length in (3, 5, 4):
            cache.length = length
        cache.come_back_to(4)
        cache.settle()
        assert (cache.state.memory == 4).all()
        with pytest.raises(BridgeError, match="the state after 5 of 4 tokens is not kept; read them again"):
            cache.length = 5
        cache.state.memory.fill_(6)
        cache.advance(2)
        cache.length = 4
        cache.settle()
        assert (cache.state.memory == 4).all()
        cache.length = 0
        cache.settle()
        assert not cache.state.memory.any()
        assert cache.reach(3) == 0


def test_the_layers_states_lie_apart() -> None:
    from bridge.cuda.recurrent.layer import DeviceState
    from bridge.cuda.toolchain.device import require

    c = ALL["Mamba-2"]
    with pretended_gpu():
        state = DeviceState(RecurrentConfig(**{**vars(c), "layers": (True, False, True)}), require("cuda"))
    assert state.heads.shape == (2, c.heads, c.value_dim, c.key_dim)
    assert state.tails.shape == (2, c.kernel - 1, c.channels)
    state.heads[1] = 1
    state.tails[0] = 2
    assert (state.heads.sum(), state.tails.sum()) == (state.heads[1].numel(), 2 * state.tails[0].numel())


@pytest.mark.parametrize("shape", ["a short convolution", "a delta net", "Mamba-2", "Mamba"])
def test_a_captured_step_reads_and_changes_the_state_of_its_replay(shape: str) -> None:
    c = ALL[shape]
    layer, inputs = random_layer(c, 6)
    rows = [torch.from_numpy(part[:1].copy()) for part in inputs]
    with pretended_gpu(graphs=True):
        device = OnDevice(c, layer)
        device.layer.advance(rows, device.state.tails[0], device.state.heads[0])  # compiles
        device.state.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = device.layer.advance(rows, device.state.tails[0], device.state.heads[0])
        found = []
        for t in range(6):
            for row, part in zip(rows, inputs, strict=True):
                row.copy_(torch.from_numpy(part[t : t + 1]))
            graph.replay()
            found.append(y.numpy().copy())
    check(np.concatenate(found), plain_layer(c, layer, inputs, EPS))


# machine code at the sizes of models

MODELS = {
    "LFM2 1.2B": RecurrentConfig(CONVOLUTION, (True,), 3, 2048),
    "Qwen3-Next": RecurrentConfig(DELTA, (True,), 4, 8192, 32, 16, 128, 128, joined=True),
    "Granite 4": RecurrentConfig(MAMBA, (True,), 4, 8192 + 2 * 128, 128, 1, 128, 64),
    "Nemotron-H": RecurrentConfig(MAMBA, (True,), 4, 8192 + 2 * 8 * 128, 128, 8, 128, 64),
    "Falcon-H1": RecurrentConfig(MAMBA, (True,), 4, 3072 + 2 * 2 * 256, 24, 2, 256, 128, may_lack_norm=True),
    "Jamba": RecurrentConfig(MAMBA1, (True,), 4, 8192, 1, 1, 16, 8192, rank=256),
}


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param((9, 0), id="9.0"),
        pytest.param((8, 0), id="8.0", marks=pytest.mark.exhaustive),
        pytest.param((8, 9), id="8.9", marks=pytest.mark.exhaustive),
        pytest.param((12, 0), id="12.0", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_machine_code_keeps_a_state_in_registers_and_moves_it_sixteen_bytes_at_a_time(
    model: str, capability: tuple[int, int]
) -> None:
    from bridge.cuda.recurrent.convolve import convolve_kernel
    from bridge.cuda.recurrent.norms import end_kernel, split_kernel
    from bridge.cuda.recurrent.recur import recur_kernel

    c = MODELS[model]
    made_by = {
        CONVOLUTION: [], DELTA: [recur_kernel, end_kernel], MAMBA: [recur_kernel, end_kernel],
        MAMBA1: [recur_kernel, split_kernel],
    }  # fmt: skip
    for make in [convolve_kernel, *made_by[c.kind]]:
        kernel = make(c, capability >= (9, 0))
        made = ptx.assembled(ptx.ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
        assert made.ptx.count("griddepcontrol.wait") == kernel.dependent, kernel.name
        assert (made.stack, made.spills) == (0, 0), kernel.name
        assert ".local" not in made.ptx, kernel.name
        assert "ld.global.nc" not in made.ptx, kernel.name
        if make is recur_kernel:
            elements = 4 if c.kind == MAMBA1 else 16  # of a thread
            assert made.ptx.count("st.global.v4") == elements // 4
            waiting = made.ptx.partition("griddepcontrol.wait")[0]
            assert waiting.count("prefetch.global.L2") == elements // 4 * kernel.dependent

"""A decoder's mixture of experts on a GPU that NumPy plays, against the CPU's `mix`: one token, a few, and prompts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.runtime.config.decoder_config import DecoderConfig, Routing
from bridge.runtime.decoder.experts import mix, route
from bridge.runtime.layers.layers import Experts
from tests.support import ptx
from tests.support.gpu import costs
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.memory import GpuError
from tests.support.random_blocks import random_matrix

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.product import matvec_kernel, routing
from bridge.cuda.product.matmul import LENGTHS, Multiplier
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.product.products import device_bytes as matrix_bytes
from bridge.cuda.product.routing import choose_kernel, weigh_kernel
from bridge.cuda.routed_experts import DeviceExperts
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.launch import Kernel, noted

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("Q4_0"),
    pytest.mark.proof,
]

HIDDEN, INNER, LATENT, COUNT = 64, 192, 32, 12
TWO = Routing(used=2)


def device_bytes(experts: Experts, precision: str) -> int:
    """Bytes that a layer of experts takes on the device."""
    others = [experts.shorten, experts.lengthen, *(experts.shared or ())]
    matrices = [m for m in others if m is not None]
    matrices += [m for network in experts.networks for m in network if m is not None]
    vectors = [experts.router, experts.router_bias, experts.choice_bias, experts.shared_gate, *(experts.biases or ())]
    return sum(matrix_bytes(m, precision) for m in matrices) + sum(v.nbytes for v in vectors if v is not None)


def exactly(matrix: QuantTensor, x: np.ndarray) -> np.ndarray:
    """W x of floats."""
    return np.asarray(matrix.matmul(x, precision="f32"))


def matrix(type: str, rows: int, columns: int, seed: int) -> QuantTensor:
    if type != "F16":
        factor = np.array([(1 + seed / 50) / 512], np.float32) if type == "NVFP4" else None
        return random_matrix(TYPES[type], rows, columns, seed, factor)[0]
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16) / 8
    return QuantTensor(f"w{seed}", "F16", (rows, columns), values.reshape(-1).view(np.uint8))


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer(
    how: Routing = TWO, activation: str = "silu", types: str = "Q4_0 Q4_0 Q4_0", biased: bool = False,
    router_bias: bool = False, choice_bias: bool = False, shared: bool = False, gated: bool = False,
    short: bool = False, limits: tuple[float, float] = (0.0, 0.0),
) -> tuple[Experts, Any]:  # fmt: skip
    """Experts of types of gate, up (- if there is none) and down, and a config."""
    outer = LATENT if short else HIDDEN
    shapes = [(INNER, outer), (INNER, outer), (outer, INNER)]

    def network(types: str, seed: int, shapes: list[tuple[int, int]]) -> Any:
        pairs = enumerate(zip(types.split(), shapes, strict=True))
        return tuple(None if type == "-" else matrix(type, *shape, seed + i) for i, (type, shape) in pairs)

    ours = Experts(floats(1, COUNT, HIDDEN) / 8, [network(types, 9 * e, shapes) for e in range(COUNT)], limits=limits)
    if biased:
        ours.biases = floats(2, COUNT, INNER), floats(3, COUNT, INNER), floats(4, COUNT, outer)
    if router_bias:
        ours.router_bias = floats(5, COUNT)
    if choice_bias:
        ours.choice_bias = floats(6, COUNT) / 4
    if shared:
        own = "Q4_0 - Q4_0" if "-" in types else "Q4_0 Q4_0 Q4_0"
        ours.shared = network(own, 90, [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)])
    if gated:
        ours.shared_gate = floats(7, HIDDEN) / 8
    if short:
        ours.shorten, ours.lengthen = matrix("Q8_0", LATENT, HIDDEN, 91), matrix("Q8_0", HIDDEN, LATENT, 92)
    config = SimpleNamespace(routing=how, activation=activation, situ=(), hidden=HIDDEN, experts=COUNT)
    config.activation_within = partial(DecoderConfig.activation_within, config)
    return ours, config


def moved(experts: Experts, config: Any, precision: str) -> DeviceExperts:
    return DeviceExperts(experts, config, Multiplier(devices.require("cuda"), precision))


def close(y: Any, expected: np.ndarray, limit: float) -> None:
    np.testing.assert_allclose(y, expected, rtol=limit, atol=limit * np.abs(expected).max())


LAYERS: dict[str, Any] = {
    "qwen3": {},
    "not normalized, a shared expert": {"how": Routing(used=3, normalized=False, scale=2.5), "shared": True},
    "qwen2, a gate of the shared expert": {"how": Routing(used=2, normalized=False), "shared": True, "gated": True},
    "deepseek 3": {
        "how": Routing(used=3, sigmoid=True, groups=4, groups_used=2, scale=2.5), "choice_bias": True, "shared": True,
    },
    "deepseek 2, groups by their largest": {"how": Routing(used=3, groups=4, groups_used=2)},
    "gpt-oss": {"activation": "clamped", "biased": True, "router_bias": True},
    "phi-moe": {"how": Routing(used=2, mixer=0.2)},
    "llama 4": {"how": Routing(used=1, sigmoid=True, normalized=False, before=True), "shared": True},
    "two read what is weighed before": {"how": Routing(used=2, before=True)},
    "gemma 4": {"activation": "gelu"},
    "step 3.5": {"shared": True, "limits": (0.25, 0.125)},
    "nemotron 3": {
        "how": Routing(used=9, sigmoid=True, scale=1.5), "activation": "relu2", "types": "Q4_0 - Q4_0", "short": True,
        "shared": True, "choice_bias": True,
    },
    "a short vector and a gate": {"short": True, "shared": True, "gated": True},
    "gate and up of two types": {"types": "Q4_0 Q8_0 Q4_0", "activation": "clamped", "biased": True},
    "factors": {"types": "NVFP4 NVFP4 NVFP4"},
    "down of floats": {"types": "Q4_0 Q4_0 F16", "biased": True},
    "all of floats": {"types": "F16 F16 F16", "shared": True},
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_cpu_s_does(name: str, n: int) -> None:
    experts, config = layer(**LAYERS[name])
    precision, limit = ("f32", 1e-4) if n < 40 else ("int8", 3e-2)  # whose kernels of several columns compile sooner
    x = floats(8, n, HIDDEN)
    with pretended_gpu():
        ours = moved(experts, config, precision)
        if n < 40:
            close(ours.mix(torch.from_numpy(x)), mix(experts, x, config, exactly), limit)
        else:
            y, wanted = ours.mix(torch.from_numpy(x)).numpy(), mix(experts, x, config, exactly)
            assert np.linalg.norm(y - wanted) < limit * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["qwen2, a gate of the shared expert", "gpt-oss", "nemotron 3"])
def test_a_token_whose_values_are_rounded_to_8_bits(name: str) -> None:
    experts, config = layer(**LAYERS[name])
    x = floats(8, 1, HIDDEN)
    with pretended_gpu():
        y, wanted = moved(experts, config, "int8").mix(torch.from_numpy(x)).numpy(), mix(experts, x, config, exactly)
    assert np.linalg.norm(y - wanted) < 0.03 * np.linalg.norm(wanted)


def test_what_the_router_reads_may_be_another_vector_and_the_records_of_x_another_s() -> None:
    from bridge.cuda.product.activations import Records

    experts, config = layer(shared=True, gated=True)
    for n in (1, 3):
        x, routed = floats(8, n, HIDDEN), floats(9, n, HIDDEN)
        with pretended_gpu() as gpu:
            ours, made = moved(experts, config, "f32"), None
            if n == 1:
                made = Records(HIDDEN, 1, "cuda", "f32").quantize(x, 1)
            gpu.names.clear()
            y = ours.mix(torch.from_numpy(x), torch.from_numpy(routed), records=made)
            assert sum("quantize" in name for name in gpu.names) == (0 if n == 1 else 4)
            close(y, mix(experts, x, config, exactly, routed), 1e-4)


@pytest.mark.parametrize(
    ("experts", "how"),
    [
        (128, Routing(used=8)),
        (256, Routing(used=8, sigmoid=True, groups=8, groups_used=4, scale=2.5)),
        (160, Routing(used=6, groups=8, groups_used=3, normalized=False, scale=16.0)),
        (512, Routing(used=22, sigmoid=True, scale=5.0)),
        (30, Routing(used=4)),
        (8, Routing(used=3, sigmoid=True, groups=8, groups_used=4)),
        (16, Routing(used=2, mixer=0.2)),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "ties"])
def test_experts_are_chosen_and_weighed_as_the_cpu_does_the_first_of_equals_first(
    experts: int, how: Routing, tied: bool
) -> None:
    """Tied ones are a power of two apart, so that sigmoids and softmaxes of equals are equal everywhere."""
    n = 6
    logits = 2 * floats(0, n, experts)
    if tied:
        logits = np.round(logits)
        logits[5] = 0
    bias = None if how.mixer else (np.round(floats(1, experts)) / 4 if tied else floats(1, experts) / 8)
    expected, shares = route(logits, how, bias)
    chosen, weights = np.full((n, how.used), -1, np.int64), np.full((n, how.used), np.nan, np.float32)
    with pretended_gpu() as gpu:
        none = devices.require("cuda").placeholder()
        kernel = choose_kernel(how, experts, experts + 1, HIDDEN, False, (False, bias is not None))
        wider = np.concatenate([logits, np.full((n, 1), 99, np.float32)], 1)
        arrays = none, none, wider.reshape(-1), none, none if bias is None else bias
        counters = np.zeros(1, np.int32)
        kernel.launch(n, routing.THREADS, 0, *arrays, counters, chosen.reshape(-1), weights.reshape(-1))
        assert gpu.memory is not None
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, shares, rtol=2e-6)


def test_a_logit_that_is_nan_reaches_the_result() -> None:
    experts, config = layer()
    experts.router[3] = np.nan
    with pretended_gpu():
        ours = moved(experts, config, "f32")
        for n in (1, 40):
            assert ours.mix(torch.ones(n, HIDDEN)).isnan().all()


def test_a_token_takes_five_launches_and_two_for_a_shared_expert_which_may_overlap() -> None:
    for options, count in ((LAYERS["qwen3"], 5), (LAYERS["qwen2, a gate of the shared expert"], 7)):
        experts, config = layer(**options)
        x = floats(8, 1, HIDDEN)
        with pretended_gpu(overlapping=True) as gpu:
            ours = moved(experts, config, "f32")
            for _ in range(2):
                gpu.names.clear()
                with costs.Work() as work:
                    y = ours.mix(torch.from_numpy(x), dependent=True)
            assert work.count == 0  # of torch
            assert (len(gpu.names), len(gpu.dependent)) == (count, 2 * count)
            close(y, mix(experts, x, config, exactly), 1e-4)


@pytest.mark.parametrize("name", ["deepseek 3", "nemotron 3", "gate and up of two types", "all of floats"])
def test_a_layer_can_be_captured_and_its_replay_chooses_again(name: str) -> None:
    experts, config = layer(**LAYERS[name])
    x = torch.from_numpy(floats(8, 1, HIDDEN))
    with pretended_gpu(graphs=True):
        ours = moved(experts, config, "f32")
        ours.mix(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours.mix(x)
        before = y.clone()
        x.copy_(torch.from_numpy(floats(9, 1, HIDDEN)))
        graph.replay()
        assert not y.equal(before)
        close(y, mix(experts, x.numpy(), config, exactly), 1e-4)
        with pytest.raises(GpuError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            ours.mix(x.expand(40, -1))


def test_matrices_of_experts_that_are_not_alike_are_refused() -> None:
    experts, config = layer()
    experts.networks[2] = (*experts.networks[2][:2], matrix("Q8_0", HIDDEN, INNER, 99))
    with pretended_gpu(), pytest.raises(
        BridgeError,
        match=r"w99: Q8_0 \[64, 192\], but w2 is Q4_0 \[64, 192\]; experts of a layer must be alike on CUDA, use the C",
    ):  # fmt: skip
        moved(experts, config, "int8")


@pytest.mark.parametrize("name", ["nemotron 3", "gpt-oss", "down of floats"])
def test_its_bytes_are_known_before_it_is_uploaded(name: str) -> None:
    experts, config = layer(**LAYERS[name])
    with pretended_gpu():
        ours = moved(experts, config, "int8")
        stacks = [stack for stack, _ in (*ours._inner, ours._down)]
        taken = sum(getattr(stack, "nbytes", 0) or stack.weight.nbytes for stack in stacks)
    needed = device_bytes(experts, "int8")
    assert 0.9 * taken < needed < 2 * taken + 40000


def test_what_prompts_launch_is_noted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, config = layer(shared=True)
    launched: list[str] = []
    with pretended_gpu(), monkeypatch.context() as patch:
        ours = moved(experts, config, "int8")
        with noted() as kernels:
            ours.multiply_lengths()
            for n in (1, *LENGTHS):
                ours.mix(torch.zeros(n, HIDDEN))
        patch.setattr(Kernel, "run", lambda self, *given: launched.append(self.name))
        patch.setattr("torch.empty", torch.zeros)  # no kernel runs
        for n in (1, 5, 20, 40, 90):
            chosen = torch.arange(2 * n).remainder(COUNT).reshape(n, 2)
            patch.setattr(ours, "_choose", lambda x, few, dependent, c=chosen: (c, torch.ones(c.shape), c))
            ours.mix(torch.zeros(n, HIDDEN))
    assert len(set(launched)) > 8
    assert set(launched) <= {kernel.name for kernel in kernels}


def _kernels(dependent: bool) -> list[Kernel]:
    def product(type: str, shape: MatvecShape, epilogue: str) -> Any:
        return matvec_kernel.kernel(type, 1, shape, False, epilogue + "_chosen", dependent)

    groups = Routing(used=8, sigmoid=True, groups=8, groups_used=4, scale=2.5)
    return [
        choose_kernel(Routing(used=8), 128, 128, 2048, True, (False, False), dependent),
        choose_kernel(groups, 256, 257, 7168, True, (False, True), dependent),
        choose_kernel(groups, 256, 256, 7168, False, (False, True), dependent),
        choose_kernel(Routing(used=4), 32, 32, 2880, True, (True, False), dependent),
        choose_kernel(Routing(used=22, sigmoid=True, scale=5.0), 512, 512, 4096, True, (False, True), dependent),
        choose_kernel(Routing(used=2, mixer=0.2), 16, 16, 4096, True, (True, False), dependent),
        weigh_kernel(8, 2048, False, True, (257, 256), dependent),
        weigh_kernel(22, 1024, False, False, None, dependent),
        product("Q4_K", MatvecShape(2, 1, 4, 4), "silu_recorded"),
        product("MXFP4", MatvecShape(2, 1, 2, 4), "bias_clamped_recorded"),
        product("MXFP4", MatvecShape(2, 1, 4, 4), "bias"),
        product("Q6_K", MatvecShape(2, 2, 1, 4), "relu2_ungated_recorded"),
    ]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_kernels_keep_everything_in_registers(capability: tuple[int, int]) -> None:
    for kernel in _kernels(dependent=capability >= (9, 0)):
        made = ptx.assembled(ptx.ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
        assert (made.stack, made.spills) == (0, 0), kernel.name
        assert ".local" not in made.ptx, kernel.name
        assert made.ptx.count("griddepcontrol.wait") == kernel.dependent

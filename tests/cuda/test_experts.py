"""A layer of experts on a GPU that NumPy plays: few tokens through all that they chose at once, as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.errors import BridgeError
from bridge.nn import QuantExperts, prepare
from bridge.nn.quant_experts import ClampedSwiglu, ExpertStack, Fused, Gated, WeightedExperts
from bridge.runtime import QuantTensor
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.disguise import disguised_gpu
from tests.support.gpu.memory import GpuError
from tests.support.random_blocks import random_matrix

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("Q4_0"),
    pytest.mark.proof,
]

HIDDEN, INNER, COUNT = 64, 96, 6
SILU = Gated(torch.nn.functional.silu)


def matrix(type: str, rows: int, columns: int, seed: int) -> QuantTensor:
    if type != "F16":
        return random_matrix(TYPES[type], rows, columns, seed)[0]
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16) / 8
    return QuantTensor(f"w{seed}", "F16", (rows, columns), values.reshape(-1).view(np.uint8))


def stack(types: str, activation: Any, biased: bool = False, inner: int = INNER, count: int = COUNT) -> ExpertStack:
    """Of the types of the matrices, separated by blanks; the last is down's."""
    *wide, down = types.split()
    rows = 2 * inner if isinstance(activation, Fused) else inner
    shapes = [*((type, rows, HIDDEN) for type in wide), (down, HIDDEN, inner)]
    networks = [tuple(matrix(*shape, seed=9 * e + i) for i, shape in enumerate(shapes)) for e in range(count)]
    generator = torch.Generator().manual_seed(0)
    biases = tuple(torch.randn((count, rows), generator=generator) for _, rows, _ in shapes) if biased else None
    return ExpertStack(networks, activation, biases)


def routed(n: int, used: int, highest: int = COUNT, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, chosen experts from 0 to `highest`, which is no expert here, and weights."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, highest + 1, (n, used), generator=generator)
    return torch.randn((n, HIDDEN), generator=generator), chosen, torch.rand((n, used), generator=generator)


def on_gpu(experts: QuantExperts, *given: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """What the module gives on a GPU, and the names of the kernels that it launched."""
    with disguised_gpu() as launches:
        moved = experts.to("cuda:0")
        return moved(*(part.to("cuda:0") for part in given)).cpu(), launches.names


@pytest.mark.parametrize(
    ("types", "activation", "biased", "launches"),
    [
        ("Q4_0 Q4_0 Q4_0", SILU, False, 4),
        ("Q4_0 Q4_0 Q4_0", ClampedSwiglu(1.7, 7.0), True, 4),
        ("Q4_0 Q4_0 Q4_0", ClampedSwiglu(1.702, 7.0), True, 4),
        ("Q4_0 Q8_0 Q4_0", SILU, False, 5),
        ("Q4_0 Q4_0", Fused(SILU), False, 4),
        ("Q4_0 Q4_0", torch.nn.functional.relu, False, 4),
    ],
    ids=["swiglu", "biases", "gpt-oss", "gate of another type", "gate and up in one", "no gate"],
)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (5, 2)], ids=["a token", "all at once", "expert by expert"])
def test_a_layer_is_the_cpu_s_and_takes_as_many_launches_for_any_few_experts(
    types: str, activation: Any, biased: bool, launches: int, shape: tuple[int, int]
) -> None:
    given, few = routed(*shape), shape[0] * shape[1] <= COUNT
    precision, limit = ("f32", 1e-4) if few else ("int8", 1e-2)  # whose kernels for several columns compile sooner
    expected = QuantExperts(stack(types, activation, biased), precision)(*given)
    y, names = on_gpu(QuantExperts(stack(types, activation, biased), precision), *given)
    torch.testing.assert_close(y, expected, rtol=limit, atol=limit * float(expected.abs().max()))
    assert (len(names) == launches) == few
    assert any("chosen" in name for name in names) == few


def test_eight_experts_of_a_token_of_16_bits_whose_values_are_rounded_to_8() -> None:
    x, chosen, weights = routed(1, 8, 7)
    given = x.to(torch.bfloat16), chosen.to(torch.int32), weights.to(torch.bfloat16)
    expected = QuantExperts(stack("Q4_0 Q4_0 Q4_0", SILU, count=8))(*given)
    y, names = on_gpu(QuantExperts(stack("Q4_0 Q4_0 Q4_0", SILU, count=8)), *given)
    assert y.dtype == torch.bfloat16
    assert len(names) == 4
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_experts_whose_router_s_weight_is_in_x_are_multiplied_at_once_for_one_token() -> None:
    x = torch.zeros(COUNT, HIDDEN)
    x[4] = routed(1, 1)[0][0]
    expected = WeightedExperts(stack("Q4_0 Q4_0 Q4_0", SILU), "f32")(x)
    y, names = on_gpu(WeightedExperts(stack("Q4_0 Q4_0 Q4_0", SILU), "f32"), x)
    assert len(names) == 4
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert y.any(1).tolist() == [i == 4 for i in range(COUNT)]


def test_types_without_a_kernel_go_expert_by_expert() -> None:
    given = routed(1, 2, COUNT - 1)
    expected = QuantExperts(stack("Q4_0 Q4_0 F16", SILU), "f32")(*given)
    y, names = on_gpu(QuantExperts(stack("Q4_0 Q4_0 F16", SILU), "f32"), *given)
    assert not any("chosen" in name for name in names)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_experts_are_on_the_device_once_for_all_that_share_them() -> None:
    here = stack("Q4_0 Q4_0 Q4_0", SILU)
    with disguised_gpu():
        one, other = QuantExperts(here).to("cuda:0").tensor, QuantExperts(here).to("cuda:0").tensor
        assert one is other
        assert one.to("cpu") is here
        buffers = [part.buffer for part in one.stacks]
        assert [tuple(part.shape) for part in buffers] == [(COUNT, n) for n in _sizes("Q4_0")]
        for network in one.networks:
            for expert, buffer in zip(network, buffers, strict=True):
                assert np.shares_memory(expert.buffer, buffer)


def _sizes(type: str) -> list[int]:
    """Bytes of an expert's two matrices, in multiples of 256."""
    from bridge.cuda.forms.layout import DeviceLayout

    layout = DeviceLayout(TYPES[type])
    return [-(-layout.nbytes(*shape) // 256) * 256 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]


def test_x_that_is_elsewhere_is_refused() -> None:
    x, chosen, weights = routed(1, 2)
    with disguised_gpu():
        moved = QuantExperts(stack("Q4_0 Q4_0 Q4_0", SILU)).to("cuda:0").tensor
        with pytest.raises(BridgeError, match=r"w0 \+ w1: x is on cpu, the experts on cuda:0"):
            moved.mix(x, chosen.to("cuda:0"), weights.to("cuda:0"), "int8")


def test_a_layer_can_be_captured_and_its_replay_takes_the_experts_that_are_chosen_then() -> None:
    x, chosen, weights = routed(1, 2)
    with pretended_gpu(graphs=True):
        moved = stack("Q4_0 Q4_0 Q4_0", SILU).to("cuda")
        moved.mix(x, chosen, weights, "f32")  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moved.mix(x, chosen, weights, "f32")
        for part, other in zip((x, chosen, weights), routed(1, 2, COUNT - 1, seed=1), strict=True):
            part.copy_(other)
        graph.replay()
        expected = stack("Q4_0 Q4_0 Q4_0", SILU).mix(x, chosen, weights, "f32")
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        with pytest.raises(GpuError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            moved.mix(x.expand(4, -1), chosen.expand(4, -1), weights.expand(4, -1), "f32")


def test_the_operator_that_may_be_captured_is_that_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.nn import quant_experts

    taken: list[str] = []
    for name in ("experts", "few_experts"):
        own = getattr(quant_experts, name)
        monkeypatch.setattr(
            quant_experts, name, lambda *given, own=own, name=name: (taken.append(name), own(*given))[1]
        )
    layer = QuantExperts(stack("Q4_0 Q4_0 Q4_0", SILU))
    layer(*routed(1, 2))
    with disguised_gpu():
        layer.to("cuda:0")
        for n in (3, 4):
            layer(*(part.to("cuda:0") for part in routed(n, 2)))
    assert taken == ["experts", "few_experts", "experts"]


def test_preparing_a_model_compiles_what_its_experts_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda import first_products
    from bridge.cuda.toolchain.launch import Kernel

    compiled: list[Any] = []
    launched: list[str] = []
    monkeypatch.setattr(first_products, "compile_all", lambda kernels, *given: compiled.extend(kernels))
    layers = QuantExperts(stack("Q4_0 Q4_0 Q4_0", SILU)), QuantExperts(stack("Q4_0 Q4_0 F16", SILU))
    with disguised_gpu(), monkeypatch.context() as patch:
        model = torch.nn.ModuleList([torch.nn.LayerNorm(4), *layers]).to("cuda:0").half()
        patch.setattr(Kernel, "run", lambda self, *given: launched.append(self.name))
        prepare(model)
        assert not launched
        for n in (1, 3, 5, 7, 40, 90):
            model[1](*(part.to("cuda:0") for part in (routed(n, 2)[0].half(), *routed(n, 2)[1:])))
    assert len(set(launched)) > 8
    assert set(launched) <= {kernel.name for kernel in compiled}

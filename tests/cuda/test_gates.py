"""Networks of every activation on a GPU that NumPy plays: of one token, of few, and of prompts, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.blocks import TYPES
from bridge.runtime import QuantTensor
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu
from tests.support.random_blocks import random_matrix

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.norm import activation_kernel
from bridge.cuda.product import halves, matvec_kernel, token_records
from bridge.cuda.product.gates import by_torch, limited
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.product.products import Gated, Stack, Vector
from bridge.cuda.toolchain import device as devices

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("Q4_0"),
    pytest.mark.proof,
]

HIDDEN, INNER = 64, 96
LIMIT = 0.625
WITH_UP_ALONE = "clamped", limited("silu", LIMIT)
EVERY = pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", *WITH_UP_ALONE])


def matrix(type: str, rows: int, columns: int, seed: int) -> tuple[QuantTensor, np.ndarray]:
    if type != "F16":
        return random_matrix(TYPES[type], rows, columns, seed)
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16) / 8
    return QuantTensor(f"w{seed}", "F16", (rows, columns), values.reshape(-1).view(np.uint8)), values.astype(float)


def exact(name: str, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """An activation in float64, as it is defined."""
    up = np.ones_like(gate) if up is None else up
    if name == "silu":
        return gate / (1 + np.exp(np.minimum(-gate, 99))) * up
    if name == "gelu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "relu2":
        return np.maximum(gate, 0) ** 2 * up
    if name.startswith("limited"):
        return np.minimum(exact("silu", gate, None), LIMIT) * np.clip(up, -LIMIT, LIMIT)
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(np.minimum(-1.702 * gate, 99))) * (np.clip(up, -7, 7) + 1)


@EVERY
@pytest.mark.parametrize("ungated", [False, True], ids=["gated", "ungated"])
@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("types", ["Q4_0 Q4_0", "Q4_0 Q8_0", "F16 F16"])
def test_a_network_of_a_token_is_one_launch_where_types_are_alike(
    activation: str, ungated: bool, biased: bool, types: str
) -> None:
    if ungated and (activation in WITH_UP_ALONE or types == "Q4_0 Q8_0"):
        pytest.skip("gpt-oss has gates, and one matrix one type")
    x = torch.randn((1, HIDDEN), generator=torch.Generator().manual_seed(0))
    with pretended_gpu() as gpu:
        network, expected = layer(activation, types, ungated, biased, x.numpy().astype(float))
        y, given = (Vector(width, network.multiplier.device, "f32") for width in (INNER, HIDDEN))
        given.floats.copy_(x)
        given.record()
        gpu.names.clear()
        network.step(given, y)
        assert len(gpu.names) == {"Q4_0 Q4_0": 1, "Q4_0 Q8_0": 2, "F16 F16": 1}[types]
        np.testing.assert_allclose(y.floats[0].numpy(), expected[0], rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        made = y.records.buffer.view(np.float32).reshape(-1, 8, 8, 32, 4)[0, 0]  # quads of 32 blocks
        np.testing.assert_array_equal(made.transpose(1, 0, 2).reshape(-1)[:INNER], y.floats[0].numpy())


def layer(activation: str, types: str, ungated: bool, biased: bool, x: np.ndarray, precision: str = "f32") -> Any:
    """A network on the device, and what it makes of x in float64."""
    gate, up = (matrix(type, INNER, HIDDEN, seed) for seed, type in enumerate(types.split()))
    bias = np.linspace(-1, 1, INNER * (1 if ungated else 2), dtype=np.float32) if biased else None
    multiplier = Multiplier(devices.require("cuda"), precision)
    offset = None if bias is None else torch.from_numpy(bias)
    made = Gated(gate[0], None if ungated else up[0], multiplier, offset, activation)
    parts = [x @ gate[1].T] if ungated else [x @ gate[1].T, x @ up[1].T]
    if bias is not None:
        parts = [part + one for part, one in zip(parts, bias.reshape(len(parts), -1), strict=True)]
    return made, exact(activation, parts[0], None if ungated else parts[1])


@pytest.mark.parametrize(
    ("activation", "ungated", "biased", "types"),
    [
        ("silu", False, True, "Q4_0 Q4_0"),
        ("gelu", False, False, "Q4_0 Q4_0"),
        ("gelu", True, True, "Q4_0 Q4_0"),
        ("relu2", True, False, "Q4_0 Q4_0"),
        ("relu2", False, False, "Q4_0 Q8_0"),
        ("clamped", False, True, "Q4_0 Q8_0"),
    ],
)
@pytest.mark.parametrize("n", [3, 20, 70])
def test_networks_of_prompts_are_in_the_form_that_is_multiplied_next(
    activation: str, ungated: bool, biased: bool, types: str, n: int
) -> None:
    """Floats, halves, and bytes: up to 8 tokens, on a GPU that multiplies halves faster, and on others."""
    x = torch.randn((n, HIDDEN), generator=torch.Generator().manual_seed(n))
    forms = set()
    for capability in ((9, 0), (8, 9)) if n > 8 else ((9, 0),):
        with pretended_gpu(capability=capability):
            network, expected = layer(activation, types, ungated, biased, x.numpy().astype(float), "int8")
            then = Stack([matrix("Q4_0", HIDDEN, INNER, 7)[0]], network.multiplier)
            forms.add(then.form(n))
            y = then.multiply(network.multiply(x, then)).numpy()
        wanted = expected @ matrix("Q4_0", HIDDEN, INNER, 7)[1].T
        assert np.linalg.norm(y - wanted) < 0.03 * np.linalg.norm(wanted)
    assert forms == {3: {"floats"}, 20: {"halves", "int8"}, 70: {"int8"}}[n]


@EVERY
def test_activations_of_torch_and_of_kernels_neither_overflow_nor_hide_nan(activation: str) -> None:
    gate = np.array([-1000, -88, -9, -1, 0, 0.5, 3, 7.5, 40, np.nan, 1, *np.linspace(-4, 4, 21)], np.float32)
    up = np.array([1, -1, 9, -9, 2, 7, -7, 0.5, 1, 1, np.nan, *np.linspace(3, -3, 21)], np.float32)
    with pretended_gpu():
        y = np.full(32, np.inf, np.float32)
        records = np.zeros(1 << 15, np.uint8)
        both = np.concatenate([gate, up])
        activation_kernel(True, activation=activation).launch(1, 128, 0, both, y, records, np.int32(32))
    wanted = exact(activation, gate.astype(float), up.astype(float))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_torch(activation, *map(torch.from_numpy, (gate, up))), wanted, rtol=1e-5, atol=1e-6)
    if activation not in WITH_UP_ALONE:
        found = by_torch(activation, torch.from_numpy(gate))
        np.testing.assert_allclose(found, exact(activation, gate.astype(float), None), rtol=1e-5, atol=1e-6)


@EVERY
@pytest.mark.parametrize(
    "capability", [(9, 0), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in ((8, 0), (8, 9), (12, 0)))]
)
def test_kernels_with_an_activation_keep_everything_in_registers(activation: str, capability: tuple[int, int]) -> None:
    dependent, shape = capability >= (9, 0), MatvecShape(2, 2, 1, 4)
    for kernel in (
        activation_kernel(False, dependent, activation),
        activation_kernel(False, dependent, activation, gated=False),
        matvec_kernel.kernel("Q4_K", 1, shape, False, f"bias_{activation}_normed_recorded", dependent),
        matvec_kernel.kernel("Q4_K", 1, shape, False, f"{activation}_ungated_normed_recorded", dependent),
        halves.kernel("gate_in_turn", True, activation),
        halves.kernel("gate_alone", False, activation),
        token_records.kernel("gate_in_turn", "f32", activation),
    ):
        made = ptx.assembled(ptx.ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
        assert (made.stack, made.spills) == (0, 0), kernel.name
        assert ".local" not in made.ptx, kernel.name

"""Products and mixtures of experts in tables of calls, for any number of tokens."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.blocks import TYPES
from bridge.runtime.config.decoder_config import DecoderConfig, Routing
from bridge.runtime.cpu.forms import activations
from bridge.runtime.cpu.ops import passes
from bridge.runtime.cpu.ops.passes import Kernels
from bridge.runtime.cpu.ops.program import ITEMS, Program, buffer
from bridge.runtime.decoder.experts import mix
from bridge.runtime.decoder.steps import Steps
from bridge.runtime.layers.layers import Experts
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import get_num_threads, set_num_threads
from tests.conftest import repacked
from tests.support.random_blocks import random_matrix

HIDDEN, INNER, LATENT, COUNT = 256, 96, 64, 12
MOST = 40  # tokens


def matrix(type: str, rows: int, columns: int, seed: int) -> QuantTensor:
    return random_matrix(TYPES[type], rows, columns, seed)[0]


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def steps_for(n: int, kernels: Kernels, config: Any = None, one_by_one: bool = False) -> Steps:
    return Steps(config or SimpleNamespace(experts=0), n, kernels, one_by_one)


def run(steps: Steps, tokens: int) -> None:
    steps.kernels.need(steps.kernels.columns(tokens, True))
    steps.begin(tokens)
    steps.run()


@repacked
@pytest.mark.parametrize("type", ["Q4_K", "Q8_0", "Q5_1"])
def test_one_table_multiplies_any_number_of_tokens(type: str) -> None:
    """As each matrix by itself: of rows that fill no row group too, some prepared, one of floats, one with a change."""
    shapes = {"a": 64, "b": 40, "c": 24, "floats": 8}
    matrices = {name: matrix(type, rows, HIDDEN, seed) for seed, (name, rows) in enumerate(shapes.items())}
    values = floats(9, 8, HIDDEN)
    matrices["floats"] = QuantTensor("f", "F32", values.shape, values.reshape(-1).view(np.uint8))
    matrices["c"].change = floats(1, 2, HIDDEN), floats(2, 24, 2)
    matrices["b"].factors = np.array([0.5], np.float32)
    x, ys = buffer(MOST, HIDDEN), {name: buffer(MOST, rows) for name, rows in shapes.items()}
    steps = steps_for(MOST, Kernels(True))
    steps.products(x, [(matrices[name], y) for name, y in ys.items()])
    for tokens in (2, MOST, 9, 12, 7, 33):
        if tokens == 12:
            steps.kernels.refresh(matrices["a"].prepare())
        x[:tokens] = floats(tokens, tokens, HIDDEN)
        run(steps, tokens)
        for name, y in ys.items():
            np.testing.assert_array_equal(y[:tokens], matrices[name].matmul(x[:tokens]))
    assert not steps.single


@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q2_K"])
@pytest.mark.parametrize("width", [8192, 8192 + 256, 1024])
def test_a_wide_tokens_records_are_those_of_its_pieces(type: str, precision: str, width: int) -> None:
    integer = precision == "int8"
    x, program = floats(3, 1, width), Program()
    kernels, place = np.zeros((1, passes.WORDS), np.int64), np.array([0, 1, 0])
    nbytes = kernels[0, passes.RECORD] = activations.record_bytes(type, width, integer)
    kernels[0, passes.COLUMNS] = 1
    kernels[0, passes.QUANTIZE] = activations.quantize_function(type, integer).address
    records = np.zeros(nbytes, np.uint8)
    passes.add_records(program, x, records, kernels, place)
    program.run()
    assert program._table is not None
    assert program._table[0, ITEMS:].tolist() == ([width // 256, 1] if width > 1024 else [1, 0])
    np.testing.assert_array_equal(records, activations.records(x, TYPES[type], 1, integer))


@pytest.mark.parametrize("groups", [(1,), (5, 2), (352, 352), (704, 64, 64), (3,) * 16])
@pytest.mark.parametrize(("threads", "each"), [(1, 1), (2, 9), (3, 64), (64, 3)])
def test_items_of_products_are_each_threads_parts_of_all(groups: tuple[int, ...], threads: int, each: int) -> None:
    """Of tokens in several turns, of none, and of a token alone."""
    calls: list[tuple[int, int, int]] = []
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(
        lambda part, _1, _2, _3, _4, _5, _6, first, last: calls.append((part, first, last))
    )
    places = np.array([[0, tokens, 0] for tokens in (1, 8, 0)])
    kernels = np.zeros((len(groups), passes.WORDS), np.int64)
    kernels[:, passes.COLUMNS], kernels[:, passes.WEIGHTS] = 2, range(len(groups))
    kernels[:, passes.KERNEL] = ctypes.cast(kernel, ctypes.c_void_p).value
    block = np.array(
        [
            passes.Product(kernels[i:].ctypes.data, 1, places[i % 3 :].ctypes.data, 0, 0, 0, 0, 0, count)
            for i, count in enumerate(groups)
        ]
    )
    multiplied = [(i, count) for i, count in enumerate(groups) if places[i % 3, passes.TOKENS]]

    def ranges(first: int, last: int) -> set[tuple[int, int]]:
        """The row groups that some items multiply, once each."""
        calls.clear()
        passes.function("several")(block.ctypes.data, len(groups), threads, each, 0, 0, 0, first, last)
        found = [(part, group) for part, begin, end in calls for group in range(begin, end)]
        assert len(set(found)) == len(found)
        return set(found)

    everything = {(part, group) for part, count in multiplied for group in range(count)}
    assert ranges(0, threads * each) == everything
    for thread in range(threads):
        part = {
            (i, g) for i, g in everything if groups[i] * thread // threads <= g < groups[i] * (thread + 1) // threads
        }
        assert ranges(thread * each, (thread + 1) * each) == part
    whole = [ranges(item, item + 1) for item in range(threads * each)]
    assert sum(map(len, whole)) == len(everything)
    assert set().union(*whole) == everything


def mixture(
    how: Routing, activation: str = "silu", biased: bool = False, choice_bias: bool = False, shared: bool = False,
    gated: bool = False, short: bool = False, ungated: bool = False, first: str = "Q4_0", situ: tuple[float, ...] = (),
    limits: tuple[float, float] = (0.0, 0.0),
) -> tuple[Experts, Any]:  # fmt: skip
    """Experts whose matrices are Q4_0, gate and up of the type `first`, and a configuration."""
    outer = LATENT if short else HIDDEN
    shapes = [(INNER, outer), (INNER, outer), (outer, INNER)]

    def network(seed: int, shapes: list[tuple[int, int]]) -> Any:
        types = first, first, "Q4_0"
        gate, up, down = (matrix(types[i], *shape, seed + i) for i, shape in enumerate(shapes))
        for part, factor in ((gate, 1.1), (down, 1 + seed / 50)):
            part.factors = np.array([factor], np.float32)
        return gate, None if ungated else up, down

    experts = Experts(floats(1, COUNT, HIDDEN) / 8, [network(9 * e, shapes) for e in range(COUNT)], limits=limits)
    if biased:
        experts.biases = floats(2, COUNT, INNER), floats(3, COUNT, INNER), floats(4, COUNT, outer)
        experts.router_bias = floats(5, COUNT)
    if choice_bias:
        experts.choice_bias = floats(6, COUNT) / 4
    if shared:
        experts.shared = network(90, [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)])
    if gated:
        experts.shared_gate = floats(7, HIDDEN) / 8
    if short:
        experts.shorten, experts.lengthen = matrix("Q8_0", LATENT, HIDDEN, 91), matrix("Q8_0", HIDDEN, LATENT, 92)
    if situ:
        experts.summed_norm = floats(8, LATENT)
    config = SimpleNamespace(
        routing=how, activation=activation, hidden=HIDDEN, experts=COUNT, expert_inner=INNER, expert_outer=outer,
        expert_latent=LATENT if short else 0, shared_inner=INNER if shared else 0, situ=situ, norm_eps=1e-5,
    )  # fmt: skip
    config.activation_within = partial(DecoderConfig.activation_within, config)
    return experts, config


MIXTURES: dict[str, Any] = {
    "qwen3": {"how": Routing(used=3)},
    "qwen2": {"how": Routing(used=2, normalized=False), "shared": True, "gated": True},
    "deepseek 3": {
        "how": Routing(used=3, sigmoid=True, groups=4, groups_used=2, scale=2.5), "choice_bias": True, "shared": True,
    },
    "gpt-oss": {"how": Routing(used=4), "activation": "clamped", "biased": True},
    "phi-moe": {"how": Routing(used=2, mixer=0.2)},
    "ling 3": {"how": Routing(used=3, sigmoid=True), "shared": True, "limits": (0.2, 0.1)},
    "llama 4": {"how": Routing(used=1, sigmoid=True, normalized=False, before=True), "shared": True},
    "nemotron 3": {
        "how": Routing(used=3, sigmoid=True), "activation": "relu2", "ungated": True, "short": True, "shared": True,
    },
    "kimi k3": {
        "how": Routing(used=3, sigmoid=True), "activation": "situ", "situ": (4.0, 25.0), "short": True, "shared": True,
    },
    "all experts": {"how": Routing(used=COUNT)},
    "kernels of other columns": {"how": Routing(used=3), "first": "Q3_K"},
}  # fmt: skip


@repacked
@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_gets_what_it_gets_alone(name: str, precision: str, request: pytest.FixtureRequest) -> None:
    """To the last bit, whatever the other tokens, the threads and which matrices are prepared; as `mix` says."""
    experts, config = mixture(**MIXTURES[name])
    x = floats(8, MOST, HIDDEN)
    x[: MOST // 2] = x[0] + x[: MOST // 2] / 50  # of many tokens the same experts are chosen
    kernels = Kernels(precision == "int8")
    alone, one, made = [], buffer(1, HIDDEN), buffer(1, HIDDEN)
    steps = steps_for(1, kernels, config, True)
    steps.mix(experts, one, made)
    for row in x:
        one[:] = row
        run(steps, 1)
        alone.append(made[0].copy())
    before = get_num_threads()
    request.addfinalizer(lambda: set_num_threads(before))
    read, y = buffer(MOST, HIDDEN), buffer(MOST, HIDDEN)
    for threads in (1, 3, 2):  # by the last, all matrices are prepared
        set_num_threads(threads)
        steps = steps_for(MOST, kernels, config, True)
        steps.mix(experts, read, y)
        assert steps.single
        for tokens in (MOST, 1, 23, 9):
            read[:tokens] = x[:tokens]
            run(steps, tokens)
            np.testing.assert_array_equal(y[:tokens], alone[:tokens])
        for network in experts.networks[: 4 * threads]:
            for part in network:
                if part is not None:
                    kernels.refresh(part.prepare())

    def product(matrix: QuantTensor, x: np.ndarray) -> np.ndarray:
        return x @ matrix.dequantize().T

    expected = mix(experts, x, config, product)
    limit = (0.05 if precision == "int8" else 1e-4) * np.abs(expected).max()
    np.testing.assert_allclose(np.array(alone), expected, atol=limit)

"""Attention on latent vectors on a GPU that NumPy plays, against float64."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.runtime.config.decoder_config import Latent
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.xdist_group("attention"),
]

ROWS = 1152  # of the cache


class Setup:
    """A layer of random weights, its part of the cache and its attention, and what they give in float64."""

    def __init__(
        self, heads: int, rank: int, rotated: int, plain: int, value: int, kind: str = "f16", precision: str = "int8",
        tempered: bool = False,
    ):  # fmt: skip
        from bridge.cuda.attention.kv_cache import latent_form
        from bridge.cuda.attention.latent_attention import LatentAttention, LatentBuffers
        from bridge.cuda.toolchain.device import require

        self.rng = rng = np.random.default_rng(heads + rank)
        self.sizes = heads, rank, rotated, plain, value
        self.config: Any = SimpleNamespace(
            heads=heads, head_dim=rank + rotated, norm_eps=1e-6, attention_scale=(plain + rotated) ** -0.5,
            tempered=lambda index: tempered, latent=Latent(rank, 0, plain, value),
        )  # fmt: skip
        exact = precision == "f32"
        self.keys = (rng.standard_normal((heads, rank, plain)) / 4).astype(np.float32 if exact else np.float16)
        self.values = (rng.standard_normal((heads, value, rank)) / 4).astype(self.keys.dtype)
        self.k_norm = rng.uniform(0.5, 1.5, rank).astype(np.float32)
        angles = rng.uniform(-3, 3, (ROWS, rotated // 2))
        self.angles = tuple(torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        self.temperatures = torch.linspace(0.5, 2, ROWS)
        self.factors = self.temperatures.double().numpy() if tempered else np.ones(ROWS)
        self.device = require("cuda")
        self.part = torch.zeros(latent_form(self.config, kind).words(ROWS), dtype=torch.int32)
        self.buffers = LatentBuffers(self.config, ROWS, self.device)
        layer: Any = SimpleNamespace(
            k_norm=self.k_norm, latent_k=_stack(self.keys, "attn_k_b"), latent_v=_stack(self.values, "attn_v_b")
        )
        self.attention = LatentAttention(
            layer, self.config, 0, self.part, kind, self.device, precision, self.angles, self.temperatures,
            self.buffers,
        )  # fmt: skip

    def products(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k of n tokens."""
        heads, rank, rotated, plain, _ = self.sizes
        shapes = (n, heads * (plain + rotated)), (n, rank + rotated)
        q, k = (torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
        return q, k

    def fill(self, count: int) -> None:
        """Rows of earlier tokens."""
        if count:
            rows = np.zeros((count, 1, self.attention.form.head_dim), np.float32)
            rows[..., : self.config.head_dim] = self.rng.standard_normal((count, 1, self.config.head_dim))
            self.attention.form.store(self.part, 0, torch.from_numpy(rows))

    def step(self, q: torch.Tensor, k: torch.Tensor, position: int, dependent: bool = False) -> np.ndarray:
        y = self.attention.step(q[0], k[0], torch.tensor([position, 0, 0, 0], dtype=torch.int32), dependent)
        assert y.shape == (1, self.sizes[0] * self.sizes[4])
        return y.numpy().astype(np.float64)

    def rows(self, count: int) -> np.ndarray:
        """The rows in the cache, float64 [count, rank + rotated]."""
        return self.attention.form.load(self.part, count, 1, torch.float64)[0].numpy()[:, : self.config.head_dim]

    def turned(self, x: np.ndarray, positions: range) -> np.ndarray:
        """x [n, ..., rotated] turned."""
        cos, sin = (part.double().numpy()[positions].reshape(len(x), *[1] * (x.ndim - 2), -1) for part in self.angles)
        one, other = x[..., ::2], x[..., 1::2]
        return np.stack([one * cos - other * sin, one * sin + other * cos], -1).reshape(x.shape)

    def row(self, k: torch.Tensor, start: int) -> np.ndarray:
        """Rows that are to be stored, [n, rank + rotated]."""
        rank, x = self.sizes[1], k.double().numpy()
        latents = x[:, :rank] / np.sqrt(np.square(x[:, :rank]).mean(1, keepdims=True) + 1e-6) * self.k_norm
        return np.concatenate([latents, self.turned(x[:, rank:], range(start, start + len(x)))], 1)

    def expected(self, q: torch.Tensor, start: int) -> np.ndarray:
        """What n tokens in positions from `start` on attend to, of the rows in the cache: [n, heads * value]."""
        heads, rank, rotated, plain, _ = self.sizes
        n, keys, values = len(q), self.keys.astype(np.float64), self.values.astype(np.float64)
        x = q.double().numpy().reshape(n, heads, plain + rotated)
        absorbed = np.einsum("hrp,nhp->nhr", keys, x[..., :plain])
        queries = np.concatenate([absorbed, self.turned(x[..., plain:], range(start, start + n))], 2)
        rows = self.rows(start + n)
        scores = (
            self.config.attention_scale
            * np.einsum("nhd,td->nht", queries, rows)
            * self.factors[start : start + n, None, None]
        )
        later = np.arange(start + n) > start + np.arange(n)[:, None]
        scores = np.where(later[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        attended = np.einsum("nht,tr->nhr", weights, rows[:, :rank])
        return np.einsum("hvr,nhr->nhv", values, attended).reshape(n, -1)


def _stack(values: np.ndarray, name: str) -> QuantTensor:
    type = "F32" if values.dtype == np.float32 else "F16"
    return QuantTensor(name, type, values.shape, values.reshape(-1).view(np.uint8))


def check_step(setup: Setup, position: int, limit: float, dependent: bool = False) -> None:
    q, k = setup.products(1)
    y = setup.step(q, k, position, dependent)
    stored, row = setup.rows(position + 1)[position], setup.row(k, position)[0]
    step = {"f16": 2e-3, "q8_0": 2e-2, "f32": 1e-5}[setup.attention.form.kind]
    np.testing.assert_allclose(stored, row, rtol=0, atol=step * np.abs(row).max())
    expected = setup.expected(q, position)
    np.testing.assert_allclose(y, expected, rtol=0, atol=limit * np.abs(expected).max())


@pytest.mark.parametrize(
    ("sizes", "kind", "precision", "limit"),
    [
        ((4, 16, 4, 12, 12), "f16", "int8", 1e-5),
        ((6, 32, 16, 16, 32), "f32", "f32", 1e-5),
        ((20, 48, 16, 24, 16), "f16", "int8", 1e-5),
        ((3, 32, 8, 20, 32), "q8_0", "f32", 1e-3),
        ((9, 64, 32, 32, 64), "q8_0", "int8", 1e-3),
    ],
    ids=["rows that are filled up", "f32", "three groups", "q8_0, filled up", "q8_0"],
)
def test_a_step_attends_to_a_token_a_few_and_several_spans(
    sizes: tuple[int, int, int, int, int], kind: str, precision: str, limit: float
) -> None:
    for position in (0, 18, 200):
        with pretended_gpu():
            setup = Setup(*sizes, kind=kind, precision=precision)
            setup.fill(position)
            check_step(setup, position, limit)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_step_of_deepseek_v2_lite_s_sizes(kind: str) -> None:
    with pretended_gpu():
        setup = Setup(16, 512, 64, 128, 128, kind=kind)
        setup.fill(80)
        check_step(setup, 80, 1e-3 if kind == "q8_0" else 1e-5, dependent=True)
        assert setup.attention.keys.nbytes + setup.attention.values.nbytes == 2 * 16 * 512 * 128 * 2
        row = 1152 if kind == "f16" else 512 + 64 + 36
        assert setup.attention.step_bytes(81) == 2 * 16 * 512 * 128 * 2 + 81 * row


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_step_without_tensor_cores(kind: str) -> None:
    with pretended_gpu(capability=(7, 5)) as gpu:
        setup = Setup(9, 64, 32, 32, 64, kind=kind)
        setup.fill(100)
        check_step(setup, 100, 1e-5)
        assert not any("mma" in name for name in gpu.names)


def test_more_spans_than_are_loaded_at_once_are_merged() -> None:
    with pretended_gpu():
        setup = Setup(1, 512, 64, 8, 32)
        setup.fill(1040)
        check_step(setup, 1040, 1e-5)


def test_scores_are_multiplied_by_the_temperature_of_the_position_and_spans_are_longer_on_a_small_gpu() -> None:
    with pretended_gpu(multiprocessors=1):
        setup = Setup(3, 32, 16, 16, 32, tempered=True)
        assert setup.buffers.spans == 2
        setup.fill(200)
        check_step(setup, 200, 1e-5)
        check_prompt(setup, 7, 50, 1e-2)


def test_a_step_can_be_captured_and_its_replay_takes_the_position_there_is_then() -> None:
    with pretended_gpu(graphs=True):
        setup = Setup(3, 32, 16, 16, 32)
        setup.fill(90)
        q, k = setup.products(1)
        state = torch.zeros(4, dtype=torch.int32)
        setup.attention.step(q, k, state)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = setup.attention.step(q, k, state)
        for part, other in zip((q, k), setup.products(1), strict=True):
            part.copy_(other)
        state[0] = 90
        graph.replay()
        expected = setup.expected(q, 90)
        np.testing.assert_allclose(setup.rows(91)[90], setup.row(k, 90)[0], rtol=0, atol=1e-2)
        np.testing.assert_allclose(y.double().numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_sizes_without_kernels_are_refused() -> None:
    with (
        pretended_gpu(),
        pytest.raises(BridgeError, match="rank 528, 16 rotated, 16 plain and 16 value elements: CUDA"),
    ):
        Setup(4, 528, 16, 16, 16)


def check_prompt(setup: Setup, n: int, start: int, limit: float) -> None:

    exact = setup.attention.exact
    q, k = setup.products(n)
    # a later position is not seen
    later = torch.full((n, start + n), -torch.inf).triu(start + 1).to(torch.float32 if exact else torch.float16)
    y = setup.attention.prompt(q, k, start, later if start else None)
    assert y.dtype == (torch.float32 if exact else torch.float16)
    expected = setup.expected(q, start)
    np.testing.assert_allclose(y.double().numpy(), expected, rtol=0, atol=limit * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "precision"), [("f16", "int8"), ("q8_0", "int8"), ("f32", "f32"), ("f16", "f32")])
def test_a_prompt_in_two_parts_and_a_step_after_it(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.cuda.attention.latent_attention._EXPANDED", 1 << 13)
    limit = 1e-5 if precision == "f32" else 1e-2
    with pretended_gpu():
        setup = Setup(3, 32, 8, 12, 20, kind=kind, precision=precision)
        check_prompt(setup, 70, 0, limit)
        check_prompt(setup, 9, 70, limit)
        check_step(setup, 79, 1e-3 if kind == "q8_0" else 1e-5)


def kernels(heads: int, latent: Latent, rotated: int, capability: tuple[int, int]) -> dict[str, Any]:
    """The launches of a step."""
    from bridge.cuda.attention import latent_heads as by_head
    from bridge.cuda.attention import latent_spans

    dependent, found = capability >= (9, 0), {}
    sizes = heads, latent.rank, rotated
    for kind, cores in (("f16", True), ("q8_0", True), ("f32", False), ("f16", False), ("q8_0", False)):
        target = capability if cores else (7, 5)
        name = f"{kind}, tensor cores" if cores else kind
        found[name] = latent_spans.kernel(kind, *sizes, True, dependent, target)
    for halves, kind in ((True, "f16"), (True, "q8_0"), (False, "f32")):
        matrices = by_head.absorbing(latent, halves)
        found[f"absorb, {kind}"] = by_head.absorb_kernel(kind, heads, latent.plain, rotated, matrices, dependent)
        shape = latent_spans.shape(kind, *sizes, capability)
        assert shape is not None
        matrices = by_head.valuing(latent, halves)
        given = heads, shape.group, rotated, shape.rows, matrices, dependent
        found[f"values, {halves}, {shape.rows}"] = by_head.values_kernel(*given)
    return found


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param((9, 0), id="9.0"),
        *(
            pytest.param(capability, id="{}.{}".format(*capability), marks=pytest.mark.exhaustive)
            for capability in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0))
        ),
    ],
)
def test_machine_code_keeps_everything_in_registers(capability: tuple[int, int]) -> None:
    """DeepSeek V2 Lite's, and where the capability is not the usual one GLM-4.7-Flash's."""
    sizes = (16, Latent(512, 0, 128, 128)) if capability == (9, 0) else (20, Latent(512, 0, 192, 256))
    for name, kernel in kernels(*sizes, 64, capability).items():
        if kernel.oldest > capability:
            continue
        code = ptx.assembled(ptx.ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
        assert (code.stack, code.spills) == (0, 0), name
        assert ".local" not in code.ptx, name
        assert code.registers <= kernel.registers, name
        assert ("mma.sync" in code.ptx) == ("tensor cores" in name and capability >= (8, 0)), name
        assert code.ptx.count("griddepcontrol.wait") == kernel.dependent, name
        assert pickle.loads(pickle.dumps(kernel)) is kernel  # another process can make it
        if "absorb" not in name and "values" not in name:
            assert "ld.global.nc" not in code.ptx, name  # of rows that the launch before may have stored

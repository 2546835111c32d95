"""Attention on CUDA with all that architectures do in it, on a GPU that NumPy plays, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import Graph
from bridge.runtime.config.decoder_config import DecoderConfig, Heads
from tests.support import ptx
from tests.support.gpu.device import pretended_gpu

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
needs_compiler = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))

from bridge.cuda.attention import attention, attention_shape, prompt_attention  # noqa: E402
from bridge.cuda.attention.attention_kind import AttentionKind, supported  # noqa: E402
from bridge.cuda.attention.kv_cache import KVCache, KVForm  # noqa: E402
from bridge.cuda.attention.prompt_attention import PromptAttention  # noqa: E402
from bridge.cuda.attention.step_attention import StepAttention  # noqa: E402
from bridge.cuda.positions import Positions  # noqa: E402
from bridge.cuda.product.products import Vector  # noqa: E402
from bridge.cuda.toolchain.device import require, zeros  # noqa: E402

EPS = 1e-5


def config(heads: int, kv_heads: int, head_dim: int, rotated: int | None = None, **more: Any) -> DecoderConfig:
    """Of two layers."""
    given: dict[str, Any] = {
        "arch": "test", "layers": 2, "hidden": 64, "inner": 64, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "rotated": head_dim if rotated is None else rotated, "context": 1024, "norm_eps": EPS,
        "attention_scale": head_dim**-0.5, "graph": Graph(), "rope_base": 100.0, "rope_scaling": "none",
        "rope_factor": 1.0, "rope_original_context": 1024, "rope_attention_factor": 1.0,
    }  # fmt: skip
    return DecoderConfig(**given | more)


# of layer 0
WINDOW: dict[str, Any] = {"windows": (True, False)}
MODELS = {
    "plain": config(4, 2, 64),
    "window": config(4, 2, 64, window=130, **WINDOW),
    "short window": config(4, 1, 64, window=30, local_base=50.0, **WINDOW),
    "chunks": config(4, 2, 32, window=64, graph=Graph(chunked=True), **WINDOW),
    "cap": config(4, 2, 64, score_cap=2.0, attention_scale=0.5),
    "sinks": config(8, 1, 64, graph=Graph(sinks=True), window=70, **WINDOW),
    "sinks everywhere": config(8, 1, 64, graph=Graph(sinks=True)),
    "norms last": config(4, 2, 40, 24, graph=Graph(normed=True, norms_rotated=True)),
    "temperature, nothing rotated": config(
        6, 2, 16, graph=Graph(chunked=True, unrotated_every=1), temperature=0.5, temperature_length=40
    ),
    "neighbours, a part rotated": config(4, 2, 80, 32, graph=Graph(neighbours=True, normed=True)),
    "shared": config(4, 2, 64, shared_kv=1, graph=Graph(normed=True), window=50, windows=(True, True)),
    "heads of 512": config(8, 1, 512, 128, graph=Graph(normed=True), attention_scale=0.1),
    "others in windows": config(8, 1, 64, 16, window=40, local_heads=Heads(8, 2, 32, 32), **WINDOW),
    "20 heads a key": config(20, 1, 64, window=33, **WINDOW),
    "5 heads of 32": config(5, 1, 32),
}


def as_kept(x: np.ndarray, kv: str) -> np.ndarray:
    """Heads f64 [..., head_dim] as a cache keeps them."""
    if kv != "q8_0":
        return x.astype({"f16": np.float16, "f32": np.float32}[kv]).astype(np.float64)
    out = np.empty_like(x)
    for at in range(0, x.shape[-1], 32):
        step = np.abs(x[..., at : at + 32]).max(-1, keepdims=True) / 127
        out[..., at : at + 32] = np.rint(x[..., at : at + 32] / step) * step.astype(np.float16)
    return out


class Case:
    """A layer of a model over a cache of random numbers; `expected` is plain NumPy."""

    def __init__(self, c: DecoderConfig, layer: int, kv: str, start: int, n: int, context: int):
        rng = self.rng = np.random.default_rng(start + n)
        self.c, self.layer, self.start, self.n, self.kv = c, layer, start, n, kv
        self.heads, self.own = c.heads_of(layer), c.makes_keys(layer)
        self.device = require("cuda")
        self.cache = KVCache(c, context, kv)
        self.cache.reserve(self.device)
        self.slot = self.cache.slots[c.stored[layer]]
        for part in (self.slot.keys, self.slot.values):  # beyond the tokens: read by nobody
            given = rng.normal(size=(self.slot.rows, self.heads.kv, self.heads.dim)).astype(np.float32)
            given[start + n :] = np.nan if kv != "q8_0" else 9e4
            self.slot.form.store(part, 0, torch.from_numpy(given))
        self.before = self.stored()
        self.positions = Positions(c, self.cache.rows, None, self.device)
        width = (c.heads + 2 * self.heads.kv * self.own) * self.heads.dim
        self.qkv = rng.normal(size=(n, width)).astype(np.float32)
        self.norms = [rng.uniform(0.5, 1.5, self.heads.dim).astype(np.float32) for _ in range(2)]
        self.sinks = rng.normal(2, 2, c.heads).astype(np.float32)

    def stored(self) -> list[np.ndarray]:
        """Keys and values, f64 [kv_heads, rows, head_dim]."""
        slot = self.slot
        return [slot.form.load(p, slot.rows, slot.heads, torch.float64).numpy() for p in (slot.keys, slot.values)]

    def given(self) -> tuple[Any, ...]:
        """Norms and sinks, as `bind` and `attend` take them."""
        graph = self.c.graph
        norms = [torch.from_numpy(norm) if graph.normed else None for norm in self.norms]
        return norms if self.own else [norms[0], None], torch.from_numpy(self.sinks) if graph.sinks else None

    def _turned(self, x: np.ndarray, norm: np.ndarray, position: int) -> np.ndarray:
        c, half = self.c, self.heads.rotated // 2
        angles = c.local_angles if c.windowed(self.layer) else c.angles
        first = np.arange(half) * (2 if c.graph.neighbours else 1)
        second = first + (1 if c.graph.neighbours else half)

        def normalized(x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * norm

        if c.graph.normed and not c.graph.norms_rotated:
            x = normalized(x)
        if half:
            cos, sin = (part[0].astype(np.float64) for part in angles(position + 1, None, position))
            one, other = x[:, first], x[:, second]
            x = x.copy()
            x[:, first], x[:, second] = one * cos - other * sin, one * sin + other * cos
        return normalized(x) if c.graph.norms_rotated else x

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The result f64 [n, heads * head_dim], and what the cache holds then."""
        c, d, kv = self.c, self.heads.dim, self.heads.kv
        keys, values = (part.copy() for part in self.before)
        queries = []
        for t in range(self.n):
            position, row = self.start + t, self.qkv[t].astype(np.float64).reshape(-1, d)
            queries.append(self._turned(row[: c.heads], self.norms[0], position))
            if self.own:
                key = self._turned(row[c.heads : c.heads + kv], self.norms[1], position)
                keys[:, position], values[:, position] = as_kept(key, self.kv), as_kept(row[c.heads + kv :], self.kv)
        out = np.empty((self.n, c.heads, d))
        temperatures = c.temperatures(self.cache.rows) if c.tempered(self.layer) else None
        for t in range(self.n):
            position = self.start + t
            seen = np.arange(position + 1)
            if c.windowed(self.layer):
                same = seen // c.window == position // c.window
                seen = seen[same if c.graph.chunked else position - seen < c.window]
            for h in range(c.heads):
                own = h // (c.heads // kv)
                scores = keys[own, seen] @ queries[t][h] * c.attention_scale
                if temperatures is not None:
                    scores *= temperatures[position]
                if c.score_cap:
                    scores = c.score_cap * np.tanh(scores / c.score_cap)
                sink = [self.sinks[h]] if c.graph.sinks else []
                weights = np.exp(scores) / np.exp(np.append(scores, sink)).sum()
                out[t, h] = weights @ values[own, seen]
        return out.reshape(self.n, -1), [keys, values]

    def check(self, found: Any, rtol: float, atol: float) -> None:
        """The result, and the cache, of which nothing else may have changed."""
        expected, stored = self.expected()
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
        for before, now, wanted in zip(self.before, self.stored(), stored, strict=True):
            new = slice(self.start, self.start + self.n)
            np.testing.assert_allclose(now[:, new], wanted[:, new], rtol=1e-3, atol=0.02 if self.kv == "q8_0" else 1e-3)
            before[:, new] = now[:, new]
            np.testing.assert_array_equal(now, before)


def step(case: Case, exact: bool = False, dependent: bool = True) -> np.ndarray:
    """The result of the launches of a token, twice."""
    state = zeros(case.device, (1, attention.STATE), torch.int32)
    state[0, attention.POSITION] = case.start
    shared = StepAttention(case.c, case.cache, case.positions, state, exact, dependent, case.device)
    out = Vector(case.c.heads * case.heads.dim, case.device, "f32" if exact else "int8")
    for _ in range(2):  # counters are as before
        out.floats.fill_(float("nan"))
        shared.attend(case.layer, torch.from_numpy(case.qkv[:1]), out, *case.given())
    if case.heads.dim % 32 == 0:  # otherwise the second launch makes them
        again = Vector(out.floats.shape[1], case.device, "f32" if exact else "int8")
        again.floats.copy_(out.floats)
        again.record()
        np.testing.assert_array_equal(out.records.buffer, again.records.buffer)
    return out.floats.numpy()


# a model, its layer, kind of cache, position and compute capability
STEPS: list[Any] = [
    ("window", 0, "f16", 300, (9, 0)),  # begins within a tile; several spans
    ("window", 0, "q8_0", 301, (9, 0)),
    pytest.param(*("window", 0, "f32", 303, (9, 0)), marks=pytest.mark.exhaustive),
    ("window", 0, "f16", 299, (7, 5)),
    ("window", 0, "f16", 129, (9, 0)),  # just what there is
    ("window", 1, "f16", 300, (9, 0)),  # the layer without one
    pytest.param(*("short window", 0, "q8_0", 77, (9, 0)), marks=pytest.mark.exhaustive),
    ("short window", 0, "q8_0", 78, (7, 5)),
    ("chunks", 0, "f16", 127, (9, 0)),
    ("chunks", 0, "f16", 128, (9, 0)),
    pytest.param(*("chunks", 0, "q8_0", 129, (7, 5)), marks=pytest.mark.exhaustive),
    ("cap", 0, "f16", 140, (9, 0)),
    pytest.param(*("cap", 0, "q8_0", 20, (7, 5)), marks=pytest.mark.exhaustive),
    ("sinks", 0, "f16", 200, (9, 0)),
    ("sinks everywhere", 0, "f16", 200, (9, 0)),
    pytest.param(*("sinks everywhere", 0, "q8_0", 0, (7, 5)), marks=pytest.mark.exhaustive),
    ("norms last", 0, "f16", 70, (9, 0)),
    ("temperature, nothing rotated", 0, "f16", 130, (9, 0)),
    pytest.param(*("temperature, nothing rotated", 0, "q8_0", 33, (9, 0)), marks=pytest.mark.exhaustive),
    ("neighbours, a part rotated", 0, "q8_0", 66, (9, 0)),
    ("shared", 1, "f16", 100, (9, 0)),
    pytest.param(*("shared", 1, "f32", 40, (9, 0)), marks=pytest.mark.exhaustive),
    ("heads of 512", 0, "f16", 75, (9, 0)),
    ("heads of 512", 0, "q8_0", 20, (9, 0)),
    pytest.param(*("heads of 512", 0, "f16", 20, (7, 5)), marks=pytest.mark.exhaustive),
    pytest.param(*("heads of 512", 0, "f32", 9, (9, 0)), marks=pytest.mark.exhaustive),
    ("others in windows", 0, "f16", 90, (9, 0)),
    pytest.param(*("others in windows", 1, "f16", 90, (9, 0)), marks=pytest.mark.exhaustive),
    pytest.param(*("20 heads a key", 0, "f16", 90, (9, 0)), marks=pytest.mark.exhaustive),
    ("20 heads a key", 0, "q8_0", 91, (9, 0)),
    pytest.param(*("20 heads a key", 0, "f16", 90, (7, 5)), marks=pytest.mark.exhaustive),
    ("5 heads of 32", 0, "q8_0", 3, (9, 0)),
    ("plain", 0, "f16", 1087, (9, 0)),  # spans that 64 does not divide
]


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize(("name", "layer", "kv", "position", "capability"), STEPS)
def test_a_token_s_attention_is_numpy_s(
    name: str, layer: int, kv: str, position: int, capability: tuple[int, int]
) -> None:
    with pretended_gpu(capability=capability, overlapping=True):
        case = Case(MODELS[name], layer, kv, position, 1, position // 64 * 64 + 64)
        case.check(step(case, dependent=capability >= (9, 0)), rtol=2e-4, atol=2e-5)


@needs_compiler
@pytest.mark.proof
def test_records_are_floats_where_products_are_exact() -> None:
    with pretended_gpu(overlapping=True):
        case = Case(MODELS["short window"], 0, "f16", 50, 1, 64)
        case.check(step(case, exact=True), rtol=2e-4, atol=2e-5)


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "position", "rows"),
    [
        ("plain", 1087, 1088),
        ("window", 1087, 132),
        ("window", 300, 133),
        ("chunks", 300, 45),
        ("20 heads a key", 78, 35),
    ],
)
def test_keys_and_values_that_the_token_attends_to_are_loaded_once_and_no_others(
    name: str, position: int, rows: int
) -> None:
    """From a multiple of 4 on, for all query heads; those between spans and the end of a tile again."""
    with pretended_gpu(overlapping=True) as gpu:
        case = Case(MODELS[name], 0, "f16", position, 1, position + 1)
        step(case)
        assert gpu.memory is not None
        once = rows * case.heads.kv * case.heads.dim * 2
        for region in gpu.memory.regions[7:9]:
            assert once <= region.fetched <= 1.1 * once + 16 * 32 * case.heads.kv


def prompt(case: Case, exact: bool = False) -> np.ndarray:
    """The result of a batch of tokens."""
    shared = PromptAttention(case.c, case.cache, case.positions, exact, case.device, case.start, case.n)
    return shared.attend(case.layer, torch.from_numpy(case.qkv), *case.given()).float().numpy()


@needs_compiler
@pytest.mark.parametrize("start", [0, 75])
@pytest.mark.parametrize(
    ("name", "layer", "kv"),
    [
        ("window", 0, "f16"),
        ("short window", 0, "q8_0"),
        ("chunks", 0, "f32"),
        ("cap", 0, "f16"),
        ("sinks", 0, "f16"),
        ("sinks everywhere", 0, "q8_0"),
        ("norms last", 0, "f16"),
        ("temperature, nothing rotated", 0, "f16"),
        ("neighbours, a part rotated", 0, "f16"),
        ("shared", 1, "f16"),
        ("heads of 512", 0, "f16"),
        ("others in windows", 0, "f16"),
        ("others in windows", 1, "f16"),
    ],
)
def test_a_prompt_s_attention_is_numpy_s(
    name: str, layer: int, kv: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 tokens, with scores in pieces where torch's attention does not do."""
    monkeypatch.setattr(prompt_attention, "PIECE", 12 * 8 * 145 * 9)
    with pretended_gpu():
        case = Case(MODELS[name], layer, kv, start, 70, 192)
        exact = kv == "f32"
        case.check(prompt(case, exact), rtol=1e-4 if exact else 1e-2, atol=1e-5 if exact else 0.01)


# --- what there are kernels for ---


def heads(head_dim: int, group: int, rotated: int | None = None, **more: Any) -> AttentionKind:
    return AttentionKind(head_dim, group, head_dim if rotated is None else rotated, **more)


KINDS = {  # of released models
    "gemma 2": heads(256, 2, windowed=True, capped=True),
    "gemma 2, 27B": heads(128, 2, capped=True),
    "gemma 3": heads(256, 4, windowed=True, normed=True),
    "gemma 3n": heads(256, 4, normed=True, windowed=True, stores=False),
    "gemma 4": heads(256, 8, normed=True, windowed=True),
    "gemma 4, every position": heads(512, 8, normed=True),
    "gpt-oss": heads(64, 8, sinks=True, windowed=True),
    "qwen 3, 235B": heads(128, 16, normed=True),
    "qwen 3.5": heads(256, 16, 64, normed=True),
    "llama 4": heads(
        128, 5, neighbours=True, normed=True, norms_last=True, windowed=True, chunked=True, tempered=True
    ),
    "llama 4, every position": heads(128, 5, 0, tempered=True),
    "glm 4": heads(128, 16, 64, neighbours=True),
    "command a": heads(128, 12, neighbours=True),
    "jamba": heads(128, 20, 0),
    "gpt-2": heads(64, 1, 0),
    "phi 3": heads(96, 1),
    "phi 4 mini": heads(128, 3, 96),
    "exaone 4": heads(64, 4, normed=True, windowed=True),
    "heads of 80": heads(80, 4, 32),
    "a small one": heads(16, 4, windowed=True, capped=True, sinks=True, tempered=True),
}  # fmt: skip


def assert_in_registers(kernel: Any, capability: tuple[int, int]) -> None:
    made = ptx.assembled(ptx.ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
    assert (made.stack, made.spills) == (0, 0), kernel.name
    assert ".local" not in made.ptx, kernel.name


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "kv", "capability"),
    [
        pytest.param(*case, marks=[] if case in few else [pytest.mark.exhaustive])
        for few in [
            {("gemma 2", "f16", (9, 0)), ("gpt-oss", "f16", (8, 9)), ("gemma 4, every position", "q8_0", (9, 0))}
        ]
        for case in product(KINDS, ("f16", "q8_0", "f32"), ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)))
    ],
)
def test_machine_code_for_released_models_keeps_everything_in_registers(
    name: str, kv: str, capability: tuple[int, int]
) -> None:
    kind = KINDS[name]
    assert attention_shape.supported(kind.head_dim, kind.group, kv)
    cores = attention_shape.shape(KVForm(kv, kind.head_dim), kind.group, capability).cores
    assert cores == (capability >= (8, 0) and kv != "f32" and kind.head_dim % 32 == 0)
    assert_in_registers(attention.kernel(kind, False, kv, capability >= (9, 0), capability), capability)


@needs_compiler
@pytest.mark.proof
def test_machine_code_of_prompts_keeps_everything_in_registers() -> None:
    for name in ("gemma 3n", "llama 4"):
        assert_in_registers(prompt_attention.kernel(KINDS[name], False, "f16"), (9, 0))


def test_a_model_is_supported_if_all_its_layers_are() -> None:
    assert all(supported(c, kv) for c in MODELS.values() for kv in ("f16", "f32"))
    assert not supported(config(4, 2, 64, window=9, local_heads=Heads(4, 1, 2048, 64), **WINDOW), "f16")
    assert not supported(config(4, 3, 64), "f16")
    assert not supported(config(65, 1, 64), "f16")
    with pytest.raises(BridgeError, match="not a multiple of 16 bytes; use f16"):
        supported(MODELS["norms last"], "q8_0")


def test_a_cache_has_a_slot_for_each_layer_that_makes_keys_of_the_size_of_its_heads() -> None:
    c = MODELS["others in windows"]
    cache = KVCache(c, 100, "q8_0")
    assert [(slot.form.head_dim, slot.heads, slot.rows) for slot in cache.slots] == [(32, 2, 128), (64, 1, 128)]
    assert cache.nbytes == 2 * 128 * 2 * (32 + 4) + 2 * 128 * (64 + 4)
    assert len(KVCache(MODELS["shared"], 100).slots) == 1


@pytest.mark.parametrize("kv", ["f16", "q8_0", "f32"])
def test_layers_of_one_shape_have_kernels_of_their_own(kv: str) -> None:
    kinds = [heads(96, 4, **more) for more in ({}, {"windowed": True}, {"capped": True}, {"stores": False})]
    made = [attention.kernel(kind, False, kv, True, (9, 0)) for kind in kinds]
    assert len({kernel.name for kernel in made}) == len(kinds)


def test_layers_of_one_kind_share_a_kernel() -> None:
    c = MODELS["others in windows"]
    assert AttentionKind.of(c, 0, False) == heads(32, 4, windowed=True)
    assert AttentionKind.of(c, 1, False) == heads(64, 8, 16)
    assert AttentionKind.of(MODELS["shared"], 1, True) == heads(64, 2, normed=True, windowed=True, stores=False)
    assert AttentionKind.of(MODELS["temperature, nothing rotated"], 1, False) == heads(16, 3, 0, tempered=True)

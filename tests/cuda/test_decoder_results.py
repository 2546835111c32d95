"""The kernels of a decoder, and decoders, against NumPy and the CPU runtime: kernels run as compiled PTX."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import Decoder as CpuDecoder
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.reader import open_gguf
from bridge.runtime.sampling import Sampler, Sampling
from tests.support import ptx
from tests.support.tiny_gguf import write_decoder

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda import sampling
from bridge.cuda.attention import attention, attention_shape, prompt_attention
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.kv_cache import KVForm
from bridge.cuda.decoder import Decoder
from bridge.cuda.norm import activation_grid, activation_kernel, norm
from bridge.cuda.product.activations import Records

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.proof,
]
EPS = 1e-5
on_request = pytest.mark.exhaustive


# --- kernels ---


def as_kept(x: np.ndarray, kind: str) -> np.ndarray:
    """Heads f64 [kv, head_dim] as a cache keeps them."""
    if kind != "q8_0":
        return x.astype({"f16": np.float16, "f32": np.float32}[kind]).astype(np.float64)
    out = np.empty_like(x)
    for at in range(0, x.shape[1], 32):
        step = np.abs(x[:, at : at + 32]).max(1, keepdims=True) / 127
        out[:, at : at + 32] = np.rint(x[:, at : at + 32] / step) * step.astype(np.float16)
    return out


def turned(
    qkv: np.ndarray, heads: int, kv: int, head_dim: int, rotated: int, neighbours: bool,
    norms: tuple[np.ndarray, np.ndarray] | None, cos: np.ndarray, sin: np.ndarray,
) -> list[np.ndarray]:  # fmt: skip
    """Queries, keys and values f64 [heads or kv, head_dim], normalized and rotated."""
    q, k, v = np.split(qkv.astype(np.float64).reshape(-1, head_dim), [heads, heads + kv])
    if norms:
        q, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w for x, w in zip((q, k), norms, strict=True))
    first = np.arange(rotated // 2) * (2 if neighbours else 1)
    second = first + (1 if neighbours else rotated // 2)
    made = []
    for x in (q, k):
        y = x.copy()
        y[:, first] = x[:, first] * cos - x[:, second] * sin
        y[:, second] = x[:, first] * sin + x[:, second] * cos
        made.append(y)
    return [*made, v]


def attention_reference(
    qkv: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, heads: int, rotated: int, neighbours: bool,
    norms: tuple[np.ndarray, np.ndarray] | None, cos: np.ndarray, sin: np.ndarray, kind: str,
) -> np.ndarray:  # fmt: skip
    """The result f64 [heads * head_dim]; puts the new key and value into keys and values f64 [kv, rows, head_dim]."""
    kv, _, d = keys.shape
    q, k, v = turned(qkv, heads, kv, d, rotated, neighbours, norms, cos[position], sin[position])
    keys[:, position], values[:, position] = as_kept(k, kind), as_kept(v, kind)
    out = np.empty((heads, d))
    for h in range(heads):
        own = h // (heads // kv)
        scores = keys[own, : position + 1].astype(np.float64) @ q[h] / np.sqrt(d)
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ values[own, : position + 1].astype(np.float64)
    return out.reshape(-1)


@pytest.mark.parametrize(
    ("heads", "kv", "head_dim", "rotated", "neighbours", "normed", "position", "kind"),
    [
        pytest.param(2, 1, 32, 32, True, False, 0, "f16", marks=on_request),
        (4, 2, 32, 16, False, True, 55, "f16"),
        (5, 1, 40, 40, True, True, 20, "f16"),
        # the last row that there is, in spans that 8 does not divide
        pytest.param(1, 1, 64, 64, False, False, 63, "f16", marks=on_request),
        pytest.param(2, 1, 32, 32, True, False, 9, "f32", marks=on_request),
        (1, 1, 40, 40, False, False, 7, "f32"),
        pytest.param(2, 1, 32, 32, True, False, 63, "q8_0", marks=on_request),
        (1, 1, 80, 80, False, True, 5, "q8_0"),  # the last block is half a one
        # spans as on a GPU, and a context's end that they do not share evenly
        *(
            pytest.param(8, 2, 128, 128, True, False, 1087, kind, marks=pytest.mark.xdist_group("attention"))
            for kind in ("f16", "q8_0")
        ),
        (4, 1, 512, 512, False, True, 40, "f16"),
        pytest.param(4, 1, 512, 512, False, True, 40, "q8_0", marks=on_request),
    ],
)
def test_attention_rotates_stores_and_sums(
    heads: int, kv: int, head_dim: int, rotated: int, neighbours: bool, normed: bool, position: int, kind: str
) -> None:
    rng = np.random.default_rng(position)
    rows, group = (position // 64 + 1) * 64, heads // kv
    form = KVForm(kind, head_dim)
    own_keys, own_values = (torch.zeros(form.words(kv * rows), dtype=torch.int32) for _ in range(2))
    for part in (own_keys, own_values):
        form.store(part, 0, torch.from_numpy(rng.normal(size=(rows, kv, head_dim)).astype(np.float32)))
    keys, values = (form.load(part, rows, kv, torch.float64).numpy() for part in (own_keys, own_values))
    qkv = rng.normal(size=(heads + 2 * kv) * head_dim).astype(np.float32)
    q_norm, k_norm = (rng.uniform(0.5, 1.5, head_dim).astype(np.float32) for _ in range(2))
    angles = rng.uniform(0, 6, (rows, rotated // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norms = (q_norm, k_norm) if normed else None
    expected = attention_reference(qkv, keys, values, position, heads, rotated, neighbours, norms, cos, sin, kind)
    spans = attention_shape.spans(132, kv, rows)
    parts = np.full(heads * spans * head_dim, np.nan, np.float32)
    sums = np.full(2 * heads * spans, np.nan, np.float32)
    counters, state = np.zeros(kv, np.int32), np.array([position, 0, 0, 0], np.int32)
    out = np.full(heads * head_dim, np.nan, np.float32)
    records = Records(-(-out.size // 32) * 32, 1)
    dependent = head_dim == 128  # as tests/cuda/test_decoder.py compiles it too
    capability = (7, 5) if head_dim == 64 else (9, 0)  # on tensor cores: f16 with heads that are multiples of 32
    described = AttentionKind(head_dim, group, rotated, neighbours, normed)
    kernel = attention.kernel(described, False, kind, dependent, capability)
    arguments = [
        qkv, q_norm, k_norm, cos.reshape(-1), sin.reshape(-1), qkv, qkv, own_keys.numpy(), own_values.numpy(),
        state, parts, sums, counters, out, records.buffer, np.int32(rows), np.int32(0), np.float32(EPS),
        np.float32(head_dim**-0.5), np.float32(0),
    ]  # fmt: skip
    kernel.launch((kv, spans), attention_shape.shape(form, group, capability).threads, 0, *arguments)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    found_keys, found_values = (form.load(part, rows, kv, torch.float64).numpy() for part in (own_keys, own_values))
    np.testing.assert_allclose(found_keys, keys, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found_values, values, rtol=1e-6 if kind == "q8_0" else 0)
    assert not counters.any()
    if attention.recorded(head_dim):
        assert_records(records, out)


@pytest.mark.parametrize(
    ("heads", "kv", "head_dim", "rotated", "neighbours", "normed", "exact", "kind"),
    [
        (4, 2, 32, 16, False, True, False, "f16"),
        pytest.param(5, 1, 40, 40, True, True, True, "f16", marks=on_request),
        pytest.param(2, 2, 32, 32, True, False, False, "f32", marks=on_request),
        pytest.param(1, 1, 80, 80, False, True, False, "q8_0", marks=on_request),
        (14, 2, 128, 128, False, False, False, "q8_0"),
    ],
)
def test_a_prompt_s_queries_and_keys_are_rotated_and_the_cache_filled_in_one_launch(
    heads: int, kv: int, head_dim: int, rotated: int, neighbours: bool, normed: bool, exact: bool, kind: str
) -> None:
    rng = np.random.default_rng(head_dim + heads)
    start, n, rows, group = 7, 3, 64, heads // kv
    form = KVForm(kind, head_dim)
    keys, values = (torch.zeros(form.words(kv * rows), dtype=torch.int32) for _ in range(2))
    qkv = rng.normal(size=(n, (heads + 2 * kv) * head_dim)).astype(np.float32)
    norms = tuple(rng.uniform(0.5, 1.5, head_dim).astype(np.float32) for _ in range(2)) if normed else None
    angles = rng.uniform(0, 6, (rows, rotated // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    queries = np.zeros(heads * n * head_dim, np.float32 if exact else np.int16)
    prompt_attention.kernel(AttentionKind(head_dim, group, rotated, neighbours, normed), exact, kind).launch(
        (kv, n), prompt_attention.PREPARE_THREADS, 0, qkv, *(norms or (cos.reshape(-1),) * 2), cos.reshape(-1),
        sin.reshape(-1), cos.reshape(-1), keys.numpy(), values.numpy(), queries, np.int32(rows), np.int32(start),
        np.float32(EPS),
    )  # fmt: skip
    found = queries if exact else queries.view(np.float16).astype(np.float32)
    stored = [form.load(part, rows, kv, torch.float64).numpy() for part in (keys, values)]
    for i in range(n):
        at = start + i
        q, k, v = turned(qkv[i], heads, kv, head_dim, rotated, neighbours, norms, cos[at], sin[at])
        limit = {"rtol": 1e-5 if exact else 1e-3, "atol": 1e-5}
        np.testing.assert_allclose(found.reshape(heads, n, head_dim)[:, i], q, **limit)
        for part, wanted in zip(stored, (k, v), strict=True):
            np.testing.assert_allclose(
                part[:, at], as_kept(wanted, kind), rtol=1e-3, atol=0.02 if kind == "q8_0" else 1e-5
            )
    for part in stored:
        assert not part[:, :start].any()
        assert not part[:, start + n :].any()


@pytest.mark.parametrize(
    ("heads", "kind"),
    [
        pytest.param(4, "f16", marks=pytest.mark.xdist_group("attention")),
        pytest.param(8, "f16", marks=pytest.mark.exhaustive),
        pytest.param(7, "q8_0", marks=pytest.mark.exhaustive),
        pytest.param(4, "f32", marks=pytest.mark.exhaustive),
    ],
)
def test_keys_and_values_of_a_long_context_are_loaded_once_for_all_query_heads(heads: int, kind: str, gpu: Any) -> None:
    """One KV head of four, and 8,192 positions, on a GPU of 132 multiprocessors: all its blocks run."""
    length, head_dim = 8192, 128
    spans = attention_shape.spans(132, 4, length)
    assert spans == 66
    rng = np.random.default_rng(0)
    form = KVForm(kind, head_dim)
    cache = [torch.zeros(form.words(length), dtype=torch.int32) for _ in range(2)]
    for part in cache:
        form.store(part, 0, torch.from_numpy(rng.normal(size=(length, 1, head_dim)).astype(np.float32)))
    keys, values = (form.load(part, length, 1, torch.float64).numpy() for part in cache)
    qkv = rng.normal(size=(heads + 2) * head_dim).astype(np.float32)
    cos, sin = np.ones((length, 64), np.float32), np.zeros((length, 64), np.float32)
    expected = attention_reference(qkv, keys, values, length - 1, heads, head_dim, True, None, cos, sin, kind)
    parts, sums = np.zeros(heads * spans * head_dim, np.float32), np.zeros(2 * heads * spans, np.float32)
    out, records = np.zeros(heads * head_dim, np.float32), Records(heads * head_dim, 1)
    kernel = attention.kernel(AttentionKind(head_dim, heads, head_dim, True), False, kind, True, (9, 0))
    arguments = [
        qkv, qkv, qkv, cos.reshape(-1), sin.reshape(-1), qkv, qkv, *(part.numpy() for part in cache),
        np.array([length - 1, 0, 0, 0], np.int32), parts, sums, np.zeros(1, np.int32), out, records.buffer,
        np.int32(length), np.int32(0), np.float32(EPS), np.float32(head_dim**-0.5), np.float32(0),
    ]  # fmt: skip
    kernel.launch((1, spans), attention_shape.shape(form, heads, (9, 0)).threads, 0, *arguments)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(sums[heads :: 2 * heads]) == 64  # spans of 128 positions; more than a warp has lanes
    loaded = [region.fetched for region in gpu.memory.regions[7:9]]
    once = 4 * form.words(length)
    assert all(once <= nbytes <= 1.1 * once for nbytes in loaded)


def assert_records(records: Records, values: np.ndarray) -> None:
    """They are those that a launch of their own makes."""
    precision = "f32" if records.exact else "int8"
    rows = values.reshape(-1, records.columns)
    again = Records(records.columns, len(rows), precision=precision).quantize(rows, len(rows))
    assert records.buffer.any()
    assert np.array_equal(records.buffer, again.buffer)


@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("hidden", [32, 96, 1088])
def test_norm_divides_by_the_root_of_the_mean_square(hidden: int, precision: str) -> None:
    rng = np.random.default_rng(hidden)
    x, weight = rng.normal(3, 2, (3, hidden)).astype(np.float32), rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    y = np.full((3, hidden), np.nan, np.float32)
    records = Records(hidden, 3, precision=precision)
    norm(x, y, records, EPS, weight)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    assert_records(records, y)


@pytest.mark.parametrize("added", ["as it is", "normed"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_norm_adds_first_may_subtract_the_mean_and_has_a_bias(added: str, centered: bool, weighted: bool) -> None:
    rng = np.random.default_rng(3)
    x, delta = rng.normal(1, 2, (2, 2, 1088)).astype(np.float32)
    post, weight, bias = (rng.normal(1, 2, 1088).astype(np.float32) for _ in range(3))
    y, records, state = np.full_like(x, np.nan), Records(1088, 2, precision="f32"), x.astype(np.float64)
    size = np.sqrt((delta.astype(np.float64) ** 2).mean(1, keepdims=True) + 2.5)
    state += 0.25 * (delta if added == "as it is" else delta / size * post)
    norm(
        x, y, records, EPS, weight if weighted else None, bias if weighted else None, delta,
        post if added == "normed" else None, 2.5, 0.25, centered,
    )  # fmt: skip
    np.testing.assert_allclose(x, state, rtol=1e-5, atol=1e-5)
    expected = state
    if weighted:
        middle = state - state.mean(1, keepdims=True) if centered else state
        expected = middle / np.sqrt((middle**2).mean(1, keepdims=True) + EPS) * weight + bias
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert_records(records, y)


def test_silu_gates_and_neither_overflows_nor_loses_small_gates() -> None:
    inner = 160
    rng = np.random.default_rng(0)
    both = rng.normal(0, 4, 2 * inner).astype(np.float32)
    both[:4] = -1000, 1000, -88, 0
    y = np.full(inner, np.nan, np.float32)
    records = Records(inner, 1)
    activation_kernel(False).launch(*activation_grid(inner), 0, both, y, records.buffer, np.int32(inner))
    gate = both[:inner].astype(np.float64)
    expected = gate / (1 + np.exp(np.minimum(-gate, 80))) * both[inner:]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-30)
    assert_records(records, y)


def greedy(logits: np.ndarray, blocks: int) -> tuple[int, np.ndarray]:
    state, made = np.array([7, 0, 2, 0], np.int32), np.full(4, -1, np.int32)
    tops, places, counter = np.full(blocks, np.nan, np.float32), np.full(blocks, -1, np.int32), np.zeros(1, np.int32)
    threads = sampling.GREEDY_THREADS
    kernel = sampling.greedy_kernel(threads)
    kernel.launch(blocks, threads, 0, logits, np.int32(logits.size), tops, places, counter, state, made)
    assert counter[0] == 0
    assert list(state) == [8, max(made[2], 0), 3, 0]
    return int(made[2]), made


@pytest.mark.parametrize("blocks", [1, 3])
def test_greedy_takes_the_largest_logit_and_the_first_of_equals(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    logits = rng.normal(size=301).astype(np.float32)
    assert greedy(logits, blocks)[0] == logits.argmax()
    logits[[40, 110, 300]] = 9
    assert greedy(logits, blocks)[0] == 40
    logits[:] = -np.inf
    logits[299] = -1e30
    assert greedy(logits, blocks)[0] == 299


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_of_which_one_is_not_a_number_give_no_token(wrong: float) -> None:
    """As on the CPU, where that is an error; a token that cannot be drawn may be -inf, but not all of them."""
    logits = np.zeros(301, np.float32)
    logits[slice(None) if wrong == -np.inf else 200] = wrong
    state, made = greedy(logits, 3)
    assert made[2] == state == -1
    uniform, settings = np.full(1, 0.5), np.array([1.0, 0.9, 0.1])
    state, made = np.zeros(4, np.int32), np.zeros(1, np.int32)
    order = np.argsort(np.where(np.isnan(logits), -np.inf, -logits), kind="stable")  # as torch sorts
    arguments = (logits[order], order.astype(np.int64), np.int32(logits.size), settings, uniform, state, made)
    sampling.draw_kernel(sampling.DRAW_THREADS).launch(1, sampling.DRAW_THREADS, 0, *arguments)
    assert (list(made), list(state)) == ([-1], [1, 0, 1, 0])


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.5, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.5, "top_p": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 1.0, "top_p": 0.01, "min_p": 1.0},
    ],
)
def test_draws_are_those_of_the_cpu(how: dict[str, float]) -> None:
    """From the same uniform numbers, so that their distribution is the CPU's too."""
    logits = np.random.default_rng(3).normal(0, 2, 70).astype(np.float32)
    sampler = Sampler(Sampling(top_k=0, seed=11, **how))
    draws = 4
    expected = [sampler(logits) for _ in range(draws)]
    order = np.argsort(-logits, kind="stable")
    uniform = Sampler(Sampling(seed=11)).uniform(draws)
    state, made = np.zeros(4, np.int32), np.full(draws, -1, np.int32)
    settings = np.array([how["temperature"], how["top_p"], how["min_p"]])
    for _ in range(draws):
        arguments = (logits[order], order.astype(np.int64), np.int32(logits.size), settings, uniform, state, made)
        sampling.draw_kernel(sampling.DRAW_THREADS).launch(1, sampling.DRAW_THREADS, 0, *arguments)
    assert list(made) == expected
    assert list(state) == [draws, made[-1], draws, 0]


# --- the decoder ---

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"types": {"attn_v": "Q4_1", "ffn_up": "Q5_0"}},
    "qwen2": {"arch": "qwen2", "tied": True,
              "biases": ("attn_q", "attn_v", "ffn_gate", "attn_output", "output")},
    "qwen3": {"arch": "qwen3", "types": {"": "Q8_0", "attn_k": "F16", "output": "BF16", "token_embd": "F16"}},
    "fp4": {"hidden": 64, "types": {"": "NVFP4", "attn_k": "MXFP4", "ffn_down": "F16", "output": "F16"}},
    "iq": {"hidden": 256, "inner": 256, "types": {"": "IQ2_XS", "token_embd": "IQ3_S", "attn_output": "IQ4_NL",
                                                  "ffn_down": "IQ1_M", "output": "TQ1_0"}},
}  # fmt: skip


def pair(path: Path, precision: str, context: int = 24, kv: str = "f16", **options: Any) -> tuple[CpuDecoder, Decoder]:
    file = open_gguf(write_decoder(path / "tiny.gguf", **options))
    config = read_config(file.metadata, file.path)
    cpu = CpuDecoder(file, config, context, kv, precision)
    device = Decoder(file, config, context, cpu.cache.kind, precision, "cuda")  # f32 where the CPU has no halves
    device.prepare()
    return cpu, device


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[on_request] * (name not in ("qwen2", "qwen3"))) for name in DECODERS],
)
def test_a_prompt_and_tokens_after_it_score_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    cpu, device = pair(tmp_path, "f32", **DECODERS[name])
    prompt = [3, 7, 11, 2, 9, 30, 12, 14, 5, 6]  # more than 8: as a matrix
    np.testing.assert_allclose(device.scores(prompt, 4), cpu.scores(prompt, 4), rtol=1e-3, atol=1e-3)
    states = cpu.states(prompt, 4)
    np.testing.assert_allclose(device.states(prompt, 4), states, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(device.logits(states), cpu.logits(states), rtol=1e-3, atol=1e-3)
    expected = cpu.logits(cpu.run([21]))[0]
    np.testing.assert_allclose(device.next_scores(21), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv", ["q8_0", "f32"])
def test_other_caches_score_as_they_do_on_the_cpu(kv: str, tmp_path: Path) -> None:
    cpu, device = pair(tmp_path, "f32", kv=kv, types={"": "F16"})
    assert np.abs(device.scores([3, 7, 11], 3) - cpu.scores([3, 7, 11], 3)).max() < 1e-3
    for token in (21, 4):
        assert np.abs(device.next_scores(token) - cpu.logits(cpu.run([token]))[0]).max() < 1e-3


@pytest.mark.exhaustive
def test_int8_records_cost_what_they_cost_on_the_cpu(tmp_path: Path) -> None:
    cpu, device = pair(tmp_path, "int8", types={"": "F16", "attn_output": "Q4_0", "ffn_down": "Q4_0", "output": "Q8_0"})
    for scores in (device.scores([3, 7], 2) - cpu.scores([3, 7], 2), device.next_scores(5) - cpu.logits(cpu.run([5]))):
        assert np.abs(scores).max() < 0.06  # logits have a standard deviation of 0.9


def test_a_long_prompt_goes_through_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, device = pair(tmp_path, "f32", types={"": "F16", "attn_output": "Q4_1"})
    prompt, caches = list(range(20)), []
    for batch in (9, 20):
        monkeypatch.setattr(device, "batch", batch)
        np.testing.assert_allclose(device.scores(prompt, 13), cpu.scores(prompt, 13), rtol=1e-3, atol=1e-3)
        parts = [(slot, part) for slot in device.cache.slots for part in (slot.keys, slot.values)]
        caches.append([s.form.load(part, len(prompt), s.heads, torch.float32).clone() for s, part in parts])
    torch.testing.assert_close(*caches, rtol=1e-3, atol=1e-3)


def test_what_is_drawn_is_what_the_cpu_draws_until_the_context_is_full(tmp_path: Path) -> None:
    cpu, device = pair(tmp_path, "f32", context=11, types={"": "F16"})
    prompt = list(range(9))
    for how in (Sampling(0), Sampling(1.0, 5, 0.9, 0.05, seed=7), Sampling(0.9, 0, 0.8, 0.0, seed=3)):
        made = list(device.draw(prompt, Sampler(how)))
        assert made == list(cpu.draw(prompt, Sampler(how)))
        assert len(made) == 3  # the last one need not be read


def test_tokens_that_are_kept_are_not_read_again(tmp_path: Path) -> None:
    cpu, device = pair(tmp_path, "f32", context=20, types={"": "F16"})
    first = list(device.draw(range(5), Sampler(Sampling(0))))[:3]
    text = [*range(5), *first, 9, 10]
    assert device.read[:8] == text[:8]
    read: list[int] = []
    prompt = device._prompt
    device._prompt = lambda tokens, keep: (read.extend(tokens), prompt(tokens, keep))[1]  # type: ignore[method-assign]
    for how in (Sampling(0), Sampling(0, frequency_penalty=3.0, logit_bias={4: 2.0})):  # the second one on the host
        del read[:]
        made = list(islice(device.draw(text, Sampler(how), cached=8), 4))
        assert read == [9, 10]
        assert made == list(islice(cpu.draw(text, Sampler(how)), 4))
        assert device.read[:13] == text + made[:3]


def test_what_the_kernels_are_not_made_for_is_refused(tmp_path: Path) -> None:
    file = open_gguf(write_decoder(tmp_path / "odd.gguf", head_dim=36, heads=8, types={"": "F16"}))
    config = read_config(file.metadata, file.path)
    with pytest.raises(
        BridgeError, match=r"8 heads over 1 of 36 with kv f16 cannot run on CUDA here; the CPU"
    ) as error:
        Decoder(file, config, 16, "f16", "int8", "cuda")
    assert "\n" not in str(error.value)
    with pytest.raises(BridgeError, match=r"kv 'q8_0': on CUDA a head of 40 is not a multiple of 16 bytes; use f16"):
        KVForm("q8_0", 40)
    file = open_gguf(write_decoder(tmp_path / "tiny.gguf"))
    with pytest.raises(BridgeError, match=r"unknown kv 'q4_0': choose f16, q8_0, f32"):
        Decoder(file, read_config(file.metadata, file.path), 16, "q4_0", "int8", "cuda")


def test_memory_is_counted_before_anything_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.cuda.toolchain.device.Device.free", lambda self: 1 << 20)
    file = open_gguf(write_decoder(tmp_path / "tiny.gguf"))
    with pytest.raises(BridgeError, match=r"tiny.gguf with a context of 16 needs 4\d\d.\d MiB, 1.0 MiB are free"):
        Decoder(file, read_config(file.metadata, file.path), 16, "f16", "int8", "cuda")


def test_values_that_lie_side_by_side_by_chance_are_copied_together() -> None:
    """A view of the first would end with its memory."""
    from bridge.cuda.machine import CudaMachine

    memory = np.arange(6, dtype=np.float32)
    apart = [torch.from_numpy(part)[None] for part in (memory[:4], memory[4:])]
    machine = CudaMachine.__new__(CudaMachine)
    machine.n = 1
    assert machine._together(*apart).tolist() == [memory.tolist()]
    whole = torch.from_numpy(memory)[None]
    assert machine._together(whole[:, :4], whole[:, 4:]).data_ptr() == whole.data_ptr()


def test_states_are_mixed_by_their_scores_as_in_numpy() -> None:
    from bridge.cuda.machine import CudaMachine

    rng = np.random.default_rng(2)
    weight, states = (rng.standard_normal(size).astype(np.float32) for size in (8, (3, 5, 8)))
    plain, machine = NumpyMachine.__new__(NumpyMachine), CudaMachine.__new__(CudaMachine)
    plain.config = machine.config = SimpleNamespace(norm_eps=1e-5)  # type: ignore[assignment]
    machine.weights = SimpleNamespace(vector=torch.from_numpy)  # type: ignore[assignment]
    found = machine.blend([torch.from_numpy(state) for state in states], weight)
    np.testing.assert_allclose(found, plain.blend(list(states), weight), rtol=1e-5, atol=1e-6)

"""Attention on the CPU beside a plain reference: tiles, windows, chunks, sinks, caps, several sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from bridge.runtime.cpu.ops import attention, latent_attention
from bridge.runtime.cpu.ops.program import address, bits


class Case(NamedTuple):
    """Heads, key-value heads, elements of a head; tokens and how many came before; what masks them."""

    heads: int
    kv_heads: int
    dim: int
    tokens: int
    start: int
    window: int = 0
    chunk: int = 0
    cap: float = 0.0
    sinks: bool = False
    temperatures: bool = False


CASES = [
    Case(4, 1, 64, 37, 0),
    Case(6, 2, 80, 21, 250, cap=5.0),
    Case(3, 3, 40, 70, 130, window=100),
    Case(9, 3, 16, 150, 400, window=17, sinks=True),
    Case(5, 1, 32, 60, 333, chunk=128, temperatures=True),
]


class Cache:
    """Random keys [positions, kv_heads, dim] and values in attention's layout, and as they are read from there."""

    def __init__(self, case: Case, kind: str, rng: np.random.Generator):
        count = case.start + case.tokens
        self.rows = -(-count // 16) * 16
        self.keys, self.values = rng.standard_normal((2, self.rows, case.kv_heads, case.dim), np.float32)
        self.key_scales = self.value_scales = np.zeros(1, np.float16)
        stored = self.keys, self.values
        if kind == "q8_0":
            (keys, key_scales), (values, value_scales) = self.rounded(self.keys), self.rounded(self.values)
            self.keys, self.values = keys * each(key_scales, keys), values * each(value_scales, values)
            grouped = key_scales.reshape(-1, 16, case.kv_heads, key_scales.shape[2])
            self.key_scales = np.ascontiguousarray(grouped.transpose(2, 0, 3, 1))
            self.value_scales = np.ascontiguousarray(value_scales.transpose(1, 0, 2))
            stored = keys, values
        dtype = {"f16": np.float16, "f32": np.float32, "q8_0": np.int8}[kind]
        if kind == "f16":
            self.keys, self.values = (x.astype(dtype).astype(np.float32) for x in stored)
        keys, values = (x.astype(dtype) for x in stored)
        self.key_panels = np.ascontiguousarray(keys.reshape(-1, 16, *keys.shape[1:]).transpose(2, 0, 3, 1))
        padded = np.pad(values, ((0, 0), (0, 0), (0, -case.dim % 16)))
        self.value_panels = np.ascontiguousarray(padded.reshape(*values.shape[:2], -1, 16).transpose(1, 2, 0, 3))

    @staticmethod
    def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes, as float32, and half scales of runs of 32 elements."""
        starts = range(0, x.shape[2], 32)
        scales = np.stack([np.abs(x[..., i : i + 32]).max(-1) / 127 for i in starts], -1).astype(np.float16)
        return np.rint(np.clip(x / each(scales, x), -127, 127)), scales


def each(scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The scale of each element."""
    return scales.astype(np.float32).repeat(32, axis=2)[..., : x.shape[2]]


def attended(case: Case, caches: list[Cache], queries: np.ndarray, kind: str, spans: int = 1) -> np.ndarray:
    """float32 [sequences, tokens, heads, dim], by the compiled functions."""
    count, rng = len(caches), np.random.default_rng(1)
    sinks, temperatures = extras(case)
    out, starts = np.zeros_like(queries), np.full(len(caches), case.start)
    blocks = np.zeros((count, attention.WORDS), np.int64)
    parts = rng.standard_normal((count, case.heads, spans, case.dim)).astype(np.float32)
    sums, used = np.zeros((count, case.heads, spans, 2), np.float32), np.array([spans])
    for m, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
        words: dict[int, Any] = {
            attention.Q: queries[m], attention.KEYS: cache.key_panels, attention.VALUES: cache.value_panels,
            attention.KEY_SCALES: cache.key_scales, attention.VALUE_SCALES: cache.value_scales,
            attention.START: starts[m:], attention.OUT: out[m], attention.SINKS: sinks,
            attention.TEMPERATURES: temperatures,
        }  # fmt: skip
        numbers = {
            attention.HEADS: case.heads, attention.KV_HEADS: case.kv_heads, attention.HEAD_DIM: case.dim,
            attention.CONTEXT: cache.rows, attention.TOKENS: case.tokens, attention.SCALE: bits(case.dim**-0.5),
            attention.CAP: bits(case.cap), attention.WINDOW: case.window, attention.CHUNK: case.chunk,
        }  # fmt: skip
        for word, array in words.items():
            block[word] = address(array)
        for word, number in numbers.items():
            block[word] = number
    arguments = address(blocks), count, address(used), address(parts), address(sums), spans, 0
    groups = -(-case.tokens * case.heads // case.kv_heads // attention.ROWS) * case.kv_heads * count
    items = groups * spans
    attention.function("attend", kind)(*arguments, 0, items // 3)
    attention.function("attend", kind)(*arguments, items // 3, items)
    if spans > 1:
        attention.function("merge", kind)(*arguments, 0, count * case.heads)
    return out


def extras(case: Case) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Sinks [heads] and temperatures [positions] of a case that has them."""
    rng = np.random.default_rng(2)
    sinks = rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None
    temperatures = 1 + rng.random(case.start + case.tokens).astype(np.float32) if case.temperatures else None
    return sinks, temperatures


def plain(case: Case, cache: Cache, queries: np.ndarray) -> np.ndarray:
    """float64 [tokens, heads, dim], a score after another."""
    sinks, temperatures = extras(case)
    out = np.zeros(queries.shape)
    for t in range(case.tokens):
        position = case.start + t
        first = max(0, position + 1 - case.window) if case.window else 0
        first = position // case.chunk * case.chunk if case.chunk else first
        for head in range(case.heads):
            shared = head * case.kv_heads // case.heads
            scores = cache.keys[first : position + 1, shared].astype(np.float64) @ queries[t, head] * case.dim**-0.5
            if temperatures is not None:
                scores *= temperatures[position]
            if case.cap:
                scores = case.cap * np.tanh(scores / case.cap)
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(np.float64(sinks[head])) if sinks is not None else 0)
            out[t, head] = weights @ cache.values[first : position + 1, shared] / total
    return out


@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_attends_as_the_formula_says(case: Case, kind: str) -> None:
    rng = np.random.default_rng(0)
    cache = Cache(case, kind, rng)
    queries = 3 * rng.standard_normal((1, case.tokens, case.heads, case.dim), np.float32)
    np.testing.assert_allclose(attended(case, [cache], queries, kind)[0], plain(case, cache, queries[0]), atol=2e-5)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_single_tokens_of_several_contexts_attend_over_spans(case: Case, kind: str) -> None:
    rng = np.random.default_rng(0)
    case = case._replace(tokens=1, start=case.start + 299)
    caches = [Cache(case, kind, rng) for _ in range(2)]
    queries = 3 * rng.standard_normal((2, 1, case.heads, case.dim), np.float32)
    spans = case.start // attention.SPAN + 1
    found = attended(case, caches, queries, kind, spans)
    for cache, q, result in zip(caches, queries, found, strict=True):
        np.testing.assert_allclose(result, plain(case, cache, q), atol=2e-5)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_however_a_prompt_is_cut(case: Case, kind: str) -> None:
    rng = np.random.default_rng(0)
    cache = Cache(case, kind, rng)
    queries = 3 * rng.standard_normal((1, case.tokens, case.heads, case.dim), np.float32)
    whole = attended(case, [cache], queries, kind)[0]
    cut = case.tokens // 3
    first, second = case._replace(tokens=cut), case._replace(tokens=case.tokens - cut, start=case.start + cut)
    parts = [
        attended(first, [cache], np.ascontiguousarray(queries[:, :cut]), kind)[0],
        attended(second, [cache], np.ascontiguousarray(queries[:, cut:]), kind)[0],
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
def test_latent_rows_are_keys_and_their_first_elements_values(kind: str, spans: int) -> None:
    rng = np.random.default_rng(0)
    heads, rank, rotated, start = 37, 48, 16, 300
    tokens, width = (1 if spans > 1 else 20), rank + rotated
    count = start + tokens
    rows = rng.standard_normal((count, width), np.float32)
    scales = np.zeros(1, np.float16)
    stored = rows
    if kind == "f16":
        stored = rows.astype(np.float16)
        rows = stored.astype(np.float32)
    if kind == "q8_0":
        codes, rounded_scales = Cache.rounded(rows[:, None])
        rows, stored, scales = (codes * each(rounded_scales, codes))[:, 0], codes.astype(np.int8), rounded_scales
    queries = 3 * rng.standard_normal((tokens, heads, width), np.float32)
    out = np.zeros((tokens, heads, rank), np.float32)
    block, starts, used = np.zeros(attention.WORDS, np.int64), np.array([start]), np.array([spans])
    parts, sums = np.zeros((heads, spans, rank), np.float32), np.zeros((heads, spans, 2), np.float32)
    words = {
        attention.Q: queries, attention.KEYS: stored, attention.KEY_SCALES: scales, attention.START: starts,
        attention.OUT: out,
    }  # fmt: skip
    numbers = {
        attention.HEADS: heads, attention.KV_HEADS: 1, attention.HEAD_DIM: rank, attention.ROTATED: rotated,
        attention.TOKENS: tokens, attention.SCALE: bits(0.1),
    }  # fmt: skip
    for word, array in words.items():
        block[word] = address(array)
    for word, number in numbers.items():
        block[word] = number
    arguments = address(block), 1, address(used), address(parts), address(sums), spans, 0, 0
    latent_attention.function("attend", kind)(*arguments, -(-tokens * heads // attention.ROWS) * spans)
    if spans > 1:
        attention.function("merge", kind)(*arguments, heads)
    scores = 0.1 * np.einsum("thi,pi->thp", queries, rows.astype(np.float64))
    scores[np.arange(count) > start + np.arange(tokens)[:, None, None] + np.zeros((heads, 1), int)] = -np.inf
    weights = np.exp(scores)
    expected = np.einsum("thp,pi->thi", weights / weights.sum(-1, keepdims=True), rows[:, :rank])
    np.testing.assert_allclose(out, expected, atol=2e-5)

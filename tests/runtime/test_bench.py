"""Timing products with quantized weights."""

from __future__ import annotations

import pytest

from bridge.runtime.bench import bench


def test_the_bench_tells_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []
    monkeypatch.setattr("bridge.runtime.bench._ROUNDS", 2)
    monkeypatch.setattr("bridge.runtime.bench.LARGE", (512, 256))
    monkeypatch.setattr("bridge.runtime.bench.SMALL", (256, 256))
    lines = bench("Q4_0", threads=1, progress=lambda *step: seen.append(step))
    rounds = [(size, name) for size in ("512x256", "256x256") for name in range(3)]
    assert seen == [(0, 6, ""), *((i, 6, f"Q4_0 {size}") for i, (size, _) in enumerate(rounds, 1))]
    assert len(lines) == 2

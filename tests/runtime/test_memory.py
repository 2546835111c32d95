"""What a model takes beside its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.runtime.bench import random_tensor
from bridge.runtime.config.decoder_config import Heads
from bridge.runtime.cpu.engines import prepared
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.cpu import targets
from bridge.system.cpu.memory import resident

linux = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells how much of a file is in memory")


@linux
@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
def test_a_first_token_takes_little_of_a_long_context(kind: str) -> None:
    heads, stored = Heads(4, 4, 64, 64), {layer: layer for layer in range(8)}
    config: Any = SimpleNamespace(stored=stored, heads_of=lambda _: heads, latent=None, recurrent=None)
    before = resident()
    cache = KVCache(config, 1 << 14, kind)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys[:, 0] = 1
        values[:, :, 0] = 1
    assert resident() - before < cache.nbytes / 16


@pytest.fixture
def mapped(tmp_path: Path) -> QuantTensor:
    """A matrix of a file, of several parts that are repacked one after another."""
    raw = random_tensor("Q8_0", 4096, 2048).raw
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    writer.add_tensor("w", raw.reshape(4096, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return bridge.open_gguf(tmp_path / "one.gguf")["w"]


@pytest.mark.skipif(targets.chosen() == targets.PORTABLE, reason="nothing is repacked")
def test_pages_of_the_file_are_released_as_they_are_repacked(
    mapped: QuantTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_PART", 1 << 20)
    seen: list[tuple[int, int]] = []
    release = mapped._release

    def released(first: int, stop: int) -> None:
        seen.append((first, stop))
        release(first, stop)

    monkeypatch.setattr(mapped, "_release", released)
    mapped.prepare(release=True)
    *parts, whole = seen
    assert whole == (0, mapped.nbytes)
    assert max(stop - first for first, stop in parts) <= 1 << 20
    ends = sorted(parts)
    assert ends[0][0] == 0
    assert [stop for _, stop in ends] == [*(first for first, _ in ends[1:]), mapped.nbytes]
    x = np.ones(2048, np.float32)
    again = QuantTensor("w", "Q8_0", mapped.shape, mapped.raw.copy()).prepare()
    np.testing.assert_array_equal(mapped.matvec(x), again.matvec(x))


@linux
def test_a_prepared_matrix_has_none_of_its_file_in_memory(mapped: QuantTensor, tmp_path: Path) -> None:
    mapped.raw.sum()
    assert in_memory(tmp_path / "one.gguf") > mapped.nbytes // 2
    mapped.prepare(release=True)
    assert in_memory(tmp_path / "one.gguf") < 256 << 10  # Linux maps 64 KB about a page that is read


def in_memory(file: Path) -> int:
    """Bytes of a mapped file that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and field == "Rss:":
            total += int(rest[0]) << 10
    return total

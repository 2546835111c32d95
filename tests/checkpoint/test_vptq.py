"""VPTQ: vectors of one or two codebooks, down the output features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from tests.support.described import describe
from tests.support.encode import write_folder, write_model
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.down_proj"
WORDS = (16, 64, 8)  # of the outliers', the first and the second codebook
V, OUTLIERS = 6, 4


def entry(shape: tuple[int, int], outliers: int = OUTLIERS, second: bool = True, count: int = 1) -> dict[str, Any]:
    out, columns = shape
    return {
        "in_features": columns, "out_features": out, "group_num": count, "group_size": (columns - outliers) // count,
        "vector_lens": [3 if outliers else -1, V], "num_centroids": [WORDS[0] if outliers else -1, WORDS[1]],
        "num_res_centroids": [-1, WORDS[2] if second else -1], "outlier_size": outliers, "is_indice_packed": True,
    }  # fmt: skip


def label(*names: str, **said: Any) -> dict[str, Any]:
    return {"quant_method": "vptq", "config_for_layers": {name: entry(**said) for name in names or (NAME,)}}


def vptq(
    shape: tuple[int, int], outliers: int = OUTLIERS, second: bool = True, count: int = 1, packed: bool = True
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random indices, and the weights that they stand for, vector by vector."""
    random = np.random.default_rng(0)
    (out, columns), (_, words, more) = shape, WORDS
    size, rows = (columns - outliers) // count, -(-out // V)
    first = random.integers(0, words, (count, rows, size))
    rest = random.integers(0, more, (count, rows, size))
    books = random.normal(0, 0.05, (count, words, V)).astype(np.float16)
    seconds = random.normal(0, 0.02, (count, more, V)).astype(np.float16)
    matrix = np.zeros((rows * V, columns), np.float32)
    for b, i, j in np.ndindex(count, rows, size):
        vector = books[b, first[b, i, j]].astype(np.float32)
        if second:
            vector = vector + seconds[b, rest[b, i, j]]
        matrix[i * V : (i + 1) * V, outliers + b * size + j] = vector
    tensors = {"centroids.weight": books.reshape(count, -1)}
    if second:
        tensors["res_centroids.weight"] = seconds.reshape(count, -1)
    if outliers:
        own = random.normal(0, 0.3, (WORDS[0], 3)).astype(np.float16)
        index = random.integers(0, 16, (1, -(-out // 3), 4))
        for i, j in np.ndindex(index.shape[1:]):
            matrix[3 * i : 3 * i + 3, j] = own[index[0, i, j]][: max(0, len(matrix) - 3 * i)]
        tensors |= {"outlier_centroids.weight": own.reshape(1, -1), "outlier_indices": index.astype(np.int16)}
    if packed:
        bits = 9 if second else 6
        tensors["indices"] = np.array([[streamed(first[b, i] | (rest[b, i] << 6 if second else 0), bits)
                                        for i in range(rows)] for b in range(count)])  # fmt: skip
    else:
        tensors["indices"] = first.astype(np.uint16).view(np.int16)
        if second:
            tensors["res_indices"] = rest.astype(np.int16).view(np.float16)
    perm = random.permutation(columns)
    scale, shift = (random.uniform(0.5, 1, columns).astype(np.float16) for _ in range(2))
    tensors |= {"perm": perm.astype(np.int16), "weight_scale": scale, "weight_bias": shift / 100}
    placed = np.empty_like(matrix)
    placed[:, perm] = matrix
    weights = placed[:out] * scale.astype(np.float32) + tensors["weight_bias"].astype(np.float32)
    return tensors, weights


def streamed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of numbers of some bits, the least significant first."""
    whole = sum(int(n) << bits * i for i, n in enumerate(numbers))
    return np.frombuffer(whole.to_bytes(-(-len(numbers) * bits // 32) * 4, "little"), np.int32)


def named(tensors: dict[str, np.ndarray], name: str = NAME) -> dict[str, np.ndarray]:
    return {f"{name}.{part}": x for part, x in tensors.items()}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("shape", "outliers", "second", "count"),
    [((24, 68), 4, True, 1), ((20, 68), 4, True, 2), ((24, 64), 0, False, 1), ((21, 64), 0, True, 1)],
)
def test_weights_are_sums_of_vectors(tmp_path, shape, outliers, second, count, packed):
    tensors, meant = vptq(shape, outliers, second, count, packed)
    config = label(shape=shape, outliers=outliers, second=second, count=count)
    with open_checkpoint(write_folder(tmp_path, named(tensors), config)) as checkpoint:
        weights = checkpoint.read_module(NAME).dequantize()
        assert np.allclose(weights, meant, rtol=1e-6, atol=1e-8)
        rows = np.array([7, 3])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), weights[rows])
        books = "64 and 8 vectors of 6 at 1.5 bits" if second else "64 vectors of 6 at 1 bits"
        assert checkpoint.settings() == f"codebooks of {books}" + (" with 4 outlier columns" if outliers else "")


def test_layers_of_a_kind_may_share_their_settings(tmp_path):
    tensors, meant = vptq((24, 68))
    config = {"quant_method": "vptq", "shared_layer_config": {"down_proj": entry((24, 68))}}
    with open_checkpoint(write_folder(tmp_path, named(tensors), config)) as checkpoint:
        assert np.allclose(checkpoint.read_module(NAME).dequantize(), meant, rtol=1e-6, atol=1e-8)


def test_a_model_is_requantized_within_what_its_codes_cost_at_least(tmp_path, small_model):
    entries: dict[str, Any] = {}

    def layer(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers.0.mlp" not in name:
            return None
        entries[name] = entry(weight.shape)
        return named(vptq(weight.shape)[0], name)

    config = {"quant_method": "vptq", "config_for_layers": entries}
    write_model(tmp_path / "c", small_model, layer, config, None, 1)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    coded = [t for t in report.tensors if t.has_codes]
    assert {(t.kind, t.outcome) for t in coded} == {(f"ffn_{n}", "requantized") for n in ("gate", "up", "down")}
    assert all(t.fidelity.share < 0.15 for t in coded)
    assert "VPTQ, codebooks of 3 layers" in describe(tmp_path / "c")


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("centroids.weight", None, "but no centroids.weight"),
        ("centroids.weight", np.ones((1, 60), np.float16), "contradict"),
        ("centroids.weight", np.full((1, 384), np.nan, np.float16), "NaN or infinite"),
        ("indices", np.zeros((1, 4, 17), np.int32), "contradict"),
        ("outlier_indices", np.full((1, 8, 4), 16, np.int16), "index 16, beyond 16 vectors"),
        ("perm", np.zeros(68, np.int16), "not a permutation"),
        ("weight_scale", np.ones(60, np.float16), "contradict"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, part, value, said):
    tensors, _ = vptq((24, 68))
    if value is None:
        del tensors[part]
    else:
        tensors[part] = value
    assert said in refusal(write_folder(tmp_path, named(tensors), label(shape=(24, 68))))


def test_a_config_without_codebooks_is_refused(tmp_path):
    tensors, _ = vptq((24, 68))
    folder = write_folder(tmp_path, named(tensors), {"quant_method": "vptq", "config_for_layers": {}})
    assert f"{NAME} has no vector_lens" in refusal(folder)

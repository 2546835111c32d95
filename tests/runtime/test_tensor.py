"""QuantTensor: what goes in and comes out, in numpy and torch, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import bridge
from bridge.blocks import BLOCKS, TYPES
from bridge.blocks.read import READ
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from bridge.runtime.bench import tensors_to_time
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.reader import open_gguf
from bridge.system.cpu import machine, targets
from scripts.peers.llama import ggml
from tests.support.random_blocks import random_matrix
from tests.support.tiny_gguf import write_decoder

ROWS, COLUMNS = 40, 512


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(scope="module", params=["unprepared", "prepared"])
def tensor(request, weights) -> QuantTensor:
    quantized = QuantTensor("blk.0.w", "Q4_K", weights.shape, ggml.quantize(weights, "Q4_K").reshape(-1))
    return quantized.prepare() if request.param == "prepared" else quantized


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(COLUMNS).astype(np.float32)


def test_numpy_and_torch_give_the_same_in_their_own_kind(tensor, x):
    y = tensor.matvec(x)
    assert type(y) is np.ndarray
    assert y.dtype == np.float32
    assert y.shape == (ROWS,)
    from_torch = tensor.matvec(torch.from_numpy(x))
    assert from_torch.dtype == torch.float32
    np.testing.assert_array_equal(from_torch.numpy(), y)
    both = tensor.matmul(torch.from_numpy(np.stack([x, 2 * x])))
    assert both.shape == (2, ROWS)
    np.testing.assert_allclose(both.numpy(), [y, 2 * y], rtol=1e-5, atol=1e-4)


def test_other_floats_and_strides_are_converted(tensor, x):
    half = x.astype(np.float16)
    y = tensor.matvec(half.astype(np.float32))
    np.testing.assert_array_equal(tensor.matvec(half), y)
    np.testing.assert_array_equal(tensor.matvec(torch.from_numpy(half)).numpy(), y)
    bf16 = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(tensor.matvec(bf16).numpy(), tensor.matvec(bf16.float().numpy()))
    wide = np.repeat(half.astype(np.float64), 2)
    np.testing.assert_array_equal(tensor.matvec(wide[::2]), y)
    columns = np.asfortranarray(np.stack([half, half]).astype(np.float32))
    np.testing.assert_allclose(tensor.matmul(columns), [y, y], rtol=1e-5, atol=1e-5)
    gradient = torch.from_numpy(half.astype(np.float32)).requires_grad_()
    np.testing.assert_array_equal(tensor.matvec(gradient).numpy(), y)
    np.testing.assert_array_equal(tensor.matvec(torch._neg_view(-gradient.detach())).numpy(), y)


def test_out_is_written_and_returned(tensor, x):
    out = np.empty(ROWS, np.float32)
    assert tensor.matvec(x, out=out) is out
    np.testing.assert_array_equal(out, tensor.matvec(x))
    out_torch = torch.empty(1, ROWS)
    assert tensor.matmul(torch.from_numpy(x)[None], out=out_torch) is out_torch
    np.testing.assert_array_equal(out_torch[0].numpy(), out)


def test_no_tokens_give_no_rows(tensor):
    assert tensor.matmul(np.empty((0, COLUMNS), np.float32)).shape == (0, ROWS)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x: x[:-1], r"x has shape \[511\]; must be \[512\]"),
        (lambda x: x[None], r"x has shape \[1, 512\]"),
        (lambda x: x.astype(np.int32), "dtype int32"),
        (lambda x: x.astype(np.complex64), "dtype complex64"),
        (lambda x: torch.ones(COLUMNS, dtype=torch.int8), "int8"),
        (lambda x: torch.ones(COLUMNS, device="meta"), "on meta"),
        (lambda x: torch.from_numpy(x).to_sparse(), "torch.sparse_coo; must be a dense tensor"),
        (lambda x: x.tolist(), "x is a list"),
        (lambda x: None, "x is a NoneType"),
    ],
)
def test_x_that_does_not_fit_is_refused(tensor, x, make, match):
    with pytest.raises(BridgeError, match=match) as caught:
        tensor.matvec(make(x))
    assert str(caught.value).startswith("blk.0.w: ")


def test_out_that_does_not_fit_is_refused(tensor, x):
    for out in (
        np.empty(ROWS + 1, np.float32),
        np.empty(ROWS, np.float64),
        np.empty(2 * ROWS, np.float32)[::2],
        torch.empty(ROWS),
    ):
        with pytest.raises(BridgeError, match="out is"):
            tensor.matvec(x, out=out)
    for kind in ({"dtype": torch.bfloat16}, {"device": "meta"}, {"dtype": torch.float64}):
        with pytest.raises(BridgeError, match=r"out is .*; must be contiguous float32 \[\d+\]"):
            tensor.matvec(torch.from_numpy(x), out=torch.empty(ROWS, **kind))
    with pytest.raises(BridgeError, match="precision 'int4'"):
        tensor.matvec(x, precision="int4")


def test_activations_may_lie_in_a_mapped_file(tensor, x, tmp_path):
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(tensor.matvec(mapped), tensor.matvec(x))


def test_the_operator_multiplies_as_numpys_and_torchs_does(tensor, x):
    tokens = np.stack([x, -x, 2 * x])
    batch = np.stack([tokens, -tokens])
    for kind in (np.asarray, torch.from_numpy):
        vector, matrix = kind(x), kind(tokens)
        np.testing.assert_array_equal(tensor @ vector, tensor.matvec(vector))
        np.testing.assert_array_equal(vector @ tensor.T, tensor.matvec(vector))
        np.testing.assert_array_equal(matrix @ tensor.T, tensor.matmul(matrix))
        np.testing.assert_array_equal(tensor @ matrix.T, tensor.matmul(matrix).T)
        many = tensor.matmul(kind(batch))
        assert type(many) is type(matrix)
        np.testing.assert_array_equal(many, np.stack([tensor.matmul(tokens), tensor.matmul(-tokens)]))
        np.testing.assert_array_equal(kind(batch) @ tensor.T, many)
    assert tensor.matmul(np.empty((0, 3, len(x)), np.float32)).shape == (0, 3, tensor.shape[0])
    with pytest.raises(TypeError):
        tensor @ 3
    with pytest.raises(BridgeError, match="must be"):
        tensor @ tokens  # [tokens, in] is not [in, n]


def test_a_tensor_is_no_array_and_says_how_to_get_one(tensor):
    with pytest.raises(TypeError, match=r"is quantized; its .dequantize\(\) gives an array of floats"):
        np.asarray(tensor)


def test_torchs_cpu_is_the_cpu(tensor):
    assert tensor.to(torch.device("cpu")) is tensor


def test_rows_and_dequantize_are_those_of_gguf(tensor):
    expected = gguf.quants.dequantize(tensor.raw.reshape(ROWS, -1), BLOCKS["Q4_K"].ggml)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    assert tensor.dequantize(np.float16).dtype == np.float16
    np.testing.assert_array_equal(tensor.rows([3, 0, 3]), expected[[3, 0, 3]])
    np.testing.assert_array_equal(tensor.rows(torch.tensor([5])), expected[[5]])
    assert tensor.rows(np.empty(0, np.int64)).shape == (0, COLUMNS)
    for indices in ([ROWS], [-1], [0.5], [[0]]):
        with pytest.raises(BridgeError):
            tensor.rows(indices)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=str)
def test_dequantize_is_gguf_for_every_type(block, weights):
    raw = ggml.quantize(weights, block.name)
    tensor = QuantTensor("w", block.name, weights.shape, raw.reshape(-1))
    np.testing.assert_array_equal(tensor.dequantize(), gguf.quants.dequantize(raw, block.ggml))


@pytest.mark.parametrize("type", ["MXFP4", "NVFP4", "Q2_0", "Q1_0"])
def test_dequantize_is_ggml_for_the_recent_types(type, weights):
    raw = ggml.quantize(weights, type)
    tensor = QuantTensor("w", type, weights.shape, raw.reshape(-1))
    np.testing.assert_array_equal(tensor.dequantize(), ggml.dequantize(raw, int(READ[type].ggml)))


@pytest.mark.parametrize("type", ["IQ1_M", "TQ2_0"])
def test_benchmarks_take_weights_of_any_type_that_are_finite(type):
    (tensor,) = tensors_to_time(type.lower(), [(3, 512)])
    values = tensor.dequantize()
    assert np.isfinite(values).all()
    assert 1e-3 < np.abs(values).max() < 10


def test_the_factor_of_a_tensor_is_that_of_its_rows():
    tensor, _ = random_matrix(TYPES["NVFP4"], 5, 64, factors=np.array([0.25], np.float32))
    part = tensor.slice_rows(1, 3)
    np.testing.assert_array_equal(part.dequantize(), tensor.dequantize()[1:3])
    x = np.ones(64, np.float32)
    np.testing.assert_array_equal(part.matvec(x, precision="f32"), tensor.matvec(x, precision="f32")[1:3])


def test_a_model_s_embeddings_have_the_factor_of_their_tensor(tmp_path: Path) -> None:
    """NVFP4, beside the same embeddings as floats; tokens one by one, and a prompt."""
    file = open_gguf(write_decoder(tmp_path / "tiny.gguf", hidden=64, types={"": "F16", "token_embd": "NVFP4"}))
    codes, config = file["token_embd.weight"], read_config(file.metadata, file.path)
    floats = QuantTensor(codes.name, "F32", codes.shape, codes.dequantize().reshape(-1).view(np.uint8))
    found = []
    for embedding in (codes, floats):
        file.tensors[codes.name] = embedding
        decoder = Decoder(file, config, 16, "f32", "f32")
        found.append([decoder.scores([3, 7, 2], 3), decoder.logits(decoder.run([5]))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_float_tensors_multiply(type, weights, x):
    kind = gguf.GGMLQuantizationType[type]
    raw = gguf.quants.quantize(weights, kind).view(np.uint8).reshape(-1)
    tensor = QuantTensor("w", type, weights.shape, raw)
    values = tensor.dequantize()
    np.testing.assert_allclose(values, weights, rtol=1e-2)
    np.testing.assert_allclose(tensor.matvec(x), values @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tensor.prepare().matmul(x[None])[0], values @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (5, 64), (9, 81), (300, 1000)], ids=str)
def test_float_rows_of_any_length_multiply_one_token_or_few(type, shape):
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[type]
    raw = gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind).view(np.uint8).reshape(-1)
    tensor = QuantTensor("w", type, shape, raw)
    exact = tensor.dequantize().astype(np.float64)
    for tokens in (1, 2, 4, 5):
        x = rng.standard_normal((tokens, shape[1])).astype(np.float32)
        y = np.full((tokens, shape[0]), np.nan, np.float32)
        tensor.matmul(x, out=y)
        np.testing.assert_allclose(y, x @ exact.T, rtol=1e-4, atol=1e-4)


def test_types_without_a_kernel_work_and_say_so(monkeypatch, weights, x):
    """Those that a later gguf package reads."""
    type = "IQ4_NL"
    monkeypatch.delitem(READ.types, type)
    raw = ggml.quantize(weights, type)
    tensor = QuantTensor("w", type, weights.shape, raw.reshape(-1))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]) @ x
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = tensor.prepare().matvec(x)
        tensor.matvec(x)
    assert sum(f"no kernel for {type}" in str(w.message) for w in caught) <= 1
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_matrix_of_a_3d_tensor(weights, x):
    raw = ggml.quantize(weights, "Q8_0")
    experts = QuantTensor("experts", "Q8_0", (2, ROWS // 2, COLUMNS), raw.reshape(-1))
    with pytest.raises(BridgeError, match="is not a matrix"):
        experts.matvec(x)
    np.testing.assert_array_equal(experts[1].dequantize(), experts.dequantize()[1])
    assert np.shares_memory(experts[1].raw, experts.raw)
    with pytest.raises(BridgeError, match="no matrix 2"):
        experts[2]


def test_bytes_that_are_not_the_tensor_are_refused():
    with pytest.raises(BridgeError, match="143 bytes are not Q4_K"):
        QuantTensor("w", "Q4_K", (1, 256), np.zeros(143, np.uint8))
    with pytest.raises(BridgeError, match=r"w: 0 bytes are not Q4_K of shape \[0, 256\]"):
        QuantTensor("w", "Q4_K", (0, 256), np.zeros(0, np.uint8))
    with pytest.raises(BridgeError, match=r"w: 288 bytes are not Q4_K of shape \[-1, -512\]"):
        QuantTensor("w", "Q4_K", (-1, -512), np.zeros(288, np.uint8))
    with pytest.raises(BridgeError, match="w: unknown type 'Q9': choose one of F32, F16, Q4_0"):
        QuantTensor("w", "Q9", (1, 256), np.zeros(144, np.uint8))
    with pytest.raises(BridgeError, match="w: raw must be a numpy array of uint8"):
        QuantTensor("w", "Q4_K", (1, 256), bytes(144))


def test_preparing_is_visible_and_the_file_can_be_let_go(tmp_path, weights, x):
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w", ggml.quantize(weights, "Q6_K"), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = bridge.open_gguf(path)["w"]
    assert not tensor.prepared
    assert tensor.kernel in ("portable/q6_k row-major", f"{targets.chosen()}/q6_k, rows interleaved on the way")
    y = tensor.matvec(x)
    assert tensor.prepare() is tensor
    assert tensor.prepared
    assert tensor.kernel.startswith(targets.chosen())
    tensor.release_raw()
    np.testing.assert_allclose(tensor.matvec(x), y, rtol=1e-4, atol=1e-4)
    assert tensor.rows([1]).shape == (1, COLUMNS)  # read again from the file
    assert tensor.to("cpu") is tensor
    with pytest.raises(BridgeError, match="cuda"):
        tensor.to("cuda")


CHOICE = """
import numpy as np
from bridge.runtime import QuantTensor
from bridge.runtime.bench import tensors_to_time
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.reader import open_gguf
w = QuantTensor("w", "Q8_0", (1, 32), np.zeros(34, np.uint8)).prepare()
print(w.kernel.split("/")[0])
"""


@pytest.mark.parametrize("target", targets.available())
def test_bridge_cpu_overrides_the_choice(target):
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], env={**os.environ, "BRIDGE_CPU": target}, capture_output=True, text=True
    )
    assert done.stdout.strip() == target, done.stderr


def test_a_target_that_does_not_run_here_is_refused(monkeypatch):
    monkeypatch.setenv("BRIDGE_CPU", "pentium")
    with pytest.raises(BridgeError, match=r"BRIDGE_CPU=pentium: must be one that this machine runs: .*portable"):
        targets.chosen()


def test_numba_s_cpu_settings_count_as_the_cpu(monkeypatch):
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    machine.features.cache_clear()
    try:
        assert targets.available() == ["portable"]
        monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+f16c,+fma,-avx512f")
        machine.features.cache_clear()
        assert set(targets.available()) <= {"avx2", "portable"}
    finally:
        machine.features.cache_clear()

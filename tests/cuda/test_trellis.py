"""Products with trellis codes on CUDA: what compiled PTX computes, against float64, and machine code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from bridge.nn.trellis_linear import replace_trellis
from bridge.trellis import BitshiftCodebook, TrellisLayer, streams
from bridge.trellis.gemm import layer_of
from bridge.trellis.packed import exl3_layer, qtip_layer
from bridge.trellis.vector import Code
from tests.support import ptx
from tests.support.encode import write_folder
from tests.support.encode_trellis import QTIP, Coding, exl3_tensors, gaussian_table, plain_tensors, qtip_tensors
from tests.support.gpu.disguise import disguised_gpu

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.product import fused
from bridge.cuda.product.fused import FusedOnDevice
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain import launch

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.proof,
]
TABLE = np.ones((512, 2), np.float32)
MODES = "1mad", "2mad", "3inst", "mcg", "mul1", "lut", "quantlut", "quantlut_sym"
THREE = "1mad", "quantlut_sym"  # of 3 bits in every run: a computed code and a table
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
WEIGHT = np.random.default_rng(1).normal(size=(32, 64))


def book_of(coding: Coding) -> BitshiftCodebook:
    return BitshiftCodebook(
        coding.L, coding.K, coding.V, coding.width, coding.mode, coding.tlut, coding.multiplier or None, name="layer"
    )


def qtip(coding: Coding, weight: np.ndarray = WEIGHT) -> tuple[TrellisLayer, np.ndarray]:
    layout = "swizzled" if coding.mode == "quantlut_sym" else "row-major"
    tensors, meant = qtip_tensors("m", weight, coding, layout=layout, tuned=True, search=False)
    layer = qtip_layer("m", tensors["m.trellis"], book_of(coding), (16, 16), tensors["m.SU"], tensors["m.SV"])
    return layer, meant


@pytest.mark.parametrize(
    ("mode", "bits"),
    [
        *((mode, 3 if mode in THREE else 2) for mode in MODES),
        *(pytest.param(mode, 2 if mode in THREE else 3, marks=pytest.mark.exhaustive) for mode in MODES),
    ],
)
def test_codes_are_multiplied_as_they_are(mode, bits):
    """Rows in order and swizzled; K odd too, where lanes begin in the middle of words; two tokens, two warps."""
    width, values = {"lut": (10, 1), "quantlut": (9, 2), "quantlut_sym": (9, 2)}.get(mode, (0, 1))
    table = gaussian_table(width, values) if width else None
    length = 10 if mode == "lut" else 16
    layer, _ = qtip(Coding(mode, bits, values, length, width, table, MULTIPLIERS.get(mode, 0)))
    x = np.random.default_rng(2).normal(size=(2, 64)).astype(np.float32)
    y = np.full((2, 32), np.nan, np.float32)
    code = Code.of(layer.book, layer.step, "cuda")
    fused = FusedOnDevice(layer.words, code, layer.positions, code.table(layer.book), devices.require("cuda"))
    fused.run(x, y, split=2)
    exact = x.astype(float) @ layer.decoded().T
    assert np.abs(y * code.unit - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("mode", "halves"),
    [
        ("1mad", False),
        ("quantlut_sym", True),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("1mad", True), ("quantlut_sym", False))),
    ],
)
def test_weights_are_decoded_once_for_many_tokens(mode, halves, monkeypatch):
    """Tile rows in two parts, rows swizzled in one of the two."""
    monkeypatch.setattr("bridge.cuda.product.fused._PART", 16 * 64)
    table = gaussian_table(9, 2) if mode == "quantlut_sym" else None
    layer, _ = qtip(Coding(mode, 2, 2 if table is not None else 1, 16, 9 if table is not None else 0, table))
    code = Code.of(layer.book, layer.step, "cuda")
    fused = FusedOnDevice(layer.words, code, layer.positions, code.table(layer.book), devices.require("cuda"))
    x, y = torch.randn(17, 64, generator=torch.Generator().manual_seed(4)), torch.full((17, 32), float("nan"))
    fused.run(x, y, split=2, halves=halves)
    exact = x.double().numpy() @ layer.decoded().T
    assert np.abs(y.numpy() * code.unit - exact).max() < (1e-3 if halves else 1e-6) * np.abs(exact).max()


def test_a_layer_on_the_device_multiplies_as_on_the_cpu():
    weight = np.random.default_rng(3).normal(size=(32, 192))
    layer, meant = qtip(Coding("1mad"), weight)
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    gpu = layer.to("cuda")
    exact = x.double().numpy() @ meant.T
    assert np.abs(gpu.matmul(x).numpy() - exact).max() < 3e-6 * np.abs(exact).max()
    assert gpu.matvec(x[0].half()).dtype == torch.float16
    assert gpu.to("cpu") is layer
    with pytest.raises(BridgeError, match=r"x has shape \[2, 191\]"):
        gpu.matmul(x[:2, :191])
    with pytest.raises(BridgeError, match="must be floats on cpu"):
        gpu.matmul(x.numpy())


def test_linears_of_a_model_go_to_the_device_and_back(tmp_path):
    tensors, meant = qtip_tensors("mlp", WEIGHT, Coding("1mad"), search=False)
    write_folder(tmp_path, tensors | {"mlp.bias": np.arange(32, dtype=np.float32)}, None)
    (tmp_path / "config.json").write_text(json.dumps({"quip_params": QTIP}))
    model = torch.nn.Sequential()
    model.add_module("mlp", torch.nn.Linear(64, 32))
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    exact = x.double().numpy() @ meant.T + np.arange(32)
    with disguised_gpu() as there:
        replace_trellis(model, tmp_path, device="cuda:0")
        y = model(x.to("cuda:0"))
        assert there.names
        assert str(y.device) == "cuda:0"
        assert np.abs(y.cpu().numpy() - exact).max() < 3e-6 * np.abs(exact).max()
        there.names.clear()
        with pytest.raises(BridgeError, match=r"mlp: x is torch.float32 on cpu; must be floats on cuda:0"):
            model(x)
        assert model.to("cpu").to("cpu").mlp.tensor.to("cpu") is model.mlp.tensor
        assert np.abs(model(x).numpy() - exact).max() < 3e-6 * np.abs(exact).max()
        assert not there.names


def test_exl3_and_plain_states_on_the_device():
    coding = Coding("mul1", 1, multiplier=MULTIPLIERS["mul1"])
    tensors, meant = exl3_tensors("m", np.random.default_rng(4).normal(size=(100, 128)), coding, search=False)
    scales = [tensors[f"m.{part}"].astype(np.float32) for part in ("suh", "svh")]
    layer = exl3_layer("m", tensors["m.trellis"], book_of(coding), *scales).cropped(100, 128)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    exact = x.double().numpy() @ meant.T
    assert np.abs(layer.to("cuda").matmul(x).numpy() - exact).max() < 3e-6 * np.abs(exact).max()
    tensors, meant = plain_tensors("m", (32, 128), Coding("1mad"))
    arguments = [tensors[f"m.{part}"] for part in ("trellis", "SU", "SV")]
    plain = layer_of(arguments[0], BitshiftCodebook(), 16, 16, 32.0, *arguments[1:])
    exact = x.double().numpy() @ meant.T
    assert np.abs(plain.to("cuda").matmul(x).numpy() - exact).max() < 3e-6 * np.abs(exact).max()


def test_tiles_of_other_sizes_are_for_the_cpu():
    tensors, _ = plain_tensors("m", (32, 64), Coding("1mad"), (8, 32))
    arguments = [tensors[f"m.{part}"] for part in ("trellis", "SU", "SV")]
    layer = layer_of(arguments[0], BitshiftCodebook(), 8, 32, 32.0, *arguments[1:])
    with pytest.raises(BridgeError, match="tiles of 32 x 8 multiply on the CPU only"):
        layer.to("cuda")


@pytest.mark.parametrize(
    ("mode", "tokens"),
    [
        ("mul1", 1),
        ("quantlut_sym", 8),
        *(
            pytest.param(mode, tokens, marks=pytest.mark.exhaustive)
            for mode in ("1mad", "3inst", "mul1", "quantlut_sym")
            for tokens in (1, 8)
            if (mode, tokens) not in (("mul1", 1), ("quantlut_sym", 8))
        ),
    ],
)
def test_no_kernel_spills_or_needs_more_than_64_registers(mode, tokens):
    pair = mode == "quantlut_sym"
    book = BitshiftCodebook(16, 2, 1 + pair, 9 * pair, mode, TABLE if pair else None)
    positions = {"mul1": streams.exl3(), "quantlut_sym": streams.swizzled()}.get(mode, streams.row_major(16, 16))
    lanes = fused.Lanes.of(positions)
    kernel = fused.kernel(Code.of(book, 2 + 2 * pair, "cuda"), lanes.sums, lanes.columns, 32, tokens, 4)
    for capability in ((7, 5), (9, 0)):
        made = ptx.compiled(kernel, capability)
        assert (made.stack, made.spills) == (0, 0)
        assert made.registers <= launch.MAX_REGISTERS

"""The IQ and TQ types as conversions write them: presets, imatrix, and requests that cannot be met."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.planning.options import Budget
from bridge.conversion.writing.verify import verify
from bridge.errors import BridgeError
from bridge.gguf_file.imatrix import write_imatrix
from bridge.quantize.settings import Calibration
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "Tiny", "LlamaConfig", num_hidden_layers=1)


@pytest.fixture(scope="module")
def imatrix(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    rng = np.random.default_rng(0)
    names = [t.name for t in plan_checkpoint(floats).tensors if t.layer is not None and len(t.shape) > 1]
    found = {name: (rng.lognormal(size=(1, 256)).astype(np.float32), np.ones(1, np.int64)) for name in names}
    write_imatrix(path, found, 1, ["made up"])
    return path


def types(path: Path) -> set[str]:
    return {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}


def test_a_preset_is_written_and_named_as_llama_cpp_does(floats: Path, tmp_path: Path) -> None:
    report = bridge.convert(floats, tmp_path / "m.gguf", type="IQ4_XS")
    assert types(tmp_path / "m.gguf") == {"IQ4_XS", "Q6_K"}
    file_type = gguf.GGUFReader(tmp_path / "m.gguf").fields["general.file_type"].contents()
    assert file_type == gguf.LlamaFileType.MOSTLY_IQ4_XS
    found = {t.name: t for t in verify(tmp_path / "m.gguf", floats).tensors}
    for tensor in report.tensors:
        if tensor.fidelity:
            assert found[tensor.name].fidelity.error == pytest.approx(tensor.fidelity.error)


def test_codes_that_a_type_cannot_carry_are_rounded_to_it(tmp_path: Path) -> None:
    report = bridge.convert(CHECKPOINT, tmp_path / "m.gguf", type="IQ4_NL")
    assert {t.type for t in report.tensors if "attn" in t.name and "norm" not in t.name} == {"IQ4_NL"}
    assert all(t.fidelity.kept == 0 for t in report.tensors if t.type == "IQ4_NL" and t.fidelity)


@pytest.mark.parametrize("type", ["IQ3_XXS", "IQ2_S", "IQ1_M"])
def test_types_that_llama_cpp_demands_an_imatrix_for_do_so_here(floats: Path, type: str) -> None:
    with pytest.raises(BridgeError, match=r"blk\.0\.\w+\.weight: .* with an imatrix only.* or choose IQ3_S, IQ4_XS"):
        plan_checkpoint(floats, type=type)
    with pytest.raises(BridgeError, match="with an imatrix only"):
        plan_checkpoint(CHECKPOINT, type=type)
    assert plan_checkpoint(floats, token_embd_type=type)  # embeddings have no imatrix


def test_an_imatrix_without_a_tensor_that_needs_it_is_told(floats: Path, imatrix: Path, tmp_path: Path) -> None:
    larger = save_model(tmp_path / "Larger", "LlamaConfig")
    assert {t.type for t in plan_checkpoint(floats, type="IQ2_S", imatrix=imatrix).tensors} >= {"IQ2_XS", "IQ3_S"}
    with pytest.raises(BridgeError, match=r"blk\.1\.\w+\.weight: .* the imatrix does not have it"):
        plan_checkpoint(larger, type="IQ2_XS", imatrix=imatrix)


def test_a_text_chooses_codes_of_codebooks_without_an_imatrix(floats: Path, tmp_path: Path) -> None:
    text = tmp_path / "ids.npy"
    np.save(text, np.arange(4096) % 300)
    few = Calibration(text, samples=16, length=64)
    pinned = [("attn", "IQ2_S"), ("ffn", "IQ3_XXS"), ("token_embd", "IQ4_XS")]  # which other tests compile too
    report = bridge.convert(floats, tmp_path / "m.gguf", type="IQ3_XXS", tensor_types=pinned, calibrate=few)
    of_layers = {t.type: t for t in report.tensors if t.name.startswith("blk.") and "norm" not in t.name}
    assert set(of_layers) == {"IQ2_S", "IQ3_XXS"}
    found = {t.name: t for t in verify(tmp_path / "m.gguf", floats).tensors}
    for tensor in of_layers.values():
        assert tensor.outcome == "calibrated"
        fidelity = found[tensor.name].fidelity
        assert fidelity
        assert 0 < fidelity.error < 0.5 * fidelity.signal


@pytest.mark.exhaustive  # four types to compile
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_a_text_chooses_shifted_points_and_4_bit_floats_and_files_hold_them(arch: str, tmp_path: Path) -> None:
    text = tmp_path / "ids.npy"
    np.save(text, np.arange(4096) % 300)
    few = Calibration(text, samples=16, length=64)
    pinned = {"attn_q": "NVFP4", "attn_output": "IQ1_M", "ffn_up": "IQ1_S", "ffn_gate": "NVFP4"}
    config = {"llama": "LlamaConfig", "gemma2": "Gemma2Config"}[arch]
    model = save_model(tmp_path / "Small", config, num_hidden_layers=1, tie_word_embeddings=arch == "gemma2")
    report = bridge.convert(model, tmp_path / "m.gguf", type="MXFP4", tensor_types=pinned, calibrate=few)
    matrices = [t for t in report.tensors if t.name.endswith(".weight") and "norm" not in t.name]
    layers = {t.kind: t for t in matrices if t.name.startswith("blk.")}
    assert {kind: t.type for kind, t in layers.items()} == {
        "attn_q": "NVFP4", "attn_k": "MXFP4", "attn_v": "MXFP4", "attn_output": "IQ1_M", "ffn_gate": "NVFP4",
        "ffn_up": "IQ1_S", "ffn_down": "MXFP4",
    }  # fmt: skip
    assert {t.outcome for t in layers.values()} == {"calibrated"}
    assert {t.type for t in report.tensors if t.kind in ("token_embd", "output")} == {"Q8_0"}
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in read.tensors}
    scales = {t.name: t.data.tolist() for t in read.tensors if t.name.endswith(".scale")}
    multiplied = {"blk.0.attn_q.scale": [2**-8], "blk.0.ffn_gate.scale": [2**-8]}
    assert scales == (multiplied if arch == "llama" else {})  # llama.cpp ignores gemma2's
    floats = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in as_floats(model, tmp_path).tensors}
    for tensor in layers.values():
        own = values[tensor.name] * scales.get(tensor.name.replace(".weight", ".scale"), [1])[0]
        fidelity = tensor.fidelity
        assert fidelity
        assert np.square(own - floats[tensor.name]).sum() == pytest.approx(fidelity.error, rel=1e-3)
        assert 0 < fidelity.error < fidelity.signal  # plain squares, which H of few tokens hardly bounds


def as_floats(model: Path, folder: Path) -> gguf.GGUFReader:
    bridge.convert(model, folder / "floats.gguf", type="F32")
    return gguf.GGUFReader(folder / "floats.gguf")


def test_a_text_cannot_choose_ternary_codes(floats: Path, tmp_path: Path) -> None:
    text = tmp_path / "ids.npy"
    np.save(text, np.arange(4096) % 300)
    small = Calibration(text, samples=1, length=32)
    with pytest.raises(BridgeError, match=r"\w+\.weight: no text can choose codes of TQ1_0; .*, or leave out"):
        bridge.convert(floats, tmp_path / "m.gguf", type="TQ1_0", calibrate=small)
    pinned = [("attn_q", "TQ2_0")]
    with pytest.raises(BridgeError, match="no text can choose codes of TQ2_0"):
        bridge.convert(
            floats, tmp_path / "m.gguf", tensor_types=pinned, calibrate=small, budget=Budget(size=300_000, swaps=0)
        )

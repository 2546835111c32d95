"""QTIP's and EXL3's checkpoints: read, refused where they are damaged, and made GGUF of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.decoded import DecodedTensor
from bridge.conversion.writing.report import CALIBRATED
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from bridge.quantize.settings import Calibration
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.conftest import CHECKPOINT
from tests.support.described import describe
from tests.support.encode import LINEAR, write_folder
from tests.support.encode_trellis import (
    EXL3,
    QTIP,
    Coding,
    exl3_tensors,
    gaussian_table,
    plain_tensors,
    qtip_tensors,
    write_trellis,
)
from tests.support.raw import edit_raw
from tests.support.refusal import refusal
from tests.support.tiny_models import predict, save_model

NAME = "model.layers.0.mlp.down_proj"
HYB = Coding("quantlut_sym", 2, 2, 16, 9, gaussian_table(9, 2))
SAID = {"V": 2, "tlut_bits": 9, "decode_mode": "quantlut_sym"}
MCG, MUL1 = (Coding(mode, 2, multiplier=m) for mode, m in (("mcg", 0xCBAC1FED), ("mul1", 0x83DCD12D)))


def weights(out: int = 64, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns))


def write(folder: Path, tensors: dict[str, np.ndarray], **said: object) -> Path:
    """A folder with these tensors and quip_params."""
    write_folder(folder, tensors, None)
    (folder / "config.json").write_text(json.dumps({"quip_params": {**QTIP, **said}}))
    return folder


def close(found: np.ndarray, meant: np.ndarray) -> bool:
    return found.shape == meant.shape and float(np.abs(found - meant).max()) < 4e-6 * float(np.abs(meant).max())


# QTIP


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rcp", [None, 0, 1, 2])
def test_a_module_comes_out_as_the_floats_that_were_coded(tmp_path, dtype, rcp):
    kind = np.float16 if dtype == "F16" else np.float32
    tensors, meant = qtip_tensors(
        NAME, weights(), HYB, layout="swizzled", tuned=True, rcp=rcp, dtype=kind, search=False
    )
    folder = write(tmp_path, tensors, **SAID)
    if dtype == "BF16":  # bits of float32 that are not there are cut off
        tensors, meant = half_of_float32(folder, tensors)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "QTIP quantlut_sym"
        t = checkpoint.read_module(NAME)
        assert isinstance(t, DecodedTensor)
        assert t.bits == checkpoint.modules[NAME].bits == 2
        if meant is not None:
            assert close(t.dequantize(), meant)
        x = np.random.default_rng(1).normal(size=(2, 256)).astype(np.float32)
        layer = checkpoint.read_trellis(NAME)
        np.testing.assert_allclose(layer.matmul(x), x @ t.dequantize().T, rtol=1e-5, atol=1e-5)
        if dtype == "BF16":
            su = (tensors[f"{NAME}.SU"].view(np.uint32) & 0xFFFF0000).view(np.float32)
            assert np.array_equal(layer.su, su)


def half_of_float32(folder: Path, tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], None]:
    """SU and SV of a file as BF16."""

    def change(raw):
        for part in ("SU", "SV"):
            entry, _ = raw[f"{NAME}.{part}"]
            bits = (tensors[f"{NAME}.{part}"].view(np.uint32) >> 16).astype(np.uint16)
            raw[f"{NAME}.{part}"] = ({**entry, "dtype": "BF16"}, bits.tobytes())

    edit_raw(folder / "model.safetensors", change)
    return tensors, None


def test_bits_differ_by_module_whatever_the_config_says(tmp_path):
    names = {f"model.layers.0.self_attn.{p}_proj": k for p, k in (("q", 2), ("v", 3), ("o", 4))}
    stored = {n: qtip_tensors(n, weights(), Coding("3inst", k), search=False, flat=k == 3) for n, k in names.items()}
    tensors = {name: values for parts, _ in stored.values() for name, values in parts.items()}
    tensors["model.layers.0.self_attn.v_proj.bias"] = np.arange(64, dtype=np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((64, 256), np.float16)
    folder = write(tmp_path, tensors, decode_mode="3inst", skip_list=["0_k"])
    with open_checkpoint(folder) as checkpoint:
        assert {name: info.bits for name, info in checkpoint.modules.items()} == names
        for name, (_, meant) in stored.items():
            assert close(checkpoint.read_module(name).dequantize(), meant)
        assert checkpoint.read_module("model.layers.0.self_attn.v_proj").bias.tolist() == list(range(64))
        assert set(checkpoint.tensors) == {f"model.layers.0.self_attn.{n}" for n in ("v_proj.bias", "k_proj.weight")}
        rows = np.array([3, 5, 60])
        v = checkpoint.read_module("model.layers.0.self_attn.v_proj", rows)
        assert np.array_equal(v.dequantize(), checkpoint.read_module("model.layers.0.self_attn.v_proj").weights[rows])


@pytest.mark.parametrize(
    ("name", "rcp"), [("model.layers.0.self_attn.o_proj", 1), ("model.layers.0.self_attn.q_proj", 2)]
)
def test_a_lost_rcp_is_what_split_for_tp_says(tmp_path, name, rcp):
    tensors, meant = qtip_tensors(name, weights(256, 256), Coding("1mad"), rcp=rcp, search=False)
    kept = {n: v for n, v in tensors.items() if n.rpartition(".")[2] not in ("rcp", "tp_rank")}
    with open_checkpoint(write(tmp_path, kept, split_for_tp=True)) as checkpoint:
        assert close(checkpoint.read_module(name).dequantize(), meant)
        assert "rcp is missing" in checkpoint.notes[0]


@pytest.mark.parametrize("part", ["trellis", "qweight"])
@pytest.mark.parametrize("which", ["1mad", "quantlut"])
def test_the_plain_layout_has_neither_transforms_nor_packing(tmp_path, part, which):
    coding = Coding("1mad") if which == "1mad" else Coding("quantlut", 2, 1, 16, 9, gaussian_table(9, 1))
    tensors, meant = plain_tensors(NAME, (64, 256), coding, scale=24.0)
    tensors[f"{NAME}.{part}"] = tensors.pop(f"{NAME}.trellis")
    if which == "quantlut":
        tensors[f"{NAME}.tlut"] = tensors[f"{NAME}.tlut"].reshape(-1)
    write_folder(tmp_path, tensors, None)
    said = {"quant_method": "qtip", "td_x": 16, "td_y": 16, "L": 16, "K": 2, "V": 1, "tlut_bits": coding.width}
    (tmp_path / "quantize_config.json").write_text(json.dumps({**said, "decode_mode": which, "scale": 24.0}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert close(checkpoint.read_module(NAME).dequantize(), meant)


GOOD = qtip_tensors(NAME, weights(), HYB, layout="swizzled", rcp=0, search=False)[0]


@pytest.mark.parametrize(
    ("change", "said", "found"),
    [
        ({"trellis": None}, {}, "has SU, SV, rcp, tlut, tp_rank but no trellis"),
        ({"SV": None}, {}, "but no SV"),
        ({"trellis": np.zeros((64, 31), np.int16)}, {}, "1.938 bits for each of 64 x 256 weights"),
        ({"trellis": np.zeros((64, 144), np.int16)}, {}, "9 bits for each of 64 x 256"),
        ({"trellis": np.zeros((64, 32), np.float32)}, {}, "trellis is F32 [64, 32]"),
        ({"trellis": np.zeros((1, 64), np.int32)}, {}, "packed words [1, 64], which cannot hold states of 16 bits"),
        ({"trellis": np.full((64, 128), 65536, np.int32)}, {}, "the state 65536, out of range for 16 bits"),
        ({"trellis": np.zeros((9, 256), np.int32)}, {}, "trellis is [9, 256]"),
        ({"tlut": None}, {}, "quantlut_sym needs tlut, a table of 512 x 2"),
        ({"tlut": np.ones((256, 2), np.float16)}, {}, "tlut is [256, 2] where quantlut_sym wants [512, 2]"),
        ({"tlut": np.full((512, 2), np.inf, np.float16)}, {}, "tlut holds NaN or infinite"),
        ({"SU": np.ones(255, np.float32)}, {}, "does not consist of tiles of 16 x 16"),
        ({"SU": np.ones((16, 16), np.float32)}, {}, "SU is F32 [16, 16], not a vector of floats"),
        ({"SV": np.full(64, np.nan, np.float32)}, {}, "64 of 64 values"),
        ({"rcp": np.array(3)}, {}, "rcp is 3"),
        ({"rcp": np.array(1), "tp_rank": np.array(3)}, {}, "cannot be split by tp_rank 3"),
        ({"rcp": np.array([0, 1])}, {}, "not one integer"),
        ({"bias": np.zeros(63, np.float32)}, {}, "the shapes contradict each other"),
        ({}, {"codebook": "E8P12"}, "codebook 'E8P12' is QuIP#'s"),
        ({}, {"packed_for_kernel": "no"}, "packed_for_kernel is 'no', must be true or false"),
        ({}, {"decode_mode": "4mad"}, "unknown decode_mode '4mad'; QTIP has 1mad, 2mad, 3inst, lut"),
        ({}, {"decode_mode": "mcg"}, "unknown decode_mode 'mcg'"),
        ({}, {"L": "sixteen"}, "L is 'sixteen', not a whole number"),
        ({}, {"L": 17}, "L = 17"),
        ({}, {"V": 3}, "V = 3"),
        ({}, {"td_x": 0}, "does not consist of tiles of 0 x 16"),
        ({}, {"tlut_bits": 16}, "tlut_bits = 16 does not fit quantlut_sym"),
    ],
)  # fmt: skip
def test_qtip_that_cannot_be_is_refused_by_tensor_and_fact(tmp_path, change, said, found):
    tensors = {name: values for name, values in GOOD.items() if name.rpartition(".")[2] not in change}
    tensors |= {f"{NAME}.{part}": np.asarray(values) for part, values in change.items() if values is not None}
    message = refusal(write(tmp_path, tensors, **{**SAID, **said}))
    assert found in message
    assert NAME in message or "config.json" in message


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("search", [False, None])
def test_tiles_that_were_not_packed_for_the_kernel_are_read_as_they_are(tmp_path, bits, search):
    coding = Coding("quantlut_sym", bits, 2, 16, 9, gaussian_table(9, 2))
    tensors, meant = qtip_tensors(NAME, weights(), coding, rcp=0, search=search)
    with open_checkpoint(write(tmp_path, tensors, **SAID, K=bits, packed_for_kernel=False)) as checkpoint:
        assert close(checkpoint.read_module(NAME).dequantize(), meant)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("layout", ["row-major", "swizzled"])
def test_where_the_config_does_not_say_the_codes_tell_whether_tiles_are_swizzled(tmp_path, bits, layout):
    """The reference's first release did not swizzle 3 and 4 bits, and its configs do not say so."""
    coding = Coding("quantlut_sym", bits, 2, 16, 9, gaussian_table(9, 2))
    tensors, meant = qtip_tensors(NAME, weights(), coding, layout=layout, rcp=0, search=None)
    with open_checkpoint(write(tmp_path, tensors, **SAID, K=bits)) as checkpoint:
        assert close(checkpoint.read_module(NAME).dequantize(), meant)


def test_codes_that_no_encoder_can_have_chosen_are_noted(tmp_path):
    """As those of the reference's first release are, whose tiles of 2 bits have an order that is not known here."""
    for search in (False, None):
        tensors = qtip_tensors(NAME, weights(256, 256), HYB, layout="swizzled", rcp=0, search=search)[0]
        with open_checkpoint(write(tmp_path / str(search), tensors, **SAID)) as checkpoint:
            notes = checkpoint.read_module(NAME).notes
            assert any("its codes look random" in note for note in notes) == (search is False)


def test_a_codebook_of_null_is_qtips_where_the_config_says_how_to_decode(tmp_path):
    tensors, meant = qtip_tensors(NAME, weights(), Coding("1mad"), search=False)
    with open_checkpoint(write(tmp_path / "qtip", tensors, codebook=None)) as checkpoint:
        assert close(checkpoint.read_module(NAME).dequantize(), meant)
    write_folder(tmp_path / "quip", {f"{NAME}.Qidxs": np.zeros((4, 4), np.int64)}, None)
    (tmp_path / "quip" / "config.json").write_text(json.dumps({"quip_params": {"codebook": None, "lora_rank": 0}}))
    assert "codebook None is QuIP#'s or another's" in refusal(tmp_path / "quip")


def test_codes_without_a_label_ask_for_the_config_that_says_how_to_decode_them(tmp_path):
    write_folder(tmp_path, qtip_tensors(NAME, weights(), Coding("1mad"), search=False)[0], None)
    assert f"{NAME}.trellis is QTIP's, but config.json has no quip_params" in refusal(tmp_path)


def test_a_dimension_without_a_hadamard_matrix_is_refused(tmp_path):
    tensors, _ = qtip_tensors(NAME, weights(64, 256), Coding("1mad"), search=False)
    tensors[f"{NAME}.SU"] = np.ones(16 * 11, np.float32)
    tensors[f"{NAME}.trellis"] = np.zeros((44, 32), np.int16)
    assert f"{NAME}: no Hadamard matrix is known for 176" in refusal(write(tmp_path, tensors))


def test_quip_sharp_is_named_without_any_codebook_that_is_known(tmp_path):
    write_folder(tmp_path, {f"{NAME}.Qidxs": np.zeros((4, 4), np.int64)}, None)
    (tmp_path / "config.json").write_text(json.dumps({"quip_params": {"codebook": "E8P12RVQ4B", "lora_rank": 0}}))
    assert "codebook 'E8P12RVQ4B' is QuIP#'s or another's" in refusal(tmp_path)


def test_only_trellis_codes_are_read_as_a_layer():
    with open_checkpoint(CHECKPOINT) as checkpoint, pytest.raises(BridgeError, match="is gptq, not trellis codes"):
        checkpoint.read_trellis(next(iter(checkpoint.modules)))


# EXL3


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("coding", "bits"), [(Coding("3inst"), 1), (MCG, 3), (MUL1, 8)])
def test_exl3_comes_out_as_the_floats_that_were_coded(tmp_path, coding, bits, legacy):
    own = Coding(coding.mode, bits, multiplier=coding.multiplier)
    tensors, meant = exl3_tensors(NAME, weights(128, 256), own, legacy=legacy, search=False)
    with open_checkpoint(write_folder(tmp_path, tensors, EXL3)) as checkpoint:
        assert checkpoint.format == "EXL3"
        t = checkpoint.read_module(NAME)
        assert t.bits == bits
        assert close(t.dequantize(), meant)


def test_the_codebooks_multiplier_is_the_tensors_own(tmp_path):
    coding = Coding("mcg", 2, multiplier=0xFC83FFFD)
    tensors, meant = exl3_tensors(NAME, weights(128, 128), coding, search=False)
    with open_checkpoint(write_folder(tmp_path, tensors, EXL3)) as checkpoint:
        assert close(checkpoint.read_module(NAME).dequantize(), meant)


def test_a_bias_says_how_many_rows_are_no_padding(tmp_path):
    tensors, meant = exl3_tensors(NAME, weights(180, 128), MCG, search=False)
    tensors[f"{NAME}.bias"] = np.zeros(180, np.float16)
    with open_checkpoint(write_folder(tmp_path, tensors, EXL3)) as checkpoint:
        assert checkpoint.modules[NAME].shape == (180, 128)
        assert close(checkpoint.read_trellis(NAME).dequantize(), meant)


@pytest.mark.parametrize(
    ("parts", "minus"),
    [(("suh", "sv"), 1), (("su", "svh"), 1), (("suh", "svh", "su"), 0), (("suh", "svh", "sv"), 0), (("su", "sv"), 2)],
)
def test_each_side_has_floats_or_signs_and_floats_count(tmp_path, parts, minus):
    """Here floats are all one, signs all minus."""
    both = [exl3_tensors(NAME, weights(128, 256), MCG, legacy=legacy, search=False)[0] for legacy in (False, True)]
    tensors = {part: (both[0] | both[1])[f"{NAME}.{part}"] for part in ("trellis", "mcg", "suh", "svh", "su", "sv")}
    tensors |= {part: np.ones_like(tensors[part]) for part in ("suh", "svh")}
    tensors |= {part: np.full_like(tensors[part], -1) for part in ("su", "sv")}  # every bit is set

    def weight(folder: Path, *sides: str) -> np.ndarray:
        stored = {f"{NAME}.{part}": tensors[part] for part in ("trellis", "mcg", *sides)}
        with open_checkpoint(write_folder(folder, stored, EXL3)) as checkpoint:
            return checkpoint.read_module(NAME).dequantize()

    assert np.array_equal(weight(tmp_path / "m", *parts), (-1) ** minus * weight(tmp_path / "plain", "suh", "svh"))


@pytest.mark.parametrize("label", [None, "quantization_config.json"])
def test_exl3_is_known_by_its_tensors_and_by_its_other_file(tmp_path, label):
    tensors, meant = exl3_tensors(NAME, weights(128, 256), MCG, search=False)
    write_folder(tmp_path, tensors, None)
    if label is not None:
        (tmp_path / label).write_text(json.dumps({**EXL3, "tensor_storage": {NAME: {"quant_format": "exl3"}}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "EXL3"
        assert close(checkpoint.read_module(NAME).dequantize(), meant)
        assert checkpoint.quant.labelled == (label is not None)
        assert any("no config describes the quantization" in note for note in checkpoint.notes) == (label is None)


@pytest.mark.parametrize("value", ["many", [2], True, 0, -1, 17, float("nan")])
@pytest.mark.parametrize("key", ["bits", "head_bits"])
def test_exl3s_bits_must_be_a_number(tmp_path, key, value):
    tensors = exl3_tensors(NAME, weights(128, 256), MCG, search=False)[0]
    message = refusal(write_folder(tmp_path, tensors, EXL3 | {key: value}))
    assert f"{key} is {value!r}, must be a number up to 16" in message


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"trellis": np.zeros((16, 8, 40), np.int16)}, "has 40 words for a tile"),
        ({"trellis": np.zeros((16, 8, 144), np.int16)}, "has 144 words for a tile"),
        ({"trellis": np.zeros((16, 256), np.int16)}, "the shapes contradict each other"),
        ({"trellis": np.zeros((15, 8, 32), np.int16)}, "128 x 240, not multiples of the transforms' 128"),
        ({"suh": None}, "but no suh"),
        ({"suh": np.ones(128, np.float16)}, "the shapes contradict each other"),
        ({"svh": np.full(128, np.inf, np.float16)}, "128 of 128 values"),
        ({"mcg": np.zeros(2, np.int32)}, "mcg is int32 [2], not one integer"),
        ({"bias": np.zeros(129, np.float16)}, "the shapes contradict each other"),
    ],
)
def test_exl3_that_cannot_be_is_refused_by_tensor_and_fact(tmp_path, change, found):
    tensors = exl3_tensors(NAME, weights(128, 256), MCG, search=False)[0]
    tensors = {name: values for name, values in tensors.items() if name.rpartition(".")[2] not in change}
    tensors |= {f"{NAME}.{part}": values for part, values in change.items() if values is not None}
    message = refusal(write_folder(tmp_path, tensors, EXL3))
    assert found in message
    assert NAME in message


# to GGUF


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama of one layer whose linears are 2 x 4 blocks of 128."""
    folder = tmp_path_factory.mktemp("tiny") / "float"
    return save_model(folder, "LlamaConfig", num_hidden_layers=1, intermediate_size=512, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def coded(tiny, tmp_path_factory) -> dict[str, tuple[Path, dict[str, np.ndarray]]]:
    """The same as QTIP, searched for with states of 10 bits; and as EXL3 with a head of its own, of random codes."""
    root = tmp_path_factory.mktemp("coded")
    small = Coding("1mad", L=10)
    qtip = write_trellis(
        root / "qtip", tiny, lambda n, w, i: qtip_tensors(n, w, small, seed=i), {"quip_params": {**QTIP, "L": 10}}
    )
    head = {"lm_head.weight": np.random.default_rng(5).normal(0, 0.05, (320, 256)).astype(np.float32)}
    with_head = shutil.copytree(tiny, root / "with head")
    save_file(load_file(tiny / "model.safetensors") | head, with_head / "model.safetensors", {"format": "pt"})
    exl3 = write_trellis(
        root / "exl3", with_head, lambda n, w, i: exl3_tensors(n, w, MUL1, search=False, seed=i),
        {"quantization_config": EXL3}, LINEAR.pattern + "|lm_head",
    )  # fmt: skip
    return {"qtip": (root / "qtip", qtip), "exl3": (root / "exl3", exl3)}


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A random Llama of one layer as EXL3, its sides of 192 and 320 padded to 256 and 384."""
    root = tmp_path_factory.mktemp("padded")
    sides = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = save_model(root / "float", "LlamaConfig", num_hidden_layers=1, **sides)
    meant = write_trellis(
        root / "exl3", folder, lambda n, w, i: exl3_tensors(n, w, MCG, search=False, seed=i),
        {"quantization_config": EXL3},
    )  # fmt: skip
    return root / "exl3", meant


def test_padding_is_left_out(tmp_path, padded):
    folder, meant = padded
    report = bridge.convert(folder, tmp_path / "model.gguf")
    made = gguf_weights(tmp_path / "model.gguf")
    for name, w in meant.items():
        assert made[f"{name}.weight"].shape == w.shape
        assert np.square(made[f"{name}.weight"] - w).sum() < 0.011 * np.square(w).sum()
    assert {t.type for t in report.tensors if t.has_codes} == {"Q4_0"}
    assert failures(verify(tmp_path / "model.gguf", folder)) == []


def test_the_encoders_codes_stand_for_the_weights_that_they_were_made_of(tiny, coded):
    """At K = 2 and L = 10, 0.077 of the variance is lost; at L = 16, which takes 64 times as long, 0.070."""
    from tests.support.encode import load_floats

    floats = load_floats(tiny)
    for name, meant in coded["qtip"][1].items():
        w = floats[f"{name}.weight"]
        assert 0.06 < np.square(meant - w).mean() / np.square(w).mean() < 0.09


@pytest.mark.parametrize("which", ["qtip", "exl3"])
def test_a_checkpoint_becomes_a_gguf_that_llama_cpp_runs_as_transformers_runs_its_weights(tmp_path, tiny, coded, which):
    folder, meant = coded[which]
    path = tmp_path / "model.gguf"
    report = bridge.convert(folder, path)
    made = gguf_weights(path)
    for name, w in meant.items():
        assert np.square(made[f"{name}.weight"] - w).sum() < 0.011 * np.square(w).sum()  # 15% of 0.07
    linears = [t for t in report.tensors if str(t.source).removesuffix(".weight") in meant]
    assert {t.type for t in linears} == {"Q4_K"}
    assert all(t.fidelity.kept == 0 and 0 < t.fidelity.share < 0.15 for t in linears)
    text = report.table()
    assert "codes not kept, trellis codes have no place in GGUF; adds 6" in text
    assert "own coding error on Gaussian weights" in text
    assert failures(verify(path, folder)) == []
    tokens = list(range(5, 37))
    twin = tmp_path / "twin"
    shutil.copytree(tiny, twin)
    tied = "lm_head.weight" not in made
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied, "dtype": "float32"}))
    save_file({n: np.ascontiguousarray(w) for n, w in made.items()}, twin / "model.safetensors", {"format": "pt"})
    with LlamaCpp(path) as model:
        assert mean_kl(predict(twin, tokens), model.logits(tokens)) < 1e-3
        assert len(model.generate_greedy(tokens[:8], 8)) > 0


def test_a_type_that_is_asked_for_is_given(tmp_path, coded):
    report = bridge.convert(coded["qtip"][0], tmp_path / "model.gguf", type="Q2_K")
    linears = {t.type for t in report.tensors if t.has_codes}
    assert linears == {"Q2_K"}


@pytest.mark.parametrize("which", ["qtip", "exl3"])
def test_with_a_text_trellis_codes_go_through_the_solver(tmp_path, coded, padded, which):
    """EXL3's with sides that are padded."""
    folder, meant = coded[which] if which == "qtip" else padded
    tokens = np.random.default_rng(0).integers(5, 300, 600)
    np.save(tmp_path / "tokens.npy", tokens)
    settings = Calibration(tmp_path / "tokens.npy", samples=8, length=64, sweeps=1)
    report = bridge.convert(folder, tmp_path / "model.gguf", type="Q4_0", calibrate=settings)
    made = [t for t in report.tensors if t.outcome == CALIBRATED and t.kind not in ("output", "token_embd")]
    assert {str(t.source).removesuffix(".weight") for t in made} == set(meant)
    assert all(0 < t.fidelity.share < 1 and t.fidelity.noise for t in made), [t.fidelity.share for t in made]


def test_more_bits_ask_for_a_larger_type(tmp_path, tiny):
    write_trellis(
        tmp_path / "m", tiny, lambda n, w, i: qtip_tensors(n, w, Coding("3inst", 4), search=False, seed=i),
        {"quip_params": {**QTIP, "K": 4, "decode_mode": "3inst"}},
    )  # fmt: skip
    report = bridge.convert(tmp_path / "m", tmp_path / "model.gguf")
    linears = [t for t in report.tensors if t.has_codes]
    assert {t.type for t in linears} == {"Q6_K"}
    assert all(t.fidelity.share < 0.15 for t in linears)


def test_inspect_names_the_format_and_what_it_becomes(coded):
    text = describe(coded["qtip"][0])
    assert "the label says  QTIP, 2 bits, 1mad, L 10, V 1" in text
    assert "7 quantized modules, trellis codes of 2 bits" in text
    assert "Q4_K" in next(line for line in text.splitlines() if line.startswith("ffn_down"))
    text = describe(coded["exl3"][0])
    assert "the label says  EXL3, 2.0 bits, head 6 bits" in text
    assert "ties lm_head to the embeddings" in text


def label(folder: Path, key: str, **said: object) -> None:
    """Change some of what a config says."""
    values = json.loads((folder / "config.json").read_text())
    values[key] |= said
    (folder / "config.json").write_text(json.dumps(values))


def test_inspect_compares_the_bits_that_the_label_says_with_those_of_the_codes(tmp_path, coded):
    qtip, exl3 = (shutil.copytree(coded[which][0], tmp_path / which) for which in ("qtip", "exl3"))
    label(qtip, "quip_params", K=3, K_v_proj=2)
    text = describe(qtip)
    assert "they differ     6 modules have codes of 2 bits, but the label says 3" in text
    assert "they agree" not in text
    label(exl3, "quantization_config", bits=3.0, head_bits=2)
    assert "they differ     the codes have 2 bits on average, but the label says 3.0" in describe(exl3)
    label(exl3, "quantization_config", bits=2.25, head_bits=6)
    assert "they differ     1 module has codes of 2 bits, but the label says 6" in describe(exl3)


def test_a_layer_multiplies_in_torch_too(coded):
    folder, meant = coded["qtip"]
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.read_trellis(NAME)
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    y = layer.matmul(x)
    assert y.dtype == torch.bfloat16
    exact = x.double().numpy() @ meant[NAME].T
    assert np.abs(y.double().numpy() - exact).max() < 1e-2 * np.abs(exact).max()

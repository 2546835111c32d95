"""BitNet checkpoints, packed by transformers: ternary weights go to TQ2_0 as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.writing.verify import failures, verify
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.encode import load_floats, write_folder, write_gptq, write_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from tests.support.described import describe
from tests.support.tiny_models import save_model

NAME = "model.layers.0.mlp.down_proj"
ROWS = np.array([1, 2, 5, 14, 9])
TOKENS = np.random.default_rng(1).integers(0, 320, 48).tolist()


def ternary(out: int = 16, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(-1, 2, (out, columns)).astype(np.float32)


def packed(weights: np.ndarray) -> np.ndarray:
    from transformers.integrations.bitnet import pack_weights

    return pack_weights(torch.tensor(weights)).numpy()


def label(**said: Any) -> dict[str, Any]:
    return {"quant_method": "bitnet", **said}


def write(folder: Path, tensors: dict[str, np.ndarray], **said: Any) -> Path:
    return write_folder(folder, {f"{NAME}.{part}": values for part, values in tensors.items()}, label(**said))


def half(value: float) -> np.ndarray:
    return np.array([value], np.float16)


@pytest.mark.parametrize(
    ("linear_class", "scale"), [({}, np.float32(1) / np.float32(12.5)), ({"linear_class": "autobitlinear"}, 12.5)]
)
def test_packed_weights_are_codes_and_the_class_says_which_way_the_scale_is_meant(tmp_path, linear_class, scale):
    weights, bias = ternary(), np.arange(16, dtype=np.float32)
    with open_checkpoint(
        write(tmp_path, {"weight": packed(weights), "weight_scale": half(12.5), "bias": bias}, **linear_class)
    ) as checkpoint:
        t = checkpoint.read_module(NAME)
        assert np.array_equal(t.codes, weights + 1)
        assert np.array_equal(t.dequantize(), np.float32(scale) * weights)
        assert np.array_equal(t.bias, bias)
        assert np.array_equal(checkpoint.read_module(NAME, ROWS).codes, weights[ROWS] + 1)


def test_weights_that_were_saved_unpacked_are_the_same_codes(tmp_path):
    weights = ternary()
    said = {"linear_class": "autobitlinear", "quantization_mode": "offline"}
    with open_checkpoint(
        write(tmp_path, {"weight": weights.astype(np.float16), "weight_scale": half(0.5)}, **said)
    ) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME, ROWS).codes, weights[ROWS] + 1)


def test_online_weights_are_rounded_as_transformers_does_whenever_it_multiplies(tmp_path):
    from transformers.integrations.bitnet import WeightQuant

    floats = np.random.default_rng(0).normal(0, 0.05, (16, 256)).astype(np.float32)
    others = {
        "model.embed_tokens.weight": floats,
        "lm_head.weight": floats,
        "model.layers.0.input_layernorm.weight": floats[0],
        "model.layers.0.self_attn.q_proj.weight": floats,
    }
    said = label(linear_class="autobitlinear", quantization_mode="online", modules_to_not_convert=["self_attn.q_proj"])
    write_folder(tmp_path, {f"{NAME}.weight": floats, **others}, said)
    with torch.compiler.set_stance("force_eager"):
        expected = WeightQuant.apply(torch.tensor(floats)).numpy()
    with open_checkpoint(tmp_path) as checkpoint:
        assert [*checkpoint.modules] == [NAME]
        assert {*checkpoint.tensors} == {*others}
        assert np.allclose(checkpoint.read_module(NAME).dequantize(), expected, rtol=1e-6, atol=0)
        assert np.array_equal(checkpoint.read_module(NAME, ROWS).dequantize() > 0, expected[ROWS] > 0)


@pytest.fixture(scope="module", params=["llama", "bitnet"])
def model(request, tmp_path_factory) -> Path:
    """A float model of each architecture."""
    kind = {
        "llama": ("LlamaConfig", {}),
        "bitnet": ("BitNetConfig", {"hidden_act": "relu2", "tie_word_embeddings": True}),
    }[request.param]
    return save_model(tmp_path_factory.mktemp("bitnet") / request.param, kind[0], **kind[1])


def quantized(folder: Path, model: Path, linear_class: str, rows: int | None = None) -> dict[str, np.ndarray]:
    """Write the model's layers as transformers packs them; their weights."""
    stored: dict[str, np.ndarray] = {}

    def layer(module: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if ".layers." not in module:
            return None
        mean = np.abs(weight).mean()
        codes = np.clip(np.rint(weight / mean), -1, 1)
        scale = half(mean if linear_class == "autobitlinear" else 1 / mean)
        exact = scale.astype(np.float32)
        stored[f"{module}.weight"] = codes * (exact if linear_class == "autobitlinear" else np.float32(1) / exact)
        return {f"{module}.weight": packed(codes), f"{module}.weight_scale": scale}

    write_model(folder, model, layer, label(linear_class=linear_class), None, 1)
    return stored


@pytest.mark.parametrize(("linear_class", "type"), [("autobitlinear", "auto"), ("bitlinear", "TQ1_0")])
def test_a_models_codes_are_kept_bit_for_bit_and_its_scales_to_a_half(model, linear_class, type, tmp_path):
    stored = quantized(tmp_path / "c", model, linear_class)
    report = bridge.convert(tmp_path / "c", tmp_path / "m.gguf", type=type, token_embd_type="Q8_0", output_type="Q8_0")
    coded = [t for t in report.tensors if t.has_codes]
    assert len(coded) == len(stored) == 14
    assert {(t.type, t.outcome) for t in coded} == {("TQ2_0" if type == "auto" else type, "codes carried")}
    assert not failures(verify(tmp_path / "m.gguf", tmp_path / "c"))
    exact = linear_class == "autobitlinear"  # its scale is a half; the reciprocal of one is not
    for t in coded:
        assert t.fidelity.error == 0 if exact else 0 < t.fidelity.nmse < 2.0**-22
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    raw = tensors["blk.0.ffn_down.weight"]
    weights = stored[f"{NAME}.weight"]
    values = gguf.quants.dequantize(raw.data, raw.tensor_type)
    assert np.array_equal(np.sign(values), np.sign(weights))
    assert np.allclose(values, weights, rtol=0 if exact else 2.0**-11, atol=0)


def test_what_it_predicts_is_what_transformers_does(model, tmp_path):
    """Of floats, as close as these are; of blocks within what 8-bit activations cost, which transformers rounds too."""
    from transformers.integrations.bitnet import AutoBitLinear

    stored = quantized(tmp_path / "c", model, "autobitlinear")
    bridge.convert(tmp_path / "c", tmp_path / "m.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    halves = {
        name: torch.tensor(values.astype(np.float16).astype(np.float32)) for name, values in load_floats(model).items()
    }
    reference.load_state_dict({**halves, **{n: torch.tensor(w) for n, w in stored.items()}}, strict=False)

    def predicted() -> np.ndarray:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return reference(torch.tensor([TOKENS])).logits[0].numpy()

    floats = predicted()
    for name in stored:
        layer = reference.get_submodule(name.removesuffix(".weight"))
        new = AutoBitLinear(layer.in_features, layer.out_features, bias=False)
        new.weight, new.weight_scale = layer.weight, torch.ones(1)
        reference.set_submodule(name.removesuffix(".weight"), new)
    cost = mean_kl(floats, predicted())
    own = bridge.Model.load(tmp_path / "m.gguf", precision="f32", kv="f32").logits(TOKENS)
    assert mean_kl(floats, own) < 1e-4  # embeddings and head are Q8_0
    assert mean_kl(floats, bridge.Model.load(tmp_path / "m.gguf").logits(TOKENS)) < cost
    if "llama" in model.name:  # llama.cpp has no squared ReLU in its bitnet
        with LlamaCpp(tmp_path / "m.gguf") as loaded:
            assert mean_kl(floats, loaded.logits(TOKENS)) < 2 * cost
    else:
        assert any("squared ReLU" in note for note in plan_checkpoint(tmp_path / "c").notes)


def test_rows_that_tq2_0_does_not_hold_go_elsewhere_with_the_reason(tmp_path):
    model = save_model(tmp_path / "float", "LlamaConfig", hidden_size=128, intermediate_size=256)
    quantized(tmp_path / "c", model, "autobitlinear")
    types = {
        t.name.split(".")[2]: (t.type, t.reason) for t in plan_checkpoint(tmp_path / "c").tensors if ".ffn_" in t.name
    }
    assert types["ffn_down"] == ("TQ2_0", "codes carried")
    assert types["ffn_up"] == ("Q4_0", "codes carried; rows of 128 are not a multiple of TQ2_0's 256")
    newer = plan_checkpoint(tmp_path / "c", target="llama.cpp@11549")
    assert {t.type for t in newer.tensors if "ffn_up" in t.name} == {"Q2_0"}


def test_inspect_names_the_format(model, tmp_path):
    quantized(tmp_path, model, "bitlinear")
    said = describe(tmp_path)
    assert "the label says  BitNet, ternary, one scale a matrix" in said
    assert "the data says   14 quantized modules, ternary, one scale a matrix, no act-order" in said
    assert "they agree" in said


def test_no_other_codes_are_carried_to_tq2_0(tmp_path, small_model):
    write_gptq(tmp_path / "gptq", small_model, bits=2, group_size=256)
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="TQ2_0")
    assert {t.outcome for t in report.tensors if t.has_codes} == {"requantized"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("three", "has weights besides -1, 0 and 1"),
        ("scale", "weight_scale is 0.0, must be positive"),
        ("shape", "the shapes contradict each other"),
        ("no scale", "has weight but no weight_scale"),
    ],
)
def test_damage_is_told(tmp_path, damage, said):
    tensors = {"weight": packed(ternary()), "weight_scale": half(1)}
    if damage == "three":
        tensors["weight"][2, 3] |= 3
    elif damage == "scale":
        tensors["weight_scale"] = half(0)
    elif damage == "shape":
        tensors["weight_scale"] = np.ones(3, np.float16)
    else:
        del tensors["weight_scale"]
    with pytest.raises(bridge.BridgeError, match=said), open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        checkpoint.read_module(NAME)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"use_rms_norm": True}, "every linear layer has a norm of its own"),
        ({"linear_class": "other"}, "linear_class is 'other', must be bitlinear or autobitlinear"),
    ],
)
def test_what_the_config_asks_for_in_vain(tmp_path, entry, said):
    write(tmp_path, {"weight": packed(ternary()), "weight_scale": half(1)}, **entry)
    with pytest.raises(bridge.BridgeError, match=said):
        open_checkpoint(tmp_path)

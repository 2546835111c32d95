"""Transformers models on trellis-coded weights, which are never made floats."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import bridge
from bridge.errors import BridgeError
from bridge.trellis.layer import TrellisLayer
from tests.support import ptx
from tests.support.encode import LINEAR, load_floats
from tests.support.encode_trellis import EXL3, QTIP, Coding, exl3_tensors, gaussian_table, qtip_tensors, write_trellis
from tests.support.tiny_models import predict, save_model

TOKENS = list(range(5, 25))
HYB = Coding("quantlut_sym", 2, 2, 16, 9, gaussian_table(9, 2))
SKIPPED = "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Qwen2 of one layer, for its biases; a tied head."""
    folder = tmp_path_factory.mktemp("tiny") / "float"
    return save_model(folder, "Qwen2Config", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def coded(tiny, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """The model in random trellis codes, and their floats: QTIP with a layer skipped, EXL3 with a head of its own."""
    root = tmp_path_factory.mktemp("coded")
    found = {}
    said = {"quip_params": {**QTIP, "V": 2, "tlut_bits": 9, "decode_mode": "quantlut_sym", "skip_list": ["0_v"]}}
    hyb = partial(qtip_tensors, coding=HYB, layout="swizzled", search=False)
    meant = write_trellis(root / "qtip", tiny, lambda n, w, i: None if n == SKIPPED else hyb(n, w, seed=i), said)
    found["qtip"] = root / "qtip", floats(root / "qtip floats", tiny, meant)
    with_head = shutil.copytree(tiny, root / "with head")
    head = {"lm_head.weight": np.random.default_rng(5).normal(0, 0.05, (320, 256)).astype(np.float32)}
    save_file(load_file(tiny / "model.safetensors") | head, with_head / "model.safetensors", {"format": "pt"})
    mcg = Coding("mcg", 3, multiplier=0xCBAC1FED)
    meant = write_trellis(
        root / "exl3", with_head, lambda n, w, i: exl3_tensors(n, w, mcg, search=False, seed=i),
        {"quantization_config": EXL3}, LINEAR.pattern + "|lm_head",
    )  # fmt: skip
    found["exl3"] = root / "exl3", floats(root / "exl3 floats", with_head, meant)
    return found


def floats(folder: Path, model_folder: Path, meant: dict[str, np.ndarray]) -> Path:
    """The float model that codes stand for; its head is its own where it is coded."""
    shutil.copytree(model_folder, folder)
    weights = {name: w.astype(np.float16).astype(np.float32) for name, w in load_floats(folder).items()}
    weights |= {f"{name}.weight": np.ascontiguousarray(w, np.float32) for name, w in meant.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "float32", "tie_word_embeddings": "lm_head" not in meant}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].float().numpy()


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return float(np.abs(found - expected).max()) < 1e-4 * float(np.abs(expected).max())


@pytest.mark.parametrize("which", ["qtip", "exl3"])
def test_from_pretrained_reads_trellis_codes_and_says_what_their_floats_say(coded, which, monkeypatch):
    folder, meant = coded[which]
    bridge.nn.register_quantizers()
    bridge.nn.register_quantizers()
    monkeypatch.setattr(TrellisLayer, "dequantize", None)  # no weight is made whole
    options = {"quantization_config": bridge.nn.QtipConfig()} if which == "qtip" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    names = {name for name, module in model.named_modules() if isinstance(module, bridge.nn.QuantLinear)}
    assert (SKIPPED in names, "lm_head" in names, len(names)) == (
        (False, False, 6) if which == "qtip" else (True, True, 8)
    )
    assert close(logits(model), predict(meant, TOKENS))
    made = model.generate(torch.tensor([TOKENS]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert made.shape == (1, len(TOKENS) + 4)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
@pytest.mark.parametrize("which", ["qtip", pytest.param("exl3", marks=pytest.mark.exhaustive)])
def test_from_pretrained_puts_codes_where_the_device_map_says(coded, which, monkeypatch):
    """Biases (Qwen2 has them) and codes too; kernels are compiled PTX, torch's tensors on the GPU are in disguise."""
    from tests.support.gpu.disguise import disguised_gpu

    folder, meant = coded[which]
    bridge.nn.register_quantizers()
    monkeypatch.setattr(TrellisLayer, "dequantize", None)
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *given: None)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the disguise is one thread's
    options = {"quantization_config": bridge.nn.QtipConfig()} if which == "qtip" else {}
    with disguised_gpu() as launches:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map={"": "cuda:0"}, **options
        )
        linears = [m for m in model.modules() if isinstance(m, bridge.nn.QuantLinear)]
        assert {m.tensor.device for m in linears} == {"cuda:0"}
        assert {str(t.device) for t in [*model.parameters(), *model.buffers()]} == {"cuda:0"}
        with torch.no_grad():
            found = model.eval()(torch.tensor([TOKENS[:3]]).to("cuda:0")).logits[0].cpu().numpy()
        assert sum(name.startswith("_fused_") for name in launches.names) == len(linears)
    assert close(found, predict(meant, TOKENS[:3]))


def test_codes_that_a_device_map_would_offload_are_refused(coded, monkeypatch):
    bridge.nn.register_quantizers()
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: True)
    with pytest.raises(BridgeError, match=r"q_proj: trellis codes are .*, and cannot be offloaded \(meta\); pass"):
        transformers.AutoModelForCausalLM.from_pretrained(coded["exl3"][0], device_map={"": "meta"})


@pytest.mark.parametrize("which", ["qtip", "exl3"])
def test_layers_are_put_into_a_model_that_is_there(coded, tiny, which):
    folder, meant = coded[which]
    config = transformers.AutoConfig.from_pretrained(tiny, tie_word_embeddings=which == "qtip")
    model = bridge.nn.replace_trellis(transformers.AutoModelForCausalLM.from_config(config).float(), folder)
    assert close(logits(model), predict(meant, TOKENS))


def test_gradients_pass_through_to_the_inputs(coded):
    with bridge.open_checkpoint(coded["qtip"][0]) as checkpoint:
        layer = checkpoint.read_trellis("model.layers.0.mlp.up_proj")
    x = torch.randn(2, 256, requires_grad=True)
    bridge.nn.QuantLinear(layer, precision="f32")(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.tile(layer.dequantize().sum(0), (2, 1)), rtol=1e-4, atol=1e-4)


def test_a_model_of_another_shape_or_architecture_is_refused(coded, tiny):
    folder, _ = coded["qtip"]
    config = transformers.AutoConfig.from_pretrained(tiny, intermediate_size=512)
    with pytest.raises(BridgeError, match=r"mlp.*_proj: is \[256, 256\] in .*, \[(512, 256|256, 512)\] in the model"):
        bridge.nn.replace_trellis(transformers.AutoModelForCausalLM.from_config(config), folder)
    with pytest.raises(BridgeError, match=r"model\.layers\.0.*has it, but Linear does not"):
        bridge.nn.replace_trellis(torch.nn.Linear(1, 1), folder)

"""Layers that predict further tokens: carried with their codes, or left out, and no other tensor differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.conversion.writing.verify import failures, verify
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from bridge.models.wrapper import text_names
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.prediction import agreement, read_prediction
from bridge.runtime.replies.perplexity import cut_windows
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.support.encode import load_floats, write_gptq
from tests.support.predicting_models import save_predicting

pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(0, 2048, 24).tolist()
RUN_HERE = {"glm4-moe", "glm4-moe-lite", "qwen3.5", "exaone-moe", "cohere2-moe", "hy3", "ling3"}
NEXTN = {"nextn.eh_proj", "nextn.enorm", "nextn.hnorm"}
PREDICTING = ["qwen3.5", "nemotron-3-super", "glm5", "glm5-next", "ling3", "deepseek3.2", "exaone-moe", "hy3"]


@pytest.mark.parametrize(
    "name",
    ["glm4-moe", "glm4-moe-lite", "cohere2-moe", *PREDICTING],
)
def test_a_layer_that_predicts_is_carried_with_its_codes_or_left_out(name: str, tmp_path: Path) -> None:
    write_gptq(tmp_path / "gptq", save_predicting(name, tmp_path / "float"), group_size=32)
    files, logits = [tmp_path / "with.gguf", tmp_path / "without.gguf"], []
    reports = [
        bridge.convert(tmp_path / "gptq", file, type="exact", no_mtp=no_mtp, mmproj_type="none")
        for file, no_mtp in zip(files, (False, True), strict=True)
    ]
    for file in files:
        assert failures(verify(file, tmp_path / "gptq")) == []
        with LlamaCpp(file) as loaded:
            logits.append(loaded.logits(TOKENS))
        if name in RUN_HERE:
            logits.append(bridge.Model.load(file).logits(TOKENS))
    with_it, without = map(read_gguf, files)
    arch = with_it.metadata["general.architecture"]
    layer = without.metadata[f"{arch}.block_count"]
    assert (with_it.metadata[f"{arch}.block_count"], with_it.metadata[f"{arch}.nextn_predict_layers"]) == (layer + 1, 1)
    assert not without.metadata.get(f"{arch}.nextn_predict_layers")
    own = with_it.tensors.keys() - without.tensors.keys()
    norm = "layer_output_norm" if name == "ling3" else "nextn.shared_head_norm"
    assert {n.removesuffix(".weight").split(".", 2)[2] for n in own} >= {*NEXTN, norm}
    assert {n.split(".")[1] for n in own} == {str(layer)}
    carried = {t.kind for t in reports[0].tensors if t.name in own and t.outcome == "codes carried"}
    dense = name in ("qwen3.5", "exaone-moe")
    assert carried >= {"attn_output"} | ({"ffn_down"} if dense else {"ffn_down_exps", "ffn_down_shexp"})
    assert any("predict further tokens at once (MTP) are dropped" in note for note in reports[1].notes)
    for first, second in zip(*np.split(np.array(logits), 2), strict=True):  # no program runs it with the others
        np.testing.assert_array_equal(first, second)


def test_a_gguf_with_a_layer_that_predicts_becomes_a_checkpoint_again(tmp_path: Path) -> None:
    write_gptq(tmp_path / "gptq", save_predicting("glm4-moe", tmp_path / "float"), group_size=32)
    bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="exact")
    bridge.export(tmp_path / "m.gguf", tmp_path / "back", "gptq")
    bridge.convert(tmp_path / "back", tmp_path / "again.gguf", type="exact")
    assert failures(verify(tmp_path / "again.gguf", tmp_path / "gptq")) == []
    assert failures(verify(tmp_path / "again.gguf", tmp_path / "m.gguf")) == []


@pytest.mark.parametrize("name", PREDICTING)
def test_a_float_checkpoint_gets_the_same_names_and_values_back(name: str, tmp_path: Path) -> None:
    """mtp.* where the family has that, layers after the others elsewhere; the config is made of the metadata."""
    stored = load_floats(save_predicting(name, tmp_path / "float"))
    weights = {inner: stored[whole] for inner, whole in text_names(stored)[0].items()}
    bridge.convert(tmp_path / "float", tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none")
    bridge.export(tmp_path / "m.gguf", tmp_path / "back", dtype="F32")
    back = load_floats(tmp_path / "back")
    assert back.keys() == weights.keys()
    for tensor, values in weights.items():
        np.testing.assert_allclose(back[tensor], values, rtol=1e-3, atol=1e-6)  # attn_k_b is F16


def test_a_layer_that_predicts_without_experts_does_not_run_in_a_model_that_has_some(tmp_path: Path) -> None:
    bridge.convert(save_predicting("exaone-moe", tmp_path / "float"), tmp_path / "m.gguf")
    with pytest.raises(BridgeError, match=r"layer of exaone-moe that predicts .* \(MTP\) cannot run here$"):
        bridge.Model.load(tmp_path / "m.gguf").prediction_head()


def test_the_layer_of_nemotron_3_is_left_to_llama_cpp(tmp_path: Path) -> None:
    bridge.convert(save_predicting("nemotron-h-moe", tmp_path / "float"), tmp_path / "m.gguf")
    with pytest.raises(BridgeError, match=r"layer of nemotron_h_moe that predicts a further token \(MTP\) cannot run"):
        bridge.Model.load(tmp_path / "m.gguf").prediction_head()


def test_a_layer_that_predicts_with_a_tensor_missing_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = save_predicting("glm4-moe", tmp_path / "float")
    weights = load_floats(folder)
    del weights["model.layers.3.eh_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match=r"model\.layers\.3\.eh_proj"):
        bridge.convert(folder, tmp_path / "m.gguf")
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--no-mtp"]) == 0


def test_the_layer_of_cohere_that_predicts_is_rotated_and_attends_to_everything(tmp_path: Path) -> None:
    bridge.convert(save_predicting("cohere2-moe", tmp_path / "float"), tmp_path / "m.gguf")
    file = bridge.open_gguf(tmp_path / "m.gguf")
    config, _ = read_prediction(file, read_config(file.metadata, file.path))
    assert config.rotates(0)
    assert not config.windowed(0)


def test_verify_says_how_many_tokens_of_a_text_the_layer_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file, text = save_predicting("glm4-moe", tmp_path / "float"), tmp_path / "m.gguf", tmp_path / "text.txt"
    bridge.convert(folder, file, tensor_types=[(".*", "Q8_0")])
    text.write_text("KING RICHARD: what is that to me, and what is that to thee? " * 30)
    with bridge.Model.load(file) as model:
        windows, head = cut_windows(model, text.read_text(), 256, None), model.prediction_head()
        with model.taken() as decoder:
            counts = np.sum([agreement(decoder, head, tokens) for tokens in windows], axis=0)
    assert main(["verify", str(file), str(folder), "--mtp-text", str(text)]) == 0
    assert f"guesses {counts[0]} of {counts[1]} tokens (" in capsys.readouterr().out
    with pytest.raises(BridgeError, match=r"short\.txt: No such file"):
        verify(file, folder, mtp_text=tmp_path / "short.txt")
    text.write_text("too short")
    with pytest.raises(BridgeError, match="0 windows of 256"):
        verify(file, folder, mtp_text=text)

"""`quantize` and `convert --calibrate`: a float model and a text become files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bridge.checkpoint import open_checkpoint
from bridge.cli import main
from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.converter import convert
from bridge.conversion.quantize_gguf import quantize_gguf
from bridge.conversion.writing.report import CALIBRATED, CARRIED, FLOAT
from bridge.errors import BridgeError, BridgeWarning
from bridge.gguf_file.imatrix import read_imatrix
from bridge.quantize.run import calibrate as calibrate_layers
from bridge.quantize.settings import Calibration
from bridge.quantize.text.texts import load_tokenizer, read_tokens
from tests.support.tiny_models import predict, save_model

TEXT = "The quick brown fox jumps over the lazy dog; and then it sleeps, until the dog wakes up again. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose inputs of 256 fill a superblock."""
    return save_model(tmp_path_factory.mktemp("model"), "LlamaConfig", vocab_size=2048)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = TEXT.split()
    rng = np.random.default_rng(0)
    path.write_text(" ".join(rng.choice(words) for _ in range(4000)))
    return path


def settings(text: Path, **options: Any) -> Calibration:
    return Calibration(text, **{"samples": 16, "length": 64, "sweeps": 1, **options})


def logits_of(path: Path, folder: Path, tmp: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab] of the GGUF's weights in transformers' model."""
    from safetensors.numpy import load_file, save_file

    reader = gguf.GGUFReader(path)
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    names = {"q_proj": "attn_q", "k_proj": "attn_k"}
    weights = load_file(folder / "model.safetensors")
    rest = {
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, old in weights.items():
        parts = name.split(".")
        if parts[1] == "layers" and parts[-2] in {**names, **rest}:
            new = values[f"blk.{parts[2]}.{({**names, **rest})[parts[-2]]}.weight"].reshape(old.shape)
            if parts[-2] in names:  # GGUF's rows of q and k interleave the two halves of each head
                heads = 4 if parts[-2] == "q_proj" else 2
                new = new.reshape(heads, -1, 2, old.shape[1]).swapaxes(1, 2).reshape(old.shape)
            weights[name] = np.ascontiguousarray(new, np.float32)
    tmp.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp / "model.safetensors", {"format": "pt"})
    return predict(tmp, tokens)


@pytest.mark.parametrize("method", ["two-sided", "gptq"])
def test_a_layer_that_the_text_does_not_reach_is_rounded_to_nearest(
    model: Path, text: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreached = "model.layers.1.mlp.up_proj"
    walk = calibrate_layers.calibrated_layers

    def without(model: Any, settings: Any, found: Any, room: Any, targets: Any, *rest: Any) -> Any:
        return walk(model, settings, found, room, {name: t for name, t in targets.items() if name != unreached}, *rest)

    monkeypatch.setattr(calibrate_layers, "calibrated_layers", without)
    done = quantize_checkpoint(
        model, tmp_path / "out", "gptq_v2", group_size=32, calibrate=settings(text, samples=4, method=method)
    )
    assert done.modules == 14
    assert f"{unreached}: not seen among the model's layers; rounded to nearest instead" in done.notes
    with open_checkpoint(model) as floats, open_checkpoint(tmp_path / "out") as checkpoint:
        weight, values = floats.read_float(f"{unreached}.weight"), checkpoint.read_module(unreached).dequantize()
    assert np.square(values - weight).sum() < 0.02 * np.square(weight).sum()


def test_a_calibrated_gguf_is_nearer_to_the_model_than_one_rounded_to_nearest(model, text, tmp_path) -> None:
    tokens = read_tokens(text, load_tokenizer(model), 100, 64)[-4:].flatten().tolist()  # not calibrated on
    expected = predict(model, tokens)
    errors = {}
    for name, calibrate in {"rtn": None, "gptq": settings(text)}.items():
        out = tmp_path / f"{name}.gguf"
        report = convert(model, out, type="Q3_K", calibrate=calibrate)
        hows = {t.outcome for t in report.tensors if t.kind.startswith(("attn_q", "ffn_"))} - {"kept float"}
        assert (CALIBRATED in hows) == (name == "gptq")
        errors[name] = np.square(logits_of(out, model, tmp_path / name, tokens) - expected).mean()
        assert not out.with_name(f"{out.name}.layers").exists()
    assert errors["gptq"] < 0.5 * errors["rtn"]


def test_a_second_run_goes_on_where_a_killed_one_stopped_and_ends_in_the_same_file(model, text, tmp_path) -> None:
    seen: list[str] = []

    def stop(done: int, total: int, name: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    whole, halted = tmp_path / "whole.gguf", tmp_path / "halted.gguf"
    convert(model, whole, type="Q4_K", calibrate=settings(text))
    with pytest.raises(KeyboardInterrupt, match=r"stopped; 5 of 16 layers are stored"):
        convert(model, halted, type="Q4_K", calibrate=settings(text, progress=stop))
    assert not halted.exists()
    with pytest.raises(BridgeError, match="run with other options"):
        convert(model, halted, type="Q4_K", calibrate=settings(text, damping=0.1))
    convert(model, halted, type="Q4_K", calibrate=settings(text, progress=lambda done, total, name: seen.append(name)))
    assert len([name for name in seen if not name.startswith("gradients: ")]) == 1 + 16 - 5
    assert whole.read_bytes() == halted.read_bytes()


def test_layers_that_another_version_quantized_are_not_taken_over(model, text, tmp_path, monkeypatch) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        convert(model, tmp_path / "out.gguf", type="Q4_K", calibrate=settings(text, progress=stop))
    monkeypatch.setattr("bridge.__version__", "0.0.1")
    with pytest.raises(BridgeError, match=r"a run with other options, inputs or version; force=True starts over"):
        convert(model, tmp_path / "out.gguf", type="Q4_K", calibrate=settings(text))


@pytest.mark.parametrize(
    ("words", "samples", "way"),
    [(4000, 15, "samples=16"), (100, 1000, "a longer text"), (100, 15, "a longer text and samples=16")],
)
def test_too_few_tokens_for_the_widest_input_give_a_warning(words, samples, way, model, text, tmp_path) -> None:
    few = tmp_path / "few.txt"
    few.write_text(" ".join(text.read_text().split()[:words]))
    calibrate = settings(few, samples=samples, method="gptq", sweeps=0)
    with pytest.warns(BridgeWarning) as warned:
        convert(model, tmp_path / "out.gguf", type="Q8_0", calibrate=calibrate)
    (message,) = {str(warning.message) for warning in warned if warning.category is BridgeWarning}
    found = r"\d+ calibration tokens are few for the 256 inputs of model.layers.0.self_attn.q_proj, .* 1024 tokens: "
    assert re.fullmatch(found + re.escape(way), message)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 128 positions."""
    folder = tmp_path_factory.mktemp("short")
    return save_model(folder, "LlamaConfig", vocab_size=2048, num_hidden_layers=1, max_position_embeddings=128)


COMMANDS = {
    "quantize": ["quantize", "MODEL", "out/new"],
    "convert": ["convert", "MODEL", "out/new", "--type", "Q4_K"],
    "quantize --format": ["quantize", "MODEL", "out/new", "--format", "gptq", "--group-size", "32"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_sequences_are_as_long_as_a_model_of_few_positions_allows(
    command, short_model, text, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(short_model) if a == "MODEL" else a for a in COMMANDS[command]]
    arguments += ["--calibrate", str(text), "--sweeps", "0", "--samples", "8"]
    assert main([*arguments, "--sequence-length", "129"]) == 2
    assert capsys.readouterr().err.endswith("the model has 128 positions; use shorter ones: --sequence-length 128\n")
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    said, warned = capsys.readouterr()
    assert "warning" not in warned
    assert said.count("calibration sequences have 128 tokens instead of 2048, as many as the model has positions") == 1
    assert "calibrated on 1024 tokens" in said


def test_the_command_line_warns_before_it_calibrates(short_model, text, tmp_path, monkeypatch, capsys) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.quantize.run.calibrate.calibrated_layers", stop)
    assert main(["quantize", str(short_model), str(tmp_path / "o"), "--calibrate", str(text), "--samples", "1"]) == 130
    assert capsys.readouterr().err.startswith("warning: 128 calibration tokens are few for the 256 inputs")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_fails_before_its_first_layer_leaves_nothing(
    command, short_model, text, tmp_path, monkeypatch, capsys
) -> None:
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(short_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.post_attention_layernorm.weight"] = np.ones(7, np.float32)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    arguments = [str(broken) if a == "MODEL" else a for a in COMMANDS[command]]
    assert main([*arguments, "--calibrate", str(text)]) == 2
    assert "post_attention_layernorm" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_the_head_is_quantized_some_rows_at_a_time_and_resumed_at_its_rows(
    model, text, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.quantize.run.walk._WEIGHTS_AT_ONCE", 256 * 600)
    spans: list[str] = []

    def note(done: int, total: int, name: str) -> None:
        spans.extend([name.partition(" error")[0]] if name.startswith("lm_head") else [])

    def stop(done: int, total: int, name: str) -> None:
        if name.startswith("lm_head rows 600 to 1200 of 2048"):
            raise KeyboardInterrupt

    types = {"type": "Q4_K", "output_type": "Q4_K"}
    whole, halted = tmp_path / "whole.gguf", tmp_path / "halted.gguf"
    report = convert(model, whole, **types, calibrate=settings(text, progress=note))
    assert spans == [f"lm_head rows {at} to {min(at + 600, 2048)} of 2048" for at in range(0, 2048, 600)]
    assert {t.outcome for t in report.tensors if t.kind == "output"} == {CALIBRATED}
    with pytest.raises(KeyboardInterrupt, match="stopped; 15 of 16 layers are stored"):
        convert(model, halted, **types, calibrate=settings(text, progress=stop))
    spans.clear()
    convert(model, halted, **types, calibrate=settings(text, progress=note))
    assert spans == ["lm_head rows 1200 to 1800 of 2048", "lm_head rows 1800 to 2048 of 2048"]
    assert whole.read_bytes() == halted.read_bytes()


def test_the_experts_of_3d_tensors_are_quantized_as_those_that_stand_by_themselves(text, tmp_path) -> None:
    fields: dict[str, Any] = {"vocab_size": 2048, "num_hidden_layers": 1, "head_dim": 32, "norm_topk_prob": True}
    fields |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    found = []
    for original in (True, False):
        folder = save_model(tmp_path / f"model-{original}", "Qwen3MoeConfig", original_format=original, **fields)
        report = convert(folder, tmp_path / f"{original}.gguf", type="Q8_0", calibrate=settings(text, sweeps=0))
        experts = [t for t in report.tensors if "_exps" in t.name]
        assert [t.outcome for t in experts] == [CALIBRATED] * 3
        found.append({t.name: t.data for t in gguf.GGUFReader(tmp_path / f"{original}.gguf").tensors})
    assert all(np.array_equal(values, found[1][name]) for name, values in found[0].items())
    rtn = Calibration(None, method="rtn")
    report = convert(folder, tmp_path / "rtn.gguf", type="Q8_0", calibrate=rtn)
    assert {t.outcome for t in report.tensors if "_exps" in t.name} == {FLOAT}


def test_a_damaged_kept_layer_is_made_again(model, text, tmp_path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    out = tmp_path / "out.gguf"
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        convert(model, out, type="Q4_K", calibrate=settings(text, progress=stop))
    file = next((tmp_path / "out.gguf.layers").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    report = convert(model, out, type="Q4_K", calibrate=settings(text))
    assert {t.outcome for t in report.tensors} >= {CALIBRATED}
    assert any("files that were damaged or of another run: 1;" in note for note in report.notes)


def test_codes_that_fit_are_carried_beside_layers_that_are_calibrated(text, tmp_path) -> None:
    """Of a GPTQ checkpoint, only what its type cannot hold is quantized again."""
    from tests.conftest import CHECKPOINT

    report = convert(
        CHECKPOINT, tmp_path / "out.gguf", tensor_types=[("blk.0.ffn_up", "Q3_K")], calibrate=settings(text)
    )
    hows = {t.name: t.outcome for t in report.tensors}
    assert hows["blk.0.ffn_up.weight"] == CALIBRATED
    assert hows["blk.0.ffn_gate.weight"] == CARRIED
    assert "calibrated" in report.table()


def test_the_imatrix_of_the_same_tokens_is_llama_cpps(model, text, tmp_path) -> None:
    path = tmp_path / "imatrix.gguf"
    convert(
        model,
        tmp_path / "out.gguf",
        type="Q4_K",
        calibrate=settings(text, imatrix_out=path, feed="float", method="gptq"),
    )
    found = read_imatrix(path)
    assert len(found) == 15
    assert {v.shape for v in found.values()} == {(256,)}
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"], found["blk.0.attn_k.weight"])
    reader = gguf.GGUFReader(path)
    assert reader.fields["imatrix.chunk_size"].contents() == 64
    assert "general.architecture" not in reader.fields
    again = convert(model, tmp_path / "again.gguf", type="Q4_K", imatrix=path)
    assert again.tensors


def test_the_command_line_quantizes_to_gguf_and_says_what_it_did(model, text, tmp_path, capsys) -> None:
    out = tmp_path / "out.gguf"
    arguments = [str(model), str(out), "--type", "Q4_K", "--calibrate", str(text)]
    assert main(["quantize", *arguments, "--samples", "8", "--sequence-length", "64", "--sweeps", "0"]) == 0
    said = capsys.readouterr().out
    assert "16 layers calibrated on 512 tokens" in said
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert types["blk.1.ffn_down.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT:0.5", "TEXT:0.4"], "add up to 0.9; they must add"),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT:2"], "must be above 0 and at most 1"),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "none.txt"], "no such file"),
        (
            ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--sequence-length", "1000000"],
            "the model has 256 positions",
        ),
        (
            ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--act-order", "free"],
            "--act-order free: a GGUF has no column permutation",
        ),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--act-order", "up"], "choose none, free, static"),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--method", "magic"], "invalid choice: 'magic'"),
        (
            ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--method", "awq"],
            "--method awq: AWQ's scales belong to a checkpoint",
        ),
        (["quantize", "MODEL", "o", "--format", "gptq", "--bits", "9", "--calibrate", "TEXT"], "9"),
        (["quantize", "MODEL", "o", "--format", "awq", "--bits", "3", "--calibrate", "TEXT"], "AWQ cannot hold 3 bits"),
        (
            ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--damping", "-1"],
            "--damping -1.0: must be at least 0",
        ),
        (["convert", "MODEL", "o.gguf", "--damping", "1"], "--damping is for calibration"),
        *(
            (
                ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--size", size],
                f"'{size}' is not a size such as 4G",
            )
            for size in ("0", "0.4", "-1", "9" * 400, "1e9", "nan", "4X", "\N{ARABIC-INDIC DIGIT FOUR}G", "")
        ),
        (
            ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--size", "1"],
            "--size 1: too small; the smallest file",
        ),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--size", "999T"], "too large; the largest file"),
        *(
            (
                ["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--bpw", bpw],
                "must be bits per weight, such as 4.3",
            )
            for bpw in ("0", "-4", "nan", "inf", "33")
        ),
        (["quantize", "MODEL", "o.gguf", "--calibrate", "TEXT", "--bpw", "0.1"], "too small; the smallest file"),
        (["convert", "GPTQ", "o.gguf", "--calibrate", "TEXT"], "every layer keeps its codes"),
    ],
)
def test_bad_input_is_one_line(arguments, message, model, text, tmp_path, monkeypatch, capsys) -> None:
    from tests.conftest import CHECKPOINT

    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(model), "TEXT": str(text), "GPTQ": str(CHECKPOINT)}
    assert main([places.get(a, a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_a_written_checkpoint_converts_with_all_its_codes(format, model, text, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["--format", format, "--group-size", "32", "--calibrate", str(text), "--samples", "8"]
    assert main(["quantize", str(model), str(out), *arguments, "--sequence-length", "64", "--sweeps", "0"]) == 0
    assert "14 layers" in capsys.readouterr().out
    report = convert(out, tmp_path / "out.gguf")
    assert {t.outcome for t in report.tensors if t.has_codes} == {CARRIED}
    assert json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 4


def test_awq_scales_reach_the_norms_and_the_model_is_nearer_than_by_rounding(model, text, tmp_path) -> None:
    from safetensors.numpy import load_file

    tokens = read_tokens(text, load_tokenizer(model), 100, 64)[-4:].flatten().tolist()
    options = ["--format", "awq", "--group-size", "32", "--calibrate", str(text), "--samples", "8"]
    errors = {}
    for method in ("awq", "rtn"):
        out = tmp_path / method
        assert main(["quantize", str(model), str(out), *options, "--sequence-length", "64", "--method", method]) == 0
        report = convert(out, tmp_path / f"{method}.gguf")
        assert {t.outcome for t in report.tensors if t.has_codes} == {CARRIED}
        errors[method] = np.square(
            predict(out_floats(out, tmp_path / f"{method}-f"), tokens) - predict(model, tokens)
        ).mean()
    norm = "model.layers.0.input_layernorm.weight"
    assert not np.array_equal(*(load_file(f / "model.safetensors")[norm] for f in (model, tmp_path / "awq")))
    assert errors["awq"] < errors["rtn"]


@pytest.mark.exhaustive
def test_awq_goes_on_with_the_scales_that_a_killed_run_has_found(model, text, tmp_path, monkeypatch) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    awq = settings(text, method="awq")
    quantize_checkpoint(model, tmp_path / "whole", "awq", group_size=32, calibrate=awq)
    with pytest.raises(KeyboardInterrupt, match="stopped; 9 of 14"):
        quantize_checkpoint(model, tmp_path / "out", "awq", group_size=32, calibrate=replace(awq, progress=stop))
    assert len(list((tmp_path / "out.layers").glob("*.scales"))) == 2
    monkeypatch.setattr("bridge.quantize.awq.smoothing", None)  # nothing is searched again
    quantize_checkpoint(model, tmp_path / "out", "awq", group_size=32, calibrate=awq)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other


def out_floats(folder: Path, floats: Path) -> Path:
    """A quantized checkpoint as the float model of its own weights."""
    from safetensors.numpy import save_file

    from bridge.checkpoint import open_checkpoint

    floats.mkdir()
    with open_checkpoint(folder) as checkpoint:
        weights = {name: checkpoint.read_float(name) for name in checkpoint.tensors}
        weights |= {f"{name}.weight": checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
    for file in folder.glob("*.json"):
        (floats / file.name).write_bytes(file.read_bytes())
    config = json.loads((floats / "config.json").read_text())
    config.pop("quantization_config")
    (floats / "config.json").write_text(json.dumps(config))
    save_file(weights, floats / "model.safetensors", {"format": "pt"})
    return floats


def test_rounding_to_nearest_needs_no_text(model, tmp_path) -> None:
    assert main(["quantize", str(model), str(tmp_path / "o"), "--format", "gptq_v2", "--method", "rtn"]) == 0
    assert main(["quantize", str(model), str(tmp_path / "o.gguf"), "--method", "rtn"]) == 0


def test_python_and_the_command_line_write_the_same_file(model, tmp_path) -> None:
    options = ["--type", "Q4_K", "--method", "rtn", "--tensor-type", "ffn_down=Q6_K"]
    assert main(["quantize", str(model), str(tmp_path / "command.gguf"), *options]) == 0
    rtn, pinned = Calibration(None, method="rtn"), {"ffn_down": "Q6_K"}
    report = quantize_gguf(model, tmp_path / "python.gguf", "Q4_K", calibrate=rtn, tensor_types=pinned)
    assert report.outputs == [tmp_path / "python.gguf"]
    assert (tmp_path / "python.gguf").read_bytes() == (tmp_path / "command.gguf").read_bytes()


def test_floats_need_no_text_and_all_else_gets_one(model, tmp_path, monkeypatch) -> None:
    assert quantize_gguf(model, tmp_path / "floats.gguf", "f16").outputs
    asked = []
    monkeypatch.setattr("bridge.conversion.quantize_gguf.convert_as", lambda *given: asked.append(given[2]))
    quantize_gguf(model)
    quantize_gguf(model, calibrate="text.txt")
    assert [settings.calibrate for settings in asked] == [Calibration(), Calibration("text.txt")]


def test_without_torch_the_package_to_install_is_named(text, monkeypatch) -> None:
    monkeypatch.setattr("bridge.quantize.settings.find_spec", lambda name: None)
    for system, index in (("linux", " --index-url https://download.pytorch.org/whl/cpu"), ("darwin", "")):
        monkeypatch.setattr("sys.platform", system)
        with pytest.raises(BridgeError, match=f"needs torch; pip install torch{index}$"):
            Calibration(text)
    monkeypatch.setattr("bridge.quantize.settings.find_spec", lambda name: None if name == "transformers" else name)
    with pytest.raises(BridgeError, match=r"needs transformers: pip install 'gguf-bridge\[quantize\]'"):
        Calibration(text)


@pytest.mark.parametrize("method", ["gptaq", "two-sided"])
def test_nan_in_activations_names_the_block(model, text, tmp_path, method) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match=r"model\.layers\.1: its outputs hold NaN or inf"):
        convert(broken, tmp_path / "o.gguf", type="Q4_K", calibrate=settings(text, method=method))

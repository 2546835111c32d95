"""Checkpoints of quantized layers: read back code for code, and never there by halves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch

import bridge
from bridge.checkpoint import GroupedTensor, open_checkpoint
from bridge.checkpoint.formats.packing import pack_columns, pack_gemm
from bridge.checkpoint.formats.registry import FORMATS as WRITTEN
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.write.report import Written
from bridge.checkpoint.write.writer import CheckpointWriter, write_checkpoint
from bridge.errors import BridgeError
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.solve.gptq_solver import round_to_nearest
from tests.conftest import CHECKPOINT
from tests.support.encode import LINEAR, awq_tensors, load_floats, pack_stream, quantize
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float Llama with tied embeddings."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_model(folder, "LlamaConfig", tie_word_embeddings=True, attention_bias=True)


def layers_of(
    model: Path, bits: int = 4, size: int = 64, sym: bool = True, act_order: bool = False
) -> dict[str, GroupedTensor]:
    """Its linears, rounded to nearest, with no zero point of 0."""
    tensors = {}
    for key, weight in load_floats(model).items():
        name = key.removesuffix(".weight")
        if key != name and LINEAR.match(name):
            q = quantize(weight, bits, size, sym, act_order)
            q.zeros[:] = np.maximum(q.zeros, 1)
            tensors[name] = GroupedTensor(
                name, bits, q.codes, q.scales.astype(np.float32), q.zeros.astype(np.float32),
                weight.shape[1] if size == -1 else size, q.group.astype(np.int32) if act_order else None,
            )  # fmt: skip
    return tensors


def write(
    model: Path, out: Path, format: str, tensors: dict[str, GroupedTensor], size: int = 64, **more: Any
) -> Written:
    layers = {name: Groups(t.bits, size) for name, t in tensors.items()}
    with open_checkpoint(model) as ckpt:
        return write_checkpoint(ckpt, out, format, layers, tensors.values(), **more)


def same(a: GroupedTensor, b: GroupedTensor) -> None:
    """Codes, scales, zero points and the group of each column."""
    assert a.bits == b.bits
    for one, other in ((a.codes, b.codes), (a.scales, b.scales), (a.zeros, b.zeros), (a.groups(), b.groups())):
        np.testing.assert_array_equal(one, other)


GPTQ = [(bits, size, sym) for bits, size in ((2, 64), (3, 128), (4, 64), (8, -1)) for sym in (True, False)]
FORMATS = [(f, *kind, False) for f in ("gptq", "gptq_v2") for kind in GPTQ]
FORMATS += [("gptq_v2", 4, 64, False, True), ("gptq", 3, 64, True, True), ("awq", 4, 32, False, False)]
FORMATS += [("awq", 4, 128, True, False)]


@pytest.mark.parametrize(("format", "bits", "size", "sym", "act_order"), FORMATS)
def test_what_was_written_is_read_back_and_its_codes_are_carried(
    tmp_path: Path, model: Path, format: str, bits: int, size: int, sym: bool, act_order: bool
) -> None:
    tensors = layers_of(model, bits, size, sym, act_order)
    done = write(model, tmp_path / "out", format, tensors, size)
    assert done.modules == len(tensors) == 14
    with open_checkpoint(tmp_path / "out") as ckpt, open_checkpoint(model) as floats:
        assert ckpt.format == {"awq": "awq-gemm"}.get(format, format)
        assert ckpt.quant.sym == (sym and format != "awq")
        assert ckpt.quant.desc_act == act_order
        assert ckpt.notes == []
        for name, tensor in tensors.items():
            read = ckpt.read_module(name)
            same(read, tensor)
            assert read.notes == ()
        biases = {f"{n}.bias" for n in tensors}
        left = floats.tensors.keys() - {f"{n}.weight" for n in tensors}
        assert ckpt.tensors.keys() == left
        assert "lm_head.weight" not in left
        for name in left:
            assert ckpt.tensors[name].dtype == floats.tensors[name].dtype
            np.testing.assert_array_equal(ckpt.read_float(name), floats.read_float(name))
        assert biases & left
    if bits == 4 and format != "gptq" and not act_order:
        report = bridge.convert(tmp_path / "out", tmp_path / "out.gguf")
        assert {t.outcome for t in report.tensors if t.has_codes} == {"codes carried"}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_those_of_an_independent_encoder(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (64, 96)).astype(np.uint8)
    np.testing.assert_array_equal(pack_columns(codes, bits), pack_stream(codes, bits).T)
    if bits == 4:
        q = quantize(np.random.default_rng(4).normal(size=(64, 96)).astype(np.float32), 4, 32, False)
        np.testing.assert_array_equal(pack_gemm(q.codes), awq_tensors("", q, 32)[".qweight"])


def test_a_ternary_layer_is_a_checkpoint_of_2_bits(tmp_path: Path, model: Path) -> None:
    weight = load_floats(model)["model.layers.0.mlp.up_proj.weight"]
    grid = GroupGrid(*weight.shape, bits=0, group_size=64)
    codes = round_to_nearest(torch.from_numpy(weight), grid, np.ones(weight.shape[1]))
    tensor = grid.tensor("model.layers.0.mlp.up_proj", codes)
    write(model, tmp_path / "out", "gptq", {tensor.name: tensor})
    with open_checkpoint(tmp_path / "out") as ckpt:
        same(ckpt.read_module(tensor.name), tensor)
        assert ckpt.quant.bits == 2


def test_layers_come_in_any_order_into_shards_with_an_index(tmp_path: Path, model: Path) -> None:
    tensors = layers_of(model)
    layers = {name: Groups(4, 64) for name in tensors}
    (seen, bars), out = ([], []), tmp_path / "out"

    def one_by_one() -> Iterator[GroupedTensor]:
        for name in sorted(tensors, reverse=True):
            seen.append(name)
            yield tensors[name]

    with open_checkpoint(model) as ckpt:
        write_checkpoint(
            ckpt, out, "gptq_v2", layers, one_by_one(), shard_size=200_000, progress=lambda *bar: bars.append(bar)
        )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    held = {name: file.name for file in shards for name in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(v.nbytes for file in shards for v in load_file(file).values())
    assert bars[-1][0] == bars[-1][1] == index["metadata"]["total_size"]
    with open_checkpoint(out) as ckpt:
        for name in seen:
            same(ckpt.read_module(name), tensors[name])


def test_tokenizer_and_configs_come_along_and_say_what_was_done(tmp_path: Path, model: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "model"))
    (source / "README.md").write_text("a model")
    (source / "extra.bin").write_bytes(b"0")
    tensors = layers_of(model, sym=False)
    done = write(source, tmp_path / "out", "gptq", tensors)
    assert done.left_out == ["extra.bin"]
    assert done.summary().splitlines()[1:] == [
        "left out    extra.bin: not part of the checkpoint that was read",
        f"wrote {tmp_path / 'out'}",
    ]
    with pytest.raises(BridgeError, match="is not a report"):
        done.save(tmp_path / "out" / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    labels = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert labels == json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert {k: labels[k] for k in ("bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "bits": 4, "group_size": 64, "sym": False, "desc_act": False, "lm_head": False,
    }  # fmt: skip
    # GPTQModel reads asymmetric v1 of no other writer
    assert any(writer.startswith("gptqmodel:") for writer in labels["meta"]["quantizer"])


def test_single_layers_may_have_other_bits_or_stay_floats(tmp_path: Path, model: Path) -> None:
    tensors = layers_of(model) | {n: t for n, t in layers_of(model, 8, 128).items() if n.endswith("down_proj")}
    left = tensors.pop("model.layers.1.mlp.up_proj").name
    layers = {n: Groups(8, 128) if t.bits == 8 else Groups(4, 64) for n, t in tensors.items()}
    with open_checkpoint(model) as ckpt:
        write_checkpoint(ckpt, tmp_path / "out", "gptq", layers, tensors.values())
    with open_checkpoint(tmp_path / "out") as ckpt:
        assert f"{left}.weight" in ckpt.tensors
        assert ckpt.quant.for_module(left) is None
        assert ckpt.quant.for_module("model.layers.0.mlp.down_proj").bits == 8  # type: ignore[union-attr]
        assert ckpt.quant.for_module("model.layers.0.mlp.up_proj").bits == 4  # type: ignore[union-attr]
        for name, tensor in tensors.items():
            same(ckpt.read_module(name), tensor)
            assert ckpt.read_module(name).notes == ()


def test_changed_floats_are_stored_in_the_dtype_of_what_they_replace(tmp_path: Path, model: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "model"))
    norm, bias = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.v_proj.bias"
    weights = {name: torch.from_numpy(values) for name, values in load_floats(model).items()}
    kept = {n: w.bfloat16() if n == norm else w.half() for n, w in weights.items()}
    save_torch(kept, source / "model.safetensors", {"format": "pt"})
    tensors = layers_of(model)
    changed = {norm: weights[norm].numpy() * np.float32(1.7), bias: weights[bias].numpy() * np.float32(0.3)}
    write(source, tmp_path / "out", "awq", tensors, floats=changed)
    with open_checkpoint(tmp_path / "out") as ckpt:
        np.testing.assert_array_equal(ckpt.read_float(norm), torch.from_numpy(changed[norm]).bfloat16().float().numpy())
        np.testing.assert_array_equal(ckpt.read_float(bias), changed[bias].astype(np.float16))
    for wrong, message in (
        ({norm: np.ones(3)}, "in the model"),
        ({bias: changed[bias] + 1e6}, "too large for F16"),
    ):
        with pytest.raises(BridgeError, match=message):
            write(source, tmp_path / "no", "awq", tensors, floats=wrong)
    with pytest.raises(BridgeError, match="is not a float tensor"):
        write(source, tmp_path / "no", "awq", tensors, floats={"model.norm": np.ones(3)})


def with_a_zero_of_0(model: Path) -> dict[str, GroupedTensor]:
    tensors = layers_of(model, sym=False)
    name, some = next(iter(tensors.items()))
    zeros = some.zeros.copy()
    zeros[3, 1] = 0
    return tensors | {name: replace(some, zeros=zeros)}


def test_v1_refuses_a_zero_point_of_0_and_clamp_moves_its_codes_along(tmp_path: Path, model: Path) -> None:
    tensors = with_a_zero_of_0(model)
    tensor = next(iter(tensors.values()))
    with pytest.raises(BridgeError, match="1 groups have a zero point of 0"):
        write(model, tmp_path / "out", "gptq", tensors)
    done = write(model, tmp_path / "out", "gptq", tensors, clamp=True)
    lost = tensor.codes[3, 64:128] == 15
    assert done.raised == (1, lost.sum())
    assert "\nclamped     1 zero points of 0, which GPTQ v1 cannot hold, became 1" in done.summary()
    with open_checkpoint(tmp_path / "out") as ckpt:
        values = ckpt.read_module(tensor.name).dequantize()
    expected = tensor.dequantize()
    expected[3, 64:128] -= tensor.scales[3, 1] * lost
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    write(model, tmp_path / "v2", "gptq_v2", tensors)
    with open_checkpoint(tmp_path / "v2") as ckpt:
        same(ckpt.read_module(tensor.name), tensor)


def test_what_a_format_cannot_hold_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    cases: list[tuple[str, dict[str, Groups], str]] = [
        ("gptq", {up: Groups(5, 64)}, f"{up}: GPTQ v1 and v2 cannot hold 5 bits"),
        ("awq", {up: Groups(3, 64)}, f"{up}: AWQ cannot hold 3 bits"),
        ("awq", {up: Groups(4, 96)}, "groups of 96 do not divide 256 columns"),
        ("awq", {"lm_head": Groups(4, 64)}, "tied to the embeddings"),
        ("awq", {"model.norm": Groups(4, 64)}, "is it another model's"),
        ("gguf", {up: Groups(4, 64)}, "unknown checkpoint format"),
    ]
    with open_checkpoint(model) as ckpt:
        for format, layers, message in cases:
            with pytest.raises(BridgeError, match=message):
                CheckpointWriter(ckpt, tmp_path / "out", format, layers)
    assert "do not fill whole 32-bit words" in str(WRITTEN["gptq"].obstacle(Groups(3, 64), (256, 112)))
    assert "rows" in str(WRITTEN["awq"].obstacle(Groups(4, 64), (100, 256)))
    tensor = layers_of(model)[up]
    bad = [
        (replace(tensor, scales=tensor.scales * np.float32(1.0001)), "not half-precision"),
        (replace(tensor, zeros=tensor.zeros + np.float32(0.5)), "integers from 0 to 15"),
        (replace(tensor, codes=tensor.codes + np.uint8(16)), "beyond 4 bits"),
        (replace(tensor, name="other"), "not a layer to be quantized"),
        (layers_of(model, size=32)[up], "announced was"),
    ]
    for wrong, message in bad:
        with open_checkpoint(model) as ckpt, pytest.raises(BridgeError, match=message):
            write_checkpoint(ckpt, tmp_path / "out", "gptq", {up: Groups(4, 64)}, [wrong])
    scattered = layers_of(model, act_order=True)[up]
    with pytest.raises(BridgeError, match="awq has no act-order"):
        write(model, tmp_path / "out", "awq", {up: scattered})
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_that_is_quantized_already_is_no_source(tmp_path: Path) -> None:
    with open_checkpoint(CHECKPOINT) as ckpt, pytest.raises(BridgeError, match="quantize the original float model"):
        CheckpointWriter(ckpt, tmp_path / "out", "gptq", {})


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, problem: Any
) -> None:
    tensors, out = layers_of(model), tmp_path / "out"
    write(model, out, "gptq", tensors)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def stop(*_: object) -> None:
        raise problem

    with pytest.raises(BridgeError, match="force=True replaces it"):
        write(model, out, "gptq_v2", tensors)
    for where in (
        "checkpoint.write.writer.CheckpointWriter._write_heads",
        "checkpoint.write.writer.sync",
        "checkpoint.files.folder.shutil.copyfile",
    ):
        monkeypatch.setattr(f"bridge.{where}", stop)
        with pytest.raises((KeyboardInterrupt, BridgeError)):
            write(model, out, "gptq_v2", tensors, force=True)
        monkeypatch.undo()
        assert [file.name for file in tmp_path.iterdir()] == ["out"]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    with open_checkpoint(model) as ckpt, pytest.raises(BridgeError, match="14 of 14 layers have not been quantized"):
        write_checkpoint(ckpt, out, "gptq_v2", {n: Groups(4, 64) for n in tensors}, [], force=True)
    write(model, out, "gptq_v2", tensors, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} != before


def test_a_conv1d_is_stored_as_every_other_layer(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2", "GPT2Config", n_embd=64, n_layer=1, n_head=2)
    name = "transformer.h.0.mlp.c_fc"
    weights = load_floats(folder)
    name = next(key for key in weights if key.endswith("mlp.c_fc.weight")).removesuffix(".weight")
    q = quantize(weights[f"{name}.weight"].T, 4, 32, True)
    tensor = GroupedTensor(name, 4, q.codes, q.scales.astype(np.float32), q.zeros.astype(np.float32), 32)
    write(folder, tmp_path / "out", "gptq", {name: tensor}, 32, transposed=[name])
    with open_checkpoint(tmp_path / "out") as ckpt:
        same(ckpt.read_module(name), tensor)

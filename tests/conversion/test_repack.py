"""A checkpoint in another format: its codes, all else that it has, and what is refused."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge import Calibration
from bridge.checkpoint.grouped import CodedTensor
from bridge.checkpoint.write.writer import CheckpointWriter
from bridge.cli import main
from bridge.conversion.checkpoints.repack import Repacked
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT, checkpoint_names
from tests.models.test_converter import GOLDENS
from tests.models.test_converter import write_checkpoint as write_golden
from tests.support.encode import awq_tensors, gptq_tensors, load_floats, quantize, write_awq, write_folder, write_gptq
from tests.support.encode_compressed import config as ct_config
from tests.support.encode_compressed import packed_tensors
from tests.support.encode_compressed import scheme as ct_scheme

DOWN, GATE, UP = (f"model.layers.0.mlp.{part}_proj" for part in ("down", "gate", "up"))
LABEL = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}


def contents(folder: Path) -> dict[str, np.ndarray | CodedTensor]:
    """Layers with codes by module, other tensors by name."""
    with bridge.open_checkpoint(folder) as ckpt:
        layers = {module: ckpt.read_module(module) for module in ckpt.modules}
        return {**{name: ckpt.store.read(name) for name in ckpt.tensors}, **layers}


def assert_same(folder: Path, other: Path) -> None:
    """The same layers with the same weights, and the same bytes of everything else."""
    first, second = contents(folder), contents(other)
    assert first.keys() == second.keys()
    for name, one in first.items():
        two = second[name]
        if isinstance(one, np.ndarray):
            assert isinstance(two, np.ndarray)
            assert one.dtype == two.dtype
            assert np.array_equal(one, two), name
        else:
            assert not isinstance(two, np.ndarray)
            assert np.array_equal(one.dequantize(), two.dequantize()), name


def repack(source: Path, out: Path, format: str, **options: object) -> Repacked:
    done = bridge.repack(source, out, format, **options)  # type: ignore[arg-type]
    assert isinstance(done, Repacked)
    return done


def ways(done: Repacked) -> set[str]:
    """What became of the layers with codes."""
    return {t.how for t in done.tensors if t.bits}


@pytest.mark.parametrize("name", checkpoint_names())
def test_checkpoints_of_the_quantizers_go_through_four_formats_and_back(tmp_path, checkpoints, name):
    source = checkpoints / name
    if "-ct-" in name:  # whose scales are no halves
        assert ways(repack(source, tmp_path / "halves", "gptq_v2", dtype="F32")) == {"all codes"}
        source = tmp_path / "halves"
    last = source
    steps = ["compressed-tensors", "gptq_v2", "hqq", "gptq_p", "compressed-tensors"]
    if "actorder" in name:
        steps = ["gptq", "gptq_p", "gptq_v2"]  # hqq has none, compressed-tensors for SGLang alone
    for number, format in enumerate(steps):
        done = repack(last, tmp_path / str(number), format, dtype="F32")
        assert ways(done) == {"exact"}
        last = tmp_path / str(number)
    repack(source, tmp_path / "floats", "floats", dtype="F32")
    repack(last, tmp_path / "back", "floats", dtype="F32")
    assert_same(tmp_path / "floats", tmp_path / "back")


@pytest.mark.parametrize(
    "name", ["qwen3.5-moe-mtp", "qwen3-vl", "gemma3n", "kimi-linear", "gemma4-moe", "glm4-moe-mtp"]
)
def test_towers_predicting_layers_and_names_stay_as_they_are(tmp_path, name):
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    model = write_golden(golden, tmp_path / "model")
    layers = write_gptq(tmp_path / "source", model, 4, 32, checkpoint_format="gptq_v2")
    assert len(layers) > 5
    assert ways(repack(tmp_path / "source", tmp_path / "new", "compressed-tensors")) == {"exact"}
    assert_same(tmp_path / "source", tmp_path / "new")
    assert ways(repack(tmp_path / "new", tmp_path / "back", "gptq_v2")) == {"exact"}
    assert_same(tmp_path / "source", tmp_path / "back")
    first, second = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("source", "back"))
    del first["quantization_config"], second["quantization_config"]
    assert first == second


def test_all_other_files_come_along_but_for_the_old_formats_labels(tmp_path):
    source = Path(shutil.copytree(CHECKPOINT, tmp_path / "a"))
    for name in ("chat_template.jinja", "modeling_special.py", "additional_chat_templates/tool.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "pytorch_model.bin").write_bytes(b"weights of before")
    done = repack(source, tmp_path / "b", "compressed-tensors")
    before, after = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (source, tmp_path / "b"))
    assert before - after == {"quantize_config.json", "pytorch_model.bin"}
    assert done.left_out == ["pytorch_model.bin"]
    assert "left out" in done.summary()
    for name in after - {"config.json", "model.safetensors"}:
        assert (source / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    stated = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "compressed-tensors"
    assert "desc_act" not in stated


def test_files_of_a_limited_size_have_an_index(tmp_path, monkeypatch):
    whole = repack(CHECKPOINT, tmp_path / "one", "awq")
    monkeypatch.setitem(CheckpointWriter.__init__.__kwdefaults__, "shard_size", 200_000)
    parts = repack(CHECKPOINT, tmp_path / "several", "awq")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3
    assert {*index["weight_map"].values()} == {file.name for file in files}
    assert index["metadata"]["total_size"] == whole.nbytes == parts.nbytes
    assert_same(tmp_path / "one", tmp_path / "several")
    repack(tmp_path / "several", tmp_path / "back", "gptq_v2")
    assert_same(tmp_path / "back", CHECKPOINT)


def test_act_order_of_down_proj_becomes_the_order_of_the_rows_before_it(tmp_path, small_model):
    write_gptq(tmp_path / "source", small_model, 4, 64, desc_act=True, checkpoint_format="gptq_v2")
    done = repack(tmp_path / "source", tmp_path / "new", "awq", dtype="F32")
    how = {t.name.removesuffix(".weight"): t.how for t in done.tensors}
    assert how[DOWN] == "exact"
    assert how[GATE] == "floats"  # of 4 bits rounded once more they would lose more than is allowed
    assert "24 layers are floats, since awq does not hold their codes; bits=4 rounds them" in done.notes
    assert "24 layers have act-order, which awq does not hold" in done.notes
    old, new = contents(tmp_path / "source"), contents(tmp_path / "new")

    def rows(parts: dict[str, np.ndarray | CodedTensor], module: str) -> np.ndarray:
        layer = parts.get(module, parts.get(f"{module}.weight"))
        assert layer is not None
        return layer if isinstance(layer, np.ndarray) else layer.dequantize()

    order = np.argsort(quantize_order(tmp_path / "source"), kind="stable")
    assert not np.array_equal(order, np.arange(len(order)))
    assert np.array_equal(rows(new, DOWN), rows(old, DOWN)[:, order])
    for module in (GATE, UP):
        assert np.array_equal(rows(new, module), rows(old, module)[order])


def quantize_order(folder: Path) -> np.ndarray:
    with bridge.open_checkpoint(folder) as ckpt:
        groups = ckpt.group_order(DOWN)
    assert groups is not None
    return groups


def one_layer(folder: Path, bits: int = 4, format: str = "awq", zero: bool = False) -> Path:
    """A layer, in some groups of which codes from 0 to the greatest have a zero point of 0."""
    q = quantize(np.random.default_rng(0).normal(0, 0.05, (64, 256)).astype(np.float32), bits, 64, False)
    if zero:
        q.zeros[3, 1] = q.zeros[9, 0] = 0
        q.codes[3, 64:128] = np.arange(64) % 2**bits
        q.codes[9, :64] = np.arange(64) % 2**bits
    else:
        q.zeros[:] = np.maximum(q.zeros, 1)
    norm = {"model.norm.weight": np.ones(256, np.float16)}
    if format == "awq":
        label = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
        return write_folder(folder, {**awq_tensors(DOWN, q, "gemm"), **norm}, label)
    return write_folder(folder, {**gptq_tensors(DOWN, q, bits, "gptq_v2"), **norm}, {**LABEL, "bits": bits})


def test_zero_points_of_0_take_more_bits_in_gptq_v1_or_are_clamped_and_told(tmp_path, capsys):
    source = one_layer(tmp_path / "source", zero=True)
    done = repack(source, tmp_path / "wide", "gptq")
    [layer] = [t for t in done.tensors if t.bits]
    assert (layer.how, layer.bits) == ("exact", 8)
    reason = "gptq has no room for all zero points; clamp=True makes those of 0 into 1"
    assert done.notes == [f"1 layers take 8 bits instead of 4: {reason}"]
    assert_same(source, tmp_path / "wide")
    done = repack(source, tmp_path / "clamped", "gptq", clamp=True)
    [layer] = [t for t in done.tensors if t.bits]
    before, after = (contents(folder)[DOWN].dequantize() for folder in (source, tmp_path / "clamped"))  # type: ignore[union-attr]
    assert layer.bits == 4
    assert np.count_nonzero(before != after) == 2 * 64 / 16  # the greatest code has no room
    assert layer.nmse == pytest.approx(np.square(after - before).sum() / np.square(before).sum(), rel=1e-4)
    assert "2 zero points of 0, which GPTQ v1 cannot hold, became 1" in done.summary()
    assert "8 weights with the greatest code lost a step" in done.summary()
    assert main(["repack", str(source), str(tmp_path / "x"), "--format", "gptq_v2", "--clamp"]) == 2
    assert "gptq_v2 holds every zero point; leave out --clamp" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "gptq_p", "awq", "compressed-tensors", "mlx", "hqq"])
def test_bits_are_a_limit_above_which_layers_are_rounded(tmp_path, format):
    source = one_layer(tmp_path / "source", 8, "gptq")
    done = repack(source, tmp_path / "new", format, bits=4)
    [layer] = [t for t in done.tensors if t.bits]
    assert (layer.how, layer.bits, layer.group_size) == ("rounded", 4, 32)
    before, after = (contents(folder)[DOWN].dequantize() for folder in (source, tmp_path / "new"))  # type: ignore[union-attr]
    assert layer.nmse == pytest.approx(np.square(after - before).sum() / np.square(before).sum(), rel=1e-3)
    assert 0 < layer.nmse < 0.01
    assert [n for n in done.notes if "have no codes that" in n and "in 4 bits: rounded" in n]
    few = one_layer(tmp_path / "few", 4, "gptq")
    [layer] = [t for t in repack(few, tmp_path / "four", format, bits=4).tensors if t.bits]
    assert layer.how in ("exact", "all codes")


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_weights_of_one_sign_are_read_back_as_they_were_written(tmp_path, format, bits):
    """Their zero points are far from the codes' mean, by which labels of other programs are checked."""
    weight = np.abs(np.random.default_rng(0).normal(0, 0.05, (256, 512))).astype(np.float32)
    q = quantize(weight, 8, 64, False)
    q.zeros[:] = 1
    write_folder(tmp_path / "source", gptq_tensors(DOWN, q, 8, "gptq_v2"), {**LABEL, "bits": 8})
    [layer] = repack(tmp_path / "source", tmp_path / "new", format, bits=bits).tensors
    before, after = (contents(folder)[DOWN].dequantize() for folder in (tmp_path / "source", tmp_path / "new"))  # type: ignore[union-attr]
    assert layer.nmse == pytest.approx(np.square(after - before).sum() / np.square(before).sum(), rel=1e-3)


def test_layers_that_would_be_rounded_are_calibrated_with_a_text(tmp_path, small_model):
    write_gptq(tmp_path / "source", small_model, 8, 64, checkpoint_format="gptq_v2")
    tokens = np.random.default_rng(0).integers(0, 256, 512)
    np.save(tmp_path / "tokens.npy", tokens)
    settings = Calibration(tmp_path / "tokens.npy", length=64)
    done = repack(tmp_path / "source", tmp_path / "new", "awq", bits=4, calibrate=settings)
    assert ways(done) == {"calibrated"}
    before, after = contents(tmp_path / "source"), contents(tmp_path / "new")
    for t in done.tensors:
        if t.bits:
            one, two = (parts[t.name.removesuffix(".weight")].dequantize() for parts in (before, after))  # type: ignore[union-attr]
            assert t.nmse == pytest.approx(np.square(two - one).sum() / np.square(one).sum(), rel=1e-3)
    with pytest.raises(BridgeError, match=r"gptq_p holds the codes of all its layers; leave out calibrate"):
        repack(tmp_path / "source", tmp_path / "other", "gptq_p", calibrate=settings)


@pytest.mark.parametrize(("dtype", "stored"), [(None, "BF16"), ("F16", "F16"), ("F32", "F32")])
def test_floats_have_the_dtype_that_is_asked_for(tmp_path, dtype, stored):
    for format in ("floats", "compressed-tensors"):
        repack(CHECKPOINT, tmp_path / format, format, dtype=dtype)
        with bridge.open_checkpoint(tmp_path / format) as ckpt:
            assert {info.dtype for info in ckpt.tensors.values()} == {stored}


def test_a_format_of_one_group_size_has_the_largest_that_divides_all(tmp_path, small_model):
    source = tmp_path / "source"
    write_gptq(source, small_model, 4, 128, checkpoint_format="gptq_v2")
    tensors = load_file(source / "model.safetensors")
    q = quantize(load_floats(small_model)[f"{DOWN}.weight"], 4, 32, True)
    tensors |= gptq_tensors(DOWN, q, 4, "gptq_v2")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {f"+:{DOWN}": {"group_size": 32}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "quantize_config.json").unlink()
    done = repack(source, tmp_path / "new", "awq")
    assert {(t.how, t.group_size) for t in done.tensors if t.bits} == {("exact", 32)}
    assert any("all layers have groups of 32, since AWQ has one size" in note for note in done.notes)
    assert_same(source, tmp_path / "new")


@pytest.mark.parametrize("name", [name for name in checkpoint_names() if "actorder" in name])
def test_act_order_in_compressed_tensors_is_for_sglang(tmp_path, checkpoints, name):
    source = checkpoints / name
    assert ways(repack(source, tmp_path / "new", "compressed-tensors", host="sglang")) == {"exact"}
    assert_same(source, tmp_path / "new")
    assert ways(repack(tmp_path / "new", tmp_path / "back", "gptq_v2")) == {"exact"}
    assert_same(source, tmp_path / "back")
    assert "rounded" in ways(repack(source, tmp_path / "other", "compressed-tensors"))


def test_a_head_with_codes_stays_where_the_format_has_one(tmp_path, small_model):
    write_gptq(tmp_path / "source", untied(small_model, tmp_path / "model"), 8, 64, lm_head=True)
    how = {}
    for format in ("compressed-tensors", "gptq_p", "mlx", "hqq"):
        done = repack(tmp_path / "source", tmp_path / format, format)
        how[format] = next(t.how for t in done.tensors if t.name == "lm_head.weight")
    assert how == {"compressed-tensors": "exact", "gptq_p": "exact", "mlx": "exact", "hqq": "floats"}


def untied(model: Path, folder: Path) -> Path:
    """The model with a head of its own."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def test_memory_holds_a_few_layers_and_not_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.system.storage.files.MAX_SMALL", 10**6)  # what a config.json may have is taken at once
    layers = [f"model.layers.{i}.mlp.down_proj" for i in range(48)]
    weight = np.random.default_rng(0).normal(0, 0.05, (512, 512)).astype(np.float32)
    q = quantize(weight, 4, 64, True)
    write_folder(
        tmp_path / "source", {n: x for m in layers for n, x in gptq_tensors(m, q, 4, "gptq_v2").items()}, LABEL
    )
    repack(tmp_path / "source", tmp_path / "warm", "awq")
    tracemalloc.start()
    try:
        for format in ("awq", "compressed-tensors", "mlx", "floats"):
            tracemalloc.reset_peak()
            repack(tmp_path / "source", tmp_path / format, format, dtype="F16" if format == "mlx" else "F32")
            assert tracemalloc.get_traced_memory()[1] < 48 * weight.size  # a byte a weight of the model
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize(
    "where",
    [
        "bridge.conversion.checkpoints.coded_layer.in_format", "bridge.checkpoint.write.writer.sync",
        "bridge.checkpoint.files.folder.shutil.copyfile",
    ],
)  # fmt: skip
def test_an_interrupted_run_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, capsys, where, problem):
    repack(CHECKPOINT, tmp_path / "out", "awq")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def stop(*_: object) -> None:
        raise problem

    monkeypatch.setattr(where, stop)
    code = main(["repack", str(CHECKPOINT), str(tmp_path / "out"), "--format", "compressed-tensors", "--force"])
    assert code == (130 if problem is KeyboardInterrupt else 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.scales"] = np.full_like(tensors[f"{DOWN}.scales"], np.nan)
    save_file(tensors, folder / "model.safetensors")


def without_scales(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{DOWN}.scales"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("damage", "message"), [(cut, "model.safetensors"), (with_nan, DOWN), (without_scales, DOWN)])
@pytest.mark.parametrize("format", ["compressed-tensors", "floats"])
def test_a_damaged_source_is_refused_in_one_line(tmp_path, damage: Callable[[Path], None], message, format):
    source = one_layer(tmp_path / "source", 4, "gptq")
    damage(source)
    with pytest.raises(BridgeError, match=message) as error:
        bridge.repack(source, tmp_path / "new", format)
    assert "\n" not in str(error.value)
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "awq"}, "has no layer that awq holds; choose format='floats', or bits=4, which rounds them"),
        ({"format": "modelopt"}, "has no layer that modelopt holds; choose format='floats'$"),
        ({"format": "awq", "bits": 8}, "bits=8: awq has 4"),
        ({"format": "floats", "bits": 8}, "bits=8: floats has no codes that are rounded to"),
        ({"format": "floats", "calibrate": Calibration("default")}, "floats are not rounded; choose another format"),
        ({"format": "ggml"}, "unknown format='ggml': choose floats, gptq, "),
        ({"format": "floats", "dtype": "F64"}, "unknown dtype='F64': choose F16, BF16, F32"),
        ({"bits": 4}, "give format: without it, zero points and labels alone are rewritten"),
        ({"format": "floats", "clamp": True}, "floats holds every zero point; leave out clamp=True"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_way_out(tmp_path, options, message):
    with pytest.raises(BridgeError, match=message):
        bridge.repack(one_layer(tmp_path / "source", 8, "gptq"), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_bits_are_offered_only_where_layers_can_be_rounded_to_them(tmp_path):
    """33 rows are in no words of AWQ."""
    q = quantize(np.random.default_rng(0).normal(0, 0.05, (33, 256)).astype(np.float32), 8, 64, True)
    said = {"quant_method": "compressed-tensors", **ct_config(ct_scheme(8, "group", 64))}
    source = write_folder(tmp_path / "source", packed_tensors(DOWN, q, 8), said)
    with pytest.raises(BridgeError, match=r"has no layer that awq holds; choose format='floats'$"):
        bridge.repack(source, tmp_path / "new", "awq")


def test_a_float_model_is_quantizes(tmp_path, small_model):
    with pytest.raises(BridgeError, match="is not quantized; `quantize` with format does that"):
        bridge.repack(small_model, tmp_path / "new", "awq")


def test_awq_of_autoawq_goes_to_each_program(tmp_path, small_model):
    write_awq(tmp_path / "source", small_model, group_size=64)
    for host, format in (("vllm", "compressed-tensors"), ("transformers", "gptq_v2"), ("mlx", "mlx")):
        done = repack(tmp_path / "source", tmp_path / host, format, host=host)
        assert ways(done) <= {"exact", "all codes"}

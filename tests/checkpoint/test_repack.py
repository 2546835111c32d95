"""`gguf-bridge repack`: zero points rewritten, everything else byte for byte, nothing half-written."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.checkpoint import GroupedTensor, open_checkpoint
from bridge.cli import main
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT, posix
from tests.support.encode import (
    Quantized,
    awq_tensors,
    gptq_tensors,
    pack_stream,
    pack_zeros_autogptq,
    pack_zeros_old_3bit,
    pack_zeros_v1,
    quantize,
    write_folder,
)
from tests.support.encode_legacy import config_folder, legacy_tensors, save_pt
from tests.support.raw import edit_raw, read_raw

REAL = [
    "llama-gptq-4bit-g128-asym-actorder",
    "qwen3-gptq-2bit-g64-asym-v2",
    "qwen3-gptq-3bit-g128-sym",
    "qwen3-gptq-4bit-channel-sym",
    "qwen3-gptq-4bit-g128-asym-v2",
    "qwen3-gptq-4bit-g64-asym-actorder",
    "qwen3-gptq-8bit-g128-sym",
]
UP, GATE, DOWN = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "gate", "down"))
OTHER = {"gptq": "gptq_v2", "gptq_v2": "gptq"}


def quantized(bits: int = 4, sym: bool = False, out: int = 64, seed: int = 0, zero: bool = False) -> Quantized:
    """A layer without a zero point of 0, or with some."""
    q = quantize(np.random.default_rng(seed).normal(0, 0.05, (out, 256)).astype(np.float32), bits, 64, sym)
    q.zeros[:] = np.maximum(q.zeros, 1)
    if zero:
        q.zeros[5:9, 2] = 0
        q.zeros[40, 0] = 0
    return q


def config(bits: int = 4, label: str = "gptq", **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": 64, "sym": False, "desc_act": False,
        "checkpoint_format": label, **more,
    }  # fmt: skip


def labels(folder: Path, file: str = "config.json") -> dict[str, Any]:
    content = json.loads((folder / file).read_text())
    return content["quantization_config"] if file == "config.json" else content


def fields(words: np.ndarray, bits: int, out: int) -> np.ndarray:
    """The stored fields [G, out] of qzeros, bit by bit: what a reader that splits lanes first sees."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    stream = stream[:, : out * bits].reshape(len(words), out, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(-1)


def stored(folder: Path, name: str = UP) -> np.ndarray:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.store.read(f"{name}.qzeros")


def read(folder: Path, name: str = UP) -> GroupedTensor:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.read_module(name)


def assert_only_zeros_differ(a: Path, b: Path) -> None:
    """Two safetensors files: the same header to the byte, the same tensors but qzeros."""
    before, after = a.read_bytes(), b.read_bytes()
    length = 8 + int.from_bytes(before[:8], "little")
    assert len(before) == len(after)
    assert before[:length] == after[:length]
    raw = read_raw(b)
    for name, entry in read_raw(a).items():
        assert name.endswith(".qzeros") or raw[name] == entry, name


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*arguments): the one line of a `repack` that changes nothing in tmp_path."""

    def run(*arguments: object) -> str:
        before = files(tmp_path)
        assert main(["repack", *map(str, arguments)]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert files(tmp_path) == before
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        return error

    return run


# there and back


def test_there_and_back_is_the_same_folder_to_the_byte(tmp_path):
    there = bridge.repack(CHECKPOINT, tmp_path / "v2", "gptq_v2")
    assert there.rewritten == {"v1": 28}
    assert_only_zeros_differ(CHECKPOINT / "model.safetensors", tmp_path / "v2" / "model.safetensors")
    assert labels(tmp_path / "v2")["checkpoint_format"] == labels(tmp_path / "v2")["format"] == "gptq_v2"
    assert labels(tmp_path / "v2", "quantize_config.json")["checkpoint_format"] == "gptq_v2"
    with open_checkpoint(CHECKPOINT) as before, open_checkpoint(tmp_path / "v2") as after:
        assert after.format == "gptq_v2"
        for name in before.modules:
            a, b = before.read_module(name), after.read_module(name)
            assert np.array_equal(a.dequantize(), b.dequantize())
            assert b.notes == ()
    bridge.repack(tmp_path / "v2", tmp_path / "v1", "gptq")
    assert files(tmp_path / "v1") == files(CHECKPOINT)


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_go_there_and_back(tmp_path, checkpoints, name):
    source = checkpoints / name
    label = labels(source, "quantize_config.json")["checkpoint_format"]
    with open_checkpoint(source) as checkpoint:
        zeros = {n: checkpoint.read_module(n).zeros for n in checkpoint.modules}
        bits = {n: info.bits for n, info in checkpoint.modules.items()}
        words = {n: checkpoint.store.read(f"{n}.qzeros") for n in zeros}
    zero_groups = sum(int((z == 0).sum()) for z in zeros.values())
    if zero_groups and label == "gptq_v2":
        with pytest.raises(BridgeError, match=rf"{zero_groups} groups in .* which GPTQ v1 cannot hold"):
            bridge.repack(source, tmp_path / "there", "gptq")
        assert not list(tmp_path.iterdir())
        return
    bridge.repack(source, tmp_path / "there", OTHER[label])
    assert_only_zeros_differ(source / "model.safetensors", tmp_path / "there" / "model.safetensors")
    for module, true in zeros.items():
        expected = (true.T - (label == "gptq_v2")) % 2 ** bits[module]  # AutoGPTQ: 1 less, code by code
        assert np.array_equal(fields(stored(tmp_path / "there", module), bits[module], len(true)), expected)
    if not zero_groups:
        bridge.repack(tmp_path / "there", tmp_path / "back", label)
        for module in zeros:
            assert np.array_equal(stored(tmp_path / "back", module), words[module])
        assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize("pack_dtype", ["int32", "int8", "int16", "int64"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_every_width_of_word_and_code(tmp_path, bits, pack_dtype, label):
    if bits == 3 and pack_dtype != "int32":
        pytest.skip("3 bits are packed into 32-bit words alone")
    q = quantized(bits)
    quant = config(bits, label, pack_dtype=pack_dtype)
    write_folder(tmp_path / "a", gptq_tensors(UP, q, bits, label, pack_dtype), quant)
    bridge.repack(tmp_path / "a", tmp_path / "b", OTHER[label])
    v1 = pack_zeros_v1(q.zeros.T, bits, pack_dtype)
    v2 = pack_stream(q.zeros.T, bits, pack_dtype)
    assert np.array_equal(stored(tmp_path / "b"), v2 if label == "gptq" else v1)
    if bits != 3 and pack_dtype == "int32":
        assert np.array_equal(v1, pack_zeros_autogptq(q.zeros.T, bits))
    assert np.array_equal(read(tmp_path / "b").dequantize(), q.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_0_that_gptqmodel_let_borrow_is_plain_in_v2(tmp_path, bits):
    q = quantized(bits, zero=True)
    quant = config(bits, meta={"quantizer": ["gptqmodel:7.6.0"]})
    write_folder(tmp_path / "a", gptq_tensors(UP, q, bits, "gptq"), quant)
    done = bridge.repack(tmp_path / "a", tmp_path / "b", "gptq_v2")
    assert np.array_equal(stored(tmp_path / "b"), pack_stream(q.zeros.T, bits))
    assert done.notes == []


def test_the_gguf_of_a_repacked_checkpoint_is_that_of_the_original(tmp_path):
    bridge.repack(CHECKPOINT, tmp_path / "v2", "gptq_v2")
    for name, source in (("a", CHECKPOINT), ("b", tmp_path / "v2")):
        bridge.convert(source, tmp_path / f"{name}.gguf")
    a, b = (gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors for name in "ab")
    for one, other in zip(a, b, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(one.data, other.data)


# v1 cannot hold 0


def test_v1_is_refused_where_a_zero_point_is_0(tmp_path, refused):
    tensors = {**gptq_tensors(UP, quantized(zero=True), 4, "gptq_v2"), **gptq_tensors(GATE, quantized(), 4, "gptq_v2")}
    write_folder(
        tmp_path / "a", {**tensors, **gptq_tensors(DOWN, quantized(zero=True), 4, "gptq_v2")}, config(label="gptq_v2")
    )
    message = refused(tmp_path / "a", tmp_path / "b", "--checkpoint-format", "gptq")
    assert "10 groups in 2 modules have a zero point of 0" in message
    assert f"{UP} (5)" in message
    assert f"{DOWN} (5)" in message
    assert GATE not in message
    assert "--clamp" in message


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_clamp_makes_it_1_and_tells_the_damage(tmp_path, capsys, bits):
    q, other = quantized(bits, zero=True), quantized(bits, seed=1)
    tensors = {**gptq_tensors(UP, q, bits, "gptq_v2"), **gptq_tensors(DOWN, other, bits, "gptq_v2")}
    write_folder(tmp_path / "a", tensors, config(bits, "gptq_v2"))
    arguments = [tmp_path / "a", tmp_path / "b", "--checkpoint-format", "gptq", "--clamp"]
    assert main(["repack", *map(str, arguments)]) == 0
    out, _ = capsys.readouterr()
    change = read(tmp_path / "b").dequantize() - read(tmp_path / "a").dequantize()
    assert np.array_equal(read(tmp_path / "b").zeros, np.maximum(q.zeros, 1))
    assert np.array_equal(read(tmp_path / "b", DOWN).zeros, other.zeros)
    assert np.count_nonzero(change) == 5 * 64
    rms = np.sqrt(np.square(change[change != 0]).mean())
    overall = np.sqrt(np.square(change).sum() / (2 * change.size))
    assert "5 groups in 1 modules had a zero point of 0 and now have 1" in out
    assert f"change by {np.abs(change).max():.3g} at most, RMS {rms:.3g} ({overall:.3g} over all" in out
    assert np.array_equal(stored(tmp_path / "b"), pack_zeros_v1(np.maximum(q.zeros, 1).T, bits))


def test_v1_of_gptqmodel_that_holds_0_is_kept_and_noted_and_clamped_on_request(tmp_path):
    q = quantized(zero=True)
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 4), config(meta={"quantizer": ["gptqmodel:7.6.0"]}))
    done = bridge.repack(tmp_path / "a", tmp_path / "b", "gptq")
    assert done.rewritten == {}
    assert "5 groups in 1 modules" in done.notes[0]
    assert files(tmp_path / "a") == files(tmp_path / "b")
    bridge.repack(tmp_path / "a", tmp_path / "c", "gptq", clamp=True)
    assert np.array_equal(stored(tmp_path / "c"), pack_zeros_autogptq(np.maximum(q.zeros, 1).T, 4))


def test_what_autogptq_lost_is_said_to_stay_lost(tmp_path):
    q = quantized(zero=True)
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 4, zeros=pack_zeros_autogptq(q.zeros.T, 4)), config())
    done = bridge.repack(tmp_path / "a", tmp_path / "b", "gptq_v2")
    assert "overwritten with ones by AutoGPTQ" in done.notes[0]


# labels


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("wanted", [None, "gptq", "gptq_v2"])
def test_a_label_that_the_data_contradicts_is_mended(tmp_path, label, wanted):
    """Symmetric data is the one, the label says the other."""
    q, data = quantized(sym=True), OTHER[label]
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 4, data), config(label=label, format=label, sym=True))
    done = bridge.repack(tmp_path / "a", tmp_path / "b", wanted)
    is_now = wanted or data
    assert labels(tmp_path / "b")["checkpoint_format"] == labels(tmp_path / "b")["format"] == is_now
    assert done.rewritten == ({} if is_now == data else {"v1" if data == "gptq" else "v2": 1})
    assert bool(done.labels) == (is_now != label)
    tensor = read(tmp_path / "b")
    assert np.array_equal(tensor.dequantize(), q.dequantize())
    assert tensor.notes == ()
    if is_now == data:
        assert_only_zeros_differ(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")


def test_all_else_that_a_label_gets_wrong_is_mended_too(tmp_path):
    q = quantize(np.random.default_rng(0).normal(0, 0.05, (64, 256)).astype(np.float32), 8, 32, False, desc_act=True)
    q.zeros[:] = np.maximum(q.zeros, 1)
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 8, "gptq_v2"), config(4, "gptq_v2", sym=True))
    done = bridge.repack(tmp_path / "a", tmp_path / "b", "gptq_v2")
    now = labels(tmp_path / "b")
    assert (now["bits"], now["group_size"], now["sym"], now["desc_act"]) == (8, 32, False, True)
    assert {change.split()[0] for change in done.labels} == {"bits", "group_size", "sym", "desc_act"}
    assert read(tmp_path / "b").notes == ()


def test_a_label_that_is_absent_is_added_where_v2_needs_it(tmp_path):
    quant = config(meta=None)
    del quant["checkpoint_format"]
    write_folder(tmp_path / "a", gptq_tensors(UP, quantized(), 4), quant)
    bridge.repack(tmp_path / "a", tmp_path / "v2", "gptq_v2")
    assert labels(tmp_path / "v2")["checkpoint_format"] == "gptq_v2"
    bridge.repack(tmp_path / "a", tmp_path / "v1", "gptq")
    assert files(tmp_path / "v1") == files(tmp_path / "a")


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel"])
def test_auto_rounds_packing_format_is_its_label(tmp_path, packing):
    q = quantized()
    v1 = packing == "auto_round:auto_gptq"
    quant = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 64, "sym": False}
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 4, "gptq" if v1 else "gptq_v2"), quant)
    for wanted in ("gptq", "gptq_v2"):
        bridge.repack(tmp_path / "a", tmp_path / wanted, wanted)
        with open_checkpoint(tmp_path / wanted) as checkpoint:
            assert checkpoint.quant.checkpoint_format == wanted
            assert np.array_equal(checkpoint.read_module(UP).zeros, q.zeros)
    kept = tmp_path / ("gptq" if v1 else "gptq_v2")
    assert labels(kept)["packing_format"] == packing


# who wrote it


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("wanted", [None, "gptq", "gptq_v2"])
def test_3_bit_files_of_old_gptqmodel_are_repaired(tmp_path, sym, wanted):
    q = quantized(3, sym, out=32)  # too few codes to tell by: the quantizer's version does
    quant = config(3, sym=sym, meta={"quantizer": ["gptqmodel:2.2.0"]})
    write_folder(tmp_path / "a", gptq_tensors(UP, q, 3, zeros=pack_zeros_old_3bit(q.zeros.T)), quant)
    done = bridge.repack(tmp_path / "a", tmp_path / "b", wanted)
    assert done.rewritten == {"v1 of GPTQModel < 7.0.0": 1}
    expected = (q.zeros.T - (wanted != "gptq_v2")) & 7
    assert np.array_equal(fields(stored(tmp_path / "b"), 3, 32), expected)
    tensor = read(tmp_path / "b")
    assert np.array_equal(tensor.zeros, q.zeros)
    assert tensor.notes == ()
    assert labels(tmp_path / "b")["meta"]["quantizer"] == ["gptqmodel:2.2.0"]


@pytest.mark.parametrize("wanted", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("quantizer", ["gptqmodel:5.8.0", "gptqmodel:7.6.0"])
def test_modules_of_other_bits_get_the_constant_of_their_own(tmp_path, wanted, quantizer):
    q, default = quantized(8), quantized(4, seed=1)
    old = quantizer == "gptqmodel:5.8.0"
    zeros = pack_zeros_v1(q.zeros.T, 8, constant_bits=4 if old else 8)
    tensors = {**gptq_tensors(UP, q, 8, zeros=zeros), **gptq_tensors(DOWN, default, 4)}
    quant = config(dynamic={"+:.*up_proj": {"bits": 8}}, meta={"quantizer": [quantizer]})
    write_folder(tmp_path / "a", tensors, quant)
    done = bridge.repack(tmp_path / "a", tmp_path / "b", wanted)
    if wanted == "gptq":
        assert done.rewritten == ({"v1 of 4 bits": 1} if old else {})
        assert "before 7.3.2" in done.notes[0]
    assert np.array_equal(fields(stored(tmp_path / "b"), 8, 64), q.zeros.T - (wanted == "gptq"))
    for name, expected in ((UP, q), (DOWN, default)):
        tensor = read(tmp_path / "b", name)
        assert np.array_equal(tensor.zeros, expected.zeros)
        assert tensor.notes == ()


# files


def test_shards_indexes_dtypes_and_all_other_files_come_along(tmp_path):
    source = tmp_path / "a"
    tensors = {name: value for i in range(4) for name, value in gptq_tensors(f"m.{i}", quantized(seed=i), 4).items()}
    write_folder(source, {**tensors, "norm.weight": np.arange(7, dtype=np.float16)}, config(), shards=3)
    shard = source / "model-00002-of-00003.safetensors"
    edit_raw(shard, lambda raw: raw.update(odd=({"dtype": "F8_E8M0", "shape": [5]}, b"12345")))
    for name in ("tokenizer.model", "additional_chat_templates/tool.jinja", ".cache/download", "README.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(name.encode())
    (source / "pytorch_model.bin").write_bytes(b"weights of before")
    (source / "training_args.bin").write_bytes(b"no weights")
    done = bridge.repack(source, tmp_path / "b", "gptq_v2")
    before, after = files(source), files(tmp_path / "b")
    assert set(before) - set(after) == {"pytorch_model.bin", ".cache/download"}
    assert done.left_out == ["pytorch_model.bin"]
    assert "left out    pytorch_model.bin" in done.summary()
    for name in set(after) - {"config.json"}:
        if name.endswith(".safetensors"):
            assert_only_zeros_differ(source / name, tmp_path / "b" / name)
        else:
            assert after[name] == before[name]


def test_ranges_are_copied_right_whatever_the_size_of_a_read(tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.checkpoint.repack.folder_output._CHUNK", 1009)
    seen: list[tuple[int, int, str]] = []
    bridge.repack(CHECKPOINT, tmp_path / "a", "gptq_v2", progress=lambda *step: seen.append(step))
    assert_only_zeros_differ(CHECKPOINT / "model.safetensors", tmp_path / "a" / "model.safetensors")
    with open_checkpoint(CHECKPOINT) as checkpoint:
        total = checkpoint.nbytes
    assert seen[0] == (0, total, "")
    assert seen[-1][:2] == (total, total)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_become_safetensors(tmp_path, shards):
    torch = pytest.importorskip("torch")
    source = tmp_path / "a"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"quantization_config": config()}))
    state = {name: torch.from_numpy(value) for name, value in gptq_tensors(UP, quantized(), 4).items()}
    state["norm.weight"] = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16).T
    state["odd"] = torch.arange(5, dtype=torch.uint8)
    state["one"] = torch.tensor(3, dtype=torch.int64)
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    names = names if shards > 1 else ["pytorch_model.bin"]
    weight_map = {name: names[i % shards] for i, name in enumerate(state)}
    for file in names:
        torch.save({n: t for n, t in state.items() if weight_map[n] == file}, source / file)
    if shards > 1:
        index = {"metadata": {"total_size": 7}, "weight_map": weight_map}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    done = bridge.repack(source, tmp_path / "b", "gptq_v2")
    assert not list((tmp_path / "b").glob("*.bin*"))
    assert done.left_out == []
    assert "the rest    the same tensors, as safetensors" in done.summary()
    with open_checkpoint(source) as a, open_checkpoint(tmp_path / "b") as b:
        assert len(b.files) == shards
        assert all(file.suffix == ".safetensors" for file in b.files)
        assert {n: (i.dtype, i.shape) for n, i in a.store.tensors.items()} == {
            n: (i.dtype, i.shape) for n, i in b.store.tensors.items()
        }
        for name in a.store.tensors:
            if not name.endswith(".qzeros"):
                assert np.array_equal(a.store.read(name), b.store.read(name))
        assert np.array_equal(a.read_module(UP).zeros, b.read_module(UP).zeros)
    from safetensors import safe_open

    for file in sorted((tmp_path / "b").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:  # the library's own reading of it
            assert all(torch.equal(opened.get_tensor(n), state[n]) for n in opened.keys() if "qzeros" not in n)  # noqa: SIM118


def test_a_pt_without_a_config_becomes_a_checkpoint_that_has_one(tmp_path):
    pytest.importorskip("torch")
    q = quantized()
    file = save_pt(tmp_path / "llama-4bit.pt", legacy_tensors(UP, q, 4, "qzeros"))
    home = config_folder(tmp_path / "config", CHECKPOINT)
    bridge.repack(file, tmp_path / "b", "gptq_v2", config=home)
    assert {p.name for p in (tmp_path / "b").iterdir()} == {p.name for p in home.iterdir()} | {"model.safetensors"}
    now = labels(tmp_path / "b")
    assert (now["quant_method"], now["bits"], now["group_size"]) == ("gptq", 4, 64)
    with open_checkpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.notes == []
        assert np.array_equal(checkpoint.read_module(UP).dequantize(), q.dequantize())
        assert checkpoint.read_module(UP).notes == ()


# safety


def source_of(folder: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, folder / "a"))


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, capsys, problem):
    source, out = source_of(tmp_path), tmp_path / "b"
    bridge.repack(source, out, "gptq_v2")
    before = files(tmp_path)

    def stop(*_: object) -> None:
        raise problem

    for where in (
        "bridge.checkpoint.repack.folder_output.sync",
        "bridge.checkpoint.files.folder.shutil.copyfile",
        "bridge.checkpoint.repack.zero_points.recode",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, stop)
            code = main(["repack", str(source), str(out), "--checkpoint-format", "gptq_v2", "--force"])
        assert code == (130 if problem is KeyboardInterrupt else 2)
        assert capsys.readouterr().err.count("\n") == 1
        assert files(tmp_path) == before
        assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    import os

    source, out = source_of(tmp_path), tmp_path / "b"
    bridge.repack(source, out, "gptq_v2")
    before, rename = files(tmp_path), os.rename

    def fail(a: Path, b: Path) -> None:
        if Path(a).parent.suffix == ".unfinished":
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr("bridge.checkpoint.files.folder.os.rename", fail)
    with pytest.raises(BridgeError, match="cannot be renamed into place"):
        bridge.repack(source, out, force=True)
    assert files(tmp_path) == before


def test_force_replaces_a_checkpoint_and_nothing_else(tmp_path, refused):
    source, out = source_of(tmp_path), tmp_path / "b"
    bridge.repack(source, out, "gptq_v2")
    assert "exists; --force replaces it" in refused(source, out)
    bridge.repack(source, out, "gptq", force=True)
    assert files(out) == files(source)
    (out / "merges.txt").write_text("of a checkpoint that was there before")
    bridge.repack(source, out, "gptq", force=True)
    assert files(out) == files(source)
    home = tmp_path / "home"
    home.mkdir()
    (home / "letters.txt").write_text("dear")
    assert "is not a checkpoint folder" in refused(source, home, "--force")


@pytest.mark.parametrize("stray", ["thesis.tex", "text.txt", "results.json", "sub/config.json", ".git/HEAD", "run.pt"])
def test_force_removes_no_file_that_is_not_a_checkpoints(tmp_path, refused, stray):
    source, out = source_of(tmp_path), tmp_path / "b"
    bridge.repack(source, out, "gptq_v2")
    (out / stray).parent.mkdir(exist_ok=True)
    (out / stray).write_text("of years")
    assert f"{out / stray}: is not a checkpoint's file" in refused(source, out, "--force")


def test_force_replaces_what_an_earlier_run_copied(tmp_path, refused):
    source, out = source_of(tmp_path), tmp_path / "b"
    (source / "images").mkdir()
    (source / "images" / "logo.png").write_bytes(b"logo")
    bridge.repack(source, out, "gptq_v2")
    bridge.repack(source, out, "gptq", force=True)
    assert (out / "images" / "logo.png").read_bytes() == b"logo"
    (out / "images" / "logo.png").write_bytes(b"another")
    assert "logo.png: is not a checkpoint's file" in refused(source, out, "--force")


def test_a_file_that_comes_while_it_works_is_not_removed(tmp_path, monkeypatch):
    source, out = source_of(tmp_path), tmp_path / "b"
    bridge.repack(source, out, "gptq_v2")

    def progress(*_: object) -> None:
        (out / "thesis.tex").write_text("of years")

    with pytest.raises(BridgeError, match=r"thesis\.tex: is not a checkpoint's file"):
        bridge.repack(source, out, "gptq", force=True, progress=progress)
    assert (out / "thesis.tex").read_text() == "of years"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_targets_that_are_no_place_for_it(tmp_path, refused):
    source = source_of(tmp_path)
    for out in (source, source / "inside", tmp_path):
        assert "overlaps the source" in refused(source, out, "--force")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(source)
    assert "is a file" in refused(source, tmp_path / "file")
    assert "is a link" in refused(source, tmp_path / "link")
    assert "is not a folder" in refused(source, tmp_path / "file" / "b")
    for name in (".", "..", "/"):
        assert f"{name}: is no name that a new folder can take" in refused(source, Path(name))
    assert "invalid choice" in refused(source, tmp_path / "b", "--checkpoint-format", "v3")
    assert "leave out --clamp" in refused(source, tmp_path / "b", "--checkpoint-format", "gptq_v2", "--clamp")
    with pytest.raises(BridgeError, match="unknown format='v3': choose"):
        bridge.repack(source, tmp_path / "b", "v3")


@posix
@pytest.mark.parametrize("name", ["notes.md", "extra.json"])
def test_what_never_ends_is_not_copied(tmp_path, refused, name):
    source = source_of(tmp_path)
    (source / name).symlink_to("/dev/zero")
    assert f"{name}: is not a regular file" in refused(source, tmp_path / "b", "--checkpoint-format=gptq_v2")


@pytest.mark.parametrize("shape", [(256, 1), (1, 256), (2, 128), (0,), ()])
def test_a_g_idx_of_another_shape_is_refused(tmp_path, refused, shape):
    tensors = gptq_tensors(UP, quantized(), 4)
    tensors[f"{UP}.g_idx"] = np.resize(tensors[f"{UP}.g_idx"], shape)
    error = refused(write_folder(tmp_path / "a", tensors, config()), tmp_path / "b")
    assert f"{UP}: the shapes contradict each other" in error


def test_what_has_no_v1_and_v2_is_refused_without_a_format(tmp_path, refused):
    q = quantized()
    write_folder(tmp_path / "awq", awq_tensors(UP, q, 64), {"quant_method": "awq", "bits": 4, "group_size": 64})
    write_folder(tmp_path / "float", {"norm.weight": np.zeros(3, np.float16)}, None)
    write_folder(tmp_path / "planar", gptq_tensors(UP, quantized(3), 3, planar=True), config(3, "gptq_p"))
    write_folder(tmp_path / "five", gptq_tensors(UP, quantized(5), 5, planar=True), config(5, "gptq_v2"))
    tensors = legacy_tensors(UP, quantize(q.dequantize(), 4, -1, False), 4, "float-zeros")
    write_folder(tmp_path / "legacy", tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1})
    for name, said in {
        "awq": "is awq-gemm; give the --format that it is to have",
        "float": "is not quantized; `quantize` with --format does that",
        "planar": "is planar gptq_p, which stores true zero points already; --format repacks it",
        "five": "is gptq_v2; give the --format",
        "legacy": "is gptq with float zeros; give the --format",
    }.items():
        assert said in refused(tmp_path / name, tmp_path / "b")


def test_a_folder_with_the_name_of_a_gguf_is_refused(tmp_path, refused):
    assert "a checkpoint is a folder; give a name without .gguf" in refused(CHECKPOINT, tmp_path / "b.gguf")


def test_the_summary_says_what_changed_and_what_did_not(tmp_path, capsys):
    assert main(["repack", str(CHECKPOINT), str(tmp_path / "b"), "--checkpoint-format", "gptq_v2"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert "28 of 28 modules rewritten as v2: 28 from v1" in out
    assert "checkpoint_format gptq -> gptq_v2 (config.json, quantize_config.json)" in out
    assert "the rest    copied byte for byte" in out
    assert f"wrote {tmp_path / 'b'}" in out
    assert main(["repack", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    out, _ = capsys.readouterr()
    assert "0 of 28 modules rewritten as v2" in out
    assert "labels      unchanged" in out

"""Whatever is wrong with a checkpoint is said in one line: the fact, the file or tensor, the way out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.labels.detect_format import REFUSED
from bridge.errors import BridgeError
from tests.support.encode import awq_tensors, gptq_tensors, quantize, write_folder
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


def tensors(version: str | None = None) -> dict[str, np.ndarray]:
    q = quantize(np.random.default_rng(0).normal(0, 0.05, (64, 256)).astype(np.float32), 4, 64, version is None)
    return gptq_tensors(NAME, q, 4) if version is None else awq_tensors(NAME, q, 64, version)


def with_header(folder: Path, change: Any) -> Path:
    """The folder's model.safetensors with its header changed and its data as it was."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    new = json.dumps(change(header) or header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    return folder


def test_a_folder_that_is_none_and_one_without_config_or_weights(tmp_path):
    assert "no such folder" in refusal(tmp_path / "none")
    assert "config.json: not found" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "neither *.safetensors nor pytorch_model.bin" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0", "[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path, text):
    write_folder(tmp_path, tensors(), GPTQ)
    (tmp_path / "config.json").write_text(text)
    assert "not JSON" in refusal(tmp_path) or "not a JSON object" in refusal(tmp_path)


@pytest.mark.parametrize("method", ["quip", "eetq2"])
def test_an_unknown_method_is_named_beside_the_known(tmp_path, method):
    message = refusal(write_folder(tmp_path, tensors(), {**GPTQ, "quant_method": method}))
    assert repr(method) in message
    assert "aqlm, auto-round, awq, bitnet, bitsandbytes, compressed-tensors, " in message


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_a_method_that_is_known_and_not_read_is_refused_with_a_way_out(tmp_path, method):
    assert REFUSED[method] in refusal(write_folder(tmp_path, tensors(), {"quant_method": method}))


@pytest.mark.parametrize(
    ("quant", "said"),
    [
        ({**GPTQ, "checkpoint_format": "marlin"}, "has qzeros"),
        ({**GPTQ, "checkpoint_format": "bitblas"}, "bitblas"),
        ({**GPTQ, "checkpoint_format": "gptq_v9"}, "gptq_v9"),
        ({**GPTQ, "bits": "four"}, "bits is 'four'"),
        ({**GPTQ, "rotation": "hadamard"}, "hadamard"),
        ({**GPTQ, "bits": 4.5}, "bits is 4.5"),
        ({**GPTQ, "dynamic": {"+:(": 8}}, "dynamic '+:(' is 8, not a table"),
        ({**AWQ, "version": "marlin"}, "has qzeros"),
        ({**AWQ, "version": "gemm9"}, "gemm9"),
        ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "auto_round:fp8"),
        ({**GPTQ, "quant_method": "auto-round", "rotation_config": {"hadamard": 64}}, "hadamard"),
        ({**GPTQ, "quant_method": "auto-round", "extra_config": {"lm_head": 8}}, "not a table"),
    ],
)
def test_layouts_and_settings_that_cannot_be_read(tmp_path, quant, said):
    assert said in refusal(write_folder(tmp_path, tensors(), quant))


@pytest.mark.parametrize(
    ("hints", "noted"),
    [
        ({"bits": "4"}, None),
        ({"bits": 4.0, "group_size": "64"}, None),
        ({"rotation": "none"}, None),
        ({"meta": {"quantizer": 17}}, None),
        ({"rotation": "None", "rotation_config": None}, None),
        ({"dynamic": {"+:.*up_proj": {"bits": "4", "group_size": 64.0}}}, None),
        ({"dynamic": {r"-:(?|a|b)\.up": {}}}, None),  # PCRE, as GPTQModel's
        ({"dynamic": {r"-:(?<a\.up": {}}}, "dynamic has the pattern"),
        ({"dynamic": {r"+:(?:a{9999}){9999}": {"bits": 8}}}, "dynamic has the pattern"),
        ({"dynamic": {"+:a{99999999999}": {"bits": 8}}}, "dynamic has the pattern"),
        (
            {"quant_method": "auto-round", "extra_config": {"*.gate": {"bits": 16}}},
            "extra_config has the pattern '*.gate'",
        ),
        ({"quant_method": "auto-round", "extra_config": {"up_proj": {"bits": "4"}}}, None),
    ],
)
def test_hints_do_not_matter_where_the_tensors_are_clear(tmp_path, hints, noted):
    packing = {"packing_format": "auto_round:auto_gptq"} if "quant_method" in hints else {}
    with open_checkpoint(write_folder(tmp_path, tensors(), {**GPTQ, **packing, **hints})) as checkpoint:
        tensor = checkpoint.read_module(NAME)
        assert (tensor.bits, tensor.group_size, tensor.notes) == (4, 64, ())
        assert len(checkpoint.notes) == (noted is not None)
        assert noted is None or noted in checkpoint.notes[0]
        assert noted is None or "and is ignored" in checkpoint.notes[0]


def test_a_tied_head_that_an_index_lists_and_no_file_has_is_not_missed(tmp_path):
    write_folder(tmp_path, tensors(), GPTQ, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.notes == ["lm_head.weight is listed in model.safetensors.index.json, but no file holds it"]
        assert checkpoint.read_module(NAME).bits == 4


def test_marlin_words_under_an_innocent_label(tmp_path):
    message = refusal(write_folder(tmp_path, {f"{NAME}.B": np.zeros((16, 128), np.int32)}, GPTQ))
    assert "set checkpoint_format to marlin" in message
    assert f"{NAME}.B" in message


def test_a_config_without_quantized_tensors_and_tensors_without_a_config(tmp_path):
    plain = {f"{NAME}.weight": np.zeros((2, 2), np.float16)}
    assert "no tensor of the checkpoint ends in .qweight" in refusal(write_folder(tmp_path, plain, GPTQ))
    assert "no quantization_config" in refusal(write_folder(tmp_path, tensors("gemm"), None))
    packed = {f"{NAME}.weight": np.zeros((2, 2), np.uint32), f"{NAME}.scales": np.ones((2, 1), np.float16)}  # MLX's
    assert f"{NAME}.weight is quantized, but" in refusal(write_folder(tmp_path, packed, None))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("version", [None, "gemm", "gemv", "gemv_fast"])
def test_scales_that_are_no_numbers(tmp_path, value, version):
    stored = tensors(version)
    stored[f"{NAME}.scales"][1, 1] = value
    message = refusal(write_folder(tmp_path, stored, AWQ if version else GPTQ))
    assert f"1 of {stored[f'{NAME}.scales'].size} values of {NAME}.scales are NaN or infinite" in message
    assert "model.safetensors" in message


@pytest.mark.parametrize("version", [None, "gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("axis", [0, 1])
def test_shapes_that_contradict_each_other(tmp_path, version, part, axis):
    if part == "qweight" and (version, axis) in (("gemv", 1), ("gemv_fast", 1)):
        pytest.skip("padded groups leave the input features open; config.json's dimensions settle them")
    stored = tensors(version)
    stored[f"{NAME}.{part}"] = np.repeat(stored[f"{NAME}.{part}"], 3, axis)
    message = refusal(write_folder(tmp_path, stored, AWQ if version else GPTQ))
    assert NAME in message


def test_a_layer_that_lacks_a_part(tmp_path):
    stored = tensors()
    del stored[f"{NAME}.scales"]
    assert f"{NAME} has g_idx, qweight, qzeros but no scales" in refusal(write_folder(tmp_path, stored, GPTQ))


@pytest.mark.parametrize("group", [4, -5])
def test_a_g_idx_beyond_the_groups(tmp_path, group):
    stored = tensors()
    stored[f"{NAME}.g_idx"][7] = group
    assert "names a group beyond the 4" in refusal(write_folder(tmp_path, stored, GPTQ))


@pytest.mark.parametrize("shape", [(256, 1), (1, 256), (2, 128), (0,), ()])
@pytest.mark.parametrize("rows", [32, 16])
def test_a_g_idx_of_another_shape(tmp_path, shape, rows):
    stored = tensors()
    stored[f"{NAME}.qweight"] = stored[f"{NAME}.qweight"][:rows]
    stored[f"{NAME}.g_idx"] = np.resize(stored[f"{NAME}.g_idx"], shape)
    assert f"{NAME}: the shapes contradict each other" in refusal(write_folder(tmp_path, stored, GPTQ))


def test_8_bit_floats_without_a_scale_are_refused(tmp_path):
    write_folder(tmp_path, {**tensors(), "norm.weight": np.zeros(8, np.uint8)}, GPTQ)
    with_header(tmp_path, lambda h: h["norm.weight"].update(dtype="F8_E4M3"))
    assert "norm.weight is F8_E4M3 without a scale" in refusal(tmp_path)


# files


def test_a_truncated_file_at_every_length(tmp_path):
    file = write_folder(tmp_path, tensors(), GPTQ) / "model.safetensors"
    data = file.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        assert "model.safetensors" in refusal(tmp_path)


def test_a_file_cut_short_after_it_was_opened(tmp_path):
    file = write_folder(tmp_path, tensors(), GPTQ) / "model.safetensors"
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(BridgeError, match="ends within"):
            checkpoint.read_module(NAME)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"\xff" * 50, b'{"a": 1}', b"[" * 100_000, b'{"a": {"dtype": "F32", "shape": [-1]}}']
)
def test_header_garbage(tmp_path, header):
    file = write_folder(tmp_path, tensors(), GPTQ) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "the file is damaged" in refusal(tmp_path)
    file.write_bytes(b"\xff" * 8 + header)
    assert "its header does not fit" in refusal(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [-8, 8]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0]},
        {"data_offsets": "ab"},
        {"shape": [2**40, 2**40]},
        {"shape": [True, 4]},
        {"shape": None},
        {"dtype": "F64"},
    ],
)
def test_offsets_and_shapes_that_the_file_cannot_hold(tmp_path, change):
    write_folder(tmp_path, tensors(), GPTQ)
    message = refusal(with_header(tmp_path, lambda h: h[f"{NAME}.scales"].update(change)))
    assert f"{NAME}.scales" in message


def test_a_missing_shard_and_a_shard_without_what_the_index_promises(tmp_path):
    write_folder(tmp_path, tensors(), GPTQ, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "lacks extra.weight" in refusal(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "named by model.safetensors.index.json but missing" in refusal(tmp_path)
    content["weight_map"]["extra.weight"] = "a" * 5000
    index.write_text(json.dumps(content))
    assert "aaa: named by model.safetensors.index.json but missing" in refusal(tmp_path)
    index.unlink()
    assert "model-00002-of-00002.safetensors: missing, though" in refusal(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x", "C:\\x", "..\\x", ""])
def test_an_index_that_points_outside_its_folder(tmp_path, shard):
    write_folder(tmp_path / "model", tensors(), GPTQ)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "model/model.safetensors").read_bytes())
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"{NAME}.qweight": shard}}))
    assert "outside its folder" in refusal(tmp_path / "model")


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map(tmp_path, content):
    write_folder(tmp_path, tensors(), GPTQ)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "has no weight_map" in refusal(tmp_path)


def test_an_adapter_beside_the_weights_is_not_taken_for_them(tmp_path):
    write_folder(tmp_path, tensors(), GPTQ)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    with open_checkpoint(tmp_path) as alone:
        files = alone.files
    save_file({"q_proj.lora_A.weight": np.ones((2, 2), np.float32)}, tmp_path / "adapter_model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.files == files


def test_the_same_tensor_in_two_files(tmp_path):
    write_folder(tmp_path, tensors(), GPTQ)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    assert "is in both a.safetensors and b.safetensors" in refusal(tmp_path)


# .bin


def bin_folder(folder: Path, stored: dict[str, np.ndarray], shards: int = 1, **options: Any) -> Path:
    torch = pytest.importorskip("torch")
    (folder / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    state = {name: torch.from_numpy(values) for name, values in stored.items()}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **options)
        return folder
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({n: t for n, t in state.items() if weight_map[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("options", [{}, {"shards": 2}, {"_use_new_zipfile_serialization": False}])
def test_bin_files_read_as_safetensors_do(tmp_path, options):
    stored = {**tensors(), "norm.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    (tmp_path / "a").mkdir()
    bin_folder(tmp_path / "a", stored, **options)
    write_folder(tmp_path / "b", stored, GPTQ)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert np.array_equal(a.read_module(NAME).dequantize(), b.read_module(NAME).dequantize())
        assert a.read_float("norm.weight", (1, 2)).tolist() == [[3, 4, 5]]
        assert a.nbytes == b.nbytes


def test_bf16_in_a_bin_file_is_read_exactly(tmp_path):
    torch = pytest.importorskip("torch")
    bin_folder(tmp_path, tensors())
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    state["norm.weight"] = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16).T
    torch.save(state, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["norm.weight"].dtype == "BF16"
        assert checkpoint.read_float("norm.weight").tolist() == [[1.5, 0.25], [-2.0, 3.0]]


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil-was-here",))


def test_code_in_a_bin_file_is_refused_and_not_run(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    bin_folder(tmp_path, tensors())
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    assert "could run code" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert "pytorch_model.bin" in refusal(tmp_path)
    assert not (tmp_path / "evil-was-here").exists()


def test_a_damaged_bin_file(tmp_path):
    bin_folder(tmp_path, tensors())
    file = tmp_path / "pytorch_model.bin"
    data = file.read_bytes()
    for content in (b"", b"garbage", data[: len(data) // 2]):
        file.write_bytes(content)
        assert "pytorch_model.bin" in refusal(tmp_path)


def test_a_bin_file_with_any_byte_changed_is_read_or_refused(tmp_path):
    bin_folder(tmp_path, tensors())
    file = tmp_path / "pytorch_model.bin"
    data = file.read_bytes()
    start = data.index(b"data.pkl") + 8
    for at in range(start, data.index(b"PK", start), 7):
        for change in (1, 0x20, 0xFF):
            file.write_bytes(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])
            with suppress(BridgeError), open_checkpoint(tmp_path) as checkpoint:
                for name in checkpoint.tensors:
                    checkpoint.read_float(name)


@pytest.mark.parametrize("kind", ["sparse", "quantized", "in itself", "ragged", "texts"])
def test_a_bin_file_of_what_is_no_plain_tensor_is_refused(tmp_path, kind):
    torch = pytest.importorskip("torch")
    loop: dict = {}
    loop["inner"] = loop
    state = {
        "sparse": torch.eye(4).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "in itself": loop,
        "ragged": {"shape": [[1, 2], [3]]},
        "texts": {"shape": ["a", None]},
    }[kind]
    bin_folder(tmp_path, tensors())
    torch.save({"model.layers.0.mlp.up_proj": state}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(tmp_path)


def test_a_bin_file_without_torch_says_what_to_install(tmp_path, monkeypatch):
    bin_folder(tmp_path, tensors())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "a .bin file, unlike safetensors, needs torch; pip install torch" in refusal(tmp_path)


def test_opening_a_checkpoint_imports_neither_numba_nor_torch(tmp_path):
    write_folder(tmp_path, tensors(), GPTQ)
    code = (
        "import sys; from bridge.checkpoint import open_checkpoint; open_checkpoint(sys.argv[1]);"
        "sys.exit(' '.join({'numba', 'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

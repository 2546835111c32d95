"""Whatever is wrong, the command line says it in one line, exits with 2, and nothing is lost or left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.models.template.template_file import expect_texts
from tests.conftest import CHECKPOINT, PATIENCE, ROOT
from tests.support.raw import Raw, edit_raw, shard

GATE = "model.layers.2.mlp.gate_proj"
OLD = b"what was there before"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the project's checkpoint, to damage."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*arguments): the one line on standard error, from a run that changes no file in tmp_path."""

    def run(*arguments: object) -> str:
        before = contents(tmp_path)
        code = main([str(a) for a in arguments])
        out, error = capsys.readouterr()
        assert code == 2
        assert out == ""
        assert contents(tmp_path) == before
        return one_line(error)

    return run


@pytest.fixture
def convert(tmp_path: Path, refused: Callable[..., str]) -> Callable[..., str]:
    """convert(*options): `refused` for the conversion of tmp_path/model."""
    return lambda *options: refused("convert", tmp_path / "model", tmp_path / "out.gguf", *options)


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def one_line(error: str) -> str:
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
    file.write_text(json.dumps(values))


def test_an_endless_text_of_somebodys_file_is_cut_in_the_middle(model, convert, capsys):
    """The fact before it and the way out behind it stay."""
    edit_json(model / "config.json", hidden_act="x" * 10_000)
    error = convert()
    assert len(error) < 1100
    assert f"{model / 'config.json'}: hidden_act is 'xxx" in error
    assert "can be converted\n" in error[-100:]
    assert main(["inspect", str(model)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 1000


# the checkpoint's files


def test_a_missing_shard_is_named(model, convert):
    shard(model)[1].unlink()
    assert "model-00002-of-00002.safetensors" in convert()
    (model / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00002.safetensors: missing" in convert()


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_the_unquantized_models_index_is_passed_over_where_one_file_holds_all(model, tmp_path, name):
    shutil.copyfile(model / "model.safetensors", tmp_path / "whole")
    for file in shard(model):
        file.unlink()
    shutil.move(tmp_path / "whole", model / name)
    assert bridge.convert(model, tmp_path / "out.gguf").tensors


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(model, convert, keep):
    file = model / "model.safetensors"
    os.truncate(file, int(keep * file.stat().st_size))
    assert str(file) in convert()


@pytest.mark.parametrize("place", ["../x.safetensors", "{0}/x.safetensors", "a/../../x.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(model, convert, tmp_path, place):
    shutil.copy(model / "model.safetensors", tmp_path / "x.safetensors")
    index = {"weight_map": {f"{GATE}.qweight": place.format(tmp_path)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    error = convert()
    assert "model.safetensors.index.json" in error
    assert "outside its folder" in error


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("layout", ["torch", "pickle"])
def test_code_in_a_bin_file_is_not_run(model, convert, tmp_path, layout):
    (model / "model.safetensors").unlink()
    marker = tmp_path / "code-was-run"
    file = model / "pytorch_model.bin"
    if layout == "torch":
        import torch

        torch.save({"a": Evil(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(marker)))
    assert "pytorch_model.bin" in convert()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(model, convert, name):
    (model / name).unlink()
    if name == "model.safetensors":
        name = "*.safetensors"
    assert name in convert()


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "quantize_config.json"]
)
@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_a_file_that_is_not_json_is_named(model, convert, name, text):
    (model / name).write_text(text)
    assert str(model / name) in convert()


FROM_THE_MODEL = [
    "config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "model.safetensors.index.json",
]  # fmt: skip


@pytest.mark.parametrize("name", [*FROM_THE_MODEL, "model.safetensors"])
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_never_ends_is_not_read(model, convert, name, what):
    file = model / name
    file.unlink(missing_ok=True)
    os.mkfifo(file) if what == "pipe" else file.symlink_to("/dev/zero")
    assert f"{file}: is not a regular file" in convert()


@pytest.mark.parametrize("name", FROM_THE_MODEL)
def test_json_that_is_far_too_large_is_not_read_whole(model, convert, name, monkeypatch):
    monkeypatch.setattr("bridge.system.files.MAX_SMALL", 1_000_000)
    (model / name).write_bytes(b" " * 1_000_001)
    assert f"{model / name}: has more than 1 MB" in convert()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 2728\n"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("config.json", None),
        ("quantize_config.json", None),
        ("tokenizer.json", None),
        ("tokenizer.model", "tokenizer.json"),
        ("model.safetensors", None),
        ("pytorch_model.bin", "model.safetensors"),
    ],
)
def test_a_clone_without_git_lfs_is_told_how_to_get_the_files(model, convert, name, other):
    if other:
        (model / other).unlink()
    (model / name).write_text(POINTER)
    assert f"{model / name}: is a Git LFS pointer, not the file itself; run `git lfs pull`" in convert()


def test_a_byte_order_mark_before_json_does_no_harm(model, tmp_path):
    for name in ("config.json", "quantize_config.json", "tokenizer.json"):
        (model / name).write_text((model / name).read_text(), encoding="utf-8-sig")
    assert main(["convert", str(model), str(tmp_path / "out.gguf")]) == 0


def change_tokenizer(model: Path, changes: dict[str, Any]) -> None:
    """Set keys of tokenizer.json's model."""
    data = json.loads((model / "tokenizer.json").read_text())
    data["model"] |= changes
    (model / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize("vocab", [None, {}, [], {"a": "one"}])
def test_a_vocabulary_that_is_none(model, convert, vocab):
    change_tokenizer(model, {"vocab": vocab})
    assert "tokenizer.json" in convert()


@pytest.mark.parametrize("changes", [{"added_tokens_decoder": ["a"]}, {"added_tokens_decoder": {"0": "a"}}])
def test_settings_of_a_tokenizer_that_are_not_as_they_should_be(model, convert, changes):
    edit_json(model / "tokenizer_config.json", **changes)
    assert "tokenizer_config.json or a file beside them is not as" in convert()


def test_a_tokenizer_that_is_too_small_for_the_embedding_is_reported(model, tmp_path, capsys):
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    change_tokenizer(model, {"vocab": {token: i for token, i in vocab.items() if i < 1000}})
    assert main(["convert", str(model), str(tmp_path / "out.gguf")]) == 0
    assert "tokens for an embedding of 2048 rows; is it this model's?" in capsys.readouterr().out


# what the tensors hold


def set_shape(name: str, shape: list[int]) -> Callable[[Raw], None]:
    """A change of the header alone: as many elements, in another shape."""
    return lambda tensors: tensors[name][0].update(shape=shape)


@pytest.mark.parametrize(
    ("part", "shape"), [("scales", [1, 1536]), ("scales", [4, 384]), ("qzeros", [4, 48]), ("qweight", [16, 1536])]
)
def test_shapes_within_a_module_that_contradict_each_other(model, convert, part, shape):
    edit_raw(model / "model.safetensors", set_shape(f"{GATE}.{part}", shape))
    error = convert()
    assert "model.safetensors" in error
    assert GATE in error


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"hidden_size": 128}, "model.layers.0.self_attn.q_proj"),
        ({"hidden_size": 512}, "model.embed_tokens.weight"),
        ({"vocab_size": 1000}, "model.embed_tokens.weight"),
        ({"vocab_size": 4096}, "model.embed_tokens.weight"),
        ({"intermediate_size": 512}, "model.layers.0.mlp.down_proj"),
        ({"intermediate_size": 1024}, "model.layers.0.mlp.gate_proj"),
        ({"num_attention_heads": 8}, "model.layers.0.self_attn.q_proj"),
        ({"num_key_value_heads": 1}, "model.layers.0.self_attn.k_proj"),
        ({"head_dim": 32}, "model.layers.0.self_attn"),
        ({"num_hidden_layers": 3}, "model.layers.3."),
        ({"num_hidden_layers": 5}, "model.layers.4."),
    ],
)
def test_a_config_that_contradicts_the_weights(model, convert, changes, tensor):
    edit_json(model / "config.json", **changes)
    assert tensor in convert()


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "model.layers.4."),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, but the longest side of any tensor is 2048 (model.embed"),
        ({"num_attention_heads": 2**31 - 2}, "num_attention_heads times head_dim is 137438953344, but"),
        ({"num_attention_heads": 2**30, "architectures": ["LlamaForCausalLM"]}, "num_attention_heads times head_dim"),
        ({"head_dim": 2**31 - 2, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}}, "times head_dim is"),
        (MIXTURE | {"num_experts": 2**31 - 1}, "num_experts is 2147483647, but"),
        (MIXTURE | {"num_local_experts": 2**31 - 1}, "num_local_experts is 2147483647, but"),
        (MIXTURE | {"moe_intermediate_size": 2**31 - 1}, "moe_intermediate_size is 2147483647, but"),
        (MIXTURE | {"num_experts": 2048}, "model.layers.0.mlp.gate.weight"),
    ],
)
def test_counts_far_beyond_the_tensors_cost_neither_time_nor_memory(model, tmp_path, changes, said):
    edit_json(model / "config.json", **changes)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
    limit += "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\nrun()"
    with bridge_process(limit, "convert", model, tmp_path / "out.gguf") as process:
        try:
            _, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 2
    assert said in one_line(error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_no_numbers(model, convert, value):
    def spoil(tensors: Raw) -> None:
        entry, data = tensors[f"{GATE}.scales"]
        tensors[f"{GATE}.scales"] = entry, np.float16(value).tobytes() + data[2:]

    edit_raw(model / "model.safetensors", spoil)
    error = convert()
    assert "model.safetensors" in error
    assert f"{GATE}.scales" in error
    assert "NaN or infinite" in error


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
def test_floats_that_are_no_numbers(model, convert, name):
    def spoil(tensors: Raw) -> None:
        entry, data = tensors[name]
        tensors[name] = entry, b"\xc0\x7f" + data[2:]  # NaN in bf16

    edit_raw(model / "model.safetensors", spoil)
    assert f"model.safetensors: {name} holds NaN or infinite values" in convert()


def test_values_that_no_block_type_reaches_are_said_to_be_lost(model, tmp_path, capsys):
    def scale(tensors: Raw) -> None:
        entry, data = tensors[f"{GATE}.scales"]
        tiny = np.frombuffer(data, np.float16).astype(np.float32) * np.float32(1e-6)
        tensors[f"{GATE}.scales"] = entry | {"dtype": "F32"}, tiny.tobytes()

    edit_raw(model / "model.safetensors", scale)
    command = ["convert", str(model), str(tmp_path / "out.gguf")]
    assert main(command) == 0
    assert "note: blk.2.ffn_gate.weight: is far off (NMSE " in capsys.readouterr().out
    assert main([*command, "--force", "--tensor-type", "blk.2.ffn_gate=BF16"]) == 0
    assert "far off" not in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out.gguf"), str(model)]) == 0


def test_a_tensor_that_is_not_there(model, convert):
    edit_raw(model / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    assert "model.layers.1.input_layernorm.weight" in convert()


@pytest.mark.parametrize("prefix", ["language_model.", "base_model.model."])
def test_tensors_of_a_larger_model_are_named(model, convert, prefix):
    def rename(tensors: Raw) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    edit_raw(model / "model.safetensors", rename)
    assert f"which has {prefix}model.embed_tokens.weight" in convert()


# what the config says


def test_an_unknown_method_and_the_known_ones_are_named(model, convert):
    for name in ("config.json", "quantize_config.json"):
        edit_json(model / name, quantization_config={"quant_method": "magic", "bits": 4}, quant_method="magic")
    error = convert()
    assert "'magic'" in error
    assert "gptq" in error
    assert "awq" in error


def test_an_unknown_architecture_and_the_known_ones_are_named(model, convert):
    edit_json(model / "config.json", architectures=["GPT9ForCausalLM"])
    error = convert()
    assert "GPT9ForCausalLM" in error
    assert "--template model-f16.gguf" in error
    assert "qwen3" in error
    assert "llama" in error


@pytest.mark.parametrize(
    "changes",
    [{"architectures": a} for a in (17, [17], [{}], {"a": 1}, True)] + [{"model_type": {}}, {"model_type": 17}],
)
def test_an_architecture_that_is_no_name(model, convert, changes):
    edit_json(model / "config.json", **({"architectures": None} | changes))
    assert "names are expected; take the config.json of the original model" in convert()


def test_a_pre_tokenizer_that_is_not_recognised_asks_for_pre(model, convert, tmp_path, capsys):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[aeiou]+|[^aeiou]+"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "--pre" in convert()
    assert main(["inspect", str(model)]) == 0
    assert "convert would stop: " in capsys.readouterr().out
    assert main(["convert", str(model), str(tmp_path / "out.gguf"), "--pre", "qwen2"]) == 0


# what the user says


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--type", "Q9_K"], "'Q9_K'; known: auto, exact, Q2_K"),
        (["--type", "F16"], "'F16'"),
        (["--exact", "--type", "Q4_K"], "give one"),
        (["--output-type", "Q4_K_M"], "'Q4_K_M'"),
        (["--actorder-type", "F16"], "F16"),
        (["--tensor-type", "ffn_down"], "REGEX=TYPE"),
        (["--tensor-type", "(=Q4_K"], "not a regular expression"),
        (["--tensor-type", "ffn_down=Q9"], "'Q9'"),
        (["--tensor-type", "ffn_dwon=Q6_K"], "matches no tensor"),
        (["--threads", "0"], "'0'"),
        (["--split-max-size", "much"], "'much' is not a size such as 4G"),
        (["--report", "no/such/folder.json"], "no such folder"),
        (["--imatrix", "nowhere.gguf"], "nowhere.gguf"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_options_that_make_no_sense(model, convert, options, said):
    assert said in convert(*options)


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": -1}, {"split_max_size": 0}])
def test_numbers_below_one_are_refused(model, tmp_path, options):
    with pytest.raises(BridgeError, match=r"(threads|split_max_size) -?\d: at least 1 is needed"):
        bridge.convert(model, tmp_path / "out.gguf", **options)


def test_a_command_that_is_none(refused):
    assert "--help" in refused("transmogrify")
    assert "checkpoint" in refused("convert")


def imatrix(path: Path, columns: dict[str, int], kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "x")
    writer.add_type(kind)
    for name, n in columns.items():
        writer.add_tensor(f"{name}.in_sum2", np.ones((1, n), np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_imatrix_of_another_model_or_none_at_all(model, convert, tmp_path):
    other = imatrix(tmp_path / "other.gguf", {"blk.0.attn_qkv.weight": 256})
    assert "another" in convert("--imatrix", other)
    wider = imatrix(tmp_path / "wider.gguf", {"token_embd.weight": 512})
    assert "token_embd.weight: the imatrix has 512 columns, the tensor 256" in convert("--imatrix", wider)
    no_imatrix = imatrix(tmp_path / "model.gguf", {"token_embd.weight": 256}, kind="model")
    assert "model.gguf" in convert("--imatrix", no_imatrix)
    assert "config.json" in convert("--imatrix", model / "config.json")


def test_a_checkpoint_that_is_a_file_or_not_there(model, refused, tmp_path):
    out = tmp_path / "out.gguf"
    assert "is a file" in refused("convert", model / "model.safetensors", out)
    assert "no such folder" in refused("convert", tmp_path / "nowhere", out)
    assert "give the folder" in refused("inspect", model / "model.safetensors")
    assert "no such file" in refused("inspect", "some/model.gguf")
    (tmp_path / "have.gguf").write_bytes(b"GGUF")
    assert "is a GGUF already" in refused("convert", tmp_path / "have.gguf", out)
    (model / "model.safetensors").rename(model / "model.gguf")
    assert "model.gguf, which is a GGUF already" in refused("convert", model, out)
    (model / "config.json").rename(model / "adapter_config.json")
    assert "is an adapter (LoRA)" in refused("convert", model, out)


def test_a_gguf_that_is_none_or_cut_short(model, refused, tmp_path):
    assert "no such file" in refused("verify", tmp_path / "nowhere.gguf", model)
    assert "is a folder" in refused("verify", model, tmp_path / "nowhere.gguf")
    assert "config.json: not found" in refused("run", tmp_path, "-p", "x")  # a folder is a checkpoint
    assert "neither a GGUF file nor a type (Q2_K" in refused("bench", "Q9_K")
    whole = tmp_path / "whole.gguf"
    bridge.convert(model, whole)
    size = whole.stat().st_size
    for length in (0, 3, 30, 2000, size // 2, size - 1000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole.read_bytes()[:length])
        fact = "cut.gguf: not a GGUF file" if length < 24 else "cut.gguf: damaged or truncated"
        assert fact in refused("verify", cut, model)
        assert fact in refused("inspect", cut)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_header_that_claims_more_than_the_file_holds_takes_no_memory(model, refused, tmp_path, command):
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(1000))
    tracemalloc.start()
    try:
        error = refused(command, hostile, *[model] * (command == "verify"))
        assert f"{1 << 60} tensors and 1 keys do not fit in 1024 bytes" in error
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("inspect",)])
def test_the_name_of_a_gguf_that_was_split_leads_to_its_shards(model, refused, tmp_path, command):
    bridge.convert(model, tmp_path / "out.gguf", split_max_size=1_000_000)
    error = refused(command[0], tmp_path / "out.gguf", *command[1:])
    assert "out.gguf: no such file; it was split: give " in error
    assert "out-00001-of-0000" in error


def test_a_gguf_of_another_model(model, refused, tmp_path):
    gguf_file = tmp_path / "model.gguf"
    bridge.convert(model, gguf_file)
    edit_raw(model / "model.safetensors", lambda tensors: [tensors.pop(n) for n in list(tensors) if ".3." in n])
    edit_json(model / "config.json", num_hidden_layers=3)
    assert "model.gguf: blk.3." in refused("verify", gguf_file, model)


def test_a_template_of_more_blocks_than_tensors(model, convert, tmp_path):
    bridge.convert(model, tmp_path / "template.gguf")
    data = (tmp_path / "template.gguf").read_bytes()
    count = b"qwen3.block_count" + struct.pack("<II", gguf.GGUFValueType.UINT32, 4)
    assert data.count(count) == 1
    (tmp_path / "template.gguf").write_bytes(data.replace(count, count[:-4] + b"\xff" * 4))
    error = convert("--template", tmp_path / "template.gguf")
    assert "has 4294967295 blocks and 46 tensors; make the template again" in error


@pytest.mark.parametrize("tokens", [17, "abc", [1, 2], ["a", 2], [["a"]]])
def test_a_template_whose_tokens_are_no_texts(tokens):
    with pytest.raises(BridgeError, match="tokens is no list of texts; make the template again"):
        expect_texts(tokens)


# the output


def test_an_output_that_exists_is_kept_without_force(model, convert, tmp_path):
    (tmp_path / "out.gguf").write_bytes(OLD)
    assert "out.gguf: exists; --force" in convert()
    assert main(["convert", str(model), str(tmp_path / "out.gguf"), "--force"]) == 0
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


def test_a_modelfile_or_a_shard_that_exists_is_kept_without_force(model, convert, tmp_path):
    (tmp_path / "Modelfile").write_bytes(OLD)
    assert "Modelfile: exists; --force" in convert("--modelfile")
    (tmp_path / "out-00001-of-00009.gguf").write_bytes(OLD)
    assert "out-00001-of-00009.gguf: exists; --force" in convert("--split-max-size", "1M")


def test_an_output_folder_that_is_missing_and_an_output_that_is_a_folder(model, refused, tmp_path):
    assert "no such folder" in refused("convert", model, tmp_path / "none" / "out.gguf")
    assert "is a folder" in refused("convert", model, tmp_path)


def bridge_process(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Python that runs `code`, which may call `run()`: the command line with these arguments."""
    start = (
        "import resource, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "from bridge.cli import main\n"
        "run = lambda: sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("limit", "options", "exists"),
    [(20_000, [], True), (1_000_000, [], False), (300_000, ["--split-max-size=500K"], True)],
)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(model, tmp_path, limit, options, exists):
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "out.gguf"
    bridge.convert(model, out)  # so that no kernel is compiled, whose cache is a file too
    out.write_bytes(OLD) if exists else out.unlink()
    before = contents(tmp_path)
    code = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nrun()"
    _, error = (process := bridge_process(code, "convert", model, out, "--force", *options)).communicate()
    assert process.returncode == 2
    assert "out.gguf: writing " in one_line(error)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"model", *(["out.gguf"] if exists else [])})


SLOWLY = """
import importlib
conversion = importlib.import_module("bridge.conversion.executor").Executor
make = conversion.make
conversion.make = lambda self, tensor: (time.sleep(0.3), make(self, tensor))[1]
run()
"""


@pytest.mark.parametrize(("sent", "exists"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, True)])
def test_an_interrupt_leaves_what_was_there_and_nothing_else(model, tmp_path, sent, exists):
    out = tmp_path / "out.gguf"
    if exists:
        out.write_bytes(OLD)
    before = contents(tmp_path)
    process = bridge_process(SLOWLY, "convert", model, out, "--force", "--threads=1")
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob(".out.gguf.*/out.gguf")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(sent)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "interrupted" in one_line(error)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"model", *(["out.gguf"] if exists else [])})


@pytest.mark.parametrize("split", [None, 500_000])
def test_a_progress_callback_may_stop_the_conversion(model, tmp_path, split):
    def stop(done: int, total: int, _name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    (tmp_path / "out.gguf").write_bytes(OLD)
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bridge.convert(model, tmp_path / "out.gguf", force=True, split_max_size=split, progress=stop)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


# --debug and the unforeseen


def test_debug_shows_where_an_error_comes_from(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), "--debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: ")


def test_a_mistake_of_our_own_is_one_line_too(model, refused, monkeypatch):
    monkeypatch.setattr("bridge.cli.inspect.describe", lambda *_: 1 // 0)
    assert "unexpected ZeroDivisionError" in refused("inspect", model)


# the Hub


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_hub_id_without_a_network_is_one_clear_line_at_once(tmp_path, how, command):
    process = bridge_process("run()", command, "org/no-such-model", HF_HOME=str(tmp_path), **how)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "org/no-such-model: no such folder here, and the Hub cannot be reached" in one_line(error)

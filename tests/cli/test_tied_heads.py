"""An output head that the config ties to the embeddings: it is kept where its values differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from tests.conftest import CHECKPOINT, shared
from tests.support.command_line import types
from tests.support.encode import gptq_tensors, quantize
from tests.support.encode_formats import mlx_tensors
from tests.support.raw import edit_raw, read_raw


def tied_to(
    folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], **quantization: Any
) -> Path:
    """The checkpoint, whose config ties the head to the embeddings, with its tensors changed; another config's."""
    shutil.copytree(CHECKPOINT, folder)
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        store = checkpoint.store
        tensors = {n: (store.read_float if info.floating else store.read)(n) for n, info in store.tensors.items()}
    tensors = change(tensors)
    save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    if quantization:
        (folder / "quantize_config.json").unlink()
        config |= {"quantization_config": quantization, "quantization": quantization}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_head_unlike_the_embeddings_is_kept_though_the_config_ties_them(run, tmp_path, auto):
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    entry, data = read_raw(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": (entry, data)}))
    run("convert", folder, tmp_path / "out.gguf")
    assert types(tmp_path / "out.gguf") == types(auto)
    other = data[: -len(data) // 8] + bytes(len(data) // 8)  # the last rows alone
    edit_raw(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": (entry, other)}))
    table = run("convert", folder, tmp_path / "out.gguf", "--force")
    assert table.count("config.json ties lm_head to the embeddings, but it is stored with other values") == 1
    assert types(tmp_path / "out.gguf") == types(auto) | {"output.weight": "Q8_0"}
    assert "OK: every tensor" in run("verify", tmp_path / "out.gguf", folder)


def test_a_head_of_codes_is_compared_with_the_embeddings_by_its_values(run, tmp_path, auto):
    name = "model.embed_tokens.weight"
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        head = quantize(checkpoint.read_float(name), 4, 128, sym=True)
    codes = gptq_tensors("lm_head", head, 4)
    other = tied_to(tmp_path / "other", lambda tensors: tensors | codes)
    assert "lm_head to the embeddings, but it is stored with other values" in run("convert", other, tmp_path / "o.gguf")
    assert types(tmp_path / "o.gguf") == types(auto) | {"output.weight": "Q4_K"}
    assert "OK: every tensor" in run("verify", tmp_path / "o.gguf", other)
    same = tied_to(tmp_path / "same", lambda tensors: tensors | codes | {name: head.dequantize()})
    run("convert", same, tmp_path / "s.gguf")
    assert types(tmp_path / "s.gguf") == types(auto)


def test_a_head_of_floats_is_compared_with_quantized_embeddings(run, tmp_path):
    """As mlx-lm writes it: every matrix is quantized, the head alone left out."""

    def quantized(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {n: v for n, v in tensors.items() if n.endswith("norm.weight")}
        with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
            weights = {name: checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
        for name, weight in (weights | {"model.embed_tokens": tensors["model.embed_tokens.weight"]}).items():
            made |= mlx_tensors(name, weight, 4, 64)[0]
        return made

    settings = {"bits": 4, "group_size": 64}
    with bridge.open_checkpoint(tied_to(tmp_path / "tied", quantized, **settings)) as checkpoint:
        embeddings = checkpoint.read_module("model.embed_tokens").dequantize()
    for head, type_ in ((embeddings, None), (embeddings * np.float32(1.25), "Q8_0")):
        folder, path = tmp_path / str(type_), tmp_path / f"{type_}.gguf"
        tied_to(folder, lambda tensors, head=head: quantized(tensors) | {"lm_head.weight": head}, **settings)
        run("convert", folder, path)
        assert types(path)["token_embd.weight"] == "Q4_K"
        assert types(path).get("output.weight") == type_
        assert "OK: every tensor" in run("verify", path, folder)


def test_a_real_checkpoint_keeps_its_quantized_head_whatever_the_config_ties(run, tmp_path):
    folder = Path(shutil.copytree(shared("more/llama-gptq-4bit-lmhead"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "it is stored with other values; it is kept" in run("convert", folder, tmp_path / "m.gguf")
    assert types(tmp_path / "m.gguf")["output.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("label", "differs"),
    [
        ({"lm_head": True}, True),
        ({"lm_head": False}, False),
        ({"dynamic": {"+:lm_head": {"bits": 4}}}, True),
        ({"dynamic": {"-:lm_head": {}}}, False),
        ({"dynamic": {"lm_head": {"bits": 16}}}, False),
        ({"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 8}}}, True),
    ],
)
def test_inspect_sees_that_a_head_which_the_label_says_is_quantized_is_not(label, differs, run, tmp_path):
    def with_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}

    folder = tied_to(tmp_path / "model", with_head)
    config = folder / "quantize_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | label))
    out = run("inspect", folder)
    line = "they differ     lm_head: labelled as quantized, but stored as F32"
    assert (line in out.splitlines(), "they agree" in out) == (differs, not differs)

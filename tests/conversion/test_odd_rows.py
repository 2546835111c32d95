"""Layers whose rows no block type divides into: codes become floats, and the rest is as ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.conversion.writing.verify import failures, verify
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.support.described import describe
from tests.support.encode import Quantized, write_gptq

WIDTH = 744  # 23.25 blocks of 32


@pytest.fixture(scope="module")
def checkpoint(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Quantized]]:
    """A model whose feed-forward networks are 744 wide, as GPTQ, and what was stored."""
    folder = tmp_path_factory.mktemp("odd")
    shutil.copytree(small_model, folder / "float")
    weights = load_file(folder / "float" / "model.safetensors")
    for name, w in weights.items():
        if ".mlp." in name:
            weights[name] = np.ascontiguousarray(w[:, :WIDTH] if "down" in name else w[:WIDTH])
    save_file(weights, folder / "float" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "float" / "config.json").read_text())
    (folder / "float" / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDTH}))
    return folder / "gptq", write_gptq(folder / "gptq", folder / "float")


@pytest.mark.parametrize(("kind", "down", "up"), [("auto", "F16", "Q4_K"), ("exact", "F32", "Q4_0")])
def test_codes_in_rows_that_no_block_divides_become_floats(checkpoint, tmp_path, kind, down, up):
    folder, stored = checkpoint
    path = tmp_path / "model.gguf"
    report = bridge.convert(folder, path, type=kind)
    types = {t.kind: t.type for t in report.tensors}
    assert (types["ffn_down"], types["ffn_up"]) == (down, up)
    assert failures(verify(path, folder)) == []
    made = gguf_weights(path)
    for name, q in stored.items():
        if "down_proj" in name:
            weights = q.dequantize()
            assert np.array_equal(made[f"{name}.weight"], weights if kind == "exact" else weights.astype(np.float16))
    with LlamaCpp(path, n_ctx=64) as loaded:
        assert len(loaded.generate_greedy([5, 6, 7, 8], 4)) == 4


def test_inspect_foretells_it(checkpoint):
    row = next(line for line in describe(checkpoint[0]).splitlines() if line.startswith("ffn_down"))
    assert row.split()[-3:] == ["F16", "as", "floats"]

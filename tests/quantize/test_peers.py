"""Checkpoints that we write, as GPTQModel and transformers load them.

GPTQModel pins releases of torch that others do not, so it may live in a Python of its own, which
BRIDGE_GPTQMODEL_PYTHON names. The tests skip where it is not installed at all.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint import GroupedTensor, open_checkpoint
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.write.writer import write_checkpoint
from scripts.peers import reference
from tests.support import checkpoint_logits
from tests.support.encode import quantize
from tests.support.tiny_models import save_model

PYTHON = os.environ.get("BRIDGE_GPTQMODEL_PYTHON") or (
    sys.executable if importlib.util.find_spec("gptqmodel") else None
)
needs_gptqmodel = pytest.mark.skipif(
    PYTHON is None, reason="gptqmodel is not installed; BRIDGE_GPTQMODEL_PYTHON may name a Python that has it"
)


@needs_gptqmodel
@pytest.mark.parametrize("loader", ["gptqmodel", "transformers"])
@pytest.mark.parametrize(
    ("format", "bits", "size", "sym", "act_order"),
    [("gptq", 4, 64, False, False), ("gptq_v2", 3, 64, False, True), ("awq", 4, 64, False, False)],
)
def test_others_load_what_we_write_and_give_the_logits_of_our_readers_weights(
    tmp_path: Path, format: str, bits: int, size: int, sym: bool, act_order: bool, loader: str
) -> None:
    model = save_model(tmp_path / "model", "LlamaConfig", vocab_size=512, architectures=["LlamaForCausalLM"])
    tensors, floats = {}, reference.float_weights(model)
    for key in reference.linears(floats):
        q = quantize(floats[key], bits, size, sym, act_order)
        zeros = np.maximum(q.zeros, 1).astype(np.float32)
        order = q.group.astype(np.int32) if act_order else None
        name = key.removesuffix(".weight")
        tensors[name] = GroupedTensor(name, bits, q.codes, q.scales.astype(np.float32), zeros, size, order)
    with open_checkpoint(model) as ckpt:
        layers = dict.fromkeys(tensors, Groups(bits, size))
        write_checkpoint(ckpt, tmp_path / "out", format, layers, tensors.values(), shard_size=1_000_000)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 32))
    np.save(tmp_path / "tokens.npy", tokens)
    files = [str(tmp_path / name) for name in ("out", "tokens.npy", "logits.npy")]
    command = [str(PYTHON), checkpoint_logits.__file__, *files, "--loader", loader]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with open_checkpoint(tmp_path / "out") as ckpt:
        expected = reference.logits(reference.hf_model(model, reference.checkpoint_weights(ckpt)), tokens)
    found = np.load(tmp_path / "logits.npy")
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()  # half precision

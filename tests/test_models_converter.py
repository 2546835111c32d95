"""Small models of the families, against what llama.cpp's own converter makes of them (tests/data/converter).

A golden has config.json, the checkpoint's names and shapes, and of the converter's GGUF the keys and every tensor with
its shape and a checksum. `tests.support.make_families` wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from tests.support.family_models import copy_tokenizer
from tests.support.make_families import GOLDENS, checksum, plain, values_of

# what llama.cpp takes for granted where it is not said, or never reads
MORE = {
    "vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "attention.sliding_window", "rope.scaling.attn_factor", "attention.head_count_kv",
    "expert_gating_func", "leading_dense_block_count", "expert_weights_scale", "expert_weights_norm",
    "rope.scaling.original_context_length",
}  # fmt: skip


def write_checkpoint(golden: dict, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    weights = {name: values_of(name, tuple(shape)) for name, shape in golden["checkpoint"].items()}
    save_file(weights, folder / "model.safetensors")
    return copy_tokenizer(folder)


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDENS.glob("*.json")))
def test_a_familys_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    bridge.convert(write_checkpoint(golden, tmp_path / name), tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    arch = reader.fields["general.architecture"].contents()
    assert arch == golden["arch"]
    keys = {key: plain(field.contents()) for key, field in reader.fields.items()}
    assert {key: keys.get(key) for key in golden["keys"]} == golden["keys"]
    own = {key.removeprefix(f"{arch}.") for key in keys if key.startswith(f"{arch}.")}
    assert own - {key.removeprefix(f"{arch}.") for key in golden["keys"]} <= MORE
    tensors = {t.name: [[int(n) for n in reversed(t.shape) if n > 1], checksum(_floats(t))] for t in reader.tensors}
    assert tensors == {name: [[n for n in shape if n > 1], sum_] for name, (shape, sum_) in golden["tensors"].items()}


def _floats(tensor: gguf.ReaderTensor) -> np.ndarray:
    return np.asarray(tensor.data, np.float32).reshape(-1)

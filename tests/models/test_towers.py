"""Vision towers, against what `convert_hf_to_gguf.py --mmproj` of llama.cpp makes of them (tests/data/towers).

A golden has config.json, the checkpoint's names and shapes, and of the converter's files in F16 and Q8_0 the keys and
every tensor with its shape, type and a checksum of its bytes. `tests.support.make_towers` wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from tests.support.make_families import plain, values_of
from tests.support.make_towers import GOLDENS, add_processor, digest, digest_of

NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
BREAK = "v.token_embd.img_break"  # llama.cpp's loader demands it, its converter leaves it out


def golden_of(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDENS / f"{name}.json").read_text()))


def write_checkpoint(golden: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    save_file({n: values_of(n, tuple(s)) for n, s in golden["checkpoint"].items()}, folder / "model.safetensors")
    return add_processor(folder)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Keys and tensors of a GGUF, as in a golden."""
    reader = gguf.GGUFReader(path)
    keys = {key: plain(field.contents()) for key, field in reader.fields.items()}
    own = ("general.architecture", "general.type", "general.file_type")
    tensors = {t.name: [[int(n) for n in reversed(t.shape)], t.tensor_type.name, digest(t)] for t in reader.tensors}
    return {key: value for key, value in keys.items() if key.startswith("clip.") or key in own}, tensors


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_a_towers_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, type: str, tmp_path: Path) -> None:
    golden = golden_of(name)
    report = bridge.convert(write_checkpoint(golden, tmp_path / name), tmp_path / "m.gguf", mmproj_type=type)
    assert report.outputs == [tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"]
    keys, tensors = contents(report.outputs[1])
    assert keys == golden[f"{type} keys"]
    if (end := tensors.pop(BREAK, None)) is not None:
        table = values_of("language_model.model.embed_tokens.weight", (2048, 32))
        assert end[2] == digest_of(table[2047])
    rounded = {t.name: t for t in gguf.GGUFReader(report.outputs[1]).tensors if t.tensor_type.name == "Q8_0"}
    expected = {
        name: [*entry[:2], tensors[name][2] if name in rounded else entry[2]]
        for name, entry in golden[f"{type} tensors"].items()
    }
    assert tensors == expected
    if rounded:  # the converter's own rounding is simpler
        bridge.convert(tmp_path / name, tmp_path / "f.gguf", mmproj_type="F32")
        floats = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "mmproj-f.gguf").tensors}
        simple = gguf.GGMLQuantizationType.Q8_0
        for key, t in rounded.items():
            theirs = gguf.quants.dequantize(gguf.quants.quantize(floats[key], simple), simple)
            ours = gguf.quants.dequantize(t.data, simple)
            assert np.square(ours - floats[key]).sum() <= np.square(theirs - floats[key]).sum()

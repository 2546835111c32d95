"""Writes tests/data/converter: what llama.cpp's own converter makes of small models of the families.

    python -m tests.support.make_families LLAMA_CPP [NAME ...]

LLAMA_CPP is a checkout of llama.cpp with its conversion/ and gguf-py/. Weights are `values_of` each tensor's name, so
that a golden needs their checksums alone. Of families that go by a template the whole F16 GGUF is kept, of weights
that compress (`coarse_values_of`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.family_models import MODELS, PUBLISHED_AS, TEMPLATES, copy_tokenizer, new_model

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests/data/converter"
_LARGEST = 2.0**62  # a checksum of integers
# under names of transformers that the converter does not know; with transformers 5 it takes each Nemotron-H for a MoE
UNKNOWN = {"bitnet", "nemotron-h"}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of small multiples of 1/64, other ones for each name: sums with small numbers are exact."""
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 + zlib.crc32(name.encode())
    return ((numbers % 251 - 125) / 64).astype(np.float32).reshape(shape)


def coarse_values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of few values, as good as random: bits that are set in a byte of a hash; around one for norms."""
    data = np.frombuffer(hashlib.shake_128(name.encode()).digest(int(np.prod(shape))), np.uint8)
    values = (np.bitwise_count(data).astype(np.float32) - 4) / 8
    return (1 + values / 2 if len(shape) == 1 and name.endswith("weight") else values).reshape(shape)


def checksum(values: np.ndarray) -> int:
    """Of values rounded to 1/1024: exponentials differ in their last bits between libraries."""
    whole = np.round(values.astype(np.float64) * 1024)
    return zlib.crc32(np.clip(whole, -_LARGEST, _LARGEST).astype("<i8").tobytes())


def save_checkpoint(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """A checkpoint of a family's names and shapes with made-up values; returns the shapes."""
    new_model(name).save_pretrained(folder, save_original_format=True)
    text = (folder / "config.json").read_text()
    for own, published in PUBLISHED_AS.get(name, {}).items():
        text = text.replace(own, published)
    (folder / "config.json").write_text(text)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for key, shape in shapes.items():
        if name == "qwen3-vl-moe" and ".mlp.experts." in key:  # so it is published; transformers keeps it otherwise
            shapes[key] = (shape[0], shape[2], shape[1])
    made = coarse_values_of if name in TEMPLATES else values_of
    save_file({key: made(key, shape) for key, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    copy_tokenizer(folder, 320 if name in TEMPLATES else None)
    return shapes


def plain(value: Any) -> Any:
    """A key's value; of a long list its checksum."""
    if isinstance(value, list) and len(value) > 64:
        return {"items": len(value), "checksum": zlib.crc32(json.dumps(value).encode())}
    return round(value, 7) if isinstance(value, float) else value


def main(llama_cpp: Path, names: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
    GOLDENS.mkdir(exist_ok=True)
    for name in names or (MODELS | TEMPLATES).keys() - UNKNOWN:
        with tempfile.TemporaryDirectory() as where, torch.inference_mode():
            folder, out = Path(where) / "model", Path(where) / "out.gguf"
            shapes = save_checkpoint(name, folder)
            kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
            kind.no_mtp = True  # layers that predict further tokens at once
            kind.set_vocab = TextModel._set_vocab_gpt2  # what the tokenizer is, whatever the family usually has
            floats = gguf.LlamaFileType.MOSTLY_F16 if name in TEMPLATES else gguf.LlamaFileType.ALL_F32
            kind(folder, floats, out).write()
            if name in TEMPLATES:
                (GOLDENS / f"{name}.gguf.xz").write_bytes(lzma.compress(out.read_bytes()))
                continue
            reader = gguf.GGUFReader(out)
            arch = reader.fields["general.architecture"].contents()
            own = (f"{arch}.", "tokenizer.", "xielu.")
            keys = {k: plain(f.contents()) for k, f in reader.fields.items() if k.startswith(own)}
            del keys["tokenizer.ggml.pre"]
            tensors = {
                t.name: [[int(n) for n in reversed(t.shape)], checksum(np.array(t.data).reshape(-1))]
                for t in reader.tensors
            }
            config = json.loads((folder / "config.json").read_text())
        golden = {"config": config, "checkpoint": shapes, "arch": arch, "keys": keys, "tensors": tensors}
        text = ",\n".join(f'"{part}": {_lines(value)}' for part, value in golden.items())
        (GOLDENS / f"{name}.json").write_text("{\n" + text + "\n}\n")
        print(name, arch, len(tensors))


def _lines(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

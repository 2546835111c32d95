"""GGUF files as llama.cpp's converter makes them from a float model: names by gguf's map, rows as its graphs want."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from bridge.models.config.model_config import Config
from bridge.models.config.rope import interleaved_rows
from bridge.models.tokenizer.gguf_tokenizer import read_tokenizer
from tests.support.encode import load_floats

Change = Callable[[str, np.ndarray], Mapping[str, np.ndarray]]  # GGUF name and values -> what is stored
TOKENS = np.random.default_rng(1).integers(0, 320, 48).tolist()
FLOAT32 = [(".*", "F32")]
LLAMA = {
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__dimension_count": 64,
    "rope__freq_base": 10000.0,
    "vocab_size": 320,
}


def write_template(
    path: Path,
    folder: Path,
    arch: str,
    change: Change = lambda name, values: {name: values},
    dtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    split: int = 0,
    **keys: Any,
) -> Path:
    """Matrices in `dtype`, everything else in F32; `keys`: what the architecture's graph needs besides the usual.

    split  bytes in a shard
    """
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    writer = gguf.GGUFWriter(path, arch, split_max_size=split)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("The template's own name")
    writer.add_context_length(256)
    writer.add_embedding_length(config.get("hidden_size") or config["n_embd"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.get("n_inner") or config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key.replace('__', '.')}", value)
        else:
            writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    generation = folder / "generation_config.json"
    read_tokenizer(
        Config(config, folder / "config.json"), folder, json.loads(generation.read_text()), None
    ).add_metadata(writer)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(2)
    for name, values in template_tensors(folder, arch, layers, change).items():
        kind = dtype if values.ndim > 1 and "ffn_gate_inp" not in name else gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def template_tensors(folder: Path, arch: str, layers: int, change: Change) -> dict[str, np.ndarray]:
    """GGUF name -> float32, experts stacked, `change` applied to each."""
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, layers)
    whole: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for source, values in load_floats(folder).items():
        name = names.get_name(re.sub(r"experts\.\d+", "experts", source), try_suffixes=(".weight", ".bias"))
        assert name is not None, source
        if number := re.search(r"experts\.(\d+)", source):
            experts.setdefault(name, {})[int(number[1])] = values
        else:
            whole[name] = values.reshape(-1) if "gate_inp_shexp" in name else values
    whole |= {name: np.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}
    made: dict[str, np.ndarray] = {}
    for name, values in whole.items():
        made |= {new: np.ascontiguousarray(v, np.float32) for new, v in change(name, values).items()}
    return made


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values_of(path: Path, name: str) -> np.ndarray:
    tensor = tensors(path)[name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def interleave(heads: int, kv_heads: int) -> Callable[[str, np.ndarray], dict[str, np.ndarray]]:
    """What the converter does to q and k of a llama."""

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        for part, n in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if part in name:
                return {name: values[interleaved_rows(n, len(values) // n)]}
        return {name: values}

    return change


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """A copy of a float model with its tensors changed."""
    shutil.copytree(source, folder)
    made = {name: np.ascontiguousarray(v, np.float32) for name, v in change(load_floats(source)).items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def phi3(floats: Path, path: Path) -> Path:
    return write_template(path, floats, "phi3", **{k: v for k, v in LLAMA.items() if k != "vocab_size"})


def gemma(floats: Path, path: Path) -> Path:
    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values + 1 if "norm" in name else values}

    sizes = {"attention__key_length": 64, "attention__value_length": 64}
    return write_template(path, floats, "gemma", change, attention__layer_norm_rms_epsilon=1e-6, **sizes)

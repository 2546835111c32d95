"""GGUF files as llama.cpp's converter makes them of a float model: names by gguf's map, rows as its graphs want."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.models.gguf_tokenizer import read_tokenizer
from bridge.models.model_config import Config
from tests.support.encode import load_floats

Change = Callable[[str, np.ndarray], Mapping[str, np.ndarray]]  # GGUF name and values -> what is stored


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

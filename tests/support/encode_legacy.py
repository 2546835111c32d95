"""Checkpoints as the first GPTQ tools saved them, in plain numpy: tensors without a config, as .pt or safetensors.

The dialects, by the tool that wrote them:

    quant3       IST-DASLab/gptq: 3 bits, float zeros [out, 1], a bias always
    float-zeros  GPTQ-for-LLaMa until March 2023: the same at 2, 3, 4 and 8 bits
    float-groups GPTQ-for-LLaMa, float zeros [G, out]
    qzeros       GPTQ-for-LLaMa afterwards: z - 1 packed as integers
    g_idx        the same with the group of each column
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.encode import LINEAR, Quantized, pack_stream, pack_zeros_autogptq, quantize

DIALECTS = ("quant3", "float-zeros", "float-groups", "qzeros", "g_idx")


def legacy_tensors(name: str, q: Quantized, bits: int, dialect: str) -> dict[str, np.ndarray]:
    """A module's tensors in one of DIALECTS."""
    out = len(q.codes)
    tensors = {f"{name}.qweight": np.ascontiguousarray(pack_stream(q.codes, bits).T)}
    tensors[f"{name}.bias"] = np.zeros(out, np.float32)
    scales = q.scales.astype(np.float32)
    if dialect in ("quant3", "float-zeros", "float-groups"):
        products = scales * q.zeros.astype(np.float32)
        if dialect == "float-groups":
            scales, products = scales.T, products.T
        else:
            assert scales.shape == (out, 1), "one group a row"
        return tensors | {f"{name}.scales": scales.copy(), f"{name}.zeros": products.copy()}
    tensors[f"{name}.scales"] = scales.T.copy()
    zeros = q.zeros.T
    tensors[f"{name}.qzeros"] = pack_stream((zeros - 1) & 7, 3) if bits == 3 else pack_zeros_autogptq(zeros, bits)
    if dialect == "g_idx":
        tensors[f"{name}.g_idx"] = q.group.astype(np.int32)
    return tensors


def save_pt(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A state dict in a .pt file."""
    import torch

    torch.save({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}, file)
    return file


def write_legacy(
    file: Path, weights: dict[str, np.ndarray], dialect: str, bits: int, group_size: int = -1, sym: bool = False
) -> dict[str, Quantized]:
    """A model's float weights quantized and saved as one file, .pt or .safetensors; what was stored, by module."""
    stored: dict[str, Quantized] = {}
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not LINEAR.match(module):
            tensors[name] = weight.astype(np.float16)
            continue
        q = stored[module] = quantize(weight, bits, group_size, sym, desc_act=dialect == "g_idx")
        if dialect in ("qzeros", "g_idx"):  # the tool could not store a zero point of 0
            q.zeros[:] = np.maximum(q.zeros, 1)
        tensors |= legacy_tensors(module, q, bits, dialect)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)  # saved by transformers then
    if file.suffix == ".pt":
        save_pt(file, tensors)
    else:
        save_file(tensors, file)
    return stored


def config_folder(folder: Path, model_folder: Path) -> Path:
    """The model's config and tokenizer, without its weights and without a word on quantization."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(model_folder / name, folder / name)
    config = json.loads((model_folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Small models of any architecture that transformers knows: random weights, this project's own tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.conftest import CHECKPOINT
from tests.support.encode import Quantized, halves, load_floats

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def save_model(
    folder: Path,
    config_class: str,
    *,
    original_format: bool = True,
    seed: int = 7,
    without: Collection[str] = (),
    auto: str = "AutoModelForCausalLM",
    **fields: Any,
) -> Path:
    """A folder with config.json, weights and tokenizer of a random model.

    original_format  tensors as published checkpoints name them; else as transformers holds them in memory
    without          fields of SHAPE that the config has other names for
    auto             the class of transformers that makes the model
    """
    torch.manual_seed(seed)
    shape = {key: value for key, value in SHAPE.items() if key not in without}
    config = getattr(transformers, config_class)(**(shape | fields))
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_((1.0 if "norm" in name or ".ln_" in name else 0.0) + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            if name.endswith("gate.weight"):
                parameter.mul_(4)  # a router that is sure of its choice: no near-ties for rounding to decide
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder, save_original_format=original_format)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, folder / file)
    return folder


def dequantized(folder: Path, model_folder: Path, stored: dict[str, Quantized]) -> Path:
    """The float model of `model_folder` with what a quantized checkpoint of it holds, float32."""
    shutil.copytree(model_folder, folder)
    weights: dict[str, np.ndarray] = {name: halves(values) for name, values in load_floats(folder).items()}
    weights |= {f"{name}.weight": q.dequantize() for name, q in stored.items()}
    save_file(
        {n: np.asarray(w, w.dtype if w.dtype.kind == "i" else np.float32, order="C") for n, w in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


def predict(folder: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]: the logits of transformers."""
    images = "text_config" in json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()

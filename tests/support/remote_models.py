"""Models that transformers lacks, saved with their repositories' names: another family of the same arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Weights = dict[str, np.ndarray]


def _minicpm(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Of Granite, whose scores are scaled by heads."""
    layers, rules = config["num_hidden_layers"], config.pop("rope_parameters")
    del config["attention_multiplier"]
    config |= {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm",
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * layers**0.5,
        "dim_model_base": int(config["hidden_size"] / config.pop("logits_scaling")),
        "rope_theta": rules.pop("rope_theta"), "rope_scaling": None if rules["rope_type"] == "default" else rules,
    }  # fmt: skip
    return config, weights


REMOTE: dict[str, Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]] = {
    "minicpm": _minicpm,
    "minicpm4": _minicpm,
}


def save_remote(name: str, model: Any, folder: Path) -> None:
    """The checkpoint of a model in its repository's form."""
    type(model).save_pretrained(model, folder, save_original_format=True)
    config = json.loads((folder / "config.json").read_text())
    config, weights = REMOTE[name](config, load_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {key: np.ascontiguousarray(values) for key, values in weights.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})

"""PEFT adapters written by hand, and what they make of a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], r: int = 4, **config: Any) -> Path:
    """An adapter folder of these tensors, named without "base_model.model."."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": r, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    named = {f"base_model.model.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def low_rank(shapes: Mapping[str, tuple[int, int]], r: int = 4, seed: int = 0) -> Arrays:
    """lora_A and lora_B of modules of these shapes."""
    rng = np.random.default_rng(seed)
    found = {}
    for module, (out, columns) in shapes.items():
        found[f"{module}.lora_A.weight"] = (rng.normal(size=(r, columns)) / columns**0.5).astype(np.float32)
        found[f"{module}.lora_B.weight"] = (0.3 * rng.normal(size=(out, r))).astype(np.float32)
    return found


def of_stacks(
    stacks: Mapping[str, tuple[int, int, int]], r: int = 4, transposed: bool = False, seed: int = 0
) -> tuple[Arrays, Arrays]:
    """lora_A and lora_B of the stacks of a module, in the order in which the model has them, and the products.

    PEFT wraps the module once for each, the first innermost; `transposed`: whether the model says that they are.
    """
    rng = np.random.default_rng(seed)
    tensors, products = {}, {}
    for depth, (name, (experts, first, second)) in enumerate(reversed(stacks.items())):
        columns, out = (first, second) if transposed else (second, first)
        a = (rng.normal(size=(experts * r, columns)) / columns**0.5).astype(np.float32)
        b = (0.3 * rng.normal(size=(out, r * experts))).astype(np.float32)
        wrapper = name.rpartition(".")[0] + depth * ".base_layer"
        tensors |= {f"{wrapper}.lora_A.weight": a, f"{wrapper}.lora_B.weight": b}
        each = a.reshape(experts, r, columns), b.reshape(out, r, experts)
        products[name] = np.einsum("eri,ore->eio" if transposed else "eri,ore->eoi", *each)
    return tensors, products


def merged(weights: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], scale: float) -> Arrays:
    """The weights with W + scale * B A, in float64."""
    found = dict(weights)
    for name, b in tensors.items():
        if name.endswith(".lora_B.weight"):
            module = name.removesuffix(".lora_B.weight")
            delta = scale * (b.astype(np.float64) @ tensors[f"{module}.lora_A.weight"].astype(np.float64))
            found[f"{module}.weight"] = (found[f"{module}.weight"] + delta).astype(np.float32)
    return found

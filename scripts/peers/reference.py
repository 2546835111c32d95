"""A checkpoint as float weights, and float weights run in `transformers`, to measure fidelity.

The measure is the mean Kullback-Leibler divergence per token between two models that share code, config and float32
arithmetic and differ only in their weights.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from bridge.quantize.text.texts import bos_of

Weights = Mapping[str, np.ndarray]  # Hugging Face tensor name -> float32


def checkpoint_weights(checkpoint: Any) -> dict[str, np.ndarray]:
    """Every tensor of an opened checkpoint, the quantized ones dequantized, by its Hugging Face name."""
    weights = {f"{name}.weight": checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
    return weights | {name: checkpoint.read_float(name) for name in checkpoint.tensors}


def float_weights(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of an unquantized model's safetensors, as float32."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights.update({name: tensors.get_tensor(name).float().numpy() for name in tensors.keys()})  # noqa: SIM118
    return weights


def linears(weights: Iterable[str]) -> list[str]:
    """The names of the decoder's linear layers, which GPTQ and AWQ quantize."""
    return [name for name in weights if name.endswith("_proj.weight")]


def hf_model(folder: Path, weights: Weights) -> torch.nn.Module:
    """The model of `folder`'s config.json in float32, with these weights and no others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config", None)
    if "lm_head.weight" in weights:
        fields["tie_word_embeddings"] = False  # a head that is tied as floats may have codes of its own
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: torch.from_numpy(np.ascontiguousarray(values, np.float32)) for name, values in weights.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()


def windows(tokenizer: Any, text: str, n: int = 24, length: int = 256) -> np.ndarray:
    """int64 [n, length]: the first n windows of `length` tokens of a text, with BOS if the tokenizer adds it."""
    bos = bos_of(tokenizer)
    piece = text[: n * length * 8]  # enough for any text of under 8 characters a token
    ids = [bos] * (bos is not None) + tokenizer(piece, add_special_tokens=False)["input_ids"]
    if len(ids) < n * length:
        raise ValueError(f"{len(piece)} characters of the text have {len(ids)} tokens, {n * length} wanted")
    token_windows = np.array(ids[: n * length], np.int64).reshape(n, length)
    if bos is not None:
        token_windows[:, 0] = bos
    return token_windows


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """float32 [windows, length, vocab]: after each position, each window from an empty context."""
    return torch.stack([model(torch.from_numpy(window[None])).logits[0] for window in tokens]).numpy()


@torch.no_grad()
def mean_squares(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Weight name -> float32 [in]: the mean square of the inputs of each of the decoder's linears.

    tokens  int64 [sequences, length]
    """
    sums: dict[str, torch.Tensor] = {}

    def note(key: str) -> Any:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            sums[key] = sums.get(key, 0) + inputs[0].double().square().sum((0, 1))

        return hook

    modules = {key: model.get_submodule(key.removesuffix(".weight")) for key in linears(dict(model.named_parameters()))}
    hooks = [module.register_forward_pre_hook(note(key)) for key, module in modules.items()]
    for sequence in torch.from_numpy(tokens):
        model.base_model(sequence[None])
    for hook in hooks:
        hook.remove()
    return {key: (total / tokens.size).float().numpy() for key, total in sums.items()}

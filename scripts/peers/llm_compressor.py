"""GPTQ and AWQ by llm-compressor, a peer to quantizing from floats; runs in any Python that has it:

    PYTHON scripts/peers/llm_compressor.py MODEL tokens.npy out.safetensors --method gptq --bits 4 --group-size 128

tokens.npy holds int64 [sequences, length], all used for calibration. out.safetensors gets the model's tensors
in float32, the linears of the decoder as their codes dequantize. The settings are the library's own defaults, and the
model runs in float32.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    options = parse()
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    if not torch.accelerator.is_available():  # AWQ pins its inputs' memory for a transfer that never happens
        torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    tokens = np.load(options.tokens)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in tokens]
    calibration = {"num_calibration_samples": len(rows), "max_seq_length": tokens.shape[1], "batch_size": 16}
    calibration |= {"shuffle_calibration_samples": False, "pipeline": "sequential"}
    oneshot(model=model, dataset=Dataset.from_list(rows), recipe=recipe(options), **calibration)
    state = {name: values for name, values in model.state_dict().items() if "weight_" not in name}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            state[f"{name}.weight"] = dequantized(module, scheme.weights)
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({n: v.detach().float().contiguous() for n, v in state.items()}, options.out)


def recipe(options: argparse.Namespace) -> list[Any]:
    """The library's modifiers for the decoder's linears."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = {"num_bits": options.bits, "type": "int", "symmetric": not options.asym}
    weights |= {"strategy": "group", "group_size": options.group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if options.method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def dequantized(module: Any, scheme: Any) -> Any:
    """The module's weights as its scales and zero points round them."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    return fake_quantize(module.weight, module.weight_scale, getattr(module, "weight_zero_point", None), scheme)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ("model", "tokens", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--method", choices=("gptq", "awq"), default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

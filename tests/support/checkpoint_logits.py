"""The logits of a quantized checkpoint as GPTQModel or transformers loads it; runs in any Python that has them:

    PYTHON tests/support/checkpoint_logits.py CHECKPOINT tokens.npy logits.npy --loader gptqmodel

tokens.npy holds int64 [windows, length]; logits.npy gets float32 [windows, length, vocab].
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    options = parse()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is worth compiling for a few windows
    import torch

    torch.set_num_threads(options.threads)
    model = load(options.checkpoint, options.loader)
    tokens = torch.from_numpy(np.load(options.tokens))
    with torch.no_grad():
        logits = torch.cat([model(input_ids=window[None]).logits.float() for window in tokens])
    np.save(options.out, logits.numpy())
    kinds = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "qweight")})
    print(f"linears are {', '.join(kinds)}; {next(model.parameters()).dtype}")


def load(folder: Path, loader: str) -> Any:
    """The model on the CPU, with the package's plain PyTorch kernels."""
    import torch

    awq = '"awq"' in (folder / "config.json").read_text(encoding="utf-8")
    if loader == "transformers":
        from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

        # only the kernel is taken from this: the checkpoint's own config wins
        kernel = AwqConfig(backend="torch_awq") if awq else GPTQConfig(bits=4, backend="torch")
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float16, device_map="cpu", quantization_config=kernel
        ).eval()
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    return GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16).model.eval()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loader", choices=("gptqmodel", "transformers"), default="gptqmodel")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

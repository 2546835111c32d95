"""A GGUF by auto-round's export, a peer to quantizing from floats; runs in any Python that has it:

    PYTHON scripts/peers/auto_round_gguf.py MODEL tokens.npy out.gguf --type Q4_K

tokens.npy holds int64 [sequences, length], all used for calibration. The types are those of the preset Q4_K_S
(Q2_K_S, ...): in a small model, attn_v gets Q5_K. All other settings are the library's own defaults, and the model runs
in float32.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    options = parse()
    import torch
    from auto_round import AutoRound
    from auto_round.export.export_to_gguf.llama_cpp_conversion import ConversionContext
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    class_of = ConversionContext.get_model_class

    def get_model_class(*args: Any, **kwargs: Any) -> Any:
        """auto-round knows tokenizers by their hashes, which lack that of a small model's own."""
        found = class_of(*args, **kwargs)
        found.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
        return found

    ConversionContext.get_model_class = get_model_class
    tokens = torch.from_numpy(np.load(options.tokens))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    preset = options.type if options.type == "Q6_K" else f"{options.type}_S"
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(options.model),
        scheme=f"GGUF:{preset}",
        dataset=[row[None] for row in tokens],
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        device_map="cpu",
        **({} if options.iterations is None else {"iters": options.iterations}),
    )
    with tempfile.TemporaryDirectory() as folder:
        quantizer.quantize_and_save(folder, format=f"gguf:{preset.lower()}")
        [made] = Path(folder).rglob("*.gguf")
        shutil.move(made, options.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ("model", "tokens", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--iterations", type=int, help="of tuning; default: the library's")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Compare the speed of families in this runtime with llama.cpp; print a markdown table.

    python -m scripts.speed.bench_families                       all of the shapes below
    python -m scripts.speed.bench_families lfm2 gemma4 --turns 5
    python -m scripts.speed.bench_families lfm2 --draft    replies with guessed tokens, compared with those without

Each model has the layers of a published one, fewer of them, with random weights in Q4_K (Q8_0 and MXFP4 where a row is
no multiple of 256); mixtures whose layers are large have fewer experts. The peer is that of bench_model.py. Ours and
theirs take turns, one process per turn with one thread, and the times are those that the processor spent on it, so that
other load on the machine matters little. Every process reads 256 tokens from an empty context, and generates 64 one by
one after 8, with our weights all repacked. The table shows the medians of the turns, and the median ratio of a turn of
ours to the following turn of theirs.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from scripts.benchlib import ROOT, Lines, bench, head, option, ratio
from scripts.benchlib.drafts import drafts
from scripts.benchlib.speeds import Plan, beside
from scripts.peers.llama import tuned

TEXT: dict[str, Any] = {
    "vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
# family -> the published model, its class of configuration in transformers, and its fields
SHAPES: dict[str, dict[str, Any]] = json.loads((ROOT / "scripts" / "benchlib" / "families.json").read_text())
OPTIONS = (
    "--turns", "--packages", option("--draft", False, help="measure guessed tokens (ngram), as bench_model.py does"),
    option("families", str, "FAMILY", f"of {', '.join(SHAPES)}; default: all", nargs="*"),
)  # fmt: skip
_KEPT = ("per_layer_model_proj", "attn_k_b", "attn_v_b", "ffn_gate_inp")  # floats in published files
_DRAWN = 512  # rows of a matrix; the others repeat them


def measure(options: argparse.Namespace) -> Lines:
    plan = Plan(prompts=(256,))
    if not options.draft:
        yield head("layers of", "what", "gguf-bridge", "llama.cpp", "ratio")
    for family in options.families or SHAPES:
        name = SHAPES[family]["model"]
        with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
            path = model_file(family, Path(scratch))
            if options.draft:
                yield f"\nLayers of {name}:"
                yield from drafts(path, "ngram", None, [1], options.turns)
                continue
            ours, theirs = beside(path, tuned.download(options.packages), 1, options.turns, plan).values()
        for what, key in (("decode", "decode 8 cpu"), ("prompt", "prompt 256 cpu")):
            medians = [f"{statistics.median(side[key]):.1f} tokens/s" for side in (ours, theirs)]
            yield name, what, *medians, f"{ratio(ours[key], theirs[key]):.2f}"


def model_file(family: str, scratch: Path) -> Path:
    """A GGUF in the shape of a family's published model."""
    import torch
    import transformers

    import bridge
    from scripts.peers.gguf_file import rewrite

    shape = SHAPES[family]
    config = getattr(transformers, shape["config"])(**TEXT | shape["fields"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.numel() < 1 << 20:
                parameter.normal_(1 if parameter.ndim == 1 else 0, 0.1)
            else:
                parameter.zero_()  # memory that nobody wrote may hold numbers that are none
    config.architectures = [type(model).__name__]
    model.save_pretrained(scratch / "model", save_original_format=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "tests/data/qwen3-gptq-4bit-g128-sym" / file, scratch / "model" / file)
    bridge.convert(scratch / "model", scratch / "floats.gguf", tensor_types=[(".*", "F16")])
    shutil.rmtree(scratch / "model")
    rewrite(scratch / "floats.gguf", scratch / "blocks.gguf", _type, _random)
    (scratch / "floats.gguf").unlink()
    return scratch / "blocks.gguf"


def _type(tensor: gguf.ReaderTensor) -> str:
    now = str(tensor.tensor_type.name)
    columns = int(tensor.shape[0])
    if now != "F16" or any(part in tensor.name for part in _KEPT) or columns % 32:
        return now
    if columns % 256:
        return "MXFP4" if "_exps" in tensor.name else "Q8_0"
    return "Q6_K" if tensor.name == "output.weight" else "Q4_K"


def _random(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
    """Weights whose products are as large as what they multiply: a state of tiny numbers would be slow."""
    from bridge.blocks.read import READ
    from bridge.encode.rounding.round_rows import quantize_rows
    from bridge.runtime.bench import random_tensor

    columns, *rows = (int(n) for n in tensor.shape)
    count = int(np.prod(rows))
    if READ[type].scales:
        return random_tensor(type, count, columns).raw
    drawn = np.random.default_rng(0).normal(0, columns**-0.5, (min(count, _DRAWN), columns)).astype(np.float32)
    data = quantize_rows(drawn, READ[type]).data
    return np.resize(data, (count, data.shape[1])).reshape(-1)


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

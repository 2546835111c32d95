"""Quantize a synthetic model of a real one's shapes: peak memory, against what `quantize` said before it began.

    python -m scripts.speed.bench_memory WORK_DIR --shape qwen3-8b --layers 2 --memory 12G

The model has random weights in bfloat16, few blocks, embeddings and head; WORK_DIR takes its files (3.3 GB for
qwen3-8b with two blocks), and the output beside them. What it is calibrated on are random tokens, so only memory and
time mean anything. Options after -- are given to `quantize`; what it says is in WORK_DIR/quantize.log.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from scripts.benchlib import Lines, bench, cost_of, option
from scripts.make_synthetic import layer_shapes, llama_config, write_json, write_tokenizer

# hidden, intermediate, heads, heads of keys, vocabulary
SHAPES = {
    "tiny": (256, 512, 4, 2, 600),
    "small": (1024, 2816, 16, 8, 32000),
    "qwen3-8b": (4096, 12288, 32, 8, 151936),
    "llama-70b": (8192, 28672, 64, 8, 128256),
}
_PLAN = re.compile(r"needs ([\d.]+) ([MG]B)")


OPTIONS = (
    option("work", Path, "WORK_DIR"), option("--shape", "small", choices=SHAPES), option("--layers", 2, "N", "blocks"),
    option("--tokens", 16384, "N"), option("--memory", metavar="SIZE", help="given to `quantize`"),
)  # fmt: skip
COLUMNS = "shape", "blocks", "tokens", "said, GB", "peak, GB", "peak / said", "seconds"


def measure(options: argparse.Namespace) -> Lines:
    model = options.work / f"{options.shape}-{options.layers}"
    if not (model / "config.json").exists():
        make(model, options.shape, options.layers)
    tokens = options.work / "tokens.npy"
    rng = np.random.default_rng(0)
    np.save(tokens, rng.integers(0, SHAPES[options.shape][-1] - 2, options.tokens, np.int64))
    out = options.work / f"{options.shape}.gguf"
    command = [sys.executable, "-m", "bridge.cli", "quantize", model, out, "--force", "--calibrate", tokens]
    command += [*options.rest, *(["--memory", options.memory] if options.memory else [])]
    log = options.work / "quantize.log"
    cost = cost_of(command, log)
    if cost["code"]:
        sys.exit(f"{' '.join(map(str, command))} failed; see {log}")
    peak, estimates = cost["peak_bytes"] / 1e9, _PLAN.findall(log.read_text(encoding="utf-8"))
    estimate = float(estimates[-1][0]) * (1 if estimates[-1][1] == "GB" else 1e-3) if estimates else 0.0
    ratio = f"{peak / estimate:.2f}" if estimate else ""
    cells = f"{estimate:.2f}", f"{peak:.2f}", ratio, f"{cost['seconds']:.0f}"
    yield options.shape, options.layers, options.tokens, *cells


def make(folder: Path, shape: str, layers: int) -> None:
    """Write the model's files."""
    hidden, _, _, _, vocabulary = SHAPES[shape]
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        for start in range(0, rows, 1024):
            values[start : start + 1024] = torch.randn(min(1024, rows - start), columns, generator=generator) * 0.02
        return values

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    for i in range(layers):
        block = f"model.layers.{i}"
        modules = layer_shapes(*SHAPES[shape][:-1])
        tensors = {f"{block}.{name}.weight": random(*size) for name, size in modules.items()}
        tensors |= {f"{block}.{name}_layernorm.weight": ones(hidden) for name in ("input", "post_attention")}
        write(f"model-{i}.safetensors", tensors)
    for name in ("model.embed_tokens", "lm_head"):
        write(f"{name}.safetensors", {f"{name}.weight": random(vocabulary, hidden)})
    write("norm.safetensors", {"model.norm.weight": ones(hidden)})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_tokenizer(folder, vocabulary)
    config = llama_config(*SHAPES[shape][:-1], layers, vocabulary)
    write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS, passes_on=True)

"""Quantize a synthetic model of a real one's shapes: peak memory, against what `quantize` said before it began.

    python -m scripts.speed.bench_memory WORK_DIR --shape qwen3-8b --layers 2 --memory 12G

The model has random weights in bfloat16, few blocks, embeddings and head; WORK_DIR takes its files (3.3 GB for
qwen3-8b with two blocks), and the output beside them. What it is calibrated on are random tokens, so only memory and
time mean anything. Options after -- are given to `quantize`.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from scripts.benchlib import ROOT, Lines, bench, option
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
    option("work", Path, "WORK_DIR"),
    option("--shape", "small", choices=SHAPES),
    option("--layers", 2, "N", "blocks"),
    option("--tokens", 16384, "N"),
    option("--memory", metavar="SIZE", help="given to `quantize`"),
)
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
    estimate, peak, seconds = measured([str(part) for part in command])
    ratio = f"{peak / estimate:.2f}" if estimate else ""
    yield options.shape, options.layers, options.tokens, f"{estimate:.2f}", f"{peak:.2f}", ratio, f"{seconds:.0f}"


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

    for i in range(layers):
        block = f"model.layers.{i}"
        modules = layer_shapes(*SHAPES[shape][:-1])
        tensors = {f"{block}.{name}.weight": random(*size) for name, size in modules.items()}
        tensors |= {f"{block}.{name}_layernorm.weight": ones(hidden) for name in ("input", "post_attention")}
        save_file(tensors, folder / f"model-{i}.safetensors", {"format": "pt"})
    for name in ("model.embed_tokens", "lm_head"):
        save_file({f"{name}.weight": random(vocabulary, hidden)}, folder / f"{name}.safetensors", {"format": "pt"})
    save_file({"model.norm.weight": ones(hidden)}, folder / "norm.safetensors", {"format": "pt"})
    write_index(folder)
    write_tokenizer(folder, vocabulary)
    config = llama_config(*SHAPES[shape][:-1], layers, vocabulary)
    write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})


def write_index(folder: Path) -> None:
    """The index of all files."""
    from safetensors import safe_open

    index: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            index |= dict.fromkeys(stored.keys(), file.name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def measured(command: list[str]) -> tuple[float, float, float]:
    """Run it: the GB that it said before it began (0 if it did not), its peak in GB, and seconds."""
    begun = time.perf_counter()
    estimate = 0.0
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for text in process.stderr:
            print(text, end="", file=sys.stderr)
            if match := _PLAN.search(text):
                estimate = float(match[1]) * (1 if match[2] == "GB" else 1e-3)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return estimate, used.ru_maxrss * 1024 / 1e9, time.perf_counter() - begun


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS, passes_on=True)

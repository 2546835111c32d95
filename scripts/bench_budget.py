"""Measure size budgets beside llama.cpp's presets and files of one type, and print a markdown table.

    python scripts/bench_budget.py MODEL --calibrate wiki.txt --test test.txt

For each preset: llama.cpp's file of that name (its mixture of types, each tensor by ggml's own quantizer with the
imatrix of the same tokens, embeddings and head without, as llama.cpp has it), ours of one type for embeddings and
layers, the head Q6_K, and of the same size, and ours of a size budget of that many bytes. No type has just that size:
what a file of one type would measure is interpolated between the two neighbouring types, the logarithm of KL against
size.

What is measured is the mean Kullback-Leibler divergence from the float model over windows of the test text, of all
the weights in the file, float32 arithmetic. Files are kept in --folder, and not made again if they are there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_convert import ROOT, machine
from bench_quantize import imatrix

sys.path.insert(0, str(ROOT))

from bridge.blocks import BLOCKS
from bridge.conversion.converter import convert, plan_checkpoint
from bridge.conversion.gguf_writer import file_bytes
from bridge.conversion.options import Budget
from bridge.quantize.settings import Calibration
from bridge.runtime.cpu import dequantize
from scripts.peers import ggml, reference
from scripts.peers.gguf_file import gguf_weights

UNIFORM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class Bench:
    """A model, its texts, and the folder of the files."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.options, self.folder, self.model = options, folder, options.model
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        calibration, self.test = (
            reference.windows(tokenizer, path.read_text(encoding="utf-8"), count, options.length)
            for path, count in ((options.calibrate, options.samples), (options.test, options.windows))
        )
        self.weights = reference.float_weights(self.model)
        self.expected = reference.logits(reference.hf_model(self.model, self.weights), self.test)
        self.importance = imatrix(self.model, self.weights, calibration)
        self.settings = Calibration(options.calibrate, options.samples, options.length)

    def divergence(self, weights: reference.Weights) -> float:
        model = reference.hf_model(self.model, weights)
        return reference.mean_kl(self.expected, reference.logits(model, self.test))

    def preset(self, name: str) -> tuple[int, float]:
        """Size and KL divergence of llama.cpp's file."""
        plan = plan_checkpoint(self.model, type=name)
        weights = dict(self.weights)
        for t in plan.tensors:
            if t.type in BLOCKS:
                key = str(t.source)
                blocks = ggml.quantize(self.weights[key], t.type, self.importance.get(key))
                weights[key] = dequantize.rows(t.type, blocks)
        return file_bytes(plan), self.divergence(weights)

    def made(self, name: str, **options: Any) -> tuple[int, float, str]:
        """Size, KL divergence, and the seconds that making one of our files took."""
        path = self.folder / f"{self.model.name}-{name}.gguf"
        seconds = ""
        if not path.exists():
            begun = time.perf_counter()
            report = convert(self.model, path, calibrate=self.settings, **options)
            seconds = f"{time.perf_counter() - begun:.0f}"
            print(*(note for note in report.notes if note.startswith("size budget")), sep="\n", file=sys.stderr)
        return path.stat().st_size, self.divergence(gguf_weights(path)), seconds


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
        bench = Bench(options, options.folder or Path(scratch))
        tokens = options.samples * options.length
        print(f"Machine: {machine()}, {options.threads} threads. {options.model.name}, {tokens} tokens of "
              f"{options.calibrate.name}, {options.windows} windows of {options.test.name}.\n")  # fmt: skip
        presets = {name: bench.preset(name) for name in options.presets}
        budgets = {
            name: bench.made(f"{size}", budget=Budget(size, swaps=options.swaps)) for name, (size, _) in presets.items()
        }
        print("| all but the head in | bytes | KL | seconds |\n|---|---|---|---|")
        uniform: list[tuple[int, float]] = []
        for type in UNIFORM:
            if uniform and uniform[-1][0] > max(size for size, _ in presets.values()):
                break
            types = {"tensor_types": [(r"^(blk|token_embd)\b", type)], "output_type": "Q6_K"}
            size, loss, seconds = bench.made(f"all-{type}", **types)
            uniform.append((size, loss))
            print(f"| {type} | {size} | {loss:.3e} | {seconds} |", flush=True)
        print("\n| bytes of | bytes | llama.cpp | one type, interpolated | size budget | bytes left "
              "| beside llama.cpp | beside one type | seconds |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        for name, (size, theirs) in presets.items():
            alike = interpolated(uniform, size)
            own_size, own, seconds = budgets[name]
            print(f"| {name} | {size} | {theirs:.3e} | {alike:.3e} | {own:.3e} | {size - own_size} "
                  f"| {own / theirs:.3f} | {own / alike:.3f} | {seconds} |", flush=True)  # fmt: skip


def interpolated(points: list[tuple[int, float]], size: int) -> float:
    """The loss at a size, its logarithm linear between the two points about it (or the nearest two)."""
    pairs = list(pairwise(sorted(points)))
    (a, low), (b, high) = next(
        (p for p in pairs if p[0][0] <= size <= p[1][0]), pairs[0 if size < pairs[0][0][0] else -1]
    )
    return float(np.exp(np.interp(size, (a, b), np.log((low, high)))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float model's folder")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE")
    parser.add_argument("--presets", nargs="*", default=["Q4_K_M", "Q3_K_M", "Q2_K"], metavar="NAME")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="sequences; default: %(default)s")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens in each; default: %(default)s")
    parser.add_argument("--windows", type=int, default=24, metavar="N", help="of the test; default: %(default)s")
    parser.add_argument("--swaps", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keeps the files")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()

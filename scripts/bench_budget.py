"""Compare size budgets with llama.cpp's presets and with files of one type; print a markdown table.

    python scripts/bench_budget.py MODEL --calibrate wiki.txt --test test.txt

For each preset there are three files of equal size: llama.cpp's of that name (its mixture of types, each tensor by
ggml's own quantizer with the imatrix of the same tokens, embeddings and head without, as in llama.cpp), ours of a size
budget, and ours of one type (embeddings and layers in it, the head Q6_K). No single type has exactly that size, so the
last is interpolated between the two neighbouring types, the logarithm of KL against size.

The measure is the mean Kullback-Leibler divergence from the float model over windows of the test text, of all the
weights in the file, in float32 arithmetic. Files are kept in --folder and reused.
"""

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import head, line, machine, parser
from benchlib.divergence import FloatModel

from bridge.blocks import BLOCKS
from bridge.conversion.converter import convert, plan_checkpoint
from bridge.conversion.gguf_writer import file_bytes
from bridge.conversion.options import Budget
from bridge.quantize.settings import Calibration
from bridge.runtime.cpu import dequantize
from scripts.peers import ggml
from scripts.peers.gguf_file import gguf_weights

UNIFORM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class Bench(FloatModel):
    """A model, its texts, and the folder of the files."""

    def __init__(self, options: argparse.Namespace, files: Path) -> None:
        super().__init__(options)
        self.files = files
        self.settings = Calibration(options.calibrate, options.samples, options.length)

    def preset(self, name: str) -> tuple[int, float]:
        """Size and KL divergence of llama.cpp's file."""
        plan = plan_checkpoint(self.folder, type=name)
        weights = dict(self.weights)
        for t in plan.tensors:
            if t.type in BLOCKS:
                key = str(t.source)
                blocks = ggml.quantize(self.weights[key], t.type, self.importance.get(key))
                weights[key] = dequantize.rows(t.type, blocks)
        return file_bytes(plan), self.divergence(weights)

    def made(self, name: str, **options: Any) -> tuple[int, float, str]:
        """Size and KL divergence of one of our files, and the seconds that making it took."""
        path = self.files / f"{self.folder.name}-{name}.gguf"
        seconds = ""
        if not path.exists():
            begun = time.perf_counter()
            report = convert(self.folder, path, calibrate=self.settings, **options)
            seconds = f"{time.perf_counter() - begun:.0f}"
            print(*(note for note in report.notes if note.startswith("size budget")), sep="\n", file=sys.stderr)
        return path.stat().st_size, self.divergence(gguf_weights(path)), seconds


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
        bench = Bench(options, options.folder or Path(scratch))
        print(f"Machine: {machine()}, {bench.about}\n")
        presets = {name: bench.preset(name) for name in options.presets}
        budgets = {
            name: bench.made(f"{size}", budget=Budget(size, swaps=options.swaps)) for name, (size, _) in presets.items()
        }
        print(head("all but the head in", "bytes", "KL", "seconds"))
        uniform: list[tuple[int, float]] = []
        for type in UNIFORM:
            if uniform and uniform[-1][0] > max(size for size, _ in presets.values()):
                break
            types = {"tensor_types": [(r"^(blk|token_embd)\b", type)], "output_type": "Q6_K"}
            size, loss, seconds = bench.made(f"all-{type}", **types)
            uniform.append((size, loss))
            line(type, size, f"{loss:.3e}", seconds)
        columns = "bytes of", "bytes", "llama.cpp", "one type, interpolated", "size budget", "bytes left"
        print(f"\n{head(*columns, 'over llama.cpp', 'over one type', 'seconds')}")
        for name, (size, theirs) in presets.items():
            alike = interpolated(uniform, size)
            own_size, own, seconds = budgets[name]
            losses = [f"{loss:.3e}" for loss in (theirs, alike, own)]
            line(name, size, *losses, size - own_size, f"{own / theirs:.3f}", f"{own / alike:.3f}", seconds)


def interpolated(points: list[tuple[int, float]], size: int) -> float:
    """The loss at a size, its logarithm linear between the two points around it (or the nearest two)."""
    pairs = list(pairwise(sorted(points)))
    (a, low), (b, high) = next(
        (p for p in pairs if p[0][0] <= size <= p[1][0]), pairs[0 if size < pairs[0][0][0] else -1]
    )
    return float(np.exp(np.interp(size, (a, b), np.log((low, high)))))


def parse() -> argparse.Namespace:
    required = {"required": True}
    common = ("model", "--calibrate", "--test", "--samples", "--length", "--windows", "--threads")
    options = parser(__doc__, *common, calibrate=required, test=required)
    options.add_argument("--presets", nargs="*", default=["Q4_K_M", "Q3_K_M", "Q2_K"], metavar="NAME")
    options.add_argument("--swaps", type=int, default=24, metavar="N", help="swaps in a search; default: %(default)s")
    options.add_argument("--folder", type=Path, metavar="DIR", help="where to keep the files")
    return options.parse_args()


if __name__ == "__main__":
    main()

"""Compare size budgets with llama.cpp's presets and with files of one type; print a markdown table.

    python -m scripts.quality.bench_budget MODEL --calibrate wiki.txt --test test.txt --length 512

A file of llama.cpp's has the mixture of types of a preset, each tensor by ggml's own quantizer with the imatrix of the
same tokens, embeddings and head without, as in llama.cpp. For each preset asked for there is one of ours of a size
budget of as many bytes; it is compared with that preset, and with the best preset of no more bytes.

The measure is the mean Kullback-Leibler divergence from the float model over windows of the test text, of all the
weights in the file, in float32 arithmetic, with its standard error over windows. Files are kept in --folder and reused.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.conversion.converter import convert, plan_checkpoint
from bridge.conversion.planning.options import Budget
from bridge.conversion.planning.recipe import PRESETS
from bridge.conversion.writing.gguf_writer import file_bytes
from bridge.quantize.settings import Calibration
from bridge.runtime.cpu.engines import dequantize
from scripts.benchlib import Lines, bench, head, option
from scripts.benchlib.divergence import Divergence, FloatModel, imatrix_of
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama import ggml

SIZES = ["IQ2_M", "IQ3_XXS", "Q3_K_M", "IQ4_XS", "Q4_K_M"]
_TERNARY = ("TQ1_0", "TQ2_0")  # presets for weights of three values


class Files(FloatModel):
    """A model, its texts, and the folder of the files."""

    def __init__(self, options: argparse.Namespace, files: Path) -> None:
        super().__init__(options)
        self.files = files
        self.settings = Calibration(options.calibrate, options.samples, options.length, sweeps=options.sweeps)
        self._rounded: dict[tuple[str, str], np.ndarray] = {}  # by weights and type: presets have many in common

        self.imatrix = files / f"{self.folder.name}.imatrix.gguf"
        imatrix_of(self.imatrix, self.folder, self.importance, self.calibration, options.calibrate.name)

    def preset(self, name: str) -> tuple[int, Divergence]:
        """Size and KL divergence of llama.cpp's file of a preset."""
        plan = plan_checkpoint(self.folder, type=name, imatrix=self.imatrix)
        weights = dict(self.weights)
        for t in plan.tensors:
            if t.type in WRITTEN:
                weights[str(t.source)] = self._by_ggml(str(t.source), t.type)
        return file_bytes(plan), self.divergence(weights)

    def _by_ggml(self, key: str, type: str) -> np.ndarray:
        """Float32 weights that ggml's quantizer has rounded."""
        if (key, type) not in self._rounded:
            blocks = ggml.quantize(self.weights[key], type, self.importance.get(key))
            self._rounded[key, type] = dequantize.rows(type, blocks)
        return self._rounded[key, type]

    def of_budget(self, budget: Budget) -> tuple[int, Divergence, str]:
        """Size and KL divergence of our file of a budget, and the seconds that making it took."""
        path = self.files / f"{self.folder.name}-{budget.size}.gguf"
        seconds = ""
        if not path.exists():
            begun = time.perf_counter()
            report = convert(self.folder, path, calibrate=self.settings, budget=budget)
            seconds = f"{time.perf_counter() - begun:.0f}"
            print(*(note for note in report.notes if note.startswith("size budget")), sep="\n", file=sys.stderr)
        return path.stat().st_size, self.divergence(gguf_weights(path)), seconds


OPTIONS = (
    "model", option("--calibrate", required=True), option("--test", required=True),
    *("--samples", "--length", "--windows", "--threads"),
    option("--presets", SIZES, "NAME", "whose bytes ours have", nargs="*"),
    option("--swaps", 0, "N", "swaps in a search"), option("--sweeps", 2, "N", "sweeps of refinement in ours"),
    option("--folder", Path, "DIR", "where to keep the files"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
        files = Files(options, options.folder or Path(scratch))
        yield files.about
        presets = {name: files.preset(name) for name in PRESETS if name not in _TERNARY}
        yield head("llama.cpp's preset", "bytes", "KL")
        for name, (size, loss) in sorted(presets.items(), key=lambda p: p[1][0]):
            yield name, size, loss
        columns = "bytes of", "bytes", "KL", "bytes left", "over that preset", "over the best of no more bytes"
        yield head(*columns, "the best", "seconds")
        for name in options.presets:
            size, theirs = presets[name]
            best = min((n for n in presets if presets[n][0] <= size), key=lambda n: presets[n][1].mean)
            our_size, ours, seconds = files.of_budget(Budget(size, swaps=options.swaps))
            ratios = ours.over(theirs), ours.over(presets[best][1])
            yield name, size, ours, size - our_size, *ratios, best, seconds


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

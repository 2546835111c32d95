"""What requantizing a GGUF costs, ours and llama.cpp's: errors of all layers in two steps.

    python -m scripts.quality.check_requantizing MODEL [--types Q4_0 Q4_K ...]

The float model becomes a GGUF of Q8_0 and of Q6_K, and that one of each type. Printed is the squared error of the
layers over the squared weights of the first GGUF. Ours is that of `convert`'s report; llama.cpp's that of its function
ggml_quantize_chunk on the same weights, without an imatrix. Needs xllamacpp.
"""

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np

import bridge
from bridge.gguf_file.reader import read_gguf
from scripts.benchlib import Lines, bench, option
from scripts.peers.llama import ggml

OPTIONS = (
    "model",
    option("--types", ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K", "IQ4_XS"], "TYPE"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
        for first in ("Q8_0", "Q6_K"):
            source = Path(scratch) / f"{first}.gguf"
            bridge.convert(options.model, source, type=first)
            for second in options.types:
                if second != first:
                    yield first, second, *figures(source, second, Path(scratch) / "out.gguf")


def figures(source: Path, type: str, out: Path) -> list[str]:
    """The cells of a row."""
    report = bridge.convert(source, out, type=type, force=True)
    stored = read_gguf(source).tensors
    power = ours = theirs = 0.0
    for t in report.tensors:
        if t.name.startswith("blk.") and t.type == type and t.fidelity is not None:
            kind = gguf.GGMLQuantizationType[stored[t.name].type]
            weights = gguf.quants.dequantize(stored[t.name].raw, kind).reshape(stored[t.name].shape)
            own = float(np.square(weights, dtype=np.float64).sum())
            packed = ggml.quantize(weights, type)
            found = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[type]).reshape(weights.shape)
            theirs += float(np.square(found - weights, dtype=np.float64).sum())
            power, ours = power + own, ours + t.fidelity.nmse * own
    return [f"{ours / power:.2e}", f"{theirs / power:.2e}", f"{ours / theirs:.2f}"]


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("from", "to", "ours", "llama.cpp's", "ratio"))

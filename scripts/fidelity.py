"""Convert checkpoints and measure what it cost, in weights and in predictions; print a markdown table.

    python scripts/fidelity.py CHECKPOINT... --text wiki_test.txt [--float MODEL] [--type auto] [--calibrate FILE]

KL divergence is the mean over the tokens of the text's first windows, in nats, of the checkpoint in
float32 against the same model with the GGUF's dequantized weights: of the linears alone (embeddings,
norms and head are the checkpoint's), and of the whole file. With `--float`, the model the checkpoints
were quantized from, the last column is the checkpoint against that: what quantizing it cost. `--calibrate` is
convert's, with 256 sequences of 256 tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bridge
from bridge.conversion.report import CALIBRATED, CODED
from bridge.quantize.settings import Calibration
from scripts.peers import reference
from scripts.peers.fidelity import Reference, measure

HEAD = ("checkpoint", "type of its linears", "bpw", "codes kept", "NMSE", "KLD, linears", "KLD, whole file")


def main() -> None:
    options = parse()
    text = options.text.read_text(encoding="utf-8")
    floats = {folder: reference.float_weights(folder) for folder in options.float}
    head = HEAD + (("KLD, checkpoint from its float model",) if floats else ())
    print(
        f"First {options.windows} windows of {options.length} tokens of {options.text.name}; --type {options.type}.\n"
    )
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for folder in options.checkpoints:
        print(f"| {' | '.join(row(folder, text, floats, options))} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--float", type=Path, nargs="+", default=[], metavar="MODEL", help="unquantized models")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="a text for codes that cannot be kept")
    parser.add_argument("--type", default="auto", help="as gguf-bridge takes it; default: %(default)s")
    parser.add_argument("--windows", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=256, metavar="TOKENS", help="of a window; default: %(default)s")
    return parser.parse_args()


def row(folder: Path, text: str, floats: dict, options: argparse.Namespace) -> list[str]:
    """One checkpoint's line of the table."""
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch, bridge.open_checkpoint(folder) as checkpoint:
        path = Path(scratch) / "model.gguf"
        text_of = options.calibrate and Calibration(options.calibrate, samples=256, length=256)
        codes = bridge.convert(folder, path, type=options.type, calibrate=text_of).total((*CODED, CALIBRATED))
        against = Reference(folder, checkpoint, text, options.windows, options.length)
        found = measure(path, against)
    types = ", ".join(f"{count} {name}" if len(found.types) > 1 else name for name, count in found.types.most_common())
    cells = [folder.name, types, f"{found.bpw:.2f}", f"{100 * codes.kept / codes.weights:.4g}%"]
    cells += ["exact" if found.nmse == 0 else f"{found.nmse:.1e}", f"{found.kl_linears:.1e}", f"{found.kl_file:.1e}"]
    if floats:
        same = [w for w in floats.values() if {n: x.shape for n, x in w.items()} == shapes(against.weights)]
        cost = against.kl_from(same[0]) if same else None
        cells.append("" if cost is None else f"{cost:.1e}")
    return cells


def shapes(weights: reference.Weights) -> dict:
    return {name: values.shape for name, values in weights.items()}


if __name__ == "__main__":
    main()

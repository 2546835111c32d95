"""Convert checkpoints and measure the cost, in weights and in predictions; print a markdown table.

    python -m scripts.quality.fidelity CHECKPOINT... --text wiki_test.txt [--float MODEL] [--calibrate FILE]

KL divergence is the mean over the tokens of the text's first windows, in nats, of the checkpoint in float32 against the
same model with the GGUF's dequantized weights: of the linears only (embeddings, norms and head are the checkpoint's),
and of the whole file. With `--float`, the model that the checkpoints were quantized from, the last column compares the
checkpoint with that model: the cost of quantizing it. `--calibrate` is the option of convert, with 256 sequences of 256
tokens. `gguf-bridge plot` draws what --json writes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import bridge
from bridge.conversion.writing.report import CALIBRATED, CODED
from bridge.quantize.settings import Calibration
from scripts.benchlib import Lines, bench, head, option
from scripts.peers import reference
from scripts.peers.fidelity import Reference
from scripts.peers.fidelity import measure as measured

HEAD = ("checkpoint", "type of its linears", "bpw", "codes kept", "NMSE", "KLD, linears", "KLD, whole file")


OPTIONS = (
    option("--text", required=True), *("--windows", "--length", "--json"),
    option("checkpoints", Path, "CHECKPOINT", nargs="+"),
    option("--float", Path, "MODEL", "unquantized models", nargs="+", default=[]),
    option("--calibrate", help="a text for codes that cannot be kept"),
    option("--type", "auto", help="as gguf-bridge takes it"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    text = options.text.read_text(encoding="utf-8")
    floats = {folder: reference.float_weights(folder) for folder in options.float}
    shown = f"{options.windows} windows of {options.length} tokens of {options.text.name}"
    yield f"First {shown}; --type {options.type}."
    yield head(*HEAD, *(["KLD, checkpoint from its float model"] if floats else []))
    rows = []
    for folder in options.checkpoints:
        rows.append(row(folder, text, floats, options))
        yield cells(rows[-1], bool(floats))
    return {"checkpoints": rows}


def row(folder: Path, text: str, floats: dict, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one checkpoint."""
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch, bridge.open_checkpoint(folder) as checkpoint:
        path = Path(scratch) / "model.gguf"
        text_of = options.calibrate and Calibration(options.calibrate, samples=256, length=256)
        codes = bridge.convert(folder, path, type=options.type, calibrate=text_of).total((*CODED, CALIBRATED))
        assert codes is not None
        against = Reference(folder, checkpoint, text, options.windows, options.length)
        result = measured(path, against)
    same = [weights for weights in floats.values() if shapes(weights) == shapes(against.weights)]
    return {
        "name": folder.name, "types": dict(result.types.most_common()), "bpw": result.bpw,
        "codes_kept": codes.kept / codes.weights, "nmse": result.nmse, "kl_linears": result.kl_linears,
        "kl_file": result.kl_file, "kl_checkpoint": against.kl_from(same[0]) if same else None,
    }  # fmt: skip


def cells(row: dict[str, Any], with_floats: bool) -> list[str]:
    """The table's line of one checkpoint."""
    types = ", ".join(f"{count} {name}" if len(row["types"]) > 1 else name for name, count in row["types"].items())
    shown = [row["name"], types, f"{row['bpw']:.2f}", f"{100 * row['codes_kept']:.4g}%"]
    shown += ["exact" if row["nmse"] == 0 else f"{row['nmse']:.1e}", f"{row['kl_linears']:.1e}"]
    shown.append(f"{row['kl_file']:.1e}")
    if with_floats:
        shown.append("" if row["kl_checkpoint"] is None else f"{row['kl_checkpoint']:.1e}")
    return shown


def shapes(weights: reference.Weights) -> dict:
    return {name: values.shape for name, values in weights.items()}


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

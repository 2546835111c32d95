"""Convert checkpoints and measure the cost, in weights and in predictions; print a markdown table.

    python -m scripts.peers.tools smollm2 gemma3-270m --work real
    python -m scripts.quality.fidelity real/*-* --float real/smollm2 real/gemma3-270m --usual

KL divergence is the mean over the tokens of a text's windows, in nats, with the median and the 99th percentile of
tokens in brackets. All models run in transformers, in float32. The checkpoint is compared with the same model with the
GGUF's dequantized weights: of the linears only (embeddings, norms and head are the checkpoint's), and of the whole
file. With `--float`, the models that the checkpoints were quantized from, a column compares the checkpoint with its
own: the cost of quantizing it.

With `--usual` the checkpoint also goes the usual way: dequantized, converted to F16, and quantized by llama.cpp's own
llama_model_quantize (npm's package of node-llama-cpp) to the preset of the type that most converted linears have:
Q4_K_M for Q4_K. The column has two figures, without an importance matrix and with one, which is of the dequantized
checkpoint on the texts that `quantize` ships. The table gives the bytes of both files, in MB.

`--text` is a file, whose first windows are taken, or one of the texts of `benchlib/real_texts.py`, with windows that
lie evenly over it. `--calibrate` is the option of convert, with 256 sequences of 256 tokens. With `--keep`, each row is
kept in a folder, and the same command continues where it was stopped. `gguf-bridge plot` draws what --json writes.
"""

import argparse
import gc
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bridge
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.writing.report import CALIBRATED, CODED
from bridge.quantize.settings import Calibration
from scripts.benchlib import Lines, bench, head, option
from scripts.benchlib.divergence import imatrix_of
from scripts.benchlib.real_texts import KINDS, text_of, windows_of
from scripts.benchlib.token_kl import TokenKl
from scripts.peers import reference
from scripts.peers.fidelity import Reference
from scripts.peers.fidelity import measure as measured
from scripts.peers.llama import llama_quantize, tuned
from scripts.peers.predictions import token_kls
from scripts.peers.reference import Weights
from scripts.peers.tools import calibration

HEAD = ("checkpoint", "type of its linears", "bpw", "MB", "codes kept", "NMSE", "KL, linears", "KL, whole file")
OF_FLOATS, USUAL = "KL, checkpoint from its float model", "the usual way: preset, MB; KL, with an imatrix"
PRESETS = {"Q2_K": "Q2_K", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # of others: the type's name


OPTIONS = (
    option("--text", "manual", "TEXT", f"a file, or one of {', '.join(KINDS)}"), option("--windows", 8),
    *("--length", "--packages", "--json"),
    option("checkpoints", Path, "CHECKPOINT", nargs="+"),
    option("--float", Path, "MODEL", "unquantized models", nargs="+", default=[]),
    option("--usual", False, help="also dequantize them, and quantize that by llama.cpp"),
    option("--llama-library", Path, "DIR", "node-llama-cpp's folder with libllama"),
    option("--calibrate", help="a text for codes that cannot be kept"),
    option("--type", "auto", help="as gguf-bridge takes it"),
    option("--keep", Path, "DIR", "for the figures of each checkpoint"),
)  # fmt: skip


class Floats:
    """The float models, and the predictions of the one that was asked for last: those of one model fill gigabytes."""

    def __init__(self, folders: list[Path]) -> None:
        self.weights = {folder: reference.float_weights(folder) for folder in folders}
        self._last: tuple[Path, bytes, list[np.ndarray]] | None = None

    def logits(self, against: Reference) -> list[np.ndarray] | None:
        """Of each window, those of the model with the checkpoint's shapes; None if there is none."""
        same = [folder for folder, weights in self.weights.items() if _shapes(weights) == _shapes(against.weights)]
        if not same:
            return None
        tokens = against.tokens.tobytes()
        if self._last is None or self._last[:2] != (same[0], tokens):
            self._last = None
            model = reference.hf_model(same[0], self.weights[same[0]])
            self._last = same[0], tokens, list(_logits(model, against))
        return self._last[2]


def measure(options: argparse.Namespace) -> Lines:
    if options.usual:
        options.llama_library = (options.llama_library or tuned.download(options.packages)).resolve()
    floats = Floats(options.float)
    yield f"{options.windows} windows of {options.length} tokens of {Path(options.text).name}; --type {options.type}."
    yield head(*HEAD, *([OF_FLOATS] if options.float else []), *([USUAL] if options.usual else []))
    rows = []
    for folder in options.checkpoints:
        rows.append(kept_row(folder, floats, options))
        yield cells(rows[-1], bool(options.float), options.usual)
        gc.collect()
    return {"text": Path(options.text).name, "windows": options.windows, "checkpoints": rows}


def kept_row(folder: Path, floats: Floats, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one checkpoint: as they were measured before, if its files and the settings are the same."""
    if options.keep is None:
        return row(folder, floats, options)
    stamps = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    names = "text", "windows", "length", "type", "calibrate", "usual", "float"
    settings = [str(vars(options)[name]) for name in names]
    identity = hashlib.sha256(repr((stamps, settings, bridge.__version__)).encode()).hexdigest()[:16]
    record = options.keep / f"{folder.name}.{identity}.json"
    if not record.exists():
        options.keep.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(row(folder, floats, options)) + "\n")
    return dict(json.loads(record.read_text()))


def row(folder: Path, floats: Floats, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one checkpoint."""
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch, bridge.open_checkpoint(folder) as checkpoint:
        path = Path(scratch) / "model.gguf"
        text_of_codes = options.calibrate and Calibration(options.calibrate, samples=256, length=256)
        report = bridge.convert(folder, path, type=options.type, calibrate=text_of_codes)
        codes = report.total((*CODED, CALIBRATED))
        assert codes is not None
        against = reference_of(folder, checkpoint, options)
        weights = weights_of(path, against)
        result = measured(path, against, predictions=False, weights=weights)
        linears, file = divergence(against, against.linears_of(weights)), divergence(against, weights)
        del weights
        figures = {"linears": linears, "file": file}
        if (float_logits := floats.logits(against)) is not None:
            figures["checkpoint"] = token_kl(float_logits, against.logits)
        usual = list(usual_ways(against, preset_of(result.types), Path(scratch), options)) if options.usual else []
        size = path.stat().st_size
    return {
        "name": title(folder), "folder": folder.name, "types": dict(result.types.most_common()), "bpw": result.bpw,
        "bytes": size, "codes_kept": codes.kept / codes.weights, "nmse": result.nmse,
        **{f"kl_{what}": float(kl.kl.mean()) for what, kl in figures.items()},
        "tokens": {what: kl.figures() for what, kl in figures.items()},
        **({"usual": usual} if usual else {}),
    }  # fmt: skip


def title(folder: Path) -> str:
    """The model and the tool that wrote a checkpoint, where `peers/tools.py` made it; or the folder's name."""
    record = folder / "made.json"
    if not record.exists():
        return folder.name
    origin = json.loads(record.read_text(encoding="utf-8"))
    return f"{origin['model']}, {origin['tool']}"


def reference_of(folder: Path, checkpoint: Any, options: argparse.Namespace) -> Reference:
    if options.text not in KINDS:
        return Reference(folder, checkpoint, Path(options.text).read_text("utf-8"), options.windows, options.length)
    text = text_of(options.text, options.packages)
    against = Reference(folder, checkpoint, text, options.windows, options.length)
    against.tokens = windows_of(text, against.tokenizer, options.windows, options.length)
    return against


def weights_of(path: Path, against: Reference) -> dict[str, np.ndarray]:
    """A GGUF's tensors as the model of the checkpoint has them."""
    with open_source(path, config=against.folder, by_family=True) as opened:
        return against.unfold(reference.checkpoint_weights(opened))


def divergence(against: Reference, weights: Weights) -> TokenKl:
    """Of the model with these weights from the checkpoint, window by window."""
    return token_kl(against.logits, _logits(reference.hf_model(against.folder, weights), against))


def token_kl(expected: Iterable[np.ndarray], logits: Iterable[np.ndarray]) -> TokenKl:
    """Of some predictions from the expected ones, float32 [length, vocab] of each window."""
    pairs = (
        (token_kls(there, here), there.argmax(-1) == here.argmax(-1))
        for there, here in zip(expected, logits, strict=True)
    )
    return TokenKl(*map(np.stack, zip(*pairs, strict=True)))


def _logits(model: torch.nn.Module, against: Reference) -> Iterator[np.ndarray]:
    """float32 [length, vocab] of a window at a time: those of all fill gigabytes."""
    return (reference.logits(model, window[None])[0] for window in against.tokens)


def usual_ways(against: Reference, preset: str, scratch: Path, options: argparse.Namespace) -> Any:
    """The figures of the checkpoint's floats quantized by llama.cpp, without an imatrix and with one."""
    source, quantized, imatrix = (scratch / name for name in ("floats.gguf", "usual.gguf", "imatrix.gguf"))
    bridge.convert(against.folder, source, type="F16")
    tokens = np.array([row["input_ids"] for row in calibration(against.folder)], np.int64)
    squares = reference.mean_squares(reference.hf_model(against.folder, against.weights), tokens)
    imatrix_of(imatrix, against.folder, squares, tokens, "fidelity")
    for importance in (None, imatrix):
        llama_quantize.quantize(options.llama_library, source, quantized, preset, importance, threads=2)
        figures = divergence(against, weights_of(quantized, against)).figures()
        yield {"preset": preset, "imatrix": importance is not None, "bytes": quantized.stat().st_size, **figures}
        quantized.unlink()


def preset_of(types: Mapping[str, int]) -> str:
    """llama.cpp's preset of the type that most linears have."""
    most = max(types, key=lambda name: types[name])
    return PRESETS.get(most, most)


def cells(row: dict[str, Any], with_floats: bool, with_usual: bool) -> list[str]:
    """The table's line of one checkpoint."""
    types = ", ".join(f"{count} {name}" if len(row["types"]) > 1 else name for name, count in row["types"].items())
    shown = [row["name"], types, f"{row['bpw']:.2f}", f"{row['bytes'] / 1e6:.0f}", f"{100 * row['codes_kept']:.4g}%"]
    shown += ["exact" if row["nmse"] == 0 else f"{row['nmse']:.1e}", *map(_spread, _figures(row, "linears", "file"))]
    if with_floats:
        shown.append("".join(map(_spread, _figures(row, "checkpoint"))))
    if with_usual:
        plain, weighted = row["usual"]
        shown.append(f"{plain['preset']}, {plain['bytes'] / 1e6:.0f}; {_spread(plain)}, {_spread(weighted)}")
    return shown


def _figures(row: dict[str, Any], *names: str) -> list[dict[str, float]]:
    return [row["tokens"][name] for name in names if name in row["tokens"]]


def _spread(figures: dict[str, float]) -> str:
    """Mean (median, 99th percentile)."""
    return f"{figures['kl']:.1e} ({figures['median']:.0e}, {figures['p99']:.0e})"


def _shapes(weights: Weights) -> dict:
    return {name: values.shape for name, values in weights.items()}


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

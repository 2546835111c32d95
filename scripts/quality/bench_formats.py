"""Measure one model in every format on one machine: bits, size, perplexity, KL divergence, speed and memory.

    python -m scripts.quality.bench_formats MODEL --calibrate train.txt --test test.txt
    python -m scripts.quality.bench_formats MODEL --speed-of CHECKPOINT    speeds on a model of another size
    python -m scripts.quality.bench_formats MODEL --add "NVFP4=model-nvfp4"  and somebody else's checkpoint

Every quantizer sees the same tokens of --calibrate: llama.cpp's as an imatrix, GPTQ and AWQ as inputs of the layers.
Perplexity and KL divergence (from the F16 file) are taken over the second halves of windows of --test, with activations
in float32, so that the rows differ only in their weights. Speeds are measured in processes that take turns: 64 tokens
generated after 8, and a prompt of 512, in llama.cpp and in our runtime; memory is each process's peak.

llama.cpp is the one that npm distributes, built for this processor. Finished rows are kept in the work folder, so the
same command continues where it was stopped. `gguf-bridge plot` draws what --json writes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.benchlib import ROOT, Lines, bench, head, option
from scripts.benchlib.formats import Formats, summary
from scripts.benchlib.model_names import model_name
from scripts.benchlib.speeds import Speeds

TEXTS = ROOT.parent / "shared" / "text"
QUALITY_HEAD = ("format", "bits a weight", "file, MB", "perplexity", "KL, nats a token", "same top token")
_SPEED = ("made, tokens/s", "prompt, tokens/s", "memory, MB")
SPEED_HEAD = (f"llama.cpp: {_SPEED[0]}", *_SPEED[1:], f"here: {_SPEED[0]}", *_SPEED[1:])


def measure(options: argparse.Namespace) -> Lines:
    for name in ("calibrate", "test"):
        if not getattr(options, name).is_file():
            raise argparse.ArgumentTypeError(f"{getattr(options, name)}: no such text; give --{name} FILE")
    work = options.work or Path(f"bench-formats-{options.model.name}")
    rows = Rows(work, options)
    formats = Formats(options.model, work, options.calibrate, options.samples, options.length, options.threads)
    wanted = {**formats.makers(), **{name: ("others, carried", folder) for name, folder in options.add}}
    if options.only:
        wanted = {name: maker for name, maker in wanted.items() if name in options.only}
    speeds = Speeds(work, options.speed_of, options.packages, options.threads, options.turns)
    text = options.test.read_text(encoding="utf-8")
    for name, (maker, make) in wanted.items():
        row = rows.get(name)
        if "quality" not in row:
            print(f"{name} ...", file=sys.stderr, flush=True)
            path = formats.file(name, make)
            if isinstance(path, str):
                row |= {"maker": maker, "quality": {"missing": path}, "speed": {}}
            else:
                how = text, options.length, options.windows
                figures = {**formats.quality(path, *how), **formats.checkpoint_kl(name, make, *how)}
                row |= {"maker": maker, "quality": {**summary(path), **figures}}
            rows.put(name, row)
        if "speed" not in row and options.turns:
            if options.speed_of:
                figures = speeds.of_types(row["quality"]["types"])
            else:
                path = formats.file(name, make)
                assert isinstance(path, Path)
                figures = speeds.of_file(path)
            rows.put(name, row | {"speed": figures})
        if name not in formats.needed and not options.keep:
            formats.path(name).unlink(missing_ok=True)
    yield from table(options, {name: rows.get(name) for name in wanted}, speeds)
    return record(options, {name: rows.get(name) for name in wanted})


class Rows:
    """The measured rows, kept in the work folder; settings of quality and of speed are checked separately."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        values = {name: str(value) for name, value in vars(options).items()}
        settings = {name: values[name] for name in ("model", "calibrate", "test", "samples", "length", "windows")}
        timed = {name: values[name] for name in ("speed_of", "turns", "threads")}
        work.mkdir(parents=True, exist_ok=True)
        self.file = work / "rows.json"
        self.known: dict[str, Any] = {"settings": settings, "rows": {}}
        if self.file.exists():
            self.known = json.loads(self.file.read_text())
        if self.known["settings"] != settings:
            raise SystemExit(f"{work}: holds rows of other settings ({self.known['settings']}); give another --work")
        if options.turns and self.known.get("timed") != timed:
            self.known["timed"] = timed
            for row in self.known["rows"].values():
                if "missing" not in row["quality"]:
                    row.pop("speed", None)

    def get(self, name: str) -> dict[str, Any]:
        return dict(self.known["rows"].get(name, {}))

    def put(self, name: str, row: dict[str, Any]) -> None:
        self.known["rows"][name] = row
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.known, indent=1) + "\n")
        new.replace(self.file)


def table(options: argparse.Namespace, rows: dict[str, dict[str, Any]], speeds: Speeds) -> Lines:
    """Lines about the run, and the table."""
    of = options.speed_of.name if options.speed_of else options.model.name
    timed = f" Speed and memory of {of}, median of {options.turns}." if options.turns else ""
    yield (
        f"{options.model.name}'s quality: {options.windows} windows of {options.length} "
        f"tokens of {options.test.name}; quantizers saw {options.samples} sequences of {options.length} tokens of "
        f"{options.calibrate.name}.{timed}"
    )
    columns = QUALITY_HEAD + (SPEED_HEAD if options.turns else ())
    yield head(*columns)
    for name, row in rows.items():
        yield name, *cells(row, len(columns) - 1)


def cells(row: dict[str, Any], count: int) -> list[str]:
    """A row's cells after its name."""
    quality, speed = row["quality"], row.get("speed", {})
    if "missing" in quality:
        return [quality["missing"], *[""] * (count - 1)]
    kl, top = quality.get("kl"), quality.get("same_top")
    shown = [
        f"{quality['bpw']:.2f}",
        f"{quality['bytes'] / 1e6:.1f}",
        f"{quality['perplexity']:.3f} ± {quality['perplexity_error']:.3f}",
        "" if kl is None else f"{kl:.2e} ± {quality['kl_error']:.0e}",
        "" if top is None else f"{top:.1%}",
    ]
    for side in ("theirs", "ours"):
        if figures := speed.get(side):
            shown += [f"{figures['decode']:.1f}", f"{figures['prompt']:.0f}", f"{(figures['peak'] or 0) / 1e6:.0f}"]
        else:
            shown += ["", "", ""]
    return shown[:count]


def record(options: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures for `gguf-bridge plot`."""
    formats = []
    for name, row in rows.items():
        if "missing" not in row["quality"]:
            figures = {key: value for key, value in row["quality"].items() if key != "types"}
            formats.append({"name": name, "maker": row["maker"], **figures, "speed": row.get("speed", {})})
    return {"model": model_name(options.model), "bits_of": "whole file", "formats": formats}


def named(text: str) -> tuple[str, Path]:
    name, sign, folder = text.partition("=")
    if not sign or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER of a checkpoint")
    return name, Path(folder)


OPTIONS = (
    "model", option("--calibrate", TEXTS / "calib_wiki.txt"), option("--test", TEXTS / "wiki_test.txt"),
    *("--samples", "--length", "--windows", "--threads", "--turns", "--packages", "--json"),
    option("--speed-of", Path, "DIR", "measure speeds on this checkpoint's shapes"),
    option("--add", named, "NAME=DIR", "another row", action="append", default=[]),
    option("--only", metavar="NAME", help="print only these rows", nargs="+"),
    option("--work", Path, "DIR", "work folder; default: ./bench-formats-MODEL"),
    option("--keep", False, help="leave the GGUFs in the work folder"),
)  # fmt: skip

if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

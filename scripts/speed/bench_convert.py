"""Measure speed and memory of a conversion; print a markdown table.

    python -m scripts.speed.bench_convert                    # a synthetic 1B checkpoint, made and removed
    python -m scripts.speed.bench_convert --checkpoint DIR   # one of yours

Every run is a process of its own, so that one-time costs (imports, loading compiled kernels) are in every figure. The
page cache is warm: the checkpoint has just been read. The output is written and fsynced. Peak memory is the largest
resident set (ru_maxrss), which counts every mapped page of the checkpoint that is in use at that moment, minus the same
figure of a process that only imports the same modules; it therefore includes compiled kernels. Its anonymous part,
which no file backs, is sampled every 20 ms.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.benchlib import ROOT, Lines, bench, head, option

SCRIPT = ROOT / "scripts" / "gptq2gguf.py"

CONVERT = """
import json, resource, sys, time
import bridge
start = time.perf_counter()
bridge.convert(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
modules = list(sys.modules)
start = time.perf_counter()
bridge.convert(sys.argv[1], sys.argv[2], force=True)
again = time.perf_counter() - start
with open(sys.argv[3], "w") as file:
    json.dump({"seconds": seconds, "again": again, "peak": peak, "modules": modules}, file)
"""

IMPORT_ONLY = """
import importlib, json, resource, sys
for name in json.load(open(sys.argv[1]))["modules"]:
    try:
        importlib.import_module(name)
    except Exception:  # names that a package made up while it was imported
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

IMPORT_TIME = "import time; start = time.perf_counter(); import bridge; print(time.perf_counter() - start)"


@dataclass
class Run:
    """What a child process took and printed."""

    seconds: float
    anonymous_mib: float | None  # its largest RssAnon; None where the system does not report it
    output: str


OPTIONS = (
    "--json", option("--checkpoint", Path, "DIR", "default: a synthetic 1B GPTQ 4-bit g128"),
    option("--runs", 5, "N", "runs of each kind"),
    option("--no-cold", False, help="leave out the run that compiles everything"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch) / "synthetic-1b"
            python("-m", "scripts.make_synthetic", str(checkpoint), "--vocab", "4096")
        measured = figures(checkpoint, Path(scratch), options.runs, not options.no_cold)
    yield (
        f"Checkpoint: {measured['checkpoint']}, {measured['checkpoint_gb']:.2f} GB of tensors; its GGUF: "
        f"{measured['gguf_gb']:.2f} GB. Median of {measured['runs']} processes, page cache and compile caches warm."
    )
    yield head("what", "measured", "in detail")
    for what, key in (
        ("conversion, `bridge.convert` alone", "convert_seconds"),
        ("conversion, whole process", "process_seconds"),
        ("the same again in one process: imports done, kernels loaded", "again_seconds"),
    ):
        seconds = measured[key]
        yield what, f"{measured['checkpoint_gb'] / seconds:.2f} GB of checkpoint a second", f"{seconds:.2f} s"
    memory = f"{measured['peak_mib']:.0f} MiB in all, {measured['imports_mib']:.0f} MiB with the imports alone"
    if measured["anonymous_mib"] is not None:
        memory += f"; never more than {measured['anonymous_mib']:.0f} MiB anonymous"
    yield "peak memory over the imports", f"{measured['peak_mib'] - measured['imports_mib']:.0f} MiB", memory
    yield "`import bridge`", f"{measured['import_seconds']:.3f} s", "in a started interpreter"
    yield "`gguf-bridge --help`", f"{measured['help_seconds']:.2f} s", "whole process"
    if (cold := measured["cold_seconds"]) is not None:
        extra = f"{cold - measured['process_seconds']:.1f} s more than a warm one"
        yield "first run, compile caches cold", extra, f"{cold:.1f} s"
    return measured


def figures(checkpoint: Path, scratch: Path, runs: int, with_cold: bool) -> dict:
    """Every figure of the table, by name; times in seconds, memory in MiB."""
    files = [file for file in checkpoint.iterdir() if file.suffix in (".safetensors", ".bin", ".pt")]
    size = sum(map(read_through, files))
    out, record_file = scratch / "out.gguf", scratch / "record.json"

    def convert_inside(environment: dict | None = None) -> tuple[Run, dict]:
        out.unlink(missing_ok=True)
        run = python("-c", CONVERT, str(checkpoint), str(out), str(record_file), environment=environment)
        return run, json.loads(record_file.read_text())

    def convert_by_script(environment: dict | None = None) -> Run:
        return python(str(SCRIPT), str(checkpoint), str(out), "--force", environment=environment)

    convert_by_script()  # compile what is not compiled yet
    process_seconds = statistics.median([convert_by_script().seconds for _ in range(runs)])
    inside = [convert_inside() for _ in range(runs)]
    imports = [int(python("-c", IMPORT_ONLY, str(record_file)).output) for _ in range(3)]
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10  # ru_maxrss: bytes there, KiB elsewhere
    cold = None
    if with_cold:
        fresh = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        with tempfile.TemporaryDirectory() as empty:
            cold = convert_by_script(fresh | {"XDG_CACHE_HOME": empty}).seconds
    seconds = statistics.median([record["seconds"] for _, record in inside])
    anonymous = [run.anonymous_mib for run, _ in inside if run.anonymous_mib is not None]
    return {
        "checkpoint": checkpoint.name, "checkpoint_gb": size / 1e9, "gguf_gb": out.stat().st_size / 1e9, "runs": runs,
        "convert_seconds": seconds, "convert_gb_per_second": size / 1e9 / seconds,
        "again_seconds": statistics.median([record["again"] for _, record in inside]),
        "process_seconds": process_seconds, "process_gb_per_second": size / 1e9 / process_seconds,
        "peak_mib": max(record["peak"] for _, record in inside) / unit,
        "imports_mib": statistics.median(imports) / unit, "anonymous_mib": max(anonymous, default=None),
        "cold_seconds": cold,
        "import_seconds": statistics.median([float(python("-c", IMPORT_TIME).output) for _ in range(runs)]),
        "help_seconds": statistics.median([python("-m", "bridge.cli", "--help").seconds for _ in range(runs)]),
    }  # fmt: skip


def read_through(file: Path) -> int:
    """Bytes in a file, which is then in the page cache.

    In small pieces: Linux counts the peak of the process that starts a child towards the child's.
    """
    with file.open("rb") as stream:
        return sum(map(len, iter(lambda: stream.read(1 << 20), b"")))


def python(*arguments: str, environment: dict | None = None) -> Run:
    """Run this Python from the checkout's root to its end; raises if it fails."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    status, largest = Path(f"/proc/{child.pid}/status"), None
    while True:
        try:
            output, complaint = child.communicate(timeout=0.02)
            break
        except subprocess.TimeoutExpired:
            with suppress(OSError):  # not Linux
                for kib in re.findall(r"RssAnon:\s+(\d+)", status.read_text()):
                    largest = max(largest or 0, int(kib) / 1024)
    seconds = time.perf_counter() - start
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments[:2])}: exit code {child.returncode}\n{complaint.decode()}")
    return Run(seconds, largest, output.decode())


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

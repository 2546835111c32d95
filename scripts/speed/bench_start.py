"""Measure how long a model takes to its first token, as CPU seconds of whole processes, beside llama.cpp.

    python -m scripts.speed.bench_start smollm2 gemma3-270m    what package registries carry, see benchlib
    python -m scripts.speed.bench_start model.gguf --cold    also with an empty cache

"warm" is `gguf-bridge run MODEL -p ... -n 1` with kernels in the cache, llama.cpp its library through ctypes in a
Python that imports nothing else (`scripts/peers/llama/`); both with the interpreter, in turn, the files in the
page cache. "cold" compiles everything, but for what is among the package's object code, where it has some (`make
wheel`).
"""

import argparse
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from scripts.benchlib import ROOT, Lines, bench, cost_of, option, ratio, take_turns
from scripts.benchlib.real_models import PACKAGED, model_path
from scripts.peers.llama import tuned

PROMPT = "The capital of France is"
OPTIONS = (
    "--threads", option("--turns", 11), option("models", list(PACKAGED), "MODEL", "a GGUF, or smollm2 ..."),
    option("--cold", False, help="also measure a start that compiles everything"),
    "--packages",
)  # fmt: skip
COLUMNS = "model", "llama.cpp, CPU s", "warm, CPU s", "ratio", "cold, CPU s"


def cpu_seconds(command: list[object], log: Path, environment: dict[str, str]) -> dict[str, float]:
    """User and system time of a process and of those that it waited for. Exits where it fails."""
    cost = cost_of(command, log, environment)
    if cost["code"]:
        sys.exit(f"{command[1]}: exit code {cost['code']}; see {log}")
    return {"cpu": cost["cpu_seconds"]}


def measure(options: argparse.Namespace) -> Lines:
    peer = tuned.download(options.packages)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    log = options.packages / "start.log"
    starter = ROOT / "scripts/peers/llama/llama_start.py"
    for model in options.models:
        path = model_path(model, options.packages)
        ours = [sys.executable, "-m", "bridge.cli", "run", path, "-p", PROMPT, "-n", 1, "--temp", 0]
        ours += ["--threads", options.threads]
        commands = {"theirs": [sys.executable, starter, peer, path, PROMPT, options.threads], "ours": ours}
        cpu_seconds(ours, log, environment)
        sides = {side: partial(cpu_seconds, command, log, environment) for side, command in commands.items()}
        figures = take_turns(sides, options.turns)
        cold = ""
        if options.cold:
            with tempfile.TemporaryDirectory() as empty:
                cold = f"{cpu_seconds(ours, log, environment | {'XDG_CACHE_HOME': empty})['cpu']:.2f}"
        medians = [f"{statistics.median(figures[side]['cpu']):.2f}" for side in sides]
        yield path.stem, *medians, f"{ratio(figures['ours']['cpu'], figures['theirs']['cpu']):.2f}", cold


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)

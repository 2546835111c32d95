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

from scripts.benchlib import ROOT, Figures, Lines, bench, cost_of, option, ratio, take_turns
from scripts.benchlib.real_models import PACKAGED, model_path
from scripts.peers.llama import tuned

PROMPT = "The capital of France is"
OPTIONS = (
    "--threads", option("--turns", 11), option("models", list(PACKAGED), "MODEL", "a GGUF, or smollm2 ..."),
    option("--cold", False, help="also measure a start that compiles everything"),
    "--packages",
)  # fmt: skip
COLUMNS = "model", "llama.cpp, CPU s", "warm, CPU s", "ratio", "cold, CPU s"


def cost(command: list[object], log: Path, environment: dict[str, str]) -> dict[str, float]:
    """Seconds of a process by the clock, and of user and system time. Exits where it fails."""
    measured = cost_of(command, log, environment)
    if measured["code"]:
        sys.exit(f"{command[1]}: exit code {measured['code']}; see {log}")
    return {"start": measured["seconds"], "start cpu": measured["cpu_seconds"]}


class Starts:
    """Commands that end with a model's first token.

    ours, theirs  gguf-bridge, and llama.cpp's library
    """

    def __init__(self, path: Path, libraries: Path, threads: int, log: Path) -> None:
        ours = [sys.executable, "-m", "bridge.cli", "run", path, "-p", PROMPT, "-n", 1, "--temp", 0]
        self.ours: list[object] = [*ours, "--threads", threads]
        starter = ROOT / "scripts/peers/llama/llama_start.py"
        self.theirs: list[object] = [sys.executable, starter, libraries, path, PROMPT, threads]
        self._log = log
        self._environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def warm(self, turns: int) -> Figures:
        """What both cost in turn, their files in the page cache and our kernels compiled."""
        cost(self.ours, self._log, self._environment)
        sides = {"theirs": self.theirs, "ours": self.ours}
        return take_turns({side: partial(cost, it, self._log, self._environment) for side, it in sides.items()}, turns)

    def cold(self) -> float:
        """CPU seconds of ours with an empty cache."""
        with tempfile.TemporaryDirectory() as empty:
            return cost(self.ours, self._log, self._environment | {"XDG_CACHE_HOME": empty})["start cpu"]


def measure(options: argparse.Namespace) -> Lines:
    libraries = tuned.download(options.packages)
    for model in options.models:
        path = model_path(model, options.packages)
        starts = Starts(path, libraries, options.threads, options.packages / "start.log")
        figures = starts.warm(options.turns)
        seconds = {side: of_side["start cpu"] for side, of_side in figures.items()}
        medians = [f"{statistics.median(seconds[side]):.2f}" for side in ("theirs", "ours")]
        cold = f"{starts.cold():.2f}" if options.cold else ""
        yield path.stem, *medians, f"{ratio(seconds['ours'], seconds['theirs']):.2f}", cold


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)

"""Measure how long a model takes to its first token, as CPU seconds of whole processes, beside llama.cpp.

    python scripts/bench_start.py smollm2 gemma3-270m                what package registries carry, see benchlib
    python scripts/bench_start.py model.gguf --cold                  also with an empty cache

"warm" is `gguf-bridge run MODEL -p ... -n 1` with kernels in the cache, llama.cpp its library through ctypes in a
Python that imports nothing else (scripts/peers/llama_start.py); both with the interpreter, in turn, the files in the
page cache. "cold" compiles everything, but for what is among the package's object code, where it has some (`make
wheel`).
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchlib import head, line, machine, parser
from benchlib.real_models import PACKAGED, packaged_gguf

from scripts.peers.llama_quantize import libraries

PROMPT = "The capital of France is"
ROOT = Path(__file__).resolve().parents[1]


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """User and system time of a process and of those that it waited for. Raises where it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = parser(__doc__, "--threads", "--turns", turns={"default": 11})
    options.add_argument("models", nargs="*", default=list(PACKAGED), metavar="MODEL", help="a GGUF, or smollm2 ...")
    options.add_argument("--cold", action="store_true", help="also measure a start that compiles everything")
    options.add_argument(
        "--packages", type=Path, default=Path("packages"), metavar="DIR", help="for what is downloaded"
    )
    arguments = options.parse_args()
    arguments.packages.mkdir(parents=True, exist_ok=True)
    peer = libraries(arguments.packages)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    threads = str(arguments.threads)
    print(f"Machine: {machine()}; {threads} threads; medians of {arguments.turns} turns.\n")
    print(head("model", "llama.cpp, CPU s", "warm, CPU s", "ratio", "cold, CPU s"))
    for model in arguments.models:
        path = packaged_gguf(model, arguments.packages) if model in PACKAGED else Path(model)
        ours = [sys.executable, "-m", "bridge.cli", "run", str(path), "-p", PROMPT, "-n", "1", "--temp", "0"]
        ours += ["--threads", threads]
        theirs = [sys.executable, str(ROOT / "scripts/peers/llama_start.py"), str(peer), str(path), PROMPT, threads]
        cpu_seconds(ours, environment)
        pairs = [(cpu_seconds(theirs, environment), cpu_seconds(ours, environment)) for _ in range(arguments.turns)]
        cold = ""
        if arguments.cold:
            with tempfile.TemporaryDirectory() as empty:
                cold = f"{cpu_seconds(ours, environment | {'XDG_CACHE_HOME': empty}):.2f}"
        medians = [f"{statistics.median(values):.2f}" for values in zip(*pairs, strict=True)]
        line(path.stem, *medians, f"{statistics.median(own / other for other, own in pairs):.2f}", cold)


if __name__ == "__main__":
    main()

"""What the measuring scripts share: their options, the line that describes the machine, other projects' processes.

`python scripts/x.py` puts scripts/ on the path, so scripts import `benchlib`; that puts the checkout on the path too,
for bridge and scripts.peers. Tests import `scripts.benchlib`.

    contenders  programs that make files of one model from the same tokens, and what each costs
    divergence  a float model, its texts, and how far other weights are from it
    drafts      replies with guessed tokens, compared with those without
    formats     one model as a GGUF in every format
    groups      GPTQ and AWQ on groups, compared with llm-compressor
    real_models, real_texts   models and texts from package registries
    token_kl    the divergence of a file token by token, in float32 and in llama.cpp
    speeds      processes of both runtimes that take turns on a file
    viterbi     the search of trellis encoders, which tests use too
"""

import argparse
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# options of several scripts -> what add_argument takes
_COMMON: dict[str, dict[str, Any]] = {
    "model": {"type": Path, "metavar": "MODEL", "help": "a float model's folder"},
    "--calibrate": {"type": Path, "metavar": "FILE", "help": "the text that quantizers see"},
    "--test": {"type": Path, "metavar": "FILE", "help": "the text that is predicted"},
    "--text": {"type": Path, "metavar": "FILE", "help": "the text that is predicted"},
    "--samples": {"type": int, "default": 256, "metavar": "N", "help": "calibration sequences"},
    "--length": {"type": int, "default": 256, "metavar": "N", "help": "tokens in a sequence or window"},
    "--windows": {"type": int, "default": 24, "metavar": "N", "help": "windows of the predicted text"},
    "--threads": {"type": int, "default": 2, "metavar": "N", "help": "threads of every contender"},
    "--rounds": {"type": int, "default": 3, "metavar": "N", "help": "rounds of measurements"},
    "--turns": {"type": int, "default": 3, "metavar": "N", "help": "processes of each side"},
    "--peer-python": {"default": sys.executable, "metavar": "PYTHON", "help": "an interpreter that has llama_cpp"},
    "--json": {"type": Path, "metavar": "FILE", "help": "also write the figures to this file"},
}


def parser(doc: str | None, *names: str, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """A parser described by the first paragraph of a script's docstring.

    names  the common options that the script takes
    more   changes to them, by their names without dashes: `threads={"default": 1}`
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    for name in names:
        settings = _COMMON[name] | more.get(name.lstrip("-").replace("-", "_"), {})
        if settings.get("default") is not None:
            settings["help"] += "; default: %(default)s"
        made.add_argument(name, **settings)
    return made


def machine() -> str:
    """CPU, cores, instructions, system and versions, in one line."""
    from bridge.system import targets
    from bridge.system.cpus import usable_cpus

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = named[0] if named else cpu
    kernel = ".".join(platform.release().split(".")[:2])
    parts = [cpu, f"{usable_cpus()} cores", str(targets.chosen()), f"{platform.system()} {kernel}"]
    parts.append(f"Python {platform.python_version()}")
    return ", ".join(parts + [f"{name} {version(name)}" for name in ("numba", "numpy", "gguf")])


def largest_cache() -> int | None:
    """Bytes of the CPU's largest cache, where Linux tells them."""
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.rstrip("K")) << 10 for size in sizes), default=None)


def head(*columns: str) -> str:
    """The first two lines of a markdown table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def line(*cells: object) -> None:
    """Print a line of a markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def output_of(python: str | Path, *arguments: object, cwd: str | Path = ROOT, env: dict | None = None) -> str:
    """What a Python prints, run to its end; exits with its complaint if it fails."""
    command = [str(argument) for argument in (python, *arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{python} {command[1]}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout

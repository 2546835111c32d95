"""What the measuring scripts share: `bench`, which runs one; contenders that take turns; other projects' processes.

The scripts in speed/, quality/ and check/ run as modules in the checkout's root: `python -m scripts.speed.bench_model`.
`python scripts/gpu_check.py` runs anywhere: it imports `benchlib`, which puts the checkout on the path.

    contenders  programs that make files of one model from the same tokens, and what each costs
    divergence  a float model, its texts, and how far other weights are from it
    drafts      replies with guessed tokens, compared with those without
    formats     one model as a GGUF in every format
    real_models, real_texts   models and texts from package registries
    token_kl    the divergence of a file token by token, in float32 and in llama.cpp
    speeds      processes of both runtimes that take turns on a file
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

Line = str | Sequence[object]  # text, or the cells of a table's row
Lines = Generator[Line, None, Any]
Option = tuple[str, dict[str, Any]]  # what add_argument takes


def option(name: str, value: Any = None, metavar: Any = None, help: str = "", **more: Any) -> Option:
    """An option or a positional argument of a script; what is not given is that of the common option of this name.

    value  the default, whose type the option has: False of a flag, a list of several; or a type, without a default
    more   as add_argument takes it
    """
    settings: dict[str, Any] = {}
    if value is False:
        settings["action"] = "store_true"
    elif callable(value):
        settings["type"] = value
    elif isinstance(value, list | tuple):
        settings |= {"nargs": "+" if name.startswith("-") else "*", "type": type(value[0]) if value else str}
    elif value is not None:
        settings["type"] = type(value)
    if value is not None and not callable(value) and value is not False:
        settings["default"] = value
    settings |= {key: text for key, text in (("metavar", metavar), ("help", help)) if text}
    return name, _COMMON.get(name, {}) | settings | more


_COMMON: dict[str, dict[str, Any]] = {}
_COMMON |= dict([
    option("model", Path, "MODEL", "a float model's folder"),
    option("--calibrate", Path, "FILE", "the text that quantizers see"),
    option("--test", Path, "FILE", "the text that is predicted"),
    option("--text", Path, "FILE", "the text that is predicted"),
    option("--samples", 256, "N", "calibration sequences"),
    option("--length", 256, "N", "tokens in a sequence or window"),
    option("--windows", 24, "N", "windows of the predicted text"),
    option("--threads", 2, "N", "threads of every contender"),
    option("--rounds", 3, "N", "rounds of measurements"),
    option("--turns", 3, "N", "processes of each side"),
    option("--gguf", Path, "FILE", "default: a synthetic 1B GPTQ 4-bit g128, converted"),
    option("--packages", Path("packages"), "DIR", "for what is downloaded"),
    option("--json", Path, "FILE", "also write the figures to this file"),
])  # fmt: skip


def parser(doc: str | None, options: Iterable[str | Option]) -> argparse.ArgumentParser:
    """A parser described by the first paragraph of a script's docstring; common options are given by their names."""
    command = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    for item in options:
        name, settings = option(item) if isinstance(item, str) else item
        default = settings.get("default", "")
        if shown := " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default):
            parts = [settings["help"]] if "help" in settings else []
            settings = settings | {"help": "; ".join([*parts, f"default: {shown}".replace("%", "%%")])}
        command.add_argument(name, **settings)
    return command


def bench(
    doc: str | None, options: Iterable[str | Option], measure: Callable[[argparse.Namespace], Lines],
    columns: Sequence[str] = (), passes_on: bool = False,
) -> None:  # fmt: skip
    """A script's run: its options, the machine, then the table, or several, and text between them.

    measure    yields lines and rows, which are printed as they come; what it returns is written to --json, with
               `provenance`. Its argparse.ArgumentTypeError is one of the command's arguments
    columns    of the first table
    passes_on  whether further arguments, with or without a -- before them, are for another program: `rest`
    """
    command = parser(doc, options)
    arguments, rest = command.parse_known_args()
    arguments.rest = [argument for argument in rest if argument != "--"]
    if rest and not passes_on:
        command.error(f"unrecognized arguments: {' '.join(rest)}")

    def lines() -> Lines:
        threads = vars(arguments).get("threads")
        yield f"Machine: {machine()}{f', {threads} threads' if isinstance(threads, int) else ''}."
        if columns:
            yield head(*columns)
        record = yield from measure(arguments)
        if vars(arguments).get("json"):
            written = json.dumps({**provenance(), **record}, indent=1) + "\n"
            arguments.json.write_text(written, encoding="utf-8")

    try:
        for part in lines():
            print(part if isinstance(part, str) else f"| {' | '.join(map(str, part))} |", flush=True)
    except argparse.ArgumentTypeError as problem:
        command.error(str(problem))


Figures = dict[Any, dict[str, list[float]]]  # contender -> what was measured -> of each turn


def take_turns(contenders: Mapping[Any, Callable[[], Mapping[str, float]]], turns: int) -> Figures:
    """The figures of contenders that take turns."""
    figures: Figures = {name: {} for name in contenders}
    for _ in range(turns):
        for name, run in contenders.items():
            for what, value in run().items():
                figures[name].setdefault(what, []).append(value)
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over turns of one figure over another of the same turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def provenance() -> dict[str, str]:
    """How to make this process's figures again: date, version, machine, and the command without its --json."""
    script = sys.modules["__main__"].__spec__
    started = f"python -m {script.name}" if script else f"python {os.path.relpath(sys.argv[0], ROOT)}"
    arguments = iter(sys.argv[1:])
    shown = []
    for argument in arguments:
        if argument == "--json":
            next(arguments, None)
        elif not argument.startswith("--json="):
            shown.append(argument)
    from bridge import __version__

    command = shlex.join([*started.split(), *shown])
    today = datetime.now(UTC).date().isoformat()
    return {"date": today, "version": __version__, "machine": machine(), "command": command}


def machine() -> str:
    """CPU, cores, instructions, system and versions, in one line."""
    from bridge.system.cpu import targets
    from bridge.system.cpu.cpus import usable_cpus

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
    """The first two lines of a markdown table, after an empty one."""
    return f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def output_of(python: str | Path, *arguments: object, cwd: str | Path = ROOT, env: dict | None = None) -> str:
    """What a Python prints, run to its end; exits with its complaint if it fails."""
    command = [str(argument) for argument in (python, *arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{python} {command[1]}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


# Starts a command and prints what it took. A process counts the pages of the one that started it (exec keeps the peak
# that Linux reports), so a benchmark that holds models must not start it itself.
_MEASURE = """
import json, os, sys, time
begun = time.perf_counter()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, used = os.wait4(pid, 0)
unit = 1 if sys.platform == "darwin" else 1024
cost = {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * unit}
cost["seconds"] = time.perf_counter() - begun
print(json.dumps(cost | {"code": os.waitstatus_to_exitcode(status)}))
"""


def cost_of(command: Sequence[object], log: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """CPU seconds, peak bytes, seconds and exit code of a command that finds our modules; its output goes to a file."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    launcher = [sys.executable, "-I", "-S", "-c", _MEASURE, *map(str, command)]
    with log.open("w", encoding="utf-8") as stream:
        env = {**environment, "PYTHONPATH": path}
        done = subprocess.run(launcher, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stream, text=True)
    if done.returncode:
        sys.exit(f"{command[0]}: cannot be started; see {log}")
    return dict(json.loads(done.stdout))


def synthetic(folder: Path, *shape: object) -> Path:
    """The GGUF of a synthetic checkpoint of 1B, or of another shape, as `make_synthetic` takes it."""
    import bridge

    output_of(sys.executable, "-m", "scripts.make_synthetic", folder / "made", "--vocab", "4096", *shape)
    bridge.convert(folder / "made", folder / "made.gguf")
    return folder / "made.gguf"

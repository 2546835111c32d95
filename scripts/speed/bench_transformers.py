"""Decode speed and memory of one GGUF in transformers alone, with bridge.transformers, and in bridge.Model.

    python -m scripts.speed.bench_transformers --gguf model.gguf --threads 2

Each runs in a process of its own and takes turns with the others, token by token in rounds; the figures are medians of
the rounds' CPU and wall time a token. Memory is resident: the largest until the first round ends, how much that is
over the file's size, and how much there was once all was imported. `--peer none` leaves transformers alone out, which
takes seven times the file's memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bridge.system.cpu.memory import resident
from scripts.benchlib import Lines, bench, option, ratio, take_turns

PROMPT = list(range(5, 13))
TOKENS = 32
WAYS = {"transformers": "transformers alone", "packed": "with bridge.transformers", "model": "bridge.Model"}


OPTIONS = (
    "--threads", "--rounds", option("--gguf", help="the model", required=True),
    option("--peer", "transformers", choices=("transformers", "none")),
)  # fmt: skip
COLUMNS = (
    "", "CPU ms a token", "wall ms a token", "speed over bridge.Model",
    "largest memory, GB", "over the file, GB", "imports, GB",
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    ways = [way for way in WAYS if way != "transformers" or options.peer == "transformers"]
    workers = {way: Worker(way, options.gguf, options.threads) for way in ways}
    first = {way: worker.turn() for way, worker in workers.items()}
    figures = take_turns({way: worker.turn for way, worker in workers.items()}, options.rounds)
    for worker in workers.values():
        worker.process.communicate()
    size = options.gguf.stat().st_size
    for way in ways:
        most, imports = (first[way][kind] for kind in ("memory", "imports"))
        times = [f"{1e3 * median(figures[way][clock]):.1f}" for clock in ("cpu", "wall")]
        speed = f"{ratio(figures['model']['wall'], figures[way]['wall']):.2f}"
        yield WAYS[way], *times, speed, *(f"{nbytes / 1e9:.3f}" for nbytes in (most, most - size, imports))


class Worker:
    """A process that generates in one of WAYS."""

    def __init__(self, way: str, gguf: Path, threads: int) -> None:
        command = [sys.executable, "-m", __spec__.name, "--way", way, str(gguf), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def turn(self) -> dict[str, float]:
        """CPU and wall seconds a token of generating once more, and memory in bytes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))


def serve(way: str, gguf: Path, threads: int) -> None:
    """Time TOKENS more tokens for each line read, and print them as a line of JSON."""
    imports, generate = generator(way, gguf, threads)
    generate(TOKENS)  # compiles and repacks
    for _ in sys.stdin:
        spent = []
        for count in (4, TOKENS + 4):
            start = time.process_time(), time.perf_counter()
            generate(count)
            spent.append((time.process_time() - start[0], time.perf_counter() - start[1]))
        cpu, wall = ((long - short) / TOKENS for short, long in zip(*spent, strict=True))
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"cpu": cpu, "wall": wall, "memory": memory, "imports": imports}), flush=True)


def generator(way: str, gguf: Path, threads: int) -> tuple[int, Any]:
    """Memory after all imports, and a function of a number of tokens that generates as many, greedily."""
    if way == "model":
        import bridge
        from bridge.runtime.decoder import decoder  # noqa: F401

        imports = resident()
        model = bridge.Model.load(gguf, threads=threads, context=4096)
        model.prepare()
        return imports, lambda count: list(model.generate_tokens(PROMPT, count, temperature=0))
    if way == "packed":
        import bridge.transformers
        from bridge.system.threads import pool

        pool.set_num_threads(threads)
    import torch
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    imports = resident()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ids = torch.tensor([PROMPT])
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return imports, lambda count: packed.generate(ids, max_new_tokens=count, **how)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        bench(__doc__, OPTIONS, measure, COLUMNS)

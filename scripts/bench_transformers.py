"""Decode speed and memory of one GGUF in transformers alone, with bridge.transformers, and in bridge.Model.

    python scripts/bench_transformers.py --gguf model.gguf --threads 2

Each runs in a process of its own and takes turns with the others, token by token in rounds; the figures are medians of
the rounds' CPU and wall time a token. Memory is resident: the largest until the first round ends, how much that is
over the file's size, and how much there was once all was imported. `--peer none` leaves transformers alone out, which
takes seven times the file's memory.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchlib import head, line, machine, parser

from bridge.system.free_memory import resident

PROMPT = list(range(5, 13))
TOKENS = 32
WAYS = {"transformers": "transformers alone", "packed": "with bridge.transformers", "model": "bridge.Model"}


def main() -> None:
    options = parse()
    if options.way:
        serve(options.way, options.gguf, options.threads)
        return
    ways = [way for way in WAYS if way != "transformers" or options.peer == "transformers"]
    command = [sys.executable, __file__, "--gguf", str(options.gguf), "--threads", str(options.threads), "--way"]
    workers = {way: subprocess.Popen([*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for way in ways}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds + 1):
        for way, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(b"\n")
            worker.stdin.flush()
            found[way].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    print(f"Machine: {machine()}, {options.threads} threads. {options.gguf.name}, {options.rounds} rounds.\n")
    memory = "largest memory, GB", "over the file, GB", "imports, GB"
    print(head("", "CPU ms a token", "wall ms a token", "speed over bridge.Model", *memory))
    size = options.gguf.stat().st_size
    for way in ways:
        rounds = list(zip(found[way][1:], found["model"][1:], strict=True))
        most, imports = (found[way][0][kind] for kind in ("memory", "imports"))
        line(
            WAYS[way],
            *(f"{1e3 * median(mine[kind] for mine, _ in rounds):.1f}" for kind in ("cpu", "wall")),
            f"{median(model['wall'] / mine['wall'] for mine, model in rounds):.2f}",
            *(f"{nbytes / 1e9:.3f}" for nbytes in (most, most - size, imports)),
        )


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
        from bridge.runtime import decoder  # noqa: F401

        imports = resident()
        model = bridge.Model.load(gguf, threads=threads, context=4096)
        model.prepare()
        return imports, lambda count: list(model.generate_tokens(PROMPT, count, temperature=0))
    if way == "packed":
        import bridge.transformers
        from bridge.system import pool

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


def parse() -> Any:
    options = parser(__doc__, "--threads", "--rounds")
    options.add_argument("--gguf", type=Path, required=True)
    options.add_argument(
        "--peer", choices=("transformers", "none"), default="transformers", help="default: %(default)s"
    )
    options.add_argument("--way", choices=WAYS, help="what a process of the script runs; not given by hand")
    return options.parse_args()


if __name__ == "__main__":
    main()

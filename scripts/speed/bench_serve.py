"""Measure `gguf-bridge serve` under several clients; print tables.

    python -m scripts.speed.bench_serve --gguf model.gguf --threads 2
    python -m scripts.speed.bench_serve                          a synthetic 1B Q4_K, made and removed

A server in a process of its own takes requests of 1, 4 and 8 clients at once, each with a prompt of its own of about 64
tokens, --tokens tokens of reply, with the default sampling and without an end token. The throughput counts all tokens
of the replies over the time from the first request to the last reply. The time to the first token of a cached prefix
is that of a prompt of --prefix tokens that was asked before with another end; a decode step is the mean time between
the tokens of one client. The last table tells what the masks of a JSON schema take of the decode's CPU time, in
process. A machine that does something else meanwhile measures that, too. What llama.cpp makes of several sequences,
bench_model.py --together 8 says: npm has its library for this processor, and no server of that.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from scripts.benchlib import ROOT, Lines, bench, head, option, ratio, synthetic, take_turns

OURS = "import sys; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"
CONTEXT = 2048
WORDS = "the king of a city that nobody had seen for many years went to war with his brother and came home"


OPTIONS = (
    "--threads", "--turns", "--gguf", option("--tokens", 64, "N", "tokens of each reply"),
    option("--prefix", 512, "N", "words of the cached prefix"),
    option("--clients", [1, 4, 8], "N", "numbers of clients"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
        path = options.gguf or synthetic(Path(scratch))
        yield from throughput(path, options)
        yield from masks(path, options.tokens)


@contextmanager
def server(path: Path, threads: int) -> Iterator[str]:
    """The address of a server, while it runs."""
    command = [OURS, "serve", str(path), "--port", "0", "--threads", str(threads), "--context", str(CONTEXT)]
    process = subprocess.Popen([sys.executable, "-c", *command], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        stderr = ""
        for text in process.stderr:
            stderr += text
            if "http://127.0.0.1:" in text:
                break
        else:
            raise SystemExit(f"the server does not start: {stderr[-2000:]}")
        threading.Thread(target=lambda: list(process.stderr or ()), daemon=True).start()
        yield "http://127.0.0.1:" + text.split("http://127.0.0.1:")[1].split("/")[0].split(",")[0].strip()
    finally:
        process.kill()
        process.wait()


def ask(address: str, prompt: str, tokens: int) -> list[float]:
    """A streamed reply: the times of its events, the first that of the request."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "seed": 1, "stream": True, "logit_bias": {"0": -100},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times = [time.perf_counter()]
    with urllib.request.urlopen(request, timeout=600) as answer:
        for text in answer:
            if text.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


def prompt_of(words: int, seed: int) -> str:
    choices = WORDS.split()
    return " ".join(choices[(i * (seed + 3) + i * i + seed) % len(choices)] for i in range(words))


def speed(address: str, clients: int, tokens: int, turn: int) -> float:
    """Tokens a second of all clients together."""
    prompts = [prompt_of(50, 97 * turn + i) for i in range(clients)]
    threads = [threading.Thread(target=ask, args=(address, prompt, tokens)) for prompt in prompts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * tokens / (time.perf_counter() - start)


def throughput(path: Path, options: argparse.Namespace) -> Lines:
    def turns() -> Iterator[dict[str, float]]:
        """The figures of each turn."""
        for turn in count():
            with server(path, options.threads) as address:
                ask(address, prompt_of(50, 10_000 + turn), 4)
                speeds = {str(n): speed(address, n, options.tokens, turn) for n in options.clients}
                prefix = prompt_of(options.prefix, 5)
                ask(address, f"{prefix} Then", 2)
                times = ask(address, f"{prefix} So it was", 32)
            yield speeds | {"first": 1000 * (times[1] - times[0]), "step": 1000 * (times[-1] - times[1]) / 31}

    figures = take_turns({"ours": turns().__next__}, options.turns)["ours"]
    yield head("clients", "tokens/s", "of one client's")
    for clients in options.clients:
        speeds = figures[str(clients)]
        times = ratio(speeds, figures[str(options.clients[0])])
        yield clients, f"{statistics.median(speeds):.1f}", f"{times:.2f}"
    yield head("cached prefix: first token", "decode step", "difference")
    first, step = (statistics.median(figures[what]) for what in ("first", "step"))
    yield f"{first:.1f} ms", f"{step:.1f} ms", f"{first - step:.1f} ms"


def masks(path: Path, tokens: int) -> Lines:
    """CPU time of the masks, of all of a constrained reply."""
    import bridge
    from bridge.runtime import constraint

    spent = 0.0

    def timed(method: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            nonlocal spent
            start = time.thread_time()
            try:
                return method(self, *arguments)
            finally:
                spent += time.thread_time() - start

        return call

    for name in ("allowed", "accept"):
        setattr(constraint.Constraint, name, timed(getattr(constraint.Constraint, name)))
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {
        "type": "integer"}}, "required": ["name", "age"], "additionalProperties": False}, "minItems": 50}  # fmt: skip
    with bridge.Model.load(path, threads=1, context=CONTEXT) as model:
        model.prepare()
        list(model.generate_tokens("People: ", 8, schema=schema, temperature=0))
        spent, start = 0.0, time.thread_time()
        count = len(list(model.generate_tokens("People: ", 4 * tokens, schema=schema, temperature=0)))
        total = time.thread_time() - start
    yield head("tokens", "decode, one thread", "of it masks", "share")
    yield (
        count,
        f"{1e3 * total / count:.2f} ms a token",
        f"{1e6 * spent / count:.0f} us a token",
        f"{spent / total:.1%}",
    )


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

"""Count what of reading a prompt threads share, and what limits its speed-up; print markdown tables.

    python -m scripts.speed.bench_prompt model.gguf --tokens 32 512
    python -m scripts.speed.bench_prompt model.gguf --calls    the time of each function, too

All is measured in one thread, as time of its processor, with the weights repacked: the calls of the tables that threads
share, those that one thread makes while the others wait, and Python before, between and after them. If threads were
free, and as fast as one is, the shared calls would take as many rounds as their items (tokens, row groups) need; that
is the speed-up shown for 2, 16 and 64 of them. It knows nothing of memory and caches, which they share.
"""

import argparse
import ctypes
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridge.runtime.cpu.ops import passes
from bridge.system.threads import pool
from scripts.benchlib import Lines, bench, head, option

OPTIONS = (
    option("--tokens", [32, 512]), option("--rounds", 5),
    option("--calls", False, help="show the time of each function"),
    option("models", Path, "GGUF", "models to read the prompt with", nargs="+"),
)  # fmt: skip
THREADS = 2, 16, 64
ROWS = 16  # of the head that threads share, a group


class Call(NamedTuple):
    """A row of a table: its function's name, its seconds, and how many items threads may share; 1: it is not shared."""

    name: str
    seconds: float
    items: int


def measure(options: argparse.Namespace) -> Lines:
    yield head("model", "tokens", "ms", "shared", "serial", "Python", *(f"{n} threads" for n in THREADS))
    details = []
    for path in options.models:
        for tokens in options.tokens:
            total, calls = prompt(path, tokens, options.rounds)
            serial = sum(call.seconds for call in calls if call.items < 2)
            shared = sum(call.seconds for call in calls) - serial
            python = total - shared - serial
            shares = [f"{part / total:.2%}" for part in (shared, serial, python)]
            limits = [f"{total / (python + sum(map(partial_time(n), calls))):.1f}" for n in THREADS]
            yield path.name, tokens, f"{1e3 * total:.1f}", *shares, *limits
            details.append((path.name, tokens, total, calls))
    if options.calls:
        for name, tokens, total, calls in details:
            yield f"\n{name}, {tokens} tokens:\n"
            yield head("function", "calls", "ms", "share")
            times: defaultdict[str, float] = defaultdict(float)
            for call in calls:
                times[call.name + " (serial)" * (call.items < 2)] += call.seconds
            counts = Counter(call.name + " (serial)" * (call.items < 2) for call in calls)
            for function, seconds in sorted(times.items(), key=lambda item: -item[1]):
                yield function, counts[function], f"{1e3 * seconds:.2f}", f"{seconds / total:.2%}"


def partial_time(threads: int) -> Any:
    """The seconds that a call takes with so many threads."""
    return lambda call: call.seconds * -(-call.items // threads) / call.items


def prompt(path: Path, tokens: int, rounds: int) -> tuple[float, list[Call]]:
    """The seconds of a prompt of so many tokens, and its calls; of the round that took least."""
    import bridge

    with bridge.Model.load(path, threads=1, context=max(512, tokens)) as model:
        model.prepare()
        decoder = model._decoder
        ids = [(i * 7919) % 4000 + 5 for i in range(tokens)]
        decoder.scores(ids, 1)  # compiles
        total, tables = min(timed(lambda: decoder.states(ids, 1)) for _ in range(rounds))
        states = decoder.states(ids, 1)
        last = min(timed(lambda: decoder.logits(states))[0] for _ in range(rounds))
        rows = tables_by_row(lambda: decoder.states(ids, 1))
        machines = [machine for machine in (decoder._prompt, *decoder._steps.values()) if machine is not None]
        functions = [f for machine in machines for f in machine.embedding.functions() + machine.program.functions()]
        names = {function.address: function.name.rpartition(".")[2] for function in functions}
        share = tables / sum(seconds for _, seconds in rows)  # one by one, calls take longer
        calls = [Call(names[int(row[0])], share * seconds, items(row)) for row, seconds in rows]
        return total + last, [*calls, Call("logits", last, decoder.vocab // ROWS)]


def items(row: np.ndarray) -> int:
    """What threads may share of a row of a table: of products, their row groups, whatever ranges one thread has."""
    if not row[pool.SHARED]:
        return 1
    if int(row[0]) != passes.function("several").address:
        return int(row[pool.ITEMS])
    parts, field = int(row[2]), len(passes.Product._fields)
    memory = np.ctypeslib.as_array((ctypes.c_int64 * (parts * field)).from_address(int(row[1])))
    return int(memory.reshape(parts, field)[:, -1].sum())


def timed(work: Any) -> tuple[float, float]:
    """Seconds that some work takes, and of these, those in tables of calls."""
    spent = []
    make_calls = pool.make_calls

    def watched(table: np.ndarray, worth: bool = True) -> None:
        start = time.thread_time()
        make_calls(table, worth)
        spent.append(time.thread_time() - start)

    pool.make_calls = watched
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start, sum(spent)
    finally:
        pool.make_calls = make_calls


def tables_by_row(work: Any) -> list[tuple[np.ndarray, float]]:
    """The rows of the tables of calls that some work makes, and the seconds of each."""
    rows: list[tuple[np.ndarray, float]] = []
    make_calls = pool.make_calls

    def one_by_one(table: np.ndarray, worth: bool = True) -> None:
        for i in range(len(table)):
            start = time.thread_time()
            make_calls(table[i : i + 1], worth)
            rows.append((table[i].copy(), time.thread_time() - start))

    pool.make_calls = one_by_one
    try:
        work()
    finally:
        pool.make_calls = make_calls
    return rows


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

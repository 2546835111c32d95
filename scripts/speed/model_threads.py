"""A model of the pool on many cores: what a token of a real table of calls takes, by the protocol's own source.

    python -m scripts.speed.model_threads gemma3.gguf 8b
    python -m scripts.speed.model_threads 8b --before REVISION     # beside the pool of another revision

The calls are those of `Program` for one token: of a GGUF, or of the shape of Llama 3 8B in Q4_K, whose weights are a
file without contents. Calls that are not shared are run and timed on this machine. For shared ones, every thread runs
the source of threads/jobs.py on the machine of benchlib/many_cores.py, whose assumptions are written there: transfers
are cache lines that came from another core for the protocol, on all threads together.

Without --numa distribute, half of all reads are of the other socket's memory. With it, those of stolen ranges and of
the huge pages that parts of two sockets share are. "from sleep" is the first shared call when all workers sleep.
"""

import argparse
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridge.system.threads import jobs, pool
from scripts.benchlib import Lines, bench, head, option
from scripts.benchlib.many_cores import CORE, LINK, NODE, SOCKET, Machine
from scripts.benchlib.stepped import Step, stepped

ROOT = Path(__file__).parent.parent.parent
OPTIONS = (
    option("models", ["8b"], "MODEL", 'a GGUF, or "8b"'), option("--cores", [16, 64, 128]),
    option("--before", "", "REVISION", "one whose pool is bridge/system/threads/pool.py alone"),
)  # fmt: skip
_PAGE = 1 << 21
_SHAPE = {"embedding_length": 4096, "block_count": 32, "feed_forward_length": 14336, "attention.head_count": 32,
          "attention.head_count_kv": 8, "context_length": 8192}  # fmt: skip


class Call(NamedTuple):
    """A row of a token's table: the ns that it takes in one thread, or the bytes that threads share."""

    name: str
    shared: bool
    alone: float
    sizes: tuple[tuple[int, int], ...]  # row groups and bytes of each matrix
    items: int

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.sizes)


class Pool(NamedTuple):
    """A pool's source: how its threads run, and how it cuts products into units."""

    serve: Callable[[Any, int, int], Step]
    functions: set[str]
    source: str
    pauses: dict[str, int]  # before a thread sleeps, see `simulated`
    bounds: Callable[[Call, int], list[int]]  # of units, in bytes


def calls_of(model: str) -> list[Call]:
    """The calls of one token's table."""
    from bridge.runtime.config.config_reader import read_config
    from bridge.runtime.decoder.decoder import Decoder
    from bridge.runtime.reader import open_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(model)
        if model == "8b":
            path = Path(folder) / "8b.gguf"
            write_8b(path)
        file = open_gguf(path)
        decoder = Decoder(file, read_config(file.metadata, path), 512, "f16", "int8")
        machine = decoder._machine_for([decoder.cache], 1)
        machine.begin([1])
        decoder._positions.reach(1)
        program = decoder._compiled(machine).program
        for (name, _), values in machine._buffers.items():
            values[:] = np.random.default_rng(len(name)).standard_normal(values.shape)
        table = program._made()
        for index, word, make in program._varying:
            table[index, word] = make(1)
        rows = [row for row in program._rows if row[pool.ITEMS]]
        return [described(row, words.tolist()) for row, words in zip(rows, table, strict=True)]


def described(row: list[Any], words: list[int]) -> Call:
    """A row of a table, as `Program` has it and as it is run."""
    import ctypes

    from bridge.runtime.cpu.ops.passes import FIELDS, Product

    name = getattr(row[0], "name", "").rpartition(".")[2]
    shared = bool(words[pool.SHARED])
    table = np.array([words], np.int64)
    alone = 0.0 if shared else min(timed(table) for _ in range(20))
    sizes = []
    if name.startswith("_several"):
        block = np.ctypeslib.as_array((ctypes.c_int64 * (FIELDS * words[2])).from_address(words[1]))
        products = [Product(*map(int, fields)) for fields in block.reshape(-1, FIELDS)]
        sizes = [(p.groups, p.groups * p.stride) for p in products]
    return Call(name, shared, alone, tuple(sizes), words[pool.ITEMS])


def timed(table: np.ndarray) -> float:
    """The ns that a call takes in this thread."""
    start = time.perf_counter_ns()
    pool.function("walk")(0, 1, table.ctypes.data, 1)
    return time.perf_counter_ns() - start


def write_8b(path: Path) -> None:
    """A GGUF of Llama 3 8B's shape in Q4_K, all zeros: a file with a hole."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _SHAPE.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    hidden, inner, total = _SHAPE["embedding_length"], _SHAPE["feed_forward_length"], 0

    def tensor(name: str, rows: int, columns: int = 0) -> None:
        nonlocal total
        kind = gguf.GGMLQuantizationType.Q4_K if columns else gguf.GGMLQuantizationType.F32
        nbytes = rows * columns // 256 * 144 if columns else 4 * rows
        shape = (rows, columns // 256 * 144) if columns else (rows,)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8 if columns else np.float32), nbytes, kind)
        total += -(-nbytes // 32) * 32

    tensor("token_embd", 128256, hidden)
    tensor("output_norm", hidden)
    tensor("output", 128256, hidden)
    for layer in range(_SHAPE["block_count"]):
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{layer}.{name}", hidden)
        for name, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", 1024, hidden), ("attn_v", 1024, hidden),
            ("attn_output", hidden, hidden), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):  # fmt: skip
            tensor(f"blk.{layer}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 + total)


def equal_items(call: Call, threads: int) -> list[int]:
    """The bounds of a call's units in bytes, as `add_products` makes them."""
    from bridge.runtime.cpu.ops.passes import _LEAST

    if not call.nbytes:  # not of products
        return list(range(call.items + 1))
    each = max(1, call.nbytes // (_LEAST * threads))
    return [call.nbytes * unit // (each * threads) for unit in range(each * threads + 1)]


def present() -> Pool:
    source = Path(jobs.__file__).read_text(encoding="utf-8")
    functions = {"_take", "_work", "_rouse", "_wake_next", "_sleep", "_finished", "serve", "run"}
    serve = lambda protocol, thread, threads: protocol.serve(1, thread, threads)  # noqa: E731
    return Pool(serve, functions, source, {"_PAUSES": 1500, "_YIELDS": 200}, equal_items)


def former(revision: str) -> Pool:
    """The pool with one ticket for all threads, and the ranges of products that were made for it."""

    def text(path: str) -> str:
        return subprocess.run(
            ["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    program = stepped(text("bridge/runtime/cpu/ops/program.py"), {}, set())

    def shrinking(call: Call, threads: int) -> list[int]:
        if not call.nbytes:
            return list(range(call.items + 1))
        groups = sum(count for count, _ in call.sizes)
        bounds = program._shrinking(groups, max(1, program._LEAST * groups // call.nbytes), threads)
        return [call.nbytes * bound // groups for bound in bounds]

    serve = lambda protocol, thread, threads: protocol._serve(1, *[0] * 8)  # noqa: E731
    functions = {"_take", "_wake_all", "_serve", "run"}
    source = text("bridge/system/threads/pool.py")
    return Pool(serve, functions, source, {"_SPINS_BEFORE_SLEEP": 1500}, shrinking)


def simulated(how: Pool, call: Call, threads: int, distribute: bool, asleep: bool = False) -> tuple[float, Machine]:
    """ns of a shared call, workers awake or asleep, and the machine that ran it."""
    pauses = 0 if asleep else 1 << 60  # how many there are in the source says nothing of how long they take
    replaced = {f"{name} = {count}": f"{name} = {pauses}" for name, count in how.pauses.items()}
    protocol = stepped(how.source, replaced, how.functions)
    bounds = how.bounds(call, threads)
    sockets = -(-threads // SOCKET)

    def duration(thread: int, first: int, last: int) -> float:
        nbytes = bounds[last] - bounds[first]
        on_socket = min(threads, SOCKET)
        near = min(CORE, NODE / on_socket)
        if sockets == 1:
            return nbytes / near
        if distribute:  # the part's socket has it, but for half of a page for each matrix
            middle = (bounds[first] + bounds[last]) / 2 / bounds[-1]
            far = min(1.0, len(call.sizes) * _PAGE / 2 / bounds[-1])
            if int(middle * sockets) != thread // SOCKET:
                far = 1 - far
        else:
            far = 0.5
        return max(nbytes / near, far * nbytes * on_socket / LINK)

    steps = [protocol.run(1, threads, 0, 0, 0, 0, 0, 0, 0, 0, len(bounds) - 1)]
    steps += (how.serve(protocol, thread, threads) for thread in range(1, threads))
    machine = Machine(steps, duration)
    for thread in range(1, threads):
        machine.start(thread)
    start = machine.run(lambda: False)  # until all of them wait
    machine.transfers.clear()
    machine.start(0)
    return machine.run(lambda: 0 in machine.ended) - start, machine


def token(how: Pool, calls: list[Call], cores: int, distribute: bool) -> tuple[float, Counter[str], int]:
    """ns of a token's shared calls, their transfers, and the ranges that threads took."""
    transfers: Counter[str] = Counter()
    total, ranges = 0.0, 0
    for call, times in Counter(call for call in calls if call.shared).items():
        ns, machine = simulated(how, call, cores, distribute)
        total += times * ns
        ranges += times * machine.ranges
        transfers.update({name: times * count for name, count in machine.transfers.items()})
    return total, transfers, ranges


def measure(options: argparse.Namespace) -> Lines:
    pools = {"now": present()}
    if options.before:
        pools = {options.before: former(options.before), **pools}
    record = {}
    for model in options.models:
        calls = calls_of(model)
        alone = sum(call.alone for call in calls)
        shared = [call for call in calls if call.shared]
        nbytes = sum(call.nbytes for call in shared)
        largest = max(shared, key=lambda call: call.nbytes)
        yield ""
        yield (
            f"{Path(model).name}: {len(calls)} calls, {len(shared)} of them shared, {nbytes / 1e6:.0f} MB; the others "
            f"take {alone / 1e3:.0f} us of one thread: {', '.join(kinds(calls))}"
        )
        yield ""
        yield head(
            "cores", "sockets", "pool", "--numa", "ms a token", "of reading", "ranges", "transfers", "of them to write",
            "us from sleep",
        )  # fmt: skip
        for cores in options.cores:
            sockets = -(-cores // SOCKET)
            ideal = nbytes / min(CORE * cores, NODE * sockets)
            for name, how in pools.items():
                for distribute in [False, True] if sockets > 1 and name == "now" else [False]:
                    ns, transfers, ranges = token(how, calls, cores, distribute)
                    asleep, machine = simulated(how, largest, cores, distribute, asleep=True)
                    record[f"{model} {cores} {name} {distribute}"] = ns + alone
                    written = transfers.total() - transfers["read"]
                    yield (
                        cores, sockets, name, "distribute" if distribute else "", f"{(ns + alone) / 1e6:.2f}",
                        f"{100 * ideal / (ns + alone):.0f}%", ranges, transfers.total(), written,
                        f"{(asleep - simulated(how, largest, cores, distribute)[0]) / 1e3:.0f} ({machine.wakes} wakes)",
                    )  # fmt: skip
    return record


def kinds(calls: list[Call]) -> Iterator[str]:
    """What the calls of one thread are, and how long they take, the longest first."""
    times: dict[str, float] = {}
    for call in calls:
        if not call.shared:
            times[call.name] = times.get(call.name, 0.0) + call.alone
    for name, ns in sorted(times.items(), key=lambda item: -item[1]):
        yield f"{name} {ns / 1e3:.0f}"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

"""Processes of llama.cpp and of our runtime that take turns on the same file."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gguf
import numpy as np

import bridge
from bridge.runtime.bench import random_tensor
from scripts.peers.gguf_file import rewrite

from . import output_of, take_turns

BEGIN = """
import json, os, sys, time
path, threads = sys.argv[1], int(sys.argv[2])
tokens = [(i * 7919) % 4000 for i in range(512)]
"""
# each side: generate(count) yields after every token made from a context of 8; prompt() reads 512; prepare()
OURS = """
import bridge
model = bridge.Model.load(path, threads=threads, context=2048)
model.tokenizer.stops = frozenset()
def generate(count):
    return model.generate_tokens(range(5, 13), count, temperature=0)
def prompt():
    model.logits(tokens, last=1)
prepare = model.prepare
"""
THEIRS = """
import llama_cpp
model = llama_cpp.Llama(path, n_ctx=2048, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
                        verbose=False)
def generate(count):
    model.reset()
    made = list(range(5, 13))
    for _ in range(count):
        model.eval(made)
        made = [int(model.scores[model.n_tokens - 1].argmax())]
        yield
def prompt():
    model.reset()
    model.eval(tokens)
def prepare():
    pass
"""
WHEEL = """
from scripts.peers.llama.llama_cpp import LlamaCpp
model = LlamaCpp(path, n_ctx=2048, n_threads=threads, float_kv=False)
def generate(count):
    made, start = list(range(5, 13)), 0
    for _ in range(count):
        row = model.next_logits(made, start)
        made, start = [int(row.argmax())], start + len(made)
        yield
def prompt():
    model.next_logits(tokens, 0)
def prepare():
    pass
"""
REPORT = """
made = generate(64)
next(made)
first = time.time()
list(made)
last = time.time()
prompt()
start = time.perf_counter()
prompt()
read = 512 / (time.perf_counter() - start)
prepare()
made = generate(65)
next(made)
start = time.perf_counter()
list(made)
decode = 64 / (time.perf_counter() - start)
peak = None
if os.path.exists("/proc/self/status"):
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024
print("RESULT" + json.dumps({"first": first, "last": last, "prompt": read, "decode": decode, "peak": peak}))
"""


def both_sides(peer: str) -> tuple[dict[str, tuple[str, str]], bool]:
    """The Python and the code of each side's process, and whether the peer's Python has llama_cpp."""
    native = subprocess.run([peer, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    sides = {"ours": (sys.executable, OURS), "theirs": (peer, THEIRS) if native else (sys.executable, WHEEL)}
    return {side: (python, BEGIN + code + REPORT) for side, (python, code) in sides.items()}, native


def turn(python: str, code: str, path: Path, threads: int) -> dict[str, float]:
    """What one process measures: tokens a second, seconds from its start to its tokens, and peak bytes."""
    variables = {key: value for key, value in os.environ.items() if key != "BRIDGE_THREADS"}
    begun = time.time()
    figures = json.loads(output_of(python, "-c", code, path, threads, env=variables).partition("RESULT")[2])
    if "first" in figures:
        figures |= {"start": figures["first"] - begun, "end": figures["last"] - begun}
    return dict(figures)


def llama_bench(command: list[str], path: Path, threads: int) -> dict[str, float]:
    """Tokens a second of a prompt of 512 and of 64 generated, by the `llama-bench` of llama.cpp or of a fork."""
    options = "-p", "512", "-n", "64", "-r", "1", "-t", str(threads), "-o", "json"
    rows = json.loads(output_of(*command, "-m", path, *options))
    return {"prompt" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


class Speeds:
    """Both runtimes on the files of the table, or on files of another model with the same types."""

    def __init__(self, work: Path, speed_of: Path | None, python: str, threads: int, turns: int) -> None:
        self._work, self._of, self._threads, self._turns = work, speed_of, threads, turns
        self._sides, native = both_sides(python)
        self.peer = "llama-cpp-python" if native else f"the xllamacpp wheel ({_instructions()})"

    def of_types(self, types: dict[str, str]) -> dict[str, dict[str, float]]:
        """The speeds of the other model in these types (tensor of this model -> type)."""
        file = self._like(types)
        try:
            return self.of_file(file)
        finally:
            file.unlink()

    def of_file(self, file: Path) -> dict[str, dict[str, float]]:
        """The medians of each side: tokens a second, generated and of a prompt, and peak memory in bytes."""
        turn(*self._sides["ours"], file, self._threads)  # compile the kernels, fill the page cache
        runs = {side: partial(turn, *process, file, self._threads) for side, process in self._sides.items()}
        by_side = take_turns(runs, self._turns)
        keys = ("decode", "prompt", "peak")
        return {
            side: {key: statistics.median(value or 0 for value in figures[key]) for key in keys}
            for side, figures in by_side.items()
        }

    def _like(self, types: dict[str, str]) -> Path:
        """A file of the other model in these types; layers correspond by their relative depth."""
        base = self._work / "speed.gguf"
        if not base.exists():
            assert self._of is not None
            bridge.convert(self._of, base)
        count, layers = (
            _layers(list(names)) for names in (types, [t.name for t in gguf.GGUFReader(str(base)).tensors])
        )

        def type_of(tensor: gguf.ReaderTensor) -> str:
            name = re.sub(r"^blk\.(\d+)", lambda m: f"blk.{int(m[1]) * count // layers}", tensor.name)
            return str(types.get(name, tensor.tensor_type.name)) if len(tensor.shape) > 1 else tensor.tensor_type.name

        out = self._work / "like.gguf"
        rewrite(base, out, type_of, _random)
        return out


def _random(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
    """Random blocks of a type in the tensor's shape: speed does not depend on the values."""
    columns, rows = (int(n) for n in tensor.shape)
    if type in ("F16", "F32"):
        values = np.random.default_rng(0).standard_normal((512, columns)) * 0.02
        return np.resize(values.astype({"F16": np.float16, "F32": np.float32}[type]), (rows, columns))
    return random_tensor(type, rows, columns).raw


def _layers(names: list[str]) -> int:
    return 1 + max((int(m[1]) for name in names if (m := re.match(r"blk\.(\d+)\.", name))), default=0)


def _instructions() -> str:
    """The instructions that the wheel was built for: "AVX2"."""
    import xllamacpp

    enabled = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
    return ", ".join(name for name in enabled if name.startswith(("AVX", "AMX", "NEON", "SVE"))) or "no vectors"

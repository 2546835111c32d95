"""Processes of llama.cpp and of our runtime that take turns on the same file."""

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

import bridge
from bridge.runtime.bench import random_tensor
from scripts.peers.gguf_file import rewrite
from scripts.peers.llama import tuned

from . import Figures, output_of, take_turns

# arguments of a process: the file, threads, llama.cpp's libraries, and a Plan
BEGIN = """
import json, os, sys, time
path, threads, libraries = sys.argv[1], int(sys.argv[2]), sys.argv[3]
plan = json.loads(sys.argv[4])
most = max(plan["prompts"] + plan["depths"]) + 128
tokens = [(i * 7919) % 4000 for i in range(most)]
"""
# each side: generate(depth, count) yields after every token made from a context of `depth`; prompt(count) reads so many
OURS = """
import bridge
model = bridge.Model.load(path, threads=threads, context=most)
model.tokenizer.stops = frozenset()
def generate(depth, count):
    return model.generate_tokens(tokens[:depth], count, temperature=0)
def prompt(count):
    model.logits(tokens[:count], last=1)
prepare = model.prepare
"""
THEIRS = """
from pathlib import Path
from scripts.peers.llama.llama_cpp import LlamaCpp
model = LlamaCpp(path, n_ctx=most, n_threads=threads, float_kv=False, n_ubatch=512, libraries=Path(libraries))
def generate(depth, count):
    made, start = tokens[:depth], 0
    for _ in range(count):
        row = model.next_logits(made, start)
        made, start = [int(row.argmax())], start + len(made)
        yield
def prompt(count):
    model.next_logits(tokens[:count], 0)
def prepare():
    pass
"""
REPORT = """
figures = {}
def timed(name, count, call):
    begun, used = time.perf_counter(), time.process_time()
    call()
    figures[name] = count / (time.perf_counter() - begun)
    figures[name + " cpu"] = count / (time.process_time() - used)
list(generate(8, 64))
figures["last"] = time.time()
if os.path.exists("/proc/self/status"):
    with open("/proc/self/status") as status:
        figures["resident"] = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) * 1024
prompt(32)
prepare()
for count in plan["prompts"]:
    timed(f"prompt {count}", count, lambda: prompt(count))
for depth in plan["depths"]:
    made = generate(depth, 65)
    next(made)
    timed(f"decode {depth}", 64, lambda: list(made))
if os.path.exists("/proc/self/status"):
    with open("/proc/self/status") as status:
        figures["peak"] = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
print("RESULT" + json.dumps(figures))
"""
SIDES = {"ours": BEGIN + OURS + REPORT, "theirs": BEGIN + THEIRS + REPORT}

# several sequences at once: speed(count) is the tokens a second of all
OURS_AT_ONCE = """
import bridge
model = bridge.Model.load(path, threads=threads, context=512).prepare()
model.tokenizer.stops = frozenset()
def speed(count):
    model.generate_batch([tokens[i : i + 8] for i in range(count)], 65, seed=1)
    return model.timing.tokens / model.timing.seconds
"""
THEIRS_AT_ONCE = """
from pathlib import Path
from scripts.peers.llama.llama_cpp import LlamaCpp
def speed(count):
    with LlamaCpp(
        path, n_ctx=512 * count, n_threads=threads, float_kv=False, n_seq_max=count, libraries=Path(libraries)
    ) as model:
        for position in range(8):
            drawn = model.step([tokens[i + position] for i in range(count)], position).argmax(1).tolist()
        begun = time.perf_counter()
        for position in range(8, 72):
            drawn = model.step(drawn, position).argmax(1).tolist()
        return 64 * count / (time.perf_counter() - begun)
"""
REPORT_AT_ONCE = """
speed(max(plan["batches"]))
print("RESULT" + json.dumps({f"batch {count}": speed(count) for count in plan["batches"]}))
"""
AT_ONCE = {"ours": BEGIN + OURS_AT_ONCE + REPORT_AT_ONCE, "theirs": BEGIN + THEIRS_AT_ONCE + REPORT_AT_ONCE}


class Plan(NamedTuple):
    """What a process measures.

    prompts  their tokens, read from an empty context
    depths   tokens of a context after which 64 are generated one by one
    batches  sequences that are generated at once, by the code for that
    """

    prompts: tuple[int, ...] = (512,)
    depths: tuple[int, ...] = (8,)
    batches: tuple[int, ...] = ()


USUAL = Plan()


def turn(code: str, path: Path, threads: int, libraries: Path | None = None, plan: Plan = USUAL) -> dict[str, float]:
    """What one process measures.

    "prompt N", "decode N"  tokens a second, and with " cpu" a second of the processor's time
    "batch N"               tokens a second of N sequences at once, by AT_ONCE
    last                    seconds from the process's start to the last of 64 tokens
    resident, peak          bytes of memory after these tokens, and at most
    """
    variables = {key: value for key, value in os.environ.items() if key != "BRIDGE_THREADS"}
    arguments = path, threads, libraries or "", json.dumps(plan._asdict())
    begun = time.time()
    figures = json.loads(output_of(sys.executable, "-c", code, *arguments, env=variables).partition("RESULT")[2])
    return {key: value - begun if key == "last" else value for key, value in figures.items()}


def beside(
    path: Path, libraries: Path, threads: int, turns: int, plan: Plan = USUAL, sides: Mapping[str, str] = SIDES
) -> Figures:
    """What each side's processes measure, in turn."""
    turn(sides["ours"], path, threads, libraries, plan)  # compile what is not compiled yet; fill the page cache
    runs = {side: partial(turn, code, path, threads, libraries, plan) for side, code in sides.items()}
    return take_turns(runs, turns)


class Speeds:
    """Both runtimes on the files of the table, or on files of another model with the same types."""

    def __init__(self, work: Path, speed_of: Path | None, packages: Path, threads: int, turns: int) -> None:
        self._work, self._of, self._threads, self._turns = work, speed_of, threads, turns
        self._libraries = tuned.download(packages)

    def of_types(self, types: dict[str, str]) -> dict[str, dict[str, float]]:
        """The speeds of the other model in these types (tensor of this model -> type)."""
        file = self._like(types)
        try:
            return self.of_file(file)
        finally:
            file.unlink()

    def of_file(self, file: Path) -> dict[str, dict[str, float]]:
        """The medians of each side: tokens a second, generated and of a prompt, and peak memory in bytes."""
        figures = beside(file, self._libraries, self._threads, self._turns)
        keys = {"decode": "decode 8", "prompt": "prompt 512", "peak": "peak"}
        return {
            side: {key: statistics.median(of_side.get(name, [0])) for key, name in keys.items()}
            for side, of_side in figures.items()
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


def in_type(base: Path, type: str) -> Path:
    """A file beside another, of its shapes, with random blocks of one type in all matrices."""
    out = base.with_name(f"{base.stem}-{type}.gguf")
    rewrite(base, out, lambda tensor: type if len(tensor.shape) > 1 else tensor.tensor_type.name, _random)
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

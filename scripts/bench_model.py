"""Measure whole models beside llama.cpp, and print markdown tables with the machine's name.

    python scripts/bench_model.py                            a synthetic 1B Q4_K, made and removed
    python scripts/bench_model.py --gguf model.gguf
    python scripts/bench_model.py --experts                  a synthetic mixture of 64 experts, of which 8 are used
    python scripts/bench_model.py --together                 2, 4 and 8 sequences at once beside one
    python scripts/bench_model.py --conversation             the tokens that a second turn reads
    python scripts/bench_model.py --perplexity CHECKPOINT... --text wiki.txt

The peer is llama-cpp-python (the `peers` extra, built natively); --peer-python names an interpreter that has
it, by default this one. Where it is missing, the llama.cpp of the tests' xllamacpp wheel takes its place, which on x86
is built for AVX2. Ours and theirs take turns, a process a turn, at the same number of threads: what
another tenant of the machine does meets both. Every process loads the file (page cache and compile caches
warm), reads 8 tokens and yields 64 (start to the first and to the last of them, from the start of the
interpreter), then reads 512 tokens from an empty context, then makes 64 one by one after 8, our weights all
repacked. The medians of the turns are shown, and the median of the ratio of a turn of ours to the one of theirs
after it.

--perplexity converts checkpoints and shows, for windows of 256 tokens of which the second halves count, our
perplexity beside llama.cpp's (float32 keys and values; the xllamacpp wheel of the tests) and, with precision
f32, beside transformers' on the dequantized weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_convert import ROOT, machine

OURS = """
import json, os, sys, time
import bridge
path, threads = sys.argv[1], int(sys.argv[2])
model = bridge.Model.load(path, threads=threads, context=2048)
model.tokenizer.stops = frozenset()
made = model.generate_tokens(range(5, 13), 64, temperature=0)
next(made)
first = time.time()
list(made)
last = time.time()
tokens = [(i * 7919) % 4000 for i in range(512)]
def prompt():
    start = time.perf_counter()
    model.logits(tokens, last=1)
    return 512 / (time.perf_counter() - start)
prompt()
read = prompt()
model.prepare()
list(model.generate_tokens(range(5, 13), 65, temperature=0))
made = model.timing.tokens / model.timing.seconds
"""
THEIRS = """
import json, os, sys, time
import llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(path, n_ctx=2048, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
                        verbose=False)
def token():
    return int(model.scores[model.n_tokens - 1].argmax())
model.eval(list(range(5, 13)))
token()
first = time.time()
for _ in range(63):
    model.eval([token()])
token()
last = time.time()
tokens = [(i * 7919) % 4000 for i in range(512)]
def prompt():
    model.reset()
    start = time.perf_counter()
    model.eval(tokens)
    return 512 / (time.perf_counter() - start)
prompt()
read = prompt()
model.reset()
model.eval(list(range(5, 13)))
start = time.perf_counter()
for _ in range(64):
    model.eval([token()])
made = 64 / (time.perf_counter() - start)
"""
WHEEL = """
import json, os, sys, time
from scripts.peers.llama_cpp import LlamaCpp
path, threads = sys.argv[1], int(sys.argv[2])
model = LlamaCpp(path, n_ctx=2048, n_threads=threads, float_kv=False)
def make(count):
    row = model.next_logits(list(range(5, 13)), 0)
    yield
    for n in range(count):
        row = model.next_logits([int(row.argmax())], 8 + n)
    yield
made = make(63)
next(made)
first = time.time()
next(made)
last = time.time()
tokens = [(i * 7919) % 4000 for i in range(512)]
def prompt():
    start = time.perf_counter()
    model.next_logits(tokens, 0)
    return 512 / (time.perf_counter() - start)
prompt()
read = prompt()
made = make(64)
next(made)
start = time.perf_counter()
next(made)
made = 64 / (time.perf_counter() - start)
"""
TOGETHER = """
import json, os, sys
import bridge
path, threads = sys.argv[1], int(sys.argv[2])
model = bridge.Model.load(path, threads=threads, context=512).prepare()
model.tokenizer.stops = frozenset()
def speed(count):
    model.generate_batch([range(5 + i, 13 + i) for i in range(count)], 65, temperature=0)
    return model.timing.tokens / model.timing.seconds
speed(4)
list(model.generate_tokens(range(5, 13), 65, temperature=0))
one = model.timing.tokens / model.timing.seconds
print("RESULT" + json.dumps({"one": one, **{str(n): speed(n) for n in (2, 4, 8)}}))
"""
REPORT = """
peak = None
if os.path.exists("/proc/self/status"):
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024
print("RESULT" + json.dumps({"first": first, "last": last, "prompt": read, "decode": made, "peak": peak}))
"""


def main() -> None:
    options = parse()
    print(f"Machine: {machine()}.\n")
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
        if options.perplexity:
            print_perplexity(options.perplexity, options.text, options.windows, Path(scratch))
            return
        path = options.gguf or synthetic(Path(scratch), options.experts)
        if options.together:
            print_together(path, options.threads, options.turns)
        elif options.conversation:
            print_conversation(path)
        else:
            print_speed(path, options.peer_python, options.threads, options.turns)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: a synthetic 1B GPTQ 4-bit g128, converted")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="one that has llama_cpp")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of each; default: %(default)s")
    parser.add_argument("--experts", action="store_true", help="a synthetic mixture of 64 experts instead")
    parser.add_argument("--together", action="store_true", help="measure several sequences at once instead")
    parser.add_argument("--conversation", action="store_true", help="count what a second turn reads instead")
    parser.add_argument("--perplexity", type=Path, nargs="+", metavar="DIR", help="checkpoints to measure instead")
    parser.add_argument("--text", type=Path, metavar="FILE", help="for --perplexity")
    parser.add_argument("--windows", type=int, default=64, metavar="N", help="for --perplexity; default: %(default)s")
    options = parser.parse_args()
    if options.perplexity and not options.text:
        parser.error("--perplexity needs --text")
    return options


def synthetic(scratch: Path, experts: bool) -> Path:
    """The GGUF of a synthetic 1B checkpoint, or of a mixture of experts, 1.9B."""
    import bridge

    shape = ["--experts", "64", "--layers", "6", "--intermediate", "768"] if experts else []
    command = [sys.executable, str(ROOT / "scripts" / "make_synthetic.py"), str(scratch / "made"), "--vocab", "4096"]
    subprocess.run(command + shape, check=True, stdout=subprocess.DEVNULL)
    bridge.convert(scratch / "made", scratch / "made.gguf")
    return scratch / "made.gguf"


# --- speed, memory, start ---


def both_sides(peer: str) -> tuple[dict[str, tuple[str, str]], bool]:
    """Python and code of a process of each side, and whether the peer's has llama_cpp."""
    native = subprocess.run([peer, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    theirs = (peer, THEIRS + REPORT) if native else (sys.executable, WHEEL + REPORT)
    return {"ours": (sys.executable, OURS + REPORT), "theirs": theirs}, native


def print_speed(path: Path, peer: str, threads: list[int], turns: int) -> None:
    sides, native = both_sides(peer)
    if not native:
        print(f"({peer} has no llama_cpp: the xllamacpp wheel's is the peer)\n", file=sys.stderr)
    turn("ours", *sides["ours"], path, threads[0])  # compile what is not compiled yet; fill the page cache
    print("| what | threads | gguf-bridge | llama.cpp | ratio |\n|---|---|---|---|---|")
    peak = 0
    for count in threads:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, side in sides.items():
                found[name].append(turn(name, *side, path, count))
        peak = max([peak, *(int(r["peak"] or 0) for r in found["ours"])])
        for what, key, unit in (
            ("decode, 64 tokens", "decode", "tokens/s"),
            ("prompt, 512 tokens", "prompt", "tokens/s"),
            ("start to first token", "start", "s"),
            ("start to 64th token", "end", "s"),
        ):
            own, other = ([r[key] for r in found[side]] for side in ("ours", "theirs"))
            ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
            medians = [f"{statistics.median(values):.2f} {unit}" for values in (own, other)]
            print(f"| {what} | {count} | {' | '.join(medians)} | {ratio:.2f} |", flush=True)
    print_memory(path, peak)


def print_together(path: Path, threads: list[int], turns: int) -> None:
    """Tokens a second of all sequences together; the ratio to one is the median of the turns'."""
    turn("ours", sys.executable, TOGETHER, path, threads[0])
    print("| threads | one | 2 sequences | ratio | 4 sequences | ratio | 8 sequences | ratio |\n|" + "---|" * 8)
    for count in threads:
        found = [turn("ours", sys.executable, TOGETHER, path, count) for _ in range(turns)]
        cells = [f"{count} | {statistics.median(r['one'] for r in found):.2f} tokens/s"]
        for n in ("2", "4", "8"):
            ratio = statistics.median(r[n] / r["one"] for r in found)
            cells.append(f"{statistics.median(r[n] for r in found):.2f} | {ratio:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def print_conversation(path: Path) -> None:
    """A first turn of 1,500 tokens, a reply of 64, 32 more: what of it the second turn reads."""
    import bridge

    model = bridge.Model.load(path, context=2048)
    model.tokenizer.stops = frozenset()
    first = [(i * 7919) % 4000 for i in range(1500)]
    reply = list(model.generate_tokens(first, 64, temperature=0))
    t = model.timing
    print(f"first turn: {t.prompt_tokens} tokens, {t.prompt_seconds:.2f} s to the first of the reply", flush=True)
    list(model.generate_tokens(first + reply + list(range(32)), 1, temperature=0))
    t = model.timing
    read = t.prompt_tokens - t.kept_tokens
    print(f"second turn: {t.prompt_tokens} tokens, {read} of them read, {t.prompt_seconds:.2f} s")


def turn(name: str, python: str, code: str, path: Path, threads: int) -> dict[str, float]:
    """One process to its end."""
    variables = {key: value for key, value in os.environ.items() if key != "BRIDGE_THREADS"}
    begun = time.time()
    done = subprocess.run(
        [python, "-c", code, str(path), str(threads)], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.partition("RESULT")[2])
    if "first" in found:
        found |= {"start": found["first"] - begun, "end": found["last"] - begun}
    return dict(found)


def print_memory(path: Path, peak: int) -> None:
    """The peak of our processes beside what it may be: file, keys and values of 2048 tokens, and 300 MB."""
    if not peak:
        return
    import bridge
    from bridge.runtime.decoder_config import read_config
    from bridge.runtime.kv_cache import KVCache

    with bridge.open_gguf(path) as file:
        cache = KVCache(read_config(file.metadata, path), 2048).nbytes
    size = path.stat().st_size
    print(f"\nPeak memory {peak / 1e6:.0f} MB: the file's {size / 1e6:.0f} MB, {cache / 1e6:.0f} MB of keys and values "
          f"for 2048 tokens, and {(peak - size - cache) / 1e6:.0f} MB (numpy and numba among them).")  # fmt: skip


# --- perplexity ---


def print_perplexity(checkpoints: list[Path], text_file: Path, count: int, scratch: Path) -> None:
    sys.path.insert(0, str(ROOT))
    import bridge
    from bridge.runtime.perplexity import perplexity

    text = text_file.read_text(encoding="utf-8")
    print(f"{count} windows of 256 tokens of {text_file.name}.\n")
    print("| checkpoint | int8 | llama.cpp | difference | f32 | transformers | difference |\n|" + "---|" * 7)
    for folder in checkpoints:
        path = scratch / f"{folder.name}.gguf"
        bridge.convert(folder, path)
        with bridge.Model.load(path) as model:
            own = perplexity(model, text, n_windows=count).perplexity
        with bridge.Model.load(path, precision="f32") as model:
            exact = perplexity(model, text, n_windows=count).perplexity
            peer, floats = peers_perplexity(path, folder, model, text, count)
        print(
            f"| {folder.name} | {own:.4f} | {peer:.4f} | {own / peer - 1:+.3%} | {exact:.4f} | {floats:.4f} | "
            f"{exact / floats - 1:+.4%} |",
            flush=True,
        )
        path.unlink()


def peers_perplexity(path: Path, folder: Path, model: Any, text: str, count: int) -> tuple[float, float]:
    """llama.cpp's and transformers' on the same windows."""
    import numpy as np

    from bridge.runtime.perplexity import cut_windows
    from bridge.system.cpus import usable_cpus
    from scripts.peers.gguf_file import gguf_weights
    from scripts.peers.llama_cpp import LlamaCpp
    from scripts.peers.reference import hf_model, log_softmax, logits

    windows = cut_windows(model, text, 256, count)
    hugging_face = hf_model(folder, gguf_weights(path))

    def measure(predict: Any) -> float:
        losses = []
        for window in windows:
            scores = log_softmax(predict(window)[128:255])
            losses.append(-scores[np.arange(127), window[129:]])
        return math.exp(np.concatenate(losses).mean())

    with LlamaCpp(path, n_ctx=256, n_threads=usable_cpus()) as other:
        theirs = measure(other.logits)
    return theirs, measure(lambda window: logits(hugging_face, np.array([window]))[0])


if __name__ == "__main__":
    main()

"""Compare whole models in this runtime with llama.cpp; print markdown tables.

    python -m scripts.speed.bench_model                            a synthetic 1B Q4_K, made and removed
    python -m scripts.speed.bench_model --gguf model.gguf
    python -m scripts.speed.bench_model --experts    a synthetic mixture of 64 experts, 8 of them used
    python -m scripts.speed.bench_model --together    2, 4 and 8 sequences at once, compared with one
    python -m scripts.speed.bench_model --draft    replies with guessed tokens, compared with those without
    python -m scripts.speed.bench_model --conversation    the tokens that a second turn reads
    python -m scripts.speed.bench_model --perplexity CHECKPOINT... --text wiki.txt

The peer is llama-cpp-python (the `peers` extra, built natively); --peer-python names an interpreter that has
it, by default this one. Where it is missing, the llama.cpp of the tests' xllamacpp wheel takes its place, which on x86
is built for AVX2. --peer-bench "llama-bench OPTIONS" takes the llama-bench of a fork instead, and compares the prompt
and the tokens alone. Ours and theirs take turns, one process per turn, with the same number of threads, so that other
load on the machine affects both. Every process loads the file (page cache and compile caches warm), reads 8 tokens
and generates 64 (the times to the first and to the last of them count from the start of the interpreter), then reads
512 tokens from an empty context, then generates 64 one by one after 8, with our weights all repacked. The tables show
the medians of the turns, and the median ratio of a turn of ours to the following turn of theirs.

--perplexity converts checkpoints and shows, over the second halves of windows of 256 tokens, our perplexity compared
with llama.cpp's (float32 keys and values; the xllamacpp wheel of the tests) and, with precision f32, with that of
transformers on the dequantized weights.
"""

import argparse
import math
import shlex
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchlib import Lines, bench, head, option, ratio, synthetic, take_turns
from scripts.benchlib.drafts import drafts
from scripts.benchlib.speeds import BEGIN, both_sides, llama_bench, turn

TOGETHER = """
import bridge
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


OPTIONS = (
    "--peer-python", option("--threads", [1, 2]), "--turns", "--rounds", "--text", option("--windows", 64), "--gguf",
    option("--peer-bench", "", "COMMAND", "the llama-bench of a fork of llama.cpp"),
    option("--experts", False, help="use a synthetic mixture of 64 experts"),
    option("--together", False, help="measure several sequences at once"),
    option(
        "--draft", nargs="?", const="ngram", choices=("ngram", "mtp"),
        help="measure guessed tokens (default: ngram); with --text, on what the model replies to pieces of it",
    ),
    option("--conversation", False, help="count the tokens that a second turn reads"),
    option("--perplexity", Path, "DIR", "measure perplexity of checkpoints", nargs="+"),
)  # fmt: skip
EXPERTS = "--experts", 64, "--layers", 6, "--intermediate", 768  # 1.9B


def measure(options: argparse.Namespace) -> Lines:
    if options.perplexity and not options.text:
        raise argparse.ArgumentTypeError("--perplexity needs --text")
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
        if options.perplexity:
            yield from perplexities(options.perplexity, options.text, options.windows, Path(scratch))
            return
        path = options.gguf or synthetic(Path(scratch), *(EXPERTS if options.experts else ()))
        if options.together:
            yield from together(path, options.threads, options.turns)
        elif options.draft:
            yield from drafts(path, options.draft, options.text, options.threads, options.rounds)
        elif options.conversation:
            yield from conversation(path)
        else:
            peer_bench = shlex.split(options.peer_bench)
            yield from speeds(path, options.peer_python, peer_bench, options.threads, options.turns)


# --- speed, memory, start ---


def speeds(path: Path, peer: str, peer_bench: list[str], threads: list[int], turns: int) -> Lines:
    sides, native = both_sides(peer)
    if not native and not peer_bench:
        print(f"({peer} has no llama_cpp: the xllamacpp wheel's is the peer)\n", file=sys.stderr)
    turn(*sides["ours"], path, threads[0])  # compile what is not compiled yet; fill the page cache
    yield head("what", "threads", "gguf-bridge", Path(peer_bench[0]).name if peer_bench else "llama.cpp", "ratio")
    peak = 0.0
    for count in threads:
        runs = {side: partial(turn, *process, path, count) for side, process in sides.items()}
        if peer_bench:
            runs["theirs"] = partial(llama_bench, peer_bench, path, count)
        ours, theirs = take_turns(runs, turns).values()
        peak = max([peak, *(size or 0 for size in ours["peak"])])
        for what, key, unit in (
            ("decode, 64 tokens", "decode", "tokens/s"),
            ("prompt, 512 tokens", "prompt", "tokens/s"),
            ("start to first token", "start", "s"),
            ("start to 64th token", "end", "s"),
        ):
            if key in theirs:
                medians = [f"{statistics.median(side[key]):.2f} {unit}" for side in (ours, theirs)]
                yield what, count, *medians, f"{ratio(ours[key], theirs[key]):.2f}"
    if peak:
        yield memory(path, peak)


def together(path: Path, threads: list[int], turns: int) -> Lines:
    """Tokens a second of all sequences together; the ratio to one is the median of the turns'."""
    turn(sys.executable, BEGIN + TOGETHER, path, threads[0])
    yield head("threads", "one", *(cell for n in (2, 4, 8) for cell in (f"{n} sequences", "ratio")))
    for count in threads:
        run = partial(turn, sys.executable, BEGIN + TOGETHER, path, count)
        figures = take_turns({"ours": run}, turns)["ours"]
        cells = [f"{statistics.median(figures['one']):.2f} tokens/s"]
        for n in ("2", "4", "8"):
            cells += [f"{statistics.median(figures[n]):.2f}", f"{ratio(figures[n], figures['one']):.2f}"]
        yield count, *cells


def conversation(path: Path) -> Lines:
    """A first turn of 1,500 tokens, a reply of 64, then 32 more: how many of them the second turn reads."""
    import bridge

    model = bridge.Model.load(path, context=2048)
    model.tokenizer.stops = frozenset()
    first = [(i * 7919) % 4000 for i in range(1500)]
    reply = list(model.generate_tokens(first, 64, temperature=0))
    t = model.timing
    yield f"first turn: {t.prompt_tokens} tokens, {t.prompt_seconds:.2f} s to the first of the reply"
    list(model.generate_tokens(first + reply + list(range(32)), 1, temperature=0))
    t = model.timing
    read = t.prompt_tokens - t.kept_tokens
    yield f"second turn: {t.prompt_tokens} tokens, {read} of them read, {t.prompt_seconds:.2f} s"


def memory(path: Path, peak: float) -> str:
    """The peak of our processes, compared with its limit: file, keys and values of 2048 tokens, and 300 MB."""
    import bridge
    from bridge.runtime.config.config_reader import read_config
    from bridge.runtime.layers.kv_cache import KVCache

    with bridge.open_gguf(path) as file:
        cache = KVCache(read_config(file.metadata, path), 2048).nbytes
    size = path.stat().st_size
    return (
        f"\nPeak memory {peak / 1e6:.0f} MB: the file's {size / 1e6:.0f} MB, {cache / 1e6:.0f} MB of keys and values "
        f"for 2048 tokens, and {(peak - size - cache) / 1e6:.0f} MB (numpy and numba among them)."
    )


# --- perplexity ---


def perplexities(checkpoints: list[Path], text_file: Path, count: int, scratch: Path) -> Lines:
    import bridge
    from bridge.runtime.replies.perplexity import perplexity

    text = text_file.read_text(encoding="utf-8")
    yield f"{count} windows of 256 tokens of {text_file.name}."
    yield head("checkpoint", "int8", "llama.cpp", "difference", "f32", "transformers", "difference")
    for folder in checkpoints:
        path = scratch / f"{folder.name}.gguf"
        bridge.convert(folder, path)
        with bridge.Model.load(path) as model:
            int8 = perplexity(model, text, n_windows=count).perplexity
        with bridge.Model.load(path, precision="f32") as model:
            exact = perplexity(model, text, n_windows=count).perplexity
            peer, floats = peers_perplexity(path, folder, model, text, count)
        cells = [f"{int8:.4f}", f"{peer:.4f}", f"{int8 / peer - 1:+.3%}", f"{exact:.4f}", f"{floats:.4f}"]
        yield folder.name, *cells, f"{exact / floats - 1:+.4%}"
        path.unlink()


def peers_perplexity(path: Path, folder: Path, model: Any, text: str, count: int) -> tuple[float, float]:
    """The perplexities of llama.cpp and of transformers on the same windows."""
    import numpy as np

    from bridge.runtime.replies.perplexity import cut_windows
    from bridge.system.cpu.cpus import usable_cpus
    from scripts.peers.gguf_file import gguf_weights
    from scripts.peers.llama.llama_cpp import LlamaCpp
    from scripts.peers.predictions import log_softmax
    from scripts.peers.reference import hf_model, logits

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
    bench(__doc__, OPTIONS, measure)

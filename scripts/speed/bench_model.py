"""Compare whole models in this runtime with llama.cpp; print markdown tables.

    python -m scripts.speed.bench_model smollm2 gemma3-270m    what package registries carry, see benchlib
    python -m scripts.speed.bench_model model.gguf --prompts 512 2048 8192 --depths 8 8192
    python -m scripts.speed.bench_model                            a synthetic 1B Q4_K, made and removed
    python -m scripts.speed.bench_model --types Q4_K IQ3_XXS    its shapes, with random blocks of these types
    python -m scripts.speed.bench_model --experts    a synthetic mixture of 64 experts, 8 of them used
    python -m scripts.speed.bench_model --together    1, 2, 4 and 8 sequences at once
    python -m scripts.speed.bench_model --draft    replies with guessed tokens, compared with those without
    python -m scripts.speed.bench_model --conversation    the tokens that a second turn reads
    python -m scripts.speed.bench_model --perplexity CHECKPOINT... --text wiki.txt

The peer is llama.cpp as npm distributes it, built for this processor (scripts/peers/llama/tuned.py), with its defaults:
keys and values in halves, flash attention, 512 tokens of a prompt at a time. Ours and theirs take turns, one process
per turn, with the same number of threads, so that other load on the machine affects both. Every process loads the file
(page cache and compile caches warm), reads 8 tokens and generates 64 (the times to the first and to the last of them
count from the start of the interpreter), then reads prompts of --prompts tokens from an empty context, then generates
64 one by one after --depths tokens, with our weights all repacked. The tables show the medians of the turns, and the
median ratio of a turn of ours to the following turn of theirs: by the clock, and by the processor's time.

--perplexity converts checkpoints and shows, over the second halves of windows of 256 tokens, our perplexity compared
with llama.cpp's (float32 keys and values; the xllamacpp wheel of the tests) and, with precision f32, with that of
transformers on the dequantized weights.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchlib import Lines, bench, head, option, ratio, synthetic, take_turns
from scripts.benchlib.drafts import drafts
from scripts.benchlib.real_models import model_path
from scripts.benchlib.speeds import BEGIN, Plan, beside, in_type, turn
from scripts.peers.llama import tuned

OURS_TOGETHER = """
import bridge
model = bridge.Model.load(path, threads=threads, context=512).prepare()
model.tokenizer.stops = frozenset()
def speed(count):
    model.generate_batch([tokens[i : i + 8] for i in range(count)], 65, seed=1)
    return model.timing.tokens / model.timing.seconds
"""
THEIRS_TOGETHER = """
from pathlib import Path
from scripts.peers.llama.llama_cpp import LlamaCpp
def speed(count):
    with LlamaCpp(
        path, n_ctx=512 * count, n_threads=threads, float_kv=False, n_seq_max=count, libraries=Path(libraries)
    ) as model:
        for position in range(8):
            made = model.step([tokens[i + position] for i in range(count)], position).argmax(1).tolist()
        begun = time.perf_counter()
        for position in range(8, 72):
            made = model.step(made, position).argmax(1).tolist()
        return 64 * count / (time.perf_counter() - begun)
"""
BATCHES = """
speed(8)
print("RESULT" + json.dumps({str(count): speed(count) for count in (1, 2, 4, 8)}))
"""


OPTIONS = (
    option("models", str, "MODEL", "a GGUF, smollm2 or gemma3-270m; default: a synthetic 1B", nargs="*"),
    option("--threads", [1, 2]), "--turns", "--rounds", "--text", option("--windows", 64), "--packages",
    option("--prompts", [512, 2048], "N", "tokens of prompts"),
    option("--depths", [8], "N", "tokens of contexts after which 64 are generated"),
    option("--types", str, "TYPE", "instead of the model's own types", nargs="+", default=[]),
    option("--experts", False, help="use a synthetic mixture of 64 experts"),
    option("--together", False, help="measure several sequences at once, llama.cpp's greedily"),
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
        paths = [model_path(model, options.packages) for model in options.models]
        paths = paths or [synthetic(Path(scratch), *(EXPERTS if options.experts else ()))]
        if options.together:
            yield from together(paths, tuned.download(options.packages), options.threads, options.turns)
        elif options.draft:
            for path in paths:
                yield from drafts(path, options.draft, options.text, options.threads, options.rounds)
        elif options.conversation:
            for path in paths:
                yield from conversation(path)
        else:
            libraries = tuned.download(options.packages)
            yield f"llama.cpp: {tuned.build(libraries)}, as npm distributes it. Medians of {options.turns} turns."
            plan = Plan(tuple(options.prompts), tuple(options.depths))
            files = (in_type(path, type) for path in paths for type in options.types) if options.types else paths
            yield from speeds(files, libraries, options.threads, options.turns, plan)


# --- speed, memory, start ---


def speeds(paths: Iterable[Path], libraries: Path, threads: list[int], turns: int, plan: Plan) -> Lines:
    yield head("model", "threads", "what", "gguf-bridge", "llama.cpp", "ratio", "ratio, CPU time")
    for path in paths:
        for count in threads:
            ours, theirs = beside(path, libraries, count, turns, plan).values()
            for name in (*(f"decode {depth}" for depth in plan.depths), *(f"prompt {n}" for n in plan.prompts)):
                medians = [f"{statistics.median(side[name]):.4g} tokens/s" for side in (ours, theirs)]
                ratios = [f"{ratio(ours[key], theirs[key]):.2f}" for key in (name, f"{name} cpu")]
                yield path.stem, count, what(name), *medians, *ratios
            for name, meaning in (("first", "start to first token"), ("last", "start to 64th token")):
                medians = [f"{statistics.median(side[name]):.2f} s" for side in (ours, theirs)]
                yield path.stem, count, meaning, *medians, f"{ratio(ours[name], theirs[name]):.2f}", ""
            for name, meaning in (("resident", "memory after 64 tokens"), ("peak", "peak memory")):
                if name in ours:
                    medians = [f"{statistics.median(side[name]) / 1e6:.0f} MB" for side in (ours, theirs)]
                    yield path.stem, count, meaning, *medians, f"{ratio(ours[name], theirs[name]):.2f}", ""


def what(name: str) -> str:
    """Of a figure's name, "decode 8192", what a table calls it."""
    kind, _, count = name.partition(" ")
    return f"prompt, {count} tokens" if kind == "prompt" else f"decode after {count} tokens"


def together(paths: list[Path], libraries: Path, threads: list[int], turns: int) -> Lines:
    """Tokens a second of all sequences together; the ratio to one is the median of the turns'."""
    sides = {"gguf-bridge": BEGIN + OURS_TOGETHER + BATCHES, "llama.cpp": BEGIN + THEIRS_TOGETHER + BATCHES}
    many = [cell for n in (2, 4, 8) for cell in (f"{n} sequences", "ratio")]
    yield head("model", "threads", "", "one", *many, "8 beside llama.cpp's")
    for path in paths:
        turn(sides["gguf-bridge"], path, threads[0])
        for count in threads:
            runs = {side: partial(turn, code, path, count, libraries) for side, code in sides.items()}
            figures = take_turns(runs, turns)
            for side, of_side in figures.items():
                cells = [f"{statistics.median(of_side['1']):.4g} tokens/s"]
                for n in ("2", "4", "8"):
                    cells += [f"{statistics.median(of_side[n]):.4g}", f"{ratio(of_side[n], of_side['1']):.2f}"]
                yield path.stem, count, side, *cells, f"{ratio(of_side['8'], figures['llama.cpp']['8']):.2f}"


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

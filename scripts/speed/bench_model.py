"""Compare whole models in this runtime with llama.cpp; print markdown tables.

    python -m scripts.speed.bench_model smollm2 gemma3-270m    what package registries carry, see benchlib
    python -m scripts.speed.bench_model model.gguf --prompts 512 2048 8192 --depths 8 8192
    python -m scripts.speed.bench_model                            a synthetic 1B Q4_K, made and removed
    python -m scripts.speed.bench_model --types Q4_K IQ3_XXS    its shapes, with random blocks of these types
    python -m scripts.speed.bench_model --experts    a synthetic mixture of 64 experts, 8 of them used
    python -m scripts.speed.bench_model smollm2 --together 1 8    also 1 and 8 sequences at once
    python -m scripts.speed.bench_model smollm2 --start    also the start to the first token, as bench_start does
    python -m scripts.speed.bench_model --draft    replies with guessed tokens, compared with those without
    python -m scripts.speed.bench_model --conversation    the tokens that a second turn reads
    python -m scripts.speed.bench_model --perplexity CHECKPOINT... --text wiki.txt

The peer is llama.cpp as npm distributes it, built for this processor (scripts/peers/llama/tuned.py), with its defaults:
keys and values in halves, flash attention, 512 tokens of a prompt at a time. Ours and theirs take turns, one process
per turn, with the same number of threads, so that other load on the machine affects both. Every process loads the file
(page cache and compile caches warm), reads 8 tokens and generates 64 (the time to the last of them counts from the
start of the interpreter), then reads prompts of --prompts tokens from an empty context, then generates 64 one by one
after --depths tokens, with our weights all repacked. Sequences at once (--together) begin with 8 tokens each and are
generated in other processes; ours are drawn with the default settings. The table shows the medians of the turns, and
the median ratio of a turn of ours to the following turn of theirs: by the clock, and by the processor's time. --json
writes the same rows; `python -m scripts.tables.guide_tables` prints those of the README.

--perplexity converts checkpoints and shows, over the second halves of windows of 256 tokens, our perplexity compared
with llama.cpp's (float32 keys and values; the xllamacpp wheel of the tests) and, with precision f32, with that of
transformers on the dequantized weights.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.benchlib import Figures, Line, Lines, bench, head, option, ratio, synthetic
from scripts.benchlib.drafts import drafts
from scripts.benchlib.real_models import model_path
from scripts.benchlib.speeds import AT_ONCE, Plan, beside, in_type
from scripts.peers.llama import tuned
from scripts.speed.bench_start import Starts

SETTINGS = "its defaults: keys and values in f16, flash attention, 512 tokens of a prompt at a time; greedy tokens"
OPTIONS = (
    option("models", str, "MODEL", "a GGUF, smollm2 or gemma3-270m; default: a synthetic 1B", nargs="*"),
    option("--threads", [1, 2]), "--turns", "--rounds", "--text", option("--windows", 64), "--packages", "--json",
    option("--prompts", [512, 2048], "N", "tokens of prompts"),
    option("--depths", [8], "N", "tokens of contexts after which 64 are generated"),
    option("--types", str, "TYPE", "instead of the model's own types", nargs="+", default=[]),
    option("--experts", False, help="use a synthetic mixture of 64 experts"),
    option("--together", int, "N", "also measure N sequences at once", nargs="+", default=[]),
    option("--start", False, help="also measure the start to the first token"),
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
    if options.json and (options.perplexity or options.draft or options.conversation):
        raise argparse.ArgumentTypeError("--json is for speeds, not for --perplexity, --draft or --conversation")
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
        if options.perplexity:
            yield from perplexities(options.perplexity, options.text, options.windows, Path(scratch))
            return None
        paths = [model_path(model, options.packages) for model in options.models]
        paths = paths or [synthetic(Path(scratch), *(EXPERTS if options.experts else ()))]
        if options.draft:
            for path in paths:
                yield from drafts(path, options.draft, options.text, options.threads, options.rounds)
        elif options.conversation:
            for path in paths:
                yield from conversation(path)
        else:
            files = (in_type(path, type) for path in paths for type in options.types) if options.types else paths
            return (yield from speeds(files, options))
    return None


# --- speed, memory, start ---


def speeds(paths: Iterable[Path], options: argparse.Namespace) -> Generator[Line, None, dict[str, Any]]:
    """The table's lines, and the record for --json."""
    libraries = tuned.download(options.packages)
    peer = {"name": f"llama.cpp of npm's node-llama-cpp {tuned.VERSION}", "build": tuned.build(libraries)}
    yield f"{peer['name']}, build {peer['build']}. Medians of {options.turns} turns."
    yield head("model", "threads", "what", "gguf-bridge", "llama.cpp", "ratio", "ratio, CPU time")
    rows = []
    for path in paths:
        for threads in options.threads:
            for row in compared(path, libraries, threads, options):
                rows.append({"model": path.stem, "threads": threads, **row})
                values = [f"{row[side]:{PRECISION[row['unit']]}} {row['unit']}" for side in ("ours", "theirs")]
                ratios = [f"{row[name]:.2f}" if name in row else "" for name in ("ratio", "ratio_cpu")]
                yield path.stem, threads, row["what"], *values, *ratios
    return {"peer": {**peer, "settings": SETTINGS}, "turns": options.turns, "rows": rows}


PRECISION = {"tokens/s": ".4g", "s": ".2f", "MB": ".0f"}


def compared(path: Path, libraries: Path, threads: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What both sides measure on a file: see `in_turns`."""
    plan = Plan(tuple(options.prompts), tuple(options.depths), tuple(options.together))
    figures = beside(path, libraries, threads, options.turns, plan)
    for depth in plan.depths:
        yield in_turns(figures, f"decode {depth}", f"decode after {depth} tokens")
    for count in plan.prompts:
        yield in_turns(figures, f"prompt {count}", f"prompt, {count} tokens")
    if plan.batches:
        at_once = beside(path, libraries, threads, options.turns, plan, AT_ONCE)
        for count in plan.batches:
            yield in_turns(at_once, f"batch {count}", f"{count} sequences at once")
    if options.start:
        starts = Starts(path, libraries, threads, options.packages / "start.log").warm(options.turns)
        yield in_turns(starts, "start", "start to first token", "s")
    yield in_turns(figures, "last", "start to 64th token", "s")
    for name, what in (("resident", "memory after 64 tokens"), ("peak", "peak memory")):
        if name in figures["ours"]:
            yield in_turns(figures, name, what, "MB", 1e6)


def in_turns(figures: Figures, name: str, what: str, unit: str = "tokens/s", one: float = 1) -> dict[str, Any]:
    """The medians of both sides; the median of the turns' ratios, and of those of the processor's time where known."""
    ours, theirs = figures["ours"], figures["theirs"]
    row = {"what": what, "unit": unit, "ours": statistics.median(ours[name]) / one}
    row |= {"theirs": statistics.median(theirs[name]) / one, "ratio": ratio(ours[name], theirs[name])}
    cpu = f"{name} cpu"
    return row | ({"ratio_cpu": ratio(ours[cpu], theirs[cpu])} if cpu in ours else {})


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

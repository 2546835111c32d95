"""Correctness of whole models: CUDA's logits against the CPU's, captured steps against single launches, and
overlapping launches against launches one after the other."""

import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from gpu_checks import runner
from gpu_checks.products import difference

CHECKPOINT = Path(__file__).resolve().parents[2] / "tests" / "data" / "qwen3-gptq-4bit-g128-sym"
CONTEXT = 512
PROMPTS = (200, 5, 1)  # tokens
STEPPED = 50  # tokens one by one, after a prompt
TOGETHER = 4, 2, 3, 1  # tokens of a step
OTHERS = 40  # tokens of a prompt of other models
MADE = 300
_OTHER_SUMS = "tokens of one step have other sums than each alone"
LIMITS = {"f32": 1e-3, "int8": 5e-2}  # relative, of logits
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 2},
)


def others() -> dict[str, Path]:
    """GGUFs of other models, by name, in the folder that BRIDGE_MODELS names."""
    folder = os.environ.get("BRIDGE_MODELS")
    return {} if folder is None else {path.stem: path for path in sorted(Path(folder).glob("*.gguf"))}


def check(name: str = "") -> dict[str, Any]:
    """Prompts, steps and replies of the checkpoint in tests/data, in each precision; or those of `others` in float32.

    The latter may be of any architecture, and small: their logits alone are compared, and kernels are not timed.
    """
    if name:
        return _check_other(name, others()[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        bridge.convert(CHECKPOINT, path)
        checked = [_check(path, precision) for precision in LIMITS]
    return {"wrong": [line for wrong, _ in checked for line in wrong], "notes": "; ".join(n for _, n in checked)}


def _check_other(name: str, path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"context": 64, "precision": "f32", "kv": "f32"}
    cpu, gpu = bridge.Model.load(path, **options), bridge.Model.load(path, device="cuda", **options).prepare()
    decoder, other = gpu._decoder, cpu._decoder
    tokens = np.random.default_rng(0).integers(0, min(decoder.vocab, 2000), OTHERS + sum(TOGETHER)).tolist()
    wrong: list[str] = []
    notes: list[str] = []
    found: list[np.ndarray] = []
    expected: list[np.ndarray] = []
    for side, model, runs in ((found, gpu, decoder), (expected, cpu, other)):
        side.append(model.logits(tokens[:OTHERS]))
        runs.cache.come_back_to(OTHERS)
        side.append(np.stack([runs.next_scores(token).copy() for token in tokens[OTHERS:]]))
    for what, one, another in zip(("prompt", "tokens after it"), found, expected, strict=True):
        error = difference(one, another)
        notes.append(f"{what} {error:.1e}")
        wrong += [f"{name}, {what}: error {error:.2e}"] * (error > LIMITS["f32"])
    if not np.array_equal(_together(decoder, OTHERS, tokens[OTHERS:]), found[1]):
        wrong.append(f"{name}: {_OTHER_SUMS}")
    runner.case("; ".join(wrong))
    return {"wrong": wrong, "notes": ", ".join(notes)}


def _together(decoder: Any, begun: int, tokens: list[int]) -> np.ndarray:
    """Logits of tokens from a position on, TOGETHER of them in a step."""
    decoder.cache.length = begun
    ends = np.cumsum(TOGETHER).tolist()
    parts = [tokens[end - n : end] for n, end in zip(TOGETHER, ends, strict=True)]
    return np.concatenate([decoder.follow(part) for part in parts if part])


def _check(path: Path, precision: str) -> tuple[list[str], str]:
    wrong: list[str] = []
    notes = []
    cpu = bridge.Model.load(path, precision=precision, context=CONTEXT)
    gpu = bridge.Model.load(path, precision=precision, context=CONTEXT, device="cuda").prepare()
    tokens = cpu.tokenizer.encode("The history of the city is long, and nobody knows all of it. " * 12)[: max(PROMPTS)]

    def case(right: bool, what: str) -> None:
        line = "" if right else f"model, {precision}, {what}"
        wrong.extend([line] * bool(line))
        runner.case(line)

    def judge(what: str, one: np.ndarray, other: np.ndarray) -> None:
        error = difference(one, other)
        notes.append(f"{precision} {what} {error:.1e}")
        case(error < LIMITS[precision], f"{what}: error {error:.2e}")

    for count in PROMPTS:
        judge(f"prompt of {count}", gpu.logits(tokens[:count]), cpu.logits(tokens[:count]))
    decoder, other = gpu._decoder, cpu._decoder
    begun = len(tokens) - STEPPED
    decoder.scores(tokens[:begun], 1), other.scores(tokens[:begun], 1)
    pairs = [(decoder.next_scores(t), other.logits(other.run([t]))[0]) for t in tokens[begun:]]
    judge("tokens after it", *(np.stack(side) for side in zip(*pairs, strict=True)))
    decoder.cache.length = begun
    few = tokens[begun : begun + sum(TOGETHER)]
    alone = np.stack([decoder.next_scores(token) for token in few])
    case(np.array_equal(_together(decoder, begun, few), alone), _OTHER_SUMS)
    prompt = tokens[: max(1, begun // 8)]

    def generated(graphs: bool, **how: Any) -> list[int]:
        decoder.graphs = graphs
        decoder.cache.length = 0  # what is kept of a longer prompt was rounded otherwise
        return list(gpu.generate_tokens(prompt, min(MADE, CONTEXT - len(prompt)), **how))

    for how in WAYS:
        captured = generated(True, **how)
        for name, again in (("launches", generated(False, **how)), ("the same steps again", generated(True, **how))):
            case(captured == again, f"{how}: captured steps make other tokens than {name}")
    greedy = generated(True, temperature=0)
    if decoder.dependent:
        overlapping = [generated(True, **how) for how in WAYS]
        decoder.dependent = False
        decoder.build()
        for how, reply in zip(WAYS, overlapping, strict=True):
            for graphs in (True, False):
                same = reply == generated(graphs, **how)
                case(same, f"{how}: launches that overlap make other tokens than others")
    else:
        notes.append("launches do not overlap here")
    expected = islice(cpu.generate_tokens(prompt, MADE, temperature=0), len(greedy))
    equal = sum(a == b for a, b in zip(greedy, expected, strict=False))
    notes.append(f"{equal} of {len(greedy)} greedy tokens are the CPU's")
    return wrong, "; ".join(notes)

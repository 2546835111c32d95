"""Measure quantizing from floats beside ggml's own quantizer with an imatrix, and print a markdown table.

    python scripts/bench_quantize.py MODEL --calibrate wiki.txt --test test.txt --types Q4_K Q2_K

Both see the same tokens: ggml (through the library of the tests' wheel) the mean square of each linear's inputs,
ours the Hessians. All linears get one type, embeddings and head stay floats. What is measured is the mean
Kullback-Leibler divergence from the float model over windows of the test text, float32 arithmetic. `gguf-bridge plot`
draws what --json writes. A type's first line is plain GPTQ with scales fitted as gptq-gguf-toolkit fits them.

--auto-round adds auto-round's GGUF, of its linears alone, and --groups GPTQ and AWQ on groups beside llm-compressor;
each in a Python that has it.

--steps shows what each step brings: weighted scales, columns by falling diag H, refinement, targets from the float
model's inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_convert import ROOT, machine

sys.path.insert(0, str(ROOT))

from bridge.blocks import BLOCKS
from bridge.quantize import Method, quantize_model, superblocks
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.runtime.cpu import dequantize
from scripts.peers import auto_round_gguf, ggml, reference
from scripts.peers.gguf_file import gguf_weights


class Unweighted(SuperblockGrid):
    """As gptq-gguf-toolkit has it: scales are fitted to the weights, whatever their inputs are."""

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        super().fit(run, weights, np.ones_like(importance))


STEPS: list[tuple[str, dict[str, Any], bool]] = [
    ("GPTQ, scales unweighted", {"act_order": "none", "sweeps": 0}, False),
    ("GPTQ", {"act_order": "none", "sweeps": 0}, False),
    ("+ order", {"sweeps": 0}, False),
    ("+ refinement", {}, False),
    ("+ float inputs", {}, True),
]


def main() -> None:
    options = parse()
    from transformers import AutoTokenizer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    calibration, test = (
        reference.windows(tokenizer, path.read_text(encoding="utf-8"), count, options.length)
        for path, count in ((options.calibrate, options.samples), (options.test, options.windows))
    )
    weights = reference.float_weights(options.model)
    expected = reference.logits(reference.hf_model(options.model, weights), test)
    importance = imatrix(options.model, weights, calibration)

    def divergence(model: torch.nn.Module) -> float:
        return reference.mean_kl(expected, reference.logits(model, test))

    print(f"Machine: {machine()}, {options.threads} threads. {options.model.name}, {calibration.size} tokens of "
          f"{options.calibrate.name}, {options.windows} windows of {options.test.name}.\n")  # fmt: skip
    print("| type | step | KL | ggml, imatrix | ratio | seconds |\n|---|---|---|---|---|---|")
    points: list[dict[str, Any]] = []
    for name in options.types:
        theirs = dict(weights)
        for key in reference.linears(weights):
            theirs[key] = dequantize.rows(name, ggml.quantize(weights[key], name, importance[key]))
        peer = divergence(reference.hf_model(options.model, theirs))
        bpw = BLOCKS[name].bpw
        points.append({"name": name, "maker": "llama.cpp's quantizer, imatrix", "bpw": bpw, "kl": peer})
        for step, settings, cross in STEPS if options.steps else (STEPS[0], STEPS[-1]):
            model = reference.hf_model(options.model, weights)
            begun = time.perf_counter()
            grid = partial(Unweighted, BLOCKS[name], spread=False) if "unweighted" in step else superblocks(name)
            quantizer = Method(grid, **settings).layer
            for _ in quantize_model(model, torch.from_numpy(calibration), quantizer, cross=cross):
                pass
            seconds = time.perf_counter() - begun
            own = divergence(model)
            print(f"| {name} | {step} | {own:.3e} | {peer:.3e} | {own / peer:.3f} | {seconds:.0f} |", flush=True)
        points.append({"name": name, "maker": "gguf-bridge quantize", "bpw": bpw, "kl": own})
        if options.auto_round:
            begun = time.perf_counter()
            made = by_auto_round(options.auto_round, options.model, calibration, name, options.threads)
            seconds = time.perf_counter() - begun
            theirs |= {key: made[key] for key in reference.linears(weights)}
            found = divergence(reference.hf_model(options.model, theirs))
            print(
                f"| {name} | auto-round | {found:.3e} | {peer:.3e} | {found / peer:.3f} | {seconds:.0f} |", flush=True
            )
    if options.json:
        record = {"model": options.model.name, "machine": machine(), "bits_of": "linears", "formats": points}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.groups:
        from scripts.bench_groups import print_rows

        print_rows(options.model, weights, calibration, divergence, options.groups)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float model's folder")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE")
    parser.add_argument("--types", nargs="*", default=["Q4_K", "Q3_K", "Q2_K"], metavar="TYPE", help="default: 4, 3, 2")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="sequences; default: %(default)s")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens in each; default: %(default)s")
    parser.add_argument("--windows", type=int, default=24, metavar="N", help="of the test; default: %(default)s")
    parser.add_argument("--steps", action="store_true", help="a line for each step")
    parser.add_argument(
        "--groups", type=Path, metavar="PYTHON", help="GPTQ and AWQ too, beside this Python's llm-compressor"
    )
    parser.add_argument("--auto-round", type=Path, metavar="PYTHON", help="this Python's auto-round too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the divergences there, for gguf-bridge plot")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    return parser.parse_args()


def by_auto_round(python: Path, folder: Path, tokens: np.ndarray, type: str, threads: int) -> reference.Weights:
    """The weights of auto-round's GGUF by their Hugging Face names, float32."""
    with tempfile.TemporaryDirectory() as temporary:
        given, made = Path(temporary) / "tokens.npy", Path(temporary) / "model.gguf"
        np.save(given, tokens)
        command = [str(python), auto_round_gguf.__file__, str(folder.resolve()), str(given), str(made)]
        command += ["--type", type, "--threads", str(threads)]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{python}: auto-round failed:\n{done.stderr[-2000:]}")
        return gguf_weights(made)


@torch.no_grad()
def imatrix(folder: Path, weights: reference.Weights, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Weight name -> float32 [in]: the mean square of the linear's inputs in the float model."""
    model = reference.hf_model(folder, weights)
    sums: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
            sums[name] = sums.get(name, 0) + args[0].double().square().sum((0, 1))

        return hook

    for key in reference.linears(weights):
        model.get_submodule(key.removesuffix(".weight")).register_forward_pre_hook(note(key))
    for batch in torch.from_numpy(tokens).split(16):
        model(batch)
    return {key: (total / tokens.size).float().numpy() for key, total in sums.items()}


if __name__ == "__main__":
    main()

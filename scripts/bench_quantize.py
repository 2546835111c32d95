"""Compare quantizing from floats with ggml's own quantizer and an imatrix; print a markdown table.

    python scripts/bench_quantize.py MODEL --calibrate wiki.txt --test test.txt --types Q4_K Q2_K

Both see the same tokens: ggml (through the library of the tests' wheel) the mean square of each linear's inputs,
ours the Hessians. All linears get one type; embeddings and head stay floats. The measure is the mean Kullback-Leibler
divergence from the float model over windows of the test text, in float32 arithmetic. `gguf-bridge plot` draws what
--json writes. The first line of a type is plain GPTQ with scales fitted as in gptq-gguf-toolkit.

--auto-round adds auto-round's GGUF (its linears only), and --groups compares GPTQ and AWQ on groups with
llm-compressor; each runs in a Python that has it.

--steps adds a line for each step: weighted scales, columns by falling diag H, refinement, targets from the float
model's inputs.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchlib import head, machine, parser, run_peer
from benchlib.divergence import FloatModel, save_tokens
from benchlib.groups import print_groups

from bridge.blocks import BLOCKS
from bridge.quantize import Method, quantize_model, superblocks
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.runtime.cpu import dequantize
from scripts.peers import auto_round_gguf, ggml, reference
from scripts.peers.gguf_file import gguf_weights


class Unweighted(SuperblockGrid):
    """As in gptq-gguf-toolkit: scales are fitted to the weights, whatever their inputs are."""

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
    float_model = FloatModel(options)
    print(f"Machine: {machine()}, {float_model.about}\n")
    print(head("type", "step", "KL", "ggml, imatrix", "ratio", "seconds"))
    points: list[dict[str, Any]] = []
    for name in options.types:
        theirs = dict(float_model.weights)
        for key in reference.linears(theirs):
            theirs[key] = dequantize.rows(name, ggml.quantize(theirs[key], name, float_model.importance[key]))
        peer = float_model.divergence(theirs)
        bpw = BLOCKS[name].bpw
        points.append({"name": name, "maker": "llama.cpp's quantizer, imatrix", "bpw": bpw, "kl": peer})
        for step, settings, cross in STEPS if options.steps else (STEPS[0], STEPS[-1]):
            model = float_model.with_weights(float_model.weights)
            begun = time.perf_counter()
            grid = partial(Unweighted, BLOCKS[name], spread=False) if "unweighted" in step else superblocks(name)
            quantizer = Method(grid, **settings).layer
            for _ in quantize_model(model, torch.from_numpy(float_model.calibration), quantizer, cross=cross):
                pass
            seconds = time.perf_counter() - begun
            own = float_model.divergence(model)
            print(f"| {name} | {step} | {own:.3e} | {peer:.3e} | {own / peer:.3f} | {seconds:.0f} |", flush=True)
        points.append({"name": name, "maker": "gguf-bridge quantize", "bpw": bpw, "kl": own})
        if options.auto_round:
            begun = time.perf_counter()
            made = by_auto_round(options.auto_round, float_model, name, options.threads)
            seconds = time.perf_counter() - begun
            found = float_model.divergence(theirs | {key: made[key] for key in reference.linears(theirs)})
            print(
                f"| {name} | auto-round | {found:.3e} | {peer:.3e} | {found / peer:.3f} | {seconds:.0f} |", flush=True
            )
    if options.json:
        record = {"model": options.model.name, "machine": machine(), "bits_of": "linears", "formats": points}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.groups:
        print_groups(float_model, options.groups)


def parse() -> argparse.Namespace:
    required = {"required": True}
    common = ("model", "--calibrate", "--test", "--samples", "--length", "--windows", "--threads", "--json")
    options = parser(__doc__, *common, calibrate=required, test=required)
    types = ["Q4_K", "Q3_K", "Q2_K"]
    options.add_argument("--types", nargs="*", default=types, metavar="TYPE", help="default: %(default)s")
    options.add_argument("--steps", action="store_true", help="print a line for each step")
    options.add_argument("--groups", type=Path, metavar="PYTHON", help="a Python that has llm-compressor")
    options.add_argument("--auto-round", type=Path, metavar="PYTHON", help="a Python that has auto-round")
    return options.parse_args()


def by_auto_round(python: Path, model: FloatModel, type: str, threads: int) -> reference.Weights:
    """The weights of auto-round's GGUF by their Hugging Face names, float32."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = save_tokens(model.calibration, folder), Path(folder) / "model.gguf"
        options = "--type", type, "--threads", threads
        run_peer(python, auto_round_gguf.__file__, model.folder.resolve(), given, made, *options, cwd=folder)
        return gguf_weights(made)


if __name__ == "__main__":
    main()

"""Compare quantizing from floats with ggml's own quantizer and an imatrix; print a markdown table.

    python scripts/bench_quantize.py MODEL --calibrate wiki.txt --test test.txt --types Q4_K Q2_K

Both see the same tokens: ggml (through the library of the tests' wheel) the mean square of each linear's inputs,
ours the Hessians. All linears get one type; embeddings and head stay floats. The measure is the mean Kullback-Leibler
divergence from the float model over windows of the test text, in float32 arithmetic. `gguf-bridge plot` draws what
--json writes. The first line of a type is plain GPTQ with scales fitted as in gptq-gguf-toolkit.

--auto-round adds auto-round's GGUF (its linears only), and --groups compares GPTQ and AWQ on groups with
llm-compressor; each runs in a Python that has it.

--steps adds a line for each step: weighted scales, columns by falling diag H, refinement, targets from the float
model's inputs (gptaq), what the loss feels of a layer's outputs (two-sided). The last two are there in any case.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import head, line, machine, parser
from benchlib.divergence import FloatModel
from benchlib.groups import print_groups

from bridge.blocks import BLOCKS
from bridge.blocks.read import WRITTEN
from bridge.quantize import Method, superblocks
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.runtime.cpu import dequantize
from scripts.peers import auto_round_gguf, ggml, reference
from scripts.peers.gguf_file import gguf_weights


class Unweighted(SuperblockGrid):
    """As in gptq-gguf-toolkit: scales are fitted to the weights, whatever their inputs are."""

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        super().fit(run, weights, np.ones_like(importance))


TWO_SIDED = "+ outputs"
STEPS: list[tuple[str, dict[str, Any], bool]] = [
    ("GPTQ, scales unweighted", {"act_order": "none", "sweeps": 0}, False),
    ("GPTQ", {"act_order": "none", "sweeps": 0}, False),
    ("+ order", {"sweeps": 0}, False),
    ("+ refinement", {}, False),
    ("+ float inputs", {}, True),
    (TWO_SIDED, {}, True),
]


def main() -> None:
    options = parse()
    float_model = FloatModel(options)
    print(f"Machine: {machine()}, {float_model.about}\n")
    print(head("type", "step", "KL", "ggml, imatrix", "ratio", "seconds"))
    points: list[dict[str, Any]] = []
    outputs = float_model.output_hessians()
    for name in options.types:
        theirs = dict(float_model.weights)
        for key in reference.linears(theirs):
            theirs[key] = dequantize.rows(name, ggml.quantize(theirs[key], name, float_model.importance[key]))
        peer = float_model.divergence(theirs)
        bpw = WRITTEN[name].bpw
        points.append({"name": name, "maker": "llama.cpp's quantizer, imatrix", "bpw": bpw, "kl": peer})
        steps = STEPS if options.steps else [STEPS[0], *STEPS[-2:]]
        if name not in BLOCKS:  # its scales are chosen while it is rounded
            steps = [step for step in steps if "unweighted" not in step[0]]
        for step, settings, cross in steps:
            grid = partial(Unweighted, BLOCKS[name], spread=False) if "unweighted" in step else superblocks(name)
            felt = {"outputs": outputs.get} if step == TWO_SIDED else {}
            own, seconds = float_model.quantized(Method(grid, **settings).layer, cross=cross, **felt)
            line(name, step, f"{own:.3e}", f"{peer:.3e}", f"{own / peer:.3f}", f"{seconds:.0f}")
        points.append({"name": name, "maker": "gguf-bridge quantize", "bpw": bpw, "kl": own})
        if options.auto_round:
            script = auto_round_gguf.__file__, "--type", name, "--threads", options.threads
            made, seconds = float_model.by_peer(gguf_weights, options.auto_round, *script)
            found = float_model.divergence(theirs | {key: made[key] for key in reference.linears(theirs)})
            line(name, "auto-round", f"{found:.3e}", f"{peer:.3e}", f"{found / peer:.3f}", f"{seconds:.0f}")
    if options.json:
        record = {"model": options.model.name, "machine": machine(), "bits_of": "linears", "formats": points}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.groups:
        print_groups(float_model, options.groups)


def parse() -> argparse.Namespace:
    required = {"required": True}
    common = ("model", "--calibrate", "--test", "--samples", "--length", "--windows", "--threads", "--json")
    several = {"nargs": "+", "type": str, "help": "the texts that quantizers see, as `quantize` takes them"}
    options = parser(__doc__, *common, calibrate=required | several, test=required)
    types = ["Q4_K", "Q3_K", "Q2_K"]
    options.add_argument("--types", nargs="*", default=types, metavar="TYPE", help="default: %(default)s")
    options.add_argument("--steps", action="store_true", help="print a line for each step")
    options.add_argument("--groups", type=Path, metavar="PYTHON", help="a Python that has llm-compressor")
    options.add_argument("--auto-round", type=Path, metavar="PYTHON", help="a Python that has auto-round")
    return options.parse_args()


if __name__ == "__main__":
    main()

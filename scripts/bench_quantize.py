"""Compare quantizing from floats with ggml's own quantizer and an imatrix; print a markdown table.

    python scripts/bench_quantize.py MODEL --calibrate wiki.txt --test test.txt --types Q4_K Q2_K

Both see the same tokens: ggml (through the library of the tests' wheel) the mean square of each linear's inputs,
ours the Hessians. All linears get one type; embeddings and head stay floats. The measure is the mean Kullback-Leibler
divergence from the float model over windows of the test text, in float32 arithmetic, with its standard error over
windows. `gguf-bridge plot` draws what --json writes. The first line of a K-quant is plain GPTQ with scales fitted as in
gptq-gguf-toolkit. Types of 4-bit floats are compared with rounding to nearest: ggml's MXFP4, ModelOpt's NVFP4.

--llama-cpp adds the divergences in llama.cpp, which rounds activations to 8 bits.

--auto-round adds auto-round's GGUF (its linears only), and --groups compares GPTQ and AWQ on groups with
llm-compressor; each runs in a Python that has it.

--ik-llama adds a table of the types of ik_llama.cpp, given its shared library and the same imatrix.

--steps adds a line for each step: weighted scales, columns by falling diag H, refinement, targets from the float
model's inputs, the tokens' weights (gptaq), what the loss feels of a layer's outputs (two-sided). The last three are
there in any case.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import head, line, machine, parser
from benchlib.divergence import Divergence, FloatModel
from benchlib.groups import print_groups

from bridge.blocks import BLOCKS
from bridge.blocks.read import CALIBRATED, WRITTEN
from bridge.quantize import Method, superblocks
from bridge.quantize.grids.superblock import SuperblockGrid
from scripts.peers import auto_round_gguf, ggml, nvfp4, reference
from scripts.peers.gguf_file import Blocks, gguf_weights
from scripts.peers.ik_llama_cpp import IkLlamaCpp


class Unweighted(SuperblockGrid):
    """As in gptq-gguf-toolkit: scales are fitted to the weights, whatever their inputs are."""

    def fit(self, run: int, weights: np.ndarray, importance: np.ndarray, quick: bool = False) -> None:
        super().fit(run, weights, np.ones_like(importance))


WEIGHTED, TWO_SIDED = "+ tokens' weights", "+ outputs"
STEPS: list[tuple[str, dict[str, Any], bool]] = [
    ("GPTQ, scales unweighted", {"act_order": "none", "sweeps": 0}, False),
    ("GPTQ", {"act_order": "none", "sweeps": 0}, False),
    ("+ order", {"sweeps": 0}, False),
    ("+ refinement", {}, False),
    ("+ float inputs", {}, True),
    (WEIGHTED, {}, True),
    (TWO_SIDED, {}, True),
]


def main() -> None:
    options = parse()
    float_model = FloatModel(options)
    print(f"Machine: {machine()}, {float_model.about}\n")
    text = ["text"] if len(float_model.tests) > 1 else []
    columns = ["type", "step", *text, "KL", "ggml, imatrix", "ratio", "seconds"]
    print(head(*columns, *(["KL in llama.cpp", "ggml there", "ratio there"] if options.llama_cpp else [])))
    points: list[dict[str, Any]] = []
    of_outputs, weights = float_model.gradients()
    felt = {"outputs": of_outputs, "weights": weights}
    for name in options.types:
        scale = nvfp4.OWN_SCALE if name == "NVFP4" else 1.0
        made = peer_blocks(float_model, name)
        theirs = dict(float_model.weights) | {key: blocks.values() for key, blocks in made.items()}
        peer = float_model.divergence(theirs)
        there = float_model.in_llama_cpp(made, options.threads) if options.llama_cpp else None
        bpw = WRITTEN[name].bpw
        points.append({"name": name, "maker": "llama.cpp's quantizer, imatrix", "bpw": bpw, "kl": peer.mean})
        steps = STEPS if options.steps else STEPS[-1:] if options.last_step else [STEPS[0], *STEPS[-3:]]
        if name not in BLOCKS or name in CALIBRATED:  # its scales are chosen while it is rounded
            steps = [step for step in steps if "unweighted" not in step[0]]
        for step, settings, cross in steps:
            grid = partial(Unweighted, BLOCKS[name], spread=False) if "unweighted" in step else superblocks(name, scale)
            options_of_step = felt if step == TWO_SIDED else {"weights": weights} if step == WEIGHTED else {}
            blocks: dict[str, Blocks] = {}
            own, seconds = float_model.quantized(Method(grid, **settings).layer, blocks, cross=cross, **options_of_step)
            more: list[Divergence] = []
            if there is not None:
                here = float_model.in_llama_cpp(blocks, options.threads)
                more = [here, there]
            for i, test in enumerate(float_model.tests):
                values = [d.by_text()[i] for d in (own, peer, *more)]
                ratios = [values[k].over(values[k + 1]) for k in range(0, len(values), 2)]
                text = [test.stem] if len(float_model.tests) > 1 else []
                line(name, step, *text, *values[:2], ratios[0], f"{seconds:.0f}", *values[2:], *ratios[1:])
        points.append({"name": name, "maker": "gguf-bridge quantize", "bpw": bpw, "kl": own.mean})
        if options.auto_round:
            script = auto_round_gguf.__file__, "--type", name, "--threads", options.threads
            rounded, seconds = float_model.by_peer(gguf_weights, options.auto_round, *script)
            found = float_model.divergence(theirs | {key: rounded[key] for key in made})
            line(name, "auto-round", found, peer, found.over(peer), f"{seconds:.0f}")
    if options.json:
        record = {"model": options.model.name, "machine": machine(), "bits_of": "linears", "formats": points}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.ik_llama:
        print_ik_llama(float_model, options.ik_llama)
    if options.groups:
        print_groups(float_model, felt, options.groups)


def peer_blocks(float_model: FloatModel, name: str) -> dict[str, Blocks]:
    """The linears in a type, as the peer rounds them."""
    made = {}
    for key in reference.linears(float_model.weights):
        weight = float_model.weights[key]
        if name == "NVFP4":
            made[key] = nvfp4.quantize(weight)
        else:
            made[key] = Blocks(name, ggml.quantize(weight, name, float_model.importance[key]))
    return made


def print_ik_llama(float_model: FloatModel, library: Path) -> None:
    """A table of ik_llama.cpp's own types."""
    peer = IkLlamaCpp(library)
    texts = [test.stem for test in float_model.tests]
    print("\n" + head("type of ik_llama.cpp", "bits", *texts))
    linears = reference.linears(float_model.weights)
    for name in peer.types:
        weights, nbytes = dict(float_model.weights), 0
        for key in linears:
            weights[key], size = peer.rounded(weights[key], name, float_model.importance[key])
            nbytes += size
        bits = 8 * nbytes / sum(weights[key].size for key in linears)
        line(name, f"{bits:.2f}", *float_model.divergence(weights).by_text())


def parse() -> argparse.Namespace:
    required = {"required": True}
    common = ("model", "--calibrate", "--test", "--samples", "--length", "--windows", "--threads", "--json")
    several = {"nargs": "+", "type": str, "help": "the texts that quantizers see, as `quantize` takes them"}
    tests = {"nargs": "+", "help": "the texts that are predicted"}
    options = parser(__doc__, *common, calibrate=required | several, test=required | tests)
    types = ["Q4_K", "Q3_K", "Q2_K"]
    options.add_argument("--types", nargs="*", default=types, metavar="TYPE", help="default: %(default)s")
    options.add_argument("--steps", action="store_true", help="print a line for each step")
    options.add_argument("--last-step", action="store_true", help="leave all steps but the last out")
    options.add_argument("--llama-cpp", action="store_true", help="also run every result in llama.cpp")
    options.add_argument("--ik-llama", type=Path, metavar="LIBGGML", help="the shared library of ik_llama.cpp")
    options.add_argument("--groups", type=Path, metavar="PYTHON", help="a Python that has llm-compressor")
    options.add_argument("--auto-round", type=Path, metavar="PYTHON", help="a Python that has auto-round")
    return options.parse_args()


if __name__ == "__main__":
    main()

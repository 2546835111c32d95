"""Compare quantizing from floats with ggml's own quantizer and an imatrix; print a markdown table.

    python -m scripts.quality.bench_quantize MODEL --calibrate wiki.txt --test test.txt --types Q4_K Q2_K

Both see the same tokens: ggml (through the library of the tests' wheel) the mean square of each linear's inputs,
ours the Hessians. All linears get one type; embeddings and head stay floats. The measure is the mean Kullback-Leibler
divergence from the float model over windows of the test text, in float32 arithmetic, with its standard error over
windows. `gguf-bridge plot` draws what --json writes: the divergence on the first test text. The first line of a K-quant
is plain GPTQ with scales fitted as in gptq-gguf-toolkit. ggml rounds to MXFP4 and NVFP4 without regard to the imatrix.
NVFP4 has a further line: rounding to nearest as ModelOpt does it, with a scale of the whole matrix, which ggml's own
quantizer does not use.

--llama-cpp adds the divergences in llama.cpp, which rounds activations to 8 bits.

--groups compares GPTQ and AWQ on groups with llm-compressor, which runs in a Python that has it.

--ik-llama adds a table of the types of ik_llama.cpp, given its shared library and the same imatrix.

--steps adds a line for each step: weighted scales, columns by falling diag H, refinement, targets from the float
model's inputs, the tokens' weights (gptaq), what the loss feels of a layer's outputs (two-sided). The last three are
there in any case.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from bridge.blocks import BLOCKS
from bridge.blocks.read import CALIBRATED, WRITTEN
from bridge.quantize import Method, groups, superblocks
from bridge.quantize.awq import Awq
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.quantizer import LayerHooks
from scripts.benchlib import Lines, bench, head, option, output_of
from scripts.benchlib.divergence import Divergence, FloatModel
from scripts.benchlib.model_names import model_name
from scripts.peers import llm_compressor, nvfp4, reference
from scripts.peers.gguf_file import Blocks
from scripts.peers.llama import ggml
from scripts.peers.llama.ik_llama_cpp import IkLlamaCpp


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
LLAMA_CPP = "llama.cpp's quantizer, imatrix"  # as plots name it
# method, bits, group size, symmetric
GROUPS = [("gptq", 4, 128, True), ("gptq", 3, 128, True), ("gptq", 2, 64, False), ("awq", 4, 128, False)]


OPTIONS = (
    "model",
    option(
        "--calibrate", str, help="the texts that quantizers see, as `quantize` takes them", nargs="+", required=True
    ),
    option("--test", help="the texts that are predicted", nargs="+", required=True),
    *("--samples", "--length", "--windows", "--threads", "--json"),
    option("--types", ["Q4_K", "Q3_K", "Q2_K"], "TYPE", nargs="*"),
    option("--steps", False, help="print a line for each step"),
    option("--last-step", False, help="leave all steps but the last out"),
    option("--peers-only", False, help="measure the peers of these types alone"),
    option("--llama-cpp", False, help="also run every result in llama.cpp"),
    option("--ik-llama", Path, "LIBGGML", "the shared library of ik_llama.cpp"),
    option("--groups", Path, "PYTHON", "a Python that has llm-compressor"),
)


def measure(options: argparse.Namespace) -> Lines:
    if options.peers_only and options.groups:
        raise argparse.ArgumentTypeError("--groups needs gradients; leave out --peers-only")
    float_model = FloatModel(options)
    yield float_model.about
    text = ["text"] if len(float_model.tests) > 1 else []
    columns = ["type", "step", *text, "KL", "ggml, imatrix", "ratio", "seconds"]
    yield head(*columns, *(["KL in llama.cpp", "ggml there", "ratio there"] if options.llama_cpp else []))
    points: list[dict[str, Any]] = []
    gradients = LayerHooks() if options.peers_only else float_model.gradients()
    of_step = {TWO_SIDED: gradients, WEIGHTED: LayerHooks(weights=gradients.weights)}
    for name in options.types:
        scale = nvfp4.OWN_SCALE if name == "NVFP4" else 1.0
        their_blocks = peer_blocks(float_model, name)
        theirs = dict(float_model.weights) | {key: blocks.values() for key, blocks in their_blocks.items()}
        ggmls = float_model.divergence(theirs)
        points.append(point(name, LLAMA_CPP, float_model, ggmls))
        for maker, other in nearest(float_model, name).items():
            points.append(point(name, maker, float_model, other, ggmls))
            yield from peer_rows(float_model, name, maker, other, ggmls)
        if options.peers_only:
            yield from peer_rows(float_model, name, "ggml", ggmls, ggmls)
            continue
        peer_there = float_model.in_llama_cpp(their_blocks, options.threads) if options.llama_cpp else None
        steps = STEPS if options.steps else STEPS[-1:] if options.last_step else [STEPS[0], *STEPS[-3:]]
        if name not in BLOCKS or name in CALIBRATED:  # its scales are chosen while it is rounded
            steps = [step for step in steps if "unweighted" not in step[0]]
        for step, settings, cross in steps:
            grid = partial(Unweighted, BLOCKS[name], spread=False) if "unweighted" in step else superblocks(name, scale)
            blocks: dict[str, Blocks] = {}
            layers = of_step.get(step, LayerHooks())
            layer = Method(grid, **settings).layer
            measured, seconds = float_model.quantized(layer, blocks, cross=cross, layers=layers)
            more: list[Divergence] = []
            if peer_there is not None:
                here = float_model.in_llama_cpp(blocks, options.threads)
                more = [here, peer_there]
            for i, test in enumerate(float_model.tests):
                values = [d.by_text()[i] for d in (measured, ggmls, *more)]
                ratios = [values[k].over(values[k + 1]) for k in range(0, len(values), 2)]
                text = [test.stem] if len(float_model.tests) > 1 else []
                yield name, step, *text, *values[:2], ratios[0], f"{seconds:.0f}", *values[2:], *ratios[1:]
        points.append(point(name, "gguf-bridge quantize", float_model, measured, ggmls))
    if options.ik_llama:
        yield from ik_llama(float_model, options.ik_llama)
    if options.groups:
        yield from groups_table(float_model, gradients, options.groups)
    return {"model": model_name(options.model), "bits_of": "linears", "peer": peer(), "formats": points}


def peer() -> dict[str, str]:
    """The quantizer that this program is compared with."""
    return {
        "quantizer": "ggml_quantize_chunk, which llama-quantize calls for each matrix",
        "build": ggml.build(),
        "settings": "an imatrix of the same tokens; MXFP4 and NVFP4 ignore it",
    }


def point(
    name: str, maker: str, float_model: FloatModel, divergence: Divergence, peer: Divergence | None = None
) -> dict[str, Any]:
    """A row of --json: the divergence on the first test text, on each text, and over that of the peer."""
    by_text: dict[str, dict[str, float]] = {}
    for i, test in enumerate(float_model.tests):
        there = divergence.by_text()[i]
        by_text[test.stem] = {"kl": there.mean, "kl_error": there.error}
        if peer is not None:
            ratio, error = there.ratio(peer.by_text()[i])
            by_text[test.stem] |= {"ratio": ratio, "ratio_error": error}
    first = by_text[float_model.tests[0].stem]
    figures = {"kl": first["kl"], "kl_error": first["kl_error"], "texts": by_text}
    return {"name": name, "maker": maker, "bpw": WRITTEN[name].bpw, **figures}


def peer_rows(float_model: FloatModel, name: str, maker: str, divergence: Divergence, ggmls: Divergence) -> Lines:
    """A line of the table for each text."""
    for test, here, there in zip(float_model.tests, divergence.by_text(), ggmls.by_text(), strict=True):
        text = [test.stem] if len(float_model.tests) > 1 else []
        yield name, maker, *text, here, there, here.over(there), ""


def peer_blocks(float_model: FloatModel, name: str) -> dict[str, Blocks]:
    """The linears in a type, as the peer rounds them."""
    weights, importance = float_model.weights, float_model.importance
    return {key: Blocks(name, ggml.quantize(weights[key], name, importance[key])) for key in reference.linears(weights)}


def nearest(float_model: FloatModel, name: str) -> dict[str, Divergence]:
    """Other tools' way of rounding to a type, where ggml's own is not the usual one."""
    if name != "NVFP4":
        return {}
    weights = float_model.weights
    rounded = {key: nvfp4.quantize(weights[key]).values() for key in reference.linears(weights)}
    return {"ModelOpt's rounding": float_model.divergence(dict(weights) | rounded)}


def ik_llama(float_model: FloatModel, library: Path) -> Lines:
    """A table of ik_llama.cpp's own types."""
    peer = IkLlamaCpp(library)
    texts = [test.stem for test in float_model.tests]
    yield head("type of ik_llama.cpp", "bits", *texts)
    linears = reference.linears(float_model.weights)
    for name in peer.types:
        weights, nbytes = dict(float_model.weights), 0
        for key in linears:
            weights[key], size = peer.rounded(weights[key], name, float_model.importance[key])
            nbytes += size
        bits = 8 * nbytes / sum(weights[key].size for key in linears)
        yield name, f"{bits:.2f}", *float_model.divergence(weights).by_text()


def groups_table(float_model: FloatModel, gradients: LayerHooks, python: Path) -> Lines:
    """A table of GPTQ and AWQ on groups; `python` has llm-compressor, `gradients` are for two-sided rounding."""
    yield head("groups", "KL", "llm-compressor", "ratio", "seconds", "its seconds")
    for method, bits, size, symmetric in GROUPS:
        options = ["--method", method, "--bits", bits, "--group-size", size, *([] if symmetric else ["--asym"])]
        weights, peer_seconds = by_llm_compressor(float_model, python, *options)
        peer = float_model.divergence(weights)
        for name, (layer, more) in group_ways(method, groups(bits, size, symmetric), gradients).items():
            ours, seconds = float_model.quantized(layer, **more)
            what = f"{name} {bits}-bit g{size} {'sym' if symmetric else 'asym'}"
            yield what, ours, peer, ours.over(peer), f"{seconds:.0f}", f"{peer_seconds:.0f}"


def by_llm_compressor(float_model: FloatModel, python: Path, *options: object) -> tuple[reference.Weights, float]:
    """The float32 weights that llm-compressor makes of the same tokens, and the seconds it took."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens.npy", Path(folder) / "out.safetensors"
        np.save(tokens, float_model.calibration)
        output_of(python, llm_compressor.__file__, float_model.folder.resolve(), tokens, out, *options, cwd=folder)
        return load_file(out), time.perf_counter() - begun


def group_ways(method: str, grid: Any, gradients: LayerHooks) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Ours as published, and with everything it can do: each one's layer method and options of `quantize_model`."""
    if method == "awq":
        rounded, refined = (
            Awq(Method(grid, act_order="none", damping=float("inf"), sweeps=0)),
            Awq(Method(grid), clip=False),
        )
        return {
            "AWQ": (rounded.layer, {"prepare": rounded.prepare}),
            "AWQ, GPTAQ": (refined.layer, {"prepare": refined.prepare, "cross": True}),
        }
    return {
        "GPTQ": (Method(grid, act_order="static", sweeps=0).layer, {}),
        "GPTAQ": (Method(grid).layer, {"cross": True}),
        "two-sided": (Method(grid).layer, {"cross": True, "layers": gradients}),
    }


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)

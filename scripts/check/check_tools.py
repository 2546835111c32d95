"""Whole models that the tools themselves write on a CPU: what reading and converting them costs.

    python -m scripts.check.check_tools MODEL... --text wiki_test.txt [--only NAME]

Each tool of `peers/tools.py` that quantizes a model in PyTorch does so, and transformers or the tool saves it. Printed
are, for all linears, the squared error of reading over the squared weights that the tool multiplies with; the KL
divergence of the quantized model from the float one, its cost; and of the GGUF from the quantized model, in nats per
token and as a share of that cost: with the GGUF's weights in transformers, in this program with precision f32, and in
llama.cpp, whose products round activations to 8 bits. What that rounding costs alone is the last figure: llama.cpp with
the quantized model's exact floats in Q8_0. Embeddings and head stay F16.

Needs bitsandbytes, torchao, optimum-quanto, hqq, accelerate and xllamacpp; tools that are not installed are left out.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bridge
from scripts.benchlib import Lines, bench, option
from scripts.peers import reference, tools
from scripts.peers.fidelity import Reference
from scripts.peers.fidelity import measure as measured
from scripts.peers.llama.llama_cpp import window_logits
from scripts.peers.predictions import mean_kl


def measure(options: argparse.Namespace) -> Lines:
    from transformers import AutoTokenizer

    text = options.text.read_text(encoding="utf-8")
    for folder in options.models:
        for name, tool in TOOLS.items():
            if options.only in (None, name):
                with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
                    written = Path(scratch) / "model"
                    try:
                        model, save = tool(folder)
                        save(written)
                    except ImportError as missing:
                        yield f"{name}: left out, {missing}"
                        continue
                    AutoTokenizer.from_pretrained(folder).save_pretrained(written)
                    yield folder.name, name, *figures(folder, written, model.eval(), text, options)


def figures(folder: Path, written: Path, model: Any, text: str, options: argparse.Namespace) -> list[str]:
    """The cells of a row: `written` is the folder that a tool made of the model in `folder`."""
    path, close = written.parent / "model.gguf", written.parent / "q8_0.gguf"
    with bridge.open_checkpoint(written) as checkpoint:
        error = reading_error(checkpoint, model)
        against = Reference(written, checkpoint, text, options.windows, options.length)
    outside = {r"token_embd|^output\.weight": "F16"}
    bridge.convert(written, path, tensor_types=outside)
    bridge.convert(written, close, type="Q8_0", tensor_types=outside)
    quantized = reference.logits(model, against.tokens)
    floats = reference.hf_model(folder, reference.float_weights(folder))
    cost = mean_kl(reference.logits(floats, against.tokens), quantized)
    fidelity = measured(path, against)
    here = bridge.Model.load(path, precision="f32", kv="f32")
    ours = np.stack([here.logits(window.tolist()) for window in against.tokens])
    theirs = (window_logits(file, against.tokens) for file in (path, close))
    divergences = [fidelity.kl_file, *(mean_kl(quantized, logits) for logits in (ours, *theirs))]
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(fidelity.types.items()))
    shares = (text for kl in divergences for text in (f"{kl:.1e}", f"{kl / cost:.1%}"))
    return [f"{error:.1e}", types, f"{cost:.1e}", *shares]


@torch.no_grad()
def reading_error(checkpoint: Any, model: torch.nn.Module) -> float:
    """Squared error of all quantized linears as read, over the squared weights that the tool multiplies with."""
    modules = dict(model.named_modules())
    floats = (name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight"))
    names = {*checkpoint.modules, *floats}
    error = power = 0.0
    for name in names:
        quantized = name in checkpoint.modules
        read = checkpoint.read_module(name).dequantize() if quantized else checkpoint.read_float(f"{name}.weight")
        weight = weight_of(modules[name], read.shape[1]).double().numpy()
        error, power = error + float(np.square(read - weight).sum()), power + float(np.square(weight).sum())
    return error / power


def weight_of(module: Any, columns: int) -> torch.Tensor:
    """float [out, in]: what a quantized layer multiplies with."""
    if hasattr(module, "dequantize"):
        return module.dequantize()
    if "bitsandbytes" in type(module).__module__:  # whose first product packs 4 bits anew, with scales of 16
        from bitsandbytes import functional

        state = module.state_dict()
        if "SCB" in state:
            return functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
        return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    identity = torch.eye(columns)
    return (module(identity) - (0 if module.bias is None else module.bias)).T


# those of peers/tools.py whose quantized models are PyTorch's
TOOLS = {name: tool for name, (package, tool) in tools.TOOLS.items() if package in tools.IN_TORCH}

OPTIONS = (
    option("--text", required=True), option("--windows", 8), "--length",
    option("models", Path, "MODEL", "float models' folders", nargs="+"),
    option("--only", choices=[*TOOLS], help="one tool"),
)  # fmt: skip
_RUNS = ("GGUF", "run f32", "llama.cpp", "floats in Q8_0")
COLUMNS = ("model", "tool", "error of reading", "types", "cost", *(c for run in _RUNS for c in (run, "share")))

if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)

"""Whole models that the tools themselves write on a CPU: what reading and converting them costs.

    python -m scripts.check.check_tools MODEL... --text wiki_test.txt [--only NAME]

Each tool quantizes the float models, and transformers or the tool saves them. Printed are, for all linears, the squared
error of reading over the squared weights that the tool multiplies with; the KL divergence of the quantized model from
the float one, its cost; and of the GGUF from the quantized model, in nats a token and as a share of that cost: with the
GGUF's weights in transformers, in this program with precision f32, and in llama.cpp, whose products round activations
to 8 bits. What that rounding costs alone is the last figure: llama.cpp with the quantized model's exact floats in Q8_0.
Embeddings and head stay F16.

Needs bitsandbytes, torchao, optimum-quanto, hqq, accelerate and xllamacpp; tools that are not installed are left out.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bridge
from scripts.benchlib import Lines, bench, option
from scripts.peers import reference
from scripts.peers.fidelity import Reference
from scripts.peers.fidelity import measure as measured
from scripts.peers.llama.llama_cpp import window_logits
from scripts.peers.predictions import mean_kl


def measure(options: argparse.Namespace) -> Lines:
    text = options.text.read_text(encoding="utf-8")
    for folder in options.models:
        for name, write in TOOLS.items():
            if options.only in (None, name):
                with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
                    try:
                        model = write(folder, Path(scratch) / "model")
                    except ImportError as missing:
                        yield f"{name}: left out, {missing}"
                        continue
                    yield folder.name, name, *figures(folder, Path(scratch) / "model", model, text, options)


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
    cost = against_floats(folder, against, quantized)
    fidelity = measured(path, against)
    here = bridge.Model.load(path, precision="f32", kv="f32")
    ours = np.stack([here.logits(window.tolist()) for window in against.tokens])
    divergences = [
        fidelity.kl_file,
        mean_kl(quantized, ours),
        *(mean_kl(quantized, window_logits(file, against.tokens)) for file in (path, close)),
    ]
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(fidelity.types.items()))
    return [
        f"{error:.1e}",
        types,
        f"{cost:.1e}",
        *(text for kl in divergences for text in (f"{kl:.1e}", f"{kl / cost:.1%}")),
    ]


def against_floats(folder: Path, against: Reference, quantized: np.ndarray) -> float:
    """The mean KL divergence of a quantized model from its float model."""
    floats = reference.hf_model(folder, reference.float_weights(folder))
    return mean_kl(reference.logits(floats, against.tokens), quantized)


@torch.no_grad()
def reading_error(checkpoint: Any, model: torch.nn.Module) -> float:
    """Squared error of all quantized linears as read, over the squared weights that the tool multiplies with."""
    modules = dict(model.named_modules())
    floats = (name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight"))
    names = {*checkpoint.modules, *floats}
    error = power = 0.0
    for name in names:
        module = modules[name]
        read = (
            checkpoint.read_module(name).dequantize()
            if name in checkpoint.modules
            else checkpoint.read_float(f"{name}.weight")
        )
        weight = weight_of(module, read.shape[1]).double().numpy()
        error, power = error + float(np.square(read - weight).sum()), power + float(np.square(weight).sum())
    return error / power


def weight_of(module: Any, columns: int) -> torch.Tensor:
    """float [out, in]: what a quantized layer multiplies with."""
    if hasattr(module, "dequantize"):
        return module.dequantize()  # type: ignore[no-any-return]
    if "bitsandbytes" in type(module).__module__:  # whose first product packs 4 bits anew, with scales of 16
        from bitsandbytes import functional

        state = module.state_dict()
        if "SCB" in state:
            return functional.int8_vectorwise_dequant(state["weight"], state["SCB"])  # type: ignore[no-any-return]
        return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)  # type: ignore[no-any-return]
    identity = torch.eye(columns)
    return (module(identity) - (0 if module.bias is None else module.bias)).T  # type: ignore[no-any-return]


def by_transformers(settings: Callable[[], Any]) -> Callable[[Path, Path], Any]:
    """A tool that transformers calls: `settings` returns its quantization_config."""

    def write(folder: Path, out: Path) -> Any:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=settings(), dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return model.eval()

    return write


def four_bits(kind: str, nested: bool = False) -> Any:
    import bitsandbytes  # noqa: F401
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def eight_bits() -> Any:
    import bitsandbytes  # noqa: F401
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def torchao(kind: str) -> Any:
    from torchao import quantization as q
    from transformers import TorchAoConfig

    configs = {
        "int8": lambda: q.Int8WeightOnlyConfig(),
        "float8": lambda: q.Float8WeightOnlyConfig(),
        "intx": lambda: q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(64)),
    }
    return TorchAoConfig(configs[kind]())


def quanto(kind: str) -> Callable[[Path, Path], Any]:
    def write(folder: Path, out: Path) -> Any:
        from optimum import quanto as q
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        quantized = q.QuantizedModelForCausalLM.quantize(model, weights=getattr(q, kind), exclude="lm_head")
        quantized.save_pretrained(out)
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return model.eval()

    return write


def hqq(axis: int) -> Callable[[Path, Path], Any]:
    def write(folder: Path, out: Path) -> Any:
        from hqq.core.quantize import BaseQuantizeConfig
        from hqq.models.hf.base import AutoHQQHFModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = BaseQuantizeConfig(nbits=4, group_size=64, axis=axis)
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
        AutoHQQHFModel.save_quantized(model, str(out))
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return model.eval()

    return write


TOOLS: dict[str, Callable[[Path, Path], Any]] = {
    "bitsandbytes NF4": by_transformers(lambda: four_bits("nf4")),
    "bitsandbytes NF4, nested": by_transformers(lambda: four_bits("nf4", nested=True)),
    "bitsandbytes FP4": by_transformers(lambda: four_bits("fp4")),
    "bitsandbytes LLM.int8": by_transformers(eight_bits),
    "torchao int8": by_transformers(lambda: torchao("int8")),
    "torchao intx, 4 bits": by_transformers(lambda: torchao("intx")),
    "torchao float8": by_transformers(lambda: torchao("float8")),
    "quanto qint4": quanto("qint4"),
    "quanto qint8": quanto("qint8"),
    "hqq, 4 bits": hqq(1),
    "hqq, 4 bits, axis 0": hqq(0),
}


OPTIONS = (
    option("--text", required=True),
    option("--windows", 8),
    "--length",
    option("models", Path, "MODEL", "float models' folders", nargs="+"),
    option("--only", choices=[*TOOLS], help="one tool"),
)
_RUNS = ("GGUF", "run f32", "llama.cpp", "floats in Q8_0")
COLUMNS = ("model", "tool", "error of reading", "types", "cost", *(c for run in _RUNS for c in (run, "share")))

if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)

"""Quantized checkpoints of whole models, made by the tools that people use, on a CPU.

    python -m scripts.peers.tools smollm2 gemma3-270m --work real [--only TOOL...] [--python PACKAGE=PYTHON...]

A model is one of `benchlib/real_models.py` or a float model's folder. Each tool writes `WORK/MODEL-TOOL`, with a file
`made.json` that names the model, the tool and its version. Folders that are complete are left as they are. Some tools
need packages that exclude each other, so a tool can run in another Python that has torch, transformers and the tool:
`--python gptqmodel=venv/bin/python`. Tools that are not installed are left out. Tools that calibrate see 16 sequences
of 256 tokens, which lie evenly over the texts that `quantize` ships.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

SEQUENCES, LENGTH = 16, 256  # of calibration
IN_TORCH = ("bitsandbytes", "torchao", "optimum-quanto", "hqq")  # packages that quantize modules of PyTorch in place
_TEXTS = Path(__file__).parents[2] / "bridge" / "quantize" / "calibration_text"
_MISSING = 3  # the exit code of a tool that is not installed


def by_transformers(settings: Callable[[], Any] | None, folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    """A model in transformers, quantized with what `settings` returns, and what saves it."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {} if settings is None else {"quantization_config": settings(), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model, model.save_pretrained


def bitsandbytes(**settings: Any) -> Any:
    import bitsandbytes  # noqa: F401
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**settings)


def four_bits(kind: str, nested: bool = False) -> Any:
    import torch

    names = {"quant_type": kind, "use_double_quant": nested, "compute_dtype": torch.float32}
    return bitsandbytes(load_in_4bit=True, **{f"bnb_4bit_{name}": value for name, value in names.items()})


def torchao(kind: str) -> Any:
    import torch
    from torchao import quantization as q
    from transformers import TorchAoConfig

    configs = {
        "int8": lambda: q.Int8WeightOnlyConfig(),
        "float8": lambda: q.Float8WeightOnlyConfig(),
        "intx": lambda: q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(64)),
    }
    return TorchAoConfig(configs[kind]())


def quanto(kind: str, folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    from optimum import quanto as q

    model, _ = by_transformers(None, folder)
    quantized = q.QuantizedModelForCausalLM.quantize(model, weights=getattr(q, kind), exclude="lm_head")
    return model, quantized.save_pretrained


def hqq(axis: int, folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model, _ = by_transformers(None, folder)
    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=axis)
    AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
    return model, lambda out: AutoHQQHFModel.save_quantized(model, str(out))


def gptqmodel(settings: dict[str, Any], folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it takes one on two cores, and then asks for two
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(folder), QuantizeConfig(bits=4, group_size=64, **settings), device="cpu")
    model.quantize(calibration(folder), batch_size=1)
    return model, lambda out: model.save(str(out))


def llm_compressor(folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    """W4A16 by GPTQ."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    model, _ = by_transformers(None, folder)
    recipe = GPTQModifier(ignore=["lm_head"], config_groups=groups)
    rows = Dataset.from_list(calibration(folder))
    oneshot(model=model, dataset=rows, recipe=recipe, max_seq_length=LENGTH, num_calibration_samples=SEQUENCES)
    return model, lambda out: model.save_pretrained(out, save_compressed=True)


def mlx(folder: Path) -> tuple[Any, Callable[[Path], Any]]:
    from mlx_lm import convert

    return None, lambda out: convert(str(folder), str(out), quantize=True, q_group_size=64, q_bits=4)


def calibration(folder: Path) -> list[dict[str, list[int]]]:
    """Sequences that lie evenly over the texts that `quantize` ships, as these tools take them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [file.read_text(encoding="utf-8") for file in sorted(_TEXTS.glob("*.txt"))]
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    starts = [i * (len(ids) - LENGTH) // (SEQUENCES - 1) for i in range(SEQUENCES)]
    return [{"input_ids": ids[start : start + LENGTH], "attention_mask": [1] * LENGTH} for start in starts]


# takes a float model's folder; returns the quantized model, or None, and what saves it
Maker = Callable[[Path], tuple[Any, Callable[[Path], Any]]]
# a tool and its settings -> the package it needs, and its maker
TOOLS: dict[str, tuple[str, Maker]] = {
    "GPTQModel 4-bit g64 sym": ("gptqmodel", partial(gptqmodel, {"sym": True, "desc_act": False})),
    "GPTQModel 4-bit g64 asym": ("gptqmodel", partial(gptqmodel, {"sym": False, "desc_act": False})),
    "GPTQModel 4-bit g64 act-order": ("gptqmodel", partial(gptqmodel, {"sym": True, "desc_act": True})),
    "GPTQModel AWQ 4-bit g64": ("gptqmodel", partial(gptqmodel, {"quant_method": "awq", "format": "gemm"})),
    "llm-compressor W4A16 g64": ("llmcompressor", llm_compressor),
    "mlx-lm 4-bit g64": ("mlx-lm", mlx),
    "hqq 4-bit g64": ("hqq", partial(hqq, 1)),
    "hqq 4-bit g64, axis 0": ("hqq", partial(hqq, 0)),
    "quanto qint4": ("optimum-quanto", partial(quanto, "qint4")),
    "quanto qint8": ("optimum-quanto", partial(quanto, "qint8")),
    "torchao intx, 4 bits": ("torchao", partial(by_transformers, lambda: torchao("intx"))),
    "torchao int8": ("torchao", partial(by_transformers, lambda: torchao("int8"))),
    "torchao float8": ("torchao", partial(by_transformers, lambda: torchao("float8"))),
    "bitsandbytes NF4": ("bitsandbytes", partial(by_transformers, lambda: four_bits("nf4"))),
    "bitsandbytes NF4, nested": ("bitsandbytes", partial(by_transformers, lambda: four_bits("nf4", nested=True))),
    "bitsandbytes FP4": ("bitsandbytes", partial(by_transformers, lambda: four_bits("fp4"))),
    "bitsandbytes LLM.int8": ("bitsandbytes", partial(by_transformers, lambda: bitsandbytes(load_in_8bit=True))),
}


def make(floats: Path, out: Path, name: str, title: str) -> None:
    """Write the checkpoint that a tool makes of a float model, with the model's tokenizer and `made.json`."""
    from transformers import AutoTokenizer

    package, tool = TOOLS[name]
    _, save = tool(floats)
    save(out)
    AutoTokenizer.from_pretrained(floats).save_pretrained(out)
    origin = {"model": title, "tool": name, "package": package, "version": version(package)}
    (out / "made.json").write_text(json.dumps(origin, indent=1) + "\n")


def slug(model: str, tool: str) -> str:
    """A checkpoint's folder: "smollm2-gptqmodel-4-bit-g64-sym"."""
    return f"{model}-{re.sub('[^a-z0-9]+', '-', tool.lower())}"


def package_python(text: str) -> tuple[str, Path]:
    package, sign, python = text.partition("=")
    if not sign or package not in {needed for needed, _ in TOOLS.values()}:
        raise argparse.ArgumentTypeError(f"{text!r} is not PACKAGE=PYTHON of a tool's package")
    return package, Path(python).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--work", type=Path, default=Path("real"), metavar="DIR", help="for models and checkpoints")
    parser.add_argument("--packages", type=Path, default=Path("packages"), metavar="DIR", help="for downloads")
    parser.add_argument("--only", nargs="+", metavar="TOOL", choices=[*TOOLS], default=[*TOOLS])
    parser.add_argument("--python", nargs="+", default=[], type=package_python, metavar="PACKAGE=PYTHON")
    options = parser.parse_args()
    from scripts.benchlib import ROOT
    from scripts.benchlib.model_names import model_name
    from scripts.benchlib.real_models import float_model

    pythons = dict(options.python)
    for folder in (options.work, options.packages):
        folder.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        floats = float_model(model, options.work, options.packages).absolute()
        for name in options.only:
            out = options.work.absolute() / slug(floats.name, name)
            if (out / "made.json").exists():
                continue
            python = pythons.get(TOOLS[name][0], Path(sys.executable))
            what = [str(floats), str(out), name, model_name(floats)]
            call = "import sys; from scripts.peers.tools import run; run(*sys.argv[1:])"
            done = subprocess.run([python, "-c", call, *what], cwd=ROOT, check=False).returncode
            print(out.name, {0: "made", _MISSING: "left out: not installed"}.get(done, f"failed, exit code {done}"))


def run(floats: str, out: str, name: str, title: str) -> None:
    """`make`, in a tool's own process."""
    try:
        make(Path(floats), Path(out), name, title)
    except ImportError as missing:
        print(missing, file=sys.stderr)
        sys.exit(_MISSING)


if __name__ == "__main__":
    main()

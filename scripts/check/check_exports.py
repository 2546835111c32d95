"""Programs that load exported checkpoints on a CPU, and whether they compute what the GGUF says.

    python -m scripts.check.check_exports MODEL --text wiki_test.txt [--only PROGRAM] [--path PROGRAM=FOLDER ...]

The float model is converted to each type, and the GGUF exported in the formats that the program reads. Printed are what
became of the layers and the KL divergence, in nats a token, of the program's logits from ours of the GGUF
(`bridge.Model`, float32), on one window. transformers and HQQ compute in float32, the others in half precision. Each
runs in a process of its own, all of its exports one after the other; of those that are not installed or fail, the
error is printed.

--path names a folder of packages for a program that needs its own, such as vLLM's transformers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import bridge
from scripts.benchlib import Lines, bench, option
from scripts.peers.predictions import mean_kl

# a program -> how it is made ready, and a function from the folder of a model to logits [tokens, vocab]
PROGRAMS = {
    "transformers": """
from transformers import AutoModelForCausalLM
def logits_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    return model(ids).logits[0].float().numpy()
""",
    "gptqmodel": """
from gptqmodel import GPTQModel, BACKEND
def logits_of(folder):
    backend = BACKEND.AWQ_TORCH if folder.endswith("awq") else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(folder, backend=backend, device="cpu", dtype=torch.float16)
    return model.model.eval()(ids).logits[0].float().numpy()
""",
    "autoawq": """
from awq import AutoAWQForCausalLM
def logits_of(folder):
    model = AutoAWQForCausalLM.from_quantized(folder, fuse_layers=False, device_map="cpu")
    return model(ids).logits[0].float().numpy()
""",
    "mlx-lm": """
import mlx.core as mx
from mlx_lm import load
mx.set_default_device(mx.cpu)
def logits_of(folder):
    model, _ = load(folder)
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))
""",
    "hqq": """
from hqq.models.hf.base import AutoHQQHFModel
from safetensors.torch import load_file
class Safetensors(AutoHQQHFModel):  # HQQ writes such files, for vLLM, but reads those of torch.save only
    @classmethod
    def get_weight_file(cls, folder):
        return folder + "/model.safetensors"
    @classmethod
    def load_weights(cls, folder, device):
        modules = {}
        for name, values in load_file(cls.get_weight_file(folder)).items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = values
        modules.setdefault("lm_head", modules["model.embed_tokens"])
        return modules
def logits_of(folder):
    model = Safetensors.from_quantized(folder, compute_dtype=torch.float32, device="cpu").eval()
    return model(ids).logits[0].float().numpy()
""",
    "vllm": """
from vllm import LLM, SamplingParams
def logits_of(folder):
    model = LLM(folder, dtype="float16", enforce_eager=True, max_model_len=512, max_logprobs=-1,
                logprobs_mode="raw_logits")
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    said = model.generate([{"prompt_token_ids": tokens + tokens[:1]}], asked)[0].prompt_logprobs[1:]
    return np.array([[step[i].logprob for i in range(len(step))] for step in said], np.float32)
""",
}
# vLLM imports the file again in processes of its own
_FIRST = """
import sys
import numpy as np
tokens = np.load(sys.argv[1]).tolist()
if {torch}:
    import torch
    torch.set_grad_enabled(False)
    ids = torch.tensor([tokens])
"""
_LAST = """
if __name__ == "__main__":
    for folder in sys.argv[2:]:
        try:
            np.save(folder + ".npy", logits_of(folder))
        except Exception as error:
            with open(folder + ".error", "w") as file:
                file.write(f"{type(error).__name__}: {error}")
"""
# a program, the GGUF's type, the format
CASES = (
    *(("transformers", type, "compressed-tensors") for type in ("Q4_0", "Q8_0", "Q4_1", "Q4_K", "IQ4_XS")),
    ("transformers", "Q4_K", "floats"),
    *(("gptqmodel", type, format) for type in ("Q4_0", "Q8_0") for format in ("gptq", "gptq_v2")),
    ("gptqmodel", "IQ4_XS", "gptq_v2"), ("gptqmodel", "Q5_0", "gptq_p"), ("gptqmodel", "Q6_K", "gptq_p"),
    ("gptqmodel", "Q4_0", "awq"), ("autoawq", "Q4_0", "awq"),
    *(("mlx-lm", type, "mlx") for type in ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "IQ4_XS")),
    *(("hqq", type, "hqq") for type in ("Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q6_K", "Q3_K")),
    *(("vllm", "Q4_0", format) for format in ("compressed-tensors", "gptq", "awq", "floats")),
    ("vllm", "Q8_0", "compressed-tensors"),
)  # fmt: skip


OPTIONS = (
    "model", option("--text", required=True), option("--length", 128),
    option("--only", choices=[*PROGRAMS], help="one program"), option("--type", help="one type"),
    option("--path", metavar="PROGRAM=FOLDER", help="packages of a program", action="append", default=[]),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    paths = dict(pair.split("=", 1) for pair in options.path)
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-exports-") as folder:
        scratch = Path(folder)
        for program in PROGRAMS if options.only is None else (options.only,):
            cases = [(type, format) for name, type, format in CASES if name == program and options.type in (None, type)]
            hows = {case: exported(*case, scratch, options) for case in cases}
            if cases:
                stderr = run(program, [scratch / "-".join(case) for case in cases], scratch, paths.get(program))
            for case, how in hows.items():
                yield program, *case, how, divergence_or_error(*case, scratch, stderr)


def exported(type: str, format: str, scratch: Path, options: argparse.Namespace) -> str:
    """Write an export; what became of its layers. GGUFs and our logits in `scratch` are used again."""
    path, folder = scratch / f"{type}.gguf", scratch / f"{type}-{format}"
    if not path.exists():
        bridge.convert(options.model, path, type=type)
        model = bridge.Model.load(path, precision="f32")
        tokens = model.tokenizer.encode(options.text.read_text(encoding="utf-8")[:4000])[: options.length]
        np.save(scratch / "tokens.npy", tokens)
        np.save(scratch / f"{type}.npy", model.logits(tokens))
    done = bridge.export(path, folder, format, force=True)
    return ", ".join(sorted({f"{t.how}, {t.bits} bits" for t in done.tensors if t.bits})) or "floats"


def run(program: str, folders: list[Path], scratch: Path, packages: str | None) -> str:
    """Let a program compute the logits of exports, FOLDER.npy or FOLDER.error; its stderr."""
    for folder in folders:
        for suffix in (".npy", ".error"):
            Path(f"{folder}{suffix}").unlink(missing_ok=True)
    script = scratch / "program.py"
    script.write_text(_FIRST.format(torch=program not in ("mlx-lm", "vllm")) + PROGRAMS[program] + _LAST)
    search_path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(script), str(scratch / "tokens.npy"), *map(str, folders)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, capture_output=True, text=True).stderr


def divergence_or_error(type: str, format: str, scratch: Path, stderr: str) -> str:
    """The KL divergence of a program's logits, or the error."""
    out = scratch / f"{type}-{format}.npy"
    if out.exists():
        return f"{mean_kl(np.load(scratch / f'{type}.npy'), np.load(out)):.1e}"
    error = out.with_suffix(".error")
    text = error.read_text(encoding="utf-8") if error.exists() else last_error(stderr)
    return " ".join(text.split())[:200]


def last_error(stderr: str) -> str:
    """The last error of a program that ended before it computed anything."""
    errors = [text for text in stderr.splitlines() if "Error" in text and not text.startswith(" ")]
    return (errors or stderr.splitlines() or ["no logits"])[-1]


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("program", "GGUF", "format", "layers", "KL divergence"))

"""Programs that load exported checkpoints on a CPU, and whether they compute what the GGUF says.

    python scripts/check_exports.py MODEL --text wiki_test.txt [--only PROGRAM] [--path PROGRAM=FOLDER ...]

The float model is converted to each type, and the GGUF exported in the formats that the program reads. Printed are what
became of the layers and the KL divergence, in nats a token, of the program's logits from ours of the GGUF
(`bridge.Model`, float32), on one window. transformers and HQQ compute in float32, the others in half precision. Each
runs in a process of its own; of those that are not installed or fail, the error is printed.

--path names a folder of packages for a program that needs its own, such as vLLM's transformers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from benchlib import head, line, parser

import bridge
from scripts.peers.predictions import mean_kl

_HEAD = "import sys, numpy as np; folder, tokens, out = sys.argv[1], np.load(sys.argv[2]).tolist(), sys.argv[3]\n"
_TORCH = "import torch; torch.set_grad_enabled(False); ids = torch.tensor([tokens])\n"
_SAVE = "np.save(out, np.asarray(logits.float()[0]))\n"

# a program -> what saves the logits float32 [tokens, vocab]
PROGRAMS = {
    "transformers": _TORCH
    + "from transformers import AutoModelForCausalLM\n"
    + "model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map='cpu').eval()\n"
    + "logits = model(ids).logits\n"
    + _SAVE,
    "gptqmodel": _TORCH
    + "from gptqmodel import GPTQModel, BACKEND\n"
    + "backend = BACKEND.AWQ_TORCH if folder.endswith('awq') else BACKEND.GPTQ_TORCH\n"
    + "model = GPTQModel.load(folder, backend=backend, device='cpu', dtype=torch.float16)\n"
    + "logits = model.model.eval()(ids).logits\n"
    + _SAVE,
    "autoawq": _TORCH
    + "from awq import AutoAWQForCausalLM\n"
    + "model = AutoAWQForCausalLM.from_quantized(folder, fuse_layers=False, device_map='cpu')\n"
    + "logits = model(ids).logits\n"
    + _SAVE,
    "mlx-lm": "import mlx.core as mx\nfrom mlx_lm import load\n"
    + "mx.set_default_device(mx.cpu)\nmodel, _ = load(folder)\n"
    + "np.save(out, np.array(model(mx.array([tokens]))[0].astype(mx.float32)))\n",
    "hqq": _TORCH
    + "from hqq.models.hf.base import AutoHQQHFModel\n"
    + "model = AutoHQQHFModel.from_quantized(folder, compute_dtype=torch.float32, device='cpu').eval()\n"
    + "logits = model(ids).logits\n"
    + _SAVE,
    "vllm": "from vllm import LLM, SamplingParams\n"
    + "if __name__ == '__main__':\n"
    + "    model = LLM(folder, dtype='float16', enforce_eager=True, max_model_len=512, max_logprobs=-1,\n"
    + "                logprobs_mode='raw_logits')\n"
    + "    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)\n"
    + "    said = model.generate([{'prompt_token_ids': tokens + tokens[:1]}], asked)[0].prompt_logprobs[1:]\n"
    + "    np.save(out, np.array([[step[i].logprob for i in range(len(step))] for step in said], np.float32))\n",
}
# a program, the GGUF's type, the format
CASES = (
    *(("transformers", type, "compressed-tensors") for type in ("Q4_0", "Q8_0", "Q4_1", "Q4_K", "MXFP4")),
    ("transformers", "Q4_K", "floats"),
    *(("gptqmodel", type, format) for type in ("Q4_0", "Q8_0") for format in ("gptq", "gptq_v2")),
    ("gptqmodel", "Q5_0", "gptq_p"),
    ("gptqmodel", "Q6_K", "gptq_p"),
    ("gptqmodel", "Q4_0", "awq"),
    ("autoawq", "Q4_0", "awq"),
    *(("mlx-lm", type, "mlx") for type in ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "MXFP4")),
    *(("hqq", type, "hqq") for type in ("Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q6_K", "Q3_K")),
    *(("vllm", "Q4_0", format) for format in ("compressed-tensors", "gptq", "awq", "floats")),
    ("vllm", "Q8_0", "compressed-tensors"),
)


def main() -> None:
    options = parse()
    paths = dict(pair.split("=", 1) for pair in options.path)
    print(head("program", "GGUF", "format", "layers", "KL divergence"))
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-exports-") as scratch:
        for program, type, format in CASES:
            if options.only in (None, program) and options.type in (None, type):
                line(program, type, format, *figures(program, type, format, Path(scratch), options, paths))


def parse() -> argparse.Namespace:
    options = parser(__doc__, "model", "--text", "--length", text={"required": True}, length={"default": 128})
    options.add_argument("--only", choices=[*PROGRAMS], help="one program")
    options.add_argument("--type", help="one type")
    options.add_argument("--path", action="append", default=[], metavar="PROGRAM=FOLDER", help="packages of a program")
    return options.parse_args()


def figures(
    program: str, type: str, format: str, scratch: Path, options: argparse.Namespace, paths: dict[str, str]
) -> list[str]:
    """The cells of a row. GGUFs, logits and exports in `scratch` are used again."""
    path, own, tokens = scratch / f"{type}.gguf", scratch / f"{type}.npy", scratch / "tokens.npy"
    if not own.exists():
        bridge.convert(options.model, path, type=type)
        model = bridge.Model.load(path, precision="f32")
        if not tokens.exists():
            np.save(tokens, model.tokenizer.encode(options.text.read_text(encoding="utf-8")[:4000])[: options.length])
        np.save(own, model.logits(np.load(tokens).tolist()))
    folder, out = scratch / f"{type}-{format}", scratch / "out.npy"
    hows = ""
    if not folder.exists():
        done = bridge.export(path, folder, format)
        hows = ", ".join(sorted({f"{t.how}, {t.bits} bits" for t in done.tensors if t.bits})) or "floats"
        (scratch / f"{type}-{format}.txt").write_text(hows)
    hows = (scratch / f"{type}-{format}.txt").read_text()
    out.unlink(missing_ok=True)
    script = scratch / "program.py"  # vLLM starts it again
    script.write_text(_HEAD + PROGRAMS[program])
    found = os.pathsep.join(filter(None, [paths.get(program), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, script, folder, tokens, out]
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True
    )
    if not out.exists():
        errors = [text for text in done.stderr.splitlines() if "Error" in text and not text.startswith(" ")]
        return [hows, (errors or done.stderr.splitlines() or ["no logits"])[-1][:200]]
    return [hows, f"{mean_kl(np.load(own), np.load(out)):.1e}"]


if __name__ == "__main__":
    main()

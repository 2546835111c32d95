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
import tempfile
from pathlib import Path

import numpy as np

import bridge
from scripts.benchlib import Lines, bench, option
from scripts.check.programs import PROGRAMS, divergence_or_error, run

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
                folders = [scratch / "-".join(case) for case in cases]
                stderr = run(program, folders, scratch / "tokens.npy", paths.get(program))
            for (type, format), how in hows.items():
                result = divergence_or_error(scratch / f"{type}-{format}", scratch / f"{type}.npy", stderr)
                yield program, type, format, how, result


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


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("program", "GGUF", "format", "layers", "KL divergence"))

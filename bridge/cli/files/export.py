"""`gguf-bridge export`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.checkpoint.formats.registry import EXPORTED, in_words
from bridge.cli.options import add_calibration, calibration, command
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.system.progress import Bar, say

_DESCRIPTION = """\
Write a GGUF as a checkpoint folder, with rows and names as transformers has them. Types
without offsets (Q4_0, Q8_0, Q6_K, IQ4_XS) and K-quants that were made from an integer
checkpoint keep their codes where the format has enough bits, MLX and HQQ keep those of
Q4_1, Q5_1 and all Q4_K and Q5_K too, and compressed-tensors, MLX and ModelOpt have 4-bit
floats (MXFP4, NVFP4). Other layers are rounded, with --calibrate by GPTQ on a text, or become
floats where the format has too few bits. A table tells which.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "export", run, _DESCRIPTION)
    p.add_argument("model", help="GGUF, or any shard of one")
    p.add_argument("out", type=Path, help="folder to write")
    formats = ("floats", *EXPORTED)
    p.add_argument(
        "--format", choices=formats, default="floats", metavar="NAME", help=f"{in_words(formats)} (default: floats)"
    )
    p.add_argument(
        "--bits", type=int, metavar="N",
        help="bits of a layer at most: if its codes take more, or if it is of floats, it is rounded to N (default: "
        f"those of its codes, or the least that add under {REQUANTIZED_LIMIT:.0%}% of their noise)",
    )  # fmt: skip
    p.add_argument(
        "--config", metavar="DIR", type=Path,
        help="folder with config.json and tokenizer, which are copied, as are the weights of a vision tower (default: "
        "both are made of the GGUF's metadata)",
    )  # fmt: skip
    p.add_argument(
        "--dtype", choices=("F16", "BF16", "F32"),
        help="type of all floats (default: BF16 if the GGUF has tensors of that type, else F16)",
    )  # fmt: skip
    p.add_argument("--force", action="store_true", help="replace a checkpoint folder that exists")
    add_calibration(p)


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.model}")
    from bridge.conversion.checkpoints.export import export

    with Bar("quantizing", unit=" layers", timed=False) as layers, Bar("exporting") as bar:
        done = export(
            a.model, a.out, a.format, bits=a.bits, config=a.config, dtype=a.dtype,
            calibrate=calibration(a, layers, layers.say), force=a.force, progress=bar,
        )  # fmt: skip
    print(done.summary())
    return 0

"""`gguf-bridge repack`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.checkpoint.formats.registry import FORMATS, in_words
from bridge.checkpoint.labels.hosts import HOSTS
from bridge.cli.files.upload import Uploading, add_upload
from bridge.cli.options import add_calibration, calibration, command, further
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.system.progress import Bar, say

_DESCRIPTION = """\
Write a quantized checkpoint in another format, with its codes where that holds them. From GPTQ to
v1 or v2, zero points alone are rewritten.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "repack", run, _DESCRIPTION)
    p.add_argument("source", help="quantized checkpoint: a folder, a Hub id (org/name), or a .pt file")
    p.add_argument("out", type=Path, help="folder to write (never the source itself)")
    formats = ("floats", *FORMATS)
    p.add_argument(
        "--format", choices=formats, metavar="NAME",
        help=f"{in_words(formats)} (default: GPTQ as it is, with labels that are true)",
    )  # fmt: skip
    older = further(p, "older names")
    older.add_argument("--checkpoint-format", dest="format", choices=formats, metavar="NAME", help="--format")
    p.add_argument(
        "--for", dest="host", choices=HOSTS, metavar="PROGRAM",
        help=f"write only what this program reads of the format: {in_words([*HOSTS])}",
    )  # fmt: skip
    p.add_argument(
        "--bits", type=int, metavar="N",
        help="bits of a layer at most: codes that take more, and 8-bit floats that the format lacks, are rounded to N "
        f"(default: those of the codes, or the least that add under {REQUANTIZED_LIMIT:.0%}% of their noise)",
    )  # fmt: skip
    p.add_argument(
        "--clamp", action="store_true",
        help="to gptq (v1): make zero points of 0, which it lacks, 1",
    )  # fmt: skip
    p.add_argument(
        "--dtype", choices=("F16", "BF16", "F32"),
        help="type of all floats (default: as they are; of layers that become floats the model's)",
    )  # fmt: skip
    further(p).add_argument(
        "--config", metavar="DIR", type=Path, help="folder with config.json and tokenizer, for a source without them"
    )
    p.add_argument("--force", action="store_true", help="replace a checkpoint folder that exists")
    add_upload(p)
    add_calibration(p)


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.source}")
    from bridge.conversion.checkpoints.repack import repack

    uploading = Uploading(a, a.source, a.out)
    with Bar("quantizing", unit=" layers", timed=False) as layers, Bar("repacking") as bar:
        done = repack(
            a.source, a.out, a.format, host=a.host, bits=a.bits, config=a.config, dtype=a.dtype,
            calibrate=calibration(a, layers, layers.say), clamp=a.clamp, force=a.force,
            cluster=a.spread and a.spread.cluster, progress=bar,
        )  # fmt: skip
    print(done.summary())
    uploading.finish(done)
    return 0

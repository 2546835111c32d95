"""`gguf-bridge repack`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.files.upload import Uploading, add_upload
from bridge.cli.options import command
from bridge.system.progress import Bar, say

_DESCRIPTION = """\
Rewrite a GPTQ checkpoint with its zero points stored as v1 or v2 and its labels
corrected; everything else is copied byte for byte. Use it for a program that misreads
a checkpoint (it answers "!!!!") or supports only v1 or v2, and for 3-bit files of
GPTQModel before 7.0. v1 to v2 is lossless; v1 cannot hold a zero point of 0.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "repack", run, _DESCRIPTION)
    p.add_argument("source", help="GPTQ checkpoint: a folder, a Hub id (org/name), or a .pt file")
    p.add_argument("out", type=Path, help="folder to write (never the source itself)")
    p.add_argument(
        "--checkpoint-format", choices=("gptq", "gptq_v2"),
        help="gptq (v1) or gptq_v2 (default: the data's own; labels and old 3-bit files are corrected)",
    )  # fmt: skip
    p.add_argument(
        "--clamp", action="store_true",
        help="to v1: change zero points of 0 to 1, which moves their groups' weights by one step, and print the cost",
    )  # fmt: skip
    p.add_argument(
        "--config", metavar="DIR", type=Path, help="folder with config.json and tokenizer, for a source without them"
    )
    p.add_argument("--force", action="store_true", help="replace a checkpoint folder that exists")
    add_upload(p)


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.source}")
    from bridge.checkpoint.repack import repack

    uploading = Uploading(a, a.source, a.out)
    with Bar("repacking") as bar:
        done = repack(a.source, a.out, a.checkpoint_format, config=a.config, clamp=a.clamp, force=a.force, progress=bar)
    print(done.summary())
    uploading.finish(done)
    return 0

"""`gguf-bridge edit`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.options import command
from bridge.system.options import entry
from bridge.system.progress import say

_DESCRIPTION = """\
Change keys of a GGUF's metadata, its chat template, and the names of keys and tensors;
the weights stay as they are. --out writes a new file. --in-place writes one too, which takes
MODEL's name once it is whole; links and files with several names are refused.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "edit", run, _DESCRIPTION)
    p.add_argument("model", help="the GGUF; of several shards, the first has all keys")
    p.add_argument("-o", "--out", type=Path, metavar="OUT.gguf", help="the file to write")
    p.add_argument("--in-place", action="store_true", help="replace MODEL itself, in the place of --out")
    p.add_argument(
        "--set", "--metadata", action="append", default=[], metavar="KEY=VALUE", type=entry, dest="metadata",
        help="set a key to a value of its type, or of the one that llama.cpp reads it as, lists as JSON; may be "
        "repeated",
    )  # fmt: skip
    p.add_argument("--chat-template", type=Path, metavar="FILE", help="file with the chat template (Jinja)")
    p.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW", type=entry,
        help="rename a key or a tensor; may be repeated",
    )  # fmt: skip
    p.add_argument("--remove", action="append", default=[], metavar="KEY", help="remove a key; may be repeated")
    p.add_argument("--force", action="store_true", help="replace a file that exists")


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.model}")
    from bridge.conversion.edit import edit

    done = edit(
        a.model, a.out,
        metadata=a.metadata, chat_template=a.chat_template, rename=a.rename, remove=a.remove, force=a.force,
        in_place=a.in_place,
    )  # fmt: skip
    print(done.summary())
    return 0

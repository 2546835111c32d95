"""`gguf-bridge inspect`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.options import command
from bridge.system.progress import Bar, say


def add_parser(commands: Any) -> None:
    p = command(commands, "inspect", run)
    p.add_argument("path", help="checkpoint folder, Hub id (org/name), .pt or GGUF file")
    p.add_argument("--config", metavar="DIR", type=Path, help="folder with config.json and tokenizer, for a bare .pt")
    p.add_argument("--template", metavar="MODEL.gguf", help="the template that convert would be given")


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.path}")
    from bridge.cli.files.describe import describe

    with Bar("looking for codes", unit=" tensors") as bar:
        print(describe(a.path, a.config, a.template, bar))
    return 0

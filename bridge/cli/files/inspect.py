"""`gguf-bridge inspect`."""

import argparse
import json
from pathlib import Path
from typing import Any

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import command
from bridge.cli.use.terminal import generated
from bridge.errors import BridgeError
from bridge.system.progress import Bar, say


def add_parser(commands: Any) -> None:
    p = command(commands, "inspect", run)
    p.add_argument("path", nargs="?", help="checkpoint folder, Hub id (org/name, org/name:Q4_K_M), .pt or GGUF file")
    p.add_argument(
        "--metadata", nargs="?", const="", metavar="KEY",
        help="print the keys of a GGUF's metadata, or all of one key's value",
    )  # fmt: skip
    p.add_argument(
        "--template", nargs="?", const="", metavar="MODEL.gguf",
        help="print the chat template; with a file, of a checkpoint: the template that convert would be given",
    )  # fmt: skip
    p.add_argument("--config", metavar="DIR", type=Path, help="folder with config.json and tokenizer, for a bare .pt")
    add_json(p)


def run(a: argparse.Namespace) -> int:
    for name in ("metadata", "template"):
        if a.path is None and getattr(a, name):  # `inspect --template model.gguf`
            a.path = getattr(a, name)
            setattr(a, name, "")
    if a.path is None:
        raise BridgeError("give the checkpoint or GGUF to describe; see gguf-bridge inspect --help")
    if a.metadata is not None and a.template is not None:
        raise BridgeError("--metadata and --template print different things; give one")
    say(f"reading {a.path}")
    from bridge.cli.files import describe

    if a.metadata is not None:
        found = describe.gguf_metadata(a.path, a.metadata)
        if a.json:
            print_json(found)
        elif a.metadata:
            value = found[a.metadata]
            print(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        else:
            print("\n".join(describe.metadata_lines(found)))
    elif a.template == "":
        text = describe.chat_template(a.path, a.config)
        print_json({"chat_template": text}) if a.json else print(text, file=generated())
    else:
        with Bar("looking for codes", unit=" tensors") as bar:
            asked = a.path, a.config, a.template, bar
            print_json(describe.facts_of(*asked)) if a.json else print(describe.describe(*asked))
    return 0

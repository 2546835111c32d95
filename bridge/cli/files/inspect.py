"""`gguf-bridge inspect`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import command
from bridge.cli.use.terminal import generated
from bridge.errors import BridgeError
from bridge.system.progress import Bar, say

if TYPE_CHECKING:
    from bridge.conversion.weight_check.check import WeightCheck


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
    p.add_argument(
        "--check", action="store_true",
        help="also read all weights, and tell what looks damaged: zeros, NaN, copies, codes as no quantizer makes them",
    )  # fmt: skip
    p.add_argument("--strict", action="store_true", help="as --check, with exit code 1 where something is found")
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
    check = a.check or a.strict
    if check and (a.metadata is not None or a.template == ""):
        raise BridgeError("--check and --strict read the weights; leave out --metadata and --template")
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
            facts = describe.facts_of(a.path, a.config, a.template, bar)
        checked = _check(a) if check else None
        if a.json:
            print_json(facts | (checked.as_dict() if checked else {}))
        else:
            print("\n".join([*describe.lines_of(facts), *(["", *checked.lines()] if checked else [])]))
        return 1 if a.strict and checked and checked.findings else 0
    return 0


def _check(a: argparse.Namespace) -> "WeightCheck":
    from bridge.conversion.weight_check.check import check_weights

    with Bar("checking weights") as bar:
        return check_weights(a.path, config=a.config, progress=bar)

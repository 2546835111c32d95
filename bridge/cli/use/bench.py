"""`gguf-bridge bench`."""

import argparse
from dataclasses import asdict
from typing import Any

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import add_numa, command
from bridge.system.options import positive


def add_parser(commands: Any) -> None:
    p = command(commands, "bench", run)
    p.add_argument("what", help="a GGUF, whose largest tensor of each type is timed, or a type (Q4_K, ...)")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    add_numa(p)
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if it can be")
    add_json(p)


def run(a: argparse.Namespace) -> int:
    from bridge.system.progress import Bar, say

    say(f"reading {a.what}")
    from bridge.checkpoint.files.hub import kind_of, resolve_gguf
    from bridge.runtime import set_numa
    from bridge.runtime.bench import bench

    if a.numa is not None:
        set_numa(a.numa)
    what = a.what if kind_of(a.what) != "hub" else resolve_gguf(a.what)
    with Bar("timing", unit=" rounds") as bar:
        lines = bench(what, device=a.device, threads=a.threads, progress=bar)
    if a.json:
        speeds = [asdict(line) for line in lines if not isinstance(line, str)]
        print_json({"notes": [line for line in lines if isinstance(line, str)], "products": speeds})
        return 0
    for line in lines:
        print(line, flush=True)
    return 0

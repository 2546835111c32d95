"""`gguf-bridge bench`."""

import argparse
from typing import Any

from bridge.cli.options import add_numa, command
from bridge.system.options import positive


def add_parser(commands: Any) -> None:
    p = command(commands, "bench", run)
    p.add_argument("what", help="a GGUF, whose largest tensor of each type is timed, or a type (Q4_K, IQ4_XS, ...)")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    add_numa(p)
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if it can be")


def run(a: argparse.Namespace) -> int:
    from bridge.system.progress import Bar, say

    say(f"reading {a.what}")
    from bridge.runtime import set_numa
    from bridge.runtime.bench import bench

    if a.numa is not None:
        set_numa(a.numa)
    with Bar("timing", unit=" rounds") as bar:
        lines = bench(a.what, device=a.device, threads=a.threads, progress=bar)
    for line in lines:
        print(line, flush=True)
    return 0

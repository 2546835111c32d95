"""`gguf-bridge plot`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.options import command

_DESCRIPTION = """\
Draw what was measured: of a report (convert, quantize or verify --report) the
error, the codes kept and the bits of each layer; of fidelity.py --json the
cost of each conversion; of bench_formats.py, bench_quantize.py and
bench_real.py --json the KL divergence against size; of bench_matvec.py --json
the speed compared with plain reading.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "plot", run, _DESCRIPTION)
    p.add_argument("source", metavar="FILE.json", type=Path, help="the report, or the benchmark's --json")
    p.add_argument("-o", "--out", type=Path, metavar="PICTURE", help=".svg, .png or .pdf (default: FILE.svg)")
    p.add_argument("--dark", action="store_true", help="for a dark page; else an SVG follows the page that shows it")
    p.add_argument("--force", action="store_true", help="replace a picture that exists")


def run(a: argparse.Namespace) -> int:
    from bridge.cli.plot import plot

    print(f"wrote {plot(a.source, a.out, dark=a.dark, force=a.force)}")
    return 0

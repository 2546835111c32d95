"""Figures of reports and benchmarks: `gguf-bridge plot FILE.json`.

`plot` detects four kinds of files by their content, each drawn by its module. matplotlib is an optional extra, `plot`,
and is imported when a figure is drawn.

    tensors      report_figure    of `convert`, `quantize` or `verify` (--report); "title" in it is shown
    checkpoints  fidelity_figure  of `scripts/quality/fidelity.py` (--json)
    formats      kl_figure        of bench_formats, bench_quantize or bench_real in `scripts/quality/` (--json)
                 size_figure      the same, where makers wrote files of different sizes
    products     matvec_figure    of `scripts/speed/bench_matvec.py` (--json)

Common to them: `theme` (colours, writing a file), `layout` (titles, legends, labels), `rows_figure` (marks in rows),
`logarithms` (axes) and `makers` (who made a file).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.options import command
from bridge.errors import BridgeError
from bridge.system.storage.files import read_small, write_bytes
from bridge.system.storage.outputs import ProtectedPaths, check_outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bridge.cli.plot.theme import Theme

ENDINGS = (".svg", ".png", ".pdf")
_KNOWN = "the report of `convert --report`, or the --json of a benchmark in scripts/"
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
    print(f"wrote {plot(a.source, a.out, dark=a.dark, force=a.force)}")
    return 0


def plot(source: str | Path, out: str | Path | None = None, *, dark: bool = False, force: bool = False) -> Path:
    """Draw a report or a benchmark; returns the picture's path.

    source  the JSON file
    out     .svg, .png or .pdf; default: the source's name with .svg
    dark    for a dark page; otherwise an SVG follows the page that shows it
    force   replace an existing file

    Raises BridgeError if the source is something else, matplotlib is missing, or the file cannot be written.
    """
    source = Path(source)
    path = Path(out) if out is not None else source.with_suffix(".svg")
    if path.suffix.lower() not in ENDINGS:
        raise BridgeError(f"{path}: unknown kind of picture; choose a name that ends in {', '.join(ENDINGS)}")
    record = _read(source)
    check_outputs([path], force, ProtectedPaths((source,)))
    draw = _drawer(source, record)
    try:
        from bridge.cli.plot import theme
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "matplotlib":
            raise
        raise BridgeError("plot needs matplotlib; pip install gguf-bridge[plot]") from None
    colours = theme.DARK if dark else theme.LIGHT
    try:
        with theme.style(colours):
            data = theme.rendered(draw(record, colours), path.suffix[1:].lower(), colours)
    except theme.NothingToDraw as problem:
        raise BridgeError(f"{source}: {problem}; there is nothing to draw") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise BridgeError(f"{source}: has been changed ({problem!r}); write it again: {_KNOWN}") from problem
    write_bytes(path, data)
    return path


def _read(source: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_small(source))
    except FileNotFoundError:
        raise BridgeError(f"{source}: no such file; give {_KNOWN}") from None
    except (ValueError, RecursionError) as problem:
        raise BridgeError(f"{source}: is not JSON ({problem}); give {_KNOWN}") from None
    if not isinstance(record, dict):
        raise BridgeError(f"{source}: is not a report; give {_KNOWN}")
    return record


def _drawer(source: Path, record: dict[str, Any]) -> Callable[[dict[str, Any], Theme], Figure]:
    """The function that draws this file; it imports its module when called."""
    known = {"tensors": "report", "checkpoints": "fidelity", "formats": "kl", "products": "matvec"}
    for key, module in known.items():
        if isinstance(record.get(key), list):
            if not record[key]:
                raise BridgeError(f"{source}: its list of {key} is empty; there is nothing to draw")
            return lambda *arguments: import_module(f"bridge.cli.plot.{module}_figure").figure(*arguments)
    raise BridgeError(f"{source}: is not a report; give {_KNOWN}")

"""Figures of reports and benchmarks: `gguf-bridge plot FILE.json`.

A JSON file goes in, a picture comes out. `plot` detects four kinds of files by their content, each drawn by its module
(report_figure, fidelity_figure, kl_figure, matvec_figure); `theme` has the colours and makes the file:

    tensors      the report of `convert`, `quantize` or `verify` (--report): error, codes kept, bits, by layer and kind
    checkpoints  `scripts/quality/fidelity.py` (--json): what converting adds to each checkpoint's own cost
    formats      `scripts/quality/`: bench_formats, bench_quantize or bench_real (--json): KL divergence against bits
                 per weight
    products     `scripts/speed/bench_matvec.py` (--json): GB/s of each type, compared with ggml and with plain reading

matplotlib is an optional extra, `plot`, and is imported when a figure is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError
from bridge.system.storage.files import read_small, write_bytes
from bridge.system.storage.outputs import ProtectedPaths, check_outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bridge.cli.plot.theme import Theme

ENDINGS = (".svg", ".png", ".pdf")
_KNOWN = "the report of `convert --report`, or the --json of a benchmark in scripts/"


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

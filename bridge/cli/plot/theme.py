"""The common part of all pictures: colours for light and dark pages, sizes of text, and writing a figure to a file.

An SVG is drawn for a light page and has a style sheet that swaps the colours of page and ink if the reader's page is
dark (prefers-color-scheme). Its background is opaque, so it can be read on any page. Texts remain text, which makes
the file small and searchable.
"""

import io
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, THEIRS, OTHER = "#2f7fe0", "#d9822b", "#4a9d5b"  # contrast of 3:1 or more with both pages
MARKERS = "osD^v"
_DOTS_PER_INCH = 144  # of a PNG


class NothingToDraw(Exception):
    """The file is of a known kind but has nothing to draw; the message tells why."""


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    page: str
    ink: str
    faint: str  # grids and frames


LIGHT = Theme("#ffffff", "#1f2328", "#d0d7de")
DARK = Theme("#0d1117", "#e6edf3", "#3d444d")


def style(theme: Theme) -> AbstractContextManager[None]:
    """matplotlib's settings while a picture is drawn and saved."""
    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.page),
        **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "legend.labelcolor"), theme.ink),
        **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), theme.ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), theme.faint),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.axisbelow": True,
        "axes.titlesize": 10,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        "font.size": 9,
        "grid.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "gguf-bridge",  # equal figures make equal files
        "image.interpolation": "none",  # one pixel per cell in the file
    }
    return matplotlib.rc_context(settings)


def rendered(figure: Figure, kind: str, theme: Theme) -> bytes:
    """The file's bytes: "svg", "png" or "pdf"."""
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure.savefig(buffer, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
    if kind != "svg" or theme != LIGHT:
        return buffer.getvalue()
    return _following(buffer.getvalue().decode("utf-8")).encode("utf-8")


def _following(svg: str) -> str:
    """An SVG of the light theme with the rules that make it dark on a dark page."""
    rules = "".join(
        f'[style*="{use}: {light}"]{{{use}:{dark}!important}}'
        for light, dark in zip(astuple(LIGHT), astuple(DARK), strict=True)
        for use in ("fill", "stroke")
    )
    head, tag, rest = svg.partition("<defs>")
    return f"{head}<style>@media (prefers-color-scheme:dark){{{rules}}}</style>{tag}{rest}"


def plain_frame(axes: Axes, grid: str = "both") -> None:
    """A grid behind the data, and no tick marks."""
    axes.grid(True, axis=grid)  # type: ignore[arg-type]
    axes.tick_params(length=0, which="both")

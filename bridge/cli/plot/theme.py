"""The common part of all pictures: colours for light and dark pages, sizes of text, and writing a figure to a file.

An SVG has an opaque background of its own, so its contrast is the same on every page. It is drawn for a light page and
has a style sheet that swaps all colours where the reader prefers dark (prefers-color-scheme). In an <img> of GitHub or
of the site, browsers answer that query with the color-scheme of the page around it, so the site's own toggle counts
too; a browser that asks the system instead shows a white panel on a dark page, which can be read as well.

Pictures are 432 points (576 pixels) wide: with texts of 11 points, they can be read on a phone, where a picture is
shrunk to 358 pixels and the texts to 9. Texts remain text, which makes the file small and searchable.
"""

import io
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 432  # points, of every picture
TEXT, TITLE = 11, 13  # points, of the smallest text and of the title
_INCH = 72  # points
_DOTS_PER_INCH = 144  # of a PNG


class NothingToDraw(Exception):
    """The file is of a known kind but has nothing to draw; the message tells why."""


@dataclass(frozen=True)
class Theme:
    """Colours of a page. Against `page`, those of texts and data have a contrast of 4.5:1 or more, `frame` of 3:1.

    Blue and orange differ for all kinds of colour blindness; grey differs from both in lightness or in hue.
    """

    page: str
    ink: str
    frame: str  # axes
    grid: str
    ours: str  # gguf-bridge
    theirs: str  # llama.cpp and ggml
    other: str  # checkpoints, and files of other programs


LIGHT = Theme("#ffffff", "#1f2328", "#818b98", "#d8dee4", "#0860ca", "#b34700", "#59636e")
DARK = Theme("#0d1117", "#e6edf3", "#6e7781", "#2f3742", "#58a6ff", "#f0883e", "#a4adb8")


def style(theme: Theme) -> AbstractContextManager[None]:
    """matplotlib's settings while a picture is drawn and saved."""
    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.page),
        **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "legend.labelcolor"), theme.ink),
        **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), theme.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.frame),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **dict.fromkeys(("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), TEXT),
        "axes.axisbelow": True,
        "figure.dpi": _INCH,  # pixels are points
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        "font.size": TEXT,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "svg.fonttype": "none",
        "svg.hashsalt": "gguf-bridge",  # equal figures make equal files
        "image.interpolation": "none",  # one pixel per cell in the file
    }
    return matplotlib.rc_context(settings)


def new_figure(height: float, **settings: Any) -> Figure:
    """An empty picture of this height in points."""
    return Figure(figsize=(WIDTH / _INCH, height / _INCH), **settings)


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

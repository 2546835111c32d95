"""Marks in rows: a row for each model or type, its name at the left, values along a logarithmic axis.

SmolLM2 135M   o-----------D      0.03
Gemma 3 270M     o------D         0.11
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.cli.plot.layout import EDGE, LINE, Entry, Page, text_width
from bridge.cli.plot.logarithms import decades, plain_logarithm
from bridge.cli.plot.theme import TEXT, WIDTH, Theme, plain_frame

_PITCH = 1.75 * TEXT  # points, from row to row
_MORE = 1.25 * TEXT  # points, for each further line of a row's name
_AXIS = 40  # points, for the axis and its name
_GAP = 8  # points, between names, axes and notes


@dataclass
class Row:
    """A row of a picture, or a heading without marks.

    name   at the left; lines are divided by \\n
    marks  values and their looks, the last ones on top; a line joins them
    note   at the right
    """

    name: str
    marks: Sequence[tuple[float, Entry]] = ()
    note: str = ""

    @property
    def height(self) -> float:
        return _PITCH + _MORE * self.name.count("\n")


def rows_figure(
    rows: Sequence[Row], legend: Sequence[Entry], theme: Theme, *, title: str, about: str, axis: str, note: str = "",
    least: float = 0,
) -> Figure:  # fmt: skip
    """The picture of rows, the first one at the top.

    title, about, legend  as in `Page`
    axis                  name and unit of the values
    note                  what the notes at the right are
    least                 where values of 0 are drawn
    """
    body = sum(row.height for row in rows)
    page = Page(title, about, legend, body + _AXIS + (LINE if note else 0))
    names = max(text_width(line, bold=not row.marks) for row in rows for line in row.name.split("\n"))
    notes = max(map(text_width, [note, *(row.note for row in rows)]))
    left, right = EDGE + names + _GAP, WIDTH - EDGE - (notes + _GAP)
    axes = page.axes(left, page.bottom + _AXIS, right, page.bottom + _AXIS + body)
    axes.set_ylim(body, 0)
    axes.set_xscale("log")
    values = [max(value, least) for row in rows for value, _ in row.marks]
    axes.set_xlim(*decades(min(values), max(values)))
    plain_frame(axes, "x")
    plain_logarithm(axes.xaxis)
    middles = []
    down = 0.0
    for row in rows:
        middles.append(down + row.height / 2)
        down += row.height
        _draw_marks(axes, row, middles[-1], least, theme)
        _note(axes, row.note, (1 + (_GAP + notes) / (right - left), middles[-1]), "center")
    _note(axes, note, (1 + (_GAP + notes) / (right - left), -4), "bottom")
    axes.set_yticks(middles, [row.name for row in rows], linespacing=1.15)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("normal" if row.marks else "bold")
    axes.set_xlabel(axis)
    axes.spines["left"].set_visible(False)
    return page.figure


def _draw_marks(axes: Axes, row: Row, y: float, least: float, theme: Theme) -> None:
    values = [max(value, least) for value, _ in row.marks]
    if len(values) > 1:
        axes.plot([min(values), max(values)], [y, y], color=theme.frame, linewidth=1.6, zorder=1)
    for value, (_, entry) in zip(values, row.marks, strict=True):
        axes.plot(
            [value], [y], entry.marker, color=entry.colour, markersize=8, markeredgewidth=1.8,
            markerfacecolor=entry.colour if entry.filled else theme.page,
        )  # fmt: skip


def _note(axes: Axes, text: str, at: tuple[float, float], vertical: str) -> None:
    if text:
        axes.annotate(text, at, xycoords=("axes fraction", "data"), ha="right", va=vertical, annotation_clip=False)

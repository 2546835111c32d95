"""KL divergence against size: a point for each file, a line for each maker through its best ones."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.cli.plot import makers
from bridge.cli.plot.layout import EDGE, Entry, Labels, Page, Point, text_width
from bridge.cli.plot.logarithms import decades, plain_logarithm, tick_names
from bridge.cli.plot.theme import WIDTH, Theme, plain_frame

_HEIGHT = 330  # points, of the axes
_AXIS = 40  # points, for the axis and its name
_ASIDE = 9  # points, from the points of two files of one size to the arrow between them
_SAME_SIZE = 0.99  # of the bytes: a file for a budget may be a little smaller than what it is compared with
_SIZED = re.compile(r"([\d.]+?)(?:\.0)? ([kMGT]?)B")  # names of files that were made for a size
_STYLES = (("o", True, "-"), ("s", False, "--"), ("^", True, ":"), ("v", False, "-."))  # of lines of one colour

Row = dict[str, Any]


def figure(record: Row, rows: Sequence[Row], theme: Theme) -> Figure:
    """The picture of rows with a "kl"; see `kl_figure.figure`. With size budgets: of the best makers alone."""
    if any(_sized(row) for row in rows):
        rows = _of_the_best(rows)
    lines: dict[tuple[str, bool], list[Row]] = {}  # files of one maker by type, or by size
    for row in sorted(rows, key=lambda row: (row["bpw"], row["kl"])):
        lines.setdefault((row["maker"], _sized(row)), []).append(row)
    entries = _entries(lines, theme)
    legend = [entry for entry in entries.values() if not entry.line]  # the name of a line is beside it
    if any(row.get("checkpoint_kl") for row in rows):
        legend.append(Entry("the checkpoint itself, at its GGUF's size", theme.ink, "o", False))
    title = f"{record['model']}: KL divergence against size"
    about = "From the float model, in nats per token; lower left is better"
    page = Page(title, about, legend, _HEIGHT + _AXIS)
    across, up = _limits(rows)
    left = EDGE + max(map(text_width, tick_names(*up))) + 6
    room = left + 4, page.bottom + _AXIS, WIDTH - EDGE, page.top
    axes = page.axes(left, *room[1:])
    axes.set_yscale("log")
    axes.set(xlim=across, ylim=up)
    for key, members in lines.items():
        _draw(axes, members, entries[key], theme)
    arrows = [(_place(axes, peer), _place(axes, row), row["kl"] / peer["kl"]) for peer, row in _same_sizes(rows)]
    for start, end, _ in arrows:
        _draw_arrow(axes, start, end, theme)
    _write_labels(axes, room, lines, entries, arrows, theme)
    axes.set_xlabel(makers.bits_of(record))
    plain_frame(axes)
    plain_logarithm(axes.yaxis)
    return page.figure


def _sized(row: Row) -> bool:
    return _SIZED.fullmatch(row["name"]) is not None


def _of_the_best(rows: Sequence[Row]) -> list[Row]:
    """The files of llama.cpp with its imatrix, if there are any, and those of `quantize` with the method of the sizes.

    Others are in the benchmark's table: with them, the picture could not be read in seconds.
    """
    method = next(row["maker"] for row in rows if _sized(row))
    peers = {row["maker"] for row in rows if not makers.ours(row["maker"])}
    peers = {maker for maker in peers if maker.endswith("imatrix")} or peers
    return [row for row in rows if row["maker"] in {method, *peers}]


def _entries(lines: dict[tuple[str, bool], list[Row]], theme: Theme) -> dict[tuple[str, bool], Entry]:
    """The look of each line; of one colour, size budgets and what comes last have the plainest."""
    looks = {colour: iter(_STYLES * len(lines)) for colour in (theme.ours, theme.theirs, theme.other)}
    entries = {}
    for maker, sized in sorted(reversed(lines), key=lambda key: not key[1]):
        colour = makers.colour(maker, theme)
        marker, filled, line = next(looks[colour])
        drawn = colour != theme.other and len(lines[maker, sized]) > 1  # makers of single files have no line
        entries[maker, sized] = Entry(makers.name(maker), colour, marker, filled, line if drawn else "")
    return entries


def _limits(rows: Sequence[Row]) -> tuple[Point, Point]:
    """The least and largest bits and divergence of the axes: room for labels around the data, most at the right."""
    bits = [row["bpw"] for row in rows]
    values = [row[key] for row in rows for key in ("kl", "checkpoint_kl") if row.get(key)]
    spread = max(max(bits) - min(bits), 0.5)
    return (min(bits) - 0.25 * spread, max(bits) + 0.5 * spread), decades(min(values), max(values))


def _draw(axes: Axes, members: Sequence[Row], entry: Entry, theme: Theme) -> None:
    """Draw points with their standard errors, their line, and rings for the checkpoints that they were made from."""
    axes.errorbar(
        [row["bpw"] for row in members], [row["kl"] for row in members],
        [float(row.get("kl_error") or 0) for row in members], color=entry.colour, marker=entry.marker,
        markerfacecolor=entry.colour if entry.filled else theme.page, markersize=7, markeredgewidth=1.6,
        linestyle="", label=entry.text,
    )  # fmt: skip
    if entry.line:
        corners = zip(*_best(members), strict=True)
        axes.plot(*corners, color=entry.colour, linestyle=entry.line, linewidth=1.8, zorder=1.5)
    for row in members:
        if row.get("checkpoint_kl"):
            axes.plot(row["bpw"], row["checkpoint_kl"], "o", color=theme.ink, markerfacecolor="none", markersize=13)


def _best(members: Sequence[Row]) -> list[Point]:
    """The corners of a line: files that are better than all smaller ones."""
    return [
        (row["bpw"], row["kl"])
        for i, row in enumerate(members)
        if all(row["kl"] < other["kl"] for other in members[:i])
    ]


def _same_sizes(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Files of llama.cpp with those for a size budget that are as large, the largest first."""
    for row in sorted(filter(_sized, rows), key=lambda row: -row["bpw"]):
        for peer in rows:
            theirs = not makers.ours(peer["maker"]) and "bytes" in peer and "bytes" in row
            if theirs and _SAME_SIZE * peer["bytes"] <= row["bytes"] <= peer["bytes"]:
                yield peer, row


def _draw_arrow(axes: Axes, start: Point, end: Point, theme: Theme) -> None:
    looks = {"arrowstyle": "->", "color": theme.ink, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    (x, high), (_, low) = start, end
    where: Any = {"xycoords": "figure points", "textcoords": "figure points"}
    axes.annotate("", (x + _ASIDE, low), (x + _ASIDE, high), arrowprops=looks, **where)


def _place(axes: Axes, row: Row, key: str = "kl") -> Point:
    """Where a file's point is, in points of the figure."""
    x, y = axes.transData.transform((row["bpw"], row[key]))
    return float(x), float(y)


def _write_labels(
    axes: Axes, room: tuple[float, float, float, float], lines: dict[tuple[str, bool], list[Row]],
    entries: dict[tuple[str, bool], Entry], arrows: Sequence[tuple[Point, Point, float]], theme: Theme,
) -> None:  # fmt: skip
    """Name points, say what arrows mean, and name lines."""
    paths = {key: _points(axes, _best(members)) for key, members in lines.items() if entries[key].line}
    marks = [_place(axes, row) for members in lines.values() for row in members]
    rings = [_place(axes, row, "checkpoint_kl") for rows in lines.values() for row in rows if row.get("checkpoint_kl")]
    shafts = [((x + _ASIDE, high), (x + _ASIDE, low)) for (x, high), (_, low), _ in arrows]
    labels = Labels(axes, room, marks, rings, [*(part for path in paths.values() for part in pairwise(path)), *shafts])
    both = {maker for maker, sized in lines if sized}
    for (maker, sized), members in lines.items():
        for row in members:
            name = _point_name(row, maker in both)
            labels.add(_place(axes, row), name, entries[maker, sized].colour)
    for i, (((x, high), (_, low)), (*_, ratio)) in enumerate(zip(shafts, arrows, strict=True)):
        text = f"{ratio:.2f} times" if i else f"same size,\n{ratio:.2f} times\nthe divergence"
        labels.add_along([(x, high + (low - high) * share) for share in (0.5, 0.35, 0.65, 0.2, 0.8)], text, theme.ink)
    named = set()
    for (maker, sized), path in sorted(paths.items(), key=lambda item: not item[0][1]):
        if maker not in named:
            named.add(maker)
            along = [
                (x0 + (x1 - x0) * share, y0 + (y1 - y0) * share)
                for (x0, y0), (x1, y1) in pairwise(path)
                for share in (0.5, 0.25, 0.75, 0, 1)
            ]
            entry = entries[maker, sized]
            labels.add_along(
                along or path, entry.text.replace(" with", "\nwith").replace(" quantize", "\nquantize"), entry.colour
            )
    labels.draw()


def _points(axes: Axes, corners: Sequence[Point]) -> list[Point]:
    return [(float(x), float(y)) for x, y in axes.transData.transform(corners)]


def _point_name(row: Row, with_option: bool) -> str:
    """A file's name at its point: its type; where the maker took sizes too, the option that made the file."""
    name = str(row["name"])
    if not makers.ours(row["maker"]):
        return name
    if not with_option:
        return name.partition(",")[0]
    return "--size " + _SIZED.sub(r"\1\2", name) if _sized(row) else f"--type {name}"

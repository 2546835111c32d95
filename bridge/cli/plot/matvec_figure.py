"""Matrix times vector: marks for each type, ours and ggml's, as shares of the speed of plain reading.

Plain reading was measured in the same rounds, so that a machine's slow moments are in both.
"""

from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from bridge.blocks.read import READ
from bridge.cli.plot.layout import EDGE, LINE, Entry, Page, text_width
from bridge.cli.plot.theme import TEXT, WIDTH, Theme, plain_frame

_PITCH = 1.5 * TEXT  # points, from type to type
_AXIS = 26  # points, for the numbers below a panel
_GAP = 14  # points, between panels
_FROM_MEMORY = 2  # times the cache: a matrix of that size leaves nothing of itself there

Row = dict[str, Any]
Panel = tuple[int, int, int]  # rows and columns of a matrix, threads


def figure(record: Row, theme: Theme) -> Figure:
    """The picture of bench_matvec's JSON; a panel for each shape and number of threads, two beside each other."""
    panels: dict[Panel, list[Row]] = {}
    for row in record["products"]:
        rows, columns = row["shape"]
        panels.setdefault((int(rows), int(columns), int(row["threads"])), []).append(row)
    legend = [Entry("gguf-bridge", theme.ours, "o")]
    if any(row.get("ggml_gbs") for row in record["products"]):
        legend.append(Entry("ggml", theme.theirs, "s"))
    legend.append(Entry("reading the matrix", theme.ink, "", line="--"))
    ordered = sorted(panels.items(), key=lambda item: (item[0][2], -item[0][0]))
    pairs = [ordered[i : i + 2] for i in range(0, len(ordered), 2)]
    heights = [max(len(members) for _, members in pair) * _PITCH + _AXIS + 2.6 * LINE for pair in pairs]
    about = "Shares of the speed of only reading the same bytes, measured in turns; right is better"
    page = Page("Matrix times vector: speed by type", about, legend, sum(heights), str(record.get("machine") or ""))
    names = max(text_width(row["type"]) for row in record["products"])
    left = EDGE + names + 8
    across = (WIDTH - EDGE - 14 - left - _GAP) / 2 if len(ordered) > 1 else WIDTH - EDGE - 14 - left
    most = max(1.15, *(1.04 * row["gbs"] / row["read_gbs"] for row in record["products"]))
    top = page.top
    for pair, height in zip(pairs, heights, strict=True):
        for number, (panel, members) in enumerate(pair):
            start = left + number * (across + _GAP)
            axes = page.axes(start, top - height + _AXIS, start + across, top - 2.4 * LINE)
            _marks(axes, members, theme)
            axes.set_xlim(0, most)
            axes.set_ylim(max(len(members) for _, members in pair) - 0.4, -0.6)
            axes.set_title(_title(panel, members, record.get("cache_bytes")), loc="left", linespacing=1.2)
            if number:
                axes.tick_params(labelleft=False)
        top -= height
    return page.figure


def _title(panel: Panel, members: list[Row], cache: int | None) -> str:
    rows, columns, threads = panel
    read = median(row["read_gbs"] for row in members)
    where = _place((rows, columns), members, cache)
    return f"{rows} x {columns}{where}\n{threads} thread{'s' * (threads != 1)}; reading: {read:.0f} GB/s"


def _place(shape: tuple[int, int], rows: list[Row], cache: int | None) -> str:
    """Where the matrices of a panel lie, as far as the size of the machine's largest cache tells."""
    sizes = [shape[0] * shape[1] * READ[row["type"]].bpw / 8 for row in rows]
    if cache is not None and max(sizes) <= cache:
        return ", in the cache"
    return ", from memory" if cache is not None and min(sizes) >= _FROM_MEMORY * cache else ""


def _marks(axes: Axes, rows: list[Row], theme: Theme) -> None:
    places = list(range(len(rows)))
    ours = [row["gbs"] / row["read_gbs"] for row in rows]
    if any(row.get("ggml_gbs") for row in rows):
        theirs = [(row.get("ggml_gbs") or 0) / row["read_gbs"] for row in rows]
        low, high = zip(*map(sorted, zip(ours, theirs, strict=True)), strict=True)
        axes.hlines(places, low, high, color=theme.frame, linewidth=1.6, zorder=1)
        axes.plot(theirs, places, "s", color=theme.theirs, markersize=6, label="ggml", clip_on=False)
    axes.plot(ours, places, "o", color=theme.ours, markersize=7, label="gguf-bridge")
    axes.axvline(1, color=theme.ink, linewidth=1.4, linestyle="--", zorder=1.2)
    axes.xaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_yticks(places, [row["type"] for row in rows])
    plain_frame(axes, "both")
    axes.spines["left"].set_visible(False)

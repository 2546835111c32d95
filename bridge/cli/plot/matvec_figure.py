"""Matrix times vector: bars for each type, ours and ggml's, as shares of the speed of plain reading.

Plain reading was measured in the same rounds, so that a machine's slow moments are in both.
"""

from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bridge.blocks.read import READ
from bridge.cli.plot.theme import OURS, THEIRS, Theme, plain_frame

_WIDTH = 0.38  # of a bar; two bars and a gap are 1
_SLOPED = 16  # types whose names have room at 45 degrees
_FROM_MEMORY = 2  # times the cache: a matrix of that size leaves nothing of itself there


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of bench_matvec's JSON; a panel for each shape and number of threads."""
    panels: dict[tuple[tuple[int, int], int], list[dict[str, Any]]] = {}
    for row in record["products"]:
        rows, columns = row["shape"]
        panels.setdefault(((int(rows), int(columns)), int(row["threads"])), []).append(row)
    across = 2 if len(panels) > 1 else 1
    down = -(-len(panels) // across)
    picture = Figure(figsize=(8.2, 2.6 * down + 0.7), layout="constrained")
    grid = picture.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    ordered = sorted(panels.items(), key=lambda item: (-item[0][0][0], item[0][1]))
    for axes, ((shape, threads), members) in zip(grid.flat, ordered, strict=False):
        _bars(axes, members, theme)
        location = _place(shape, members, record.get("cache_bytes"))
        axes.set_title(f"{shape[0]} x {shape[1]}{location}, {threads} thread{'s' * (threads != 1)}", loc="left")
    for axes in grid[:, 0]:
        axes.set_ylabel("of plain reading")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    title = "speed of matrix times vector, compared with plainly reading the matrix: higher is better"
    picture.suptitle("\n".join(filter(None, (title, record.get("machine")))), x=0.01, ha="left", fontsize=9)
    return picture


def _place(shape: tuple[int, int], rows: list[dict[str, Any]], cache: int | None) -> str:
    """Where the matrices of a panel lie, as far as the size of the machine's largest cache tells."""
    sizes = [shape[0] * shape[1] * READ[row["type"]].bpw / 8 for row in rows]
    if cache is not None and max(sizes) <= cache:
        return ", in the cache"
    return ", from memory" if cache is not None and min(sizes) >= _FROM_MEMORY * cache else ""


def _bars(axes: Axes, rows: list[dict[str, Any]], theme: Theme) -> None:
    both = any(row.get("ggml_gbs") for row in rows)
    shift = _WIDTH / 2 if both else 0
    places = range(len(rows))
    ours = [row["gbs"] / row["read_gbs"] for row in rows]
    axes.bar([i - shift for i in places], ours, _WIDTH, color=OURS, label="gguf-bridge")
    if both:
        theirs = [(row.get("ggml_gbs") or 0) / row["read_gbs"] for row in rows]
        axes.bar([i + shift for i in places], theirs, _WIDTH, color=THEIRS, label="ggml")
    axes.axhline(1, color=theme.ink, linewidth=1.4, linestyle="--", label="plain reading of the same bytes")
    read = median(row["read_gbs"] for row in rows)
    axes.annotate(
        f"{read:.0f} GB/s", (1, 1), xycoords="axes fraction", xytext=(-2, -2), textcoords="offset points",
        ha="right", va="top", size=8,
    )  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    slope: Any = {"rotation": 90, "va": "center"} if len(rows) > _SLOPED else {"rotation": 45}
    axes.set_xticks(places, [row["type"] for row in rows], ha="right", rotation_mode="anchor", **slope)
    axes.set_ylim(0, max(1.15, *ours))
    plain_frame(axes, "y")

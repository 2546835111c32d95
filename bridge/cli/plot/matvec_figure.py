"""Matrix times vector: bars of GB/s for each type, ours and ggml's, with marks for the speed of plain reading."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.cli.plot.theme import OURS, THEIRS, Theme, plain_frame

_WIDTH = 0.38  # of a bar; two bars and a gap are 1
_CACHED = 32 << 20  # weights above which a matrix comes from memory


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
        place = "from memory" if shape[0] * shape[1] > _CACHED else "in the cache"
        axes.set_title(f"{shape[0]} x {shape[1]}, {place}, {threads} thread{'s' * (threads != 1)}", loc="left")
    for axes in grid[:, 0]:
        axes.set_ylabel("GB/s of GGUF bytes")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    picture.suptitle(record.get("machine", ""), x=0.01, ha="left", fontsize=9)
    return picture


def _bars(axes: Axes, rows: list[dict[str, Any]], theme: Theme) -> None:
    both = any(row.get("ggml_gbs") for row in rows)
    shift = _WIDTH / 2 if both else 0
    places = range(len(rows))
    axes.bar([i - shift for i in places], [row["gbs"] for row in rows], _WIDTH, color=OURS, label="gguf-bridge")
    if both:
        theirs = [row.get("ggml_gbs") or 0 for row in rows]
        axes.bar([i + shift for i in places], theirs, _WIDTH, color=THEIRS, label="ggml")
    half = _WIDTH + 0.05
    axes.hlines(
        [row["read_gbs"] for row in rows], [i - half for i in places], [i + half for i in places], color=theme.ink,
        linewidth=1.6, label="plain reading, same run",
    )  # fmt: skip
    axes.set_xticks(places, [row["type"] for row in rows], rotation=45, ha="right", rotation_mode="anchor")
    axes.set_ylim(bottom=0)
    plain_frame(axes, "y")

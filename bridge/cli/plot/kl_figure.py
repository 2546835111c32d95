"""KL divergence against size: a point for each format, a line for each maker through its best ones."""

from itertools import compress
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.cli.plot.theme import MARKERS, OTHER, OURS, THEIRS, NothingToDraw, Theme, plain_frame

_COLOURS = {"gguf-bridge": OURS, "llama.cpp": THEIRS}
_NEAR = 1.25  # divergences whose names would overlap


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of a benchmark's JSON: {"model", "formats": [{"name", "maker", "bpw", "kl", maybe "kl_error"}]}.

    A row of a carried file may have "checkpoint_kl", the divergence of the checkpoint that it was made from: a ring.
    """
    rows = [row for row in record["formats"] if row.get("kl") and row["kl"] > 0]
    if not rows:
        raise NothingToDraw("none of its formats has a KL divergence")
    picture = Figure(figsize=(8.2, 6), layout="constrained")
    axes = picture.subplots()
    makers = list(dict.fromkeys(row["maker"] for row in rows))
    for maker, marker in zip(makers, MARKERS * len(makers), strict=False):
        members = sorted((row for row in rows if row["maker"] == maker), key=lambda row: (row["bpw"], row["kl"]))
        colour = next((c for name, c in _COLOURS.items() if maker.startswith(name)), OTHER)
        bits, divergences = ([float(row[key]) for row in members] for key in ("bpw", "kl"))
        errors = [float(row.get("kl_error") or 0) for row in members]
        axes.errorbar(bits, divergences, errors, color=colour, marker=marker, markersize=5, linestyle="", label=maker)
        best = [all(y < other for other in divergences[:i]) for i, y in enumerate(divergences)]
        drawn = colour in _COLOURS.values()  # makers of single files have no line
        if drawn:
            axes.plot(*zip(*compress(zip(bits, divergences, strict=True), best), strict=True), color=colour)
        rings = [(x, row["checkpoint_kl"]) for row, x in zip(members, bits, strict=True) if row.get("checkpoint_kl")]
        if rings:
            label = "the checkpoint itself (drawn at its GGUF's size)"
            across, divergence = zip(*rings, strict=True)
            axes.plot(across, divergence, "o", color=theme.ink, markerfacecolor="none", markersize=11, label=label)
        names = [row["name"].partition(",")[0] if colour == OURS else row["name"] for row in members]  # see the legend
        for i, (name, x, y) in enumerate(zip(names, bits, divergences, strict=True)):
            if not drawn:
                _name(axes, name, x, y, below=sorted(divergences).index(y) % 2 == 0)
            elif best[i]:
                _name(axes, name, x, y, below=True, left=True)
            elif i + 1 < len(bits) and bits[i + 1] == x and divergences[i + 1] < _NEAR * y:
                names[i + 1] = f"{name}, {names[i + 1]}"
            else:
                _name(axes, name, x, y, below=False)
    axes.set_yscale("log")
    axes.margins(x=0.09, y=0.1)
    axes.set_xlabel(f"bits per weight, scales included ({record.get('bits_of', 'whole file')})")
    axes.set_ylabel("KL divergence from the float model (nats per token)")
    axes.set_title(f"{record['model']}: lower left is better", loc="left")
    plain_frame(axes)
    axes.legend(loc="upper right")
    return picture


def _name(axes: Axes, name: str, x: float, y: float, below: bool, left: bool = False) -> None:
    """Write a point's name beside it: left and below where a line comes from above."""
    offset = (-3 if left else 5, -3 if below else 3)
    across, along = "right" if left else "left", "top" if below else "bottom"
    axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", size=8, ha=across, va=along)

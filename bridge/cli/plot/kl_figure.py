"""KL divergence against size: a point for each format, a line for each maker."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.cli.plot.theme import MARKERS, OTHER, OURS, THEIRS, NothingToDraw, Theme, plain_frame

_COLOURS = {"gguf-bridge": OURS, "llama.cpp": THEIRS}


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of a benchmark's JSON: {"model", "formats": [{"name", "maker", "bpw", "kl", maybe "kl_error"}]}.

    A row of a carried file may have "checkpoint_kl", the divergence of the checkpoint that it was made from: a ring.
    """
    rows = [row for row in record["formats"] if row.get("kl") and row["kl"] > 0]
    if not rows:
        raise NothingToDraw("none of its formats has a KL divergence")
    picture = Figure(figsize=(8.2, 5.2), layout="constrained")
    axes = picture.subplots()
    makers = list(dict.fromkeys(row["maker"] for row in rows))
    for maker, marker in zip(makers, MARKERS * len(makers), strict=False):
        members = sorted((row for row in rows if row["maker"] == maker), key=lambda row: row["bpw"])
        colour = next((c for name, c in _COLOURS.items() if maker.startswith(name)), OTHER)
        bits, divergences = ([float(row[key]) for row in members] for key in ("bpw", "kl"))
        errors = [float(row.get("kl_error") or 0) for row in members]
        line = "-" if colour in _COLOURS.values() else ""  # none for makers of single files
        axes.errorbar(bits, divergences, errors, color=colour, marker=marker, markersize=5, linestyle=line, label=maker)
        rings = [(x, row["checkpoint_kl"]) for row, x in zip(members, bits, strict=True) if row.get("checkpoint_kl")]
        if rings:
            label = "the checkpoint itself (drawn at its GGUF's size)"
            across, divergence = zip(*rings, strict=True)
            axes.plot(across, divergence, "o", color=theme.ink, markerfacecolor="none", markersize=11, label=label)
        for row, x, y in zip(members, bits, divergences, strict=True):
            _name(axes, row["name"], x, y, colour, above=sorted(divergences).index(y) % 2 == 1)
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.1)
    axes.set_xlabel(f"bits per weight, scales included ({record.get('bits_of', 'whole file')})")
    axes.set_ylabel("KL divergence from the float model (nats per token)")
    axes.set_title(f"{record['model']}: lower left is better", loc="left")
    plain_frame(axes)
    axes.legend(loc="upper right")
    return picture


def _name(axes: Axes, name: str, x: float, y: float, colour: str, above: bool) -> None:
    """Write a point's name where its line leaves room: our line is the lowest, that of llama.cpp is above it.

    above  a name without a line goes above the point, not below
    """
    if colour == OURS:
        name = name.partition(",")[0]  # the legend has the rest
        place = {"xytext": (-3, -5), "ha": "right", "va": "top"}
    elif colour == THEIRS:
        place = {"xytext": (4, 6), "ha": "center", "va": "bottom"}
    else:
        place = {"xytext": (5, 3 if above else -3), "ha": "left", "va": "bottom" if above else "top"}
    axes.annotate(name, (x, y), textcoords="offset points", size=8, **place)  # type: ignore[arg-type]

"""How far GGUFs are from their checkpoints, compared with what quantizing the checkpoints had cost."""

from typing import Any

from matplotlib.figure import Figure

from bridge.cli.plot.theme import OTHER, OURS, THEIRS, NothingToDraw, Theme, plain_frame

_LEAST = 1e-8  # where a divergence of 0 is drawn


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of fidelity.py's JSON: {"checkpoints": [{"name", "kl_linears", "kl_file", maybe "kl_checkpoint"}]}.

    A row may have "usual", [{"preset", "imatrix", "kl"}]: dequantizing it and quantizing that by llama.cpp.
    """
    rows = sorted(record["checkpoints"], key=lambda row: row["kl_linears"])
    if not any(row["kl_file"] > 0 for row in rows):
        raise NothingToDraw("none of its files differs from its checkpoint")
    picture = Figure(figsize=(8.2, 0.26 * len(rows) + 1.7), layout="constrained")
    axes = picture.subplots()
    places = range(len(rows))
    marks = (
        ("kl_linears", "added by converting the linears", OURS, "o", OURS),
        ("kl_file", "added by the whole file (embeddings and head in Q8_0)", OURS, "o", "none"),
        ("kl_checkpoint", "the checkpoint itself, from its float model", OTHER, "D", OTHER),
    )
    for key, label, colour, marker, inside in marks:
        if shown := [(row[key], y) for y, row in zip(places, rows, strict=True) if row.get(key) is not None]:
            across, down = zip(*shown, strict=True)
            axes.plot(
                [max(x, _LEAST) for x in across], down, marker, color=colour, markerfacecolor=inside, markersize=5.5,
                label=label,
            )  # fmt: skip
    for imatrix, label, inside in ((False, "", "none"), (True, ", with an imatrix", THEIRS)):
        usual = [
            (way["kl"], y)
            for y, row in zip(places, rows, strict=True)
            for way in row.get("usual", ())
            if way["imatrix"] is imatrix
        ]
        if usual:
            across, down = zip(*usual, strict=True)
            axes.plot(
                across, down, "s", color=THEIRS, markerfacecolor=inside, markersize=5.5,
                label=f"dequantized, then quantized by llama.cpp{label}",
            )  # fmt: skip
    exact = f"; at {_LEAST:.0e}: exact" if any(row["kl_linears"] == 0 for row in rows) else ""
    axes.set_xscale("log")
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("KL divergence (nats per token); left is better" + exact)
    axes.set_title("what a conversion adds, compared with what quantizing had cost", loc="left")
    plain_frame(axes)
    picture.legend(loc="outside lower left", ncols=2)
    return picture

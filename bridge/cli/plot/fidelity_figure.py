"""What converting adds to checkpoints, compared with what the usual way adds and with what quantizing them had cost."""

from typing import Any

from matplotlib.figure import Figure

from bridge.cli.plot.layout import Entry
from bridge.cli.plot.rows_figure import Row, rows_figure
from bridge.cli.plot.theme import NothingToDraw, Theme

_LEAST = 1e-8  # where a divergence of 0 is drawn


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of fidelity.py's JSON: {"checkpoints": [{"name", "kl_file", maybe "kl_checkpoint", "usual"}]}.

    "usual" are files of llama.cpp's quantizer, of the dequantized checkpoint: {"kl", "imatrix"}; the best is drawn.
    A name is a model's and, after a comma, that of what wrote the checkpoint; a model is the heading of its rows.
    The note is how many times as much the usual way adds.
    """
    checkpoints = record["checkpoints"]
    if not any(row["kl_file"] > 0 for row in checkpoints):
        raise NothingToDraw("none of its files differs from its checkpoint")
    weighted = any(way["imatrix"] for row in checkpoints for way in row.get("usual", ()))
    usual = f"dequantizing and llama.cpp{' with imatrix' if weighted else ''} add"
    converting, through_floats, quantizing = (
        Entry("gguf-bridge convert adds", theme.ours, "o"), Entry(usual, theme.theirs, "s"),
        Entry("quantizing had cost", theme.other, "D"),
    )  # fmt: skip
    rows = []
    model = ""
    for row in checkpoints:
        of_model, comma, tool = str(row["name"]).partition(", ")
        if comma and of_model != model:
            rows.append(Row(of_model))
        model = of_model
        added = float(row["kl_file"])
        marks, note = [], ""
        if row.get("kl_checkpoint") is not None:
            marks.append((float(row["kl_checkpoint"]), quantizing))
        if row.get("usual"):
            best = min(way["kl"] for way in row["usual"])
            marks.append((float(best), through_floats))
            times = best / added if added else 0
            note = f"{times:,.0f} times" if times >= 10 else f"{times:.2g} times" if added else ""
        rows.append(Row(tool or of_model, [*marks, (added, converting)], note))
    drawn = {entry for row in rows for _, entry in row.marks}
    exact = f"; {_LEAST:.0e} is exact" if any(row["kl_file"] == 0 for row in checkpoints) else ""
    about = f"KL divergence that each step adds; left is better{exact}"
    return rows_figure(
        rows, [entry for entry in (converting, through_floats, quantizing) if entry in drawn], theme,
        title="From quantized checkpoints to GGUF", about=about, axis="KL divergence, nats per token",
        note="usual way:" if any(row.note for row in rows) else "", least=_LEAST,
    )  # fmt: skip

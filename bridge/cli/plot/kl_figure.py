"""KL divergence of files by who made them: in rows where all makers wrote files of the same types, or against size."""

from collections import Counter
from typing import Any

from matplotlib.figure import Figure

from bridge.cli.plot import makers, size_figure
from bridge.cli.plot.layout import Entry
from bridge.cli.plot.logarithms import plain_number
from bridge.cli.plot.rows_figure import Row, rows_figure
from bridge.cli.plot.theme import NothingToDraw, Theme

_LLAMA_CPP = "llama.cpp"  # an arithmetic, in a row's "texts"
_NATS = "KL divergence, nats per token"
_MARKERS = "sDv"  # of a type's peers; ours are circles


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of a benchmark's JSON: {"model", "formats": [{"name", "maker", "bpw", "kl", maybe "kl_error"}]}.

    A row of a carried file may have "checkpoint_kl", the divergence of the checkpoint that it was made from: a ring.
    """
    rows = [row for row in record["formats"] if row.get("kl") and row["kl"] > 0]
    if not rows:
        raise NothingToDraw("none of its formats has a KL divergence")
    of_ours, of_peers = (Counter(row["name"] for row in rows if makers.ours(row["maker"]) == own) for own in (1, 0))
    if set(of_ours) == set(of_peers):
        once = {*of_ours.values(), *of_peers.values()} == {1}
        return (_by_type if once else _by_maker)(record, rows, theme)
    return size_figure.figure(record, rows, theme)


def _about(record: dict[str, Any]) -> str:
    return f"From the float model; left is better; {makers.bits_of(record)}"


def _by_type(record: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Figure:
    """A row for each type, with a peer's mark and ours, and the ratio of ours to the peer's."""
    entries: dict[str, Entry] = {}
    for maker in sorted({row["maker"]: None for row in rows}, key=makers.ours):
        marker = "o" if makers.ours(maker) else _MARKERS[len(entries) % len(_MARKERS)]
        filled = makers.ours(maker) or not entries
        entries[maker] = Entry(makers.name(maker), makers.colour(maker, theme), marker, filled)
    by_type: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -row["bpw"]):
        by_type.setdefault(row["name"], []).append(row)
    drawn = []
    for name, both in by_type.items():
        theirs, ours = sorted(both, key=lambda row: makers.ours(row["maker"]))
        marks = [(row["kl"], entries[row["maker"]]) for row in (theirs, ours)]
        drawn.append(Row(f"{name}, {ours['bpw']:.2f} bits", marks, f"{ours['kl'] / theirs['kl']:.2f}"))
    title = f"{record['model']}: KL divergence by type"
    legend = list(entries.values())
    return rows_figure(drawn, legend, theme, title=title, about=_about(record), axis=_NATS, note="ratio")


def _by_maker(record: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Figure:
    """A group of rows for each type, a row for each maker; a second mark for llama.cpp's arithmetic, if measured."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_type.setdefault(row["name"], []).append(row)
    twice = any(_LLAMA_CPP in row.get("texts", {}) for row in rows)
    drawn = []
    for name, members in by_type.items():
        size = f", {members[0]['bytes'] / 1e6:.0f} MB" if "bytes" in members[0] else ""
        drawn.append(Row(f"{name}{size}, {members[0]['bpw']:.2f} bits"))
        for row in members:
            colour = makers.colour(row["maker"], theme)
            marks = [(float(row["kl"]), Entry("", colour, "o"))]
            if texts := row.get("texts", {}).get(_LLAMA_CPP):
                mean = sum(text["kl"] for text in texts.values()) / len(texts)
                marks.append((mean, Entry("", colour, "D", filled=False)))
            name_of_row = makers.name(row["maker"]).removeprefix("gguf-bridge ")
            drawn.append(Row(name_of_row, marks, plain_number(row["kl"], digits=2)))
    legend = [Entry("llama.cpp", theme.theirs, "o"), Entry("gguf-bridge", theme.ours, "o")]
    if twice:
        legend += [Entry("in float32", theme.ink, "o"), Entry("run by llama.cpp", theme.ink, "D", filled=False)]
    note = "in float32" if twice else ""
    title = f"{record['model']}: KL divergence by quantizer"
    return rows_figure(drawn, legend, theme, title=title, about=_about(record), axis=_NATS, note=note)

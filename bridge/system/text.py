"""Formatting for the terminal: tables, percentages, sizes, and one line for notes that many modules share."""

import re
from collections.abc import Iterable

from bridge.errors import shortened


def summarise_notes(notes: Iterable[str]) -> list[str]:
    """Notes about many modules ("<module>: ...") that differ in numbers only become one line with their count."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        name, colon, text = note.partition(": ")
        of_module = colon and re.fullmatch(r"[\w.]+\.[\w.]+", name)
        alike.setdefault(re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text) if of_module else note, []).append(note)
    lines = []
    for members in alike.values():
        first, more = members[0], len(members) - 1
        name, _, text = first.partition(": ")
        lines.append(shortened(f"{name} and {more} more: {text}" if more and text else first))
    return lines


def align(rows: list[tuple[str, ...]], left: tuple[bool, ...]) -> list[str]:
    """The lines of a table; `left` tells which columns are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if a else c.rjust(w) for c, w, a in zip(row, widths, left, strict=True)).rstrip()
        for row in rows
    ]


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage with `digits` significant digits, more before the point: "0.0039%", "180%"."""
    text = f"{100 * share:.{digits}g}%"
    return f"{100 * share:.0f}%" if "e+" in text else text


def size_text(n: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"

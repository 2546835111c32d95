"""Formatting for the terminal: tables, percentages, sizes, and one line for notes that many modules share.

Names and texts out of somebody's files may hold control characters, which would steer the terminal: `printable` shows
them instead. Standard output passes through it as a whole (`cli/use/terminal.py`), lines on standard error by `tell`.
"""

import re
from collections.abc import Iterable, Sequence

from bridge.errors import BridgeError, shortened
from bridge.system.status_line import LINE, clock_text

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {c: f"\\x{c:02x}" if c < 256 else f"\\u{c:04x}" for c in _CONTROLS if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """A text whose control characters are shown as in Python, "\\x1b"; line breaks and tabs stay."""
    return text.translate(_SHOWN)


def tell(text: str) -> None:
    """Print a line for people on standard error."""
    LINE.print_above(printable(text))


def note_lines(notes: Iterable[str], label: str = "note: ") -> list[str]:
    """Notes as they are printed, a line each; those about many modules ("<module>: ...") that differ in numbers only
    become one line with their count. `label`: what a line begins with."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        name, colon, text = note.partition(": ")
        of_module = colon and re.fullmatch(r"[\w.]+\.[\w.]+", name)
        alike.setdefault(re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text) if of_module else note, []).append(note)
    lines = []
    for members in alike.values():
        first, more = members[0], len(members) - 1
        name, _, text = first.partition(": ")
        lines.append(label + shortened(f"{name} and {more} more: {text}" if more and text else first))
    return lines


def align(rows: list[tuple[str, ...]], left: tuple[bool, ...]) -> list[str]:
    """The lines of a table; `left` tells which columns are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if a else c.rjust(w) for c, w, a in zip(row, widths, left, strict=True)).rstrip()
        for row in rows
    ]


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The most similar of known words, at most `count`: those that are spelled alike but for case and punctuation, or
    else but for a few letters. Digits must agree as far as there are any: Q4_K is no slip for Q5_K."""
    from difflib import get_close_matches

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    def digits(text: str) -> str:
        return re.sub(r"[^0-9]", "", text)

    spellings: dict[str, list[str]] = {}
    for each in known:
        if digits(each).startswith(digits(word)) or digits(word).startswith(digits(each)):
            spellings.setdefault(plain(each), []).append(each)
    near = [plain(word)] if plain(word) in spellings else get_close_matches(plain(word), spellings, count)
    return [each for spelling in near for each in spellings[spelling]][:count]


def meant(word: str, known: Iterable[str], count: int = 1) -> str:
    """What follows the error of an unknown word: "; did you mean Q4_K?", or nothing where no known word is near."""
    near = nearest(word, known, count)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def unknown(what: str, word: str, known: Sequence[str]) -> BridgeError:
    """The error of a word that is none of the known ones: all of them, and the one that was meant, if one is near."""
    return BridgeError(f"unknown {what} {word!r}: choose one of {', '.join(known)}{meant(word, known)}")


def few_of(names: Sequence[str], count: int = 3) -> str:
    """The first of some names, and how many there are more: "a, b, c and 2 more"."""
    listed = ", ".join(names[:count])
    return listed if len(names) <= count else f"{listed} and {len(names) - count} more"


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage with `digits` significant digits, more before the point: "0.0039%", "180%"."""
    text = f"{100 * share:.{digits}g}%"
    return f"{100 * share:.0f}%" if "e+" in text else text


def size_text(n: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def took_text(seconds: float, compiling: float, speed: str = "") -> str:
    """The time that work took with its speed, and, unless it is short, that of compiling kernels, left out there."""
    once = f", and {_took(compiling)} to compile kernels, once on this machine" if compiling >= 0.5 else ""
    return f"{_took(seconds)}{speed}{once}"


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_text(seconds)


def duration_text(seconds: float) -> str:
    """Seconds, minutes or hours, as exact as an estimate is: "40 s", "12 min", "3 h", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{seconds / 60:.0f} min" if hours < 1.5 else f"{hours:.2g} h" if hours < 10 else f"{hours:.0f} h"

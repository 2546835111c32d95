"""Titles, legends and labels of pictures, placed in points: with texts measured, nothing overlaps.

Texts are measured in DejaVu Sans, which matplotlib brings. It is as wide as Verdana and wider than most fonts that a
browser may show in its place, so texts have room there too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from bridge.cli.plot.theme import TEXT, TITLE, WIDTH, new_figure

LINE = 1.4 * TEXT  # points, from one line of text to the next
EDGE = 6  # points, around a picture
_GAP, _SAMPLE = 16, 20  # points: between entries of a legend, and for an entry's mark
_SPACING = 1.15  # of the lines of a label
_PASSES = 4  # over all labels
_MARK = 5  # points, half of a mark
_CLEAR = 4  # points, left and right of a label
_FAR = (9, 12, 17, 24, 34, 46)  # points, from a mark to its label
_LEADER = 22  # points, from where a label has a line to its mark

Point = tuple[float, float]
Segment = tuple[Point, Point]
Box = tuple[float, float, float, float]  # left, bottom, right, top in points


@cache
def text_width(text: str, size: float = TEXT, bold: bool = False) -> float:
    """Points that a line of text takes."""
    if not text.strip():
        return 0
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().x1)


def wrapped(text: str, width: float, bold: bool = False) -> list[str]:
    """Lines of a text that are at most `width` points wide, if its words are."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", bold=bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@dataclass(frozen=True)
class Entry:
    """A line of a legend: a text in the colour of the marks that it explains."""

    text: str
    colour: str
    marker: str
    filled: bool = True
    line: str = ""


class Page:
    """A picture with its title, the lines below it and its legend; what is drawn comes between `bottom` and `top`.

    title  in bold; one line
    about  what is measured, its unit and which way is better
    body   points that the drawing below takes, its axis included
    foot   a text below it
    """

    def __init__(self, title: str, about: str, legend: Sequence[Entry], body: float, foot: str = "") -> None:
        room = WIDTH - 2 * EDGE
        lines, rows = wrapped(about, room), _rows(legend, room)
        below = wrapped(foot, room) if foot else []
        head = EDGE + 1.5 * TITLE + LINE * (len(lines) + len(rows)) + 8
        self.height = head + body + LINE * len(below)
        self.figure = new_figure(self.height)
        self.bottom, self.top = LINE * len(below), self.height - head
        y = self.height - EDGE
        size = TITLE
        while text_width(title, size, bold=True) > room and size > TEXT:
            size -= 1
        self._text(EDGE, y, title, size, weight="bold")
        y -= 1.5 * TITLE
        for line in lines:
            self._text(EDGE, y, line)
            y -= LINE
        for row in rows:
            x = float(EDGE)
            for entry in row:
                self._entry(x, y - 0.5 * TEXT, entry)
                self._text(x + _SAMPLE + 4, y, entry.text, color=entry.colour)
                x += _entry_width(entry) + _GAP
            y -= LINE
        y = self.bottom - 2
        for line in below:
            self._text(EDGE, y, line)
            y -= LINE

    def axes(self, left: float, bottom: float, right: float, top: float) -> Axes:
        """Axes with these edges, in points."""
        across, up = WIDTH, self.height
        return self.figure.add_axes((left / across, bottom / up, (right - left) / across, (top - bottom) / up))

    def _text(self, x: float, y: float, text: str, size: float = TEXT, **settings: str) -> None:
        self.figure.text(x / WIDTH, y / self.height, text, size=size, va="top", ha="left", **settings)  # type: ignore[arg-type]

    def _entry(self, x: float, y: float, entry: Entry) -> None:
        across = [part / WIDTH for part in ((x, x + _SAMPLE) if entry.line else (x + _SAMPLE / 2,))]
        face = entry.colour if entry.filled else "none"
        if entry.line:
            style: Any = entry.line
            self.figure.add_artist(Line2D(across, [y / self.height] * 2, color=entry.colour, linestyle=style))
        middle = [(x + _SAMPLE / 2) / WIDTH], [y / self.height]
        self.figure.add_artist(
            Line2D(*middle, color=entry.colour, marker=entry.marker, markerfacecolor=face, markersize=7, linestyle="")
        )


def _entry_width(entry: Entry) -> float:
    return _SAMPLE + 4 + text_width(entry.text)


def _rows(legend: Sequence[Entry], room: float) -> list[list[Entry]]:
    """The entries by lines that have room for them."""
    rows: list[list[Entry]] = []
    used = 0.0
    for entry in legend:
        width = _entry_width(entry)
        if rows and used + _GAP + width <= room:
            rows[-1].append(entry)
            used += _GAP + width
        else:
            rows.append([entry])
            used = width
    return rows


class Labels:
    """Labels beside marks, each where it covers least: other labels, marks and lines.

    Axes have their limits before.
    """

    def __init__(
        self, axes: Axes, room: Box, marks: Sequence[Point], rings: Sequence[Point], lines: Sequence[Segment]
    ) -> None:
        self.axes, self.room = axes, room
        self.marks, self.rings, self.segments = marks, rings, lines
        self.labels: list[_Label] = []

    def add(self, mark: Point, text: str, colour: str) -> None:
        """A label of a mark; a thin line leads to it from afar."""
        self.labels.append(_Label([mark], text, colour, bold=False, of_point=True))

    def add_along(self, places: Sequence[Point], text: str, colour: str) -> None:
        """A bold label of one or more lines beside one of these places, the first if all are as good."""
        self.labels.append(_Label(places, text, colour, bold=True, of_point=False))

    def place(self) -> None:
        """Find the places: one label after another, then each of them again with all others in place."""
        for _ in range(_PASSES):
            for label in self.labels:
                others = [other.box for other in self.labels if other is not label and other.box]
                _, label.box, label.mark = min(self._choices(label, others))

    def draw(self) -> None:
        self.place()
        for label in self.labels:
            assert label.box is not None
            if label.of_point and _distance(label.box, label.mark) > _LEADER:
                self._draw_leader(label.mark, label.box, label.colour)
            left, bottom, right, top = label.box
            x, _ = label.mark
            # the side towards the mark stays where it is if the reader's font is narrower
            align, edge = (
                ("left", left) if left >= x else ("right", right) if right <= x else ("center", (left + right) / 2)
            )
            self.axes.annotate(
                label.text, (edge, (bottom + top) / 2), xycoords="figure points", ha=align, va="center",
                color=label.colour, weight="bold" if label.bold else "normal", linespacing=_SPACING,
                annotation_clip=False,
            )  # fmt: skip

    def _choices(self, label: "_Label", others: Sequence[Box]) -> Iterable[tuple[float, Box, Point]]:
        """Places of a label with what each costs."""
        lines = label.text.split("\n")
        width = max(text_width(line, bold=label.bold) for line in lines)
        height = _SPACING * TEXT * len(lines)
        for number, mark in enumerate(label.marks):
            for cost, box in self._candidates(mark, width, height):
                unclear = label.of_point and self._unclear(box, mark)
                yield cost + number + self._cost(box, others) + 60 * unclear, box, mark

    def _draw_leader(self, mark: Point, box: Box, colour: str) -> None:
        end = _nearest(box, mark)
        way = 0.6 * _MARK / _distance(box, mark)
        start = mark[0] + way * (end[0] - mark[0]), mark[1] + way * (end[1] - mark[1])
        self.axes.annotate(
            "", end, start, xycoords="figure points", textcoords="figure points",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip

    def _candidates(self, mark: Point, width: float, height: float) -> Iterable[tuple[float, Box]]:
        """Boxes around a mark, each with what its place costs: near ones first, right before left before above."""
        x, y = mark
        for far in _FAR:
            sides = (
                (x + far, y - height / 2), (x - far - width, y - height / 2),
                (x + far, y + far / 2), (x - far - width, y - far / 2 - height),
                (x + far, y - far / 2 - height), (x - far - width, y + far / 2),
                (x - width / 2, y + far), (x - width / 2, y - far - height),
            )  # fmt: skip
            for order, (left, bottom) in enumerate(sides):
                yield far / 4 + order / 10, (left, bottom, left + width, bottom + height)

    def _unclear(self, box: Box, mark: Point) -> bool:
        """Whether a label is about as near to another mark as to its own, or its leader passes through another."""
        distance = _distance(box, mark)
        others = [other for other in self.marks if other != mark]
        if distance <= _LEADER:
            return any(_distance(box, other) < distance + 2 for other in others)
        leader = mark, _nearest(box, mark)
        return any(
            _crosses(_around(other), leader) for other in (*others, *self.rings) if math.dist(other, mark) > _MARK
        )

    def _cost(self, box: Box, others: Sequence[Box]) -> float:
        left, bottom, right, top = self.room
        outside = box[0] < left or box[1] < bottom or box[2] > right or box[3] > top
        wide = box[0] - _CLEAR, box[1], box[2] + _CLEAR, box[3]
        marks = map(_around, (*self.marks, *self.rings))
        covered = sum(_overlap(wide, other) for other in (*others, *marks))
        crossed = sum(_crosses(wide, segment) for segment in self.segments)
        return 1000 * outside + 50 * (covered > 0) + covered + 20 * crossed


@dataclass
class _Label:
    marks: Sequence[Point]
    text: str
    colour: str
    bold: bool
    of_point: bool
    box: Box | None = None  # where it was placed
    mark: Point = (0, 0)  # and beside which mark


def _around(mark: Point) -> Box:
    return mark[0] - _MARK, mark[1] - _MARK, mark[0] + _MARK, mark[1] + _MARK


def _nearest(box: Box, point: Point) -> Point:
    """The point of a box that is nearest to another."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _distance(box: Box, point: Point) -> float:
    return math.dist(_nearest(box, point), point)


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes have in common."""
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _crosses(box: Box, segment: Segment) -> bool:
    """Whether a segment has a part inside a box: its share inside each pair of edges has to have something left."""
    (x0, y0), (x1, y1) = segment
    first, last = 0.0, 1.0
    for start, step, low, high in ((x0, x1 - x0, box[0], box[2]), (y0, y1 - y0, box[1], box[3])):
        if step == 0:
            if not low < start < high:
                return False
            continue
        enter, leave = sorted(((low - start) / step, (high - start) / step))
        first, last = max(first, enter), min(last, leave)
    return first < last

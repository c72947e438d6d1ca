"""The three charts as inline SVG: accuracy against latency, latency by size, latency against FLOPs.

Built as XML trees, so that names from files are escaped and the result is well-formed. Colours come from the page's
style sheet by class (`s0`…`s5`), each with a shape of its own, so that no meaning hangs on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

from converters.artifact import DEFAULT_PRECISION
from profiles.report import text
from profiles.report.choose import Choice
from profiles.report.data import Interval, Row, size_order
from profiles.report.scales import (
    Box,
    Place,
    Scale,
    linear,
    logarithmic,
    place_label,
    places_around,
    text_box,
    tick_text,
)

WIDTHS = {"wide": (860, 400), "narrow": (344, 316)}  # two drawings; the page shows the one that fits
FIXED_SLOTS = {"onnx": 0, "tflite": 1, "coreml": 2}
NUM_SLOTS = 6
LOG_ABOVE = 40  # a linear axis from zero squashes the fast files when the slowest takes this many times as long

MIN_SPAN = 2.0  # points of accuracy on the axis, so that noise does not fill the chart


@dataclass(frozen=True)
class Style:
    """How one series looks: a colour and shape for the file, filled and solid for the smallest number of threads."""

    slot: int
    is_hollow: bool
    label: str


Styles = dict[tuple[str, str, str, int], Style]


def series_of(row: Row) -> tuple[str, str, str, int]:
    return row.model, row.format, row.precision, row.threads


def make_styles(rows: Sequence[Row]) -> Styles:
    """A style for each series (model, format, precision, threads) that has a timed row, in the table's order."""
    timed = [row for row in rows if row.is_timed]
    variants = list(dict.fromkeys(series_of(row)[:3] for row in timed))
    several_models = len({variant[0] for variant in variants}) > 1
    fixed = {
        variant: FIXED_SLOTS[variant[1]]
        for variant in variants
        if not several_models and variant[1] in FIXED_SLOTS and DEFAULT_PRECISION[variant[1]] == variant[2]
    }
    free = [*range(len(FIXED_SLOTS), NUM_SLOTS), *(slot for slot in FIXED_SLOTS.values() if slot not in fixed.values())]
    others = [variant for variant in variants if variant not in fixed]
    slots = fixed | {variant: free[index % len(free)] for index, variant in enumerate(others)}
    fewest = min((row.threads for row in timed), default=1)
    styles: Styles = {}
    for row in timed:
        variant = series_of(row)[:3]
        name = [row.model] if several_models else []
        name += [text.format_name(row.format)] + ([row.precision] if variant not in fixed and row.precision else [])
        label = f"{' '.join(name)}, {text.threads(row.threads)}"
        styles[series_of(row)] = Style(slots[variant], row.threads > fewest, label)
    return styles


def legend_key(style: Style) -> str:
    """A small SVG sample of a series for the legend."""
    root = ElementTree.Element("svg", {"viewBox": "0 0 34 16", "class": "key", "aria-hidden": "true"})
    _add(root, "path", d="M1 8H33", **{"class": _line_class(style)})
    _marker(root, 17, 8, style)
    return ElementTree.tostring(root, encoding="unicode")


def accuracy_chart(ranked: Sequence[Row], choice: Choice, styles: Styles, kind: str, *, name: str) -> str:
    """Accuracy (up) against latency (right), each with its interval; the front is drawn as a staircase."""
    front = ", ".join(f"{row.file} at {row.size} on {text.threads(row.threads)}" for row in choice.front)
    canvas = _Canvas(kind, name, "Accuracy against latency", f"{len(ranked)} measured files. On the front: {front}.")
    ends = [end for row in ranked for end in (_accuracy(row).low, _accuracy(row).high)]
    x = _latency_scale(ranked, canvas.left, canvas.right, canvas.count_x)
    low, high = 100 * min(ends), 100 * max(ends)
    y = linear(min(low, high - MIN_SPAN), high, canvas.bottom, canvas.top, count=canvas.count_y)
    canvas.axes(x, y, "latency, ms (median; faster is further left)", "accuracy, %")
    canvas.staircase([(x(_latency(row).value), y(100 * _accuracy(row).value)) for row in choice.front])
    for row in ranked:
        style, latency, share = styles[series_of(row)], _latency(row), _accuracy(row)
        px, py = x(latency.value), y(100 * share.value)
        canvas.bar(px, y(100 * share.low), px, y(100 * share.high), style)
        canvas.bar(x(latency.low), py, x(latency.high), py, style)
    for row in ranked:
        place = x(_latency(row).value), y(100 * _accuracy(row).value)
        canvas.mark(*place, styles[series_of(row)], _tooltip(row), is_picked=row is choice.row)
    _label_sizes(canvas, ranked, choice, x, y)
    return canvas.svg()


def _label_sizes(canvas: _Canvas, ranked: Sequence[Row], choice: Choice, x: Scale, y: Scale) -> None:
    """Sizes at the ends of the accuracy bars: first the pick, then the front, then the others where there is room."""
    order = sorted(ranked, key=lambda row: (row is not choice.row, row not in choice.front))
    for row in order:
        css = "label picked" if row is choice.row else "label" if row in choice.front else "label muted"
        words = f"ship {row.size}" if row is choice.row else row.size
        reach = 9.0 if row is choice.row else 5.0
        middle = y(100 * _accuracy(row).value)
        top, bottom = (
            min(middle - reach, y(100 * _accuracy(row).high)),
            max(middle + reach, y(100 * _accuracy(row).low)),
        )
        canvas.label(words, places_around(x(_latency(row).value), top, bottom), css)


def size_chart(timed: Sequence[Row], styles: Styles, kind: str, *, name: str) -> str:
    """Latency by input size, a line for each format and number of threads, with intervals."""
    sizes = sorted({row.size for row in timed}, key=size_order)
    canvas = _Canvas(kind, name, "Latency by size", f"Median latency at sizes {', '.join(sizes)}, one line a series.")
    x = _size_scale(sizes, canvas.left + 22, canvas.right - 22)
    y = _latency_scale(timed, canvas.bottom, canvas.top, canvas.count_y)
    ticks = {x(_length(size)): size for size in sizes}
    canvas.axes(x, y, "input size", "latency, ms", x_ticks=ticks)
    for index, (series, style) in enumerate(styles.items()):
        shift = 4.0 * (index - (len(styles) - 1) / 2)  # side by side, so that intervals at one size can be seen
        line = sorted((row for row in timed if series_of(row) == series), key=lambda row: size_order(row.size))
        places = [(x(_length(row.size)) + shift, row) for row in line]
        canvas.polyline([(px, y(_latency(row).value)) for px, row in places], _line_class(style))
        for px, row in places:
            canvas.bar(px, y(_latency(row).low), px, y(_latency(row).high), style)
            canvas.mark(px, y(_latency(row).value), style, _tooltip(row))
    return canvas.svg()


def flops_chart(counted: Sequence[Row], styles: Styles, kind: str, *, name: str) -> str:
    """Latency against FLOPs on logarithmic axes; a dotted line is where one GFLOP costs the same time."""
    costs = [row.ms_per_gflop or 0.0 for row in counted]
    words = f"A GFLOP costs from {text.number(min(costs))} to {text.number(max(costs))} ms."
    canvas = _Canvas(kind, name, "Latency against FLOPs", words)
    x = logarithmic(min(map(_gflop, counted)), max(map(_gflop, counted)), canvas.left, canvas.right)
    ends = [end for row in counted for end in (_latency(row).low, _latency(row).high) if end > 0]
    y = logarithmic(min(ends), max(ends), canvas.bottom, canvas.top)
    canvas.axes(x, y, "GFLOP an image (a multiply-add counts as two)", "latency, ms")
    lines = [
        (x(a), y(a * cost), x(b), y(b * cost), cost) for cost in _ticks_around(costs) for a, b in _span(x, y, cost)
    ]
    for x1, y1, x2, y2, _ in lines:
        canvas.polyline([(x1, y1), (x2, y2)], "equal-cost")
    for row in counted:
        low, high = max(_latency(row).low, y.low), _latency(row).high
        canvas.bar(x(_gflop(row)), y(low), x(_gflop(row)), y(high), styles[series_of(row)])
    for row in counted:
        canvas.mark(x(_gflop(row)), y(_latency(row).value), styles[series_of(row)], _tooltip(row))
    slowest = {(row.size, row.gflop): row for row in sorted(counted, key=lambda row: _latency(row).high)}
    for row in slowest.values():  # one label for all marks of a size
        top = y(_latency(row).high)
        canvas.label(row.size, places_around(x(_gflop(row)), top, top + 12), "label")
    for x1, y1, x2, y2, cost in lines:
        places = [
            (x2 - part * (x2 - x1) - 5, y2 - part * (y2 - y1) - 5, "end") for part in (0, 0.1, 0.2, 0.35, 0.5, 0.65)
        ]
        canvas.label(f"{tick_text(cost)} ms/GFLOP", places, "cost")
    return canvas.svg()


def _ticks_around(costs: Sequence[float]) -> tuple[float, ...]:
    """Round costs between the least and the greatest; no more than five, or the lines hide the marks."""
    ticks = logarithmic(min(costs), max(costs), 0, 1).ticks
    return ticks if len(ticks) <= 5 else ticks[:: math.ceil(len(ticks) / 5)]


def _span(x: Scale, y: Scale, cost: float) -> list[tuple[float, float]]:
    """From which GFLOP to which the line latency = cost × GFLOP is inside the chart; empty where it never is."""
    low, high = max(x.low, y.low / cost), min(x.high, y.high / cost)
    return [(low, high)] if low < high else []


class _Canvas:
    """One SVG being drawn: a frame, marks in it, and the boxes that labels must keep off."""

    def __init__(self, kind: str, name: str, title: str, description: str) -> None:
        width, height = WIDTHS[kind]
        self.left, self.right, self.top, self.bottom = 46.0, width - 14.0, 30.0, height - 44.0
        self.count_x, self.count_y = (8, 6) if kind == "wide" else (5, 5)
        self._frame = Box(self.left, self.top - 10, self.right + 10, self.bottom)
        self._taken: list[Box] = []
        identity = {"role": "img", "aria-labelledby": f"{name}-{kind}-title {name}-{kind}-desc"}
        self._root = ElementTree.Element(
            "svg", {"viewBox": f"0 0 {width} {height}", "class": f"chart {kind}"} | identity
        )
        _add(self._root, "title", title, id=f"{name}-{kind}-title")
        _add(self._root, "desc", description, id=f"{name}-{kind}-desc")

    def svg(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")

    def axes(self, x: Scale, y: Scale, x_title: str, y_title: str, x_ticks: dict[float, str] | None = None) -> None:
        last = -math.inf
        for px, words in (x_ticks or {x(tick): tick_text(tick) for tick in x.ticks}).items():
            self._path(f"M{px:.1f} {self.top:.1f}V{self.bottom:.1f}", "grid")
            box = text_box(words, px, self.bottom + 19, "middle")
            if box.left > last + 4:
                self._text(words, px, self.bottom + 19, "tick", "middle")
                last = box.right
        for tick in y.ticks:
            self._path(f"M{self.left:.1f} {y(tick):.1f}H{self.right:.1f}", "grid")
            self._text(tick_text(tick), self.left - 7, y(tick) + 4, "tick", "end")
        self._path(f"M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}", "axis")
        self._text(x_title, self.right, self.bottom + 38, "axis-title", "end")
        self._text(y_title, 4, self.top - 16, "axis-title", "start")

    def mark(self, x: float, y: float, style: Style, tooltip: str, *, is_picked: bool = False) -> None:
        group = _add(self._root, "g")
        _add(group, "title", tooltip)
        if is_picked:
            _add(group, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="11", **{"class": "ring"})
        _marker(group, x, y, style)
        reach = 11 if is_picked else 6
        self._taken.append(Box(x - reach, y - reach, x + reach, y + reach))

    def bar(self, x1: float, y1: float, x2: float, y2: float, style: Style) -> None:
        """An interval: a thin line with a cap at each end."""
        if abs(x1 - x2) + abs(y1 - y2) < 0.05:
            return
        dx, dy = (3, 0) if x1 == x2 else (0, 3)
        caps = "".join(f"M{x - dx:.1f} {y - dy:.1f}L{x + dx:.1f} {y + dy:.1f}" for x, y in ((x1, y1), (x2, y2)))
        self._path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}{caps}", f"bar s{style.slot}")
        self._taken.append(Box(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1))

    def label(self, words: str, places: Iterable[Place], css: str) -> None:
        """At the first free place, or nowhere: what finds no room is in the table and in the mark's tooltip."""
        if place := place_label(words, places, self._taken, self._frame):
            self._text(words, place[0], place[1], css, place[2])
            self._taken.append(text_box(words, *place))

    def polyline(self, points: Sequence[tuple[float, float]], css: str) -> None:
        if len(points) > 1:
            self._path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), css)

    def staircase(self, points: Sequence[tuple[float, float]]) -> None:
        """Flat to the next file, then up: between two files nothing was measured."""
        x, y = points[0]
        path, corners = f"M{x:.1f} {y:.1f}", [(x, y)]
        for px, py in [*points[1:], (self.right, points[-1][1])]:
            path += f"H{px:.1f}V{py:.1f}"
            corners += [(px, corners[-1][1]), (px, py)]
        self._path(path, "front")
        for (x1, y1), (x2, y2) in pairwise(corners):
            self._taken.append(Box(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1))

    def _path(self, d: str, css: str) -> None:
        _add(self._root, "path", d=d, **{"class": css})

    def _text(self, words: str, x: float, y: float, css: str, anchor: str) -> None:
        _add(self._root, "text", words, x=f"{x:.1f}", y=f"{y:.1f}", **{"class": css, "text-anchor": anchor})


def _add(parent: ElementTree.Element, tag: str, content: str | None = None, **attributes: str) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, tag, attributes)
    element.text = content
    return element


def _line_class(style: Style) -> str:
    return f"line s{style.slot}" + (" dashed" if style.is_hollow else "")


def _polygon(corners: int, turn: float, radius: float) -> Callable[[float, float], str]:
    def path(x: float, y: float) -> str:
        angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
        return "M" + "L".join(f"{x + radius * math.sin(a):.1f} {y - radius * math.cos(a):.1f}" for a in angles) + "Z"

    return path


def _circle(x: float, y: float) -> str:
    return f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z"


SHAPES = (
    _circle,
    _polygon(4, math.pi / 4, 6.4),  # square
    _polygon(3, 0.0, 6.8),  # triangle
    _polygon(4, 0.0, 6.8),  # diamond
    _polygon(3, math.pi, 6.8),  # triangle on its tip
    _polygon(5, 0.0, 6.2),  # pentagon
)


def _marker(parent: ElementTree.Element, x: float, y: float, style: Style) -> None:
    css = f"mark s{style.slot}" + (" hollow" if style.is_hollow else "")
    _add(parent, "path", d=SHAPES[style.slot](x, y), **{"class": css})


def _tooltip(row: Row) -> str:
    share = f"{text.accuracy(row.accuracy)}, " if row.accuracy else ""
    return f"{row.file} at {row.size}, {text.threads(row.threads)}: {share}{text.milliseconds(_latency(row))}"


def _latency_scale(rows: Sequence[Row], start: float, end: float, count: int) -> Scale:
    """From zero, so that twice as far is twice as slow; logarithmic where the slowest is very far from the fastest."""
    low, high = min(_latency(row).low for row in rows), max(_latency(row).high for row in rows)
    if low > 0 and high / low > LOG_ABOVE:
        return logarithmic(low, high, start, end)
    return linear(0.0, high, start, end, count=count)


def _size_scale(sizes: Sequence[str], start: float, end: float) -> Scale:
    lengths = [_length(size) for size in sizes]
    low, high = min(lengths), max(lengths)
    return Scale(low, high, start, end, ()) if high > low else Scale(low - 1, low + 1, start, end, ())


def _length(size: str) -> float:
    """The side of a square of as many pixels; tokens as they are."""
    count = size_order(size)[0]
    return float(count) if "=" in size else math.sqrt(count)


def _latency(row: Row) -> Interval:
    assert row.latency_ms
    return row.latency_ms


def _accuracy(row: Row) -> Interval:
    assert row.accuracy
    return row.accuracy.interval


def _gflop(row: Row) -> float:
    assert row.gflop
    return row.gflop

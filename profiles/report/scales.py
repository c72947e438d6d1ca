"""From figures to pixels: linear and logarithmic scales with round ticks, and places for labels that do not collide."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps `low`…`high` to the pixels `start`…`end`; `ticks` are round figures within the domain."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear(low: float, high: float, start: float, end: float, *, count: int = 5) -> Scale:
    """A scale that ends on ticks, so that every figure in `low`…`high` lies between two of them."""
    step = _nice_step(low, high, count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(round(index * step, 12) for index in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], start, end, ticks)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """A scale for positive figures with ticks at 1, 2 and 5 times powers of ten (powers alone over many decades)."""
    low, high = low / 1.25, high * 1.25
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = tuple(step * 10.0**power for power in decades for step in steps if low <= step * 10.0**power <= high)
    return Scale(low, high, start, end, ticks, is_log=True)


def tick_text(value: float) -> str:
    """`0.05`, `1.5`, `20`, `1,000`: no more digits than the tick has."""
    return f"{value:,.6f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def _nice_step(low: float, high: float, count: int) -> float:
    """1, 2 or 5 times a power of ten that cuts the range into about `count` parts."""
    rough = (high - low) / count or abs(high) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def hits(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


LINE_HEIGHT = 13.0
CHARACTER_WIDTH = 7.2  # of 12 px system fonts, on the wide side


def text_box(text: str, x: float, y: float, anchor: str) -> Box:
    """The room that 12 px `text` takes around its baseline point (x, y)."""
    width = CHARACTER_WIDTH * len(text)
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return Box(left - 2, y - LINE_HEIGHT + 2, left + width + 2, y + 3)


Place = tuple[float, float, str]  # x, baseline y, text-anchor


def place_label(text: str, places: Iterable[Place], taken: list[Box], frame: Box) -> Place | None:
    """The first of `places` where `text` is inside the frame and hits nothing; None where all is taken."""
    for place in places:
        box = text_box(text, *place)
        if box.is_inside(frame) and not any(box.hits(other) for other in taken):
            return place
    return None


def places_around(x: float, top: float, bottom: float) -> tuple[Place, ...]:
    """Above and below a mark whose interval reaches from `top` to `bottom`, straight first, then to the sides."""
    middle = (top + bottom) / 2
    return (
        (x, top - 5, "middle"),
        (x, bottom + 14, "middle"),
        (x + 9, middle - 7, "start"),
        (x - 9, middle - 7, "end"),
        (x + 9, middle + 15, "start"),
        (x - 9, middle + 15, "end"),
    )

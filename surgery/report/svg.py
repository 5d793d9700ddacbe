"""What a figure of the report is drawn with: SVG that takes its colours from the page's classes,
light or dark.

Lengths are in units of the viewBox, WIDTH of which are a figure's width whatever its size on the
screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460.0, 44.0, 352.0, 30.0, 250.0  # of a plot
LEVELS = 40  # of opacity in a heat map
QUARTERS = {0.0: "0%", 0.25: "25%", 0.5: "50%", 0.75: "75%", 1.0: "100%"}
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a plot, with its name at its end."""

    name: str
    tone: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to units of the viewBox."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def svg(body: str, height: float = BOTTOM + 40) -> str:
    return f'<svg viewBox="0 0 {px(WIDTH)} {px(height)}" role="img">{body}</svg>'


def document(body: str, style: str, height: float = BOTTOM + 40) -> str:
    """A file of its own, on a ground of its own: legible on any page."""
    box = f"-20 -20 {px(WIDTH + 40)} {px(height + 40)}"
    ground = '<rect x="-20" y="-20" width="100%" height="100%" rx="8" style="fill: var(--card)"/>'
    font = 'font-family="system-ui, sans-serif" font-variant-numeric="tabular-nums"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{px(1.4 * WIDTH)}" {font} role="img"><style>{style}</style>{ground}{body}</svg>\n'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{px(x)}" y="{px(y)}"{anchor} class="{kind}">{escape(words)}</text>'


def line(points: Sequence[Point], kind: str, opacity: float = 1.0, title: str = "") -> str:
    where = "L".join(f"{px(x)} {px(y)}" for x, y in points)
    faded = f' stroke-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<path class="line {kind}" d="M{where}"{faded}>{_title(title)}</path>'


def dot(x: float, y: float, kind: str, title: str = "") -> str:
    return f'<circle class="fill {kind}" cx="{px(x)}" cy="{px(y)}" r="3">{_title(title)}</circle>'


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def ridge(points: Sequence[Point], base: float, title: str) -> str:
    where = "L".join(f"{px(x)} {px(y)}" for x, y in points)
    return f'<path class="ridge" d="M{px(points[0][0])} {px(base)}L{where}L{px(points[-1][0])} {px(base)}">{_title(title)}</path>'


def frame(
    x: Scale,
    y: Scale,
    x_ticks: Mapping[float, str],
    y_ticks: Mapping[float, str],
    x_label: str,
    y_label: str,
) -> str:
    """Horizontal grid lines, ticks, and what the axes are."""
    parts = [
        text(0, 14, y_label, "label"),
        text((x.start + x.end) / 2, y.start + 35, x_label, "label", "middle"),
    ]
    for value, words in y_ticks.items():
        parts.append(
            line([(x.start, y(value)), (x.end, y(value))], "grid" if value != y.low else "axis")
        )
        parts.append(text(x.start - 7, y(value) + 4, words, "tick", "end"))
    parts += [
        text(x(value), y.start + 17, words, "tick", "middle") for value, words in x_ticks.items()
    ]
    return "".join(parts)


def layer_ticks(count: int) -> dict[float, str]:
    """At most nine, the first and the last among them."""
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if (count - 1) / s <= 8)
    ticks = {
        float(i): str(i) for i in range(0, count, step) if i == 0 or count - 1 - i >= 0.6 * step
    }
    return ticks | {float(count - 1): str(count - 1)}


def layers(count: int) -> Scale:
    """Of the numbers of `count` layers."""
    return (
        Scale(-0.5, count - 0.5, LEFT, RIGHT) if count < 2 else Scale(0, count - 1, LEFT + 8, RIGHT)
    )


def labelled(curves: list[Curve], x: Scale, y: Scale, say: Callable[[float], str]) -> str:
    """Lines with dots, and their names where they end; `say` puts a value in words."""
    parts = []
    for curve in curves:
        parts.append(line([(x(i), y(v)) for i, v in curve.points], curve.tone))
        parts += [
            dot(x(i), y(v), curve.tone, f"layer {i:.0f}, {curve.name}: {say(v)}")
            for i, v in curve.points
        ]
    heights = apart([y(c.points[-1][1]) for c in curves])
    right = max(x(c.points[-1][0]) for c in curves)
    parts += [
        text(right + 9, h + 4, c.name, f"name {c.tone}")
        for c, h in zip(curves, heights, strict=True)
    ]
    return "".join(parts)


def apart(heights: Sequence[float], gap: float = 16.0) -> list[float]:
    """The heights of labels, moved up or down until they are `gap` apart, and not under the
    plot.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed, floor = list(heights), BOTTOM
    for before, i in pairwise(order):
        placed[i] = max(placed[i], placed[before] + gap)
    for i in reversed(order):
        placed[i] = min(placed[i], floor)
        floor = placed[i] - gap
    return placed


def cells(
    rows: list[list[float]],
    left: float,
    right: float,
    top: float,
    height: float,
    *,
    most: float,
    tone: str = "rate",
) -> str:
    """A heat map: opacity is value / most in LEVELS steps, one path a step, neighbours of the same
    step joined.
    """
    found: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        x, y, start = Scale(0, len(row), left, right), Scale(0, 1, top, top + height), 0
        levels = [round(LEVELS * min(1.0, v / most)) for v in row]
        for end in range(1, len(row) + 1):
            if end == len(row) or levels[end] != levels[start]:
                box = f"M{px(x(start))} {px(y(i))}H{px(x(end))}V{px(y(i + 1))}H{px(x(start))}z"
                found.setdefault(levels[start], []).append(box)
                start = end
    outline = f'<rect class="well" x="{px(left)}" y="{px(top)}" width="{px(right - left)}" height="{px(height * len(rows))}"/>'
    return outline + "".join(
        f'<path class="cell {tone}" fill-opacity="{k / LEVELS:g}" d="{"".join(d)}"/>'
        for k, d in sorted(found.items())
        if k
    )


def ramp(right: float, y: float, low: str, high: str, what: str, tone: str = "rate") -> str:
    """The scale of a heat map, above its right end."""
    end = right - 9 * len(high) - 4
    boxes = cells([[i / 9 for i in range(10)]], end - 80, end, y - 9, 9, most=1.0, tone=tone)
    return (
        boxes
        + text(end - 86, y, f"{what} {low}", "tick", "end")
        + text(right, y, high, "tick", "end")
    )


def row_labels(
    labels: Sequence[int | str], top: float, height: float, x: float | None = None
) -> str:
    """As many as there is room for, the first and the last among them."""
    step = math.ceil(15 / height)
    shown = [i for i in range(0, len(labels), step) if i == 0 or len(labels) - 1 - i >= step] + [
        len(labels) - 1
    ]
    at, anchor = (LEFT - 7, "end") if x is None else (x, "start")
    return "".join(
        text(at, top + (i + 0.5) * height + 4, str(labels[i]), "tick", anchor)
        for i in dict.fromkeys(shown)
    )


def decades(x: Scale, top: float, bottom: float) -> str:
    """Powers of ten under an axis of log2."""
    low, high = (math.floor(v * math.log10(2)) for v in (x.low, x.high))
    step, parts = math.ceil((high - low) / 6), []
    for k in range(0, low, -step) if high <= 0 else range(high - high % step, low, -step):
        at = x(k * math.log2(10))
        parts.append(
            line([(at, top), (at, bottom)], "grid")
            + text(at, bottom + 17, _power(k), "tick", "middle")
        )
    return "".join(parts)


def _power(k: int) -> str:
    return {0: "1", 1: "10", 2: "100"}.get(
        k, "10" + str(k).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    )

"""Draw the parts of a figure as SVG, which takes its colours from the classes of the page.

The same figure is therefore legible on a light page and on a dark one. Lengths are in units of the
viewBox; a figure is WIDTH of them wide, whatever its size on the screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from surgery.quoting import printable

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460.0, 44.0, 352.0, 30.0, 250.0  # a figure and its plot
LEVELS = 40  # steps of opacity in a heat map
QUARTERS = {0.0: "0%", 0.25: "25%", 0.5: "50%", 0.75: "75%", 1.0: "100%"}
# Colours from the first layer to the last: sequential in lightness and in hue, so that thirty lines
# can be told apart. Each has enough contrast with a light, and with a dark background.
ON_LIGHT = ("#27187e", "#6a1b9a", "#b5296f", "#e0503f", "#ee9b2d")
ON_DARK = ("#7b83ff", "#b583f5", "#ec7fc0", "#ff9a76", "#ffe08a")
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a plot, with its name at its end."""

    name: str
    tone: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to units of the viewBox."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def px(value: float) -> str:
    """Return a length as text, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def depth_color(depth: float, anchors: Sequence[str] = ON_LIGHT) -> str:
    """Return the colour "#rrggbb" of a depth from 0 to 1, interpolated between `anchors`."""
    at = min(max(depth, 0.0), 1.0) * (len(anchors) - 1)
    below = min(int(at), len(anchors) - 2)
    ends = [[int(anchors[i][k : k + 2], 16) for k in (1, 3, 5)] for i in (below, below + 1)]
    mixed = [round(a + (at - below) * (b - a)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _depth_style(depth: float) -> str:
    """Return the attribute that gives the class `depth` its colours; the page chooses one."""
    light, dark = depth_color(depth), depth_color(depth, ON_DARK)
    return f' style="--on-light:{light};--on-dark:{dark}"'


def svg(body: str, height: float = BOTTOM + 40) -> str:
    """Return an <svg> element for a page that has the styles."""
    return f'<svg viewBox="0 0 {px(WIDTH)} {px(height)}" role="img">{body}</svg>'


def document(body: str, style: str, height: float = BOTTOM + 40) -> str:
    """Return a file of its own, with its styles and a background that suits any page."""
    box = f"-20 -20 {px(WIDTH + 40)} {px(height + 40)}"
    ground = '<rect x="-20" y="-20" width="100%" height="100%" rx="8" style="fill: var(--card)"/>'
    font = 'font-family="system-ui, sans-serif" font-variant-numeric="tabular-nums"'
    size = f'viewBox="{box}" width="{px(1.4 * WIDTH)}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
    return f"{start}<style>{style}</style>{ground}{body}</svg>\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a <text> element; `kind` is its class."""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{px(x)}" y="{px(y)}"{anchor} class="{kind}">{escape(printable(words))}</text>'


def line(points: Sequence[Point], kind: str, depth: float | None = None, title: str = "") -> str:
    """Return a line through points.

    `kind` is its class; `depth`, from 0 for the first layer to 1 for the last, is its colour if
    given. `title` is shown when the pointer is on the line.
    """
    where = "L".join(f"{px(x)} {px(y)}" for x, y in points)
    style = "" if depth is None else _depth_style(depth)
    return f'<path class="line {kind}" d="M{where}"{style}>{_title(title)}</path>'


def dot(x: float, y: float, kind: str, title: str = "") -> str:
    """Return a dot; `kind` is its class, `title` is shown when the pointer is on it."""
    return f'<circle class="fill {kind}" cx="{px(x)}" cy="{px(y)}" r="3">{_title(title)}</circle>'


def _title(words: str) -> str:
    return f"<title>{escape(printable(words))}</title>" if words else ""


def ridge(points: Sequence[Point], base: float, title: str) -> str:
    """Return a filled curve above `base`."""
    where = "L".join(f"{px(x)} {px(y)}" for x, y in points)
    first, last = px(points[0][0]), px(points[-1][0])
    outline = f"M{first} {px(base)}L{where}L{last} {px(base)}"
    return f'<path class="ridge" d="{outline}">{_title(title)}</path>'


def frame(
    x: Scale,
    y: Scale,
    x_ticks: Mapping[float, str],
    y_ticks: Mapping[float, str],
    x_label: str,
    y_label: str,
) -> str:
    """Return horizontal grid lines, ticks, and the labels of the axes."""
    parts = [
        text(0, 14, y_label, "label"),
        text((x.start + x.end) / 2, y.start + 35, x_label, "label", "middle"),
    ]
    for value, words in y_ticks.items():
        kind = "grid" if value != y.low else "axis"
        parts.append(line([(x.start, y(value)), (x.end, y(value))], kind))
        parts.append(text(x.start - 7, y(value) + 4, words, "tick", "end"))
    for value, words in x_ticks.items():
        parts.append(text(x(value), y.start + 17, words, "tick", "middle"))
    return "".join(parts)


def layer_ticks(count: int) -> dict[float, str]:
    """Return at most nine ticks, the first and the last layer among them."""
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if (count - 1) / s <= 8)
    last = count - 1
    shown = [i for i in range(0, count, step) if i == 0 or last - i >= 0.6 * step]
    return {float(i): str(i) for i in (*shown, last)}


def layers(count: int) -> Scale:
    """Return the scale of an axis of `count` layers."""
    if count < 2:
        return Scale(-0.5, count - 0.5, LEFT, RIGHT)
    return Scale(0, count - 1, LEFT + 8, RIGHT)


def labelled(curves: list[Curve], x: Scale, y: Scale, say: Callable[[float], str]) -> str:
    """Return lines with dots, and their names at their ends; `say` puts a value into words."""
    parts = []
    for curve in curves:
        parts.append(line([(x(i), y(v)) for i, v in curve.points], curve.tone))
        for i, v in curve.points:
            parts.append(dot(x(i), y(v), curve.tone, f"layer {i:.0f}, {curve.name}: {say(v)}"))
    heights = apart([y(c.points[-1][1]) for c in curves])
    right = max(x(c.points[-1][0]) for c in curves)
    for curve, height in zip(curves, heights, strict=True):
        parts.append(text(right + 9, height + 4, curve.name, f"name {curve.tone}"))
    return "".join(parts)


def apart(heights: Sequence[float], gap: float = 16.0) -> list[float]:
    """Return the heights of labels, moved until they are `gap` apart and none is below the plot."""
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
    span: tuple[float, float],
    top: float,
    height: float,
    *,
    most: float,
    tone: str = "rate",
) -> str:
    """Return a heat map from the left to the right end of `span`, each row of it `height` high.

    Opacity is value / most in LEVELS steps. A step is a single path, in which neighbours are
    joined: a map of many cells stays a small file.
    """
    found: dict[int, list[str]] = {}
    left, right = span
    for i, row in enumerate(rows):
        x, y, start = Scale(0, len(row), left, right), Scale(0, 1, top, top + height), 0
        levels = [round(LEVELS * min(1.0, v / most)) for v in row]
        for end in range(1, len(row) + 1):
            if end == len(row) or levels[end] != levels[start]:
                box = f"M{px(x(start))} {px(y(i))}H{px(x(end))}V{px(y(i + 1))}H{px(x(start))}z"
                found.setdefault(levels[start], []).append(box)
                start = end
    parts = [rect("well", left, top, right - left, height * len(rows))]
    for level, boxes in sorted(found.items()):
        if level:
            kind = f'class="cell {tone}" fill-opacity="{level / LEVELS:g}"'
            parts.append(f'<path {kind} d="{"".join(boxes)}"/>')
    return "".join(parts)


def rect(kind: str, x: float, y: float, width: float, height: float, style: str = "") -> str:
    """Return a rectangle; `kind` is its class, `style` another attribute."""
    size = f'x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}"'
    return f'<rect class="{kind}" {size}{style}/>'


def ramp(right: float, y: float, low: str, high: str, what: str, tone: str = "rate") -> str:
    """Return the scale of a heat map, to be put above its right end."""
    end = right - 9 * len(high) - 4
    boxes = cells([[i / 9 for i in range(10)]], (end - 80, end), y - 9, 9, most=1.0, tone=tone)
    ends = text(end - 86, y, f"{what} {low}", "tick", "end") + text(right, y, high, "tick", "end")
    return boxes + ends


def depth_ramp(right: float, y: float, last: int) -> str:
    """Return the legend of lines that are coloured by depth: a strip from layer 0 to `last`."""
    end, steps = right - 9 * len(str(last)) - 4, 20
    parts = []
    for i in range(steps):
        style = _depth_style(i / (steps - 1))
        # Each overlaps the next, which leaves no gap between them at any zoom.
        parts.append(rect("depth", end - 80 + 4 * i, y - 9, 4 if i == steps - 1 else 5, 9, style))
    parts.append(text(end - 86, y, "layer 0", "tick", "end"))
    return "".join(parts) + text(right, y, str(last), "tick", "end")


def row_labels(
    labels: Sequence[int | str], top: float, height: float, x: float | None = None
) -> str:
    """Return the labels of rows that there is room for, the first and the last among them."""
    step = math.ceil(15 / height)
    last = len(labels) - 1
    shown = [i for i in range(0, len(labels), step) if i == 0 or last - i >= step]
    at, anchor = (LEFT - 7, "end") if x is None else (x, "start")
    middles = {i: top + (i + 0.5) * height + 4 for i in (*shown, last)}
    return "".join(text(at, y, str(labels[i]), "tick", anchor) for i, y in middles.items())


def decades(x: Scale, top: float, bottom: float) -> str:
    """Return powers of ten under an axis of log2."""
    low, high = (math.floor(v * math.log10(2)) for v in (x.low, x.high))
    step, parts = math.ceil((high - low) / 6), []
    for k in range(0, low, -step) if high <= 0 else range(high - high % step, low, -step):
        at = x(k * math.log2(10))
        parts.append(line([(at, top), (at, bottom)], "grid"))
        parts.append(text(at, bottom + 17, _power(k), "tick", "middle"))
    return "".join(parts)


def _power(k: int) -> str:
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return {0: "1", 1: "10", 2: "100"}.get(k, "10" + str(k).translate(raised))

"""The figure of a card, layers.svg: what the verification measured in each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from surgery.report.svg import (
    BOTTOM,
    QUARTERS,
    TOP,
    Curve,
    Scale,
    document,
    frame,
    labelled,
    layer_ticks,
    layers,
    text,
)

NAME = "layers.svg"
HEIGHT = BOTTOM + 75  # pixels of a panel with its title


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A plot of values from 0 to 1 by layer; its title says what it shows."""

    title: str
    axis: str
    curves: list[Curve]


def panels(verification: Mapping[str, Any] | None) -> list[Panel]:
    """Return the panels that the verification has values for."""
    rows = {r.get("key"): r for r in (verification or {}).get("rows") or ()}
    return [*_zeros(rows), *_load(rows)]


def draw(found: list[Panel]) -> bytes:
    """Return the SVG of the panels, one below the other."""
    style = (files("surgery.report") / "templates" / "figure.css").read_text(encoding="utf-8")
    body = "".join(
        f'<g transform="translate(0 {i * HEIGHT:g})">{_panel(p)}</g>' for i, p in enumerate(found)
    )
    return document(body, style, HEIGHT * len(found)).encode()


def _panel(panel: Panel) -> str:
    count = 1 + int(max(i for c in panel.curves for i, _ in c.points))
    x, y = layers(count), Scale(0, 1, BOTTOM, TOP)
    plot = frame(x, y, layer_ticks(count), QUARTERS, "layer", panel.axis)
    plot += labelled(panel.curves, x, y, lambda v: f"{v:.1%}")
    return text(0, 14, panel.title, "strong") + f'<g transform="translate(0 24)">{plot}</g>'


def _zeros(rows: Mapping[str, Any]) -> Iterator[Panel]:
    output, source = (_values(rows.get(f"zeros.{whose}")) for whose in ("output", "source"))
    if any(v > 0 for _, v in output):
        curves = [Curve(name="this model", tone="cett2", points=output)]
        curves += [Curve(name="its source", tone="none", points=source)] if source else []
        yield Panel(
            title=f"{_mean(output):.0%} of the MLPs' products are exact zeros ({_span(output)})",
            axis="share of the products",
            curves=curves,
        )


def _load(rows: Mapping[str, Any]) -> Iterator[Panel]:
    if found := _values(rows.get("routers.load_entropy")):
        yield Panel(
            title=f"The experts' load has {_mean(found):.0%} of an even load's entropy "
            f"({_span(found)})",
            axis="entropy of the load",
            curves=[Curve(name="this model", tone="cett2", points=found)],
        )


def _values(row: Mapping[str, Any] | None) -> list[tuple[float, float]]:
    """Return layer and value of a row, without the layers that have no MLP of their own (NaN)."""
    found = (row or {}).get("layers") or ()
    return [(float(index), float(value)) for index, value in found if math.isfinite(float(value))]


def _mean(points: list[tuple[float, float]]) -> float:
    return sum(v for _, v in points) / len(points)


def _span(points: list[tuple[float, float]]) -> str:
    low, high = min(v for _, v in points), max(v for _, v in points)
    return f"layers: {low:.0%} to {high:.0%}"

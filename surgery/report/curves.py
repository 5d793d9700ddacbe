"""What the report draws of an analysis, as numbers and words: for the page's SVG and for the PNGs
alike.

A title is the figure's finding, with numbers of the analysis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from surgery.analysis.analyze import (
    CETT,
    Analysis,
    LayerAnalysis,
    MlpStatistics,
    RouterStatistics,
    at_cett,
    exact_zeros,
)
from surgery.analysis.devices import Cost
from surgery.analysis.sparsity import hot_share
from surgery.calibration.collectors import Distribution
from surgery.report.inspection import quantity
from surgery.report.svg import Curve, Point

HOT = 0.8
HotCurve = tuple[
    int, list[Point], float
]  # a layer, its curve, and the share of its neurons that does HOT


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronRates:
    """What a layer's dense MLP, or its routed experts together, do in `tokens`."""

    layer: int
    tokens: int
    active: Tensor | None  # [F] or [E·F] tokens with gate > 0
    product: Distribution | None


def name_of(a: Analysis) -> str:
    """A Hub id as it is, of a path the last part."""
    return Path(a.source).name if Path(a.source).is_absolute() else a.source


def share(value: float) -> str:
    """A fraction in percent; one more digit near 0 and 1, where it matters."""
    if 0 < value < 0.001 or 0.999 < value < 1:
        return "< 0.1%" if value < 0.5 else "> 99.9%"
    return f"{value:.1%}" if 0 < value < 0.1 or 0.99 < value < 1 else f"{value:.0%}"


def neurons(a: Analysis) -> list[NeuronRates]:
    """By layer: the dense MLP or shared expert, or else the routed experts."""
    found = []
    for layer in a.layers:
        if m := layer.mlp:
            found.append(
                NeuronRates(layer=layer.index, tokens=m.tokens, active=m.active, product=m.product)
            )
        elif (r := layer.router) and (r.active is not None or r.product is not None):
            active = None if r.active is None else r.active.flatten()
            found.append(
                NeuronRates(layer=layer.index, tokens=r.tokens, active=active, product=r.product)
            )
    return found


def sparsity_curves(a: Analysis) -> list[Curve]:
    """By layer: of the dense MLPs, or of the routed experts where there is none."""
    measures: list[tuple[str, str, Callable[[MlpStatistics | RouterStatistics], float]]] = [
        ("exact zeros", "zero", exact_zeros)
    ]
    measures += [
        (f"CETT {c}", tone, at_cett(c)) for c, tone in zip(CETT, ("cett1", "cett2"), strict=True)
    ]
    found = [
        Curve(name=name, tone=tone, points=_by_part(a, value)) for name, tone, value in measures
    ]
    return [curve for curve in found if curve.points]


def sparsity_title(a: Analysis) -> str:
    first, last = sparsity_curves(a)[0].points, sparsity_curves(a)[-1].points
    parts, what = a.mlps or a.inside, "products" if a.mlps else "experts' products"
    if (zeros := a.mean(exact_zeros, parts)) >= 0.01:
        return f"{share(zeros)} of the {what} are exact zeros: {spread(first)}"
    return f"A CETT of {CETT[1]} leaves out {share(a.mean(at_cett(CETT[1]), parts))} of the {what}: {spread(last)}"


def hot_curves(a: Analysis) -> list[HotCurve]:
    """A layer, its share of activations over the share of its neurons, and the share of neurons
    that does HOT of them.
    """
    found = []
    for n in neurons(a):
        if n.active is not None and n.active.sum() > 0:
            done = n.active.double().sort(descending=True).values.cumsum(0)
            at = [round(i / 100 * len(done)) for i in range(101)]
            points = [
                (i / 100, done[k - 1].item() / done[-1].item() if k else 0.0)
                for i, k in enumerate(at)
            ]
            found.append((n.layer, points, hot_share(n.active, HOT)))
    return found


def hot_title(a: Analysis) -> str:
    curves = hot_curves(a)
    return f"{HOT:.0%} of the activations come from {spread([(i, hot) for i, _, hot in curves], 'of the neurons')}"


def extremes(curves: list[HotCurve]) -> Iterator[tuple[HotCurve, str]]:
    """The most concentrated layer, labelled at its left, and the least, at its right."""
    hottest, flattest = min(curves, key=lambda c: c[2]), max(curves, key=lambda c: c[2])
    yield hottest, "end"
    if flattest is not hottest:
        yield flattest, "start"


def saving_bars(a: Analysis) -> list[tuple[str, str, Cost]]:
    """A label, a tone and what is left to read."""
    how = {
        "gate first": "gate computed first",
        "down only": "only down_proj saved",
        "foreseen": "foreseen",
    }
    tones = {
        "exact zeros": "zero",
        **{f"CETT {c}": t for c, t in zip(CETT, ("cett1", "cett2"), strict=True)},
    }
    found = [("nothing left out", "none", a.savings[0].before)] if a.savings else []
    for s in a.savings:
        tone = tones[s.rule] + (" ceiling" if s.kernel == "foreseen" else "")
        found.append(
            (f"{s.rule} ({share(s.sparsity)}), {how.get(s.kernel, s.kernel)}", tone, s.after)
        )
    return found


def saving_title(a: Analysis) -> str:
    left = {(s.rule, s.kernel): s.after.nbytes / s.before.nbytes for s in a.savings}
    down, seen = (left[f"CETT {CETT[1]}", kernel] for kernel in ("down only", "foreseen"))
    if a.savings[0].sparsity >= 0.01:
        zeros = left["exact zeros", "gate first"]
        return f"Skipping exact zeros leaves a token {zeros:.0%} of the MLP bytes to read; a CETT of {CETT[1]}, foreseen, {seen:.0%}"
    return f"A CETT of {CETT[1]} leaves a token {down:.0%} of the MLP bytes to read; foreseen, {seen:.0%}"


def left_of(work: Cost, most: float) -> str:
    return f"{quantity(work.nbytes, 'B')}, {work.nbytes / most:.0%}"


def _by_part(
    a: Analysis, value: Callable[[MlpStatistics | RouterStatistics], float]
) -> list[Point]:
    role = "mlp" if a.mlps else "routed_experts"
    return by_layer(a, lambda layer: value(layer.inside[role]) if role in layer.inside else None)


def by_layer(a: Analysis, value: Callable[[LayerAnalysis], float | None]) -> list[Point]:
    """What is finite of it."""
    found = ((layer.index, value(layer)) for layer in a.layers)
    return [(float(i), v) for i, v in found if v is not None and math.isfinite(v)]


def mean(points: list[Point]) -> float:
    return sum(v for _, v in points) / len(points)


def spread(points: list[Point], what: str = "") -> str:
    """ "31% in layer 0, 84% in layer 17", the lowest first."""
    (low_at, low), (high_at, high) = (
        min(points, key=lambda p: p[1]),
        max(points, key=lambda p: p[1]),
    )
    what = f"{what} " if what else ""
    if share(low) == share(high):
        return f"{share(low)} {what}in every layer"
    return f"{share(low)} {what}in layer {low_at:.0f}, {share(high)} in layer {high_at:.0f}"


def depth(a: Analysis, layer: int) -> float:
    """Opacity."""
    return 0.35 + 0.65 * layer / max(1, len(a.layers) - 1)

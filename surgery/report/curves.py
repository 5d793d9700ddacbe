"""What the report draws of an analysis, as numbers and words, shared by the page and the PNGs.

The title of a figure is its finding, with numbers from the analysis.
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

HOT = 0.8  # share of a layer's activations that its hottest neurons do
HotCurve = tuple[int, list[Point], float]  # layer, curve, share of its neurons that does HOT
Part = MlpStatistics | RouterStatistics
# One sentence for the first place that names CETT.
CETT_EXPLAINED = (
    "CETT is the relative error of an MLP's output when its smallest products are left out: "
    "‖what they would add‖ / ‖output‖, the mean over tokens"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronRates:
    """What a layer's dense MLP, or all its routed experts together, do in `tokens`."""

    layer: int
    tokens: int
    active: Tensor | None  # [F] or [E·F] tokens with gate > 0
    product: Distribution | None


def name_of(a: Analysis) -> str:
    """Return a Hub id as it is, or the last part of an absolute path."""
    return Path(a.source).name if Path(a.source).is_absolute() else a.source


def share(value: float) -> str:
    """Return a fraction in percent, with one more digit near 0 and 1, where it matters."""
    if 0 < value < 0.001 or 0.999 < value < 1:
        return "< 0.1%" if value < 0.5 else "> 99.9%"
    return f"{value:.1%}" if 0 < value < 0.1 or 0.99 < value < 1 else f"{value:.0%}"


def neurons(a: Analysis) -> list[NeuronRates]:
    """Return by layer the dense MLP or shared expert, or else the routed experts."""
    found = []
    for layer in a.layers:
        m, r, i = layer.mlp, layer.router, layer.index
        if m:
            rates = NeuronRates(layer=i, tokens=m.tokens, active=m.active, product=m.product)
            found.append(rates)
        elif r and (r.active is not None or r.product is not None):
            active = None if r.active is None else r.active.flatten()
            rates = NeuronRates(layer=i, tokens=r.tokens, active=active, product=r.product)
            found.append(rates)
    return found


def sparsity_curves(a: Analysis) -> list[Curve]:
    """Return sparsity by layer, of the dense MLPs, or of the routed experts if there are none."""
    curves = [Curve(name="exact zeros", tone="zero", points=_by_part(a, exact_zeros))]
    for c, tone in zip(CETT, ("cett1", "cett2"), strict=True):
        curves.append(Curve(name=f"CETT {c}", tone=tone, points=_by_part(a, at_cett(c))))
    return [curve for curve in curves if curve.points]


def sparsity_title(a: Analysis) -> str:
    """Return the finding of `sparsity_curves`."""
    first, last = sparsity_curves(a)[0].points, sparsity_curves(a)[-1].points
    parts, what = a.mlps or a.inside, "products" if a.mlps else "experts' products"
    if (zeros := a.mean(exact_zeros, parts)) >= 0.01:
        return f"{share(zeros)} of the {what} are exact zeros: {spread(first)}"
    left_out = share(a.mean(at_cett(CETT[1]), parts))
    return f"At a CETT of {CETT[1]}, {left_out} of the {what} can be left out: {spread(last)}"


def hot_curves(a: Analysis) -> list[HotCurve]:
    """Return by layer the share of its activations over the share of its neurons, hottest first.

    Layers that nothing activates are left out.
    """
    found = []
    for n in neurons(a):
        if n.active is not None and n.active.sum() > 0:
            done = n.active.double().sort(descending=True).values.cumsum(0)
            counts = [round(i / 100 * len(done)) for i in range(101)]
            parts = [done[k - 1].item() / done[-1].item() if k else 0.0 for k in counts]
            points = [(i / 100, part) for i, part in enumerate(parts)]
            found.append((n.layer, points, hot_share(n.active, HOT)))
    return found


def hot_title(a: Analysis) -> str:
    """Return the finding of `hot_curves`."""
    shares = [(float(i), hot) for i, _, hot in hot_curves(a)]
    return f"{HOT:.0%} of the activations come from {spread(shares, 'of the neurons')}"


def extremes(curves: list[HotCurve]) -> Iterator[tuple[HotCurve, str]]:
    """Yield the most concentrated layer and the least, with the anchors of their labels.

    The first is labelled at its left, the second at its right.
    """
    hottest, flattest = min(curves, key=lambda c: c[2]), max(curves, key=lambda c: c[2])
    yield hottest, "end"
    if flattest is not hottest:
        yield flattest, "start"


def saving_bars(a: Analysis) -> list[tuple[str, str, Cost]]:
    """Return a label, a tone and what is left to read, for each way of saving."""
    how = {"gate first": "gate computed first", "down only": "only down_proj saved"}
    tones = {"exact zeros": "zero", f"CETT {CETT[0]}": "cett1", f"CETT {CETT[1]}": "cett2"}
    found = [("nothing left out", "none", a.savings[0].before)] if a.savings else []
    for s in a.savings:
        tone = tones[s.rule] + (" ceiling" if s.kernel == "foreseen" else "")
        label = f"{s.rule} ({share(s.sparsity)}), {how.get(s.kernel, s.kernel)}"
        found.append((label, tone, s.after))
    return found


def saving_title(a: Analysis) -> str:
    """Return the finding of `saving_bars`."""
    left = {(s.rule, s.kernel): s.after.nbytes / s.before.nbytes for s in a.savings}
    down, seen = (left[f"CETT {CETT[1]}", kernel] for kernel in ("down only", "foreseen"))
    if a.savings[0].sparsity >= 0.01:
        zeros = left["exact zeros", "gate first"]
        return (
            f"Skipping exact zeros leaves a token {zeros:.0%} of the MLP bytes to read; "
            f"a CETT of {CETT[1]}, foreseen, {seen:.0%}"
        )
    return (
        f"A CETT of {CETT[1]} leaves a token {down:.0%} of the MLP bytes to read; "
        f"foreseen, {seen:.0%}"
    )


def duration(seconds: float) -> str:
    """Return a time with three significant digits: "33.6 ms", "1.23 µs"."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next(((s, u) for s, u in units if seconds >= s), (1e-9, "ns"))
    return f"{float(f'{seconds / scale:.3g}'):g} {unit}"


def left_of(work: Cost, most: float) -> str:
    """Return how many bytes are left, and which share of `most` that is."""
    return f"{quantity(work.nbytes, 'B', digits=3)}, {work.nbytes / most:.0%}"


def _by_part(a: Analysis, value: Callable[[Part], float]) -> list[Point]:
    role = "mlp" if a.mlps else "routed_experts"
    return by_layer(a, lambda layer: value(layer.inside[role]) if role in layer.inside else None)


def by_layer(a: Analysis, value: Callable[[LayerAnalysis], float | None]) -> list[Point]:
    """Return the finite values of `value`, by layer."""
    found = ((layer.index, value(layer)) for layer in a.layers)
    return [(float(i), v) for i, v in found if v is not None and math.isfinite(v)]


def mean(points: list[Point]) -> float:
    """Return the mean of the values."""
    return sum(v for _, v in points) / len(points)


def spread(points: list[Point], what: str = "") -> str:
    """Return "31% in layer 0, 84% in layer 17", the lowest first."""
    low_at, low = min(points, key=lambda p: p[1])
    high_at, high = max(points, key=lambda p: p[1])
    what = f"{what} " if what else ""
    if share(low) == share(high):
        return f"{share(low)} {what}in every layer"
    return f"{share(low)} {what}in layer {low_at:.0f}, {share(high)} in layer {high_at:.0f}"


def depth(a: Analysis, layer: int) -> float:
    """Return how deep a layer is, from 0 for the first to 1 for the last."""
    return layer / max(1, len(a.layers) - 1)

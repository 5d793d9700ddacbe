"""What `surgery analyze --out` draws: report.html, one file that asks the network for nothing, and PNGs for a model card.

The figures are SVG written here, so that they take their colours from the page (light or dark) and need no matplotlib,
which draws the PNGs only. A figure's title is its finding, with numbers of the analysis. Layers are told apart by
opacity: the deeper, the stronger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surgery.analysis.analyze import (
    ALWAYS,
    CETT,
    Analysis,
    LayerAnalysis,
    Mlp,
    Router,
    at_cett,
    exact_zeros,
    firing_rate,
)
from surgery.analysis.devices import Device, Work
from surgery.analysis.sparsity import hot_share
from surgery.calibration.collectors import BINS, OCTAVES, Distribution, edges
from surgery.report.analysis import finding, notes
from surgery.report.inspection import COLORS, FAINT, INK, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460.0, 44.0, 366.0, 30.0, 250.0  # of a plot, in units of its viewBox
COLUMNS, LEVELS = 200, 40  # of a heat map
HOT = 0.8
TONES = {"zero": COLORS["attention"], "cett1": COLORS["shared_experts"], "cett2": COLORS["mlp"], "none": FAINT}
QUARTERS = {0.0: "0%", 0.25: "25%", 0.5: "50%", 0.75: "75%", 1.0: "100%"}
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`title` is the finding; `caption` says what is drawn."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a plot, with its name at its end."""

    name: str
    tone: str
    points: list[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Neurons:
    """What a layer's dense MLP, or its routed experts together, do in `tokens`."""

    layer: int
    tokens: int
    active: Tensor | None  # [F] or [E·F] tokens with gate > 0
    product: Distribution | None


def write_report(analysis: Analysis, device: Device, folder: Path) -> list[Path]:
    """report.html and, where matplotlib is installed, the PNGs that the analysis has figures for; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render(analysis, device), encoding="utf-8")
    return [page, *(_write_pngs(analysis, device, folder) if draws_png() else ())]


def draws_png() -> bool:
    return find_spec("matplotlib") is not None


def render(analysis: Analysis, device: Device) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("surgery.report"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return environment.get_template("report.html.j2").render(
        a=analysis, name=name_of(analysis), finding=finding(analysis), notes=list(notes(analysis)), tiles=list(tiles(analysis)),
        figures=list(figures(analysis, device)), device=device, cett=CETT, always=ALWAYS, hot_share=hot_share,
        firing_rate=firing_rate,
    )  # fmt: skip


def name_of(a: Analysis) -> str:
    """A Hub id as it is, of a path the last part."""
    return Path(a.source).name if Path(a.source).is_absolute() else a.source


def share(value: float) -> str:
    """A fraction in percent; one more digit near 0 and 1, where it matters."""
    if 0 < value < 0.001 or 0.999 < value < 1:
        return "< 0.1%" if value < 0.5 else "> 99.9%"
    return f"{value:.1%}" if 0 < value < 0.1 or 0.99 < value < 1 else f"{value:.0%}"


def tiles(a: Analysis) -> Iterator[tuple[str, str]]:
    """A number and what it is of."""
    if a.mlps:
        yield share(a.mean(exact_zeros)), "of the products are exact zeros"
        for c in CETT:
            yield share(a.mean(at_cett(c))), f"can be left out at a CETT of {c}"
        yield share(a.mean(firing_rate)), "of the neurons are active for a token"
        dead, total = sum(int((m.active == 0).sum()) for m in a.mlps), sum(m.width for m in a.mlps)
        yield f"{dead:,}", f"of {total:,} neurons are never active"
    if a.routers:
        unused, total = sum(int((r.load == 0).sum()) for r in a.routers), sum(r.experts for r in a.routers)
        yield f"{max(r.busiest for r in a.routers):.2f}×", "an even share of the tokens goes to the busiest expert"
        yield f"{unused:,}", f"of {total:,} experts get no token"


def figures(a: Analysis, device: Device) -> Iterator[Figure]:
    """Those that the analysis has data for."""
    makers: tuple[Callable[[Analysis], Figure | None], ...] = (
        sparsity_by_layer, hot_cold, lambda a: savings(a, device), heat_map, histograms, unions, router_load,
        router_entropy, residual,
    )  # fmt: skip
    return (figure for make in makers if (figure := make(a)))


def neurons(a: Analysis) -> list[Neurons]:
    """By layer: the dense MLP or shared expert, or else the routed experts."""
    found = []
    for layer in a.layers:
        if m := layer.mlp:
            found.append(Neurons(layer=layer.index, tokens=m.tokens, active=m.active, product=m.product))
        elif (r := layer.router) and (r.active is not None or r.product is not None):
            active = None if r.active is None else r.active.flatten()
            found.append(Neurons(layer=layer.index, tokens=r.tokens, active=active, product=r.product))
    return found


# --- figures ----------------------------------------------------------------------------------------------------------


def sparsity_by_layer(a: Analysis) -> Figure | None:
    curves = sparsity_curves(a)
    if not curves:
        return None
    if a.mlps:
        caption = (f"Share of a layer's products h that are exact zeros, and that could be left out with an error (CETT) of "
                   f"{CETT[0]} and {CETT[1]} in the MLP's output.")  # fmt: skip
        caption += " Layers of routed experts alone are left out." if len(a.mlps) < len(a.layers) else ""
    else:
        caption = "In the routed experts: share of the products h that are exact zeros, and of the gates that are not positive."
    x, y = _layers(a), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, _layer_ticks(a), QUARTERS, "layer", _share_of(a))
    return Figure(title=sparsity_title(a), svg=svg(body + labelled(curves, x, y)), caption=caption)


def sparsity_curves(a: Analysis) -> list[Curve]:
    """By layer: of the dense MLPs, or of the routed experts where there is none."""
    if a.mlps:
        measures: list[tuple[str, str, Callable[[Mlp], float]]] = [("exact zeros", "zero", exact_zeros)]
        measures += [(f"CETT {c}", tone, at_cett(c)) for c, tone in zip(CETT, ("cett1", "cett2"), strict=True)]
        return [Curve(name=name, tone=tone, points=_by_mlp(a, value)) for name, tone, value in measures]
    zeros = _by_layer(a, lambda i: i.router.product.zero if i.router and i.router.product else None)
    idle = _by_layer(a, lambda i: 1 - i.router.gate.positive if i.router and i.router.gate else None)
    curves = Curve(name="exact zeros", tone="zero", points=zeros), Curve(name="gate ≤ 0", tone="cett2", points=idle)
    return [c for c in curves if c.points]


def _share_of(a: Analysis) -> str:
    return "share of the products" if a.mlps else "share of the products, of the gates"


def _by_mlp(a: Analysis, value: Callable[[Mlp], float]) -> list[Point]:
    return _by_layer(a, lambda layer: value(layer.mlp) if layer.mlp else None)


def _by_layer(a: Analysis, value: Callable[[LayerAnalysis], float | None]) -> list[Point]:
    """What is finite of it."""
    found = ((layer.index, value(layer)) for layer in a.layers)
    return [(float(i), v) for i, v in found if v is not None and math.isfinite(v)]


def sparsity_title(a: Analysis) -> str:
    first, last = sparsity_curves(a)[0].points, sparsity_curves(a)[-1].points
    if not a.mlps:
        zeros = f"{share(_mean(first))} of the experts' products are exact zeros" if _mean(first) else "No product of an expert is an exact zero"  # fmt: skip
        return f"{zeros}; {_range(last, 'of the gates')} are not positive" if last is not first else zeros
    if a.mean(exact_zeros) >= 0.01:
        return f"{share(a.mean(exact_zeros))} of the products are exact zeros: {_range(first)}"
    return f"A CETT of {CETT[1]} leaves out {share(a.mean(at_cett(CETT[1])))} of the products: {_range(last)}"


def _range(points: list[Point], what: str = "") -> str:
    """ "31% in layer 0, 84% in layer 17", the lowest first."""
    (low_at, low), (high_at, high) = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    what = f"{what} " if what else ""
    if share(low) == share(high):
        return f"{share(low)} {what}in every layer"
    return f"{share(low)} {what}in layer {low_at:.0f}, {share(high)} in layer {high_at:.0f}"


def hot_cold(a: Analysis) -> Figure | None:
    curves = hot_curves(a)
    if not curves:
        return None
    x, y = Scale(0, 1, LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, QUARTERS, QUARTERS, "share of the layer's neurons, hottest first", "share of its activations")
    body += line([(x(0), y(0)), (x(1), y(1))], "even") + text(x(0.36), y(0.36) + 16, "all alike", "faint")
    for layer, points, _ in curves:
        body += line([(x(u), y(v)) for u, v in points], "depth", _depth(a, layer), f"layer {layer}")
    body += "".join(_hot_label(curve, side, x, y) for curve, side in _extremes(curves))
    caption = (f"Each line is a layer, stronger the deeper it is; the dots are where {HOT:.0%} of the activations (gate > 0) are "
               "reached.")  # fmt: skip
    return Figure(title=hot_title(a), svg=svg(body), caption=caption)


def hot_curves(a: Analysis) -> list[tuple[int, list[Point], float]]:
    """A layer, its share of activations over the share of its neurons, and the share of neurons that does HOT of them."""
    found = []
    for n in neurons(a):
        if n.active is not None and n.active.sum() > 0:
            done = n.active.double().sort(descending=True).values.cumsum(0)
            at = [round(i / 100 * len(done)) for i in range(101)]
            points = [(i / 100, done[k - 1].item() / done[-1].item() if k else 0.0) for i, k in enumerate(at)]
            found.append((n.layer, points, hot_share(n.active, HOT)))
    return found


def hot_title(a: Analysis) -> str:
    curves = hot_curves(a)
    return f"{HOT:.0%} of the activations come from {_range([(i, hot) for i, _, hot in curves], 'of the neurons')}"


def _extremes(curves: list[tuple[int, list[Point], float]]) -> Iterator[tuple[tuple[int, list[Point], float], str]]:
    """The most concentrated layer, labelled at its left, and the least, at its right."""
    hottest, flattest = min(curves, key=lambda c: c[2]), max(curves, key=lambda c: c[2])
    yield hottest, "end"
    if flattest is not hottest:
        yield flattest, "start"


def _hot_label(curve: tuple[int, list[Point], float], anchor: str, x: Scale, y: Scale) -> str:
    layer, _, hot = curve
    dx, dy = (-7, -5) if anchor == "end" else (8, 14)
    return dot(x(hot), y(HOT), "ink") + text(x(hot) + dx, y(HOT) + dy, f"layer {layer}: {share(hot)}", "halo", anchor)


def savings(a: Analysis, device: Device) -> Figure | None:
    bars = saving_bars(a)
    if not bars:
        return None
    x, most, body = Scale(0, 1, 2, WIDTH - 150), bars[0][2].nbytes, ""
    for i, (label, tone, work) in enumerate(bars):
        top = 4 + 43 * i
        body += text(2, top + 11, label)
        body += f'<rect class="fill {tone}" x="2" y="{top + 17}" width="{px(x(work.nbytes / most) - 2)}" height="15"/>'
        body += text(x(work.nbytes / most) + 7, top + 29, _left(work, most), "strong")
    caption = (f"Bytes of MLP weights that a token reads when it is decoded alone; {1e3 * bars[0][2].seconds(device):.3g} ms "
               f"for all of them on {device.name} at best. Foreseen is a ceiling: a predictor that is free and never wrong. "
               "Leaving out exact zeros changes nothing; CETT does, and perplexity must say how much.")  # fmt: skip
    return Figure(title=saving_title(a), svg=svg(body, 4 + 43 * len(bars)), caption=caption)


def saving_bars(a: Analysis) -> list[tuple[str, str, Work]]:
    """A label, a tone and what is left to read."""
    how = {"gate first": "gate computed first", "down only": "only down_proj saved", "foreseen": "foreseen"}
    tones = {"exact zeros": "zero", **{f"CETT {c}": t for c, t in zip(CETT, ("cett1", "cett2"), strict=True)}}
    found = [("nothing left out", "none", a.savings[0].before)] if a.savings else []
    for s in a.savings:
        tone = tones[s.rule] + (" ceiling" if s.kernel == "foreseen" else "")
        found.append((f"{s.rule} ({share(s.sparsity)}), {how.get(s.kernel, s.kernel)}", tone, s.after))
    return found


def saving_title(a: Analysis) -> str:
    left = {(s.rule, s.kernel): s.after.nbytes / s.before.nbytes for s in a.savings}
    down, seen = (left[f"CETT {CETT[1]}", kernel] for kernel in ("down only", "foreseen"))
    if a.mean(exact_zeros) >= 0.01:
        zeros = left["exact zeros", "gate first"]
        return f"Skipping exact zeros leaves a token {zeros:.0%} of the MLP bytes to read; a CETT of {CETT[1]}, foreseen, {seen:.0%}"
    return f"A CETT of {CETT[1]} leaves a token {down:.0%} of the MLP bytes to read; foreseen, {seen:.0%}"


def _left(work: Work, most: float) -> str:
    return f"{quantity(work.nbytes, 'B')}, {work.nbytes / most:.0%}"


def heat_map(a: Analysis) -> Figure | None:
    found = {n.layer: n.active.double() / n.tokens for n in neurons(a) if n.active is not None}
    if not found:
        return None
    rows = [_binned(rate.sort(descending=True).values, COLUMNS).tolist() for rate in found.values()]
    height = max(3.0, min(18.0, 300 / len(rows)))
    x, bottom = Scale(0, 1, LEFT, WIDTH - 8), TOP + height * len(rows)
    body = cells(rows, x.start, x.end, TOP, height, most=1.0) + _row_labels(list(found), TOP, height)
    body += "".join(text(x(v), bottom + 16, s, "tick", "middle") for v, s in QUARTERS.items() if v < 1)
    body += text(x(1), bottom + 16, "100%", "tick", "end")
    body += text(x(0.5), bottom + 33, "neurons of the layer, hottest first", "label", "middle")
    body += text(0, 14, "layer", "label") + ramp(WIDTH - 8, 14, "0", "1", "firing rate")
    experts = "" if len(a.mlps) == len(found) else " A neuron of an expert fires only for tokens that are routed to it."
    caption = (f"Firing rate: the share of tokens for which the gate is positive; nearly always is for more than {ALWAYS:.0%} of "
               f"them.{experts}")  # fmt: skip
    return Figure(title=heat_title(found), svg=svg(body, bottom + 40), caption=caption)


def heat_title(rates: Mapping[int, Tensor]) -> str:
    rate = torch.cat(list(rates.values()))
    dead, always, total = int((rate == 0).sum()), int((rate > ALWAYS).sum()), len(rate)
    lead = f"{dead:,} of {total:,} neurons never fire" if dead else f"All {total:,} neurons fire at some token"
    return f"{lead} and {f'{always:,}' if always else 'none'} nearly always; the mean one fires for {share(rate.mean().item())} of the tokens"


def histograms(a: Analysis) -> Figure | None:
    found = {n.layer: n.product for n in neurons(a) if n.product}
    if not found:
        return None
    gap = max(9.0, min(34.0, 330 / len(found)))
    x, bottom = Scale(*_span(list(found.values())), LEFT, RIGHT), 62 + gap * len(found)
    body = _decades(x, 34, bottom) + _ridges(found, x, bottom, gap)
    body += text(0, 14, "layer", "label") + text(RIGHT + 8, 14, "exact zeros", "label")
    top = bottom - gap * len(found) + gap / 2 - 4
    body += _row_labels(list(found), top, gap)
    body += _row_labels([share(d.zero) for d in found.values()], top, gap, RIGHT + 8)
    body += text((LEFT + RIGHT) / 2, bottom + 35, "|h|, logarithmic", "label", "middle")
    caption = "Distribution of the magnitudes of the products h, to one scale in all layers; exact zeros are left out of the curve."
    return Figure(title=histogram_title(found), svg=svg(body, bottom + 42), caption=caption)


def _ridges(found: Mapping[int, Distribution], x: Scale, bottom: float, gap: float) -> str:
    """One above the other, the deepest layer on `bottom`; a later one hides what it covers."""
    ends, densities, parts = _quarters(), {layer: _density(d) for layer, d in found.items()}, []
    middles, peak = ((ends[1:] + ends[:-1]) / 2).tolist(), max(max(d) for d in densities.values()) or 1.0
    for i, (layer, density) in enumerate(densities.items()):
        base = bottom - gap * (len(found) - 1 - i)
        y = Scale(0, peak, base, base - max(26, 1.9 * gap))
        points = [(x(o), y(v)) for o, v in zip(middles, density, strict=True) if x.low <= o <= x.high]
        parts.append(ridge(points, base, f"layer {layer}"))
    return "".join(parts)


def histogram_title(found: Mapping[int, Distribution]) -> str:
    medians = {layer: d.threshold(0.5) for layer, d in found.items()}
    low, high = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    if medians[low] == 0:
        mostly = sum(m == 0 for m in medians.values())
        return f"In {mostly} of {len(found)} layers at least half of the products are exact zeros"
    return f"Half of the products are below {medians[low]:.2g} in layer {low}, {medians[high]:.2g} in layer {high}"


def _density(d: Distribution) -> list[float]:
    """The share of all products by quarter of an octave's bins, per octave: bins are even in |x|, not in its log2."""
    shares = d.counts.sum(0).view(4 * OCTAVES, -1).sum(1).double() / d.total
    return (shares / _quarters().diff()).tolist()


def _quarters() -> Tensor:
    """log2 of the edges of what _density gives."""
    return edges()[:: BINS // (4 * OCTAVES)].log2()


def _span(found: Sequence[Distribution]) -> tuple[float, float]:
    """The octaves that hold all but a few thousandths of the nonzero products of every layer."""
    at = lambda part: [t for d in found if (t := d.threshold(d.zero + part * (1 - d.zero))) > 0]  # noqa: E731
    low, high = at(0.003), at(0.9999)
    return (math.log2(min(low)) - 1, math.log2(max(high)) + 1) if low else (-1.0, 1.0)


def unions(a: Analysis) -> Figure | None:
    curves = {i.index: [(1.0, 1 - firing_rate(i.mlp)), *((float(w), u) for w, u in i.mlp.unions.items())]
              for i in a.layers if i.mlp and i.mlp.unions}  # fmt: skip
    if not curves:
        return None
    last = max(w for points in curves.values() for w, _ in points)
    x, y = Scale(0, math.log2(last), LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    windows = {float(k): str(2**k) for k in range(int(math.log2(last)) + 1)}
    body = frame(x, y, windows, QUARTERS, "consecutive tokens", "share of the neurons that none of them activates")
    for layer, points in curves.items():
        body += line([(x(math.log2(w)), y(u)) for w, u in points], "depth", _depth(a, layer), f"layer {layer}")
    ends = {layer: points[-1][1] for layer, points in curves.items()}
    chosen = sorted({min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)})
    for i, height in zip(chosen, apart([y(ends[i]) for i in chosen]), strict=True):
        body += text(RIGHT + 7, height + 4, f"layer {i}: {share(ends[i])}")
    window = min(8, int(last))
    one, many = a.mean(lambda m: 1 - firing_rate(m)), a.mean(lambda m: m.unions[window])
    title = f"One token leaves {share(one)} of the neurons idle, {window} consecutive tokens together {share(many)}"
    caption = ("Aggregated sparsity: what a batch, a draft of several tokens or a cache of hot neurons can still leave out. "
               "Each line is a layer, stronger the deeper it is.")  # fmt: skip
    return Figure(title=title, svg=svg(body), caption=caption)


def router_load(a: Analysis) -> Figure | None:
    routers = {i.index: i.router for i in a.layers if i.router}
    if not routers:
        return None
    rows = [(r.load.double() * r.experts / r.load.sum()).tolist() for r in routers.values()]
    height, most = max(4.0, min(26.0, 300 / len(rows))), max(max(row) for row in rows)
    bottom, experts = TOP + height * len(rows), max(len(row) for row in rows)
    body = cells(rows, LEFT, WIDTH - 8, TOP, height, most=most, tone="routed") + _row_labels(list(routers), TOP, height)
    x = Scale(0, experts, LEFT, WIDTH - 8)
    step = max(1, experts // 8)
    body += "".join(text(x(e + 0.5), bottom + 16, str(e), "tick", "middle") for e in range(0, experts, step))
    body += text(x(experts / 2), bottom + 33, "expert", "label", "middle") + text(0, 14, "layer", "label")
    body += ramp(WIDTH - 8, 14, "0", f"{most:.1f}×", "load", "routed")
    caption = "Selections of each expert; 1× is an even share."
    return Figure(title=router_title(routers), svg=svg(body, bottom + 40), caption=caption)


def router_title(routers: Mapping[int, Router]) -> str:
    layer = max(routers, key=lambda i: routers[i].busiest)
    unused = sum(int((r.load == 0).sum()) for r in routers.values())
    total = sum(r.experts for r in routers.values())
    return (f"The busiest expert gets {routers[layer].busiest:.2f} times an even share, in layer {layer}; "
            f"{unused or 'none'} of {total} {'gets' if unused < 2 else 'get'} no token")  # fmt: skip


def router_entropy(a: Analysis) -> Figure | None:
    balance = _by_layer(a, lambda i: i.router.balance if i.router else None)
    entropy = _by_layer(a, lambda i: i.router.entropy if i.router else None)
    if not balance:
        return None
    x, y = _layers(a), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, _layer_ticks(a), {v: f"{v:g}" for v in QUARTERS}, "layer", "entropy, 1 is even over all experts")
    curves = [
        Curve(name="of the load", tone="zero", points=balance),
        Curve(name="of a token", tone="cett2", points=entropy),
    ]
    body += labelled([c for c in curves if c.points], x, y)
    title = f"The load's entropy is {_mean(balance):.3f} of an even one"
    title += f", a token's own choice {_mean(entropy):.3f}" if entropy else ""
    caption = "As a fraction of ln E. The load's is low where experts starve, a token's where its router is sure."
    return Figure(title=title, svg=svg(body), caption=caption)


def _mean(points: list[Point]) -> float:
    return sum(v for _, v in points) / len(points)


def residual(a: Analysis) -> Figure | None:
    points = _by_layer(a, lambda i: i.residual)
    if not points:
        return None
    x, y = _layers(a), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, _layer_ticks(a), QUARTERS, "layer", "share of the residual stream's norm")
    body += labelled([Curve(name=share(points[-1][1]), tone="cett2", points=points)], x, y)
    lead = "Tokens collapse to one row" if points[-1][1] < 0.1 else "Tokens stay apart"
    title = (f"{lead}: what tells them from their mean is {share(points[0][1])} of the residual stream after layer "
             f"{points[0][0]:.0f}, {share(points[-1][1])} after layer {points[-1][0]:.0f}")  # fmt: skip
    return Figure(
        title=title, svg=svg(body), caption="‖X − 1 x̄ᵀ‖ / ‖X‖ of the stream after each layer (Dong et al. 2021)."
    )


def _binned(values: Tensor, columns: int) -> Tensor:
    """Means over at most `columns` bins."""
    return torch.stack([part.mean() for part in values.tensor_split(min(columns, len(values)))])


# --- drawing ----------------------------------------------------------------------------------------------------------


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
    x: Scale, y: Scale, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str], x_label: str, y_label: str
) -> str:
    """Horizontal grid lines, ticks, and what the axes are."""
    parts = [text(0, 14, y_label, "label"), text((x.start + x.end) / 2, y.start + 35, x_label, "label", "middle")]
    for value, words in y_ticks.items():
        parts.append(line([(x.start, y(value)), (x.end, y(value))], "grid" if value != y.low else "axis"))
        parts.append(text(x.start - 7, y(value) + 4, words, "tick", "end"))
    parts += [text(x(value), y.start + 17, words, "tick", "middle") for value, words in x_ticks.items()]
    return "".join(parts)


def labelled(curves: list[Curve], x: Scale, y: Scale) -> str:
    """Lines with dots, and their names where they end."""
    parts = []
    for curve in curves:
        parts.append(line([(x(i), y(v)) for i, v in curve.points], curve.tone))
        parts += [dot(x(i), y(v), curve.tone, f"layer {i:.0f}, {curve.name}: {share(v)}") for i, v in curve.points]
    heights = apart([y(c.points[-1][1]) for c in curves])
    right = max(x(c.points[-1][0]) for c in curves)
    parts += [text(right + 9, h + 4, c.name, f"name {c.tone}") for c, h in zip(curves, heights, strict=True)]
    return "".join(parts)


def apart(heights: Sequence[float], gap: float = 16.0) -> list[float]:
    """The heights of labels, moved up or down until they are `gap` apart, and not under the plot."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed, floor = list(heights), BOTTOM
    for before, i in pairwise(order):
        placed[i] = max(placed[i], placed[before] + gap)
    for i in reversed(order):
        placed[i] = min(placed[i], floor)
        floor = placed[i] - gap
    return placed


def cells(rows: list[list[float]], left: float, right: float, top: float, height: float, *, most: float,
          tone: str = "rate") -> str:  # fmt: skip
    """A heat map: opacity is value / most in LEVELS steps, one path a step, neighbours of the same step joined."""
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
    return outline + "".join(f'<path class="cell {tone}" fill-opacity="{k / LEVELS:g}" d="{"".join(d)}"/>'
                             for k, d in sorted(found.items()) if k)  # fmt: skip


def ramp(right: float, y: float, low: str, high: str, what: str, tone: str = "rate") -> str:
    """The scale of a heat map, above its right end."""
    end = right - 9 * len(high) - 4
    boxes = cells([[i / 9 for i in range(10)]], end - 80, end, y - 9, 9, most=1.0, tone=tone)
    return boxes + text(end - 86, y, f"{what} {low}", "tick", "end") + text(right, y, high, "tick", "end")


def _row_labels(labels: Sequence[int | str], top: float, height: float, x: float | None = None) -> str:
    """As many as there is room for, the first and the last among them."""
    step = math.ceil(15 / height)
    shown = [i for i in range(0, len(labels), step) if i == 0 or len(labels) - 1 - i >= step] + [len(labels) - 1]
    at, anchor = (LEFT - 7, "end") if x is None else (x, "start")
    return "".join(text(at, top + (i + 0.5) * height + 4, str(labels[i]), "tick", anchor) for i in dict.fromkeys(shown))


def _decades(x: Scale, top: float, bottom: float) -> str:
    """Powers of ten under an axis of log2."""
    low, high = (math.floor(v * math.log10(2)) for v in (x.low, x.high))
    step, parts = math.ceil((high - low) / 6), []
    for k in range(0, low, -step) if high <= 0 else range(high - high % step, low, -step):
        at = x(k * math.log2(10))
        parts.append(line([(at, top), (at, bottom)], "grid") + text(at, bottom + 17, _power(k), "tick", "middle"))
    return "".join(parts)


def _power(k: int) -> str:
    return {0: "1", 1: "10", 2: "100"}.get(k, "10" + str(k).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")))


def _layers(a: Analysis) -> Scale:
    return Scale(-0.5, len(a.layers) - 0.5, LEFT, RIGHT) if len(a.layers) < 2 else Scale(0, len(a.layers) - 1, LEFT + 8, RIGHT)  # fmt: skip


def _layer_ticks(a: Analysis) -> dict[float, str]:
    last = len(a.layers) - 1
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if last / s <= 8)
    ticks = {float(i): str(i) for i in range(0, last + 1, step) if i == 0 or last - i >= 0.6 * step}
    return ticks | {float(last): str(last)}


def _depth(a: Analysis, layer: int) -> float:
    """Opacity."""
    return 0.35 + 0.65 * layer / max(1, len(a.layers) - 1)


# --- PNG --------------------------------------------------------------------------------------------------------------


def _write_pngs(a: Analysis, device: Device, folder: Path) -> Iterator[Path]:
    """sparsity_by_layer.png, hot_cold.png and savings.png, at 150 dpi."""
    if sparsity_curves(a):
        yield _png(folder / "sparsity_by_layer.png", sparsity_title(a), a, _draw_sparsity)
    if hot_curves(a):
        yield _png(folder / "hot_cold.png", hot_title(a), a, _draw_hot_cold)
    if a.savings:
        yield _png(folder / "savings.png", saving_title(a), a, _draw_savings)


def _png(path: Path, title: str, a: Analysis, draw: Callable[[Axes, Analysis], None]) -> Path:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Canvas(figsize=(7, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    axes = figure.subplots()
    figure.suptitle(fill(title, 64), x=0.015, ha="left", fontsize=12, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(labelsize=9, length=0, colors=INK)
    draw(axes, a)
    subtitle = f"{name_of(a)} · {a.sample.input_ids.numel():,} tokens".replace("$", r"\$")
    axes.set_title(subtitle, loc="left", fontsize=9, color=FAINT)
    figure.savefig(path, dpi=150)
    return path


def _draw_sparsity(axes: Axes, a: Analysis) -> None:
    curves = sparsity_curves(a)
    y = Scale(0, 1, BOTTOM, TOP)
    heights = apart([y(c.points[-1][1]) for c in curves])
    for curve, height in zip(curves, heights, strict=True):
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(xs, ys, "o-", color=TONES[curve.tone], linewidth=2, markersize=4, clip_on=False)
        at = (BOTTOM - height) / (BOTTOM - TOP)
        axes.annotate(curve.name, (1.01, at), xycoords="axes fraction", va="center", fontsize=10, color=INK)
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.2, max(1, len(a.layers) - 1))
    axes.set_xticks(list(_layer_ticks(a)), list(_layer_ticks(a).values()))
    _percent(axes.yaxis)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_xlabel("layer", color=INK)
    axes.set_ylabel(_share_of(a), color=INK)


def _draw_hot_cold(axes: Axes, a: Analysis) -> None:
    curves = hot_curves(a)
    axes.plot([0, 1], [0, 1], ":", color=FAINT, linewidth=1)
    for layer, points, _ in curves:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=TONES["cett2"], alpha=_depth(a, layer), linewidth=1.5)
    for (layer, _, hot), anchor in _extremes(curves):
        axes.plot(hot, HOT, "o", color=INK, markersize=5)
        axes.annotate(f"layer {layer}: {share(hot)}", (hot, HOT), xytext=(-7, 4) if anchor == "end" else (8, -12),
                      textcoords="offset points", ha="right" if anchor == "end" else "left", fontsize=9, color=INK)  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.set_xlabel("share of the layer's neurons, hottest first", color=INK)
    axes.set_ylabel("share of its activations", color=INK)


def _draw_savings(axes: Axes, a: Analysis) -> None:
    bars = saving_bars(a)
    most = bars[0][2].nbytes
    for i, (_, tone, work) in enumerate(bars):
        left = work.nbytes / most
        axes.barh(i, left, height=0.62, color=TONES[tone.split()[0]], alpha=0.45 if "ceiling" in tone else 1)
        axes.text(left + 0.01, i, _left(work, most), va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("bytes of MLP weights that a token reads", color=INK)


def _percent(axis: Any) -> None:
    axis.set_ticks(list(QUARTERS), list(QUARTERS.values()))

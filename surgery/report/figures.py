"""The figures of the page. Layers are told apart by opacity: the deeper, the stronger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.analysis.analyze import ALWAYS, CETT, Analysis, RouterStatistics, firing_rate
from surgery.analysis.devices import Device
from surgery.calibration.collectors import BINS, OCTAVES, Distribution, edges
from surgery.report.curves import (
    HOT,
    HotCurve,
    by_layer,
    depth,
    extremes,
    hot_curves,
    hot_title,
    left_of,
    mean,
    neurons,
    saving_bars,
    saving_title,
    share,
    sparsity_curves,
    sparsity_title,
)
from surgery.report.svg import (
    BOTTOM,
    LEFT,
    QUARTERS,
    RIGHT,
    TOP,
    WIDTH,
    Curve,
    Scale,
    apart,
    cells,
    decades,
    dot,
    frame,
    labelled,
    layer_ticks,
    layers,
    line,
    px,
    ramp,
    ridge,
    row_labels,
    svg,
    text,
)

COLUMNS = 200  # of a heat map


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`title` is the finding; `caption` says what is drawn."""

    title: str
    svg: str
    caption: str


def figures(a: Analysis, device: Device) -> Iterator[Figure]:
    """Those that the analysis has data for."""
    makers: tuple[Callable[[Analysis], Figure | None], ...] = (
        sparsity_by_layer,
        hot_cold,
        lambda a: savings(a, device),
        heat_map,
        histograms,
        unions,
        router_load,
        router_entropy,
        residual,
    )
    return (figure for make in makers if (figure := make(a)))


def sparsity_by_layer(a: Analysis) -> Figure | None:
    curves = sparsity_curves(a)
    if not curves:
        return None
    whose = "the MLP's" if a.mlps else "a routed expert's own"
    caption = (
        f"Share of a layer's products h that are exact zeros, and that could be left out with an error (CETT) of "
        f"{CETT[0]} and {CETT[1]} in {whose} output."
    )
    caption += (
        " Layers of routed experts alone are left out." if 0 < len(a.mlps) < len(a.layers) else ""
    )
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, layer_ticks(len(a.layers)), QUARTERS, "layer", "share of the products")
    return Figure(
        title=sparsity_title(a), svg=svg(body + labelled(curves, x, y, share)), caption=caption
    )


def hot_cold(a: Analysis) -> Figure | None:
    curves = hot_curves(a)
    if not curves:
        return None
    x, y = Scale(0, 1, LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    body = frame(
        x,
        y,
        QUARTERS,
        QUARTERS,
        "share of the layer's neurons, hottest first",
        "share of its activations",
    )
    body += line([(x(0), y(0)), (x(1), y(1))], "even") + text(
        x(0.36), y(0.36) + 16, "all alike", "faint"
    )
    for layer, points, _ in curves:
        body += line([(x(u), y(v)) for u, v in points], "depth", depth(a, layer), f"layer {layer}")
    body += "".join(_hot_label(curve, side, x, y) for curve, side in extremes(curves))
    caption = (
        f"Each line is a layer, stronger the deeper it is; the dots are where {HOT:.0%} of the activations (gate > 0) are "
        "reached."
    )
    return Figure(title=hot_title(a), svg=svg(body), caption=caption)


def _hot_label(curve: HotCurve, anchor: str, x: Scale, y: Scale) -> str:
    layer, _, hot = curve
    dx, dy = (-7, -5) if anchor == "end" else (8, 14)
    return dot(x(hot), y(HOT), "ink") + text(
        x(hot) + dx, y(HOT) + dy, f"layer {layer}: {share(hot)}", "halo", anchor
    )


def savings(a: Analysis, device: Device) -> Figure | None:
    bars = saving_bars(a)
    if not bars:
        return None
    x, most, body = Scale(0, 1, 2, WIDTH - 150), bars[0][2].nbytes, ""
    for i, (label, tone, work) in enumerate(bars):
        top = 4 + 43 * i
        body += text(2, top + 11, label)
        body += f'<rect class="fill {tone}" x="2" y="{top + 17}" width="{px(x(work.nbytes / most) - 2)}" height="15"/>'
        body += text(x(work.nbytes / most) + 7, top + 29, left_of(work, most), "strong")
    caption = (
        f"Bytes of MLP weights that a token reads when it is decoded alone; {1e3 * bars[0][2].seconds(device):.3g} ms "
        f"for all of them on {device.name} at best. Foreseen is a ceiling: a predictor that is free and never wrong. "
        "Leaving out exact zeros changes nothing; CETT does, and perplexity must say how much."
    )
    return Figure(title=saving_title(a), svg=svg(body, 4 + 43 * len(bars)), caption=caption)


def heat_map(a: Analysis) -> Figure | None:
    found = {n.layer: n.active.double() / n.tokens for n in neurons(a) if n.active is not None}
    if not found:
        return None
    rows = [_binned(rate.sort(descending=True).values, COLUMNS).tolist() for rate in found.values()]
    height = max(3.0, min(18.0, 300 / len(rows)))
    x, bottom = Scale(0, 1, LEFT, WIDTH - 8), TOP + height * len(rows)
    body = cells(rows, x.start, x.end, TOP, height, most=1.0) + row_labels(list(found), TOP, height)
    body += "".join(
        text(x(v), bottom + 16, s, "tick", "middle") for v, s in QUARTERS.items() if v < 1
    )
    body += text(x(1), bottom + 16, "100%", "tick", "end")
    body += text(x(0.5), bottom + 33, "neurons of the layer, hottest first", "label", "middle")
    body += text(0, 14, "layer", "label") + ramp(WIDTH - 8, 14, "0", "1", "firing rate")
    experts = (
        ""
        if len(a.mlps) == len(found)
        else " A neuron of an expert fires only for tokens that are routed to it."
    )
    caption = (
        f"Firing rate: the share of tokens for which the gate is positive; nearly always is for more than {ALWAYS:.0%} of "
        f"them.{experts}"
    )
    return Figure(title=heat_title(found), svg=svg(body, bottom + 40), caption=caption)


def heat_title(rates: Mapping[int, Tensor]) -> str:
    rate = torch.cat(list(rates.values()))
    dead, always, total = int((rate == 0).sum()), int((rate > ALWAYS).sum()), len(rate)
    lead = (
        f"{dead:,} of {total:,} neurons never fire"
        if dead
        else f"All {total:,} neurons fire at some token"
    )
    return f"{lead} and {f'{always:,}' if always else 'none'} nearly always; the mean one fires for {share(rate.mean().item())} of the tokens"


def histograms(a: Analysis) -> Figure | None:
    found = {n.layer: n.product for n in neurons(a) if n.product}
    if not found:
        return None
    gap = max(9.0, min(34.0, 330 / len(found)))
    x, bottom = Scale(*_span(list(found.values())), LEFT, RIGHT), 62 + gap * len(found)
    body = decades(x, 34, bottom) + _ridges(found, x, bottom, gap)
    body += text(0, 14, "layer", "label") + text(RIGHT + 8, 14, "exact zeros", "label")
    top = bottom - gap * len(found) + gap / 2 - 4
    body += row_labels(list(found), top, gap)
    body += row_labels([share(d.zero) for d in found.values()], top, gap, RIGHT + 8)
    body += text((LEFT + RIGHT) / 2, bottom + 35, "|h|, logarithmic", "label", "middle")
    caption = "Distribution of the magnitudes of the products h of every fourth token, to one scale in all layers; exact zeros are left out of the curve."
    return Figure(title=histogram_title(found), svg=svg(body, bottom + 42), caption=caption)


def _ridges(found: Mapping[int, Distribution], x: Scale, bottom: float, gap: float) -> str:
    """One above the other, the deepest layer on `bottom`; a later one hides what it covers."""
    ends, densities, parts = _quarters(), {layer: _density(d) for layer, d in found.items()}, []
    middles, peak = (
        ((ends[1:] + ends[:-1]) / 2).tolist(),
        max(max(d) for d in densities.values()) or 1.0,
    )
    for i, (layer, density) in enumerate(densities.items()):
        base = bottom - gap * (len(found) - 1 - i)
        y = Scale(0, peak, base, base - max(26, 1.9 * gap))
        points = [
            (x(o), y(v)) for o, v in zip(middles, density, strict=True) if x.low <= o <= x.high
        ]
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
    """The share of all products by quarter of an octave's bins, per octave: bins are even in |x|,
    not in its log2.
    """
    shares = d.shares.sum(0).view(4 * OCTAVES, -1).sum(1)
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
    curves = {
        i.index: [(1.0, 1 - firing_rate(i.mlp)), *((float(w), u) for w, u in i.mlp.unions.items())]
        for i in a.layers
        if i.mlp and i.mlp.unions
    }
    if not curves:
        return None
    last = max(w for points in curves.values() for w, _ in points)
    x, y = Scale(0, math.log2(last), LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    windows = {float(k): str(2**k) for k in range(int(math.log2(last)) + 1)}
    body = frame(
        x,
        y,
        windows,
        QUARTERS,
        "consecutive tokens",
        "share of the neurons that none of them activates",
    )
    for layer, points in curves.items():
        body += line(
            [(x(math.log2(w)), y(u)) for w, u in points], "depth", depth(a, layer), f"layer {layer}"
        )
    ends = {layer: points[-1][1] for layer, points in curves.items()}
    chosen = sorted({min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)})
    for i, height in zip(chosen, apart([y(ends[i]) for i in chosen]), strict=True):
        body += text(RIGHT + 7, height + 4, f"layer {i}: {share(ends[i])}")
    window = min(8, int(last))
    one, many = a.mean(lambda m: 1 - firing_rate(m)), a.mean(lambda m: m.unions[window])
    title = f"One token leaves {share(one)} of the neurons idle, {window} consecutive tokens together {share(many)}"
    caption = (
        "Aggregated sparsity: what a batch, a draft of several tokens or a cache of hot neurons can still leave out. "
        "Each line is a layer, stronger the deeper it is."
    )
    return Figure(title=title, svg=svg(body), caption=caption)


def router_load(a: Analysis) -> Figure | None:
    routers = {i.index: i.router for i in a.layers if i.router}
    if not routers:
        return None
    rows = [(r.load.double() * r.experts / r.load.sum()).tolist() for r in routers.values()]
    height, most = max(4.0, min(26.0, 300 / len(rows))), max(max(row) for row in rows)
    bottom, experts = TOP + height * len(rows), max(len(row) for row in rows)
    body = cells(rows, LEFT, WIDTH - 8, TOP, height, most=most, tone="routed") + row_labels(
        list(routers), TOP, height
    )
    x = Scale(0, experts, LEFT, WIDTH - 8)
    step = max(1, experts // 8)
    body += "".join(
        text(x(e + 0.5), bottom + 16, str(e), "tick", "middle") for e in range(0, experts, step)
    )
    body += text(x(experts / 2), bottom + 33, "expert", "label", "middle") + text(
        0, 14, "layer", "label"
    )
    body += ramp(WIDTH - 8, 14, "0", f"{most:.1f}×", "load", "routed")
    caption = "Selections of each expert; 1× is an even share."
    return Figure(title=router_title(routers), svg=svg(body, bottom + 40), caption=caption)


def router_title(routers: Mapping[int, RouterStatistics]) -> str:
    layer = max(routers, key=lambda i: routers[i].busiest)
    unused = sum(int((r.load == 0).sum()) for r in routers.values())
    total = sum(r.experts for r in routers.values())
    return (
        f"The busiest expert gets {routers[layer].busiest:.2f} times an even share, in layer {layer}; "
        f"{unused or 'none'} of {total} {'gets' if unused < 2 else 'get'} no token"
    )


def router_entropy(a: Analysis) -> Figure | None:
    balance = by_layer(a, lambda i: i.router.balance if i.router else None)
    entropy = by_layer(a, lambda i: i.router.entropy if i.router else None)
    if not balance:
        return None
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    body = frame(
        x,
        y,
        layer_ticks(len(a.layers)),
        {v: f"{v:g}" for v in QUARTERS},
        "layer",
        "entropy, 1 is even over all experts",
    )
    curves = [
        Curve(name="of the load", tone="zero", points=balance),
        Curve(name="of a token", tone="cett2", points=entropy),
    ]
    body += labelled([c for c in curves if c.points], x, y, share)
    title = f"The load's entropy is {mean(balance):.3f} of an even one"
    title += f", a token's own choice {mean(entropy):.3f}" if entropy else ""
    caption = "As a fraction of ln E. The load's is low where experts starve, a token's where its router is sure."
    return Figure(title=title, svg=svg(body), caption=caption)


def residual(a: Analysis) -> Figure | None:
    points = by_layer(a, lambda i: i.residual)
    if not points:
        return None
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    body = frame(
        x, y, layer_ticks(len(a.layers)), QUARTERS, "layer", "share of the residual stream's norm"
    )
    body += labelled([Curve(name=share(points[-1][1]), tone="cett2", points=points)], x, y, share)
    lead = "Tokens collapse to one row" if points[-1][1] < 0.1 else "Tokens stay apart"
    title = (
        f"{lead}: what tells them from their mean is {share(points[0][1])} of the residual stream after layer "
        f"{points[0][0]:.0f}, {share(points[-1][1])} after layer {points[-1][0]:.0f}"
    )
    return Figure(
        title=title,
        svg=svg(body),
        caption="‖X − 1 x̄ᵀ‖ / ‖X‖ of the stream after each layer (Dong et al. 2021).",
    )


def _binned(values: Tensor, columns: int) -> Tensor:
    """Means over at most `columns` bins."""
    return torch.stack([part.mean() for part in values.tensor_split(min(columns, len(values)))])

"""The figures of the page. Lines of layers are told apart by colour, from the first to the last."""

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
    duration,
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
    depth_ramp,
    dot,
    frame,
    labelled,
    layer_ticks,
    layers,
    line,
    ramp,
    rect,
    ridge,
    row_labels,
    svg,
    text,
)

COLUMNS = 200  # of a heat map


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure: `title` is its finding, `caption` says what is drawn."""

    title: str
    svg: str
    caption: str


def figures(a: Analysis, device: Device) -> Iterator[Figure]:
    """Return the figures that the analysis has data for.

    They are ordered so that figures of about the same height are beside each other in two columns.
    """
    makers: tuple[Callable[[Analysis], Figure | None], ...] = (
        sparsity_by_layer,
        hot_cold,
        lambda a: savings(a, device),
        unions,
        heat_map,
        histograms,
        router_load,
        router_entropy,
        residual,
    )
    return (figure for make in makers if (figure := make(a)))


def sparsity_by_layer(a: Analysis) -> Figure | None:
    """Draw the share of exact zeros and of what CETT can leave out, by layer."""
    curves = sparsity_curves(a)
    if not curves:
        return None
    whose = "the MLP's" if a.mlps else "a routed expert's own"
    caption = (
        "Share of a layer's products h that are exact zeros, and that could be left out with an "
        f"error (CETT) of {CETT[0]} and {CETT[1]} in {whose} output."
    )
    if 0 < len(a.mlps) < len(a.layers):
        caption += " Layers that have only routed experts are not shown."
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    body = frame(x, y, layer_ticks(len(a.layers)), QUARTERS, "layer", "share of the products")
    drawn = svg(body + labelled(curves, x, y, share))
    return Figure(title=sparsity_title(a), svg=drawn, caption=caption)


def hot_cold(a: Analysis) -> Figure | None:
    """Draw how the activations of each layer concentrate on its hottest neurons."""
    curves = hot_curves(a)
    if not curves:
        return None
    x, y = Scale(0, 1, LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    neurons_axis = "share of the layer's neurons, hottest first"
    body = frame(x, y, QUARTERS, QUARTERS, neurons_axis, "share of its activations")
    body += depth_ramp(WIDTH - 8, 14, len(a.layers) - 1)
    body += line([(x(0), y(0)), (x(1), y(1))], "even")
    body += text(x(0.36), y(0.36) + 16, "all alike", "faint")
    for layer, points, _ in curves:
        where = [(x(u), y(v)) for u, v in points]
        body += line(where, "depth", depth(a, layer), f"layer {layer}")
    body += "".join(_hot_label(curve, side, x, y) for curve, side in extremes(curves))
    caption = (
        "Each line is a layer, coloured by its depth; the dots are where "
        f"{HOT:.0%} of the activations (gate > 0) are reached."
    )
    return Figure(title=hot_title(a), svg=svg(body), caption=caption)


def _hot_label(curve: HotCurve, anchor: str, x: Scale, y: Scale) -> str:
    layer, _, hot = curve
    dx, dy = (-7, -5) if anchor == "end" else (8, 14)
    words = f"layer {layer}: {share(hot)}"
    return dot(x(hot), y(HOT), "ink") + text(x(hot) + dx, y(HOT) + dy, words, "halo", anchor)


def savings(a: Analysis, device: Device) -> Figure | None:
    """Draw the bytes of MLP weights that a token reads, for each way of saving."""
    bars = saving_bars(a)
    if not bars:
        return None
    x, most, body = Scale(0, 1, 2, WIDTH - 150), bars[0][2].nbytes, ""
    for i, (label, tone, work) in enumerate(bars):
        top, end = 4 + 43 * i, x(work.nbytes / most)
        body += text(2, top + 11, label)
        body += rect(f"fill {tone}", 2, top + 17, end - 2, 15)
        body += text(end + 7, top + 29, left_of(work, most), "strong")
    caption = (
        "Bytes of MLP weights that a token reads when it is decoded alone; all of them take "
        f"{duration(bars[0][2].seconds(device))} on {device.name} at best. Foreseen is a ceiling: "
        "a predictor that is free and never wrong. Leaving out exact zeros changes nothing. What "
        "leaving out more changes, only perplexity can tell."
    )
    return Figure(title=saving_title(a), svg=svg(body, 4 + 43 * len(bars)), caption=caption)


def heat_map(a: Analysis) -> Figure | None:
    """Draw the firing rates of all neurons, by layer."""
    found = {n.layer: n.active.double() / n.tokens for n in neurons(a) if n.active is not None}
    if not found:
        return None
    rows = [_binned(rate.sort(descending=True).values, COLUMNS).tolist() for rate in found.values()]
    height = max(3.0, min(34.0, 330 / len(rows)))
    x, bottom = Scale(0, 1, LEFT, WIDTH - 8), TOP + height * len(rows)
    body = cells(rows, (x.start, x.end), TOP, height, most=1.0)
    body += row_labels(list(found), TOP, height)
    for value, words in QUARTERS.items():
        body += text(x(value), bottom + 16, words, "tick", "middle" if value < 1 else "end")
    body += text(x(0.5), bottom + 33, "neurons of the layer, hottest first", "label", "middle")
    body += text(0, 14, "layer", "label") + ramp(WIDTH - 8, 14, "0", "1", "firing rate")
    caption = (
        "Firing rate: the share of tokens for which the gate is positive. Nearly always means more "
        f"than {ALWAYS:.0%} of them."
    )
    if len(a.mlps) < len(found):
        caption += " A neuron of an expert can only fire for tokens that are routed to it."
    return Figure(title=heat_title(found), svg=svg(body, bottom + 40), caption=caption)


def heat_title(rates: Mapping[int, Tensor]) -> str:
    """Return the finding of `heat_map`."""
    rate = torch.cat(list(rates.values()))
    dead, always, total = int((rate == 0).sum()), int((rate > ALWAYS).sum()), len(rate)
    some = f"{dead:,} of {total:,} neurons never fire"
    lead = some if dead else f"All {total:,} neurons fire at some token"
    mean_rate = share(rate.mean().item())
    return (
        f"{lead} and {f'{always:,}' if always else 'none'} nearly always; "
        f"the mean one fires for {mean_rate} of the tokens"
    )


def histograms(a: Analysis) -> Figure | None:
    """Draw the distribution of the magnitudes of the products, by layer."""
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
    caption = (
        "Distribution of the magnitudes of the products h of every fourth token, on the same scale "
        "in all layers. Exact zeros are left out of the curve."
    )
    return Figure(title=histogram_title(found), svg=svg(body, bottom + 42), caption=caption)


def _ridges(found: Mapping[int, Distribution], x: Scale, bottom: float, gap: float) -> str:
    """Draw densities one above the other, the deepest layer on `bottom`.

    A later layer hides what it covers of those above it.
    """
    ends, densities, parts = _quarters(), {layer: _density(d) for layer, d in found.items()}, []
    middles = ((ends[1:] + ends[:-1]) / 2).tolist()
    peak = max(max(d) for d in densities.values()) or 1.0
    for i, (layer, density) in enumerate(densities.items()):
        base = bottom - gap * (len(found) - 1 - i)
        y = Scale(0, peak, base, base - max(26, 1.9 * gap))
        inside = [p for p in zip(middles, density, strict=True) if x.low <= p[0] <= x.high]
        points = [(x(octave), y(value)) for octave, value in inside]
        parts.append(ridge(points, base, f"layer {layer}"))
    return "".join(parts)


def histogram_title(found: Mapping[int, Distribution]) -> str:
    """Return the finding of `histograms`."""
    medians = {layer: d.threshold(0.5) for layer, d in found.items()}
    low, high = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    if medians[low] == 0:
        mostly = sum(m == 0 for m in medians.values())
        return f"In {mostly} of {len(found)} layers at least half of the products are exact zeros"
    return (
        f"Half of the products are below {medians[low]:.2g} in layer {low}, "
        f"{medians[high]:.2g} in layer {high}"
    )


def _density(d: Distribution) -> list[float]:
    """Return the share of all products per octave, for each quarter of an octave.

    Bins are even in |x| and not in log2 |x|, so the shares are divided by the width in log2.
    """
    shares = d.shares.sum(0).view(4 * OCTAVES, -1).sum(1)
    return (shares / _quarters().diff()).tolist()


def _quarters() -> Tensor:
    """Return log2 of the edges of the quarters that `_density` gives."""
    return edges()[:: BINS // (4 * OCTAVES)].log2()


def _span(found: Sequence[Distribution]) -> tuple[float, float]:
    """Return the octaves that hold all but a few thousandths of the nonzero products."""

    def at(part: float) -> list[float]:
        thresholds = [d.threshold(d.zero + part * (1 - d.zero)) for d in found]
        return [t for t in thresholds if t > 0]

    low, high = at(0.003), at(0.9999)
    return (math.log2(min(low)) - 1, math.log2(max(high)) + 1) if low else (-1.0, 1.0)


def unions(a: Analysis) -> Figure | None:
    """Draw the share of neurons that consecutive tokens leave idle together."""
    curves = {}
    for layer in a.layers:
        if layer.mlp and layer.mlp.unions:
            first = (1.0, 1 - firing_rate(layer.mlp))
            rest = ((float(w), u) for w, u in layer.mlp.unions.items())
            curves[layer.index] = [first, *rest]
    if not curves:
        return None
    last = max(w for points in curves.values() for w, _ in points)
    x, y = Scale(0, math.log2(last), LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    windows = {float(k): str(2**k) for k in range(int(math.log2(last)) + 1)}
    body = frame(
        x, y, windows, QUARTERS, "consecutive tokens", "neurons that none of them activates"
    )
    body += depth_ramp(WIDTH - 8, 14, len(a.layers) - 1)
    for index, points in curves.items():
        where = [(x(math.log2(w)), y(u)) for w, u in points]
        body += line(where, "depth", depth(a, index), f"layer {index}")
    ends = {layer: points[-1][1] for layer, points in curves.items()}
    chosen = sorted({min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)})
    for i, height in zip(chosen, apart([y(ends[i]) for i in chosen]), strict=True):
        body += text(RIGHT + 7, height + 4, f"layer {i}: {share(ends[i])}")
    window = min(8, int(last))
    one, many = a.mean(lambda m: 1 - firing_rate(m)), a.mean(lambda m: m.unions[window])
    title = (
        f"One token leaves {share(one)} of the neurons idle, {window} consecutive tokens together "
        f"{share(many)}"
    )
    caption = (
        "Aggregated sparsity: what a batch, a draft of several tokens or a cache of hot neurons "
        "can still leave out. Each line is a layer, coloured by its depth."
    )
    return Figure(title=title, svg=svg(body), caption=caption)


def router_load(a: Analysis) -> Figure | None:
    """Draw how often each expert is selected, by layer."""
    routers = {i.index: i.router for i in a.layers if i.router}
    if not routers:
        return None
    rows = [(r.load.double() * r.experts / r.load.sum()).tolist() for r in routers.values()]
    height, most = max(4.0, min(26.0, 300 / len(rows))), max(max(row) for row in rows)
    bottom, experts = TOP + height * len(rows), max(len(row) for row in rows)
    body = cells(rows, (LEFT, WIDTH - 8), TOP, height, most=most, tone="routed")
    body += row_labels(list(routers), TOP, height)
    x = Scale(0, experts, LEFT, WIDTH - 8)
    for expert in range(0, experts, max(1, experts // 8)):
        body += text(x(expert + 0.5), bottom + 16, str(expert), "tick", "middle")
    body += text(x(experts / 2), bottom + 33, "expert", "label", "middle")
    body += text(0, 14, "layer", "label")
    body += ramp(WIDTH - 8, 14, "0", f"{most:.1f}×", "load", "routed")
    caption = "How often each expert is selected; 1× is an even share."
    return Figure(title=router_title(routers), svg=svg(body, bottom + 40), caption=caption)


def router_title(routers: Mapping[int, RouterStatistics]) -> str:
    """Return the finding of `router_load`."""
    layer = max(routers, key=lambda i: routers[i].busiest)
    unused = sum(int((r.load == 0).sum()) for r in routers.values())
    total = sum(r.experts for r in routers.values())
    return (
        f"The busiest expert gets {routers[layer].busiest:.2f} times an even share, in layer "
        f"{layer}; "
        f"{unused or 'none'} of {total} {'gets' if unused < 2 else 'get'} no token"
    )


def router_entropy(a: Analysis) -> Figure | None:
    """Draw the entropy of the experts' load and of a token's choice, by layer."""
    balance = by_layer(a, lambda i: i.router.balance if i.router else None)
    entropy = by_layer(a, lambda i: i.router.entropy if i.router else None)
    if not balance:
        return None
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    ticks, parts = layer_ticks(len(a.layers)), {v: f"{v:g}" for v in QUARTERS}
    body = frame(x, y, ticks, parts, "layer", "entropy, 1 is even over all experts")
    curves = [
        Curve(name="of the load", tone="zero", points=balance),
        Curve(name="of a token", tone="cett2", points=entropy),
    ]
    body += labelled([c for c in curves if c.points], x, y, share)
    title = f"The load's entropy is {mean(balance):.3f} of an even one"
    title += f", a token's own choice {mean(entropy):.3f}" if entropy else ""
    caption = (
        "Entropy as a fraction of ln E. That of the load is low where experts starve, that of a "
        "token where its router is sure."
    )
    return Figure(title=title, svg=svg(body), caption=caption)


def residual(a: Analysis) -> Figure | None:
    """Draw how far the residual stream is from one row for all tokens, by layer."""
    points = by_layer(a, lambda i: i.residual)
    if not points:
        return None
    x, y = layers(len(a.layers)), Scale(0, 1, BOTTOM, TOP)
    axis = "share of the residual stream's norm"
    body = frame(x, y, layer_ticks(len(a.layers)), QUARTERS, "layer", axis)
    (first, start), (last, end) = points[0], points[-1]
    body += labelled([Curve(name=share(end), tone="cett2", points=points)], x, y, share)
    lead = "Tokens collapse to one row" if end < 0.1 else "Tokens stay apart"
    title = (
        f"{lead}: what distinguishes them from their mean is {share(start)} of the residual stream "
        f"after layer {first:.0f}, {share(end)} after layer {last:.0f}"
    )
    caption = (
        "‖X − 1 x̄ᵀ‖ / ‖X‖ of the residual stream X after each layer, x̄ its mean over the tokens of "
        "a sequence (Dong et al. 2021)."
    )
    return Figure(title=title, svg=svg(body), caption=caption)


def _binned(values: Tensor, columns: int) -> Tensor:
    """Return the means over at most `columns` bins."""
    return torch.stack([part.mean() for part in values.tensor_split(min(columns, len(values)))])

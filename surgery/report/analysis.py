"""What `surgery analyze` shows in a terminal: a finding, then a table by layer, and what the
sparsity would save.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from surgery.analysis.analyze import (
    ALWAYS,
    CETT,
    Analysis,
    MlpStatistics,
    RouterStatistics,
    at_cett,
    exact_zeros,
    firing_rate,
)
from surgery.analysis.devices import Device
from surgery.analysis.sparsity import hot_share
from surgery.report.inspection import quantity


def tables(analysis: Analysis, device: Device) -> Iterator[RenderableType]:
    """The report, part by part."""
    shape = analysis.sample.input_ids.shape
    yield finding(analysis)
    yield (
        f"{analysis.source} · {analysis.model_type}, {analysis.activation} · {shape[0]} × {shape[1]} tokens of "
        f"{analysis.sample.source} (sha256 {analysis.sample.sha256[:12]}…) · {analysis.dtype}\n"
    )
    if analysis.mlps:
        yield _by_layer(analysis)
        yield (
            "active: the gate's pre-activation is positive · CETT: error of the MLP's output when the smallest products are\n"
            "left out · hot: the smallest share of neurons with 80% of the activations · next: active neurons that the\n"
            "next token shares · 16 tok: neurons that no token of 16 activates · linear: R² of the best affine map\n"
        )
    if analysis.routers:
        yield _by_router(analysis)
        yield ""
    if analysis.savings:
        yield _savings(analysis, device)
    yield from (f"note: {note}" for note in notes(analysis))


def finding(a: Analysis) -> str:
    """One line that says what was found."""
    if not a.mlps:
        busiest = max(r.busiest for r in a.routers)
        return (
            f"The busiest expert of a layer gets up to {busiest:.1f} times its share of the tokens"
        )
    zero, at = a.mean(exact_zeros), a.mean(at_cett(CETT[1]))
    if zero >= 0.01:
        return f"{zero:.0%} of the products are exact zeros; at a CETT of {CETT[1]}, {at:.0%} could be left out"
    few = "Hardly a product is an exact zero" if zero else "No product is an exact zero"
    return f"{few}; {at:.0%} could be left out at a CETT of {CETT[1]}"


def notes(a: Analysis) -> Iterator[str]:
    """What the reader should know."""
    if not a.sample.text:
        yield "the tokens are random: rates and sparsities of real text are others"
    if a.mlps and a.mean(exact_zeros) < 0.01:
        yield (
            f"{a.activation} gives {'hardly any' if a.mean(exact_zeros) else 'no'} zeros: skipping products changes the output, and what CETT allows must be checked by "
            "perplexity; `surgery relufy` makes zeros, and needs training after it"
        )
    if a.savings and any(router.product is None for router in a.routers):
        yield "routed experts cannot be looked into here: what would be saved counts them whole"
    for layer in a.layers:
        if layer.mlp and layer.mlp.linearity.exact:
            yield f"layer {layer.index}: on this sample the MLP is {layer.mlp.linearity.exact}"
        elif layer.mlp and layer.mlp.linearity.r2 > 0.99:
            yield f"layer {layer.index}: the MLP is a linear map but for {1 - layer.mlp.linearity.r2:.2%} of its output's variance"
        if layer.router and (unused := int((layer.router.load == 0).sum())):
            yield f"layer {layer.index}: {unused} of {layer.router.experts} experts got no token"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _by_layer(a: Analysis) -> Table:
    table = _table(
        "layer",
        "d_ff",
        "zero",
        "active",
        *(f"CETT {c}" for c in CETT),
        "dead",
        "always",
        "hot",
        "next",
        "16 tok",
        "linear",
        "outliers",
        "residual",
    )
    for layer in a.layers:
        if layer.mlp:
            shared = "" if layer.mlp.part == "mlp" else " shared"
            table.add_row(f"{layer.index}{shared}", *_mlp_row(layer.mlp), f"{layer.residual:.2f}")
    table.add_section()
    cells = [a.mean(exact_zeros), a.mean(firing_rate), *(a.mean(at_cett(c)) for c in CETT)]
    table.add_row("all", "", *(f"{c:.1%}" for c in cells), style="bold")
    return table


def _mlp_row(m: MlpStatistics) -> list[str]:
    return [
        f"{m.width:,}",
        f"{m.product.zero:.1%}",
        f"{firing_rate(m):.1%}",
        *(f"{m.at(c).sparsity:.1%}" for c in CETT),
        str(int((m.active == 0).sum())),
        str(int((m.rate > ALWAYS).sum())),
        f"{hot_share(m.active):.0%}",
        f"{m.overlap:.0%}",
        f"{m.unions[16]:.0%}" if 16 in m.unions else "",
        f"{m.linearity.r2:.2f}",
        str(len(m.outliers)),
    ]


def _by_router(a: Analysis) -> Table:
    table = _table(
        "layer",
        "experts",
        "top k",
        "busiest",
        "unused",
        "balance",
        "entropy",
        "zero",
        "active",
        *(f"CETT {c}" for c in CETT),
    )
    for layer in a.layers:
        if layer.router:
            table.add_row(str(layer.index), *_router_row(layer.router))
    return table


def _router_row(r: RouterStatistics) -> list[str]:
    return [
        str(r.experts),
        str(r.top_k),
        f"{r.busiest:.2f}×",
        str(int((r.load == 0).sum())),
        f"{r.balance:.3f}",
        "" if r.entropy is None else f"{r.entropy:.3f}",
        f"{r.product.zero:.1%}" if r.product else "",
        f"{r.gate.positive:.1%}" if r.gate else "",
        *(f"{r.at(c).sparsity:.1%}" if r.truncations else "" for c in CETT),
    ]


def _savings(a: Analysis, device: Device) -> Table:
    table = _table(
        "what is skipped",
        "kernel",
        "sparsity",
        "MLP bytes/token",
        "MLP FLOP/token",
        f"ms on {device.name}",
        "left",
    )
    before = a.savings[0].before
    table.add_row(
        "nothing",
        "",
        "",
        quantity(before.nbytes, "B"),
        quantity(before.flops, "FLOP"),
        f"{1e3 * before.seconds(device):.3g}",
        "",
    )
    for s in a.savings:
        table.add_row(
            s.rule,
            s.kernel,
            f"{s.sparsity:.1%}",
            quantity(s.after.nbytes, "B"),
            quantity(s.after.flops, "FLOP"),
            f"{1e3 * s.after.seconds(device):.3g}",
            f"{s.after.nbytes / s.before.nbytes:.0%}",
        )
    return table

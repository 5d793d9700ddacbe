"""What `surgery analyze` shows in a terminal: a finding, tables by layer, and possible savings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from surgery.analysis.analyze import (
    ALWAYS,
    CETT,
    Analysis,
    MlpStatistics,
    RouterStatistics,
    at_cett,
    exact_zeros,
    firing_rate,
    zeros_of_all,
)
from surgery.analysis.devices import Cost, Device
from surgery.analysis.sparsity import hot_share
from surgery.report.inspection import quantity

# One line of text, which is wrapped to the width of the terminal.
LEGEND = (
    "active: the gate's pre-activation is positive · CETT: relative error of the MLP's output when "
    "its smallest products are left out · dead: neurons that are never active · always: neurons "
    f"active for more than {ALWAYS:.0%} of the tokens · hot: the smallest share of neurons with "
    "80% of the activations · next: active neurons that the next token shares · 16 tok: neurons "
    "that no token of 16 activates · linear: R² of the best affine map · outliers: input channels "
    "above 10 times the median · residual: how far tokens are from their mean"
)


def tables(analysis: Analysis, device: Device) -> Iterator[RenderableType]:
    """Yield the report, part by part."""
    sample = analysis.sample
    sequences, length = sample.input_ids.shape
    yield finding(analysis)
    yield (
        f"{analysis.source} · {analysis.model_type}, {analysis.activation} · "
        f"{sequences} × {length} tokens of {sample.source} (sha256 {sample.sha256[:12]}…) · "
        f"{analysis.dtype}\n"
    )
    if analysis.mlps:
        yield _by_layer(analysis)
        yield Text(LEGEND + "\n")
    if analysis.routers:
        yield _by_router(analysis)
        yield ""
    if analysis.savings:
        yield _savings(analysis, device)
    yield from (f"note: {note}" for note in notes(analysis))


def finding(a: Analysis) -> str:
    """Return one line that says what was found."""
    if not a.mlps:
        most = max(r.busiest for r in a.routers)
        return f"The busiest expert of a layer gets up to {most:.1f} times its share of the tokens"
    zero, at = a.mean(exact_zeros), a.mean(at_cett(CETT[1]))
    if zero >= 0.01:
        return (
            f"{zero:.0%} of the products are exact zeros; at a CETT of {CETT[1]}, {at:.0%} could "
            "be left out"
        )
    few = "Hardly a product is an exact zero" if zero else "No product is an exact zero"
    return f"{few}; {at:.0%} could be left out at a CETT of {CETT[1]}"


def notes(a: Analysis) -> Iterator[str]:
    """Yield what the reader should know."""
    if always_open := max((m.always_open for m in a.mlps), default=0):
        yield (
            f"the last {always_open} neurons of each MLP are always open: zeros are counted among "
            f"the others, and over all neurons they are {a.mean(zeros_of_all):.1%}"
        )
    if not a.sample.text:
        yield "the tokens are random: rates and sparsities on real text will differ"
    if a.mlps and a.mean(exact_zeros) < 0.01:
        yield (
            f"{a.activation} gives {'hardly any' if a.mean(exact_zeros) else 'no'} zeros: skipping "
            "products changes the output, so check by perplexity what CETT allows; "
            "`surgery relufy` makes zeros, and repairs what they cost"
        )
    if a.savings and any(router.product is None for router in a.routers):
        yield "routed experts cannot be looked into here: the savings count them whole"
    for layer in a.layers:
        linear = layer.mlp.linearity if layer.mlp else None
        if linear and linear.exact:
            yield f"layer {layer.index}: on this sample the MLP is {linear.exact}"
        elif linear and linear.r2 > 0.99:
            yield (
                f"layer {layer.index}: the MLP is a linear map except for {1 - linear.r2:.2%} of "
                "its output's variance"
            )
        if layer.router and (unused := int((layer.router.load == 0).sum())):
            yield f"layer {layer.index}: {unused} of {layer.router.experts} experts got no token"


def _table(*columns: str) -> Table:
    """Return an empty table, whose first column is on the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        # In a narrow terminal headers wrap first, and no digit is cut off.
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The table of the dense MLPs, printed in two parts where it is wider than the screen."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole, n = self._part(range(len(self.columns))), 1 + len(self.columns) // 2
        needed = console.measure(whole, options=options.update(width=1000)).maximum
        if needed <= options.max_width:
            yield whole
        else:
            yield self._part(range(n))
            yield ""
            yield self._part([0, *range(n, len(self.columns))])

    def _part(self, chosen: Iterable[int]) -> Table:
        chosen = list(chosen)
        table = _table(*(self.columns[i] for i in chosen))
        for row in self.rows:
            table.add_row(*(row[i] for i in chosen))
        if any(self.total[i] for i in chosen[1:]):
            table.add_section()
            table.add_row(*(self.total[i] for i in chosen), style="bold")
        return table


def _by_layer(a: Analysis) -> LayerTable:
    cetts = [f"CETT {c}" for c in CETT]
    columns = ["layer", "d_ff", "zero", "active", *cetts, "dead", "always"]
    columns += ["hot", "next", "16 tok", "linear", "outliers", "residual"]
    rows = []
    for layer in a.layers:
        if layer.mlp:
            shared = "" if layer.mlp.part == "mlp" else " shared"
            rows.append([f"{layer.index}{shared}", *_mlp_row(layer.mlp), f"{layer.residual:.2f}"])
    means = [a.mean(exact_zeros), a.mean(firing_rate), *(a.mean(at_cett(c)) for c in CETT)]
    total = ["all", "", *(f"{m:.1%}" for m in means)]
    return LayerTable(columns, rows, total + [""] * (len(columns) - len(total)))


def _mlp_row(m: MlpStatistics) -> list[str]:
    return [
        f"{m.width:,}",
        f"{exact_zeros(m):.1%}",
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
    """Return the table of what skipping would save."""
    table = _table(
        "what is skipped",
        "kernel",
        "sparsity",
        "MLP bytes per token",
        "MLP FLOP per token",
        f"ms on {device.name}",
        "left",
    )
    before = a.savings[0].before
    table.add_row("nothing", "", "", *_cost_row(before, device), "")
    for s in a.savings:
        left = f"{s.after.nbytes / s.before.nbytes:.0%}"
        sparsity = f"{s.sparsity:.1%}"
        table.add_row(s.rule, s.kernel, sparsity, *_cost_row(s.after, device), left)
    return table


def _cost_row(cost: Cost, device: Device) -> list[str]:
    milliseconds = f"{1e3 * cost.seconds(device):.3g}"
    nbytes, flops = (quantity(cost.nbytes, "B", digits=3), quantity(cost.flops, "FLOP", digits=3))
    return [nbytes, flops, milliseconds]

"""What `surgery inspect` shows: a finding, a summary, where the weights are, and a plot of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgery.analysis.devices import Decode, mlp_work
from surgery.analysis.weigh import LayerWeights, Weights
from surgery.errors import SurgeryError, UsageError
from surgery.families.roles import MLP_ROLES, ROLES
from surgery.quoting import plotted
from surgery.report import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "embedding": "embedding",
    "head": "head",
    "attention": "attention",
    "mixer": "state-space mixer",
    "mlp": "dense MLP",
    "shared_experts": "shared experts",
    "routed_experts": "routed experts",
    "router": "router",
    "norms": "norms",
    "other": "other",
    "towers": "not run on text",
}
COLORS = {  # warm for MLPs, cold or grey for the rest
    "embedding": "#9aa5b1",
    "head": "#c3cad2",
    "attention": "#3d6fb4",
    "mixer": "#5fb3b3",
    "mlp": "#e8743b",
    "shared_experts": "#f2a65a",
    "routed_experts": "#c8452f",
    "router": "#7a4fa3",
    "norms": "#4d5966",
    "other": "#777777",
    "towers": "#dddddd",
}
INK, FAINT = "#222222", "#8a8f98"


def as_dict(weights: Weights, step: Decode) -> dict[str, Any]:
    """Return the whole inspection, for --json."""
    return {**weights.as_dict(), "decode": step.as_dict()}


def quantity(value: float, unit: str = "", *, digits: int = 4) -> str:
    """Return a number with four (or `digits`) significant digits and an SI prefix.

    "56.37 B" of parameters, or with a unit "112.7 GFLOP".
    """
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k"))
    scale, prefix = next(((s, p) for s, p in prefixes if abs(value) >= s), (1.0, ""))
    rounded = float(f"{value / scale:.{digits}g}")
    return f"{rounded:g} {prefix}{unit}".strip()


def _or_dash(value: float, unit: str) -> str:
    return quantity(value, unit) if value else "–"


def finding(weights: Weights) -> str:
    """Return one line that says where the weights are."""
    line = f"MLPs hold {weights.mlp_share:.0%} of the weights"
    if "routed_experts" not in weights.roles:
        return line
    return f"{line}; a token uses {quantity(weights.active())} of {quantity(weights.parameters())}"


def render(weights: Weights, step: Decode, name: str) -> RenderableType:
    """Return the report, for a terminal or a pipe."""
    title = Text.assemble(
        (finding(weights), "bold"),
        (f"\n{name} · {weights.model_type} · {len(weights.layers)} layers", "dim"),
    )
    notes = [Text(f"note: {note}", style="yellow") for note in weights.notes]
    return Group(
        title,
        Text(),
        _summary(weights, step),
        Text(),
        _by_role(weights, step),
        Text(),
        _by_layer(weights),
        *notes,
    )


def _summary(weights: Weights, step: Decode) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in (*_parameters(weights), *_work(step, weights), *_timing(step)):
        table.add_row(key, value)
    return table


def _parameters(weights: Weights) -> list[tuple[str, str]]:
    whole, active = quantity(weights.parameters()), quantity(weights.active())
    embedded = quantity(weights.active_with_embedding)
    mlps = f"{quantity(weights.parameters(*MLP_ROLES))} ({weights.mlp_share:.1%})"
    return [
        ("Parameters", f"{whole}, {active} active per token ({embedded} with the input embedding)"),
        ("MLPs", f"{mlps}: {_describe_mlps(weights)}"),
    ]


def _work(step: Decode, weights: Weights) -> list[tuple[str, str]]:
    whole = quantity(step.whole.flops / step.batch, "FLOP")
    mlps = quantity(step.mlp.flops / step.batch, "FLOP")
    attention = "without attention scores: give --context N"
    if step.context:
        attention = f"with attention over {step.context:,} positions"
    stored = step.dtype or "/".join(weights.dtypes).lower()
    read, of_mlps = quantity(step.whole.nbytes, "B"), quantity(step.mlp.nbytes, "B")
    return [
        ("FLOPs per token", f"{whole} forward, {mlps} in the MLPs ({attention})"),
        ("Bytes per step", f"{read} read, {of_mlps} for the MLPs ({stored})"),
    ]


def _describe_mlps(weights: Weights) -> str:
    """Return the kind of the MLPs and every width of theirs: "SwiGLU (silu), d_ff 28,672"."""
    kind = f"{weights.activation}, no gate"
    if weights.gated:
        kind = f"{weights.gate} ({weights.activation})"
    layers = [(role, layer) for layer in weights.layers for role in layer.widths]
    widths = {(r, x.widths[r], x.experts, x.top_k) for r, x in layers if r in MLP_ROLES}
    parts = [kind]
    for role, width, experts, top_k in sorted(widths, key=lambda w: (ROLES.index(w[0]), w[1])):
        if role == "routed_experts":
            parts.append(f"{experts} experts of d_ff {width:,}, top {top_k}")
        else:
            parts.append(f"{'shared ' if role == 'shared_experts' else ''}d_ff {width:,}")
    parts += [f"the last {weights.always_open} always open"] if weights.always_open else []
    return ", ".join(dict.fromkeys(parts))


def _timing(step: Decode) -> list[tuple[str, str]]:
    """Return the rows on what a step takes on the device, and what limits it."""
    device, many = step.device, f" of {step.batch:,} tokens" if step.batch > 1 else ""
    whole, mlp = 1e3 * step.whole.seconds(device), 1e3 * step.mlp.seconds(device)
    rates = f"{quantity(device.bandwidth, 'B/s')}, {quantity(device.peak, 'FLOP/s')}"
    per = f"{whole:.3g} ms per {'step' if many else 'token'}{many}"
    rows = [(f"On {device.name}", f"{per}, {mlp:.3g} ms in the MLPs, at best ({rates})")]
    if step.compute_bound_from:
        at = f"the MLPs do {step.mlp.intensity:.3g} FLOP per byte at batch {step.batch:,}"
        first = f"{step.compute_bound_from:,}"
        verdict = f"{step.mlp.bound(device)}-bound; compute-bound from batch {first}"
        rows.append(("Roofline", f"{at}, the ridge is at {device.ridge:.0f}: {verdict}"))
    return rows


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        words = column in ("In all", "Per layer", "part")
        # In a narrow terminal words wrap, and no digit is cut off.
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _by_role(weights: Weights, step: Decode) -> Table:
    table = _table("In all", "parameters", "share", "active", "FLOP/token", "read per step")

    def row(name: str, *roles: str, style: str = "") -> None:
        parameters = weights.parameters(*roles)
        flops = weights.flops(*roles, context=step.context)
        read = weights.nbytes(*roles, batch=step.batch, dtype=step.dtype, context=step.context)
        share = f"{parameters / weights.parameters():.1%}"
        active = _or_dash(weights.active(*roles), "")
        work = (_or_dash(flops, "FLOP"), _or_dash(read, "B"))
        table.add_row(name, quantity(parameters), share, active, *work, style=style)

    for role in weights.roles:
        tied = role == "head" and weights.tied
        row("head (tied to the embedding)" if tied else NAMES[role], role)
    row("total", style="bold")
    return table


def _by_layer(weights: Weights) -> Table:
    table = _table("Per layer", "part", "parameters", "share", "active")
    for group in weights.groups():
        table.add_section()
        _layer_rows(table, f"{group.label} ×{len(group.layers)}", group.layers[0])
    return table


def _layer_rows(table: Table, label: str, layer: LayerWeights) -> None:
    total = sum(tally.parameters for tally in layer.tallies.values())
    for i, (role, tally) in enumerate(layer.tallies.items()):
        share, active = f"{tally.parameters / total:.1%}", f"{layer.active(role):,}"
        table.add_row("" if i else label, NAMES[role], f"{tally.parameters:,}", share, active)
    if len(layer.tallies) > 1:
        active = f"{sum(map(layer.active, layer.tallies)):,}"
        table.add_row("", "layer", f"{total:,}", "", active, style="bold")


# --- plot -----------------------------------------------------------------------------------------


def plot(weights: Weights, step: Decode, name: str, path: Path) -> None:
    """Draw each role's share by group of layers, and the MLPs under the roofline.

    The suffix of `path` chooses PNG, SVG or PDF. Raises SurgeryError without matplotlib, and
    UsageError for a suffix that it cannot draw to.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        hint = "pip install 'model-surgery[plot]'"
        raise SurgeryError("--plot needs matplotlib", hint) from error
    bars = _bars(weights)
    height = 0.42 * len(bars) + 1.1
    layout = ConstrainedLayoutEngine(h_pad=0.12, hspace=0.06)
    figure = Figure(figsize=(9, height + 3.6), layout=layout)
    top, bottom = figure.subplots(2, 1, height_ratios=(height, 2.6))
    if path.suffix[1:] not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"cannot draw to {path.name}", "end its name in .png, .svg or .pdf")
    figure.suptitle(finding(weights), x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    _draw_shares(top, bars, plotted(f"{name} · {weights.model_type}"))
    _draw_roofline(bottom, weights, step)
    canvas.save(figure, path, dpi=160)


def _bars(weights: Weights) -> list[tuple[str, dict[str, int]]]:
    """Return labels and parameters by role: the model, one token, then each group of layers."""
    whole = {role: weights.parameters(role) for role in weights.roles}
    bars = [(f"all, {quantity(weights.parameters())}", whole)]
    if "routed_experts" in weights.roles:
        active = {role: weights.active(role) for role in weights.roles}
        bars.append((f"one token, {quantity(weights.active())}", active))
    for group in weights.groups():
        layer = {role: tally.parameters for role, tally in group.layers[0].tallies.items()}
        bars.append((f"layers {group.label}, {quantity(sum(layer.values()))} each", layer))
    return bars


def _draw_shares(axes: Axes, bars: list[tuple[str, dict[str, int]]], subtitle: str) -> None:
    used = [role for role in ROLES if any(parts.get(role) for _, parts in bars)]
    for y, (_, parts) in enumerate(bars):
        total, left = sum(parts.values()), 0.0
        for role in used:
            share = 100 * parts.get(role, 0) / total
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
            axes.barh(y, share, left=left, height=0.68, color=COLORS[role], **edge)
            if share >= 5:
                color = INK if role in ("head", "towers", "shared_experts") else "white"
                where: dict[str, Any] = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 9,
                    "color": color,
                }
                axes.text(left + share / 2, y, f"{share:.0f}%", **where)
            left += share
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xticks([])
    axes.set_title(subtitle, loc="left", fontsize=9, color=FAINT)
    shown = [role for role in used if _visible(role, bars)]
    handles = [axes.barh(0, 0, color=COLORS[role], label=NAMES[role]) for role in shown]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.012, -0.01), "ncols": 7}
    handle: dict[str, Any] = {"handlelength": 1, "handleheight": 1, "columnspacing": 1.3}
    axes.legend(handles=handles, frameon=False, fontsize=9, **place, **handle)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _visible(role: str, bars: list[tuple[str, dict[str, int]]]) -> bool:
    """Return whether some bar shows the role in more than a hair's width."""
    return any(parts.get(role, 0) > 0.003 * sum(parts.values()) for _, parts in bars)


def _points(weights: Weights, step: Decode) -> list[tuple[int, float]]:
    """Return batches and their FLOP per byte.

    They are 1, the given batch and the first compute-bound one, and others where there is room.
    """
    points: dict[int, float] = {}
    if step.compute_bound_from is None:
        return []
    wanted = {1, step.batch, step.compute_bound_from}
    for batch in (*wanted, 8, 64, 512):
        intensity = mlp_work(weights, batch, step.dtype).intensity
        if batch in wanted or all(max(intensity / x, x / intensity) > 2 for x in points.values()):
            points[batch] = intensity
    return sorted(points.items())


def _draw_roofline(axes: Axes, weights: Weights, step: Decode) -> None:
    """Draw what the device reaches by intensity, and where batches are on it."""
    device = step.device
    left, right, peak = 0.3, 20 * device.ridge, device.peak / 1e12
    roof = [left * device.bandwidth / 1e12, peak, peak]
    axes.plot([left, device.ridge, right], roof, color=INK, linewidth=1.6)
    axes.axvline(device.ridge, color=FAINT, linewidth=0.8, linestyle=":")
    for batch, intensity in _points(weights, step):
        reached = min(device.peak, intensity * device.bandwidth) / 1e12
        axes.plot(intensity, reached, "o", color=COLORS["mlp"], markersize=6, zorder=3)
        below: dict[str, Any] = {
            "xytext": (6, -11),
            "textcoords": "offset points",
            "fontsize": 9,
            "color": INK,
        }
        axes.annotate(f"batch {batch:,}", (intensity, reached), **below)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    axes.set_xlabel("FLOP per byte of the MLPs", fontsize=9, color=INK)
    axes.set_ylabel("TFLOP/s at best", fontsize=9, color=INK)
    bound = "no MLPs"
    if step.compute_bound_from:
        bound = f"MLPs turn compute-bound at batch {step.compute_bound_from:,}"
    title = plotted(f"{bound} on {device.name} (ridge {device.ridge:.0f} FLOP per byte)")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)

"""Draw the figures of a model card as PNGs, with matplotlib: those of the page, by other means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from surgery.analysis.analyze import Analysis
from surgery.quoting import plotted
from surgery.report import canvas
from surgery.report.curves import (
    CETT_EXPLAINED,
    HOT,
    depth,
    extremes,
    hot_curves,
    hot_title,
    left_of,
    name_of,
    saving_bars,
    saving_title,
    share,
    sparsity_curves,
    sparsity_title,
)
from surgery.report.inspection import COLORS, FAINT, INK
from surgery.report.svg import (
    BOTTOM,
    ON_LIGHT,
    QUARTERS,
    TOP,
    Scale,
    apart,
    depth_color,
    layer_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("sparsity_by_layer.png", "hot_cold.png", "savings.png")
TONES = {
    "zero": COLORS["attention"],
    "cett1": COLORS["shared_experts"],
    "cett2": COLORS["mlp"],
    "none": FAINT,
}


def draws_png() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_pngs(a: Analysis, folder: Path) -> Iterator[Path]:
    """Write those of FILES that the analysis has data for, at 150 dpi; none without matplotlib.

    Yields their paths. PNGs that an earlier analysis left in the folder are removed.
    """
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if not draws_png():
        return
    if sparsity_curves(a):
        title, path = sparsity_title(a), folder / "sparsity_by_layer.png"
        yield _png(path, title, a, _draw_sparsity, CETT_EXPLAINED)
    if hot_curves(a):
        yield _png(folder / "hot_cold.png", hot_title(a), a, _draw_hot_cold)
    if a.savings:
        title, path = saving_title(a), folder / "savings.png"
        yield _png(path, title, a, _draw_savings, CETT_EXPLAINED)


def _png(
    path: Path, title: str, a: Analysis, draw: Callable[[Axes, Analysis], None], note: str = ""
) -> Path:
    """Draw one figure, with its title above it and `note` below."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Canvas(figsize=(7, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    axes = figure.subplots()
    figure.suptitle(fill(title, 64), x=0.015, ha="left", fontsize=12, fontweight="bold", color=INK)
    if note:
        figure.supxlabel(fill(note, 104), x=0.015, ha="left", fontsize=8, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(FAINT)
    axes.tick_params(labelsize=9, length=0, colors=INK)
    draw(axes, a)
    subtitle = plotted(f"{name_of(a)[:60]} · {a.sample.input_ids.numel():,} tokens")
    axes.set_title(subtitle, loc="left", fontsize=9, color=FAINT)
    canvas.save(figure, path, dpi=150)
    return path


def _draw_sparsity(axes: Axes, a: Analysis) -> None:
    curves = sparsity_curves(a)
    y = Scale(0, 1, BOTTOM, TOP)
    heights = apart([y(c.points[-1][1]) for c in curves])
    for curve, height in zip(curves, heights, strict=True):
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(xs, ys, "o-", color=TONES[curve.tone], linewidth=2, markersize=4, clip_on=False)
        at = (BOTTOM - height) / (BOTTOM - TOP)
        where: dict[str, Any] = {"xy": (1.01, at), "xycoords": "axes fraction", "va": "center"}
        axes.annotate(curve.name, **where, fontsize=10, color=INK)
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.2, max(1, len(a.layers) - 1))
    ticks = layer_ticks(len(a.layers))
    axes.set_xticks(list(ticks), list(ticks.values()))
    _percent(axes.yaxis)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_xlabel("layer", color=INK)
    axes.set_ylabel("share of the products", color=INK)


def _draw_hot_cold(axes: Axes, a: Analysis) -> None:
    curves = hot_curves(a)
    axes.plot([0, 1], [0, 1], ":", color=FAINT, linewidth=1)
    for layer, points, _ in curves:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=depth_color(depth(a, layer)), linewidth=1.5)
    for (layer, _, hot), anchor in extremes(curves):
        axes.plot(hot, HOT, "o", color=INK, markersize=5)
        offset, side = ((-7, 4), "right") if anchor == "end" else ((8, -12), "left")
        place: dict[str, Any] = {
            "xy": (hot, HOT),
            "xytext": offset,
            "textcoords": "offset points",
            "ha": side,
        }
        axes.annotate(f"layer {layer}: {share(hot)}", **place, fontsize=9, color=INK)
    _depth_bar(axes, len(a.layers))
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
        left, color = work.nbytes / most, TONES[tone.split()[0]]
        axes.barh(i, left, height=0.62, color=color, alpha=0.45 if "ceiling" in tone else 1)
        axes.text(left + 0.01, i, left_of(work, most), va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("bytes of MLP weights that a token reads", color=INK)


def _depth_bar(axes: Axes, count: int) -> None:
    """Draw the legend of lines that are coloured by depth."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colors = LinearSegmentedColormap.from_list("depth", list(ON_LIGHT))
    scale = ScalarMappable(Normalize(0, max(1, count - 1)), colors)
    bar = axes.figure.colorbar(scale, ax=axes, fraction=0.04, pad=0.02, aspect=28)
    ticks = layer_ticks(count)
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.ax.tick_params(labelsize=9, length=0, colors=INK)
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    bar.set_label("layer", color=INK)


def _percent(axis: Any) -> None:
    axis.set_ticks(list(QUARTERS), list(QUARTERS.values()))

"""The same figures for a model card, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from surgery.analysis.analyze import Analysis
from surgery.report.curves import (
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
from surgery.report.svg import BOTTOM, QUARTERS, TOP, Scale, apart, layer_ticks

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
    return find_spec("matplotlib") is not None


def write_pngs(a: Analysis, folder: Path) -> Iterator[Path]:
    """Those of FILES that the analysis has figures for, at 150 dpi; none without matplotlib. What
    an earlier analysis left in the folder goes."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if not draws_png():
        return
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
        axes.annotate(
            curve.name, (1.01, at), xycoords="axes fraction", va="center", fontsize=10, color=INK
        )
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.2, max(1, len(a.layers) - 1))
    axes.set_xticks(list(layer_ticks(len(a.layers))), list(layer_ticks(len(a.layers)).values()))
    _percent(axes.yaxis)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_xlabel("layer", color=INK)
    axes.set_ylabel("share of the products", color=INK)


def _draw_hot_cold(axes: Axes, a: Analysis) -> None:
    curves = hot_curves(a)
    axes.plot([0, 1], [0, 1], ":", color=FAINT, linewidth=1)
    for layer, points, _ in curves:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=TONES["cett2"], alpha=depth(a, layer), linewidth=1.5)
    for (layer, _, hot), anchor in extremes(curves):
        axes.plot(hot, HOT, "o", color=INK, markersize=5)
        axes.annotate(
            f"layer {layer}: {share(hot)}",
            (hot, HOT),
            xytext=(-7, 4) if anchor == "end" else (8, -12),
            textcoords="offset points",
            ha="right" if anchor == "end" else "left",
            fontsize=9,
            color=INK,
        )
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
        axes.barh(
            i,
            left,
            height=0.62,
            color=TONES[tone.split()[0]],
            alpha=0.45 if "ceiling" in tone else 1,
        )
        axes.text(left + 0.01, i, left_of(work, most), va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("bytes of MLP weights that a token reads", color=INK)


def _percent(axis: Any) -> None:
    axis.set_ticks(list(QUARTERS), list(QUARTERS.values()))

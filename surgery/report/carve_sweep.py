"""A sweep of carved models as tables, and as a plot drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import RenderableType
from rich.table import Table

from surgery.analysis.sweep import Point, Sweep
from surgery.errors import SurgeryError, UsageError
from surgery.report import canvas
from surgery.report.inspection import COLORS, FAINT, INK

SUFFIXES = (".png", ".svg", ".pdf")
SHOWN = 8  # layers in the table


def finding(found: Sweep) -> str:
    """Return one line: the smallest part of the neurons that costs at most a tenth of perplexity.

    Random splits and the oracle do not count.
    """
    good = [
        p
        for p in found.points
        if p.perplexity <= 1.1 * found.perplexity
        and p.method != "random"
        and p.router not in ("oracle", "")
    ]
    if not good:
        return "No part below all neurons stays within 1.10 times the perplexity"
    best = min(good, key=lambda p: p.fraction)
    ratio = best.perplexity / found.perplexity
    return f"{best.fraction:.0%} of the neurons give {ratio:.2f} times the perplexity"


def tables(found: Sweep) -> Iterator[RenderableType]:
    """Yield the finding, the quality by active part, and the error by layer."""
    yield finding(found)
    perplexity = f"perplexity {found.perplexity:.2f} on {found.tokens:,} held-out tokens"
    yield f"{found.source} · {found.model_type} · {perplexity} · repair {found.repair}\n"
    yield _quality(found)
    yield "\nRelative error of the MLP's output, by layer"
    yield _by_layer(found)
    yield (
        "\noracle: computes all experts to know which add most\n"
        "recall, mass: how many of the oracle's choices the router makes, and what they add"
    )
    for active in {tuple(p.active): None for p in found.points if isinstance(p.active, list)}:
        part = sum(active) / len(active) / found.points[0].experts
        yield f"{part:.0%}: --active {','.join(map(str, active))}"


def _quality(found: Sweep) -> Table:
    table = _table(
        "split",
        "router",
        "active",
        "perplexity",
        "× source",
        "same next token",
        "error",
        "recall",
        "mass",
    )
    for p in sorted(
        found.points, key=lambda p: (p.fraction, p.method == "random", p.router == "oracle")
    ):
        routed = (
            [f"{_mean(p.recall):.1%}", f"{_mean(p.mass_recall):.1%}"]
            if p.router not in ("oracle", "")
            else ["", ""]
        )
        table.add_row(
            _split(p),
            p.router,
            f"{p.fraction:.0%}",
            f"{p.perplexity:.2f}",
            f"{p.perplexity / found.perplexity:.3f}",
            f"{p.agreement:.1%}",
            f"{p.error:.4f}",
            *routed,
        )
    return table


def _split(p: Point) -> str:
    return p.method if isinstance(p.active, int) else f"{p.method}, by layer"


def _by_layer(found: Sweep) -> Table:
    step = max(1, -(-len(found.layers) // SHOWN))
    shown = range(0, len(found.layers), step)
    table = _table("split", "router", "active", *(str(found.layers[i]) for i in shown))
    for p in found.points:
        if p.errors:
            table.add_row(
                _split(p), p.router, f"{p.fraction:.0%}", *(f"{p.errors[i]:.3f}" for i in shown)
            )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i > 1 else "left", no_wrap=True)
    return table


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


# --- plot -----------------------------------------------------------------------------------------


def require_plot(path: Path) -> None:
    """Raise an error before the sweep if it could not be plotted after it.

    Raises SurgeryError without matplotlib, and UsageError for a suffix that it cannot draw.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            "--plot needs matplotlib", "pip install 'model-surgery[plot]'"
        ) from error
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot draw to {path.name}", f"end its name in {', '.join(SUFFIXES)}")


def plot(found: Sweep, path: Path) -> None:
    """Draw perplexity and error against the active part of the neurons."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(9, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    figure.suptitle(finding(found), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    for axes, (title, value, whole) in zip(figure.subplots(1, 2), _panels(found), strict=True):
        for (split, router), points in _curves(found).items():
            xy = [*sorted({100 * p.fraction: value(p) for p in points}.items()), (100, whole)]
            color = COLORS["attention"] if split == "random" else COLORS["mlp"]
            axes.plot(
                *zip(*xy, strict=True),
                marker="o",
                markersize=4,
                color=color,
                label=f"{split}, {router}",
                linestyle=":" if router == "oracle" else "-",
            )
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("neurons active, %", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(FAINT)
        axes.tick_params(labelsize=9, colors=INK)
        axes.legend(frameon=False, fontsize=9)
    canvas.save(figure, path, dpi=150)


def _panels(found: Sweep) -> list[tuple[str, Callable[[Point], float], float]]:
    return [
        ("perplexity, × source", lambda p: p.perplexity / found.perplexity, 1.0),
        ("relative error of the MLPs, mean", lambda p: p.error, 0.0),
    ]


def _curves(found: Sweep) -> dict[tuple[str, str], list[Point]]:
    curves: dict[tuple[str, str], list[Point]] = {}
    for p in found.points:
        if p.router:
            curves.setdefault((_split(p), p.router), []).append(p)
    return curves

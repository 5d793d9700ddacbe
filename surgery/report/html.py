"""What `surgery analyze --out` draws: report.html, one file that asks the network for nothing, and
PNGs for a model card.

The page's figures (figures.py) are SVG written here (svg.py), so that they take their colours from
the page (light or dark) and need no matplotlib, which draws the PNGs only (png.py). Both draw the
same numbers (curves.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surgery.analysis.analyze import (
    ALWAYS,
    CETT,
    SAMPLED,
    Analysis,
    at_cett,
    exact_zeros,
    firing_rate,
)
from surgery.analysis.devices import Device
from surgery.analysis.sparsity import hot_share
from surgery.report.analysis import finding, notes
from surgery.report.curves import name_of, share
from surgery.report.figures import figures
from surgery.report.png import write_pngs


def write_report(analysis: Analysis, device: Device, folder: Path) -> list[Path]:
    """report.html and, where matplotlib is installed, the PNGs that the analysis has figures for;
    what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render(analysis, device), encoding="utf-8")
    return [page, *write_pngs(analysis, folder)]


def render(analysis: Analysis, device: Device) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("surgery.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        a=analysis,
        name=name_of(analysis),
        finding=finding(analysis),
        notes=list(notes(analysis)),
        tiles=list(tiles(analysis)),
        figures=list(figures(analysis, device)),
        device=device,
        cett=CETT,
        always=ALWAYS,
        hot_share=hot_share,
        firing_rate=firing_rate,
        sampled=min(SAMPLED, int(analysis.sample.mask.sum())),
    )


def tiles(a: Analysis) -> Iterator[tuple[str, str]]:
    """A number and what it is of."""
    parts, what = a.mlps or a.inside, "products" if a.mlps else "experts' products"
    if parts:
        yield share(a.mean(exact_zeros, parts)), f"of the {what} are exact zeros"
        for c in CETT:
            yield share(a.mean(at_cett(c), parts)), f"can be left out at a CETT of {c}"
    if a.mlps:
        yield share(a.mean(firing_rate)), "of the neurons are active for a token"
        dead, total = sum(int((m.active == 0).sum()) for m in a.mlps), sum(m.width for m in a.mlps)
        yield f"{dead:,}", f"of {total:,} neurons are never active"
    if a.routers:
        unused, total = (
            sum(int((r.load == 0).sum()) for r in a.routers),
            sum(r.experts for r in a.routers),
        )
        yield (
            f"{max(r.busiest for r in a.routers):.2f}×",
            "an even share of the tokens goes to the busiest expert",
        )
        yield f"{unused:,}", f"of {total:,} experts get no token"

"""Write what `surgery analyze --out` draws: report.html, and PNGs for a model card.

report.html is a single file that loads nothing from the network. Its figures (figures.py) are SVG
(svg.py), so that they take their colours from the page, light or dark, and need no matplotlib.
matplotlib draws only the PNGs (png.py). Both draw the same numbers (curves.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery import files
from surgery.analysis.analyze import (
    ALWAYS,
    CETT,
    REPORT,
    SAMPLED,
    TENSORS,
    Analysis,
    at_cett,
    exact_zeros,
    firing_rate,
)
from surgery.analysis.devices import Device
from surgery.analysis.sparsity import hot_share
from surgery.checkpoint.parsing import read_json
from surgery.errors import SurgeryError
from surgery.quoting import printable
from surgery.report.analysis import finding, notes
from surgery.report.curves import CETT_EXPLAINED, name_of, share
from surgery.report.figures import figures
from surgery.report.png import FILES, write_pngs

PAGE = "report.html"


def write_report(analysis: Analysis, device: Device, folder: Path) -> list[Path]:
    """Write report.html and, if matplotlib is installed, the PNGs that the analysis has data for.

    Returns the paths of the files.
    """
    page = folder / PAGE
    files.write(folder, PAGE, render(analysis, device).encode(), sync=False)
    return [page, *write_pngs(analysis, folder)]


def check_place(folder: Path) -> None:
    """Raise SurgeryError where an analysis would write over files that no analysis has written."""
    names = (REPORT, TENSORS, PAGE, *FILES)
    there = [name for name in names if (folder / name).exists()]
    if there and not _is_analysis(folder):
        raise SurgeryError(
            f"{folder} has a {there[0]} that is not of an analysis",
            "give another folder with --out, or move that file away",
        )


def _is_analysis(folder: Path) -> bool:
    """Return whether a folder holds the figures of an analysis."""
    try:
        found = read_json(files.read(folder, REPORT), REPORT, "")
    except (OSError, SurgeryError):
        return False
    return isinstance(found, dict) and {"fingerprint", "layers", "activation"} <= set(found)


def render(analysis: Analysis, device: Device) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("surgery.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        a=analysis,
        name=name_of(analysis),
        finding=finding(analysis),
        cett_explained=CETT_EXPLAINED if analysis.savings else "",
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


def _visible(value: Any) -> Any:
    """Return text without control characters, and what is marked safe as it is."""
    return printable(value) if type(value) is str else value


def tiles(a: Analysis) -> Iterator[tuple[str, str]]:
    """Yield the numbers at the top of the page, each with what it is of."""
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
        unused = sum(int((r.load == 0).sum()) for r in a.routers)
        total, busiest = sum(r.experts for r in a.routers), max(r.busiest for r in a.routers)
        yield f"{busiest:.2f}×", "an even share of the tokens goes to the busiest expert"
        yield f"{unused:,}", f"of {total:,} experts get no token"

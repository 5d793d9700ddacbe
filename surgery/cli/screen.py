"""The screen: progress on stderr, tables or JSON on stdout.

A terminal gets progress bars. A log gets one line per stage, and a pipe gets plain text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from surgery.checkpoint.parsing import is_number
from surgery.quoting import printable, printable_json

PIPE_WIDTH = 120  # columns, where neither a terminal nor COLUMNS says how many there are


class Bars:
    """Progress on stderr: bars with the time left on a terminal, else one line per stage."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show a stage of `total` units, 0 if unknown; the callable is told each advance."""
        if self.quiet:
            yield lambda n: None
        elif sys.stderr.isatty():
            with _bar(title, total, unit) as advance:
                yield advance
        else:
            start = time.monotonic()
            yield lambda n: None
            echo(f"{printable(title)}: done in {time.monotonic() - start:.1f} s", err=True)


@contextmanager
def _bar(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(
        total=total or None,
        desc=printable(title),
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1000,
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        yield lambda n: (bar.update(n), None)[1]


def show(report: RenderableType) -> None:
    """Print a line of text, or a table.

    Nothing in them is markup or a control character: a folder may be named [bold]. Line breaks
    around a text are empty lines.
    """
    if isinstance(report, str):
        return echo(_one_line(report))
    console = _Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = width()
    parts = [p if p.control else Segment(_text(p), p.style) for p in console.render(report)]
    console.print(Segments(parts))


def _text(part: Segment) -> str:
    return printable(part.text, lines=True)


def _one_line(text: str) -> str:
    """Return a text in visible characters, with the empty lines around it."""
    inner = text.strip("\n")
    before, after = text.partition(inner)[::2] if inner else (text, "")
    return f"{before}{printable(inner)}{after}"


class _Console(Console):
    """A console that makes the text of cells visible before it is measured."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


def echo(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text of several lines, without control characters."""
    click.echo(printable(text, lines=True) + end, err=err, nl=False)


def width() -> int:
    """Return how wide piped output is, in columns: rich alone would assume 80."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if is_number(columns) and int(columns) else PIPE_WIDTH


def echo_json(value: Any) -> None:
    """Print JSON."""
    click.echo(printable_json(json.dumps(value, indent=2, ensure_ascii=False)))


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of names and values without a frame."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return table


def columns(*names: str) -> Table:
    """Return an empty table with these columns, numbers to the right of the first one."""
    from rich import box

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table


def show_notes(notes: Sequence[str]) -> None:
    """Print each note on a line of its own."""
    for note in notes:
        show(f"note: {note}")


# --- numbers --------------------------------------------------------------------------------------


def gigabytes(n: float) -> str:
    """Return bytes as GB, MB or kB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if n >= size / 10:
            return f"{n / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{n / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

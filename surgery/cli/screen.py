"""What a person sees: progress bars on stderr, tables on stdout (plain when piped), or JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table

from surgery.checkpoint import Checkpoint
from surgery.report import summary
from surgery.workflow.convert import Result

PIPED = 120  # columns of a pipe, which has no width: rich would assume 80 and wrap the tables


class Bars:
    """Progress bars with the time left; in a log that is no terminal, a line for each stage."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show a stage of `total` units (0: unknown)."""
        if not self.quiet and not sys.stderr.isatty():
            started = time.monotonic()
            yield lambda n: None
            click.echo(f"{title}: done in {time.monotonic() - started:.1f} s", err=True)
            return
        from tqdm import tqdm

        scaled = unit == "B"
        with tqdm(
            total=total or None,
            desc=title,
            unit=unit,
            unit_scale=scaled,
            unit_divisor=1000,
            disable=self.quiet or None,
            leave=False,
            dynamic_ncols=True,
        ) as bar:
            yield lambda n: (bar.update(n), None)[1]


def show(report: RenderableType) -> None:
    """Text as it is; a table without markup, as the name of a folder may hold brackets."""
    if isinstance(report, str):
        return click.echo(report)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = PIPED
    console.print(report)


def echo_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def gigabytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def show_plan(plan: dict[str, Any], source: Checkpoint, as_json: bool) -> None:
    """The plan of `--dry-run`."""
    if as_json:
        return echo_json(plan)
    claim = (
        "the same function, exactly"
        if plan["exact"]
        else "another function: perplexity is measured"
    )
    show(
        f"Would write {gigabytes(plan['bytes'])} to {plan['out']}"
    )  # no title of the table: that is cut to its width
    table = Table(box=None, show_header=False)
    for name, value in (
        (
            "source",
            source.source.location
            + (f"@{source.source.revision[:12]}" if source.source.revision else ""),
        ),
        ("becomes", f"{plan['model_type']}, {plan['parameters']:,} parameters ({claim})"),
        (
            "shards",
            "\n".join(
                f"{s['name']}  {gigabytes(s['bytes'])}  {s['tensors']} tensors"
                for s in plan["shards"]
            ),
        ),
        (
            "other files",
            ", ".join(
                dict.fromkeys(n.partition("/")[0] for n in (*plan["files"], *plan["record"]))
            ),
        ),
        ("downloads", _downloads(plan)),
        ("peak memory", f"about {gigabytes(plan['peak_memory'])}"),
        ("free space", gigabytes(plan["free_space"])),
        *((("staged in", plan["staged"]),) if "staged" in plan else ()),
    ):
        table.add_row(name, value)
    show(table)
    show_notes(plan["notes"])


def _downloads(plan: dict[str, Any]) -> str:
    if not plan["download"]:
        return "nothing"
    if plan["download_disk"] == plan["download"]:
        return gigabytes(plan["download"])
    return f"about {gigabytes(plan['download'])} in several passes, {gigabytes(plan['download_disk'])} on the disk at a time"


def show_result(result: Result, *, quiet: bool) -> None:
    """Show the outcome of a conversion: what changed first, what to do next last."""
    if quiet:
        return
    size = sum(s["bytes"] for s in result.record["shards"].values())
    resumed = f" (resumed: {result.resumed} shards)" if result.resumed else ""
    how = " (was there already)" if result.already else resumed
    show(f"wrote {gigabytes(size)} to {result.folder}{how}")
    verification = None if result.verification is None else result.verification.as_dict()
    if verification:
        show_verification(verification)
    show_notes([*result.notes, *result.advice])
    if verification is None or verification["passed"]:
        show_next(result)
    if verification and (bad := summary.damage(verification)):
        show(f"{bad}. Try: {'; '.join(result.remedies)}")


def show_verification(verification: dict[str, Any]) -> None:
    """Show what was found: first what changed, then the figures, then that the files are valid."""
    show(summary.finding(verification))
    show(verification_table(verification))
    show(summary.files_line(verification))


def show_next(result: Result) -> None:
    """Show the commands that come next, ready to copy."""
    folder = shlex.quote(str(result.folder))
    trust = ", trust_remote_code=True" if result.custom_code else ""
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(result.folder))}{trust})"
    python = f"from transformers import AutoModelForCausalLM; print({load})"
    commands = {
        "load": f"python -c {shlex.quote(python)}",
        "bench": f"surgery bench {folder}" if result.has_zeros else "",
        "train": f"python {folder}/finetune/finetune.py --help",
        "publish": f"surgery push {folder} OWNER/NAME" if result.verification else "",
    }
    show("Next:")
    for name, command in commands.items():
        if command:
            show(f"  {name:8} {command}")


def report_failure(folder: Path) -> None:
    click.echo(f"error: {folder} does not pass its verification", err=True)
    click.echo(
        f"hint: {folder / 'surgery.json'} names what failed; the output stays for you to look at",
        err=True,
    )


def show_notes(notes: list[str]) -> None:
    for note in notes:
        show(f"note: {note}")


def verification_table(verification: dict[str, Any]) -> Table:
    """Return the rows of a verification; checks of files only where they fail."""
    sample = verification.get("sample") or {}
    where = ""
    if sample:
        where = f", on {sample['sequences']} × {sample['length']} tokens of {sample['source']}"
    table = Table(title=f"Checks and figures{where}", title_justify="left")
    for column in ("check", "value", "limit", ""):
        table.add_column(column, justify="left" if column == "check" else "right")
    for row in verification["rows"]:
        if row["passed"] and row.get("key") in summary.FILES:
            continue
        limit = f"{row['relation']} {number(row['limit'])}" if "limit" in row else ""
        mark = ("ok" if row["passed"] else "FAILED") if limit else ""
        table.add_row(row["check"], number(row["value"]), limit, mark)
        detail = _detail(row)
        if detail:
            shown = detail[:5] + (["…"] if len(detail) > 5 else [])
            table.add_row("  " + "\n  ".join(shown), "", "", "")
    return table


def _detail(row: dict[str, Any]) -> list[str]:
    """Return the further lines of a row, where a person should see them."""
    if row["passed"] and not row.get("warns") and row.get("key") != "config_fields_ignored":
        return []
    return list(row["detail"]) or [f"layer {i}: {number(v)}" for i, v in row.get("layers", ())]


def number(value: Any) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

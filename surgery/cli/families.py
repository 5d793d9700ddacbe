"""`surgery families`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import click


@click.command("families")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def families_command(name: str | None, as_json: bool) -> None:
    """List the supported architectures: how many, or what can be done with the one called NAME.

    \b
    Examples:
      surgery families
      surgery families olmo3
      surgery families --json
    """
    from surgery.cli import screen

    if name is not None:
        return _one(name, as_json)
    if as_json:
        return screen.echo_json(_all())
    _counts()


def _counts() -> None:
    from rich.table import Table

    from surgery.cli import screen
    from surgery.families.coverage import KINDS, OPERATIONS, measured

    found = measured()
    table = Table(
        title=f"model types of transformers {found.transformers} that each operation works on",
        title_justify="left",
    )
    table.add_column("operation")
    for kind, words in KINDS.items():
        table.add_column(f"{words}, of {len(found.rows[kind])}", justify="right")
        table.add_column(f"dense, of {found.sorts(kind)['dense']}", justify="right")
    table.add_column("commonest reason for the others")
    for operation in OPERATIONS:
        why = found.commonest(operation)
        counts = [
            str(found.count(kind, operation, sort)) for kind in KINDS for sort in ("", "dense")
        ]
        table.add_row(operation, *counts, f"{why[0]} ({why[1]})" if why else "")
    screen.show(table)
    screen.show_notes(
        [
            *(f"{words}: {_sorts(found.sorts(kind))}" for kind, words in KINDS.items()),
            "upcycle, carve, memory and splinify need dense MLPs: they refuse mixtures by design",
            "surgery families NAME: one model_type, with the reason for whatever does not work",
        ]
    )


def _sorts(counts: Mapping[str, int]) -> str:
    """Return how many types there are of each sort, in words."""
    from surgery.families.coverage import SORTS

    return ", ".join(f"{count} {SORTS[sort]}" for sort, count in counts.items())


def _one(name: str, as_json: bool) -> None:
    from rich.table import Table

    from surgery.cli import screen
    from surgery.errors import UsageError
    from surgery.families.coverage import OPERATIONS, works

    rows = [r for r in _all()["types"] if r["model_type"] == name]
    if not rows:
        near = difflib.get_close_matches(name, {r["model_type"] for r in _all()["types"]}, 3)
        raise UsageError(
            f"no model_type {name!r} was measured",
            f"nearest: {', '.join(near)}" if near else "`surgery families --json` lists all",
        )
    if as_json:
        return screen.echo_json(rows)
    for row in rows:
        table = Table(title=f"{name} ({row['kind']})", title_justify="left")
        for column in ("operation", "works", "how, or why not"):
            table.add_column(column)
        for operation in OPERATIONS:
            cell = row[operation]
            told = ", ".join(row["native"]) if operation == "upcycle" and row["native"] else cell
            table.add_row(operation, "yes" if works(cell) else "no", told)
        screen.show(table)
    screen.show_notes(
        ["stock: a model that loads as it is; code: a custom-code block, saved with the checkpoint"]
    )


def _all() -> dict[str, Any]:
    from surgery.families.coverage import KINDS, OPERATIONS, measured
    from surgery.families.targets import ROUTES

    found = measured()
    types = [
        {
            "model_type": t,
            "kind": words,
            "sort": found.sort(kind, t),
            "native": [r.target for r in ROUTES if r.source == t] if kind == "causal" else [],
            **{operation: found.cell(kind, t, operation) for operation in OPERATIONS},
        }
        for kind, words in KINDS.items()
        for t in sorted(found.rows[kind])
    ]
    counts = {k: {o: found.count(k, o) for o in OPERATIONS} for k in KINDS}
    dense = {k: {o: found.count(k, o, "dense") for o in OPERATIONS} for k in KINDS}
    return {
        "transformers": found.transformers,
        "sorts": {k: found.sorts(k) for k in KINDS},
        "counts": counts,
        "dense": dense,
        "types": types,
    }

"""`surgery families`."""

from __future__ import annotations

from typing import Any

import click


@click.command("families")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def families_command(as_json: bool) -> None:
    """List the supported architectures and what each operation can do with them.

    \b
    Examples:
      surgery families
      surgery families --json
    """
    from rich.table import Table

    from surgery.cli import screen

    rows = _rows()
    if as_json:
        return screen.echo_json(rows)
    table = Table(title=f"{len(rows)} families; every one can be inspected", title_justify="left")
    for column in (
        "model_type",
        "MLP",
        "activation",
        "upcycle to",
        "relufy",
        "carve, memory, splinify",
    ):
        table.add_column(column)
    for r in rows:
        table.add_row(
            r["model_type"],
            r["mlp"],
            r["activation"],
            ", ".join(r["upcycle"]),
            ", ".join(r["relufy"]),
            "yes" if r["blocks"] else "",
        )
    screen.show(table)
    screen.show_notes(
        [
            "surgery, with code, and the last column: custom code, which is saved with the "
            "checkpoint and needs trust_remote_code; for language models only"
        ]
    )


def _rows() -> list[dict[str, Any]]:
    from surgery.families import known
    from surgery.families.targets import ROUTES

    blocks = {f.model_type: not f.is_moe for f in known().values()}
    return [
        {
            "model_type": f.model_type,
            "mlp": ("experts, " if f.is_moe else "") + ("gated" if f.gated else "plain"),
            "activation": f.activation,
            "upcycle": [r.target for r in ROUTES if r.source == f.model_type]
            + ["surgery"] * blocks[f.model_type],
            "relufy": ["stock"] * bool(f.activation_key)
            + ["with code"] * bool(f.mlp and blocks[f.model_type]),
            "blocks": blocks[f.model_type],
        }
        for f in known().values()
    ]

"""`surgery demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from surgery.cli.screen import Bars
    from surgery.workflow.convert import Result

RECIPES = {"upcycled": "demo-upcycle", "relufied": "demo-relufy"}


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="surgery-demo",
    show_default=True,
    help="Output folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars and no table.")
def demo_command(out: Path, as_json: bool, quiet: bool) -> int:
    """Upcycle and relufy the model that comes with the package, verify both, and print what
    happened. No network.

    \b
    Examples:
      surgery demo
      surgery demo --out /tmp/demo --json
    """
    from surgery.cli import screen

    bars = screen.Bars(quiet=quiet or as_json)
    results = {name: _convert(recipe, out / name, bars) for name, recipe in RECIPES.items()}
    rows = _rows(results)
    if as_json:
        screen.echo_json(rows)
    elif not quiet:
        _show(rows, out)
    return 0 if all(r["passed"] for r in rows) else 1


def _convert(recipe: str, out: Path, bars: Bars) -> Result:
    from surgery.workflow.convert import convert_alone
    from surgery.workflow.recipe import apply, load, open_source

    chosen = load(recipe)
    source = open_source(chosen)
    return convert_alone(source, apply(chosen, source), out, command="surgery demo", observer=bars)


def _rows(results: dict[str, Result]) -> list[dict[str, Any]]:
    from surgery.analysis.weigh import weigh
    from surgery.demo import MODEL
    from surgery.storage import open_checkpoint

    rows = []
    for name, folder in {"source": MODEL, **{n: r.folder for n, r in results.items()}}.items():
        checkpoint = open_checkpoint(folder)
        weights = weigh(checkpoint, checkpoint.config)
        result = results.get(name)
        checks = (
            {r.key: r.value for r in result.verification.rows}
            if result and result.verification
            else {}
        )
        rows.append(
            {
                "model": name,
                "architecture": checkpoint.config["architectures"][0],
                "parameters": weights.parameters(),
                "active_parameters": weights.active(),
                "activation": checkpoint.config["hidden_act"],
                "perplexity": checks.get("perplexity.output.evaluation"),
                "max_logit_difference": checks.get("logits.difference"),
                "passed": result.verification.passed if result and result.verification else True,
                "folder": str(folder),
            }
        )
    if (relufied := results["relufied"].verification) is not None:
        rows[0]["perplexity"] = next(
            r.value for r in relufied.rows if r.key == "perplexity.source.evaluation"
        )
    return rows


def _show(rows: list[dict[str, Any]], out: Path) -> None:
    from rich.table import Table

    from surgery.cli import screen

    table = Table(title="The embedded model, upcycled and relufied", title_justify="left")
    for column in (
        "",
        "architecture",
        "parameters",
        "active",
        "activation",
        "perplexity",
        "max |Δlogit|",
        "verified",
    ):
        table.add_column(
            column,
            justify="right"
            if column in ("parameters", "active", "perplexity", "max |Δlogit|")
            else "left",
        )
    for r in rows:
        delta = (
            "" if r["max_logit_difference"] is None else screen.number(r["max_logit_difference"])
        )
        table.add_row(
            r["model"],
            r["architecture"],
            f"{r['parameters']:,}",
            f"{r['active_parameters']:,}",
            r["activation"],
            screen.number(r["perplexity"]),
            delta,
            "" if r["model"] == "source" else "yes" if r["passed"] else "NO",
        )
    screen.show(table)
    screen.show(
        "Upcycling kept the function: the fp32 logits are the same. Relufying changed it; the perplexity shows by how much.\n"
        f"Both load with transformers: AutoModelForCausalLM.from_pretrained({str(out / 'upcycled')!r})"
    )

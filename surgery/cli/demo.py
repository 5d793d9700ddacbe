"""`surgery demo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.proof import verdict

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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
def demo_command(out: Path, as_json: bool, quiet: bool) -> int:
    """Upcycle and relufy the model that comes with the package, verify both, and print what
    happened, in order. It takes about a minute and needs no network.

    \b
    Examples:
      surgery demo
      surgery demo --out /tmp/demo --json
    """
    from surgery.cli import screen

    bars, shows = screen.Bars(quiet=quiet or as_json), not (quiet or as_json)
    if shows:
        screen.show(_beginning())
    results: dict[str, Result] = {}
    for number, (name, recipe) in enumerate(RECIPES.items(), 1):
        if shows:
            screen.show(f"\n{number}. {_command(recipe, out / name)}")
        results[name] = _convert(recipe, out / name, bars)
        if shows:
            _show(results[name])
    rows = _rows(results)
    if as_json:
        screen.echo_json(rows)
    elif shows:
        _show_rows(rows)
        _show_next(results)
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
                "perplexity": _perplexity(result, "output"),
                "max_logit_difference": checks.get("logits.difference"),
                "passed": result.verification.passed if result and result.verification else True,
                "folder": str(folder),
            }
        )
    rows[0]["perplexity"] = _perplexity(results["relufied"], "source")
    return rows


def _perplexity(result: Result | None, model: str) -> float | None:
    """Return the perplexity of a model, where quality was measured: not of the same function."""
    rows = result.verification.rows if result and result.verification else ()
    found = (r.models[model]["perplexity"] for r in rows if r.key == verdict.MEAN)
    return next(found, None)


# --- on the screen --------------------------------------------------------------------------------


def _beginning() -> str:
    """Return what is going to be operated on."""
    from surgery.analysis.weigh import weigh
    from surgery.demo import MODEL
    from surgery.report.inspection import quantity
    from surgery.storage import open_checkpoint

    checkpoint = open_checkpoint(MODEL)
    weights = weigh(checkpoint, checkpoint.config)
    size = f"{len(weights.layers)} layers, {quantity(weights.parameters(), digits=3)} parameters"
    return f"The embedded model: a {weights.model_type} of {size}, trained on speeches"


def _command(recipe: str, out: Path) -> str:
    """Return the command that makes this output alone."""
    from surgery.quoting import command

    return command("surgery", "run", recipe, "--out", out)


def _show(result: Result) -> None:
    """Print what was done, and what that did to the function."""
    from surgery.cli import screen
    from surgery.report import methods

    already = ", and was there already" if result.already else ""
    for step in result.record["recipe"]:
        screen.show(f"   Done: {methods.done(step['operation'], step)}{already}")
    if result.verification:
        verification = result.verification.as_dict()
        screen.show(f"   {verdict.headline(verification)}")
        screen.show(f"   {verdict.files_checked(verification)}")


def _show_rows(rows: list[dict[str, Any]]) -> None:
    """Print the models side by side."""
    from surgery.cli import screen

    table = screen.columns("", "parameters", "active", "activation", "architecture")
    for row in rows:
        sizes = (f"{row['parameters']:,}", f"{row['active_parameters']:,}")
        table.add_row(row["model"], *sizes, row["activation"], row["architecture"])
    screen.show("")
    screen.show(table)


def _show_next(results: Mapping[str, Result]) -> None:
    """Print what to do with the two outputs, and with a model of one's own."""
    from surgery.cli import following, outcome, screen

    relufied = results["relufied"]
    outcome.show_next(relufied.folder, relufied.record)
    upcycled = results["upcycled"].folder
    screen.show(f"  {'load':<11}{following.load(str(upcycled))}")
    screen.show("\nWith a model of your own:")
    for command in ("inspect", "relufy --dry-run", "upcycle --dry-run"):
        screen.show(f"  surgery {command} ./my-model")

"""`surgery run` and `surgery recipes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from surgery.cli.options import CommonOptions, execute, writing
from surgery.cli.paths import LOCATION


@click.command("run")
@click.argument("name", type=LOCATION, metavar="RECIPE")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the recipe; repeat it."
)
@writing
def run_command(options: dict[str, Any], name: str, changes: Sequence[str]) -> int:
    """Do what RECIPE says: a YAML file, or a shipped recipe by its name (see `surgery recipes`).
    All of its operations are one pass over the disk. Every output holds the recipe.yaml that makes
    it again.

    --set operations.0.experts=4 changes the first operation; values are YAML.

    \b
    Examples:
      surgery run demo-upcycle --out /tmp/demo
      surgery run llama2-7b-relufy --set source=./my-llama --dry-run
      surgery run qwen3-moe --set operations.0.experts=16 --set max_shard_size=2GB
      surgery run OUTPUT/recipe.yaml --out again
    """
    from surgery.workflow import recipe

    chosen = recipe.load(name, changes)
    if chosen.push and not options["push"]:
        options |= {"push": chosen.push.repo, "private": chosen.push.private, "pr": chosen.push.pr}
    options["no_verify"] |= not chosen.verify
    if chosen.require and options["max_perplexity"] is None:
        options["max_perplexity"] = chosen.require.max_perplexity
    size = None if chosen.max_shard_size is None else str(chosen.max_shard_size)
    common = CommonOptions(
        model=recipe.location(chosen),
        revision=chosen.revision,
        strip_prefix=chosen.strip_prefix,
        dequantize=chosen.dequantize,
        dtype=None,
        max_shard_size=size,
        finetune=chosen.finetune,
        **options,
    )
    return execute(common, lambda checkpoint: recipe.apply(chosen, checkpoint))


@click.group("recipes", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def recipes_command(context: click.Context, as_json: bool) -> None:
    """List the recipes that come with the package, each with what it does.

    \b
    Examples:
      surgery recipes
      surgery recipes show llama2-7b-relufy > my.yaml
      surgery recipes schema > recipe.schema.json
    """
    if context.invoked_subcommand:
        return
    from rich.table import Table

    from surgery.cli import screen
    from surgery.workflow import recipe

    if as_json:
        return screen.echo_json(recipe.shipped())
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in recipe.shipped().items():
        table.add_row(name, line)
    screen.show(table)


@recipes_command.command("show")
@click.argument("name", type=LOCATION)
def show(name: str) -> None:
    """Print the recipe NAME, to begin one's own with."""
    from surgery.cli import screen
    from surgery.workflow import recipe

    screen.echo(recipe.read(name), end="")


@recipes_command.command("schema")
def print_schema() -> None:
    """Print the JSON schema of recipes, by which editors complete and check them."""
    from surgery.cli import screen
    from surgery.workflow import recipe

    screen.echo_json(recipe.json_schema())
